//! What a link sends in addition to its sessions' frames: signals, last frames, pings; and backup links.

use std::fmt;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::congestion::MinFilter;
use crate::sender::queue::PingAnswer;
use crate::sender::{INITIAL_RTT_MICROS, LinkSender};
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Instance, NodeName};
use tunnel_net::path_mtu::{self, PacketLoss};
use tunnel_proto::frame::{
    Conflict, ErrorCode, Found, Frame, FrameKind, ListNodes, Load, NodePage, SessionError, SessionFrame,
    SessionKey,
};

impl LinkSender {
    /// Replies to a frame about an unknown session. Excess replies are dropped, because the remote retries.
    pub(crate) fn reply(&self, session: &SessionKey, frame: SessionFrame) {
        let frame = self.frame(session, frame);
        self.with_state(|state| state.queue.push_reply(frame));
    }

    /// Sends PathLost for a session after everything it has sent here, because its opener leaves this path.
    ///
    /// It is never refused, because the remote would wait for it; there is at most one for each session.
    pub(crate) fn lost(&self, session: &SessionKey, epoch: u64) {
        let frame = self.frame(session, SessionFrame::PathLost { epoch });
        self.with_state(|state| state.queue.push_last(frame));
    }

    /// Asks a peer whether `node` is connected to it. Returns false if too much waits to be sent.
    pub fn find(&self, node: &NodeName, question: u64) -> bool {
        self.signal(node, FrameKind::Find(question))
    }

    /// Sends a peer a Found frame about `node`. Returns false if too much waits to be sent.
    pub fn found(&self, node: &NodeName, found: Found) -> bool {
        self.signal(node, FrameKind::Found(found))
    }

    /// Sends a Drain frame: a server requests that its edge links to another server, preferably to the one at `to`, or
    /// an edge confirms that it has.
    ///
    /// Returns false if too much waits to be sent, or if the remote is plain.
    pub fn drain(&self, to: Option<SocketAddr>) -> bool {
        let said = self.peer.frame_node().is_some_and(|node| self.signal(node, FrameKind::Drain(to)));
        self.drained.fetch_or(said, Relaxed);
        said
    }

    /// Returns true if [`Self::drain`] was sent on this link.
    pub fn is_drained(&self) -> bool {
        self.drained.load(Relaxed)
    }

    /// Sends a peer the number of nodes that are connected here.
    pub fn load(&self, load: Load) {
        self.signal(&NodeName::none(), FrameKind::Load(load));
    }

    /// Requests a page of a peer's nodes. Returns false if too much waits to be sent.
    pub fn list_nodes(&self, asked: ListNodes) -> bool {
        self.signal(&NodeName::none(), FrameKind::ListNodes(asked))
    }

    /// Sends a peer a page of the nodes that are connected here. Returns false if an earlier page still waits to be
    /// sent, because a peer requests the next page only after it.
    pub fn node_page(&self, page: NodePage) -> bool {
        let is_page = |frame: &Frame| matches!(frame.body, FrameKind::NodePage(_));
        if self.lock().queue.waiting.replies.iter().any(is_page) {
            return false;
        }
        self.signal(&NodeName::none(), FrameKind::NodePage(page))
    }

    /// Sends an edge or a peer a Conflict frame: among the processes of that name, `keeps` keeps it.
    pub fn conflict(&self, node: &NodeName, keeps: Option<Instance>, why: impl fmt::Display) {
        let reason = SessionError::new(ErrorCode::Overloaded, why).reason;
        self.signal(node, FrameKind::Conflict(Conflict { instance: keeps, reason }));
    }

    /// Closes the link of an edge because another process keeps its name, and sends the edge the reason.
    pub fn close_name_taken(&self, why: String) {
        // The first reason is as good.
        let _ = self.dismissed.set(why);
        self.close();
    }

    /// Returns why the link was closed by [`Self::close_name_taken`].
    pub(crate) fn close_reason(&self) -> Option<&String> {
        self.dismissed.get()
    }

    /// Wakes the puller, for what a dialect itself has to send.
    pub(crate) fn wake_outbound(&self) {
        self.with_state(|state| state.queue.wake());
    }

    fn signal(&self, node: &NodeName, body: FrameKind) -> bool {
        let frame = Frame { node: node.clone(), body };
        !self.is_plain() && self.with_state(|state| state.queue.push_reply(frame))
    }
}

/// Returns the reply for an unknown session.
pub(crate) fn unknown(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::UnknownSession, UNKNOWN) }
}

