//! Links to a plain remote: a program of SuperEdge.
//!
//! Such a remote knows no limits, no half-close, no resume and no signals. Everything that it lacks is done here on its
//! behalf, so that sessions and the read loop handle only this program's own frames. A message may stand for several
//! frames, such as an Open that the remote never sends.
//!
//! The rest of a link only asks [`PlainRemote::of`] whether the remote is plain, and else what it can do
//! ([`LinkAbilities`](crate::link::LinkAbilities)). So all that differs between generations of the remote program stays
//! here and in the translator: which one it is, and what it leaves out. Its links have times of their own in
//! [`liveness`](crate::liveness).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use crate::frame_log::log_session_frame;
use crate::link::Link;
use crate::link::plain_state::PlainLinkState;
use crate::lock::Mutex;
use crate::table::session::SharedSession;
use crate::table::{FrameEvent, SessionTable};
use tunnel_base::limited;
use tunnel_base::metrics::Metrics;
use tunnel_proto::budget::PairedReservation;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{DecodeError, EncodedMessage, MAX_EXTENDED_BYTES, encode};
use tunnel_proto::frame::{ErrorCode, Frame, Remote, SessionError, SessionKey};
use tunnel_proto::names::{NodeName, SessionId};
use tunnel_proto::state::SessionState;
use tunnel_proto::superedge::generations::SuperEdgeGeneration;
use tunnel_proto::superedge::{Decoded, PlainEvent, SuperEdgeTranslator};

/// `Ok` if SuperEdge's programs can be served, otherwise the reason why not, with a hint.
pub const SUPEREDGE: Result<(), &str> = Ok(());

/// The state that represents a plain remote on its link. Shared by both directions of the link.
#[derive(Debug)]
pub(crate) struct PlainRemote {
    link: Arc<Link>,
    table: Arc<SessionTable>,
    shared: Arc<PlainLinkState>,
    translator: Mutex<SuperEdgeTranslator>,
    /// Notified when a frame of this side has changed when [`PlainRemoteReader::tick`] is due.
    rescheduled: Notify,
}

impl PlainRemote {
    /// Returns the state of a new link, or `None` if its remote is not plain. If the remote reports no ends, sessions
    /// end after `idle_timeout` without traffic.
    pub(crate) fn of(
        link: &Arc<Link>,
        table: &Arc<SessionTable>,
        idle_timeout: Duration,
    ) -> Option<Arc<Self>> {
        if link.instance.is_some() {
            return None;
        }
        let node = link.peer.node().cloned().unwrap_or_else(NodeName::none);
        let to_edge = matches!(link.peer, Remote::Edge(_));
        // Until the generation is known, the newest is assumed.
        let shared = PlainLinkState::new(table.unreserved.clone(), SuperEdgeGeneration::G5.name());
        let shared = link.plain.get_or_init(|| Arc::new(shared));
        Some(Arc::new(Self {
            link: link.clone(),
            table: table.clone(),
            shared: shared.clone(),
            translator: Mutex::new(SuperEdgeTranslator::new(node, to_edge, idle_timeout, Instant::now())),
            rescheduled: Notify::new(),
        }))
    }

