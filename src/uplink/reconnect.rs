//! Keeps an edge or a user's program linked, in one loop: dials, serves and replaces a link, and adds an interactive
//! one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, field, info, info_span, warn};

use crate::acceptor::SessionAcceptor;
use crate::admin::readiness::Readiness;
use crate::paths::uplinks::Uplinks;
use crate::uplink::link_dialer::{DialRequest, LinkDialer, NewLink, UplinkFailure};
use crate::uplink::moves::{ListPlace, MAX_DIALS, dial_elsewhere};
use tunnel_base::backoff::{Backoff, MAX_PAUSE};
use tunnel_base::drain::Drain;
use tunnel_link::backup::BackupDialer;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::link_end::LinkEnd;
use tunnel_link::link::Link;
use tunnel_link::link_reader::LinkReader;
use tunnel_link::table::FrameEvent;
use tunnel_net::interfaces::changes::NetworkChanges;
use tunnel_net::path_mtu::REMEDY;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionError};
use tunnel_proto::hello::LinkPurpose;

/// What keeps an edge, or a user's program, linked to a server.
#[derive(Debug)]
pub(crate) struct Reconnector {
    pub(crate) dialer: LinkDialer,
    /// That of the dialer.
    pub(super) link_context: LinkContext,
    /// Serves incoming sessions; `None` at a user's program, which accepts none.
    acceptor: Option<SessionAcceptor>,
    sessions: Drain,
    readiness: Readiness,
    pub(super) uplinks: Arc<Uplinks>,
    /// Notified when the edge should dial at once: a replaced link was closed, the network changed, or a certificate
    /// was issued.
    redial: Notify,
    /// Detects a proxy that closes links after a number of bytes.
    sent_until_closed: Mutex<SentUntilClosed>,
}

/// The link that is served, and where it leads.
pub(super) struct CurrentLink {
    pub(super) link: Arc<Link>,
    pub(super) place: ListPlace,
    /// The dialled address; `None` through a proxy.
    at: Option<SocketAddr>,
    /// Notified of changes of what proved its name since the link was dialled.
    proof_changes: watch::Receiver<()>,
}

impl CurrentLink {
    /// Returns the request for another link to its server, where sessions resume at once.
    pub(super) fn request(&self, purpose: LinkPurpose) -> DialRequest {
        DialRequest { to: self.at, ..DialRequest::new(purpose) }
    }
}

/// Why a link is no longer the newest one, with the link that replaces it if there is one already.
enum Succession {
    /// The link was closed.
    Ended(LinkEnd),
    /// Its server stops.
    Drained,
    /// Its server requested a link to another one.
    Moved(Box<NewLink>),
    /// A preferred server is reachable again.
    FailedBack(Box<NewLink>),
    /// It was unresponsive, and a backup link answered first.
    Unresponsive(Box<NewLink>),
    /// The tokens, or a user's certificate, have changed.
    Reauthenticated(Box<NewLink>),
}

/// When a link is dialled again.
struct Redial {
    backoff: Backoff,
    /// Changes of what may have prevented the link: the tokens, and the CA file.
    tokens: watch::Receiver<()>,
    authority: watch::Receiver<()>,
}

/// What is served next: a link, or one that is still to be dialled.
#[derive(Default)]
struct ReconnectPlan {
    made: Option<Box<NewLink>>,
    /// The unresponsive link that `made` replaces.
    unresponsive: Option<LinkReader>,
    /// The server to try first.
    place: ListPlace,
    /// The address of the server that stops, to be tried last.
    exclude: Option<SocketAddr>,
}

impl Reconnector {
    /// Creates it; dials nothing.
    pub(crate) fn new(
        dialer: LinkDialer,
        acceptor: Option<SessionAcceptor>,
        sessions: Drain,
        readiness: Readiness,
        uplinks: Arc<Uplinks>,
    ) -> Arc<Self> {
        let link_context = dialer.link_context.clone();
        let redial = Notify::new();
        let sent_until_closed = Mutex::default();
        Arc::new(Self {
            dialer,
            link_context,
            acceptor,
            sessions,
            readiness,
            uplinks,
            redial,
            sent_until_closed,
        })
    }

