//! Events of links at a server: sessions to relay or to dial, paths, and the bridge to the plain dialect.

pub(crate) mod user_sessions;

use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use tokio::sync::Semaphore;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, timeout};
use tracing::{field, info, info_span};

use crate::acceptor::LISTENER;
use crate::registry::NodeNotFound;
use crate::route::{MOVE_WAIT, PathSearch, PathSource, RouteError, SessionRequest};
use crate::server::ServerContext;
use crate::server::config_files::LivePolicies;
use crate::session_io::grants::{Grant, SessionSubject, UNTIL_CHANGED};
use crate::session_io::{REVOKED, bridge_sessions};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::addresses::Location;
use tunnel_base::drain::Drain;
use tunnel_base::names::{Host, Instance, NodeName, SessionId, Target};
use tunnel_link::link::{Link, LinkEnd};
use tunnel_link::relay::{EdgeRelay, RelayEnd};
use tunnel_link::sender::LinkSender;
use tunnel_link::table::stream::{IncomingSession, OpenOutcome, Session};
use tunnel_link::table::{Event, RelayRequest, TableFull};
use tunnel_proto::frame::{ErrorCode, Found, Frame, FrameKind, Remote, SessionError};

/// Drives a link until it ends. `is_logged` is false for one of many links of its node.
pub(crate) async fn run_link(mut link: Link, is_logged: bool, shared: &Arc<ServerContext>) -> LinkEnd {
    shared.link_context.metrics.links.opened(link.sender.peer.kind());
    let room = search_permits(shared);
    let why = loop {
        match link.next().await {
            Ok(event) => handle_event(event, &link.sender, &room, shared),
            Err(why) => break why,
        }
    };
    on_link_ended(&link, &why, is_logged, shared);
    why
}

/// Returns the permits for concurrent searches of one more link.
pub(crate) fn search_permits(shared: &Arc<ServerContext>) -> SearchPermits {
    let own = Arc::new(Semaphore::new(MAX_SEARCHES_PER_EDGE));
    SearchPermits { per_link: own, all: shared.search_permits.clone() }
}

/// Handles an event of the link of `sender`.
pub(crate) fn handle_event(
    event: Event,
    sender: &Arc<LinkSender>,
    room: &SearchPermits,
    shared: &Arc<ServerContext>,
) {
    match event {
        // Never happens: a server receives its requests as `Event::RelayRequest`. Dropping an offer refuses it.
        Event::Incoming(_) => {}
        Event::RelayRequest(request) => handle_request(request, shared, room),
        Event::Signal(frame) => handle_signal(frame, sender, shared),
    }
}

fn handle_signal(Frame { node, body }: Frame, sender: &Arc<LinkSender>, shared: &Arc<ServerContext>) {
    match body {
        FrameKind::Find(question) => shared.finder.handle_find(sender, &node, question),
        FrameKind::Found(found) => {
            if let Some(at) = shared.finder.handle_found(sender, &node, found.clone()) {
                retire_old_links(at, node, Some(found), shared);
            }
        }
        FrameKind::Conflict(conflict) => shared.finder.handle_conflict(&node, conflict),
        FrameKind::Drain(_) => {
            // The edge has another link now and is found by that.
            shared.registry.retire_link(sender);
            shared.link_context.table.detach_relays(sender, None);
        }
        FrameKind::Load(load) => {
            if let Some(peers) = &shared.peers {
                peers.handle_load(sender, load);
            }
        }
        FrameKind::ListNodes(requested) => {
            if let Some(peers) = &shared.peers {
                peers.handle_list_nodes(sender, &requested);
            }
        }
        FrameKind::NodePage(page) => {
            if let Some(peers) = &shared.peers {
                peers.handle_node_page(sender, page);
            }
        }
        // The link handles these.
        FrameKind::Session(..) | FrameKind::Ping(_) | FrameKind::Pong(_) => {}
    }
}