    /// Polls for the next message to send. Returns `None` once the link is closed.
    pub(crate) fn poll_message(&self, cx: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        loop {
            let now = Instant::now();
            let pulled = match self.link.poll_pull(cx, now) {
                Poll::Ready(Some(frame)) => {
                    self.send(frame, now);
                    Poll::Ready(())
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            };
            // Checked last: every message added after this check wakes this task.
            let next = self.translator.lock().next_message();
            if let Some(message) = next {
                self.link.count_sent(message.data.len());
                return Poll::Ready(Some(encode(message)));
            }
            ready!(pulled);
        }
    }

    /// Wakes the gRPC stream for the translator's own messages.
    fn wake_outbound(&self) {
        self.link.with_state(|state| state.queue.wake());
    }

    fn send(&self, frame: Frame, now: Instant) {
        let mut translator = self.translator.lock();
        let before = translator.next_due();
        let decoded = translator.send_frame(frame, now);
        let sooner = translator.next_due().is_some_and(|at| before.is_none_or(|before| at < before));
        drop(translator);
        if sooner {
            self.rescheduled.notify_one();
        }
        // A session's own frames never produce an event.
        let _ = decoded.map(|decoded| self.deliver(decoded, now));
    }

    /// Passes frames to their session. Returns what they require the link's driver to do.
    fn deliver(&self, decoded: Decoded, now: Instant) -> Vec<FrameEvent> {
        let Some(node) = self.link.peer.node() else { return Vec::new() };
        let Decoded { id, category, frames } = decoded;
        let events = frames.into_iter().map(|frame| {
            self.table.on_frame(&self.link, SessionKey { id, category, node: node.clone() }, frame, now)
        });
        events.flatten().collect()
    }

    /// Returns the unread bytes of a session, or 0 if the session does not run here.
    fn unread_of(&self, id: SessionId) -> usize {
        let here = |state: &SessionState| state.path() == Some(self.link.id);
        let unread = |state: &SessionState| if here(state) { state.recv.queued() } else { 0 };
        self.table.session(id).map_or(0, |session| session.read(unread))
    }
}

/// The reading direction of a link to a [`PlainRemote`]. It has backpressure, which such a remote lacks.
#[derive(Debug)]
pub(crate) struct PlainRemoteReader {
    remote: Arc<PlainRemote>,
    metrics: Metrics,
    /// The remote's generation, as last reported.
    generation: Option<SuperEdgeGeneration>,
    /// The session that received data last.
    fed: Option<SessionId>,
    pauses: ReadPauseTimes,
    /// The bytes of a message whose end has not arrived.
    unfinished: PairedReservation,
}

/// How long each session has recently left the link unread. Time in which it is read reduces this again.
#[derive(Debug, Default)]
struct ReadPauseTimes {
    paused: HashMap<SessionId, Duration>,
    /// End of the last pause.
    last: Option<Instant>,
}

impl ReadPauseTimes {
    /// Returns how much longer the link may be left unread for this session: it may use half of the time that the
    /// others have not used. So however many readers stall, some is left for a slow one.
    fn remaining(&mut self, session: SessionId, now: Instant) -> Duration {
        self.reduce(now);
        let own = self.paused.get(&session).copied().unwrap_or_default();
        let all: Duration = self.paused.values().sum();
        (MAX_READ_PAUSE.saturating_sub(all - own) / 2).saturating_sub(own)
    }

    /// Adds a pause that ends now.
    fn add(&mut self, session: SessionId, duration: Duration, now: Instant) {
        *self.paused.entry(session).or_default() += duration;
        self.last = Some(now);
    }

    /// Reduces all pauses in proportion, and their total by the part of the time since the last one that it returns.
    fn reduce(&mut self, now: Instant) {
        let Some(last) = self.last.replace(now) else { return };
        let all: Duration = self.paused.values().sum();
        let left = all.saturating_sub((now - last).mul_f64(PAUSE_RETURNED));
        let share = if all.is_zero() { 0.0 } else { left.as_secs_f64() / all.as_secs_f64() };
        // What is too short to matter is dropped, so that sessions that have ended do not stay.
        self.paused.retain(|_, paused| {
            *paused = paused.mul_f64(share);
            *paused >= Duration::from_millis(1)
        });
    }
}

/// What has more unread bytes than allowed.
#[derive(Debug, Clone, Copy)]
enum OverLimit {
    /// Its target is not reached yet.
    Early,
    Session,
    Link,
    Process,
}

impl PlainRemoteReader {
    pub(crate) fn new(remote: Arc<PlainRemote>, metrics: Metrics) -> Self {
        let unfinished = remote.shared.reservation();
        let pauses = ReadPauseTimes::default();
        Self { remote, metrics, generation: None, fed: None, pauses, unfinished }
    }

    /// Counts the bytes of a message whose end has not arrived among the unread ones.
    ///
    /// # Errors
    ///
    /// The message is longer than other remotes may send, and half of the budget is in use.
    pub(crate) fn charge_unfinished(&mut self, bytes: usize) -> Result<(), DecodeError> {
        self.unfinished.resize(bytes);
        let all = &self.remote.shared.unread;
        if bytes > MAX_EXTENDED_BYTES && all.used() > all.limit() / 2 {
            return Err(DecodeError::TooLong(bytes, MAX_EXTENDED_BYTES));
        }
        Ok(())
    }