    /// Keeps a link until the edge or program stops: dials one, unless it is `made` already, serves it, and replaces
    /// it.
    pub(crate) async fn run(self: Arc<Self>, made: Option<NewLink>) {
        let mut backup = BackupDialer::new(self.link_context.metrics.clone());
        let mut redial = Redial {
            backoff: Backoff::new(),
            tokens: self.dialer.tokens.changes(),
            authority: self.dialer.tls.changes(),
        };
        let mut next = ReconnectPlan { made: made.map(Box::new), ..ReconnectPlan::default() };
        while let Some(NewLink { reader, server, at, proof_changes }) =
            self.dial(&mut next, &mut redial).await
        {
            let started = Instant::now();
            let place = next.place.linked(server);
            let current = CurrentLink { link: reader.link.clone(), place, at, proof_changes };
            next = self.serve(reader, &current, next.unresponsive, &mut backup).await;
            redial.backoff.on_attempt_end(started.elapsed(), current.link.has_carried());
            self.link_context.metrics.link_reconnects.inc();
        }
    }

    /// Returns the next link, and dials until there is one. Returns `None` when the edge or program stops.
    async fn dial(&self, next: &mut ReconnectPlan, redial: &mut Redial) -> Option<NewLink> {
        if let Some(made) = next.made.take() {
            return Some(*made);
        }
        let links = &self.link_context.drain;
        let request = DialRequest { exclude: next.exclude, ..DialRequest::new(LinkPurpose::Primary) };
        let mut is_urgent = true;
        loop {
            let mut pause = redial.backoff.pause(rand::random());
            if is_urgent {
                let limits = self
                    .link_context
                    .table
                    .waits()
                    .map(|(waited, timeout)| Backoff::limit(waited, timeout, rand::random()));
                pause = limits.fold(pause, Duration::min);
            }
            tokio::select! {
                () = links.draining() => return None,
                () = sleep(pause) => {}
                () = self.wait_dial_trigger(redial) => {
                    redial.backoff = Backoff::new();
                    continue;
                }
            }
            let dialling = self.dialer.connect(next.place.server, request);
            let failure = match links.run_until(dialling).await? {
                Ok(made) => return Some(made),
                Err(failure) => failure,
            };
            // A server without room would refuse each further attempt, and has less room for it.
            is_urgent = !failure.is_refused || failure.is_stopping;
            self.handle_dial_failure(failure, &mut redial.backoff).await;
            self.link_context.metrics.link_reconnects.inc();
        }
    }

    async fn handle_dial_failure(&self, failure: UplinkFailure, backoff: &mut Backoff) {
        let UplinkFailure { text, is_refused, is_denied, is_name_taken, .. } = failure;
        self.uplinks.note_failure(&text, is_denied);
        // A link to a server that stops has only its earlier sessions: no new one reaches this node.
        let kept = if self.uplinks.is_linked() { "; only earlier sessions continue" } else { "" };
        self.readiness.set(LINK_CONDITION, Err(format!("{text}{kept}")));
        if is_refused {
            backoff.refused();
        }
        if backoff.is_worth_logging() {
            warn!(error = %text, max_backoff = ?MAX_PAUSE, "cannot connect to server, retrying");
        }
        if is_name_taken {
            self.wait_name_free().await;
        }
    }

    /// Updates the readiness condition of this edge's certificate. A new certificate triggers dialling at once.
    pub(crate) fn set_certificate_state(&self, condition: &'static str, state: Result<(), String>) {
        if state.is_ok() && !self.uplinks.is_linked() {
            self.redial.notify_one();
        }
        self.readiness.set_degraded(condition, state);
    }

    /// Waits until redialling makes sense: `redial` was notified, or the tokens or the CA file changed. Cancel safe.
    async fn wait_dial_trigger(&self, changes: &mut Redial) {
        tokio::select! {
            () = self.redial.notified() => {}
            _ = changes.tokens.changed() => {}
            _ = changes.authority.changed() => {}
        }
    }

