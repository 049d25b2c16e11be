//! Events of links at a server: sessions to relay or to dial, paths, and the bridge to plain remotes.

pub(crate) mod bridge;
pub(crate) mod edge_access;
pub(crate) mod relaying;
pub(crate) mod user_sessions;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::{debug, field, info_span};

use crate::paths::PathProvider as _;
use crate::server::ServerContext;
use crate::server::link_events::bridge::{BridgeRequester, BridgeTarget, bridge, spawn_to_plain};
use crate::server::link_events::edge_access::RequestFromEdge;
use tunnel_base::addresses::Location;
use tunnel_base::limited;
use tunnel_link::grpc::link_end::LinkEnd;
use tunnel_link::link::Link;
use tunnel_link::link_reader::LinkReader;
use tunnel_link::table::FrameEvent;
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Found, Frame, FrameKind, Remote, SessionCategory, SessionError};
use tunnel_proto::names::{Host, Instance, NodeName, SessionId, Target};

/// Drives a link until it ends.
///
/// The caller owns the link, because a future that takes it stores it twice: there are thousands.
pub(crate) async fn run_link(reader: &mut LinkReader, shared: &Arc<ServerContext>) -> LinkEnd {
    reader.begin();
    let room = Arc::new(Semaphore::new(MAX_SEARCHES_PER_EDGE));
    let why = loop {
        match reader.next().await {
            Ok(event) => handle_event(event, &reader.link, &room, shared),
            Err(why) => break why,
        }
    };
    end_link(reader, &why, shared);
    why
}

/// Handles an event of `link`. `room` has the permits for concurrent searches of this link.
pub(crate) fn handle_event(
    event: FrameEvent,
    link: &Arc<Link>,
    room: &Arc<Semaphore>,
    shared: &Arc<ServerContext>,
) {
    match event {
        // Never happens: a server receives its requests as `FrameEvent::RelayRequest`. Dropping an offer refuses it.
        FrameEvent::Incoming(_) => {}
        FrameEvent::RelayRequest(request) => handle_request(request, shared, room),
        FrameEvent::Signal(frame) => handle_signal(frame, link, shared),
        FrameEvent::Parked(key, of) => user_sessions::judge_parked(link, &key, *of, shared),
        FrameEvent::Ended(id, why) => {
            shared.clients.judged.refuse(id, &why, Instant::now() + shared.clients.route.resume_timeout)
        }
    }
}

fn handle_signal(Frame { node, body }: Frame, link: &Arc<Link>, shared: &Arc<ServerContext>) {
    match (body, shared.finder.peers()) {
        (FrameKind::Find(question), _) => shared.finder.handle_find(link, &node, question),
        (FrameKind::Found(found), _) => {
            if let Some(at) = shared.finder.handle_found(link, &node, found.clone()) {
                on_node_moved(at, node, Some(found), shared);
            }
        }
        (FrameKind::Conflict(conflict), _) => shared.finder.handle_conflict(&node, conflict),
        (FrameKind::Drain(_), _) => {
            // The edge has another link now and is found by that.
            shared.registry.retire_link(link);
            // Sessions opened here stay on the link, which is their shortest path.
            shared.link_context.table.leave(link, None, |_| false);
        }
        (FrameKind::Load(load), Some(peers)) => peers.handle_load(link, load),
        (FrameKind::ListNodes(requested), Some(peers)) => peers.handle_list_nodes(link, &requested),
        (FrameKind::NodePage(page), Some(peers)) => peers.handle_node_page(link, page),
        (FrameKind::Load(_) | FrameKind::ListNodes(_) | FrameKind::NodePage(_), None) => {}
        (FrameKind::Cluster(said), _) => {
            let reply = shared
                .edge_links
                .proofs
                .borrow()
                .pod_tokens
                .as_ref()
                .and_then(|tokens| tokens.on_peer(&said));
            // Without room on the link the question is repeated.
            reply.map(|reply| link.signal(&node, FrameKind::Cluster(reply.into())));
        }
        // The link handles these.
        (FrameKind::Session(..) | FrameKind::Ping(_) | FrameKind::Pong(_), _) => {}
    }
}