/// Handles the end of a link.
pub(crate) fn on_link_ended(link: &Link, why: &LinkEnd, is_logged: bool, shared: &Arc<ServerContext>) {
    shared.link_context.metrics.links.closed(link.sender.peer.kind());
    shared.link_context.metrics.links_closed.count(why.name());
    let sessions = link.end(why);
    let node = link.sender.peer.node().map(field::display);
    if is_logged || link.sender.age() > LOGGED_LINK_AGE {
        info!(link = %link.sender.id, node, reason = %why, sessions, "link has ended");
    }
}

/// Migrates the sessions of a retired link to the node's primary link.
///
/// The link itself stays. The edge may have dialled the new link as a backup because the old one did not answer. If the
/// old one then answers first, the edge closes the new one, and the sessions return.
pub(crate) fn migrate_sessions(left: &Arc<LinkSender>, is_logged: bool, shared: &Arc<ServerContext>) {
    let table = &shared.link_context.table;
    table.detach_relays(left, None);
    let sessions = table.leave(left, None, |_| true);
    let node = left.peer.node().map(field::display);
    if is_logged {
        info!(link = %left.id, node, sessions, "sessions migrated to new link");
    }
}

/// Retires older links of a node that has linked at the server `at`, here or as `found` elsewhere. Pings them and drops
/// them if they do not answer.
pub(crate) fn retire_old_links(
    at: Instance,
    node: NodeName,
    found: Option<Found>,
    shared: &Arc<ServerContext>,
) {
    if shared.peers.is_none() {
        return;
    }
    // Beyond the limit nothing is pinged, and a dead link is detected by its ping timeout.
    let Ok(permit) = shared.move_permits.clone().try_acquire_owned() else { return };
    let (span, shared) = (info_span!("node_moved", %node), shared.clone());
    shared.link_context.drain.clone().spawn(span, async move {
        let contest = async {
            if let Some(found) = found {
                shared.finder.resolve_conflict(at, &node, found).await;
            }
        };
        let table = &shared.link_context.table;
        tokio::join!(shared.finder.migrate_from_old_links(at, &node, table), contest);
        drop(permit);
    });
}

/// The end of a link that lasted longer is always logged: it is not one of many within a minute.
const LOGGED_LINK_AGE: Duration = Duration::from_secs(60);

/// Maximum number of nodes whose older links are pinged at once. Limits the effect of a server that announces nodes
/// endlessly.
pub(crate) const MAX_CONCURRENT_MOVES: usize = 10_000;

// Requests that arrive over links: which are relayed to a node, dialled by this server or refused.

/// Handles a request that arrived over a link. `room` limits the concurrent searches of this link.
pub(crate) fn handle_request(request: RelayRequest, shared: &Arc<ServerContext>, room: &SearchPermits) {
    match &request.from().peer {
        Remote::Edge(edge) if !shared.edge_links.is_valid(request.from()) => {
            let why = format!("the credentials of node {edge} were revoked");
            request.refuse(SessionError::new(ErrorCode::NotAllowed, why));
        }
        Remote::Client(_) => user_sessions::spawn_request(request, shared, room),
        // An edge does not reach its own node through a server: with that name it requests a target of the cloud.
        Remote::Edge(edge) if edge == request.node() && request.instance().is_none() => {
            dial_for_edge(request, shared)
        }
        Remote::Edge(_) | Remote::Server(_) => spawn_relay(request, shared, room),
        Remote::Peer => {
            if let Some((request, plain)) = shared.pass(request) {
                accept_for_plain(request, plain, shared);
            }
        }
    }
}

/// Relays the request of an edge if it is allowed, in its own task, because the search for a path may take seconds.
fn spawn_relay(request: RelayRequest, shared: &Arc<ServerContext>, room: &SearchPermits) {
    let span = info_span!("relay", node = %request.node());
    let (room, shared) = (room.clone(), shared.clone());
    shared.link_context.drain.clone().spawn(span, async move {
        let access = EdgeAccess::of(&request);
        let judged = with_permit(access.judge(&shared), &room).await;
        let judged = judged.unwrap_or_else(|why| Err(SessionError::new(ErrorCode::NodeNotConnected, why)));
        match judged {
            Err(why) if why.code == ErrorCode::NodeNotConnected => return request.refuse(why),
            Err(why) => return refuse(request, why, &access, &shared),
            Ok(()) => {}
        }
        if let Some((request, plain)) = Box::pin(shared.relay(request, &room)).await {
            accept_for_plain(request, plain, &shared);
        }
    });
}

