//! What a link at work asks of the pod: sessions to relay or to dial, paths, and the plain dialect's bridge.

use std::net::Ipv4Addr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::{field, info, info_span};

use crate::registry::NodeNotFound;
use crate::route::{MOVING, PathSearch, SessionRouter};
use crate::server::ServerContext;
use crate::session_io::bridge_sessions;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Instance, NodeName};
use tunnel_link::link::{Link, LinkEnd};
use tunnel_link::sender::LinkSender;
use tunnel_link::session::stream::{IncomingSession, OpenOutcome};
use tunnel_link::table::{Event, RelayRequest, SessionTable, TableFull};
use tunnel_proto::frame::{ErrorCode, Found, Remote, SessionError};

/// Drives a link until it ends, then looks for new paths for its sessions.
pub(crate) async fn run_link(mut link: Link, shared: &ServerContext) -> LinkEnd {
    shared.link_context.metrics.links.inc();
    let room = search_permits(shared);
    let why = loop {
        match link.next().await {
            Ok(event) => handle_event(event, &link.sender, &room, shared),
            Err(why) => break why,
        }
    };
    on_link_ended(&link, &why, shared);
    why
}

/// The searches that one more link may cause at once.
pub(crate) fn search_permits(shared: &ServerContext) -> SearchPermits {
    let own = Arc::new(Semaphore::new(MAX_SEARCHES_PER_EDGE));
    SearchPermits { per_link: own, all: shared.search_permits.clone() }
}

/// Does what the link of `sender` asks for.
pub(crate) fn handle_event(
    event: Event,
    sender: &Arc<LinkSender>,
    room: &SearchPermits,
    shared: &ServerContext,
) {
    match event {
        Event::Incoming(offer) => {
            // Never happens: a pod gets its requests as `Event::Request` first.
            let why = format!("edges may not reach {} through this pod", offer.target());
            offer.refuse(SessionError::new(ErrorCode::NotAllowed, why));
        }
        Event::Parked(parked) => shared.route.spawn_resume(parked, &shared.link_context.drain),
        Event::RelayRequest(request) => handle_request(request, shared, room),
        Event::Find(node, question) => shared.finder.answer(sender, &node, question),
        Event::Found(node, found) => {
            if let Some(at) = shared.finder.on_found(sender, &node, found.clone()) {
                retire_old_links(at, node, Some(found), shared);
            }
        }
        Event::Conflict(node, conflict) => shared.finder.on_conflict(&node, conflict),
        Event::Drain(_) => {
            // The edge has another link now, over which it is found.
            shared.registry.retire_link(sender);
            shared.link_context.table.detach_relays(sender, |_| true);
        }
        Event::Load(load) => {
            if let Some(peers) = &shared.peers {
                peers.on_load(sender, load);
            }
        }
    }
}

/// A link has ended: new paths are looked for, for its sessions.
pub(crate) fn on_link_ended(link: &Link, why: &LinkEnd, shared: &ServerContext) {
    shared.link_context.metrics.links.dec();
    shared.link_context.metrics.links_ended.count(why.name());
    let parked = link.end(why);
    let node = link.sender.peer.node().map(field::display);
    info!(link = %link.sender.id, node, %why, sessions = parked.len(), "link has ended");
    for parked in parked {
        shared.route.spawn_resume(parked, &shared.link_context.drain);
    }
}

/// Has the sessions of a link that is not to carry them any more go on over its node's current one. The link itself stays:
/// if it was silent for the process that dialled it, and answers first after all, the new one ends, and they come back.
pub(crate) fn migrate_sessions(left: &Arc<LinkSender>, shared: &ServerContext) {
    let table = &shared.link_context.table;
    table.detach_relays(left, |_| true);
    let parked = table.leave(left, |_, _| true);
    let node = left.peer.node().map(field::display);
    info!(link = %left.id, node, sessions = parked.len(), "the far end has another link: sessions go on there");
    for parked in parked {
        shared.route.spawn_resume(parked, &shared.link_context.drain);
    }
}

