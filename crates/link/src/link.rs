//! A running link: the read loop, keepalive, and the outbound side that its gRPC stream polls.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{Level, enabled, trace};

use crate::grpc::read_ahead::{ReadAhead, StreamEnd};
use crate::lock::Mutex;

use crate::sender::LinkSender;
use crate::sender::signals::{
    HEARTBEAT_INTERVAL, IDLE_TIMEOUT, Keepalive, KeepaliveAction, Liveness, PING_AFTER, PING_CALLER_AFTER,
    PLAIN_EDGE_IDLE_TIMEOUT,
};
use crate::table::session::SessionCore;
use crate::table::stream::Parked;
use crate::table::{Event, SessionTable};
use tunnel_base::logging::FRAMES;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::SessionId;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{DecodeError, Decoder, EncodedMessage, encode, from_message, to_message};
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionError, SessionFrame, SessionKey};
use tunnel_proto::state::LinkId;
use tunnel_proto::superedge::{Decoded, PlainCodec, PlainEvent};

/// A running link over one gRPC stream. Its driver calls [`Self::next`] until it ends; dropping it ends the stream.
#[derive(Debug)]
pub struct Link {
    /// The link's sending side, which carries the sessions.
    pub sender: Arc<LinkSender>,
    table: Arc<SessionTable>,
    metrics: Metrics,
    dialect: Encoding,
    /// Whether the remote dialled this end. Then heartbeats are requests to answer; otherwise they are responses.
    answers: bool,
    incoming: Incoming,
    ahead: ReadAhead,
    reader: Decoder,
    events: VecDeque<Event>,
    /// Bytes read since the last yield to other tasks.
    since_rest: usize,
    pub(crate) alive: Keepalive,
    stall: ReadPause,
    /// The session that received data last.
    fed: Option<SessionId>,
    /// Notified when a plain session has ended at this side.
    more_ending: Arc<Notify>,
    _connection: DropGuard,
}

/// The remote end of an accepted or answered call.
#[derive(Debug)]
pub(crate) struct RemoteInfo {
    /// Whether the remote dialled us.
    pub(crate) answers: bool,
    pub(crate) incoming: Incoming,
    pub(crate) ahead: ReadAhead,
    /// Cancelled when the link is dropped, so that the connection closes as well.
    pub(crate) connection: CancellationToken,
}

impl Link {
    pub(crate) fn new(outbound: &OutboundStream, far: RemoteInfo, metrics: Metrics) -> Self {
        let now = Instant::now();
        let silence = match (&outbound.dialect, far.answers) {
            (Encoding::Extended, _) => IDLE_TIMEOUT,
            (Encoding::Plain(_), true) => PLAIN_EDGE_IDLE_TIMEOUT,
            (Encoding::Plain(_), false) => HEARTBEAT_INTERVAL + IDLE_TIMEOUT,
        };
        let ask_after = if far.answers { PING_CALLER_AFTER } else { PING_AFTER };
        Self {
            sender: outbound.sender.clone(),
            table: outbound.table.clone(),
            metrics,
            dialect: outbound.dialect.clone(),
            answers: far.answers,
            incoming: far.incoming,
            ahead: far.ahead,
            reader: Decoder::default(),
            events: VecDeque::new(),
            since_rest: 0,
            alive: Keepalive {
                last_received: now,
                last_ping: now,
                looked: now,
                silence_limit: silence,
                ask_after,
                watches: !far.answers,
                watched: None,
            },
            stall: ReadPause::new(now),
            fed: None,
            more_ending: match &outbound.dialect {
                Encoding::Plain(plain) => plain.lock().more_ending.clone(),
                Encoding::Extended => Arc::default(),
            },
            _connection: far.connection.drop_guard(),
        }
    }

