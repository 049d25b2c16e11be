//! Sessions of others that end at this server and continue as a second session: to a node with a plain link, which
//! cannot resume, or to the other node that has the target of an edge.

use std::sync::Arc;

use tokio::time::timeout;
use tracing::info_span;

use crate::acceptor::LISTENER;
use crate::route::{RouteError, SessionRequest};
use crate::server::ServerContext;
use crate::server::link_events::edge_access::RequestFromEdge;
use crate::session_io::bridge_sessions;
use crate::session_io::judged::{JudgedSession, SessionSubject, UNTIL_CHANGED};
use tunnel_link::link::Link;
use tunnel_link::relay::bindings::RelayOutcome;
use tunnel_link::table::TableFull;
use tunnel_link::table::handles::{IncomingSession, OpenOutcome, Session};
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError, SessionKey};
use tunnel_proto::names::{NodeName, Target};

/// For which party a server bridges a session, and what allows it.
pub(crate) enum BridgeRequester {
    /// For a peer, which judges it.
    Peer,
    /// For an edge.
    Edge(RequestFromEdge),
    /// For a user.
    User(JudgedSession),
}

/// Where the second session of a bridge leads.
pub(super) enum BridgeTarget {
    /// To the offer's own node, over its plain link and no other: at most one hop between servers.
    Plain(Arc<Link>),
    /// To this target at another node, wherever that is linked.
    Node(NodeName, Target),
}

/// Bridges a request of a peer or an edge for a node with a plain link, in its own task.
pub(crate) fn spawn_to_plain(request: RelayRequest, plain: Arc<Link>, shared: &Arc<ServerContext>) {
    let of_edge = matches!(request.from().peer, Remote::Edge(_));
    let access =
        if of_edge { BridgeRequester::Edge(RequestFromEdge::of(&request)) } else { BridgeRequester::Peer };
    let span = info_span!("bridge", session = %request.key().id, node = %request.key().node);
    let bridged = bridge_to_plain(request, plain, access, shared.clone());
    shared.link_context.drain.spawn(span, async move { drop(bridged.await) });
}

/// Like [`spawn_to_plain`], with access that the caller has judged. Returns when the session is over.
pub(crate) async fn bridge_to_plain(
    request: RelayRequest,
    plain: Arc<Link>,
    access: BridgeRequester,
    shared: Arc<ServerContext>,
) -> RelayOutcome {
    match request.offer() {
        Some(offer) => bridge(offer, BridgeTarget::Plain(plain), access, shared).await,
        None => {
            let why = SessionError::new(ErrorCode::Overloaded, "this server cannot be the session's end");
            RelayOutcome { why: Some(why), to_acceptor: 0, to_opener: 0 }
        }
    }
}

/// Accepts the offer once the second session is open, and copies between the two until both are done, while `access`
/// allows it. If no server knows the other node, this server dials the offer's target itself.
pub(super) async fn bridge(
    offer: IncomingSession,
    to: BridgeTarget,
    access: BridgeRequester,
    shared: Arc<ServerContext>,
) -> RelayOutcome {
    let opened = tokio::select! {
        opened = to.open(&offer, &shared) => opened,
        // Dropping the opening withdraws the request.
        () = offer.withdrawn() => Err(Some(SessionError::new(ErrorCode::Cancelled, "the client has given up"))),
    };
    match opened {
        Ok(session) => copy(offer, session, access, shared).await,
        Err(Some(why)) => refuse_offer(offer, why),
        Err(None) => {
            shared.acceptor.serve_incoming(offer);
            RelayOutcome { why: None, to_acceptor: 0, to_opener: 0 }
        }
    }
}