/// After a node has linked anew at the pod `at`, here or as was `found` elsewhere: pings its older links, and drops
/// those that do not answer.
pub(crate) fn retire_old_links(at: Instance, node: NodeName, found: Option<Found>, shared: &ServerContext) {
    if shared.peers.is_none() {
        return;
    }
    // Beyond that many at once, the silence of a dead link shows that it is dead.
    let Ok(permit) = shared.move_permits.clone().try_acquire_owned() else { return };
    let (span, shared) = (info_span!("moved", %node), shared.clone());
    shared.link_context.drain.clone().spawn(span, async move {
        let contest = async {
            if let Some(found) = found {
                shared.finder.resolve_conflict(at, &node, found).await;
            }
        };
        let table = &shared.link_context.table;
        let (parked, ()) = tokio::join!(shared.finder.migrate_from_old_links(at, &node, table), contest);
        for parked in parked {
            shared.route.spawn_resume(parked, &shared.link_context.drain);
        }
        drop(permit);
    });
}

/// Nodes whose older links are pinged at once. Bounds what a pod that announces nodes without end can cause.
pub(crate) const MAX_CONCURRENT_MOVES: usize = 10_000;

// Requests that come over links: which are relayed to a node, which this pod dials, which it refuses.

/// Answers a request that came over a link. `room` limits the searches that this link may cause at once.
pub(crate) fn handle_request(request: RelayRequest, shared: &ServerContext, room: &SearchPermits) {
    match &request.from().peer {
        // An edge does not reach its own node through a pod: with that name it asks for a target of the cloud.
        Remote::Edge(edge) if edge == request.node() && request.instance().is_none() => {
            dial_for_edge(request, shared)
        }
        Remote::Edge(edge) if edge == request.node() => spawn_relay(request, shared, room),
        Remote::Edge(_) | Remote::Server(_) => {
            if shared.policies.nodes.load().iter().any(|glob| glob.matches(request.node())) {
                return spawn_relay(request, shared, room);
            }
            refuse_node(request, shared);
        }
        Remote::Peer => {
            if let Some((request, plain)) = shared.route.pass(request) {
                accept_for_plain(request, plain, shared);
            }
        }
    }
}

/// Refuses an edge a node that edges may not reach; counts and logs it.
fn refuse_node(request: RelayRequest, shared: &ServerContext) {
    let (node, metrics) = (request.node(), &shared.link_context.metrics);
    let why = format!("edges may not reach node {node}: their pod's mode.cloud.allow.nodes does not hold it");
    let asker = request.from().peer.node();
    let linked = asker.and_then(|asker| shared.registry.link_of(asker));
    let at = linked.map_or(Ipv4Addr::UNSPECIFIED.into(), |linked| linked.from.ip());
    let mut access = AccessLogEntry::start(FRONT, at.to_string());
    access.user = asker.map(ToString::to_string);
    access.node = Some(node.clone());
    access.target = request.target().cloned();
    metrics.sessions.refused(FRONT, ErrorCode::NodeNotAllowed.name());
    access.refuse(ErrorCode::NodeNotAllowed.name(), &why, at, &metrics.refusals);
    request.refuse(SessionError::new(ErrorCode::NodeNotAllowed, why));
}

/// Relays the request in a task of its own, as the search for a path may take seconds.
fn spawn_relay(request: RelayRequest, shared: &ServerContext, room: &SearchPermits) {
    let span = info_span!("relay", node = %request.node());
    let (room, shared) = (room.clone(), shared.clone());
    shared.link_context.drain.clone().spawn(span, async move {
        if let Some((request, plain)) = Box::pin(shared.route.relay(request, &room)).await {
            accept_for_plain(request, plain, &shared);
        }
    });
}

