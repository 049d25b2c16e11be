//! Ends sessions for an operator.

use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::admin::AdminContext;
use crate::admin::requester::{AdminRequest, AdminRequester};
use crate::admin::responses::{AdminAnswer, json, plain_text, read_json};
use crate::session_io::judged::SessionSubject;
use tunnel_base::logging::AUDIT;
use tunnel_proto::printable::printable;

/// The JSON body of `POST /sessions/end`. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionSelection {
    /// Id of a session, with the digits of the status and the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// User of sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Node of sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The response: the number of ended sessions, at least one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndSessionsReply {
    /// Number of sessions.
    pub ended: usize,
}

impl SessionSelection {
    /// Returns true if this session is selected.
    fn contains(&self, session: &SessionSubject) -> bool {
        let Self { id, user, node } = self;
        id.as_ref().is_some_and(|id| session.id.is_some_and(|one| one.to_string() == *id))
            || user.as_ref().is_some_and(|user| session.user.as_deref() == Some(user))
            || node.as_ref().is_some_and(|node| {
                session.node.as_ref().is_some_and(|one| one.as_str().eq_ignore_ascii_case(node))
            })
    }
}

impl AdminContext {
    /// Returns the response to `POST /sessions/end`. Any user of the machine can reach a port, so only a user who has
    /// proved a name may end sessions there.
    pub(crate) async fn end_sessions(&self, request: AdminRequest<'_>) -> AdminAnswer {
        let AdminRequest { http, requester } = request;
        let actor = self.authenticate_person(requester, http.headers()).await?;
        // A foreign page in a browser cannot send this type: the browser first asks whether it may.
        let is_json = http.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        if matches!(requester, AdminRequester::Address(..)) && !is_json {
            let why = "Content-Type: expected application/json\n";
            return Err(plain_text(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        let selection: SessionSelection = read_json(http).await?;
        let SessionSelection { id, user, node } = &selection;
        if [id, user, node].into_iter().flatten().count() != 1 {
            return Err(plain_text(StatusCode::BAD_REQUEST, "expected one of id, user and node\n"));
        }
        let why = format!("ended by operator {actor}");
        let ended = self.judged.end(&why, |one| selection.contains(one));
        ended.iter().for_each(|one| self.process.end_parked(self, one, &why));
        let ended = ended.len();
        if ended == 0 {
            return Err(plain_text(StatusCode::NOT_FOUND, "no such session here\n"));
        }
        let [id, user, node] = [id, user, node].map(|text| text.as_deref().map(printable));
        info!(target: AUDIT, %actor, session = id, user, node, sessions = ended, "sessions ended");
        Ok(json(&EndSessionsReply { ended }))
    }
}