    /// Handles a message from the remote.
    pub(crate) fn on_message(&mut self, message: StreamMsg, now: Instant, events: &mut VecDeque<FrameEvent>) {
        let mut translator = self.remote.translator.lock();
        let meaning = translator.handle_message(message, now);
        let replies = translator.has_messages();
        drop(translator);
        if replies {
            self.remote.wake_outbound();
        }
        self.report_generation();
        match meaning {
            PlainEvent::Session(decoded) => {
                for frame in &decoded.frames {
                    log_session_frame("frame received", self.remote.link.id, decoded.id, frame);
                }
                self.deliver(decoded, now, events);
            }
            // An edge's is a request, and a server's the response to ours.
            PlainEvent::Heartbeat if matches!(self.remote.link.peer, Remote::Edge(_)) => {
                self.remote.link.pong(None)
            }
            PlainEvent::Heartbeat | PlainEvent::Answered => {}
            PlainEvent::Unknown(reason) => self.metrics.frames_dropped.count(reason),
        }
    }

    fn deliver(&mut self, decoded: Decoded, now: Instant, events: &mut VecDeque<FrameEvent>) {
        self.fed = Some(decoded.id);
        events.extend(self.remote.deliver(decoded, now));
    }

    /// Logs the remote's generation, and shows it in the status and the metrics, once it is known or has changed.
    fn report_generation(&mut self) {
        let known = self.remote.translator.lock().generation();
        let (Some(generation), before) = (known, self.generation) else { return };
        if before == known {
            return;
        }
        let link = &self.remote.link;
        let name = generation.name();
        self.count_link();
        self.generation = known;
        self.remote.shared.set_generation(name);
        self.metrics.plain_links.opened(name);
        if before.is_none() {
            let node = link.peer.node().map_or("", NodeName::as_str);
            limited!(
                self.metrics.refusals.may_log_about("plain_remote", node) => info,
                link = %link.id, dialect = name, "remote is a program of SuperEdge"
            );
        } else {
            debug!(link = %link.id, dialect = name, "remote is of another generation than before");
        }
    }

    /// Counts the link as closed with its present generation.
    fn count_link(&self) {
        if let Some(generation) = self.generation {
            self.metrics.plain_links.closed(generation.name());
        }
    }

    /// Handles sessions for which a time has come: the target has ended and has received all its data, or the remote
    /// does not report what this end waits for.
    pub(crate) fn tick(&mut self, now: Instant, events: &mut VecDeque<FrameEvent>) {
        let due = self.remote.translator.lock().due(now);
        for id in due {
            let taken = self.remote.unread_of(id) == 0;
            let decoded = self.remote.translator.lock().handle_due(id, taken, now);
            if let Some(decoded) = decoded {
                self.deliver(decoded, now, events);
            }
        }
        self.report_generation();
        self.remote.wake_outbound();
    }