/// Dials a target of the cloud for an edge.
fn dial_for_edge(request: RelayRequest, shared: &ServerContext) {
    if shared.stopping.is_cancelled() {
        // With this code the edge asks the pod that it links to next.
        return request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "this pod is stopping"));
    }
    if let Some(offer) = request.offer() {
        shared.backend.serve_incoming(offer);
    }
}

/// What edges ask of a pod, in metrics and the access log.
const FRONT: &str = "backend";
/// Searches for nodes and pods that run at once for all edges; each takes a few seconds at most.
pub(crate) const MAX_SEARCHES: usize = 1000;
/// Of these, for one edge.
pub(crate) const MAX_SEARCHES_PER_EDGE: usize = 100;

// Paths for sessions that others ask to have relayed through this pod, found by the same search as for our own.

/// How many searches may run at once: for one link, and for all together. A node that is linked here, or remembered,
/// needs no search.
#[derive(Debug, Clone)]
pub struct SearchPermits {
    /// Searches for this link.
    pub per_link: Arc<Semaphore>,
    /// Searches for all links.
    pub all: Arc<Semaphore>,
}

impl SessionRouter {
    /// Relays an edge's request to the node it names, or to the pod that has dialled for the edge, and goes on looking
    /// while the answer is *not here*.
    ///
    /// Only its opener moves a session to another path. So once a request may have reached its acceptor, this pod does
    /// not try a second path by itself: it sends the opener Lost, and what it has learned serves the opener's next
    /// attempt.
    ///
    /// Returns the request with the node's link if that is a plain one: this pod is then to be the session's end.
    pub async fn relay(
        &self,
        request: RelayRequest,
        room: &SearchPermits,
    ) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let (node, instance) = (request.node().clone(), request.instance());
        // An edge serves its own node itself, so by that name it means the cloud.
        let own = matches!(&request.from().peer, Remote::Edge(edge) if *edge == node);
        let paths = if own { self.paths.of_servers() } else { self.paths.clone() };
        let resumes = request.target().is_none();
        let patience = if resumes { LOOKED_FOR } else { self.timeout };
        let until = Instant::now() + patience;
        let mut search = PathSearch::new(&paths, &node, instance, until, self.chance);
        if !resumes {
            search = search.at_most(MOVING);
        }
        let mut first = true;
        loop {
            let looking = async { if first { search.first().await } else { search.next().await } };
            let found = tokio::select! {
                biased;
                () = request.wait_cancelled() => return None,
                found = with_permit(looking, room) => found,
            };
            match found {
                Ok(Ok(())) => {}
                Ok(Err(missing)) => {
                    request.refuse(refusal(&missing, own, resumes));
                    return None;
                }
                Err(why) => {
                    let code = if resumes { ErrorCode::NodeNotConnected } else { ErrorCode::Overloaded };
                    request.refuse(SessionError::new(code, why));
                    return None;
                }
            }
            if let Some(plain) = search.plain() {
                return Some((request, plain));
            }
            if !search.ask(|path| request.try_path(&path.sender), request.path_failed()).await {
                return None;
            }
            first = false;
        }
    }

    /// Relays another pod's request to a node that is linked to this one. That pod has searched already, and only our
    /// own links are looked at, so there is at most one hop between pods.
    ///
    /// Returns the request as [`Self::relay`] does.
    pub fn pass(&self, request: RelayRequest) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let Some(linked) = self.paths.here(request.node()).filter(|linked| !linked.sender.is_closed()) else {
            let why = format!("node {} is not linked to this pod", request.node());
            request.refuse(SessionError::new(ErrorCode::NodeNotConnected, why));
            return None;
        };
        if request.instance().is_some_and(|wanted| linked.instance != Some(wanted)) {
            let why = format!("node {} is linked as another process", request.node());
            request.refuse(SessionError::new(ErrorCode::UnknownSession, why));
            return None;
        }
        if !linked.sender.resumes {
            return Some((request, linked.sender));
        }
        request.pass(&linked.sender);
        None
    }
}

