//! One request for a certificate, from its making to its end.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use super::Profile;
use super::error::{CsrError, SIGNED_WITHIN, within};

/// How far a request has come.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Waits(&'static str),
    Signed(String),
    Denied(String),
    Failed(String),
}

/// The certificates (PEM, own first) for a request (PEM), once they are there.
///
/// # Errors
///
/// It was denied, its signer has failed, or nobody has signed it within 15 minutes. Cancel safe: Kubernetes forgets a
/// request that nobody waits for.
pub(super) async fn signed(
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
    let made: CertificateSigningRequest = within(api.create(&PostParams::default(), &object)).await?;
    let (name, until) = (made.name_any(), Instant::now() + SIGNED_WITHIN);
    info!(csr = name, profile = profile.name(), "a certificate is asked for");
    let (mut rest, mut known) = (FIRST_REST, "not approved");
    loop {
        sleep(rest).await;
        rest = (2 * rest).min(MOST_REST);
        match within(api.get(&name)).await.map(|csr| state(&csr)) {
            Ok(State::Signed(certificate)) => return Ok(certificate),
            Ok(State::Denied(why)) => return Err(CsrError::Denied { name, why }),
            Ok(State::Failed(why)) => return Err(CsrError::Failed { name, why }),
            Ok(State::Waits(state)) => known = state,
            Err(cause @ (CsrError::Gone | CsrError::Forbidden(_))) => return Err(cause),
            Err(cause) => debug!(csr = name, "asked again in a moment: {cause}"),
        }
        if Instant::now() >= until {
            return Err(CsrError::Unsigned { name, state: known, signer: profile.signer() });
        }
    }
}

fn state(csr: &CertificateSigningRequest) -> State {
    let status = csr.status.as_ref();
    if let Some(certificate) = status.and_then(|status| status.certificate.as_ref()) {
        return State::Signed(String::from_utf8_lossy(&certificate.0).into_owned());
    }
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let said = |kind: &str| {
        let found = conditions.iter().find(|condition| condition.type_ == kind)?;
        Some(found.message.clone().or_else(|| found.reason.clone()).unwrap_or_default())
    };
    match (said("Denied"), said("Failed"), said("Approved")) {
        (Some(why), ..) => State::Denied(why),
        (_, Some(why), _) => State::Failed(why),
        (.., Some(_)) => State::Waits("approved, and not signed"),
        _ => State::Waits("not approved"),
    }
}

/// Between two looks at a request.
const FIRST_REST: Duration = Duration::from_millis(200);
const MOST_REST: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn state_of(status: &serde_json::Value) -> State {
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
        assert_eq!(state_of(&json!({})), State::Waits("not approved"));
        assert_eq!(state_of(&conditions(&["Approved"])), State::Waits("approved, and not signed"));
        assert_eq!(state_of(&conditions(&["Denied"])), State::Denied("it is Denied".to_owned()));
        assert_eq!(state_of(&conditions(&["Approved", "Failed"])), State::Failed("it is Failed".to_owned()));
        // base64 of "pem".
        assert_eq!(state_of(&json!({"certificate": "cGVt"})), State::Signed("pem".to_owned()));
    }
}