/// Why a session cannot be resumed.
pub(crate) const UNKNOWN: &str = "session unknown to this process";

// Pings and their answers, and what they show: the link's RTT, and whether the link is unresponsive.

/// How long the remote of a link that was dialled here is pinged often.
#[derive(Debug, Default)]
pub(crate) struct WatchWindow {
    /// In milliseconds since the link was created.
    until_millis: AtomicU64,
    /// Time of the remote's last answer to a ping, on the same clock; 0 before the first answer.
    answered_millis: AtomicU64,
    /// Notified when sessions become active after a pause, and when the link is closed.
    stirred: Notify,
    /// Notified while the remote does not answer.
    silent: Notify,
    /// Notified when sessions become active after a pause.
    moved: Notify,
}

/// The state of a link at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Liveness {
    /// Interval of pings. `None` means that the remote is pinged only when nothing is received.
    pub(crate) ask_every: Option<Duration>,
    /// Since when a ping is unanswered.
    pub(crate) unanswered: Option<Instant>,
    /// How long a ping may stay unanswered. `None` before the first answer, which may take [`INITIAL_TIMEOUT`].
    pub(crate) timeout: Option<Duration>,
}

impl Liveness {
    /// Returns when the link counts as unresponsive if no answer arrives.
    pub(crate) fn silent_at(&self) -> Option<Instant> {
        self.ask_every?;
        Some(self.unanswered? + self.timeout.unwrap_or(INITIAL_TIMEOUT))
    }
}

impl LinkSender {
    /// Requests a ping to the remote.
    pub fn ping(&self) {
        self.with_state(|state| {
            state.queue.ping.get_or_insert_with(Instant::now);
            state.queue.wake();
        });
    }

    /// Pings the remote because the route to it may have changed. Without an answer the link soon counts as
    /// unresponsive, even if no session has been active recently.
    pub fn probe(&self) {
        self.watch.until_millis.fetch_max(self.millis(Instant::now()) + millis(PROBED), Relaxed);
        self.ping();
        self.wake_reader();
    }

    /// Returns true if the remote has answered a ping since then: the link has worked in both directions.
    pub(crate) fn has_answered_since(&self, since: Instant) -> bool {
        let answered = self.watch.answered_millis.load(Relaxed);
        answered > 0 && answered >= self.millis(since)
    }