/// Ends a link, and logs why.
pub(crate) fn end_link(reader: &LinkReader, why: &LinkEnd, shared: &ServerContext) {
    let link = &reader.link;
    let sessions = reader.end(why);
    let node = link.peer.node().map(field::display);
    if let Remote::User(_) = link.peer {
        // Like its begin.
        return debug!(link = %link.id, reason = %why, sessions, "link has ended");
    }
    limited!(
        may_log(link, "link_ended", shared) => info,
        link = %link.id, node, reason = %why, sessions, "link has ended"
    );
}

/// Returns true if a line of this kind about a link may be logged: a few within a minute for each node, and for peers.
pub(crate) fn may_log(link: &Link, kind: &'static str, shared: &ServerContext) -> bool {
    let name = link.peer.node().map_or(link.peer.kind(), NodeName::as_str);
    shared.link_context.metrics.refusals.may_log_about(kind, name)
}

/// Makes all sessions leave a retired link for the node's primary link.
///
/// The link itself stays. The edge may have dialled the new link as a backup because the old one did not answer. If the
/// old one then answers first, the edge closes the new one, and the sessions return.
pub(crate) fn leave_link(left: &Link, shared: &ServerContext) {
    let sessions = shared.link_context.table.leave(left, None, |_| true);
    let node = left.peer.node().map(field::display);
    limited!(
        may_log(left, "sessions_migrated", shared) => info,
        link = %left.id, node, sessions, "sessions migrated to new link"
    );
}

/// Makes the sessions of a node leave the links to other servers that do not answer: the node has linked at the server
/// `at`, here or as `found` elsewhere.
pub(crate) fn on_node_moved(at: Instance, node: NodeName, found: Option<Found>, shared: &Arc<ServerContext>) {
    if shared.finder.is_alone() {
        return;
    }
    // Beyond the limit nothing is pinged, and a dead link is detected by its ping timeout.
    let Ok(permit) = shared.move_permits.clone().try_acquire_owned() else { return };
    let span = info_span!("node_moved", %node);
    let shared = shared.clone();
    shared.link_context.drain.clone().spawn(span, async move {
        let contest = async {
            if let Some(found) = found {
                shared.finder.resolve_conflict(at, &node, found).await;
            }
        };
        let table = &shared.link_context.table;
        tokio::join!(shared.finder.leave_silent_links(at, &node, table), contest);
        drop(permit);
    });
}

/// Handles a request that arrived over a link. `room` limits the concurrent searches of this link.
pub(crate) fn handle_request(mut request: RelayRequest, shared: &Arc<ServerContext>, room: &Arc<Semaphore>) {
    attribute(&mut request);
    match &request.from().peer {
        Remote::Edge(edge) if !shared.edge_links.is_valid(request.from()) => {
            let why = format!("the credentials of node {edge} were revoked");
            request.refuse(SessionError::new(ErrorCode::NotAllowed, why));
        }
        peer @ Remote::Edge(_) if !shared.session_rates.allows(&peer.requester().unwrap_or_default()) => {
            let access = RequestFromEdge::of(&request);
            refuse(request, SessionError::new(ErrorCode::Overloaded, TOO_MANY_SESSIONS), &access, shared);
        }
        Remote::User(_) => user_sessions::spawn_request(request, shared, room),
        // An edge does not reach its own node through a server: with that name it requests a target of the cloud.
        Remote::Edge(edge) if *edge == request.key().node && request.instance().is_none() => {
            dial_for_edge(request, shared)
        }
        Remote::Edge(_) | Remote::Server(_) => spawn_relay(request, shared, room),
        Remote::Peer => {
            if let Some((request, plain)) = shared.pass(request) {
                spawn_to_plain(request, plain, shared);
            }
        }
    }
}

/// Attributes an Open to the edge or user that has proved its name on the link, whatever the frame claims: none gets
/// the rights of another listener, nor another's name. A peer has attributed it already.
fn attribute(request: &mut RelayRequest) {
    let from = request.from().clone();
    match &from.peer {
        Remote::Edge(_) => {
            let edge = from.peer.requester().unwrap_or_default();
            request.attribute(SessionCategory::HttpProxy, edge);
        }
        Remote::User(name) => {
            let at = from.ends().and_then(|ends| ends.remote).map(|at| at.to_string()).unwrap_or_default();
            let is_admin = request.key().category == SessionCategory::Admin;
            let category = if is_admin { SessionCategory::Admin } else { SessionCategory::Ssh };
            request.attribute(category, format!("{name}@{at}"));
        }
        Remote::Server(_) | Remote::Peer => {}
    }
}