    /// Serves a link until it is closed or must be replaced, and replaces it. First ends the unresponsive link that it
    /// replaces, whose sessions resume on it.
    async fn serve(
        self: &Arc<Self>,
        mut reader: LinkReader,
        current: &CurrentLink,
        unresponsive: Option<LinkReader>,
        backup: &mut BackupDialer,
    ) -> ReconnectPlan {
        let CurrentLink { link, place, at, .. } = current;
        info!(link = %link.id, server = self.dialer.display_name(place.server), instance = link.instance.map(field::debug), dialect = link.generation(), websocket = link.websocket(), "linked");
        reader.begin();
        self.began(link);
        if let Some(reader) = unresponsive {
            self.ended(&reader, &LinkEnd::ReplacedByBackup);
        }
        // Other links are dialled while this one is read, so that it stays in use until one of them is up.
        let move_requests = watch::Sender::new(None);
        let mut interactive = Box::pin(self.run_interactive(current));
        let mut elsewhere = Box::pin(self.link_elsewhere(current));
        let mut dialled = Box::pin(self.dial_successor(current, backup, move_requests.subscribe()));
        let succession = loop {
            tokio::select! {
                biased;
                event = reader.next() => match event {
                    Ok(FrameEvent::Signal(Frame { body: FrameKind::Drain(None), .. })) => break Succession::Drained,
                    Ok(FrameEvent::Signal(Frame { body: FrameKind::Drain(to), .. })) => {
                        move_requests.send_replace(to);
                    }
                    Ok(event) => self.handle_event(event),
                    Err(why) => break Succession::Ended(why),
                },
                succession = &mut dialled => break succession,
                never = &mut interactive => match never {},
                never = &mut elsewhere => match never {},
            }
        };
        // A link that is not served any more is only there for its sessions, unless it has ended.
        let mut next = ReconnectPlan { place: *place, ..ReconnectPlan::default() };
        match succession {
            Succession::Ended(why) => {
                self.ended(&reader, &why);
                if let LinkEnd::NameTaken(why) = why {
                    warn!(error = %why, "node name in use by another process");
                    self.wait_name_free().await;
                }
                return next;
            }
            Succession::Unresponsive(made) => {
                return ReconnectPlan { made: Some(made), unresponsive: Some(reader), ..next };
            }
            Succession::Drained => {
                info!("server requested a link to another server");
                // It refuses further links.
                next.exclude = *at;
            }
            Succession::Moved(made) => {
                next.place = ListPlace { server: made.server, is_requested: true };
                next.made = Some(made);
            }
            Succession::FailedBack(made) => {
                info!(server = self.dialer.display_name(made.server), "preferred server reachable again");
                next.made = Some(made);
            }
            Succession::Reauthenticated(made) => {
                info!(link = %link.id, "token or certificate changed, link replaced");
                next.made = Some(made);
            }
        }
        let reconnector = self.clone();
        let span = info_span!("link_retire", instance = link.instance.map(field::debug));
        self.link_context.drain.spawn(span, async move {
            let newer = reconnector.uplinks.wait_newer(Some(reader.link.id));
            reconnector.hand_over(reader, newer).await;
        });
        next
    }

    /// Dials a link that replaces a live one, for the first reason that there is.
    async fn dial_successor(
        &self,
        current: &CurrentLink,
        backup: &mut BackupDialer,
        move_requests: watch::Receiver<Option<SocketAddr>>,
    ) -> Succession {
        // At the same server, where sessions resume at once, or else at another one.
        let outrun = backup.race(&current.link, || {
            self.dialer.connect(current.place.server, current.request(LinkPurpose::Backup))
        });
        tokio::select! {
            made = self.fail_back(current) => Succession::FailedBack(Box::new(made)),
            made = outrun => Succession::Unresponsive(Box::new(made)),
            made = self.reauthenticate(current) => Succession::Reauthenticated(Box::new(made)),
            made = self.move_on_request(current, move_requests) => Succession::Moved(Box::new(made)),
        }
    }

    /// Returns a link to another server, preferably at the requested address, once there is a request for one. If no
    /// other server is reached, the current link stays until the next request.
    async fn move_on_request(
        &self,
        current: &CurrentLink,
        mut requests: watch::Receiver<Option<SocketAddr>>,
    ) -> NewLink {
        loop {
            if requests.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            let to = requests.borrow_and_update().filter(|_| !self.sessions.is_draining());
            let Some(to) = to else { continue };
            info!(server_addr = %to, "server requested a link to another server");
            // An address that the list does not have is ignored: a server cannot make an edge dial anything else.
            let first = self.dialer.server_at(to).await.unwrap_or(current.place.server + 1);
            // The current server must not close its link if a load balancer leads there again.
            let request = DialRequest { purpose: LinkPurpose::Backup, to: Some(to), exclude: current.at };
            let process = |made: &NewLink| made.reader.link.instance;
            let dials = if self.dialer.has_one_address().await { 1 } else { MAX_DIALS };
            match dial_elsewhere(
                current.link.instance,
                dials,
                || self.dialer.connect(first, request),
                process,
            )
            .await
            {
                Some(made) => return made,
                None => info!(link = %current.link.id, "no other server reached, link stays"),
            }
        }
    }

