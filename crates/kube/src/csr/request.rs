//! One request for a certificate, from its creation to its end.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use crate::cluster::ClusterError;
use crate::csr::error::{CsrError, SIGNING_TIMEOUT, with_timeout};
use crate::csr::profile::Profile;

/// Submits a request (PEM) and returns the certificates (PEM, leaf first) once they are signed.
///
/// # Errors
///
/// Fails if the request is denied, if its signer fails, or if it is not signed within 15 minutes.
///
/// # Cancel safety
///
/// Cancel safe: Kubernetes deletes abandoned requests.
pub(crate) async fn signed(
    client: Client,
    profile: Profile,
    lifetime: Option<Duration>,
    request: &str,
) -> Result<String, CsrError> {
    let api = Api::all(client);
    let seconds = lifetime.map(|lifetime| i32::try_from(lifetime.as_secs()).unwrap_or(i32::MAX));
    let object = CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some(format!("tunnel-{}-", profile.name())),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.as_bytes().to_vec()),
            signer_name: profile.signer().to_owned(),
            usages: Some(profile.usages().map(str::to_owned).to_vec()),
            expiration_seconds: seconds,
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let made: CertificateSigningRequest = with_timeout(api.create(&PostParams::default(), &object)).await?;
    let name = made.name_any();
    let until = Instant::now() + SIGNING_TIMEOUT;
    info!(csr = name, profile = profile.name(), "certificate requested");
    let mut delay = INITIAL_POLL_DELAY;
    let mut known = "not approved";
    loop {
        sleep(delay).await;
        delay = (2 * delay).min(MAX_POLL_DELAY);
        match with_timeout(api.get(&name)).await.and_then(|csr| outcome(&csr)) {
            Ok(Ok(certificate)) => return Ok(certificate),
            Ok(Err(state)) => known = state,
            // These do not pass by waiting. Others may, because kube-apiserver may restart while the signer works.
            Err(
                cause @ (CsrError::ChangedOrDeleted
                | CsrError::Cluster(ClusterError::Forbidden(_))
                | CsrError::Denied { .. }
                | CsrError::Failed { .. }),
            ) => return Err(cause),
            Err(cause) => debug!(csr = name, error = %cause, "cannot poll request, retrying"),
        }
        if Instant::now() >= until {
            return Err(CsrError::Unsigned { name, state: known, signer: profile.signer() });
        }
    }
}

/// Returns the certificates as PEM. The inner error is the state of a request that is neither signed nor rejected yet.
fn outcome(csr: &CertificateSigningRequest) -> Result<Result<String, &'static str>, CsrError> {
    let status = csr.status.as_ref();
    if let Some(certificate) = status.and_then(|status| status.certificate.as_ref()) {
        return Ok(Ok(String::from_utf8_lossy(&certificate.0).into_owned()));
    }
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let message_of = |kind: &str| {
        let found = conditions.iter().find(|condition| condition.type_ == kind)?;
        Some(found.message.clone().or_else(|| found.reason.clone()).unwrap_or_default())
    };
    match (message_of("Denied"), message_of("Failed"), message_of("Approved")) {
        (Some(why), ..) => Err(CsrError::Denied { name: csr.name_any(), why }),
        (_, Some(why), _) => Err(CsrError::Failed { name: csr.name_any(), why }),
        (.., Some(_)) => Ok(Err("approved but not signed")),
        _ => Ok(Err("not approved")),
    }
}

/// Delay between two polls of a request.
const INITIAL_POLL_DELAY: Duration = Duration::from_millis(200);
const MAX_POLL_DELAY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outcome_of(status: &serde_json::Value) -> Result<Result<String, &'static str>, String> {
        let csr = json!({
            "metadata": {"name": "c"}, "spec": {"request": "", "signerName": "s"}, "status": status,
        });
        outcome(&serde_json::from_value(csr).unwrap()).map_err(|why| why.to_string())
    }

    #[test]
    fn a_request_waits_until_it_is_signed_denied_or_failed() {
        let conditions = |kinds: &[&str]| {
            let condition = |kind: &&str| json!({"type": kind, "status": "True", "reason": "r", "message": format!("it is {kind}")});
            json!({"conditions": kinds.iter().map(condition).collect::<Vec<_>>()})
        };
        assert_eq!(outcome_of(&json!({})), Ok(Err("not approved")));
        assert_eq!(outcome_of(&conditions(&["Approved"])), Ok(Err("approved but not signed")));
        let denied = outcome_of(&conditions(&["Denied"])).unwrap_err();
        assert_eq!(denied, "CertificateSigningRequest c was denied: it is Denied");
        let failed = outcome_of(&conditions(&["Approved", "Failed"])).unwrap_err();
        assert!(failed.ends_with("c was approved, but its signer failed: it is Failed"), "{failed}");
        // base64 of "pem"
        assert_eq!(outcome_of(&json!({"certificate": "cGVt"})), Ok(Ok("pem".to_owned())));
    }
}
