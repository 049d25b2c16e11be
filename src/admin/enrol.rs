//! Invitations, as the admin socket of a pod makes and revokes them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::Asker;
use super::response::{json, plain_text};
use crate::enrol::{EnrolError, Enrolment};
use crate::names::NodeName;

/// What the maker of an invitation gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invited {
    /// A secret for who sets the machine up.
    pub code: String,
    /// Seconds since 1970.
    pub until: u64,
    /// Where the cloud is, as host and port, for all that its certificate tells.
    pub cloud: String,
}

/// A body: which node.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    node: String,
    /// For how long it is invited.
    seconds: Option<u64>,
}

/// Answers `POST /invitations`, for a cloud that is linked to at this port.
pub(super) async fn invite(
    enrolment: Option<&Arc<Enrolment>>,
    port: u16,
    request: Request<Incoming>,
    asker: Asker,
) -> Response<Full<Bytes>> {
    let (enrolment, node, seconds) = match asked(enrolment, request).await {
        Ok((enrolment, node, Some(seconds))) if LASTING.contains(&seconds) => (enrolment, node, seconds),
        Ok(_) => return plain_text(StatusCode::BAD_REQUEST, "seconds: want 60 to 604800\n"),
        Err(refused) => return refused,
    };
    match enrolment.invite(&node, Duration::from_secs(seconds), &asker.to_string()).await {
        Ok(made) => {
            let until = made.until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let cloud = format!("{}:{port}", made.host.as_deref().unwrap_or("CLOUD"));
            json(&Invited { code: made.code.to_string(), until, cloud })
        }
        Err(why) => failed(&why),
    }
}

/// Answers `POST /revocations`.
pub(super) async fn revoke(
    enrolment: Option<&Arc<Enrolment>>,
    request: Request<Incoming>,
    asker: Asker,
) -> Response<Full<Bytes>> {
    let (enrolment, node, _) = match asked(enrolment, request).await {
        Ok(asked) => asked,
        Err(refused) => return refused,
    };
    match enrolment.revoke(&node, &asker.to_string()).await {
        Ok(true) => plain_text(StatusCode::OK, "revoked\n"),
        Ok(false) => {
            let why = format!(
                "{node} has not joined by an invitation, and has none; a token of the token file is revoked there\n"
            );
            plain_text(StatusCode::NOT_FOUND, why)
        }
        Err(why) => failed(&why),
    }
}

async fn asked(
    enrolment: Option<&Arc<Enrolment>>,
    request: Request<Incoming>,
) -> Result<(&Arc<Enrolment>, NodeName, Option<u64>), Response<Full<Bytes>>> {
    let enrolment = enrolment.ok_or_else(|| {
        let why = "this pod takes no invitations: set store in [mode.cloud.invitations] of its config, in that of each \
                   pod alike\n";
        plain_text(StatusCode::NOT_FOUND, why)
    })?;
    let body = tokio::time::timeout(BODY_TIME, Limited::new(request.into_body(), BODY_BYTES).collect());
    let Ok(Ok(body)) = body.await else {
        return Err(plain_text(StatusCode::BAD_REQUEST, "the body has to be short\n"));
    };
    let wrong = |why: String| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n"));
    let question: Question =
        serde_json::from_slice(&body.to_bytes()).map_err(|why| wrong(why.to_string()))?;
    let node = question.node.parse::<NodeName>().map_err(|why| wrong(format!("node: {why}")))?;
    Ok((enrolment, node, question.seconds))
}

fn failed<E: std::fmt::Display>(why: &EnrolError<E>) -> Response<Full<Bytes>>
where
    EnrolError<E>: std::fmt::Display,
{
    plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"))
}

/// For how long an invitation may count: a minute to a week.
const LASTING: std::ops::RangeInclusive<u64> = 60..=604_800;

/// For a few bytes.
const BODY_TIME: Duration = Duration::from_secs(5);
const BODY_BYTES: usize = 1024;