    /// Waits until [`Self::tick`] has to be called for sessions or the remote's generation.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn due(&self) {
        loop {
            let next = self.remote.translator.lock().next_due();
            let rescheduled = self.remote.rescheduled.notified();
            match next {
                None => rescheduled.await,
                Some(at) => {
                    if timeout_at(at, rescheduled).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Leaves the link unread while the last session to receive data, its link or the process has too much unread.
    /// Returns true if it was left unread.
    ///
    /// Once the allowed pause is used up, the session with most unread bytes is reset so that the others continue. Call
    /// this after each message, because each may belong to another session.
    pub(crate) async fn pause_if_full(&mut self) -> bool {
        let Some(fed) = self.fed.take() else { return false };
        let mut paused = false;
        while let Some(over) = self.over(fed) {
            let now = Instant::now();
            let left = self.pauses.remaining(fed, now);
            if left.is_zero() {
                self.metrics.resets.count("slow_reader");
                self.give_up(fed, over);
                // Many small sessions may have to be reset.
                tokio::task::yield_now().await;
                continue;
            }
            self.metrics.read_pauses.inc();
            // Timed out or notified, the next check sees both. Readers on other links do not notify this one.
            let pause = if matches!(over, OverLimit::Process) { left.min(LOOK_INTERVAL) } else { left };
            let _ = timeout(pause, self.remote.shared.taken.notified()).await;
            self.pauses.add(fed, now.elapsed(), Instant::now());
            paused = true;
        }
        paused
    }

    fn over(&self, fed: SessionId) -> Option<OverLimit> {
        let PlainRemote { shared, translator, .. } = &*self.remote;
        let (early, all_early) = translator.lock().early(fed);
        if early >= PLAIN_QUEUE || all_early >= MAX_EARLY {
            return Some(OverLimit::Early);
        }
        match self.remote.unread_of(fed) {
            0 => None,
            most if most >= PLAIN_QUEUE => Some(OverLimit::Session),
            _ if shared.unread.is_exhausted() => Some(OverLimit::Process),
            // A link may exceed its share until half of the process's limit is in use.
            _ => shared.exceeds_fair_share().then_some(OverLimit::Link),
        }
    }

    fn give_up(&self, fed: SessionId, over: OverLimit) {
        let PlainRemote { link, table, .. } = &*self.remote;
        let found = match over {
            OverLimit::Early => {
                let reset = self.remote.translator.lock().give_up_early(fed);
                // A session whose target is not reached yet has no event.
                let _ = reset.map(|reset| self.remote.deliver(reset, Instant::now()));
                return self.remote.wake_outbound();
            }
            OverLimit::Session => None,
            OverLimit::Link => largest_backlog(table.on_link(link, None)),
            OverLimit::Process => largest_backlog(table.all()),
        };
        if let Some(session) = found.or_else(|| table.session(fed)) {
            let why = "its reader is too slow for a link without flow control";
            session.reset_unread(SessionError::new(ErrorCode::Overloaded, why));
        }
    }
}

/// Returns the session with most unread bytes among those with unreserved ones, or `None` if there is none.
fn largest_backlog(sessions: Vec<Arc<SharedSession>>) -> Option<Arc<SharedSession>> {
    let unread = sessions.into_iter().map(|session| (session.read(|state| state.recv.unreserved()), session));
    unread.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes).map(|(_, session)| session)
}

impl Drop for PlainRemoteReader {
    fn drop(&mut self) {
        self.count_link();
    }
}

/// Unread bytes of a plain session at which reading from its link pauses.
const PLAIN_QUEUE: usize = 1024 * 1024;
/// The same for all sessions of a link together for which a target is still dialled.
const MAX_EARLY: usize = 4 * PLAIN_QUEUE;
/// How long a plain link may be left unread at a stretch. A server of SuperEdge pings a link on which it has read
/// nothing for 5 s.
const MAX_READ_PAUSE: Duration = Duration::from_secs(4);
/// How much of that each second of reading gives back, in seconds. So a link is unread for at most 2/5 of a long time.
const PAUSE_RETURNED: f64 = 2.0 / 3.0;
/// How often to check whether readers on other links have freed memory.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

    use super::*;

    use proptest::prelude::*;

    proptest! {
        /// Whatever the sessions do, the link is read for a second in any 6 s: SuperEdge's server closes one on which
        /// it has read nothing for that long.
        #[test]
        fn a_plain_link_is_never_unread_for_long(
            steps in prop::collection::vec((1..6_u64, 0..8000_u64, 0..3000_u64), 1..60)
        ) {
            let (start, mut now) = (Instant::now(), Instant::now());
            let (mut pauses, mut spans) = (ReadPauseTimes::default(), Vec::new());
            for (session, requested, read) in steps {
                let session = SessionId::from_bits(u128::from(session));
                let pause = Duration::from_millis(requested).min(pauses.remaining(session, now));
                spans.push((now, now + pause));
                now += pause;
                pauses.add(session, pause, now);
                now += Duration::from_millis(read);
            }
            let window = Duration::from_secs(6);
            for (_, end) in &spans {
                let from = end.checked_sub(window).map_or(start, |from| from.max(start));
                let unread: Duration = spans.iter().filter(|(_, till)| till <= end)
                    .map(|(begin, till)| till.saturating_duration_since((*begin).max(from))).sum();
                prop_assert!(unread <= Duration::from_secs(5), "unread for {unread:?} of 6 s");
            }
        }
    }

    /// After a long time of reading, everything may be used again, and nothing is kept for sessions of before.
    #[test]
    fn reading_gives_the_pauses_back() {
        let (one, other, now) = (SessionId::from_bits(1), SessionId::from_bits(2), Instant::now());
        let mut pauses = ReadPauseTimes::default();
        pauses.add(one, Duration::from_secs(2), now);
        assert_eq!(pauses.remaining(other, now), Duration::from_secs(1), "half of what is left");
        assert!(pauses.remaining(one, now).is_zero());
        let later = now + Duration::from_secs(3);
        assert_eq!(pauses.remaining(other, later), Duration::from_secs(2));
        assert!(pauses.paused.is_empty());
    }
}