/// Runs a search, and takes a permit for it unless it is ready at once. An error names the owner of the permits that
/// are used up.
async fn with_permit<T>(looking: impl Future<Output = T>, room: &SearchPermits) -> Result<T, &'static str> {
    let mut looking = pin!(looking);
    if let Some(found) = looking.as_mut().now_or_never() {
        return Ok(found);
    }
    let own = room.per_link.try_acquire();
    let _own = own.map_err(|_| "too many nodes are looked for at once on this link")?;
    let all = room.all.try_acquire();
    let _all = all.map_err(|_| "too many nodes are looked for at once on this pod")?;
    Ok(looking.await)
}

/// The answer to the opener if no path was found. For an Open it is final, as the search has taken as long as a client
/// waits. After a Resume the opener may try again.
fn refusal(missing: &NodeNotFound, own: bool, resumes: bool) -> SessionError {
    if own && missing.trouble.is_empty() {
        return SessionError::new(ErrorCode::UnknownSession, "the pod that dialled for this session is gone");
    }
    if own {
        return SessionError::new(
            ErrorCode::NodeNotConnected,
            format!("the pod that holds this session is not found{missing}"),
        );
    }
    let code = match (resumes, missing.another) {
        (false, _) => ErrorCode::TargetUnreachable,
        (true, false) => ErrorCode::NodeNotConnected,
        (true, true) => ErrorCode::UnknownSession,
    };
    SessionError::new(code, format!("it {}", missing.sentence()))
}

/// How long a pod looks for the other end of a session before the opener tries again. Other pods are known by names and
/// lists that take up to 5 s to follow.
const LOOKED_FOR: Duration = Duration::from_secs(6);

// Joins a session of another pod with one to a node that is linked here with the plain dialect. A plain link cannot
// resume, so this pod is an end of both sessions.

/// Accepts the request as the session's end, and opens a plain session to the node.
pub(crate) fn accept_for_plain(request: RelayRequest, plain: Arc<LinkSender>, shared: &ServerContext) {
    let node = request.node().clone();
    if let Some(offer) = request.offer() {
        let span = info_span!("bridge", session = %offer.id(), %node);
        let link_context = &shared.link_context;
        let (table, metrics) = (link_context.table.clone(), link_context.metrics.clone());
        link_context.drain.spawn(span, bridge_to_plain(offer, node, plain, table, metrics));
    }
}

/// Opens a plain session for another pod's offer, and copies between the two until both are done.
async fn bridge_to_plain(
    offer: IncomingSession,
    node: NodeName,
    plain: Arc<LinkSender>,
    table: Arc<SessionTable>,
    metrics: Metrics,
) {
    let client = offer.client().to_owned();
    let opening = match table.open(node.clone(), offer.target().clone(), offer.category(), client) {
        Ok(opening) => opening,
        Err(TableFull) => {
            return offer
                .refuse(SessionError::new(ErrorCode::Overloaded, "too many sessions at once on that pod"));
        }
    };
    opening.ask(&plain, None);
    let answer = tokio::select! {
        answer = timeout(offer.patience(), opening.answer()) => answer,
        // Dropping the opening withdraws the request.
        () = offer.withdrawn() => return,
    };
    match answer {
        Ok(OpenOutcome::Open) => {}
        Ok(OpenOutcome::Refused(refusal)) => return offer.refuse(refusal),
        Ok(OpenOutcome::NoPath) => {
            return offer.refuse(SessionError::new(
                ErrorCode::NodeNotConnected,
                format!("the link of node {node} is gone"),
            ));
        }
        Err(_) => {
            let why = format!("node {node} did not answer within {:?}", offer.patience());
            return offer.refuse(SessionError::new(ErrorCode::TargetTimeout, why));
        }
    }
    let alive = metrics.sessions.start(BRIDGE_FRONT);
    bridge_sessions(offer.accept(), opening.into_session(), alive).await;
}

/// The front end's name under which metrics count these sessions.
const BRIDGE_FRONT: &str = "bridge";