    /// Links to another server as well, whenever the current one does not find a node. Servers that have lost each other
    /// each find only their own nodes.
    async fn link_elsewhere(self: &Arc<Self>, current: &CurrentLink) -> Infallible {
        let servers = self.dialer.servers.len();
        if servers == 1 || !current.link.abilities.resumes {
            std::future::pending::<()>().await;
        }
        // An edge is to be found at one server.
        let purpose = if self.acceptor.is_some() { LinkPurpose::Opener } else { LinkPurpose::Backup };
        loop {
            self.uplinks.wait_other_server_request().await;
            let is_other = |link: &Arc<Link>| link.instance != current.link.instance && !link.is_closed();
            if self.uplinks.all().iter().any(is_other) {
                continue;
            }
            let mut is_linked = false;
            for server in (0..servers).filter(|server| *server != current.place.server) {
                let made = self.dialer.connect_to(server, DialRequest::new(purpose));
                let Ok(Ok(NewLink { reader, .. })) = timeout(OTHER_SERVER_TIMEOUT, made).await else {
                    continue;
                };
                // A balancer may lead back to the current one, and a server of SuperEdge would announce this node.
                if reader.link.instance == current.link.instance || !reader.link.abilities.resumes {
                    continue;
                }
                is_linked = true;
                info!(link = %reader.link.id, server = self.dialer.display_name(server), "linked to another server, which may find a node");
                self.uplinks.add_other_server(reader.link.clone());
                reader.begin();
                let reconnector = self.clone();
                let span = info_span!("other_server", instance = reader.link.instance.map(field::debug));
                self.link_context.drain.spawn(span, async move {
                    let link = reader.link.clone();
                    reconnector.hand_over(reader, wait_unused(&link)).await;
                });
                break;
            }
            // Clients that ask again and again must not dial each time.
            if !is_linked {
                sleep(OTHER_SERVER_IDLE).await;
            }
        }
    }

    /// Returns a link to a preferred server, once one is reachable. Never completes for the most preferred
    /// one, or one that was requested.
    async fn fail_back(&self, current: &CurrentLink) -> NewLink {
        let preferred = current.place.preferred();
        if preferred.is_empty() {
            std::future::pending::<()>().await;
        }
        loop {
            sleep(FAIL_BACK_INTERVAL.mul_f64(0.5 + rand::random::<f64>())).await;
            for preferred in preferred.clone() {
                // Both entries may lead to one server, which must not close the earlier link before it is handed over.
                match self.dialer.connect_to(preferred, DialRequest::new(LinkPurpose::Backup)).await {
                    Ok(made) => return made,
                    Err(why) => {
                        debug!(server = self.dialer.display_name(preferred), error = %format_args!("{why:#}"), "preferred server not reachable")
                    }
                }
            }
        }
    }

    /// Returns a link that replaces the current one once the tokens, or a user's certificate, differ from those of its handshake.
    /// The older link stays until then, because servers may learn the new token later.
    ///
    /// Never completes for a plain link: its server closes the older link when the newer one is established.
    async fn reauthenticate(&self, current: &CurrentLink) -> NewLink {
        if !current.link.abilities.resumes {
            std::future::pending::<()>().await;
        }
        let mut changes = current.proof_changes.clone();
        // The sender is in the dialer.
        let _ = changes.changed().await;
        let mut backoff = Backoff::new();
        loop {
            // Also before the first attempt: thousands of edges may share a file.
            tokio::select! {
                () = sleep(backoff.pause(rand::random())) => {}
                Ok(()) = changes.changed() => {
                    backoff = Backoff::new();
                    continue;
                }
            }
            let request = current.request(LinkPurpose::Backup);
            match self.dialer.connect_to(current.place.server, request).await {
                Ok(made) => return made,
                Err(why) => {
                    let text = self.dialer.no_link(&why);
                    if self.dialer.is_refused(&why) {
                        backoff.refused();
                    }
                    if backoff.is_worth_logging() {
                        warn!(error = %text, max_backoff = ?MAX_PAUSE, "cannot link with changed token or certificate, retrying");
                    }
                    // The older link hides the error until it ends, and then the node is lost.
                    self.readiness.set_degraded(
                        TOKEN_CONDITION,
                        Err(format!(
                            "no link with the changed token: {text}; the link with the earlier token stays"
                        )),
                    );
                }
            }
        }
    }