/// Refuses a request of an edge for something that it may not reach; counts and logs that.
fn refuse(request: RelayRequest, why: SessionError, access: &EdgeAccess, shared: &Arc<ServerContext>) {
    let metrics = &shared.link_context.metrics;
    let (entry, at) = access.log_entry();
    metrics.sessions.refused(LISTENER, why.code.name());
    entry.refuse(why.code.name(), &why.reason, at, &metrics.refusals);
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
    match target_at_node(offer.target(), offer.node(), shared) {
        None => shared.backend.serve_incoming(offer),
        Some((node, target)) => {
            let span = info_span!("bridge", session = %offer.id(), %node);
            let drain = shared.link_context.drain.clone();
            drain.spawn(span, bridge_to_node(offer, from, node, target, shared.clone()));
        }
    }
}

/// Returns the other node at which a target of the edge `own` is, and the target there. Returns `None` if the address
/// book names no such node, or edges may not reach that.
fn target_at_node(
    requested: &Target,
    own: &NodeName,
    shared: &Arc<ServerContext>,
) -> Option<(NodeName, Target)> {
    let (node, target) = match shared.cluster.addresses.locate(requested, rand::random()).ok()? {
        Location::Node { node, target, .. } => (node, target),
        Location::Direct(_) => {
            let node = shared.route.node_named_by_address(&requested.host)?;
            (node.clone(), node.target(requested.port))
        }
    };
    // A name that is no Service's is not a node's either: the edge itself routes the names of nodes.
    let is_name = matches!(requested.host, Host::Name(_)) && target == *requested;
    let may = shared.policies.nodes.load().iter().any(|glob| glob.matches(&node));
    (may && !is_name && node != *own).then_some((node, target))
}

/// Opens a session to the node of an edge's target, and copies between the two until both are done. If the node has no
/// edge, this server dials the target itself.
async fn bridge_to_node(
    offer: IncomingSession,
    from: Arc<LinkSender>,
    node: NodeName,
    target: Target,
    shared: Arc<ServerContext>,
) {
    let session = offer.id();
    let access = EdgeAccess { session, from, node: node.clone(), target: target.clone() };
    let (category, client) = (offer.category(), offer.client().to_owned());
    let request = SessionRequest { node, target, category, client, listener: LISTENER, permit: None };
    let opened = tokio::select! {
        opened = shared.route.open(request) => opened,
        // Dropping the opening withdraws the request.
        () = offer.withdrawn() => return,
    };
    match opened.map_err(|error| error.why) {
        Ok(session) => drop(bridge(offer, session, BridgeAccess::Edge(access), shared).await),
        Err(RouteError::Offline { missing, .. }) if missing.is_unknown_node() => {
            shared.backend.serve_incoming(offer);
        }
        Err(RouteError::Refused { refusal, node }) => {
            offer.refuse(SessionError::new(refusal.code, format!("node {node}: {}", refusal.reason)));
        }
        Err(why @ RouteError::Timeout { .. }) => {
            offer.refuse(SessionError::new(ErrorCode::TargetTimeout, why))
        }
        Err(why @ RouteError::Busy(_)) => offer.refuse(SessionError::new(ErrorCode::Overloaded, why)),
        Err(why @ RouteError::Offline { .. }) => {
            offer.refuse(SessionError::new(ErrorCode::TargetUnreachable, why))
        }
    }
}

/// For which party a server bridges a session, and what allows it.
pub(crate) enum BridgeAccess {
    /// For a peer, which judges it.
    Peer,
    /// For an edge.
    Edge(EdgeAccess),
    /// For a user.
    User(Grant),
}