    /// Returns the next event for the caller to handle.
    ///
    /// After an error the link is over; call [`Self::end`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> Result<Event, LinkEnd> {
        loop {
            // Each event is handled before the next frame is read, because the handling may affect how that frame is
            // read.
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            self.pause_reads_if_full().await;
            if let Some(message) = self.reader.next_message()? {
                self.since_rest += message.data.len() + YIELD_COST_PER_MESSAGE;
                self.on_message(message);
                if self.since_rest >= YIELD_AFTER_BYTES {
                    self.since_rest = 0;
                    self.check_remote_reads(Instant::now())?;
                    tokio::task::yield_now().await;
                }
                continue;
            }
            let piece = self.read().await?;
            self.reader.push(piece);
        }
    }

    /// Takes the link out of service. Returns the sessions that need another path.
    pub fn end(&self, why: &LinkEnd) -> Vec<Parked> {
        let far = self.sender.peer.node().map_or("a peer".into(), |node| format!("node {node}"));
        let refusal = SessionError::new(ErrorCode::Cancelled, format!("the link to {far} closed: {why}"));
        self.table.link_ended(&self.sender, &refusal, Instant::now())
    }

    /// Waits for the next bytes of the stream and pings an idle remote meanwhile.
    async fn read(&mut self) -> Result<Bytes, LinkEnd> {
        loop {
            let next = self.next_check_at();
            let incoming = Pin::new(&mut self.incoming);
            tokio::select! {
                biased;
                piece = self.ahead.next_piece(incoming) => {
                    let now = Instant::now();
                    self.sender.received(now);
                    if self.alive.on_receive(now) {
                        self.check_keepalive()?;
                    }
                    return piece.map_err(LinkEnd::from);
                }
                () = self.sender.wait_woken() => {
                    if self.sender.is_closed() {
                        return Err(LinkEnd::ClosedLocally);
                    }
                    if self.alive.watches {
                        self.check_keepalive()?;
                    }
                }
                () = sleep_until(next) => self.check_keepalive()?,
                () = self.more_ending.notified(), if matches!(self.dialect, Encoding::Plain(_)) => {}
            }
        }
    }

    fn check_keepalive(&mut self) -> Result<(), LinkEnd> {
        let now = Instant::now();
        let (silent, unasked) = (now - self.alive.last_received, now - self.alive.last_ping);
        self.alive.looked = now;
        if silent >= self.alive.silence_limit {
            return Err(LinkEnd::TimedOut);
        }
        self.check_remote_reads(now)?;
        let Encoding::Plain(plain) = &self.dialect else {
            let life = if self.alive.watches { self.sender.life(now) } else { Liveness::default() };
            match self.alive.poll(life, now) {
                KeepaliveAction::None => {}
                KeepaliveAction::SendPing => self.sender.ping(),
                KeepaliveAction::TimedOut => self.sender.wake_unresponsive(),
            }
            return Ok(());
        };
        let plain = plain.clone();
        self.close_ended(&plain, now);
        let ended = plain.lock().tick(now);
        if !self.answers && unasked >= HEARTBEAT_INTERVAL {
            self.alive.last_ping = now;
            self.sender.ping();
        }
        for decoded in ended {
            self.deliver(decoded, now);
        }
        self.sender.wake_outbound();
        Ok(())
    }

    /// Returns when to check the link's liveness, and targets that have ended, next.
    fn next_check_at(&self) -> Instant {
        let next = self.alive.next();
        let Encoding::Plain(plain) = &self.dialect else { return next };
        plain.lock().next_end().map_or(next, |end| end.min(next))
    }

    /// Returns an error if a remote of the extended dialect has stopped reading.
    ///
    /// Otherwise the last frames queued for it, and their sessions, would be kept forever. A plain remote may stop
    /// reading for as long as one of its targets does.
    fn check_remote_reads(&self, now: Instant) -> Result<(), LinkEnd> {
        let unread = self.sender.resumes
            && self.sender.blocked_since().is_some_and(|since| now - since >= WRITE_STALL_TIMEOUT);
        if unread { Err(LinkEnd::WriteStalled) } else { Ok(()) }
    }

    fn on_message(&mut self, message: StreamMsg) {
        let now = Instant::now();
        self.sender.count_received(message.data.len());
        let Encoding::Plain(plain) = &self.dialect else {
            match from_message(message, &self.sender.peer) {
                Ok(frame) => {
                    log(RECEIVED, self.sender.id, &frame);
                    self.on_frame(frame, now);
                }
                Err(bad) => self.metrics.frames_dropped.count(bad.reason()),
            }
            return;
        };
        let meaning = plain.lock().on_message(message, now);
        match meaning {
            PlainEvent::Session(decoded) => {
                if is_wanted() {
                    let log = |word| log_word(RECEIVED, self.sender.id, decoded.id, word);
                    decoded.frames.iter().for_each(log);
                }
                self.deliver(decoded, now);
            }
            PlainEvent::Heartbeat if self.answers => self.sender.pong(None),
            PlainEvent::Heartbeat => {}
            PlainEvent::Answered => self.sender.wake_outbound(),
            PlainEvent::Unknown(reason) => self.metrics.frames_dropped.count(reason),
        }
    }

    fn on_frame(&mut self, frame: Frame, now: Instant) {
        let node = frame.node;
        match frame.body {
            FrameKind::Ping(None) if !self.answers => {}
            FrameKind::Ping(number) => self.sender.pong(number),
            FrameKind::Pong(Some(number)) => {
                let rtt = self.sender.ponged(number, now);
                self.metrics.rtt.observe(rtt);
            }
            FrameKind::Pong(None) => {}
            FrameKind::Session(id, category, frame) => {
                self.sender.mark_active(now);
                let key = SessionKey { id, category, node };
                self.events.extend(self.table.on_frame(&self.sender, key, frame, now));
            }
            FrameKind::Find(question) => self.events.push_back(Event::Find(node, question)),
            FrameKind::Found(found) => self.events.push_back(Event::Found(node, found)),
            FrameKind::Drain(to) => self.events.push_back(Event::Drain(to)),
            FrameKind::Load(load) => self.events.push_back(Event::Load(load)),
            FrameKind::Conflict(conflict) => self.events.push_back(Event::Conflict(node, conflict)),
        }
    }

    fn deliver(&mut self, decoded: Decoded, now: Instant) {
        let Some(node) = self.sender.peer.node().cloned() else { return };
        for frame in decoded.frames {
            if matches!(frame, SessionFrame::Data(_)) {
                self.fed = Some(decoded.id);
            }
            let key = SessionKey { id: decoded.id, category: decoded.category, node: node.clone() };
            self.events.extend(self.table.on_frame(&self.sender, key, frame, now));
        }
    }
}

