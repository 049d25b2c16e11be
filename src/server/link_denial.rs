//! Calls that get no link: each refusal is counted, logged and answered here.

use std::fmt;
use std::time::Duration;

use tokio::time::timeout;
use tracing::field;

use crate::server::ServerContext;
use tunnel_base::limited;
use tunnel_base::metrics::{Door, Metrics};
use tunnel_link::grpc::accept::{CallRejection, LinkCall};
use tunnel_net::guesses::GuessError;
use tunnel_net::limiter::Source;
use tunnel_proto::hello::{LinkCaller, UserProof};

/// Why a caller gets no link.
#[derive(Debug)]
pub(crate) struct LinkDenial {
    /// A fixed label for metrics.
    reason: &'static str,
    /// The reason for the log; `None` is not logged.
    why: Option<String>,
    answer: CallRejection,
}

impl LinkDenial {
    /// Returns a denial that is not logged.
    pub(crate) fn new(reason: &'static str, answer: CallRejection) -> Self {
        Self { reason, why: None, answer }
    }

    /// Logs the text of the answer.
    pub(crate) fn logged(self) -> Self {
        Self { why: Some(self.answer.to_string()), ..self }
    }

    /// Returns the denial of a token. The caller does not learn why it is not valid.
    pub(crate) fn token(error: &GuessError<impl fmt::Display>) -> Self {
        let (reason, answer) = match error {
            GuessError::Wrong(_) => ("token", CallRejection::Token),
            GuessError::Unknown(_) => ("unchecked", CallRejection::Unknown),
            GuessError::TooMany => ("too_many_guesses", CallRejection::TooManyGuesses),
        };
        Self { reason, why: Some(error.to_string()), answer }
    }

    pub(crate) fn forbidden(why: impl fmt::Display) -> Self {
        Self::new("forbidden", CallRejection::Forbidden(why.to_string())).logged()
    }

    /// Counts and logs the denial, and answers the call.
    pub(crate) async fn send(self, call: Box<LinkCall>, shared: &ServerContext) {
        let metrics = &shared.link_context.metrics;
        match self.why {
            Some(why) => log(&call, self.reason, &why, metrics),
            None => metrics.count_refusal(Door::Links, self.reason),
        }
        match self.answer {
            answer @ (CallRejection::Token | CallRejection::TooManyGuesses | CallRejection::Unknown) => {
                refuse_late(call, answer, shared).await;
            }
            answer => call.refuse(answer),
        }
    }
}

fn log(call: &LinkCall, reason: &'static str, why: &str, metrics: &Metrics) {
    let remote_addr = field::display(call.from);
    let may_log = metrics.refuse(Door::Links, reason, call.from.ip());
    match &call.caller {
        LinkCaller::Edge(hello) => {
            limited!(may_log => warn, node = %hello.node, remote_addr, reason = %why, "edge refused");
        }
        LinkCaller::User(hello) => {
            let user = if let UserProof::Token { user, .. } = &hello.proof { Some(user) } else { None };
            let user = user.map(field::display);
            limited!(may_log => warn, user, device = %hello.device, remote_addr, reason = why, "user refused");
        }
        LinkCaller::Peer { .. } => limited!(may_log => warn, remote_addr, reason = why, "peer refused"),
    }
}

/// Answers a token late that is wrong or was not compared, and few of a source at once. Others are closed. What a caller
/// gets beyond the limit of guesses does not depend on its token, nor does the time of it.
async fn refuse_late(call: Box<LinkCall>, answer: CallRejection, shared: &ServerContext) {
    match shared.edge_links.refusal_permits.try_acquire(&Source::of(call.from.ip())) {
        Ok(_permit) => {
            // Ends early if the server stops.
            let _ = timeout(REFUSAL_DELAY, shared.stopping.cancelled()).await;
            call.refuse(answer);
        }
        Err(_) => call.close(),
    }
}

/// Delay before such a token is answered. A permit is held as long, even if the caller has closed its connection.
const REFUSAL_DELAY: Duration = Duration::from_secs(1);