/// Copies between the two ends of a session that this server bridges, while `access` allows it.
async fn bridge(
    offer: IncomingSession,
    session: Session,
    access: BridgeAccess,
    shared: Arc<ServerContext>,
) -> RelayEnd {
    let (grant, edge) = match access {
        BridgeAccess::Peer => (None, None),
        BridgeAccess::User(grant) => (Some(grant), None),
        BridgeAccess::Edge(access) => {
            let (policies, judged) = (shared.policies.clone(), access.clone());
            let judge =
                move || judged.judge_node(&policies).map(|()| UNTIL_CHANGED).map_err(|why| why.reason);
            let subject = SessionSubject {
                id: Some(access.session),
                node: Some(access.node.clone()),
                ..SessionSubject::default()
            };
            match shared.grants.add(subject, judge) {
                Ok(grant) => (Some(grant), Some(access)),
                Err(why) => return refuse_offer(offer, SessionError::new(ErrorCode::NodeNotAllowed, why)),
            }
        }
    };
    let revoked = async {
        let Some(grant) = &grant else { return std::future::pending().await };
        grant.revoked().await;
        let code = if edge.is_some() { ErrorCode::NodeNotAllowed } else { ErrorCode::NotAllowed };
        let why = SessionError::new(code, grant.revocation().unwrap_or_default());
        if let Some(access) = &edge {
            access.log_revoked(&why);
        }
        why
    };
    let alive = shared.link_context.metrics.sessions.start(BRIDGE_LISTENER);
    bridge_sessions(offer.accept(), session, alive, revoked).await
}

fn refuse_offer(offer: IncomingSession, why: SessionError) -> RelayEnd {
    offer.refuse(why.clone());
    RelayEnd { why: Some(why), to_acceptor: 0, to_opener: 0 }
}

/// Maximum number of concurrent searches for nodes and servers for all edges; each takes at most a few seconds.
pub(crate) const MAX_SEARCHES: usize = 1000;
/// Maximum number of concurrent searches for one edge.
pub(crate) const MAX_SEARCHES_PER_EDGE: usize = 100;

// What edges may reach through this server. It is judged for each request, and again after each change of rights.

/// What an edge reaches through this server: another node or, by its own name, a target in the cloud.
#[derive(Debug, Clone)]
pub(crate) struct EdgeAccess {
    session: SessionId,
    from: Arc<LinkSender>,
    node: NodeName,
    target: Target,
}

impl EdgeAccess {
    fn of(request: &RelayRequest) -> Self {
        let (from, node) = (request.from().clone(), request.node().clone());
        Self { session: request.id(), from, node, target: request.target().clone() }
    }

    /// Returns an error if the edge may not reach this now. With [`ErrorCode::NodeNotConnected`] that is not known.
    async fn judge(&self, shared: &Arc<ServerContext>) -> Result<(), SessionError> {
        if self.from.peer.node() != Some(&self.node) {
            return self.judge_node(&shared.policies);
        }
        // A session to the cloud that a peer has dialled. This server judges it as if it dialled.
        if target_at_node(&self.target, &self.node, shared).is_some() {
            return Ok(());
        }
        let checked = shared.backend.dialer().check(&self.target, CHECK_TIMEOUT).await;
        checked.map_err(|why| match SessionError::from(why) {
            why @ SessionError { code: ErrorCode::NotAllowed, .. } => why,
            SessionError { reason, .. } => SessionError::new(ErrorCode::NodeNotConnected, reason),
        })
    }

    fn judge_node(&self, policies: &LivePolicies) -> Result<(), SessionError> {
        if policies.nodes.load().iter().any(|glob| glob.matches(&self.node)) {
            return Ok(());
        }
        // The address at which this server was reached: an operator may have several servers with different rules.
        let own = self.from.ends().and_then(|ends| ends.local);
        let own = own.map_or_else(|| "their server".to_owned(), |at| format!("server {at}"));
        let node = &self.node;
        let why = format!("edges may not reach node {node}: not in server.edge_access.nodes of {own}");
        Err(SessionError::new(ErrorCode::NodeNotAllowed, why))
    }