    /// Pings the remote and returns true if it answers within `patience`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ping_within(&self, patience: Duration) -> bool {
        let mut answered = std::pin::pin!(self.answered.notified());
        answered.as_mut().enable();
        self.ping();
        timeout(patience, answered).await.is_ok()
    }

    /// Queues the answer to a ping; it replaces an older one that still waits.
    pub fn pong(&self, number: Option<u64>) {
        self.with_state(|state| {
            state.queue.pong = Some(FrameKind::Pong(number));
            state.queue.wake();
        });
    }

    /// Handles the answer to ping `number`. Returns the RTT.
    pub fn ponged(&self, number: u64, now: Instant) -> Duration {
        let Some(answer) = self.with_state(|state| state.queue.handle_pong(number, now)) else {
            return Duration::ZERO;
        };
        let PingAnswer { rtt, least, before, cap } = answer;
        self.watch.answered_millis.store(self.millis(now).max(1), Relaxed);
        self.answered.notify_waiters();
        if cap != before {
            let (link, node) = (self.id, self.peer.node().map(tracing::field::display));
            tracing::trace!(%link, node, cwnd_bytes = cap, previous_cwnd_bytes = before, rtt = ?rtt, "congestion window changed");
        }
        self.least_round_trip_micros.store(micros(least), Relaxed);
        self.set_rtt(rtt);
        rtt
    }

    pub(crate) fn set_rtt(&self, rtt: Duration) {
        self.round_trip_micros.store(micros(rtt), Relaxed);
    }

    /// Returns the latest RTT.
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_micros.load(Relaxed))
    }

    /// Returns the minimum RTT of the last minutes, or `None` before the first answer.
    pub fn min_rtt(&self) -> Option<Duration> {
        let micros = self.least_round_trip_micros.load(Relaxed);
        (micros != u64::MAX).then(|| Duration::from_micros(micros))
    }

    /// Waits until the remote of a link that was dialled here has not answered a ping for 1 s and four RTTs.
    ///
    /// Never returns while no session has been active for ten minutes, nor on a plain link. Only one task may wait.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_unresponsive(&self) {
        loop {
            while !self.is_silent(Instant::now()) {
                self.watch.silent.notified().await;
            }
            if timeout(LOOK_RETRY_AFTER, self.wait_responsive()).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the remote of an unresponsive link answers.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_responsive(&self) {
        loop {
            let mut answered = std::pin::pin!(self.answered.notified());
            answered.as_mut().enable();
            if !self.is_silent(Instant::now()) {
                return;
            }
            answered.await;
        }
    }

    /// Returns how long the oldest ping has been unanswered.
    pub fn unanswered(&self) -> Option<Duration> {
        self.life(Instant::now()).unanswered.map(|since| since.elapsed())
    }

    /// Records that a frame of a session passes over the link.
    pub(crate) fn mark_active(&self, now: Instant) {
        let until = self.millis(now) + millis(WATCHED);
        let before = self.watch.until_millis.load(Relaxed);
        if until > before {
            self.watch.until_millis.store(until, Relaxed);
        }
        if until >= before + millis(PAUSE) {
            self.wake_reader();
            self.watch.moved.notify_waiters();
        }
    }

    /// Waits until frames of sessions are sent or received, or returns at once if any were within the last 2 s.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_active(&self) {
        loop {
            let mut moved = std::pin::pin!(self.watch.moved.notified());
            moved.as_mut().enable();
            if self.life(Instant::now()).ask_every == Some(ASK_MOVING) {
                return;
            }
            moved.await;
        }
    }

    /// Returns the current state of the link.
    pub(crate) fn life(&self, now: Instant) -> Liveness {
        let left = self.watch.until_millis.load(Relaxed).saturating_sub(self.millis(now));
        let ask_every = match left {
            0 => None,
            left if left + millis(MOVING) > millis(WATCHED) => Some(ASK_MOVING),
            _ => Some(ASK_WATCHED),
        };
        let state = self.lock();
        Liveness { ask_every, unanswered: state.queue.unanswered(), timeout: state.queue.rtts.ping_timeout() }
    }

    /// Wakes the read loop for a check.
    pub(crate) fn wake_reader(&self) {
        self.watch.stirred.notify_one();
    }

    /// Waits until sessions become active after a pause, or the link is probed or closed. Only one task may wait.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn wait_woken(&self) {
        self.watch.stirred.notified().await;
    }

    /// Wakes the task in [`Self::wait_unresponsive`] for a check.
    pub(crate) fn wake_unresponsive(&self) {
        self.watch.silent.notify_one();
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.life(now).silent_at().is_some_and(|at| at <= now)
    }

    fn millis(&self, now: Instant) -> u64 {
        millis(now.saturating_duration_since(self.made))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn micros(rtt: Duration) -> u64 {
    u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)
}

/// Timeout of the first answer, before the RTT is known: enough for a line of 1 s.
const INITIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Enough for a process that was suspended to read an answer that arrived meanwhile. Its clock kept running, so its
/// link seems unresponsive for the same time.
const LOOK_RETRY_AFTER: Duration = Duration::from_millis(20);
/// How long a link is watched after a frame of a session.
const WATCHED: Duration = Duration::from_secs(600);
/// How long a link is watched after a probe.
const PROBED: Duration = Duration::from_secs(15);
/// How long sessions count as active after a frame.
const MOVING: Duration = Duration::from_secs(2);
/// A frame after a pause of at least this wakes the tasks that watch the link.
const PAUSE: Duration = Duration::from_secs(1);
/// Ping interval on a link with active sessions.
const ASK_MOVING: Duration = Duration::from_millis(500);
/// Ping interval on a watched link.
const ASK_WATCHED: Duration = Duration::from_secs(1);

// The recent RTTs of a link, and the timeout derived from them.

/// The smoothed RTT of pings and its variation.
#[derive(Debug, Default)]
pub(crate) struct RttEstimator {
    /// `None` before the first answer.
    smoothed: Option<Duration>,
    variation: Duration,
    least: MinFilter,
    /// The longest RTT of the last minutes, and when it was measured.
    longest: Option<(Duration, Instant)>,
}

impl RttEstimator {
    /// Records the RTT of an answered ping. Returns the minimum RTT of the last minutes.
    pub(crate) fn sample(&mut self, rtt: Duration, now: Instant) -> Duration {
        let least = self.least.sample(rtt, now);
        let renews = |(longest, at)| rtt >= longest || now.saturating_duration_since(at) >= LONGEST_KEPT;
        if self.longest.is_none_or(renews) {
            self.longest = Some((rtt, now));
        }
        let Some(smoothed) = self.smoothed else {
            self.smoothed = Some(rtt);
            return least;
        };
        self.variation = (self.variation * 3 + smoothed.abs_diff(rtt)) / 4;
        self.smoothed = Some((smoothed * 7 + rtt) / 8);
        least
    }