/// How long a link may accept none of its queued frames: longer than the largest frame takes on the slowest line.
const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The read loop yields to other tasks after this number of bytes.
const YIELD_AFTER_BYTES: usize = 256 * 1024;
/// Bytes that each message adds to that count, in addition to its data.
const YIELD_COST_PER_MESSAGE: usize = 128;
/// Log text for a received frame.
const RECEIVED: &str = "frame received";

// The outbound side of a link: the next message for its gRPC stream, encoded in its dialect.

/// How frames become messages on one link.
#[derive(Debug, Clone)]
pub(crate) enum Encoding {
    /// Messages of the extended dialect.
    Extended,
    /// SuperEdge's messages, converted by a codec that acts for the remote.
    Plain(Arc<Mutex<PlainCodec>>),
}

/// The outbound side of a link: supplies what the gRPC stream sends next.
#[derive(Debug, Clone)]
pub(crate) struct OutboundStream {
    pub(crate) sender: Arc<LinkSender>,
    pub(crate) table: Arc<SessionTable>,
    pub(crate) dialect: Encoding,
}

impl OutboundStream {
    /// Polls for the next message to send. Returns `None` once the link is closed.
    pub(crate) fn poll_message(&self, cx: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        let Encoding::Plain(plain) = &self.dialect else {
            return self
                .poll_frame(cx, Instant::now())
                .map(|frame| frame.map(|frame| self.counted(to_message(frame))));
        };
        loop {
            let now = Instant::now();
            let pulled = match self.poll_frame(cx, now) {
                Poll::Ready(Some(frame)) => {
                    self.encode(plain, frame, now);
                    Poll::Ready(())
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            };
            // Checked last: every message added after this check wakes this task.
            if let Some(message) = plain.lock().next_message() {
                return Poll::Ready(Some(self.counted(message)));
            }
            std::task::ready!(pulled);
        }
    }

    fn poll_frame(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        let pulled = self.sender.poll_pull(cx, now);
        if let Poll::Ready(Some(frame)) = &pulled {
            log("frame sent", self.sender.id, frame);
        }
        pulled
    }

    fn counted(&self, message: StreamMsg) -> EncodedMessage {
        self.sender.count_sent(message.data.len());
        encode(message)
    }

    fn encode(&self, plain: &Mutex<PlainCodec>, frame: Frame, now: Instant) {
        let decoded = plain.lock().send_frame(frame, now);
        let Some((decoded, node)) = decoded.zip(self.sender.peer.node()) else { return };
        for word in decoded.frames {
            // A session's own frames never produce an event, so the result is ignored.
            let key = SessionKey { id: decoded.id, category: decoded.category, node: node.clone() };
            let _ = self.table.on_frame(&self.sender, key, word, now);
        }
    }
}

// How links end.

/// The reason why a link ended, returned by [`Link::next`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkEnd {
    /// The remote ended the stream, or the connection broke.
    #[error("the remote end closed the link: {0}")]
    Closed(String),
    /// The server ended the link because another process has our name.
    #[error("{0}")]
    NameTaken(String),
    /// Nothing was received for 15 s.
    #[error("nothing was received for 15s")]
    TimedOut,
    /// The remote sends but does not read.
    #[error("the remote end has read nothing for {WRITE_STALL_TIMEOUT:?}")]
    WriteStalled,
    /// Closed at this end: replaced by a newer link, or shutting down.
    #[error("closed by this end")]
    ClosedLocally,
    /// The link was unresponsive and a backup link answered first.
    #[error("a backup link answered first")]
    ReplacedByBackup,
    /// The remote violated the protocol.
    #[error("protocol violation: {0}")]
    ProtocolError(#[from] DecodeError),
}

impl LinkEnd {
    /// Returns a fixed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Closed(_) => "closed_by_remote",
            Self::NameTaken(_) => "name_in_use",
            Self::TimedOut => "timed_out",
            Self::WriteStalled => "write_stalled",
            Self::ClosedLocally => "closed_locally",
            Self::ReplacedByBackup => "replaced_by_backup",
            Self::ProtocolError(_) => "protocol_error",
        }
    }
}

