//! Keeps the edge linked: dials, serves the link, dials again; replaces links, and adds an interactive one.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Once};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, field, info, info_span, warn};

use crate::acceptor::SessionAcceptor;
use crate::admin::readiness::Readiness;
use crate::edge::link_dialer::{AddressHint, LinkDialer, NewLink, is_name_taken};
use crate::edge::{LINK_CONDITION, NAME_CONDITION};
use crate::route::{SessionRouter, Uplinks};
use tunnel_base::backoff::{Backoff, MAX_PAUSE};
use tunnel_base::drain::Drain;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link::{Link, LinkEnd};
use tunnel_link::sender::LinkSender;
use tunnel_link::sender::signals::BackupLink;
use tunnel_link::table::Event;
use tunnel_link::table::traffic_class::TrafficClassifier;
use tunnel_net::network_monitor::NetworkChanges;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::hello::{Dialect, LinkPurpose};

/// What the keeper of the link needs.
#[derive(Debug)]
pub(crate) struct Reconnector {
    pub(crate) dialer: LinkDialer,
    pub(crate) link_context: LinkContext,
    pub(crate) backend: SessionAcceptor,
    pub(crate) sessions: Drain,
    pub(crate) readiness: Readiness,
    pub(crate) uplinks: Arc<Uplinks>,
    pub(crate) route: SessionRouter,
    /// Notified when there is a reason to dial at once: a link that was replaced has ended, the network has changed, or a
    /// certificate was issued.
    pub(crate) redial: Notify,
    /// Done once the start is over.
    pub(crate) started: Once,
}

/// Why a link is not the edge's newest any more.
enum LinkOutcome {
    /// It has ended.
    Ended,
    /// Its pod asks for another one in its place.
    Drained(AddressHint),
    /// There is one to a server that is wanted more.
    FailedBack(Box<NewLink>),
    /// It fell silent, and a second one beside it answered first.
    ReplacedByBackup(Box<NewLink>),
}

impl Reconnector {
    /// Dials the cloud, serves the link, and dials again, until the edge stops.
    pub(crate) async fn run(self: Arc<Self>) {
        let (mut backoff, mut second) = (Backoff::new(), BackupLink::new(self.link_context.metrics.clone()));
        let mut said = LogDedup::default();
        let links = self.link_context.drain.clone();
        let mut changes = [self.dialer.tokens.changes(), self.dialer.tls.changes()];
        let (mut server, mut hint, mut made) = (0, AddressHint::default(), None);
        loop {
            if made.is_none() {
                let pause = backoff.pause(rand::random());
                tokio::select! {
                    () = links.draining() => return,
                    () = sleep(pause) => {}
                    () = self.wait_dial_trigger(&mut changes) => {
                        backoff = Backoff::new();
                        continue;
                    }
                }
            }
            let next = match made.take() {
                Some(made) => Ok(made),
                None => self.dialer.connect(server, hint).await,
            };
            match next {
                Ok(next) => {
                    said = LogDedup::default();
                    server = next.server;
                    let started = Instant::now();
                    let (outcome, carried) = self.serve_link(next, &mut second).await;
                    (hint, made) = match outcome {
                        LinkOutcome::Ended => (AddressHint::default(), None),
                        LinkOutcome::Drained(hint) => (hint, None),
                        LinkOutcome::FailedBack(made) | LinkOutcome::ReplacedByBackup(made) => {
                            (AddressHint::default(), Some(*made))
                        }
                    };
                    backoff.on_attempt_end(started.elapsed(), carried);
                }
                Err(why) => {
                    let text = format!("{why:#}");
                    if !self.uplinks.is_linked() {
                        self.readiness.set(LINK_CONDITION, Err(text.clone()));
                    }
                    if said.is_new(&text) {
                        warn!(error = %text, "cannot link to the cloud; trying again, with pauses that grow to {MAX_PAUSE:?}");
                    }
                    if self.dialer.is_refused(&why) {
                        backoff.refused();
                    }
                    if is_name_taken(&why) {
                        self.wait_name_free().await;
                    }
                }
            }
            self.link_context.metrics.reconnects.inc();
        }
    }

    /// Notes the state of this edge's certificate. A new one is a reason to dial at once.
    pub(crate) fn certified(&self, condition: &'static str, state: Result<(), String>) {
        if state.is_ok() && !self.uplinks.is_linked() {
            self.redial.notify_one();
        }
        self.readiness.set_degraded(condition, state);
    }

