//! Certificates that a cluster's own signers issue (CertificateSigningRequests): asked for and renewed by those who show
//! them, and approved, or denied, by who alone may.
//!
//! There are three [`Profile`]s, YurtTunnel's. A `Keeper` keeps one file issued: the key is made on this machine and
//! stands with its certificate in that file, which others follow like any file of certificates. An `Approver` looks at
//! what is asked for, and at who asks.

#[cfg(feature = "kubernetes")]
pub mod approver;
#[cfg(feature = "kubernetes")]
pub mod names;
#[cfg(feature = "kubernetes")]
pub mod renewer;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::time::timeout;

use crate::kubernetes::cluster::{Cluster, ClusterError};
use tunnel_net::pki::PkiError;
use tunnel_net::tls::certificate::EDGE;

// The three kinds of certificates.

/// What a certificate is for. Signer, subject and usages are YurtTunnel's, so that one cluster's rights serve both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// A pod's, for its ports behind TLS.
    Server,
    /// A pod's, towards kubelets.
    ProxyClient,
    /// An edge's, towards pods.
    Edge,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Server, Self::ProxyClient, Self::Edge];

    /// Its file in a directory: certificate and key.
    pub fn file(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.pem", self.name()))
    }

    /// What it is called in `/readyz`.
    pub fn condition(self) -> &'static str {
        match self {
            Self::Server => "certificate of the server",
            Self::ProxyClient => "certificate of the proxy client",
            Self::Edge => "certificate of the agent",
        }
    }

    /// Its name in settings, in the log, and of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::ProxyClient => "proxy-client",
            Self::Edge => "agent",
        }
    }

    /// Who signs it.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Server => "kubernetes.io/kubelet-serving",
            Self::ProxyClient | Self::Edge => "kubernetes.io/kube-apiserver-client",
        }
    }

    /// The one common name of its subject.
    pub fn common_name(self) -> &'static str {
        match self {
            Self::Server => "system:node:tunnel-server",
            Self::ProxyClient => "tunnel-proxy-client",
            Self::Edge => EDGE.0,
        }
    }

    /// The one organization of its subject.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Server => "system:nodes",
            Self::ProxyClient | Self::Edge => EDGE.1,
        }
    }

    /// What the key may be used for.
    pub fn usages(self) -> [&'static str; 3] {
        let whose = if self == Self::Server { "server auth" } else { "client auth" };
        ["digital signature", "key encipherment", whose]
    }
}

// Why there is no certificate, and asking kube-apiserver in bounded time.

/// Why there is no new certificate.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// kube-apiserver did not do what we asked.
    #[error("{0}")]
    Cluster(ClusterError),
    /// A role lacks a verb.
    #[error("{0}; what rights asking and approving need stands in deploy/kustomize/csr")]
    Forbidden(String),
    /// The object is not there, or was changed meanwhile.
    #[error("it has changed meanwhile, or is gone")]
    Gone,
    /// There is no such Service.
    #[error(
        "there is no Service {0} in namespace {1}: make it, or take it out of services in [mode.cloud.csr]"
    )]
    NoService(String, String),
    /// The watch of requests broke.
    #[error("kube-apiserver: {0}")]
    Watch(String),
    /// Somebody has denied it.
    #[error("CertificateSigningRequest {name} was denied: {why}")]
    Denied {
        /// Its name.
        name: String,
        /// Who denied it says why.
        why: String,
    },
    /// The signer could not sign it.
    #[error("CertificateSigningRequest {name} was approved, and its signer has failed: {why}")]
    Failed {
        /// Its name.
        name: String,
        /// What the signer says.
        why: String,
    },
    /// Nobody has approved or signed it in time.
    #[error(
        "CertificateSigningRequest {name} has no certificate after {SIGNED_WITHIN:?}: it is {state}; check that `tunnel \
         approve` runs, and that kube-controller-manager signs for {signer}"
    )]
    Unsigned {
        /// Its name.
        name: String,
        /// How far it came.
        state: &'static str,
        /// Who should have signed it.
        signer: &'static str,
    },
    /// What was signed is of no use to this machine.
    #[error(
        "what was signed ends on {until}, and this machine's clock says {now}: set the clock; if it is right, the signer has to \
         sign for longer"
    )]
    Over {
        /// Its end.
        until: String,
        /// The time here.
        now: String,
    },
    /// It could not be made or written.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The directory cannot be written to.
    #[error("cannot write to {}: {cause}; make the directory, and let this user write to it", .dir.display())]
    Directory {
        /// Which.
        dir: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
}

impl From<ClusterError> for CsrError {
    fn from(cause: ClusterError) -> Self {
        match cause {
            ClusterError::Forbidden(what) => Self::Forbidden(what),
            cause => Self::Cluster(cause),
        }
    }
}

/// One piece of work at kube-apiserver, which takes milliseconds.
pub(crate) async fn within<T>(work: impl Future<Output = kube::Result<T>>) -> Result<T, CsrError> {
    match timeout(ANSWERED_WITHIN, work).await {
        Err(_) => Err(ClusterError::Silent.into()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Err(CsrError::Gone),
        Ok(done) => done.map_err(|cause| ClusterError::from(cause).into()),
    }
}

/// For each piece of work at kube-apiserver.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// From the request to the certificate; an hour later Kubernetes forgets what it has decided.
pub(crate) const SIGNED_WITHIN: Duration = Duration::from_secs(15 * 60);

// By what kube-apiserver is reached: its signers' authority is often the one by which it is believed, so that a server with
// one of these could pose as it.

/// The names and addresses of kube-apiserver, as far as they are known.
#[derive(Debug, Clone, Default)]
pub struct Apiserver(BTreeSet<String>);

impl Apiserver {
    /// `hosts` are known beside the names that it has in every cluster. Those of loopback do not count: who listens there
    /// has the machine already, and each pod's certificate has them.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Self {
        let hosts = hosts.into_iter().map(|host| plain(&host));
        Self(hosts.filter(|host| !is_loopback(host)).collect())
    }

    /// What this cluster's files say, and the Service `kubernetes` with its endpoints, which all clusters have.
    ///
    /// # Errors
    ///
    /// kube-apiserver does not answer, or does not let us.
    pub(crate) async fn look_up(cluster: &Cluster, client: &Client) -> Result<Self, CsrError> {
        let services: Api<Service> = Api::namespaced(client.clone(), DEFAULT);
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), DEFAULT);
        let service = within(services.get_opt(KUBERNETES)).await?;
        let slice = within(slices.get_opt(KUBERNETES)).await?;
        let own = service.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let endpoints = slice.into_iter().flat_map(|slice| slice.endpoints).flat_map(|one| one.addresses);
        Ok(Self::new(cluster.apiserver_names().await?.into_iter().chain(own).chain(endpoints)))
    }

    /// Whether this name or address, or one that it covers, is kube-apiserver's.
    pub fn is_at(&self, name: &str) -> bool {
        let name = plain(name);
        name.contains('*')
            || name == KUBERNETES
            || name.starts_with("kubernetes.default")
            || self.0.contains(&name)
    }
}

/// In the one form in which two of them are compared: IPv4 that is dressed as IPv6 is IPv4.
fn plain(host: &str) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
    name.parse::<IpAddr>().map_or(name, |ip| ip.to_canonical().to_string())
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback())
}

/// Its Service, and the EndpointSlice of that.
const KUBERNETES: &str = "kubernetes";
const DEFAULT: &str = "default";