impl From<StreamEnd> for LinkEnd {
    fn from(ended: StreamEnd) -> Self {
        match ended {
            StreamEnd::Closed(why) => Self::Closed(why),
            StreamEnd::NameTaken(why) => Self::NameTaken(why),
        }
    }
}

// The log line for each frame that a link sends or receives (`-v 8`). It holds the frame's kind and numbers, never
// client data.

/// Returns true if frames are logged.
pub(crate) fn is_wanted() -> bool {
    enabled!(target: FRAMES, Level::TRACE)
}

/// Logs a frame; `what` tells whether it was sent or received.
pub(crate) fn log(what: &str, link: LinkId, frame: &Frame) {
    if !is_wanted() {
        return;
    }
    let node = &frame.node;
    match &frame.body {
        FrameKind::Session(id, _, word) => log_word(what, link, *id, word),
        FrameKind::Ping(number) => trace!(target: FRAMES, %link, kind = "Ping", number, "{what}"),
        FrameKind::Pong(number) => trace!(target: FRAMES, %link, kind = "Pong", number, "{what}"),
        FrameKind::Find(number) => trace!(target: FRAMES, %link, kind = "Find", number, %node, "{what}"),
        FrameKind::Found(found) => {
            let (number, here) = (found.question, found.here);
            trace!(target: FRAMES, %link, kind = "Found", number, %node, here, "{what}");
        }
        FrameKind::Drain(_) => trace!(target: FRAMES, %link, kind = "Drain", %node, "{what}"),
        FrameKind::Conflict(_) => trace!(target: FRAMES, %link, kind = "Conflict", %node, "{what}"),
        FrameKind::Load(load) => {
            trace!(target: FRAMES, %link, kind = "Load", nodes = load.nodes, stopping = load.stopping, "{what}");
        }
    }
}