    /// Waits for a reason to dial at once: a pod is gone for good, so what takes its place is there, or about to be; or a
    /// token or the authority has changed, which may have kept the link from coming. Cancel safe.
    async fn wait_dial_trigger(&self, [tokens, authority]: &mut [watch::Receiver<()>; 2]) {
        tokio::select! {
            () = self.redial.notified() => {}
            _ = tokens.changed() => {}
            _ = authority.changed() => {}
        }
    }

    /// Serves a link until it ends or is to be replaced. With whether it carried a session.
    async fn serve_link(self: &Arc<Self>, made: NewLink, second: &mut BackupLink) -> (LinkOutcome, bool) {
        let NewLink { mut link, server, at } = made;
        let instance = link.sender.instance.map(field::debug);
        info!(link = %link.sender.id, cloud = self.dialer.display_name(server), instance, dialect = %link.sender.dialect, "linked");
        self.readiness.set(LINK_CONDITION, Ok(()));
        self.link_context.metrics.links.inc();
        self.uplinks.add(link.sender.clone());
        self.started.call_once(release_memory);
        let mut fail_back = Box::pin(self.fail_back(server));
        // The same pod, if it can be reached: there sessions go on at once.
        let hint = AddressHint { to: at, exclude: None };
        let sender = link.sender.clone();
        let mut outrun =
            Box::pin(second.race(&sender, || self.dialer.connect_to(server, hint, LinkPurpose::Backup)));
        let mut interactive = Box::pin(self.run_interactive(&sender, server, at));
        let why = loop {
            let outcome = tokio::select! {
                biased;
                event = link.next() => match event {
                    Ok(Event::Drain(to)) => {
                        info!("the pod asks for a link to another one in its place");
                        LinkOutcome::Drained(AddressHint { to, exclude: at })
                    }
                    Ok(event) => {
                        self.handle_event(event);
                        continue;
                    }
                    Err(why) => break why,
                },
                made = &mut fail_back => {
                    info!(cloud = self.dialer.display_name(made.server), "the cloud answers again where it is wanted more");
                    LinkOutcome::FailedBack(Box::new(made))
                }
                made = &mut outrun => LinkOutcome::ReplacedByBackup(Box::new(made)),
                () = &mut interactive => continue,
            };
            let keeper = self.clone();
            let span = info_span!("old link", instance = link.sender.instance.map(field::debug));
            let carried = link.sender.has_carried();
            let is_outrun = matches!(outcome, LinkOutcome::ReplacedByBackup(_));
            self.link_context.drain.spawn(span, async move {
                let next = keeper.uplinks.newer(link.sender.id);
                if is_outrun { keeper.close_silent(link).await } else { keeper.hand_over(link, next).await }
            });
            return (outcome, carried);
        };
        let carried = link.sender.has_carried();
        self.ended(&link, &why);
        if let LinkEnd::NameTaken(why) = why {
            warn!("{why}");
            self.wait_name_free().await;
        }
        (LinkOutcome::Ended, carried)
    }

    /// A link to a server that is wanted more than number `server`, once one of them answers; never for the first.
    async fn fail_back(&self, server: usize) -> NewLink {
        if server == 0 {
            std::future::pending::<()>().await;
        }
        loop {
            sleep(FAIL_BACK_INTERVAL.mul_f64(0.5 + rand::random::<f64>())).await;
            for wanted in 0..server {
                match self.dialer.connect_to(wanted, AddressHint::default(), LinkPurpose::Primary).await {
                    Ok(made) => return made,
                    Err(why) => {
                        debug!(cloud = self.dialer.display_name(wanted), error = %format_args!("{why:#}"), "still away")
                    }
                }
            }
        }
    }

    /// Another process of our name is alive: dialling soon again is of no use.
    async fn wait_name_free(&self) {
        tokio::select! {
            () = self.link_context.drain.draining() => {}
            () = sleep(NAME_TAKEN) => {}
        }
    }

    /// Does what a link asks for.
    fn handle_event(&self, event: Event) {
        match event {
            Event::Incoming(offer) if self.sessions.is_draining() => {
                offer.refuse(SessionError::new(ErrorCode::Overloaded, "the edge is stopping"));
            }
            Event::Incoming(offer) => self.backend.serve_incoming(offer),
            Event::Parked(parked) => self.route.spawn_resume(parked, &self.link_context.drain),
            Event::Conflict(_, said) => {
                self.readiness.note_until(NAME_CONDITION, said.reason, Instant::now() + CONFLICT_SHOWN_FOR);
            }
            // A cloud sends an edge none of these, and a second Drain changes nothing.
            Event::RelayRequest(_)
            | Event::Find(..)
            | Event::Found(..)
            | Event::Drain(_)
            | Event::Load(_) => {}
        }
    }

