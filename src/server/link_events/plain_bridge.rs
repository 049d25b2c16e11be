//! Joins a session of a peer, an edge or a user with a session to a node that is linked here with the plain
//! dialect. A plain link cannot resume, so this server is an end of both sessions.

use std::sync::Arc;

use tokio::time::timeout;
use tracing::info_span;

use crate::acceptor::LISTENER;
use crate::server::ServerContext;
use crate::server::link_events::edge_access::RequestFromEdge;
use crate::server::link_events::{BridgeRequester, bridge, refuse_offer};
use tunnel_link::link::Link;
use tunnel_link::relay::bindings::RelayOutcome;
use tunnel_link::table::TableFull;
use tunnel_link::table::handles::{IncomingSession, OpenOutcome, Session};
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError};

/// Accepts the request as the end of the session, and opens a plain session to the node.
pub(crate) fn accept_for_plain(request: RelayRequest, plain: Arc<Link>, shared: &Arc<ServerContext>) {
    let of_edge = matches!(request.from().peer, Remote::Edge(_));
    let access =
        if of_edge { BridgeRequester::Edge(RequestFromEdge::of(&request)) } else { BridgeRequester::Peer };
    let span = info_span!("bridge", session = %request.id(), node = %request.node());
    let bridged = bridge_to_plain(request, plain, access, shared.clone());
    shared.link_context.drain.spawn(span, async move { drop(bridged.await) });
}

/// Like [`accept_for_plain`], with access that the caller has judged. Returns when the session is over.
pub(crate) async fn bridge_to_plain(
    request: RelayRequest,
    plain: Arc<Link>,
    access: BridgeRequester,
    shared: Arc<ServerContext>,
) -> RelayOutcome {
    let Some(offer) = request.offer() else {
        let why = SessionError::new(ErrorCode::Overloaded, "this server cannot be the session's end");
        return RelayOutcome { why: Some(why), to_acceptor: 0, to_opener: 0 };
    };
    match open_plain(&offer, &plain, &shared).await {
        Ok(session) => bridge(offer, session, access, shared).await,
        Err(why) => refuse_offer(offer, why),
    }
}

/// Opens a plain session to the offer's node.
async fn open_plain(
    offer: &IncomingSession,
    plain: &Arc<Link>,
    shared: &ServerContext,
) -> Result<Session, SessionError> {
    let client = offer.client().to_owned();
    let table = &shared.link_context.table;
    let node = offer.node();
    let opening = table.open(node.clone(), offer.target().clone(), offer.category(), client, LISTENER);
    let opening = opening.map_err(|TableFull| {
        SessionError::new(ErrorCode::Overloaded, "too many concurrent sessions on that server")
    })?;
    opening.ask(plain, None);
    let answer = tokio::select! {
        answer = timeout(offer.dial_timeout(), opening.answer()) => answer,
        // Dropping the opening withdraws the request.
        () = offer.withdrawn() => {
            return Err(SessionError::new(ErrorCode::Cancelled, "the client has given up"));
        }
    };
    match answer {
        Ok(OpenOutcome::Open) => Ok(opening.into_session()),
        Ok(OpenOutcome::Refused(refusal)) => Err(refusal),
        Ok(OpenOutcome::NoPath) => {
            let why = format!("the link of node {node} has closed");
            Err(SessionError::new(ErrorCode::NodeNotConnected, why))
        }
        Err(_) => {
            let why = format!("node {node} did not answer within {:?}", offer.dial_timeout());
            Err(SessionError::new(ErrorCode::TargetTimeout, why))
        }
    }
}