/// Relays the request of an edge if it is allowed, in its own task, because the search for a path may take seconds.
fn spawn_relay(request: RelayRequest, shared: &Arc<ServerContext>, room: &Arc<Semaphore>) {
    let span = info_span!("relay", node = %request.key().node);
    let room = room.clone();
    let shared = shared.clone();
    shared.link_context.drain.clone().spawn(span, async move {
        let access = RequestFromEdge::of(&request);
        let judged = shared.with_search_permit(access.judge(&shared), &room).await;
        let judged = judged.unwrap_or_else(|why| Err(SessionError::new(ErrorCode::NodeNotConnected, why)));
        match judged {
            Err(why) if why.code == ErrorCode::NodeNotConnected => return request.refuse(why),
            Err(why) => return refuse(request, why, &access, &shared),
            Ok(()) => {}
        }
        if let Some((request, plain)) = Box::pin(shared.relay(request, &room)).await {
            spawn_to_plain(request, plain, &shared);
        }
    });
}

/// Refuses a request of an edge for something that it may not reach; counts and logs that.
fn refuse(request: RelayRequest, why: SessionError, access: &RequestFromEdge, shared: &Arc<ServerContext>) {
    let (entry, at) = access.log_entry();
    entry.refuse(why.code.name(), &why.reason, at, &shared.link_context.metrics);
    request.refuse(why);
}

/// Dials a target of the cloud for an edge. A target with the address of another node is at that node's edge.
fn dial_for_edge(request: RelayRequest, shared: &Arc<ServerContext>) {
    if shared.stopping.is_cancelled() {
        // With this code the edge tries the server that it links to next.
        return request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "this server is stopping"));
    }
    let from = request.from().clone();
    let Some(offer) = request.offer() else { return };
    match target_at_node(&offer.target, &offer.key().node, offer.key().id, shared) {
        None => shared.acceptor.serve_incoming(offer),
        Some((node, target)) => {
            let session = offer.key().id;
            let span = info_span!("bridge", %session, %node);
            let access = RequestFromEdge { session, from, node: node.clone(), target: target.clone() };
            let to = BridgeTarget::Node(node, target);
            let bridged = bridge(offer, to, BridgeRequester::Edge(access), shared.clone());
            shared.link_context.drain.spawn(span, async move { drop(bridged.await) });
        }
    }
}

/// Returns the other node at which a target of the edge `own` is, and the target there. Returns `None` if the address
/// book names no such node, or edges may not reach that. A later request for the same session finds the same node.
pub(super) fn target_at_node(
    requested: &Target,
    own: &NodeName,
    session: SessionId,
    shared: &Arc<ServerContext>,
) -> Option<(NodeName, Target)> {
    // An edge resolves the names of other machines itself.
    let (node, target) = match shared.clients.addresses.locate(requested, session.chance(), |_| true).ok()? {
        Location::Node { node, target, .. } => (node, target),
        Location::Direct(_) => {
            let node = shared.clients.route.node_named_by_address(&requested.host)?;
            (node.clone(), node.target(requested.port))
        }
    };
    // A name that is no Service's is not a node's either: the edge itself routes the names of nodes.
    let is_name = matches!(requested.host, Host::Name(_)) && target == *requested;
    let may = shared.policies.nodes.load().iter().any(|glob| glob.matches(&node));
    (may && !is_name && node != *own).then_some((node, target))
}

/// Maximum number of concurrent searches for nodes and servers for all edges; each takes at most a few seconds.
pub(crate) const MAX_SEARCHES: usize = 1000;
/// Maximum number of sessions that an edge or a user opens or resumes within [`SESSIONS_WINDOW`], and the reason beyond it.
pub(crate) const MAX_SESSIONS: u32 = 10_000;
pub(crate) const SESSIONS_WINDOW: Duration = Duration::from_secs(10);
pub(super) const TOO_MANY_SESSIONS: &str = "more than 10000 sessions within 10 s; try again";
/// Maximum number of concurrent searches for one edge.
pub(crate) const MAX_SEARCHES_PER_EDGE: usize = 100;