    fn ended(&self, link: &Link, why: &LinkEnd) {
        self.uplinks.remove(&link.sender);
        if !self.uplinks.is_linked() {
            self.readiness.set(LINK_CONDITION, Err(format!("{why}; dialling again")));
        }
        self.link_context.metrics.links.dec();
        self.link_context.metrics.links_ended.count(why.name());
        for parked in link.end(why) {
            self.route.spawn_resume(parked, &self.link_context.drain);
        }
        info!(link = %link.sender.id, %why, "link has ended");
    }
}

/// Lets go of what only the start needed, or what was needed for a while. An edge is a small machine, and does nothing most
/// of the time.
pub(crate) fn release_memory() {
    let _ = (tunnel_pages::trim_heap(), tunnel_pages::release_stack_pages());
    match tunnel_pages::release_program_pages() {
        Ok(tunnel_pages::ReleasedPages { bytes, alone }) => {
            debug!(bytes, alone, "the program's pages are forgotten until they are used again");
        }
        Err(cause) => debug!(%cause, "what is mapped cannot be read, and stays"),
    }
}

/// The errors that were logged last, without times: how long an address is waited for depends on which are tried before
/// it. Two, as tries with a certificate and without may fail by turns.
#[derive(Debug, Default)]
struct LogDedup([String; 2]);

impl LogDedup {
    /// Whether it was not just logged; notes that it is now.
    fn is_new(&mut self, text: &str) -> bool {
        let untimed: Vec<_> = text.split(' ').filter(|word| !is_time(word)).collect();
        let untimed = untimed.join(" ");
        if self.0.contains(&untimed) {
            return false;
        }
        self.0 = [untimed, std::mem::take(&mut self.0[0])];
        true
    }
}

