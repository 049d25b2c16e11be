//! Certificates issued by a cluster's signers through CertificateSigningRequests: requested and renewed by servers and
//! edges, and approved or denied by the approver.
//!
//! There are three [`Profile`]s, compatible with YurtTunnel. A `CertificateRenewer` keeps one file up to date: it
//! generates the key locally and stores it with its certificate in that file, which is reloaded like any other. An
//! `Approver` authorizes requests by their content and requester.

pub mod approver;
pub mod names;
pub mod renewer;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::time::timeout;

use crate::cluster::{Cluster, ClusterError};
use tunnel_net::pki::PkiError;
use tunnel_net::tls::certificate::EDGE;

// The three kinds of certificates.

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
            Self::Edge => EDGE.0,
        }
    }

    /// Returns the only organization of the subject.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Server => "system:nodes",
            Self::ProxyClient | Self::Edge => EDGE.1,
        }
    }

    /// Returns the key usages.
    pub fn usages(self) -> [&'static str; 3] {
        let whose = if self == Self::Server { "server auth" } else { "client auth" };
        ["digital signature", "key encipherment", whose]
    }
}

// Errors of issuing, and requests to kube-apiserver with a timeout.

/// The reason why no new certificate was issued.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// A request to kube-apiserver failed.
    #[error("{0}")]
    Cluster(ClusterError),
    /// A role lacks a verb.
    #[error("{0}; see deploy/kustomize/csr for the roles that requesters and approvers need")]
    Forbidden(String),
    /// The object does not exist, or was changed meanwhile.
    #[error("the object was changed or deleted meanwhile")]
    ChangedOrDeleted,
    /// The Service does not exist.
    #[error(
        "Service {0} does not exist in namespace {1}; create it, or remove it from services in [server.csr]"
    )]
    NoService(String, String),
    /// The watch of requests failed.
    #[error("kube-apiserver: {0}")]
    Watch(String),
    /// The request was denied.
    #[error("CertificateSigningRequest {name} was denied: {why}")]
    Denied {
        /// Name of the request.
        name: String,
        /// Reason given by the approver.
        why: String,
    },
    /// The signer failed.
    #[error("CertificateSigningRequest {name} was approved, but its signer failed: {why}")]
    Failed {
        /// Name of the request.
        name: String,
        /// Message of the signer.
        why: String,
    },
    /// The request was not approved or signed in time.
    #[error(
        "CertificateSigningRequest {name} was not signed within {SIGNING_TIMEOUT:?}: it is {state}; check that `tunnel \
         approve` runs, and that kube-controller-manager signs for {signer}"
    )]
    Unsigned {
        /// Name of the request.
        name: String,
        /// State of the request.
        state: &'static str,
        /// Signer that should have signed it.
        signer: &'static str,
    },
    /// The signed certificate has already expired according to the local clock.
    #[error(
        "the signed certificate expired on {until}, and the local time is {now}; set the clock, or if it is right, \
         make the signer sign for longer"
    )]
    Expired {
        /// End of validity.
        until: String,
        /// Local time.
        now: String,
    },
    /// A key, request or file could not be created.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The directory is not writable.
    #[error("cannot write to {}: {cause}; create the directory and make it writable for this user", .dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// Error of the operating system.
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

/// Runs one operation at kube-apiserver with a timeout. It normally takes milliseconds.
pub(crate) async fn with_timeout<T>(work: impl Future<Output = kube::Result<T>>) -> Result<T, CsrError> {
    match timeout(OPERATION_TIMEOUT, work).await {
        Err(_) => Err(ClusterError::Silent.into()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
            Err(CsrError::ChangedOrDeleted)
        }
        Ok(done) => done.map_err(|cause| ClusterError::from(cause).into()),
    }
}

/// Timeout for one operation at kube-apiserver.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout from the request to the certificate. Kubernetes deletes decided requests after an hour.
pub(crate) const SIGNING_TIMEOUT: Duration = Duration::from_secs(15 * 60);

// Names and addresses of kube-apiserver. Its signers' CA often issued its own certificate too, so a server certificate
// with one of these names could impersonate it.

/// The known names and addresses of kube-apiserver.
#[derive(Debug, Clone, Default)]
pub struct ApiserverNames(BTreeSet<String>);

impl ApiserverNames {
    /// Adds `hosts` to the names that kube-apiserver has in every cluster. Ignores loopback names: each server's
    /// certificate contains them, and to use them an attacker must already control the machine.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Self {
        let hosts = hosts.into_iter().map(|host| normalized(&host));
        Self(hosts.filter(|host| !is_loopback(host)).collect())
    }

    /// Returns the names from the cluster's config and from the Service `kubernetes` with its endpoints.
    ///
    /// # Errors
    ///
    /// Fails if kube-apiserver does not answer or does not authorize the request.
    pub(crate) async fn look_up(cluster: &Cluster, client: &Client) -> Result<Self, CsrError> {
        let services: Api<Service> = Api::namespaced(client.clone(), DEFAULT);
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), DEFAULT);
        let service = with_timeout(services.get_opt(KUBERNETES)).await?;
        let slice = with_timeout(slices.get_opt(KUBERNETES)).await?;
        let own = service.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let endpoints = slice.into_iter().flat_map(|slice| slice.endpoints).flat_map(|one| one.addresses);
        Ok(Self::new(cluster.apiserver_names().await?.into_iter().chain(own).chain(endpoints)))
    }

    /// Returns true if this name or address, or one that a wildcard covers, belongs to kube-apiserver.
    pub fn is_at(&self, name: &str) -> bool {
        let name = normalized(name);
        name.contains('*')
            || name == KUBERNETES
            || name.starts_with("kubernetes.default")
            || self.0.contains(&name)
    }
}

/// Normalizes a name or address for comparison. An IPv4-mapped IPv6 address becomes IPv4.
fn normalized(host: &str) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
    name.parse::<IpAddr>().map_or(name, |ip| ip.to_canonical().to_string())
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback())
}

/// The Service of kube-apiserver, and the name of its EndpointSlice.
const KUBERNETES: &str = "kubernetes";
const DEFAULT: &str = "default";