    /// Returns an access log entry, and the address of the edge.
    fn log_entry(&self) -> (AccessLogEntry, IpAddr) {
        let at = self.from.ends().and_then(|ends| ends.remote);
        let at = at.map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        let mut entry = AccessLogEntry::start(LISTENER, at.to_string());
        entry.id = Some(self.session);
        entry.user = self.from.peer.node().map(ToString::to_string);
        entry.node = Some(self.node.clone());
        entry.target = Some(self.target.clone());
        (entry, at)
    }

    fn log_revoked(&self, why: &SessionError) {
        self.log_entry().0.end(REVOKED, &why.reason);
    }
}

/// Judges the sessions that this server relays for edges after each change of rights, and resets those that are no
/// longer allowed. Returns when draining starts.
pub(crate) async fn judge_relays(shared: Arc<ServerContext>, drain: Drain) {
    let mut changes = shared.grants.changes();
    loop {
        tokio::select! {
            biased;
            () = drain.draining() => return,
            _ = changes.changed() => {}
        }
        let relayed = stream::iter(shared.link_context.table.relays.of_edges());
        relayed.for_each_concurrent(MAX_SEARCHES, |session| judge_relay(session, &shared)).await;
    }
}

async fn judge_relay(session: EdgeRelay, shared: &Arc<ServerContext>) {
    let EdgeRelay { key, from, target } = session;
    let access = EdgeAccess { session: key.id, from, node: key.node, target };
    match access.judge(shared).await {
        Err(why) if why.code != ErrorCode::NodeNotConnected => {
            shared.link_context.table.relays.reset(key.id, &why);
            access.log_revoked(&why);
        }
        Ok(()) | Err(_) => {}
    }
    consume_budget().await;
}

/// Time to resolve the name of a target that a peer has dialled.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

// Paths for sessions that others request to relay through this server, found by the same search as for its own.

/// The permits for concurrent searches, of one link and in total. A node that is linked here, or cached, needs no
/// search.
#[derive(Debug, Clone)]
pub(crate) struct SearchPermits {
    /// Permits for this link.
    pub(crate) per_link: Arc<Semaphore>,
    /// Permits for all links.
    pub(crate) all: Arc<Semaphore>,
}

impl ServerContext {
    /// Relays an edge's request to its node, or to the server that has dialled for the edge. Continues searching while
    /// the answer is *not here*.
    ///
    /// Only the opener of a session moves it to another path. Once a request may have reached its acceptor, this server
    /// does not try a second path on its own. It sends PathLost to the opener, and what it has learned serves the opener's
    /// next attempt.
    ///
    /// Returns the request with the node's link if that is plain: this server must then be the end of the session.
    pub(crate) async fn relay(
        &self,
        request: RelayRequest,
        room: &SearchPermits,
    ) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let (node, instance) = (request.node().clone(), request.instance());
        // An edge serves its own node itself, so with that name it means the cloud.
        let own = matches!(&request.from().peer, Remote::Edge(edge) if *edge == node);
        let finder = self.finder.clone();
        let paths = if own { PathSource::Peers(finder) } else { PathSource::Nodes(finder) };
        let resumes = request.resumes();
        let timeout = if resumes { PATH_SEARCH_TIME } else { self.route.open_timeout };
        let mut search = PathSearch::new(&paths, &node, instance, Instant::now() + timeout, rand::random);
        if !resumes {
            search = search.at_most(MOVE_WAIT);
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

    /// Relays a peer's request to a node that is linked here. That peer has already searched and only local links are
    /// used here, so there is at most one hop between servers.
    ///
    /// Returns the request like [`Self::relay`].
    fn pass(&self, request: RelayRequest) -> Option<(RelayRequest, Arc<LinkSender>)> {
        let Some(linked) = self.registry.link_of(request.node()).filter(|linked| !linked.sender.is_closed())
        else {
            let why = format!("node {} is not linked to this server", request.node());
            request.refuse(SessionError::new(ErrorCode::NodeNotConnected, why));
            return None;
        };
        if request.instance().is_some_and(|required| linked.sender.instance != Some(required)) {
            let why = format!("node {} is linked by another process", request.node());
            request.refuse(SessionError::new(ErrorCode::UnknownSession, why));
            return None;
        }
        if linked.sender.is_plain() {
            return Some((request, linked.sender));
        }
        request.pass(&linked.sender);
        None
    }
}

/// Runs a search, with a permit unless it is ready at once. The error names the limit that was reached.
async fn with_permit<T>(looking: impl Future<Output = T>, room: &SearchPermits) -> Result<T, &'static str> {
    let mut looking = pin!(looking);
    if let Some(found) = looking.as_mut().now_or_never() {
        return Ok(found);
    }
    let own = room.per_link.try_acquire();
    let _own = own.map_err(|_| "too many concurrent node searches on this link")?;
    let all = room.all.try_acquire();
    let _all = all.map_err(|_| "too many concurrent node searches on this server")?;
    Ok(looking.await)
}

