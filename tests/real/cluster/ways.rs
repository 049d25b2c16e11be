//! The ways by which kube-apiserver comes to a kubelet through the tunnel.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::webhook::PORT as HOOK;
use crate::certificates::Files;
use crate::network::SERVER;
use crate::tunnel::TestDir;

/// What kube-apiserver is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// The node's own address, where the kubelet listens: no tunnel.
    Direct,
    /// The egress selector, over mutual TLS.
    Egress,
    /// The egress selector, over a unix socket.
    Unix,
    /// Nothing: the node's name leads to the pod, which passes TLS on to the kubelet. What is said to kube-apiserver is
    /// only whether to look at the kubelet's certificate.
    Passthrough {
        /// Whether it does, and so tells whom it means.
        verified: bool,
    },
    /// As [`Self::Passthrough`], but the pod speaks TLS with kube-apiserver, and the edge with the kubelet.
    Terminate {
        /// Whether kube-apiserver looks at the pod's certificate. Else the pod has to ask it where a pod is.
        verified: bool,
    },
    /// As [`Self::Terminate`], but the pod as well speaks TLS with the kubelet, by a certificate that the cluster issues for
    /// it. kube-apiserver does not look at the one that it is shown, which has no node's name.
    Shown,
    /// kubeadm's own flags: nodes have addresses, and the pod catches what is sent to these. kube-apiserver looks at each
    /// kubelet's certificate.
    Intercepted,
}

impl Way {
    pub(crate) fn apiserver_flags(self, place: &TestDir) -> Vec<String> {
        let dir = place.path();
        let authority = || format!("--kubelet-certificate-authority={}", place.files.ca.display());
        let transport = match self {
            Self::Direct => return vec!["--kubelet-preferred-address-types=InternalIP".to_owned()],
            Self::Egress => {
                let (cert, key) = (dir.join("egress-client.crt"), dir.join("egress-client.key"));
                place.authority.0.client(APISERVER).unwrap().write(&cert, &key).unwrap();
                let tls = json!({"caBundle": place.files.ca, "clientCert": cert, "clientKey": key});
                json!({"tcp": {"url": format!("https://{SERVER}:8000"), "tlsConfig": tls}})
            }
            Self::Unix => json!({"uds": {"udsName": socket(place)}}),
            Self::Passthrough { verified } | Self::Terminate { verified } => {
                return if verified { vec![authority()] } else { vec![] };
            }
            Self::Shown => return vec![],
            Self::Intercepted => {
                let types = "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname";
                return vec![types.to_owned(), authority()];
            }
        };
        let file = dir.join("egress.json");
        std::fs::write(&file, selector(&transport).to_string()).unwrap();
        vec![format!("--egress-selector-config-file={}", file.display())]
    }

    /// What the config of a pod has for it.
    pub(crate) fn tables(self, place: &TestDir) -> String {
        let Files { ca, cert, key } = &place.files;
        match self {
            Self::Direct => String::new(),
            Self::Egress => format!(
                "[mode.cloud.egress]\nlisten = \"{SERVER}:8000\"\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"{APISERVER}\"]\n"
            ),
            Self::Unix => format!("[mode.cloud.egress]\nlisten = \"unix:{}\"\n", socket(place).display()),
            Self::Passthrough { .. } => format!(
                "[mode.cloud.https]\nmode = \"passthrough\"\nlisten_ip = \"{SERVER}\"\naddr = {{ \"10250\" = \"127.0.0.1:10250\", \"{HOOK}\" = \"127.0.0.1:{HOOK}\" }}\nauth = \"none\"\n"
            ),
            Self::Terminate { .. } => {
                let Files { cert, key, .. } = shown(place, "node1");
                format!(
                    "[mode.cloud.https]\nlisten_ip = \"{SERVER}\"\naddr = {{ \"10250\" = \"127.0.0.1:10250\", \"10263\" = \"host\" }}\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"{APISERVER}\"]\n"
                )
            }
            Self::Shown => {
                let (dir, believed) = (place.path().join("pki"), target_ca(place));
                std::fs::copy(ca, &believed).unwrap();
                let (server, shown) = (dir.join("server.pem"), dir.join("proxy-client.pem"));
                format!(
                    "[mode.cloud.addresses]\nkubernetes = true\n[mode.cloud.csr]\nprofiles = [\"server\", \"proxy-client\"]\n\
                     dir = {dir:?}\nservices = [\"tunnel-cloud\"]\n[mode.cloud.https]\nlisten_ip = \"{SERVER}\"\n\
                     addr = {{ \"10250\" = \"127.0.0.1:10250\" }}\ncert = {server:?}\nkey = {server:?}\nclient_ca = {ca:?}\n\
                     names = [\"{APISERVER}\"]\ntarget_cert = {shown:?}\ntarget_ca = {believed:?}\n"
                )
            }
            Self::Intercepted => "[mode.cloud.addresses]\nkubernetes = true\n[mode.cloud.intercept]\n\
                             networks = [\"10.77.0.0/16\", \"fd77::/16\"]\n"
                .to_owned(),
        }
    }

    /// What an edge's config has for it.
    pub(crate) fn edge_tables(self, place: &TestDir) -> String {
        let Self::Terminate { .. } = self else { return String::new() };
        let Files { cert, key, .. } = kubelet_client(place);
        format!("[mode.edge.https]\ncert = {cert:?}\nkey = {key:?}\n")
    }

    /// Whether a pod of the tunnel asks kube-apiserver for what is on which node.
    pub(crate) fn asks(self) -> bool {
        matches!(self, Self::Egress | Self::Terminate { verified: false } | Self::Shown | Self::Intercepted)
    }
}

/// What a pod of the tunnel shows kube-apiserver from now on: a certificate for this name.
pub(crate) fn shown(place: &TestDir, name: &str) -> Files {
    let at = |end: &str| place.path().join(format!("https.{end}"));
    let files = Files { ca: place.files.ca.clone(), cert: at("crt"), key: at("key") };
    place.authority.0.server(&[name]).unwrap().write(&files.cert, &files.key).unwrap();
    files
}

/// What a kubelet's clients show it.
pub(crate) fn kubelet_client(place: &TestDir) -> Files {
    let at = |end: &str| place.path().join(format!("kubelet-client.{end}"));
    Files { ca: place.files.ca.clone(), cert: at("crt"), key: at("key") }
}

/// The authorities by which a pod of the tunnel believes kubelets.
pub(crate) fn target_ca(place: &TestDir) -> PathBuf {
    place.path().join("target-ca.crt")
}

fn socket(place: &TestDir) -> PathBuf {
    place.path().join("egress.sock")
}

fn selector(transport: &Value) -> Value {
    json!({
        "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration",
        "egressSelections": [
            {"name": "cluster", "connection": {"proxyProtocol": "HTTPConnect", "transport": transport}},
        ],
    })
}

/// What kube-apiserver's certificates call it.
pub(crate) const APISERVER: &str = "kube-apiserver";
