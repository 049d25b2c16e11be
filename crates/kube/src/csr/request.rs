//! One request for a certificate, from its creation to its end.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use crate::csr::error::{CsrError, SIGNING_TIMEOUT, with_timeout};
use crate::csr::profile::Profile;

/// The state of a submitted CertificateSigningRequest, from its status.
#[derive(Debug, PartialEq, Eq)]
enum CsrState {
    /// Neither signed nor rejected yet; with the state for the error text.
    Waits(&'static str),
    /// Signed: the certificates as PEM.
    Signed(String),
    /// Denied by an approver, for this reason.
    Denied(String),
    /// Rejected by the signer, for this reason.
    Failed(String),
}

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
        match with_timeout(api.get(&name)).await.map(|csr| state(&csr)) {
            Ok(CsrState::Signed(certificate)) => return Ok(certificate),
            Ok(CsrState::Denied(why)) => return Err(CsrError::Denied { name, why }),
            Ok(CsrState::Failed(why)) => return Err(CsrError::Failed { name, why }),
            Ok(CsrState::Waits(state)) => known = state,
            // These two do not pass by waiting. Others may, because kube-apiserver may restart while the signer works.
            Err(cause @ (CsrError::ChangedOrDeleted | CsrError::Forbidden(_))) => return Err(cause),
            Err(cause) => debug!(csr = name, error = %cause, "cannot poll request, retrying"),
        }
        if Instant::now() >= until {
            return Err(CsrError::Unsigned { name, state: known, signer: profile.signer() });
        }
    }
}

fn state(csr: &CertificateSigningRequest) -> CsrState {
    let status = csr.status.as_ref();
    if let Some(certificate) = status.and_then(|status| status.certificate.as_ref()) {
        return CsrState::Signed(String::from_utf8_lossy(&certificate.0).into_owned());
    }
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let message_of = |kind: &str| {
        let found = conditions.iter().find(|condition| condition.type_ == kind)?;
        Some(found.message.clone().or_else(|| found.reason.clone()).unwrap_or_default())
    };
    match (message_of("Denied"), message_of("Failed"), message_of("Approved")) {
        (Some(why), ..) => CsrState::Denied(why),
        (_, Some(why), _) => CsrState::Failed(why),
        (.., Some(_)) => CsrState::Waits("approved but not signed"),
        _ => CsrState::Waits("not approved"),
    }
}

/// Delay between two polls of a request.
const INITIAL_POLL_DELAY: Duration = Duration::from_millis(200);
const MAX_POLL_DELAY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state_of(status: &serde_json::Value) -> CsrState {
        let csr = json!({
            "metadata": {"name": "c"}, "spec": {"request": "", "signerName": "s"}, "status": status,
        });
        state(&serde_json::from_value(csr).unwrap())
    }

    #[test]
    fn a_request_waits_until_it_is_signed_denied_or_failed() {
        let conditions = |kinds: &[&str]| {
            let condition = |kind: &&str| json!({"type": kind, "status": "True", "reason": "r", "message": format!("it is {kind}")});
            json!({"conditions": kinds.iter().map(condition).collect::<Vec<_>>()})
        };
        assert_eq!(state_of(&json!({})), CsrState::Waits("not approved"));
        assert_eq!(state_of(&conditions(&["Approved"])), CsrState::Waits("approved but not signed"));
        assert_eq!(state_of(&conditions(&["Denied"])), CsrState::Denied("it is Denied".to_owned()));
        assert_eq!(
            state_of(&conditions(&["Approved", "Failed"])),
            CsrState::Failed("it is Failed".to_owned())
        );
        // base64 of "pem"
        assert_eq!(state_of(&json!({"certificate": "cGVt"})), CsrState::Signed("pem".to_owned()));
    }
}