    /// Waits before redialling while another process with this node's name is alive.
    async fn wait_name_free(&self) {
        let _ = self.link_context.drain.run_until(sleep(NAME_CONFLICT_PAUSE)).await;
    }

    /// Handles an event of a link.
    pub(super) fn handle_event(&self, event: FrameEvent) {
        match event {
            FrameEvent::Incoming(offer) if self.sessions.is_draining() => {
                offer.refuse(SessionError::new(ErrorCode::Overloaded, "the edge is stopping"));
            }
            FrameEvent::Incoming(offer) => match &self.acceptor {
                Some(acceptor) => acceptor.serve_incoming(offer),
                None => {
                    let why = "a user's program accepts no sessions";
                    offer.refuse(SessionError::new(ErrorCode::NotAllowed, why));
                }
            },
            FrameEvent::Signal(Frame { body: FrameKind::Conflict(conflict), .. }) => {
                self.readiness.note_until(
                    NODE_NAME_CONDITION,
                    conflict.reason,
                    Instant::now() + CONFLICT_REPORT_TIME,
                );
            }
            // A server sends an edge no others, except Drain: a second one has no effect.
            FrameEvent::RelayRequest(_)
            | FrameEvent::Signal(_)
            | FrameEvent::Parked(..)
            | FrameEvent::Ended(..) => {}
        }
    }

    fn began(&self, link: &Arc<Link>) {
        self.uplinks.add(link.clone());
        self.readiness.set(LINK_CONDITION, Ok(()));
        self.readiness.set_degraded(TOKEN_CONDITION, Ok(()));
        let loss = link.packet_loss();
        self.readiness
            .set_degraded(MTU_CONDITION, loss.map_or(Ok(()), |loss| Err(format!("{loss}; {REMEDY}"))));
    }

    pub(super) fn ended(&self, reader: &LinkReader, why: &LinkEnd) {
        let link = &reader.link;
        self.uplinks.remove(link);
        if !self.uplinks.is_linked() {
            self.readiness.set(LINK_CONDITION, Err(format!("{why}; reconnecting")));
            // From now on the condition of the link has the reason.
            self.readiness.set_degraded(TOKEN_CONDITION, Ok(()));
            // Another task may have begun a link between the check and the report.
            if self.uplinks.is_linked() {
                self.readiness.set(LINK_CONDITION, Ok(()));
            }
        }
        reader.end(why);
        info!(link = %link.id, reason = %why, "link has ended");
        let sent_bytes = link.traffic().sent_bytes;
        if matches!(why, LinkEnd::Closed(_)) && self.sent_until_closed.lock().is_limit(sent_bytes) {
            warn!(sent_bytes, hint = BODY_LIMIT, "links are closed after similar numbers of bytes");
        }
    }

    /// Watches this machine's addresses and default route, and whether it wakes, until draining starts. On a change it
    /// probes the links or, without a link, triggers dialling at once.
    pub(crate) async fn follow_network(self: Arc<Self>) {
        let mut network = match NetworkChanges::watch() {
            Ok(network) => network,
            Err(why) => return debug!(error = %why, "cannot watch addresses and routes"),
        };
        let links = self.link_context.drain.clone();
        while let Some(Ok(_)) = links.run_until(network.next()).await {
            info!("addresses or default route changed, or machine woke, probing links");
            self.uplinks.probe();
            if !self.uplinks.is_linked() {
                self.redial.notify_one();
            }
            sleep(CHANGE_DEBOUNCE).await;
        }
    }

