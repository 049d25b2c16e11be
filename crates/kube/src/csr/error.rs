//! Errors of issuing, and requests to kube-apiserver that end if it is silent.

use std::path::PathBuf;
use std::time::Duration;

use crate::cluster::{ClusterError, REQUEST_TIMEOUT};
use tunnel_base::silence::unless_silent;
use tunnel_net::pki::PkiError;

/// The reason why no new certificate was issued.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// A request to kube-apiserver failed.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The object does not exist, or was changed meanwhile.
    #[error("the object was changed or deleted meanwhile")]
    ChangedOrDeleted,
    /// The Service does not exist.
    #[error(
        "Service {0} does not exist in namespace {1}; create it, or remove it from services in [server.csr]"
    )]
    NoService(String, String),
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

/// Runs one operation at kube-apiserver, unless that is silent. It normally takes milliseconds.
pub(crate) async fn with_timeout<T>(work: impl Future<Output = kube::Result<T>>) -> Result<T, CsrError> {
    match unless_silent(REQUEST_TIMEOUT, work).await {
        None => Err(ClusterError::Silent.into()),
        Some(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
            Err(CsrError::ChangedOrDeleted)
        }
        Some(done) => Ok(done.map_err(ClusterError::from)?),
    }
}

/// Timeout from the request to the certificate. Kubernetes deletes decided requests after an hour.
pub(crate) const SIGNING_TIMEOUT: Duration = Duration::from_secs(15 * 60);