impl BridgeTarget {
    /// Opens the second session. Fails without an error if no server knows the other node.
    async fn open(
        self,
        offer: &IncomingSession,
        shared: &ServerContext,
    ) -> Result<Session, Option<SessionError>> {
        let (node, target) = match self {
            Self::Plain(link) => return open_plain(offer, &link, shared).await.map_err(Some),
            Self::Node(node, target) => (node, target),
        };
        let category = offer.key().category;
        let client = offer.client.clone();
        let request = SessionRequest { node, target, category, client, listener: LISTENER, permit: None };
        let opened = shared.clients.route.open(request).await;
        opened.map_err(|error| match error.why {
            RouteError::Offline { missing, .. } if missing.is_unknown_node() => None,
            RouteError::Refused { refusal, node } => {
                Some(SessionError::new(refusal.code, format!("node {node}: {}", refusal.reason)))
            }
            why @ RouteError::Timeout { .. } => Some(SessionError::new(ErrorCode::TargetTimeout, why)),
            why @ RouteError::Busy => Some(SessionError::new(ErrorCode::Overloaded, why)),
            why @ RouteError::Offline { .. } => Some(SessionError::new(ErrorCode::TargetUnreachable, why)),
        })
    }
}

/// Opens a plain session to the offer's node.
async fn open_plain(
    offer: &IncomingSession,
    plain: &Arc<Link>,
    shared: &ServerContext,
) -> Result<Session, SessionError> {
    let client = offer.client.clone();
    let table = &shared.link_context.table;
    let SessionKey { node, category, .. } = offer.key();
    let opening = table.open(node.clone(), offer.target.clone(), *category, client, LISTENER);
    let opening = opening.map_err(|TableFull| {
        SessionError::new(ErrorCode::Overloaded, "too many concurrent sessions on that server")
    })?;
    opening.ask(plain, None);
    match timeout(offer.dial_timeout, opening.answer()).await {
        Ok(OpenOutcome::Open) => Ok(opening.into_session()),
        Ok(OpenOutcome::Refused(refusal)) => Err(refusal),
        Ok(OpenOutcome::NoPath) => {
            let why = format!("the link of node {node} has closed");
            Err(SessionError::new(ErrorCode::NodeNotConnected, why))
        }
        Err(_) => {
            let why = format!("node {node} did not answer within {:?}", offer.dial_timeout);
            Err(SessionError::new(ErrorCode::TargetTimeout, why))
        }
    }
}

/// Copies between the two ends of a session that this server bridges, while `access` allows it.
async fn copy(
    offer: IncomingSession,
    session: Session,
    access: BridgeRequester,
    shared: Arc<ServerContext>,
) -> RelayOutcome {
    let (judged, edge) = match access {
        BridgeRequester::Peer => (None, None),
        BridgeRequester::User(judged) => (Some(judged), None),
        BridgeRequester::Edge(access) => {
            let policies = shared.policies.clone();
            let judged = access.clone();
            let judge = move |change: &_| {
                judged.judge_node(&policies, change).map(|()| UNTIL_CHANGED).map_err(|why| why.reason)
            };
            let subject = SessionSubject {
                id: Some(access.session),
                node: Some(access.node.clone()),
                ..SessionSubject::default()
            };
            match shared.clients.judged.add(subject, judge) {
                Ok(judged) => (Some(judged), Some(access)),
                Err(why) => return refuse_offer(offer, SessionError::new(ErrorCode::NodeNotAllowed, why)),
            }
        }
    };
    let revoked = async {
        let Some(judged) = &judged else { return std::future::pending().await };
        judged.revoked().await;
        let code = if edge.is_some() { ErrorCode::NodeNotAllowed } else { ErrorCode::NotAllowed };
        let why = SessionError::new(code, judged.revocation().unwrap_or_default());
        if let Some(access) = &edge {
            access.log_revoked(&why);
        }
        why
    };
    let alive = shared.link_context.metrics.sessions.start(BRIDGE_LISTENER);
    bridge_sessions(offer.accept(), session, alive, revoked).await
}

fn refuse_offer(offer: IncomingSession, why: SessionError) -> RelayOutcome {
    offer.refuse(why.clone());
    RelayOutcome { why: Some(why), to_acceptor: 0, to_opener: 0 }
}

/// The listener label of bridged sessions, in metrics.
const BRIDGE_LISTENER: &str = "bridge";