/// Logs a frame that belongs to a session.
pub(crate) fn log_word(what: &str, link: LinkId, session: SessionId, word: &SessionFrame) {
    let (kind, bytes) = match word {
        SessionFrame::Open { .. } => ("Open", None),
        SessionFrame::Opened { .. } => ("Opened", None),
        SessionFrame::Refused { .. } => ("Refused", None),
        SessionFrame::Data(bytes) => ("Data", Some(bytes.len())),
        SessionFrame::Fin { .. } => ("Finish", None),
        SessionFrame::ResetAt { .. } => ("Broken", None),
        SessionFrame::Reset { .. } => ("Reset", None),
        SessionFrame::Credit { .. } => ("Credit", None),
        SessionFrame::Resume { .. } => ("Resume", None),
        SessionFrame::Resumed { .. } => ("Resumed", None),
        SessionFrame::PathLost { .. } => ("Lost", None),
    };
    let (received, limit) = match word {
        SessionFrame::Open { limit, .. } | SessionFrame::Opened { limit, .. } => (None, Some(*limit)),
        SessionFrame::Credit { received, limit }
        | SessionFrame::Resume { received, limit, .. }
        | SessionFrame::Resumed { received, limit, .. } => (Some(*received), Some(*limit)),
        _ => (None, None),
    };
    let (total, code) = match word {
        SessionFrame::Fin { total } => (Some(*total), None),
        SessionFrame::ResetAt { total, refusal } => (Some(*total), Some(refusal.code.name())),
        SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } => {
            (None, Some(refusal.code.name()))
        }
        _ => (None, None),
    };
    let epoch = word.epoch();
    trace!(target: FRAMES, %link, %session, kind, bytes, epoch, received, limit, total, code, "{what}");
}

// Backpressure on plain links: the plain dialect has no flow control and cannot half-close a session.

/// Time for which this plain link was left unread in the current ten seconds.
#[derive(Debug)]
pub(crate) struct ReadPause {
    since: Instant,
    spent: Duration,
}

/// What has more unread bytes than allowed.
#[derive(Debug, Clone, Copy)]
enum OverLimit {
    Session,
    Link,
    Process,
}

impl ReadPause {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, spent: Duration::ZERO }
    }
}

impl Link {
    /// Leaves the link unread while the last session to receive data, its link or the process has too much unread.
    ///
    /// Once the allowed pause is used up, the session with most unread bytes is reset so that the others continue. Call
    /// this after each message, because each may belong to another session.
    pub(crate) async fn pause_reads_if_full(&mut self) {
        let Some(fed) = self.fed.take() else { return };
        while let Some(over) = self.over(fed) {
            let now = Instant::now();
            if now - self.stall.since >= STALL_PERIOD {
                self.stall = ReadPause::new(now);
            }
            let left = MAX_READ_PAUSE.saturating_sub(self.stall.spent);
            if left.is_zero() {
                self.metrics.resets.count("slow_reader");
                self.give_up(fed, over);
                // Many small sessions may have to be reset.
                tokio::task::yield_now().await;
                continue;
            }
            self.metrics.read_pauses.inc();
            // Timed out or notified, the next check sees both. Readers on other links do not notify this one.
            let patience = if matches!(over, OverLimit::Process) { left.min(LOOK_INTERVAL) } else { left };
            let stalled = self.ahead.stall();
            let _ = timeout(patience, self.sender.read.notified()).await;
            drop(stalled);
            self.stall.spent += now.elapsed();
            self.alive.last_received = Instant::now();
        }
    }

    /// Sends `closed` for targets that have received all their data.
    pub(crate) fn close_ended(&mut self, plain: &Mutex<PlainCodec>, now: Instant) {
        let ended = plain.lock().ended(now);
        for id in ended {
            let taken = self.unread(id) == 0;
            let mut plain = plain.lock();
            let closing = if taken { plain.close(id) } else { None };
            if !taken {
                plain.postpone_close(id, now);
            }
            drop(plain);
            if let Some(closing) = closing {
                self.deliver(closing, now);
            }
        }
    }