/// Returns the error for the opener if no path was found. For an Open it is final, because the search has taken as long
/// as a client waits. After a Resume the opener may try again.
fn refusal(missing: &NodeNotFound, own: bool, resumes: bool) -> SessionError {
    if own && missing.trouble.is_empty() {
        return SessionError::new(
            ErrorCode::UnknownSession,
            "the server that dialled for this session has stopped",
        );
    }
    if own {
        return SessionError::new(
            ErrorCode::NodeNotConnected,
            format!("the server that holds this session was not found{missing}"),
        );
    }
    let code = match (resumes, missing.another) {
        (false, _) => ErrorCode::TargetUnreachable,
        (true, false) => ErrorCode::NodeNotConnected,
        (true, true) => ErrorCode::UnknownSession,
    };
    SessionError::new(code, format!("it {}", missing.sentence()))
}

/// How long a server searches for the remote end of a session before the opener tries again. Names and lists of peers
/// take up to 5 s to refresh.
const PATH_SEARCH_TIME: Duration = Duration::from_secs(6);

// Joins a session of a peer, an edge or a user with a session to a node that is linked here with the plain dialect. A plain link cannot
// resume, so this server is an end of both sessions.

/// Accepts the request as the end of the session, and opens a plain session to the node.
pub(crate) fn accept_for_plain(request: RelayRequest, plain: Arc<LinkSender>, shared: &Arc<ServerContext>) {
    let of_edge = matches!(request.from().peer, Remote::Edge(_));
    let access = if of_edge { BridgeAccess::Edge(EdgeAccess::of(&request)) } else { BridgeAccess::Peer };
    let span = info_span!("bridge", session = %request.id(), node = %request.node());
    let bridged = bridge_to_plain(request, plain, access, shared.clone());
    shared.link_context.drain.spawn(span, async move { drop(bridged.await) });
}

/// Like [`accept_for_plain`], with access that the caller has judged. Returns when the session is over.
pub(crate) async fn bridge_to_plain(
    request: RelayRequest,
    plain: Arc<LinkSender>,
    access: BridgeAccess,
    shared: Arc<ServerContext>,
) -> RelayEnd {
    let Some(offer) = request.offer() else {
        let why = SessionError::new(ErrorCode::Overloaded, "this server cannot be the session's end");
        return RelayEnd { why: Some(why), to_acceptor: 0, to_opener: 0 };
    };
    match open_plain(&offer, &plain, &shared).await {
        Ok(session) => bridge(offer, session, access, shared).await,
        Err(why) => refuse_offer(offer, why),
    }
}

/// Opens a plain session to the offer's node.
async fn open_plain(
    offer: &IncomingSession,
    plain: &Arc<LinkSender>,
    shared: &ServerContext,
) -> Result<Session, SessionError> {
    let (client, table) = (offer.client().to_owned(), &shared.link_context.table);
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

/// The listener label of these sessions in metrics.
const BRIDGE_LISTENER: &str = "bridge";