    /// Returns how long a ping may stay unanswered before the link counts as unresponsive: 1 s and four RTTs, or 5/4 of
    /// the longest RTT of the last minutes if that is more.
    ///
    /// A lost packet is retransmitted after slightly more than two of these RTTs, and again a second later. A radio may
    /// pause for longer from time to time, and the mean forgets that within seconds. Each such pause must be a quarter
    /// longer than the last one to be a false alarm, so there are about ten before the maximum is reached. Returns
    /// `None` before the first answer.
    pub(crate) fn ping_timeout(&self) -> Option<Duration> {
        let usual = MIN_PING_TIMEOUT + (self.smoothed? + self.variation) * RTTS_PER_TIMEOUT;
        let (longest, _) = self.longest?;
        Some(usual.max((longest * 5 / 4).min(MAX_PATIENCE)))
    }
}

const MIN_PING_TIMEOUT: Duration = Duration::from_secs(1);
const RTTS_PER_TIMEOUT: u32 = 4;
/// How long the longest RTT counts.
const LONGEST_KEPT: Duration = Duration::from_secs(600);
/// Maximum timeout because of one long RTT: less than [`IDLE_TIMEOUT`], so that a backup link is still of use.
const MAX_PATIENCE: Duration = Duration::from_secs(10);

// When a link's remote last sent anything, and when to ping it.

/// Time of the remote's last frame; decides on the ping or the end that follows silence.
#[derive(Debug)]
pub(crate) struct Keepalive {
    pub(crate) last_received: Instant,
    pub(crate) last_ping: Instant,
    pub(crate) looked: Instant,
    /// Idle time after which the link is closed.
    pub(crate) silence_limit: Duration,
    /// Idle time after which the remote is pinged.
    pub(crate) ask_after: Duration,
    /// Whether this end watches an extended link, as the end that dialled does.
    pub(crate) watches: bool,
    /// When to check a watched link next.
    pub(crate) watched: Option<Instant>,
}

/// The result of a check of an extended link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeepaliveAction {
    /// The link is alive, or an answer is pending.
    None,
    /// The remote must be pinged.
    SendPing,
    /// The remote has not answered in time.
    TimedOut,
}

impl Keepalive {
    /// Checks an extended link.
    ///
    /// A watched link is pinged regularly whatever is received, because only an answer shows that both directions work.
    /// It is not pinged again while an answer is pending.
    pub(crate) fn poll(&mut self, life: Liveness, now: Instant) -> KeepaliveAction {
        let unasked = now - self.last_ping;
        let look = match (life.silent_at(), life.ask_every) {
            (Some(at), _) if at <= now => KeepaliveAction::TimedOut,
            // The RTT has to be known, so the first ping is sent at once.
            (_, Some(every)) if life.unanswered.is_none() && (unasked >= every || life.timeout.is_none()) => {
                KeepaliveAction::SendPing
            }
            _ if now - self.last_received >= self.ask_after && unasked >= self.ask_after => {
                KeepaliveAction::SendPing
            }
            _ => KeepaliveAction::None,
        };
        if look == KeepaliveAction::SendPing {
            self.last_ping = now;
        }
        let next = life.ask_every.map(|every| now + every / 2);
        let soon = life.silent_at().filter(|at| *at > now);
        self.watched =
            next.map(|next| soon.map_or(next, |at| at.min(next)).max(now + WATCHED_CHECK_INTERVAL));
        look
    }

    /// Returns when to check for signs of life next.
    pub(crate) fn next(&self) -> Instant {
        if let Some(next) = self.watched {
            return next;
        }
        (self.last_received.max(self.last_ping) + self.ask_after).max(self.looked + CHECK_INTERVAL)
    }

    /// Records that something was received. Returns true if a check is due, which otherwise only runs on silence. So a
    /// link that is pinged in time is never woken just for a check.
    pub(crate) fn on_receive(&mut self, now: Instant) -> bool {
        self.last_received = now;
        now - self.looked >= PING_AFTER * 2
    }
}

/// Idle time after which the remote is pinged.
pub(crate) const PING_AFTER: Duration = Duration::from_secs(6);
/// The same at the end that was dialled. It is longer, so that an idle link has one ping at a time and not two that
/// cross.
pub(crate) const PING_CALLER_AFTER: Duration = Duration::from_millis(7500);
/// A link on which nothing was received for this long is closed.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Minimum time between two checks, so that a stopped clock does not cause a busy loop.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The same on a watched link.
const WATCHED_CHECK_INTERVAL: Duration = Duration::from_millis(10);