    /// Returns the unread bytes of a session, or 0 if the session does not run here.
    fn unread(&self, id: SessionId) -> usize {
        self.table.session(id).map_or(0, |session| session.queued_from(self.sender.id))
    }

    fn over(&self, fed: SessionId) -> Option<OverLimit> {
        match self.unread(fed) {
            0 => None,
            most if most >= PLAIN_QUEUE => Some(OverLimit::Session),
            _ if self.table.unreserved.is_exhausted() => Some(OverLimit::Process),
            // A link may exceed its share until half of the process's limit is in use.
            _ => self.sender.exceeds_fair_share(&self.table.unreserved).then_some(OverLimit::Link),
        }
    }

    fn give_up(&self, fed: SessionId, over: OverLimit) {
        let found = match over {
            OverLimit::Session => None,
            OverLimit::Link => largest_backlog(self.table.on_link(&self.sender)),
            OverLimit::Process => largest_backlog(self.table.all()),
        };
        if let Some(session) = found.or_else(|| self.table.session(fed)) {
            session.reset_unread(SessionError::new(
                ErrorCode::Overloaded,
                "its reader is too slow for a link without flow control",
            ));
        }
    }
}

/// Returns the session with most unread bytes among those with unreserved ones, or `None` if there is none.
fn largest_backlog(sessions: Vec<Arc<SessionCore>>) -> Option<Arc<SessionCore>> {
    let unread = sessions.into_iter().map(|session| (session.unreserved(), session));
    unread.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes).map(|(_, session)| session)
}

/// Unread bytes of a plain session at which reading from its link pauses.
const PLAIN_QUEUE: usize = 1024 * 1024;
/// How long a plain link may be left unread in each [`STALL_PERIOD`], for all its sessions together.
const MAX_READ_PAUSE: Duration = Duration::from_secs(2);
const STALL_PERIOD: Duration = Duration::from_secs(10);
/// How often to check whether readers on other links have freed memory.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl Link {
    /// Makes this end watch the link as well, although the remote dialled it.
    pub fn watch(&mut self) {
        self.alive.watches = true;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use tracing_subscriber::layer::SubscriberExt as _;

    use tunnel_base::logging::LogLevel;
    use tunnel_proto::frame::{Category, ErrorCode, SessionError};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Returns the log at that verbosity after these frames were sent.
    fn sent(verbosity: i32, bodies: &[FrameKind]) -> String {
        let lines = Lines::default();
        let (to, (filter, _level)) = (lines.clone(), LogLevel::new(verbosity));
        let form = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || to.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(filter).with(form), || {
            for body in bodies {
                log("frame sent", LinkId(7), &Frame { node: "node1".parse().unwrap(), body: body.clone() });
            }
        });
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    fn word(frame: SessionFrame) -> FrameKind {
        FrameKind::Session(SessionId::random(), Category::Ssh, frame)
    }

    #[test]
    fn each_frame_leaves_a_line_with_its_numbers_and_nothing_of_what_it_carries() {
        let refusal = SessionError::new(ErrorCode::TargetRefused, "SECRET");
        let bodies = [
            word(SessionFrame::Data(Bytes::from_static(b"SECRET"))),
            word(SessionFrame::Credit { received: 10, limit: 20 }),
            word(SessionFrame::Fin { total: 7 }),
            word(SessionFrame::Refused { epoch: 3, refusal }),
            FrameKind::Ping(Some(5)),
            FrameKind::Pong(None),
        ];
        let log = sent(8, &bodies);
        let wanted = [
            "kind=\"Data\" bytes=6",
            "kind=\"Credit\" received=10 limit=20",
            "kind=\"Finish\" total=7",
            "kind=\"Refused\" epoch=3 code=\"target_refused\"",
            "kind=\"Ping\" number=5",
            "kind=\"Pong\"",
        ];
        assert_eq!(log.lines().count(), wanted.len(), "{log}");
        for (line, wanted) in log.lines().zip(wanted) {
            assert!(line.contains("tunnel::frames: frame sent link=7") && line.ends_with(wanted), "{line}");
        }
        assert!(!log.contains("SECRET"), "{log}");
        assert_eq!(sent(7, &bodies), "", "frames are not logged below -v 8");
    }
}
