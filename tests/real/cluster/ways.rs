//! The ways by which kube-apiserver comes to a kubelet through the tunnel.

use serde_json::{Value, json};

use super::POD;
use crate::tunnel::TestDir;

/// What kube-apiserver is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// The egress selector, over mutual TLS.
    Egress,
    /// The egress selector, over a unix socket.
    Unix,
}

impl Way {
    pub(super) fn apiserver_flags(self, place: &TestDir) -> Vec<String> {
        let dir = place.path();
        let transport = match self {
            Self::Egress => {
                let (cert, key) = (dir.join("egress-client.crt"), dir.join("egress-client.key"));
                place.authority.0.client("kube-apiserver").unwrap().write(&cert, &key).unwrap();
                let tls = json!({"caBundle": place.files.ca, "clientCert": cert, "clientKey": key});
                json!({"tcp": {"url": format!("https://{POD}:8443"), "tlsConfig": tls}})
            }
            Self::Unix => json!({"uds": {"udsName": dir.join("egress.sock")}}),
        };
        let file = dir.join("egress.json");
        std::fs::write(&file, selector(&transport).to_string()).unwrap();
        vec![format!("--egress-selector-config-file={}", file.display())]
    }
}

fn selector(transport: &Value) -> Value {
    json!({
        "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration",
        "egressSelections": [
            {"name": "cluster", "connection": {"proxyProtocol": "HTTPConnect", "transport": transport}},
        ],
    })
}
