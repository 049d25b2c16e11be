//! The ways in which kube-apiserver reaches a kubelet through the tunnel.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::webhook::PORT as HOOK;
use crate::certificates::Files;
use crate::network::SERVER;
use crate::tunnel::TestDir;

/// A way in which kube-apiserver is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// The node's own address, where the kubelet listens, with kubeadm's flags: no tunnel.
    Direct,
    /// The egress selector, over mutual TLS.
    Egress,
    /// The egress selector with the files of `tunnel init`, where the tutorial installs them, and kubeadm's flags.
    Files,
    /// The egress selector, over a unix socket.
    Unix,
    /// No kube-apiserver config for the tunnel: the node's name resolves to the server, which passes TLS on to the
    /// kubelet. The only kube-apiserver flag is whether to verify the kubelet's certificate.
    Passthrough {
        /// Whether kube-apiserver verifies it, and so names the node in its handshake.
        verified: bool,
    },
    /// Like [`Self::Passthrough`], but the server speaks TLS with kube-apiserver, and the edge with the kubelet.
    Terminate {
        /// Whether kube-apiserver verifies the server's certificate. Otherwise the server must query it for the node
        /// of a pod.
        verified: bool,
    },
    /// Like [`Self::Terminate`], but the server also speaks TLS with the kubelet, with a certificate that the cluster
    /// issues for it. kube-apiserver does not verify the server's certificate, which has no node's name.
    Shown,
    /// kubeadm's own flags: nodes have addresses, and the server intercepts connections to them. kube-apiserver
    /// verifies each kubelet's certificate.
    Intercepted,
}

impl Way {
    pub(crate) fn apiserver_flags(self, place: &TestDir) -> Vec<String> {
        let dir = place.path();
        let authority = || format!("--kubelet-certificate-authority={}", place.files.ca.display());
        let transport = match self {
            Self::Direct => return vec![TYPES.to_owned()],
            Self::Egress => {
                let (cert, key) = (dir.join("egress-client.crt"), dir.join("egress-client.key"));
                place.authority.0.client(APISERVER).unwrap().write(&cert, &key).unwrap();
                let tls = json!({"caBundle": place.files.ca, "clientCert": cert, "clientKey": key});
                json!({"tcp": {"url": format!("https://{SERVER}:8000"), "tlsConfig": tls}})
            }
            Self::Files => {
                let file = "/etc/kubernetes/tunnel/egress-selector.yaml";
                return vec![format!("--egress-selector-config-file={file}"), TYPES.to_owned()];
            }
            Self::Unix => json!({"uds": {"udsName": socket(place)}}),
            Self::Passthrough { verified } | Self::Terminate { verified } => {
                return if verified { vec![authority()] } else { vec![] };
            }
            Self::Shown => return vec![],
            Self::Intercepted => return vec![TYPES.to_owned(), authority()],
        };
        let file = dir.join("egress.json");
        std::fs::write(&file, selector(&transport).to_string()).unwrap();
        vec![format!("--egress-selector-config-file={}", file.display())]
    }

    /// Returns the tables of a server's config for this way.
    pub(crate) fn tables(self, place: &TestDir) -> String {
        let Files { ca, cert, key } = &place.files;
        match self {
            Self::Direct | Self::Files => String::new(),
            Self::Egress => format!(
                "[server.egress]\nlisten = \"{SERVER}:8000\"\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"{APISERVER}\"]\n"
            ),
            Self::Unix => format!("[server.egress]\nlisten = \"unix:{}\"\n", socket(place).display()),
            Self::Passthrough { .. } => format!(
                "[server.https]\nmode = \"passthrough\"\nlisten_ip = \"{SERVER}\"\nports = {{ \"10250\" = \"127.0.0.1:10250\", \"{HOOK}\" = \"127.0.0.1:{HOOK}\" }}\nauth = \"none\"\n"
            ),
            Self::Terminate { .. } => {
                let Files { cert, key, .. } = shown(place, "node1");
                format!(
                    "[server.https]\nlisten_ip = \"{SERVER}\"\nports = {{ \"10250\" = \"127.0.0.1:10250\", \"10263\" = \"host\" }}\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"{APISERVER}\"]\n"
                )
            }
            Self::Shown => {
                let (dir, believed) = (place.path().join("pki"), target_ca(place));
                std::fs::copy(ca, &believed).unwrap();
                let (server, shown) = (dir.join("server.pem"), dir.join("proxy-client.pem"));
                format!(
                    "[server.connect]\nlisten = \"{SERVER}:22\"\n[server.addresses]\nkubernetes = true\n[server.csr]\nprofiles = [\"server\", \"proxy-client\"]\n\
                     dir = {dir:?}\nservices = [\"tunnel-cloud\"]\n[server.https]\nlisten_ip = \"{SERVER}\"\n\
                     ports = {{ \"10250\" = \"127.0.0.1:10250\" }}\ncert = {server:?}\nkey = {server:?}\nclient_ca = {ca:?}\n\
                     names = [\"{APISERVER}\"]\ntarget_cert = {shown:?}\ntarget_ca = {believed:?}\n"
                )
            }
            Self::Intercepted => "[server.addresses]\nkubernetes = true\n[server.intercept]\n\
                             networks = [\"10.77.0.0/16\", \"fd77::/16\"]\n"
                .to_owned(),
        }
    }

    /// Returns the tables of an edge's config for this way.
    pub(crate) fn edge_tables(self, place: &TestDir) -> String {
        let Self::Terminate { .. } = self else { return String::new() };
        let Files { cert, key, .. } = kubelet_client(place);
        format!("[edge.target_tls]\ncert = {cert:?}\nkey = {key:?}\n")
    }

    /// Returns true if the tunnel's server queries kube-apiserver for the node of each address or pod.
    pub(crate) fn queries_apiserver(self) -> bool {
        matches!(self, Self::Egress | Self::Terminate { verified: false } | Self::Shown | Self::Intercepted)
    }
}

/// Writes the certificate that the tunnel's server presents to kube-apiserver, with this name.
pub(crate) fn shown(place: &TestDir, name: &str) -> Files {
    let at = |end: &str| place.path().join(format!("https.{end}"));
    let files = Files { ca: place.files.ca.clone(), cert: at("crt"), key: at("key") };
    place.authority.0.server(&[name]).unwrap().write(&files.cert, &files.key).unwrap();
    files
}

/// Returns the files of the certificate that the kubelet's clients present.
pub(crate) fn kubelet_client(place: &TestDir) -> Files {
    let at = |end: &str| place.path().join(format!("kubelet-client.{end}"));
    Files { ca: place.files.ca.clone(), cert: at("crt"), key: at("key") }
}

/// Returns the file of the CAs that the tunnel's server trusts for kubelets.
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

/// kubeadm's flag.
const TYPES: &str = "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname";

/// The name of kube-apiserver in its client certificates.
pub(crate) const APISERVER: &str = "kube-apiserver";
