//! Why there is no certificate, and asking kube-apiserver in bounded time.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::timeout;

use crate::pki::PkiError;
use crate::registry::ClusterError;

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
pub(super) async fn within<T>(work: impl Future<Output = kube::Result<T>>) -> Result<T, CsrError> {
    match timeout(ANSWERED_WITHIN, work).await {
        Err(_) => Err(ClusterError::Silent.into()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Err(CsrError::Gone),
        Ok(done) => done.map_err(|cause| ClusterError::from(cause).into()),
    }
}

/// For each piece of work at kube-apiserver.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// From the request to the certificate; an hour later Kubernetes forgets what it has decided.
pub(super) const SIGNED_WITHIN: Duration = Duration::from_secs(15 * 60);
