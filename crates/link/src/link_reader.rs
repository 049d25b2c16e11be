//! The read loop of a link, which also pings the remote and decides when the link is dead.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::frame_log::log_frame;
use crate::grpc::call_body::OutboundStream;
use crate::grpc::link_end::LinkEnd;
use crate::grpc::read_ahead::ReadAheadBound;
use crate::link::Link;
use crate::liveness::{Liveness, LivenessRole, LivenessVerdict};
use crate::plain::PlainRemoteReader;
use crate::table::{FrameEvent, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_proto::codec::extended::from_message;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{Decoder, MAX_BYTES, MAX_EXTENDED_BYTES};
use tunnel_proto::frame::{ErrorCode, FrameKind, Remote, SessionError, SessionKey};

/// Reads one gRPC stream for its link. Its owner calls [`Self::next`] until the link ends; dropping it ends the stream.
#[derive(Debug)]
pub struct LinkReader {
    /// The link, which the sessions share.
    pub link: Arc<Link>,
    table: Arc<SessionTable>,
    metrics: Metrics,
    /// Reads from the remote if that is plain.
    plain: Option<PlainRemoteReader>,
    /// Whether the remote dialled this end. Then heartbeats are requests to answer; otherwise they are responses.
    answers: bool,
    incoming: Incoming,
    ahead: ReadAheadBound,
    decoder: Decoder,
    events: VecDeque<FrameEvent>,
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
    pub(crate) ahead: ReadAheadBound,
    /// Cancelled when the link is dropped, so that the connection closes as well.
    pub(crate) connection: CancellationToken,
}

impl LinkReader {
    pub(crate) fn new(
        outbound: OutboundStream,
        far: RemoteInfo,
        table: Arc<SessionTable>,
        metrics: Metrics,
    ) -> Self {
        let now = Instant::now();
        let OutboundStream { link, plain } = outbound;
        let role = match (far.answers, plain.is_some()) {
            (false, false) => LivenessRole::Dialled,
            (true, false) if far.is_interactive => LivenessRole::AcceptedInteractive,
            (true, false) => LivenessRole::Accepted,
            (true, true) => LivenessRole::SuperEdgeEdge,
            (false, true) => LivenessRole::SuperEdgeServer,
        };
        let plain = plain.map(|remote| PlainRemoteReader::new(remote, metrics.clone()));
        Self {
            link,
            table,
            metrics,
            answers: far.answers,
            incoming: far.incoming,
            ahead: far.ahead,
            decoder: Decoder::new(if plain.is_some() { MAX_BYTES } else { MAX_EXTENDED_BYTES }),
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
    pub async fn next(&mut self) -> Result<FrameEvent, LinkEnd> {
        loop {
            // Each event is handled before the next frame is read, because the handling may affect how that frame is
            // read.
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if let Some(plain) = &mut self.plain {
                let pause = self.ahead.stall();
                if plain.pause_if_full().await {
                    self.liveness.handle_received(Instant::now());
                }
                drop(pause);
            }
            if let Some(message) = self.decoder.next_message()? {
                self.since_rest += message.data.len() + YIELD_COST_PER_MESSAGE;
                self.on_message(message);
                if self.since_rest >= YIELD_AFTER_BYTES {
                    self.since_rest = 0;
                    let now = Instant::now();
                    if self.liveness.is_stalled(self.link.signs(now).blocked, now) {
                        return Err(LinkEnd::WriteStalled);
                    }
                    tokio::task::yield_now().await;
                }
                continue;
            }
            if let Some(plain) = &mut self.plain {
                plain.charge_unfinished(self.decoder.unfinished())?;
            }
            let piece = self.read().await?;
            self.decoder.push(piece);
        }
    }

    /// Counts the link as open, until [`Self::end`].
    pub fn begin(&self) {
        self.metrics.links.opened(self.link.peer.kind());
    }

    /// Takes the link out of service. Returns the number of sessions with an end here that ran on it.
    pub fn end(&self, why: &LinkEnd) -> usize {
        self.metrics.links.closed(self.link.peer.kind());
        self.metrics.links_closed.count(why.name());
        let far = match &self.link.peer {
            Remote::User(client) => format!("user {client}"),
            peer => peer.node().map_or("a peer".into(), |node| format!("node {node}")),
        };
        let refusal = SessionError::new(ErrorCode::Cancelled, format!("the link to {far} closed: {why}"));
        self.table.link_ended(&self.link, &refusal, Instant::now())
    }

    /// Waits for the next bytes of the stream and pings an idle remote meanwhile.
    async fn read(&mut self) -> Result<Bytes, LinkEnd> {
        loop {
            let next = self.liveness.poll_timeout();
            let incoming = Pin::new(&mut self.incoming);
            tokio::select! {
                biased;
                piece = self.ahead.next_piece(incoming) => {
                    let now = Instant::now();
                    self.link.handle_received(now);
                    if self.liveness.handle_received(now) {
                        self.check()?;
                    }
                    return piece;
                }
                () = self.link.check_requested() => {
                    if self.link.is_closed() {
                        return Err(LinkEnd::ClosedLocally);
                    }
                    if self.liveness.is_watched() {
                        self.check()?;
                    }
                }
                () = sleep_until(next) => self.check()?,
                () = plain_due(self.plain.as_ref()) => {
                    if let Some(plain) = &mut self.plain {
                        plain.tick(Instant::now(), &mut self.events);
                    }
                }
            }
        }
    }

    fn check(&mut self) -> Result<(), LinkEnd> {
        let now = Instant::now();
        match self.liveness.handle_timeout(self.link.signs(now), now) {
            LivenessVerdict::Alive => {}
            LivenessVerdict::PingDue => self.link.ping(),
            LivenessVerdict::Unresponsive => self.link.wake_unresponsive(),
            LivenessVerdict::Stalled => return Err(LinkEnd::WriteStalled),
            LivenessVerdict::Dead(silent_for) => return Err(LinkEnd::TimedOut(silent_for)),
        }
        Ok(())
    }

    /// Handles a message: a session's frame goes to the table, a signal becomes an event.
    fn on_message(&mut self, message: StreamMsg) {
        let now = Instant::now();
        self.link.count_received(message.data.len());
        if let Some(plain) = &mut self.plain {
            return plain.on_message(message, now, &mut self.events);
        }
        let frame = match from_message(message, &self.link.peer) {
            Ok(frame) => frame,
            Err(bad) => return self.metrics.frames_dropped.count(bad.reason()),
        };
        log_frame("frame received", self.link.id, &frame);
        match frame.body {
            // A Pong without a number is the same message as a Ping: answering that would never end.
            FrameKind::Ping(None) if !self.answers => {}
            FrameKind::Ping(number) => self.link.pong(number),
            FrameKind::Pong(Some(number)) => {
                let rtt = self.link.handle_pong(number, now);
                self.metrics.rtt.observe(rtt.as_secs_f64());
            }
            FrameKind::Pong(None) => {}
            FrameKind::Session(id, category, session_frame) => {
                self.link.mark_active(now);
                let key = SessionKey { id, category, node: frame.node };
                self.events.extend(self.table.on_frame(&self.link, key, session_frame, now));
            }
            _ => self.events.push_back(FrameEvent::Signal(frame)),
        }
    }
}

impl Drop for LinkReader {
    /// Closes the link also if it was never served: while it is open, hyper keeps its stream and the connection.
    fn drop(&mut self) {
        self.link.close();
    }
}

/// Waits until a plain remote's sessions have to be checked, or forever on another link.
async fn plain_due(plain: Option<&PlainRemoteReader>) {
    match plain {
        Some(plain) => plain.due().await,
        None => std::future::pending().await,
    }
}

/// The read loop yields to other tasks after this number of bytes.
const YIELD_AFTER_BYTES: usize = 256 * 1024;
/// Bytes that each message adds to that count, in addition to its data.
const YIELD_COST_PER_MESSAGE: usize = 128;