// What is visible of a link from outside: its endpoints and its traffic.

/// The connection under a link, and the program at its remote end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkEndpoints {
    /// Address of this end.
    pub local: Option<SocketAddr>,
    /// Address of the remote end, or of the proxy if one was dialled through.
    pub remote: Option<SocketAddr>,
    /// Whether this end has dialled.
    pub dialled: bool,
    /// The remote program's own description, at most 40 printable characters.
    pub version: Option<Box<str>>,
}

/// A snapshot of the messages and bytes that a link has moved since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub sent_messages: u64,
    /// Bytes of data sent.
    pub sent_bytes: u64,
    /// Messages received.
    pub received_messages: u64,
    /// Bytes of data received.
    pub received_bytes: u64,
}

/// Counters of a running link, read as [`Traffic`].
#[derive(Debug, Default)]
pub(crate) struct LinkStats {
    ends: OnceLock<LinkEndpoints>,
    sent_messages: AtomicU64,
    sent_bytes: AtomicU64,
    received_messages: AtomicU64,
    received_bytes: AtomicU64,
}

impl LinkSender {
    /// Records the link's endpoints; only the first call has an effect.
    pub(crate) fn set_endpoints(&self, ends: LinkEndpoints) {
        let _ = self.seen.ends.set(ends);
    }

    /// Returns the link's endpoints if they are known.
    pub fn ends(&self) -> Option<&LinkEndpoints> {
        self.seen.ends.get()
    }

    /// Returns what is lost on the way to the remote, if the link uses small segments for that reason.
    pub fn packet_loss(&self) -> Option<PacketLoss> {
        let ends = self.ends().filter(|ends| ends.dialled)?;
        path_mtu::packet_loss(ends.remote?.ip())
    }

    /// Records the dialect of a plain remote.
    pub(crate) fn set_generation(&self, dialect: &'static str) {
        self.lock().generation = Some(dialect);
    }

    /// Returns the name of the dialect for the status.
    pub fn dialect_name(&self) -> &'static str {
        let generation = self.lock().generation;
        generation.unwrap_or(if self.is_plain() { "plain" } else { "extended" })
    }

    /// Counts a sent message with `bytes` of data.
    pub(crate) fn count_sent(&self, bytes: usize) {
        self.seen.sent_messages.fetch_add(1, Relaxed);
        self.seen.sent_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts a received message with `bytes` of data.
    pub(crate) fn count_received(&self, bytes: usize) {
        self.seen.received_messages.fetch_add(1, Relaxed);
        self.seen.received_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns the traffic so far.
    pub fn traffic(&self) -> Traffic {
        let LinkStats { sent_messages, sent_bytes, received_messages, received_bytes, .. } = &self.seen;
        Traffic {
            sent_messages: sent_messages.load(Relaxed),
            sent_bytes: sent_bytes.load(Relaxed),
            received_messages: received_messages.load(Relaxed),
            received_bytes: received_bytes.load(Relaxed),
        }
    }

    /// Returns the latest RTT if one was measured.
    pub fn measured_round_trip(&self) -> Option<Duration> {
        let micros = self.round_trip_micros.load(Relaxed);
        (micros != INITIAL_RTT_MICROS).then(|| Duration::from_micros(micros))
    }

    /// Returns when the link was created.
    pub fn created_at(&self) -> Instant {
        self.made
    }

    /// Returns the time since the link was created.
    pub fn age(&self) -> Duration {
        self.made.elapsed()
    }

    /// Returns the time since the remote last sent anything.
    pub fn idle_for(&self) -> Duration {
        self.made.elapsed().saturating_sub(Duration::from_millis(self.last_received_millis.load(Relaxed)))
    }
}

// A backup link next to an unresponsive one: the link that answers first continues to carry the sessions.

/// Decides when a backup link may be dialled to one place. There is at most one at a time.
#[derive(Debug)]
pub struct BackupLink {
    metrics: Metrics,
    /// Number of dials in a row that failed, or only replaced a link that never answered.
    failures: u32,
    /// No backup link is dialled before this time.
    next: Instant,
}

impl BackupLink {
    /// Creates the state without any backup link so far.
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, failures: 0, next: Instant::now() }
    }

    /// Waits until a link that was dialled here is unresponsive, and dials a backup link.
    ///
    /// Returns the backup link if it is ready before the unresponsive link answers. Otherwise the dial is dropped and
    /// the wait starts again after a pause, which doubles with each failed dial. After an unneeded dial it does not,
    /// because the link's timeout grows with the silence that was a false alarm. Never returns for a plain link: its
    /// server closes the older link in favour of the new one.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe if `dial` is.
    pub async fn race<T, E, F>(&mut self, link: &LinkSender, dial: impl Fn() -> F) -> T
    where
        F: Future<Output = Result<T, E>>,
        E: fmt::Display,
    {
        if link.is_plain() {
            std::future::pending::<()>().await;
        }
        loop {
            sleep_until(self.next).await;
            link.wait_unresponsive().await;
            let (unanswered, round_trip) = (link.unanswered().unwrap_or_default(), link.round_trip());
            warn!(link = %link.id, ?unanswered, rtt = ?round_trip, "link unresponsive, dialling backup link");
            let made = tokio::select! {
                biased;
                () = link.wait_responsive() => {
                    info!(link = %link.id, "link responsive again, backup link not needed");
                    self.metrics.backup_links.count("unneeded");
                    (self.failures, self.next) = (0, Instant::now() + AFTER_UNNEEDED);
                    continue;
                }
                made = dial() => made,
            };
            match made {
                Ok(made) => {
                    info!(link = %link.id, "unresponsive link replaced by backup link");
                    self.metrics.backup_links.count("used");
                    if link.min_rtt().is_some() {
                        (self.failures, self.next) = (0, Instant::now());
                    } else {
                        // It never worked, and neither may its replacement.
                        self.put_off();
                    }
                    return made;
                }
                Err(why) => {
                    warn!(link = %link.id, error = %format_args!("{why:#}"), "cannot establish backup link");
                    self.metrics.backup_links.count("failed");
                    self.put_off();
                }
            }
        }
    }

    /// Delays the next backup link, longer each time.
    fn put_off(&mut self) {
        self.next = Instant::now() + (AFTER_FAILED * (1 << self.failures.min(10))).min(MAX_PAUSE);
        self.failures += 1;
    }
}