    /// Serves a link that will be replaced. Sessions that this edge opened to nodes migrate once the `next` link
    /// exists; other sessions stay until they end or the server shuts down.
    pub(super) async fn hand_over(&self, mut reader: LinkReader, next: impl Future<Output = ()>) {
        let mut next = pin!(next);
        let link = reader.link.clone();
        let mut moved = false;
        let mut look = tokio::time::interval(POLL_INTERVAL);
        let why = loop {
            tokio::select! {
                event = reader.next() => match event {
                    Ok(event) => self.handle_event(event),
                    Err(why) => break why,
                },
                () = &mut next, if !moved => {
                    moved = true;
                    // Sessions that end at that server stay: they would end with it anyway, and this link is their best
                    // route.
                    let next = self.uplinks.newest(None);
                    let stays = next.is_some_and(|next| next.instance == link.instance);
                    let moves = |end: Option<_>| stays || end.is_none() || end != link.instance;
                    self.link_context.table.leave(&link, None, moves);
                    link.drain();
                }
                // The remaining sessions must not wait on a dead link.
                () = link.wait_unresponsive(), if moved => break LinkEnd::ReplacedByBackup,
                // The edge stops: no session migrates, and those on this link have ended.
                () = self.link_context.drain.draining(), if !moved => moved = true,
                _ = look.tick(), if moved => {
                    if link.sessions() == 0 {
                        link.close();
                    }
                }
            }
        };
        self.ended(&reader, &why);
        self.redial.notify_one();
    }
}

/// The number of bytes that were sent over each of the last links, until the remote or a proxy closed it.
///
/// A link is one request. A proxy that limits the size of a request closes each link after as many bytes.
#[derive(Debug, Default)]
struct SentUntilClosed {
    bytes: u64,
    links: u32,
}

impl SentUntilClosed {
    /// Records a closed link over which `sent` bytes were sent. Returns true once several links in a row are alike.
    /// Links with few bytes are ignored.
    fn is_limit(&mut self, sent: u64) -> bool {
        if sent < MIN_BODY_LIMIT {
            return false;
        }
        // What is still on the way to the proxy when it closes the link differs.
        let is_similar = sent.abs_diff(self.bytes) <= self.bytes / 2;
        *self =
            if is_similar { Self { links: self.links + 1, ..*self } } else { Self { bytes: sent, links: 1 } };
        self.links == SIMILAR_LINKS
    }
}

/// Less than the default limits of proxies.
const MIN_BODY_LIMIT: u64 = 256 * 1024;
/// Number of links in a row that are closed after similar numbers of bytes, before this is reported.
const SIMILAR_LINKS: u32 = 3;
const BODY_LIMIT: &str = "a proxy between this edge and the server seems to limit the size of a request; remove the limit, in nginx \
                          with client_max_body_size 0";

/// Readiness condition: the edge has a link.
pub(crate) const LINK_CONDITION: &str = "link";
/// Note in the readiness report: the path to the server loses large packets.
const MTU_CONDITION: &str = "mtu";
/// Readiness condition: a server accepts the tokens of a changed token file.
const TOKEN_CONDITION: &str = "token";
/// Note in the readiness report: another machine uses the same node name.
const NODE_NAME_CONDITION: &str = "node_name";
/// Mean interval of attempts to reach preferred servers; it varies randomly by half.
pub(super) const FAIL_BACK_INTERVAL: Duration = Duration::from_secs(60);
/// Time to wait while another machine uses this node's name.
const NAME_CONFLICT_PAUSE: Duration = Duration::from_secs(30);
/// Time for which a name conflict is reported. The other machine retries within [`NAME_CONFLICT_PAUSE`] if it is still
/// alive.
const CONFLICT_REPORT_TIME: Duration = Duration::from_secs(90);

/// Debounce time: further changes within it are handled together at its end.
const CHANGE_DEBOUNCE: Duration = Duration::from_secs(1);

/// Waits until no session is on a link, also a while after it was made.
async fn wait_unused(link: &Link) {
    loop {
        sleep(OTHER_SERVER_IDLE).await;
        if link.sessions() == 0 {
            return;
        }
    }
}

/// Timeout for a link to another server, and the time after which it is closed without a session.
const OTHER_SERVER_TIMEOUT: Duration = Duration::from_secs(5);
const OTHER_SERVER_IDLE: Duration = Duration::from_secs(30);

/// Interval of checks whether a replaced link has no sessions and can be closed.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_limit_of_a_proxy_is_reported_once_per_limit() {
        let mut sent = SentUntilClosed::default();
        let mebibyte = |number: u64| number * 1024 * 1024 / 10;
        let mut reported =
            |tenths: &[u64]| tenths.iter().map(|n| sent.is_limit(mebibyte(*n))).collect::<Vec<_>>();
        assert_eq!(reported(&[10, 14, 11, 10, 12]), [false, false, true, false, false]);
        assert_eq!(
            reported(&[100, 0, 90, 1, 110]),
            [false, false, false, false, true],
            "short links do not count"
        );
        assert_eq!(reported(&[10, 90, 10, 90, 10, 90]), [false; 6]);
    }
}