/// Whether it is a time in seconds or milliseconds, as messages have them.
fn is_time(word: &str) -> bool {
    let word = word.trim_end_matches([',', ';', ':']);
    let number = word.strip_suffix("ms").or_else(|| word.strip_suffix('s'));
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

/// Between two tries at servers that are wanted more than the one that is linked to; half of it is chance.
const FAIL_BACK_INTERVAL: Duration = Duration::from_secs(60);
/// How long to wait when another machine of our name is alive.
const NAME_TAKEN: Duration = Duration::from_secs(30);
/// How long a conflict over our name is shown: the other machine comes again within [`NAME_TAKEN`], if it is still
/// there.
const CONFLICT_SHOWN_FOR: Duration = Duration::from_secs(90);

// What the edge does when its machine's network changes.

impl Reconnector {
    /// Notices when this machine's addresses or its default route change: links are probed, and without one the edge dials
    /// at once. Until draining begins.
    pub(crate) async fn follow_network(self: Arc<Self>) {
        let mut network = match NetworkChanges::watch() {
            Ok(network) => network,
            Err(why) => return debug!(%why, "changes of this machine's addresses and routes are not noticed"),
        };
        let links = self.link_context.drain.clone();
        loop {
            tokio::select! {
                () = links.draining() => return,
                changed = network.next() => if changed.is_err() { return },
            }
            info!(
                "this machine's addresses or its default route have changed: asking whether the cloud still answers"
            );
            self.uplinks.probe();
            if !self.uplinks.is_linked() {
                self.redial.notify_one();
            }
            sleep(BETWEEN_CHANGES).await;
        }
    }
}

/// What changes within this time behind a change counts as one more, at its end.
const BETWEEN_CHANGES: Duration = Duration::from_secs(1);

// Links that are replaced: one whose pod is to be left, and one that has fallen silent.

impl Reconnector {
    /// Serves a link that is to be replaced: what we opened to nodes moves to another link as soon as there is the `next`
    /// one; the rest may stay until it is over or the pod goes.
    pub(crate) async fn hand_over(&self, mut link: Link, next: impl Future<Output = ()>) {
        let mut next = pin!(next);
        let sender = link.sender.clone();
        let mut moved = false;
        let mut look = tokio::time::interval(POLL_INTERVAL);
        let why = loop {
            tokio::select! {
                event = link.next() => match event {
                    Ok(event) => {
                        self.handle_event(event);
                    }
                    Err(why) => break why,
                },
                () = &mut next, if !moved => {
                    moved = true;
                    // What that pod dialled itself ends with it, and no link to another pod leads there as well as this one.
                    let next = self.uplinks.newest(None);
                    let stays = next.is_some_and(|next| next.instance == sender.instance);
                    let moves = |_: &_, end: Option<_>| stays || end.is_none() || end != sender.instance;
                    for parked in self.link_context.table.leave(&sender, moves) {
                        self.route.spawn_resume(parked, &self.link_context.drain);
                    }
                    sender.drain(None);
                }
                // The sessions that have stayed would wait for nothing on a dead link.
                () = sender.wait_unresponsive(), if moved => break LinkEnd::ReplacedByBackup,
                // The edge stops: nothing moves any more, and what ran here has ended.
                () = self.link_context.drain.draining(), if !moved => moved = true,
                _ = look.tick(), if moved => {
                    if sender.sessions() == 0 {
                        sender.close();
                    }
                }
            }
        };
        self.ended(&link, &why);
        self.redial.notify_one();
    }

    /// Ends a silent link as soon as there is the next one: all that ran here goes on there.
    pub(crate) async fn close_silent(&self, link: Link) {
        self.uplinks.newer(link.sender.id).await;
        self.ended(&link, &LinkEnd::ReplacedByBackup);
    }
}

/// How often a link that is not wanted any more is looked at: it is closed when no session runs on it.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

// An interactive link, beside one that is busy with bulk: what is lost or queued there does not hold up what is typed.

impl Reconnector {
    /// Keeps an interactive link beside `busy`, for as long as bulk and other sessions share that. Where that
    /// leads to a pod of an older version, or a near one, there is none. Never returns; dropped, it has the link handed over.
    pub(crate) async fn run_interactive(
        self: &Arc<Self>,
        busy: &Arc<LinkSender>,
        server: usize,
        at: Option<SocketAddr>,
    ) {
        if !busy.dialect.supports(Dialect::INTERACTIVE) {
            std::future::pending::<()>().await;
        }
        let (mut sorting, mut backoff) = (TrafficClassifier::default(), Backoff::new());
        // After the death of a link the next one is wanted, whatever runs on the busy link: the pod's sessions wait on the
        // dead link until the pod notices, and the next one tells it.
        let mut wanted_until = Instant::now();
        loop {
            while Instant::now() >= wanted_until && !self.is_shared(busy, &mut sorting).await {}
            sleep(backoff.pause(rand::random())).await;
            match self.dial_interactive(busy, server, at).await {
                Ok(link) => {
                    let started = Instant::now();
                    if self.classify_sessions(busy, link, &mut sorting).await {
                        wanted_until = Instant::now() + NOTICED;
                    }
                    backoff.on_attempt_end(started.elapsed(), false);
                }
                Err(why) => {
                    debug!(link = %busy.id, error = %format_args!("{why:#}"), "no interactive link");
                    backoff.refused();
                }
            }
        }
    }

    /// An interactive link to the pod that holds the busy one; any other refuses.
    async fn dial_interactive(
        &self,
        busy: &LinkSender,
        server: usize,
        at: Option<SocketAddr>,
    ) -> anyhow::Result<Link> {
        let hint = AddressHint { to: at, exclude: None };
        let link = self.dialer.connect_to(server, hint, LinkPurpose::Interactive).await?.link;
        anyhow::ensure!(link.sender.instance == busy.instance, "another pod has taken it");
        Ok(link)
    }

    /// Looks once at what runs on a link, when anything moves there: whether interactive sessions share a long way with
    /// bulk.
    async fn is_shared(&self, busy: &Arc<LinkSender>, sorting: &mut TrafficClassifier) -> bool {
        busy.wait_active().await;
        sleep(TrafficClassifier::SAMPLE_INTERVAL).await;
        if !is_long(busy.min_rtt()) || busy.sessions() < 2 {
            return false;
        }
        let sorted = self.link_context.table.classify(busy, sorting);
        sorted.bulk > 0 && sorted.interactive > 0
    }

    /// Sorts the sessions of both links until the one beside ends or is of no use any more. Returns true if it has died:
    /// the pod may not know it yet.
    async fn classify_sessions(
        self: &Arc<Self>,
        busy: &Arc<LinkSender>,
        link: Link,
        sorting: &mut TrafficClassifier,
    ) -> bool {
        let beside = link.sender.clone();
        info!(link = %beside.id, busy = %busy.id, "an interactive link, beside one that is busy with bulk");
        // Dropped with this future, too.
        let (wanted, unwanted) = oneshot::channel();
        let (keeper, span) = (self.clone(), info_span!("interactive"));
        self.link_context.drain.spawn(span, keeper.serve_interactive(link, busy.clone(), unwanted));
        // Nothing is moved there before; the pod waits for the question.
        if !beside.ping_within(INITIAL_ANSWER).await {
            info!(link = %beside.id, "the interactive link does not answer: sessions stay where they are");
            beside.close();
            return false;
        }
        busy.set_interactive(Some(beside.clone()));
        if wanted.is_closed() {
            busy.clear_interactive(&beside);
        }
        let mut shared = Instant::now();
        let died = loop {
            tokio::select! {
                () = beside.closed() => break true,
                () = beside.wait_unresponsive() => {
                    info!(link = %beside.id, "the interactive link has fallen silent: another one is made");
                    beside.close();
                    break true;
                }
                () = sleep(TrafficClassifier::SAMPLE_INTERVAL) => {
                    let sorted = self.link_context.table.classify(busy, sorting);
                    for parked in sorted.parked {
                        self.route.spawn_resume(parked, &self.link_context.drain);
                    }
                    if sorted.bulk > 0 {
                        shared = Instant::now();
                    } else if shared.elapsed() >= UNUSED_TIMEOUT {
                        break false;
                    }
                }
            }
        };
        drop(wanted);
        died
    }

    /// Serves an interactive link until it ends, or until it is not wanted any more, or its pod or the link that
    /// it stands beside goes: then its sessions go on over the node's current link.
    async fn serve_interactive(
        self: Arc<Self>,
        mut link: Link,
        busy: Arc<LinkSender>,
        mut unwanted: oneshot::Receiver<()>,
    ) {
        self.link_context.metrics.links.inc();
        let why = loop {
            tokio::select! {
                event = link.next() => match event {
                    Ok(Event::Drain(_)) => break None,
                    Ok(event) => {
                        self.handle_event(event);
                    }
                    Err(why) => break Some(why),
                },
                _ = &mut unwanted => break None,
            }
        };
        // Before the look at it that follows `stand_beside`.
        drop(unwanted);
        busy.clear_interactive(&link.sender);
        match why {
            Some(why) => self.ended(&link, &why),
            None => self.hand_over(link, self.uplinks.wait_any()).await,
        }
    }
}

/// Whether bulk holds up others on a way with that least round trip; not while that is not known.
fn is_long(least: Option<Duration>) -> bool {
    least.is_some_and(|trip| trip >= LONG_RTT)
}

/// On a way that is shorter than this, bulk does not hold up anything for long.
const LONG_RTT: Duration = Duration::from_millis(5);
/// How long a new interactive link has to show that both of its directions work.
const INITIAL_ANSWER: Duration = Duration::from_secs(5);
/// Time in which every pod notices the death of a link: afterwards its sessions are on the busy link.
const NOTICED: Duration = Duration::from_secs(15);
/// The link is left once no bulk has moved for so long.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_trouble_is_logged_once_however_long_each_address_was_waited_for() {
        let mut said = LogDedup::default();
        let told = |time: &str| {
            format!("10.0.0.1:9000 did not answer within {time}; 10.0.0.2:9000 refused the connection")
        };
        assert!(said.is_new(&told("10s")));
        assert!(!said.is_new(&told("5s")) && !said.is_new(&told("3.334s")) && !said.is_new(&told("900ms")));
        assert!(said.is_new("10.0.0.1:9000 refused the connection"));
        assert!(!said.is_new(&told("2s")), "by turns");
        assert!(said.is_new("the TLS handshake took too long") && said.is_new("it was 502"));
        assert!(said.is_new(&told("10s")) && said.is_new("it was 503"), "numbers count");
    }
}

#[cfg(test)]
mod interactive_tests {
    use super::*;

    #[test]
    fn a_near_way_gets_no_interactive_link_and_neither_does_one_that_was_not_measured() {
        let trips = [None, Some(0), Some(4_999), Some(5_000), Some(600_000)];
        let long = trips.map(|trip| is_long(trip.map(Duration::from_micros)));
        assert_eq!(long, [false, false, false, true, true]);
    }
}
