//! The three kinds of certificates.

use std::path::{Path, PathBuf};

use crate::net::tls::EDGE;

/// What a certificate is for. Signer, subject and usages are YurtTunnel's, so that one cluster's rights serve both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// A pod's, for its ports behind TLS.
    Server,
    /// A pod's, towards kubelets.
    ProxyClient,
    /// An edge's, towards pods.
    Agent,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Server, Self::ProxyClient, Self::Agent];

    /// Its file in a directory: certificate and key.
    pub fn file(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.pem", self.name()))
    }

    /// What it is called in `/readyz`.
    pub fn condition(self) -> &'static str {
        match self {
            Self::Server => "certificate of the server",
            Self::ProxyClient => "certificate of the proxy client",
            Self::Agent => "certificate of the agent",
        }
    }

    /// Its name in settings, in the log, and of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::ProxyClient => "proxy-client",
            Self::Agent => "agent",
        }
    }

    /// Who signs it.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Server => "kubernetes.io/kubelet-serving",
            Self::ProxyClient | Self::Agent => "kubernetes.io/kube-apiserver-client",
        }
    }

    /// The one common name of its subject.
    pub fn common_name(self) -> &'static str {
        match self {
            Self::Server => "system:node:tunnel-server",
            Self::ProxyClient => "tunnel-proxy-client",
            Self::Agent => EDGE.0,
        }
    }

    /// The one organization of its subject.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Server => "system:nodes",
            Self::ProxyClient | Self::Agent => EDGE.1,
        }
    }

    /// What the key may be used for.
    pub fn usages(self) -> [&'static str; 3] {
        let whose = if self == Self::Server { "server auth" } else { "client auth" };
        ["digital signature", "key encipherment", whose]
    }
}