/// Pause after a backup link that was not needed.
const AFTER_UNNEEDED: Duration = Duration::from_secs(5);
/// Pause after a backup link that could not be established, or replaced one that never answered. It doubles with each
/// further one.
const AFTER_FAILED: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_long_pause_of_the_line_is_remembered_for_ten_minutes() {
        let (mut rtts, mut now) = (RttEstimator::default(), Instant::now());
        for (millis, times) in [(100, 20), (3000, 1), (100, 600)] {
            for _ in 0..times {
                now += Duration::from_millis(500);
                rtts.sample(Duration::from_millis(millis), now);
            }
        }
        assert_eq!(rtts.ping_timeout(), Some(Duration::from_millis(3750)));
        rtts.sample(Duration::from_millis(100), now + LONGEST_KEPT);
        assert!(rtts.ping_timeout().is_some_and(|timeout| timeout <= Duration::from_millis(1420)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_least_round_trip_is_that_of_the_last_minutes_once_enough_were_measured() {
        let (mut rtts, mut now) = (RttEstimator::default(), Instant::now());
        let mut measured = |millis: u64, minutes: u32| {
            let mut least = Duration::ZERO;
            for _ in 0..minutes * 10 {
                now += Duration::from_secs(6);
                least = rtts.sample(Duration::from_millis(millis), now);
            }
            least.as_millis()
        };
        assert_eq!(measured(2, 4), 2);
        assert_eq!(measured(60, 5), 2, "a queue may take that long");
        assert_eq!(measured(60, 7), 60);
        assert_eq!(measured(2, 1), 2, "a shorter path is known at once");
    }

    #[test]
    fn a_steady_line_is_given_a_second_and_four_round_trips_and_one_that_varies_more() {
        let mut rtts = RttEstimator::default();
        assert_eq!(rtts.ping_timeout(), None);
        for _ in 0..20 {
            rtts.sample(Duration::from_millis(100), Instant::now());
        }
        assert_eq!(rtts.ping_timeout(), Some(Duration::from_millis(1400)));
        rtts.sample(Duration::from_millis(500), Instant::now());
        let patience = rtts.ping_timeout().unwrap();
        assert_eq!(patience, Duration::from_millis(1000 + 4 * (150 + 100)));
    }
}

#[cfg(test)]
mod alive_tests {
    use std::collections::VecDeque;

    use crate::sender::signals::RttEstimator;

    use super::*;

    /// A line on which TCP retransmits lost packets and keeps the order.
    struct Line {
        rtt: Duration,
        /// One in this number of packets is lost; 0 for none.
        loses: u64,
        dice: u64,
        /// Nothing arrives after this time.
        dies: Option<Instant>,
        /// Arrival of the last packet in each direction.
        last: [Instant; 2],
    }

    impl Line {
        fn is_lost(&mut self) -> bool {
            self.dice ^= self.dice << 13;
            self.dice ^= self.dice >> 7;
            self.dice ^= self.dice << 17;
            self.loses > 0 && self.dice.is_multiple_of(self.loses)
        }

        /// Returns when a packet sent at that time arrives. TCP retransmits it after a timeout, again after another,
        /// and then each time after twice as long.
        fn arrives(&mut self, way: usize, at: Instant) -> Instant {
            let timeout = self.rtt + Duration::from_millis(400);
            let (mut sent, mut wait) = (at, timeout);
            let mut first = true;
            while self.is_lost() {
                sent += wait;
                if !std::mem::take(&mut first) {
                    wait *= 2;
                }
            }
            self.last[way] = self.last[way].max(sent + self.rtt / 2);
            self.last[way]
        }

        fn lives(&self, at: Instant) -> bool {
            self.dies.is_none_or(|dies| at < dies)
        }

        fn answers(&mut self, ping: Instant) -> Instant {
            let there = self.arrives(0, ping);
            self.arrives(1, there)
        }
    }

    /// Watches a link over that line. Returns how often it seemed unresponsive within `time`, and how long after the
    /// line's death it did.
    fn watched(line: &mut Line, ask_every: Duration, time: Duration) -> (usize, Option<Duration>) {
        let started = line.last[0];
        let mut now = started;
        let mut alive = Keepalive {
            last_received: now,
            last_ping: now,
            looked: now,
            silence_limit: IDLE_TIMEOUT,
            ask_after: PING_AFTER,
            watches: true,
            watched: None,
        };
        let (mut rtts, mut pings) = (RttEstimator::default(), VecDeque::<(Instant, Instant)>::new());
        let (mut silent, mut was) = (0, false);
        while now < started + time {
            while let Some((sent, _)) = pings.front().copied().filter(|(_, at)| *at <= now && line.lives(*at))
            {
                rtts.sample(pings.pop_front().map_or(Duration::ZERO, |(_, at)| at - sent), now);
                alive.last_received = now;
            }
            let unanswered = pings.front().map(|(sent, _)| *sent);
            let life = Liveness { ask_every: Some(ask_every), unanswered, timeout: rtts.ping_timeout() };
            alive.looked = now;
            let look = alive.poll(life, now);
            match look {
                KeepaliveAction::SendPing => {
                    let answered = line.answers(now);
                    pings.push_back((now, answered));
                }
                KeepaliveAction::TimedOut if !line.lives(now) => {
                    return (silent, line.dies.map(|dies| now - dies));
                }
                KeepaliveAction::TimedOut => silent += usize::from(!was),
                KeepaliveAction::None => {}
            }
            was = look == KeepaliveAction::TimedOut;
            now = alive.next();
        }
        (silent, None)
    }

    fn line(rtt: u64, loses: u64, seed: u64) -> Line {
        let now = Instant::now();
        Line { rtt: Duration::from_millis(rtt), loses, dice: seed * 7919 + 1, dies: None, last: [now; 2] }
    }

    #[tokio::test]
    async fn a_long_line_that_loses_packets_does_not_seem_silent() {
        for every in [500, 1000].map(Duration::from_millis) {
            let ten_minutes = Duration::from_secs(600);
            let times: usize = (1..=30)
                .map(|seed| {
                    let (silent, _) = watched(&mut line(600, 50, seed), every, ten_minutes);
                    silent
                })
                .sum();
            assert!(times <= 1, "{times} times in five hours");
        }
    }

    #[tokio::test]
    async fn a_line_that_dies_seems_silent_after_a_second_and_four_round_trips_behind_a_ping() {
        for (rtt, every) in [(1, 500), (1, 1000), (100, 500), (100, 1000), (600, 500)] {
            let (mut line, every) = (line(rtt, 0, 1), Duration::from_millis(every));
            line.dies = Some(line.last[0] + Duration::from_secs(20));
            let (silent, after) = watched(&mut line, every, Duration::from_secs(60));
            let (after, rtt) = (after.unwrap(), line.rtt);
            // A ping in flight at that time counts as well.
            let soonest = Duration::from_secs(1) + 3 * rtt;
            assert!(silent == 0 && after >= soonest, "{rtt:?}: {after:?}");
            assert!(after <= soonest + every.max(rtt) + rtt + every / 2, "{rtt:?}, {every:?}: {after:?}");
        }
    }
}

#[cfg(test)]
mod seen_tests {
    use tunnel_proto::frame::Remote;
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test]
    async fn a_link_tells_what_went_over_it_and_no_round_trip_before_the_first() {
        let link = LinkSender::new(LinkId(1), Remote::Peer, Some(Instance::random()));
        assert_eq!((link.measured_round_trip(), link.ends()), (None, None));
        link.count_sent(5);
        link.count_sent(0);
        link.count_received(7);
        let seen = link.traffic();
        assert_eq!((seen.sent_messages, seen.sent_bytes), (2, 5));
        assert_eq!((seen.received_messages, seen.received_bytes), (1, 7));
        let ends = LinkEndpoints { version: Some("0.1.0".into()), ..LinkEndpoints::default() };
        link.set_endpoints(ends.clone());
        link.set_endpoints(LinkEndpoints::default());
        assert_eq!(link.ends(), Some(&ends));
    }
}

#[cfg(test)]
mod second_tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::{Context, Poll, Waker};

    use tunnel_base::names::NodeName;
    use tunnel_proto::frame::{FrameKind, Remote};
    use tunnel_proto::state::LinkId;

    use super::*;

    /// Returns a link that has pinged its remote, and the number of that ping.
    fn asked() -> (Arc<LinkSender>, u64) {
        let link = LinkSender::new(LinkId(1), Remote::Server(NodeName::none()), Some(Instance::random()));
        let number = asks(&link);
        (link, number)
    }

    /// Pings a link's remote. Returns the number of the ping.
    fn asks(link: &LinkSender) -> u64 {
        link.probe();
        let pulled = link.poll_pull(&mut Context::from_waker(Waker::noop()), Instant::now());
        let Poll::Ready(Some(frame)) = pulled else { panic!("no ping") };
        let FrameKind::Ping(Some(number)) = frame.body else { panic!("{frame:?}") };
        number
    }

    #[tokio::test(start_paused = true)]
    async fn false_alarms_make_a_link_patient_and_a_real_death_is_still_noticed() {
        let (link, first) = asked();
        link.ponged(first, Instant::now());
        let (dials, mut second) = (AtomicU32::new(0), BackupLink::new(Metrics::edge()));
        let dial = || async {
            dials.fetch_add(1, Relaxed);
            std::future::pending::<Result<(), &str>>().await
        };
        let pings = async {
            let mut silences = Vec::new();
            for alarm in 1..=12 {
                for _ in 0..60 {
                    let ping = asks(&link);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    link.ponged(ping, Instant::now());
                }
                link.mark_active(Instant::now());
                let (ping, since) = (asks(&link), Instant::now());
                while dials.load(Relaxed) < alarm && since.elapsed() < IDLE_TIMEOUT {
                    link.wake_unresponsive();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                silences.push(since.elapsed().as_millis());
                link.ponged(ping, Instant::now());
            }
            silences
        };
        let silences = tokio::select! {
            () = second.race(&link, dial) => panic!("the link answered each time"),
            silences = pings => silences,
        };
        assert!(silences[0] < 1600, "{silences:?}");
        assert!(silences.windows(2).all(|two| two[0] <= two[1] + 20), "{silences:?}");
        assert!(silences[11] >= 9_900 && silences[11] < 10_200, "{silences:?}");
    }

    /// Returns the number of backup links dialled within ten seconds, next to a link of a process suspended for that
    /// time. The answer is read `after` the process continues.
    async fn dialled(after: Option<Duration>) -> u32 {
        let (link, ping) = asked();
        let dials = AtomicU32::new(0);
        let mut second = BackupLink::new(Metrics::edge());
        let dial = || async {
            dials.fetch_add(1, Relaxed);
            std::future::pending::<Result<(), &str>>().await
        };
        let reader = async {
            tokio::time::advance(Duration::from_secs(10)).await;
            link.wake_unresponsive();
            if let Some(after) = after {
                tokio::time::sleep(after).await;
                link.ponged(ping, Instant::now());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            () = second.race(&link, dial) => {}
            () = reader => {}
        }
        dials.load(Relaxed)
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_stood_still_reads_what_came_before_it_dials_a_second_link() {
        assert_eq!(dialled(Some(Duration::from_millis(1))).await, 0);
        assert_eq!(dialled(None).await, 1);
    }
}
