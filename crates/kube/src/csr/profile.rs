//! The three kinds of certificates.

use std::path::{Path, PathBuf};

use tunnel_net::tls::certificate::EDGE_SUBJECT;

/// The purpose of a certificate. Signer, subject and usages are YurtTunnel's, so that one cluster's roles serve both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// A server's certificate for its TLS listeners.
    Server,
    /// A server's client certificate, presented to kubelets.
    ProxyClient,
    /// An edge's client certificate, presented to servers.
    Edge,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 3] = [Self::Server, Self::ProxyClient, Self::Edge];

    /// Returns the path of the file with certificate and key in this directory.
    pub fn file(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.pem", self.name()))
    }

    /// Returns the name of the readiness condition in `/readyz`.
    pub fn condition(self) -> &'static str {
        match self {
            Self::Server => "server_certificate",
            Self::ProxyClient => "proxy_client_certificate",
            Self::Edge => "agent_certificate",
        }
    }

    /// Returns the name used in the config, in the log and for the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::ProxyClient => "proxy-client",
            Self::Edge => "agent",
        }
    }

    /// Returns the name of the signer.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Server => "kubernetes.io/kubelet-serving",
            Self::ProxyClient | Self::Edge => "kubernetes.io/kube-apiserver-client",
        }
    }

    /// Returns the only common name of the subject.
    pub fn common_name(self) -> &'static str {
        match self {
            Self::Server => "system:node:tunnel-server",
            Self::ProxyClient => "tunnel-proxy-client",
            Self::Edge => EDGE_SUBJECT.0,
        }
    }

    /// Returns the only organization of the subject.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Server => "system:nodes",
            Self::ProxyClient | Self::Edge => EDGE_SUBJECT.1,
        }
    }

    /// Returns the key usages.
    pub fn usages(self) -> [&'static str; 3] {
        let whose = if self == Self::Server { "server auth" } else { "client auth" };
        ["digital signature", "key encipherment", whose]
    }
}
