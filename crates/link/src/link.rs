//! A running link: the read loop, keepalive, and the outbound side that its gRPC stream polls.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::Incoming;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::frame_log::log_frame;
use crate::grpc::link_end::LinkEnd;
use crate::grpc::read_ahead::ReadAhead;
use crate::liveness::{Liveness, LivenessRole, LivenessVerdict};
use crate::plain::{PlainRemote, PlainRemoteReader};
use crate::sender::LinkSender;
use crate::table::{LinkEvent, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{Decoder, EncodedMessage, encode};
use tunnel_proto::frame::{ErrorCode, FrameKind, Remote, SessionError, SessionKey};

/// A running link over one gRPC stream. Its driver calls [`Self::next`] until it ends; dropping it ends the stream.
#[derive(Debug)]
pub struct Link {
    /// The link's sending side, which carries the sessions.
    pub sender: Arc<LinkSender>,
    table: Arc<SessionTable>,
    metrics: Metrics,
    /// Reads from the remote if that is plain.
    plain: Option<PlainRemoteReader>,
    /// Whether the remote dialled this end. Then heartbeats are requests to answer; otherwise they are responses.
    answers: bool,
    incoming: Incoming,
    ahead: ReadAhead,
    reader: Decoder,
    events: VecDeque<LinkEvent>,
    /// Bytes read since the last yield to other tasks.
    since_rest: usize,
    liveness: Liveness,
    _connection: DropGuard,
}

/// The remote end of an accepted or answered call.
#[derive(Debug)]
pub(crate) struct RemoteInfo {
    /// Whether the remote dialled us.
    pub(crate) answers: bool,
    /// Whether the remote dialled us for interactive sessions.
    pub(crate) is_interactive: bool,
    pub(crate) incoming: Incoming,
    pub(crate) ahead: ReadAhead,
    /// Cancelled when the link is dropped, so that the connection closes as well.
    pub(crate) connection: CancellationToken,
}

impl Link {
    pub(crate) fn new(
        outbound: OutboundStream,
        far: RemoteInfo,
        table: Arc<SessionTable>,
        metrics: Metrics,
    ) -> Self {
        let now = Instant::now();
        let OutboundStream { sender, plain } = outbound;
        let role = match (far.answers, sender.is_plain()) {
            (false, false) => LivenessRole::Dialled,
            (true, false) if far.is_interactive => LivenessRole::AcceptedInteractive,
            (true, false) => LivenessRole::Accepted,
            (true, true) => LivenessRole::SuperEdgeEdge,
            (false, true) => LivenessRole::SuperEdgeServer,
        };
        let plain = plain.map(|remote| PlainRemoteReader::new(remote, metrics.clone(), far.answers));
        Self {
            sender,
            table,
            metrics,
            answers: far.answers,
            incoming: far.incoming,
            ahead: far.ahead,
            reader: Decoder::default(),
            events: VecDeque::new(),
            since_rest: 0,
            liveness: Liveness::new(role, now),
            plain,
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
    pub async fn next(&mut self) -> Result<LinkEvent, LinkEnd> {
        loop {
            // Each event is handled before the next frame is read, because the handling may affect how that frame is
            // read.
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if let Some(plain) = &mut self.plain
                && plain.pause_if_full(&self.ahead).await
            {
                self.liveness.handle_received(Instant::now());
            }
            if let Some(message) = self.reader.next_message()? {
                self.since_rest += message.data.len() + YIELD_COST_PER_MESSAGE;
                self.on_message(message);
                if self.since_rest >= YIELD_AFTER_BYTES {
                    self.since_rest = 0;
                    let now = Instant::now();
                    if self.liveness.is_stalled(self.sender.signs(now).blocked, now) {
                        return Err(LinkEnd::WriteStalled);
                    }
                    tokio::task::yield_now().await;
                }
                continue;
            }
            let piece = self.read().await?;
            self.reader.push(piece);
        }
    }

    /// Takes the link out of service. Returns the number of sessions with an end here that ran on it.
    pub fn end(&self, why: &LinkEnd) -> usize {
        let far = match &self.sender.peer {
            Remote::Client(client) => format!("user {client}"),
            peer => peer.node().map_or("a peer".into(), |node| format!("node {node}")),
        };
        let refusal = SessionError::new(ErrorCode::Cancelled, format!("the link to {far} closed: {why}"));
        self.table.link_ended(&self.sender, &refusal, Instant::now())
    }

    /// Waits for the next bytes of the stream and pings an idle remote meanwhile.
    async fn read(&mut self) -> Result<Bytes, LinkEnd> {
        loop {
            let next = self.poll_timeout();
            let incoming = Pin::new(&mut self.incoming);
            tokio::select! {
                biased;
                piece = self.ahead.next_piece(incoming) => {
                    let now = Instant::now();
                    self.sender.handle_received(now);
                    if self.liveness.handle_received(now) {
                        self.check()?;
                    }
                    return piece;
                }
                () = self.sender.check_requested() => {
                    if self.sender.is_closed() {
                        return Err(LinkEnd::ClosedLocally);
                    }
                    if self.liveness.is_watched() {
                        self.check()?;
                    }
                }
                () = sleep_until(next) => self.check()?,
                () = rescheduled(self.plain.as_ref()) => {}
            }
        }
    }

    /// Checks the link, and the sessions of a plain remote.
    fn check(&mut self) -> Result<(), LinkEnd> {
        let now = Instant::now();
        match self.liveness.handle_timeout(self.sender.signs(now), now) {
            LivenessVerdict::Alive => {}
            LivenessVerdict::PingDue => self.sender.ping(),
            LivenessVerdict::Unresponsive => self.sender.wake_unresponsive(),
            LivenessVerdict::Stalled => return Err(LinkEnd::WriteStalled),
            LivenessVerdict::Dead(silent_for) => return Err(LinkEnd::TimedOut(silent_for)),
        }
        if let Some(plain) = &mut self.plain {
            plain.tick(now, &mut self.events);
        }
        Ok(())
    }

    /// Returns when to check the link, and the sessions of a plain remote, next.
    fn poll_timeout(&self) -> Instant {
        let next = self.liveness.poll_timeout();
        let due = self.plain.as_ref().and_then(PlainRemoteReader::next_due);
        due.map_or(next, |due| due.min(next))
    }

    /// Handles a message: a session's frame goes to the table, a signal becomes an event.
    fn on_message(&mut self, message: StreamMsg) {
        let now = Instant::now();
        self.sender.count_received(message.data.len());
        if let Some(plain) = &mut self.plain {
            return plain.on_message(message, now, &mut self.events);
        }
        let frame = match from_message(message, &self.sender.peer) {
            Ok(frame) => frame,
            Err(bad) => return self.metrics.frames_dropped.count(bad.reason()),
        };
        log_frame("frame received", self.sender.id, &frame);
        match frame.body {
            // A Pong without a number is the same message as a Ping: answering that would never end.
            FrameKind::Ping(None) if !self.answers => {}
            FrameKind::Ping(number) => self.sender.pong(number),
            FrameKind::Pong(Some(number)) => {
                let rtt = self.sender.handle_pong(number, now);
                self.metrics.rtt.observe(rtt.as_secs_f64());
            }
            FrameKind::Pong(None) => {}
            FrameKind::Session(id, category, session_frame) => {
                self.sender.mark_active(now);
                let key = SessionKey { id, category, node: frame.node };
                self.events.extend(self.table.on_frame(&self.sender, key, session_frame, now));
            }
            _ => self.events.push_back(LinkEvent::Signal(frame)),
        }
    }
}

/// Waits until the next check of a plain remote may be due sooner, or forever on another link.
async fn rescheduled(plain: Option<&PlainRemoteReader>) {
    match plain {
        Some(plain) => plain.rescheduled().await,
        None => std::future::pending().await,
    }
}

/// The read loop yields to other tasks after this number of bytes.
const YIELD_AFTER_BYTES: usize = 256 * 1024;
/// Bytes that each message adds to that count, in addition to its data.
const YIELD_COST_PER_MESSAGE: usize = 128;

/// The outbound side of a link: supplies what the gRPC stream sends next.
#[derive(Debug, Clone)]
pub(crate) struct OutboundStream {
    pub(crate) sender: Arc<LinkSender>,
    /// Represents the remote if that is plain.
    pub(crate) plain: Option<Arc<PlainRemote>>,
}

impl OutboundStream {
    /// Polls for the next message to send. Returns `None` once the link is closed.
    pub(crate) fn poll_message(&self, cx: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        if let Some(plain) = &self.plain {
            return plain.poll_message(cx);
        }
        let frame = ready!(self.sender.poll_pull(cx, Instant::now()));
        Poll::Ready(frame.map(|frame| {
            let message = to_message(frame);
            self.sender.count_sent(message.data.len());
            encode(message)
        }))
    }
}
