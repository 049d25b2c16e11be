//! One link at work: the read loop, signs of life, and the pull side that its gRPC stream polls.

mod alive;
mod ended;
pub mod grpc;
pub(super) mod pace;
mod puller;
pub(super) mod schedule;
mod second;
pub(super) mod sender;
pub(super) mod source;
mod stall;
mod trace;
mod trips;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::protocol::link::alive::{
    Alive, HEARTBEAT_EVERY, Look, PING_AFTER, PING_CALLER_AFTER, SILENT, SILENT_PLAIN_EDGE,
};
pub use crate::protocol::link::ended::LinkEnded;
use crate::protocol::link::grpc::ReadAhead;
pub(super) use crate::protocol::link::puller::{Encoding, Puller};
pub use crate::protocol::link::second::SecondLink;
use crate::protocol::link::stall::Stall;

use crate::names::SessionId;
use crate::protocol::link::sender::{Life, LinkSender};
use crate::protocol::lock;
use crate::protocol::session::Parked;
use crate::protocol::table::{Event, SessionTable};
use crate::protocol::wire::codec::{Reader, StreamMsg};
use crate::protocol::wire::extension::from_message;
use crate::protocol::wire::frame::{Code, Frame, FrameKind, Refusal, SessionFrame, SessionKey};
use crate::protocol::wire::plain::{Decoded, Received};
use crate::telemetry::Metrics;

/// One gRPC stream at work. Its driver calls [`Self::next`] until it ends; dropping it ends the stream.
#[derive(Debug)]
pub struct Link {
    /// Its sending side, which sessions run on.
    pub sender: Arc<LinkSender>,
    table: Arc<SessionTable>,
    metrics: Metrics,
    dialect: Encoding,
    /// Whether the peer dialled this end: then heartbeats are questions, else answers.
    answers: bool,
    incoming: Incoming,
    ahead: ReadAhead,
    reader: Reader,
    events: VecDeque<Event>,
    /// Bytes read since other tasks could last run.
    since_rest: usize,
    alive: Alive,
    stall: Stall,
    /// The session that got data last.
    fed: Option<SessionId>,
    /// Notified when a plain session has ended at this side.
    more_ending: Arc<Notify>,
    _connection: DropGuard,
}

/// The other end, as the call has shown it.
#[derive(Debug)]
pub(super) struct Far {
    /// Whether it dialled us.
    pub(super) answers: bool,
    pub(super) incoming: Incoming,
    pub(super) ahead: ReadAhead,
    /// Cancelled once the link is dropped, so that the connection goes too.
    pub(super) connection: CancellationToken,
}

impl Link {
    pub(super) fn new(puller: &Puller, far: Far, metrics: Metrics) -> Self {
        let now = Instant::now();
        let silence = match (&puller.dialect, far.answers) {
            (Encoding::Extended, _) => SILENT,
            (Encoding::Plain(_), true) => SILENT_PLAIN_EDGE,
            (Encoding::Plain(_), false) => HEARTBEAT_EVERY + SILENT,
        };
        let ask_after = if far.answers { PING_CALLER_AFTER } else { PING_AFTER };
        Self {
            sender: puller.sender.clone(),
            table: puller.table.clone(),
            metrics,
            dialect: puller.dialect.clone(),
            answers: far.answers,
            incoming: far.incoming,
            ahead: far.ahead,
            reader: Reader::default(),
            events: VecDeque::new(),
            since_rest: 0,
            alive: Alive {
                last_received: now,
                last_ping: now,
                looked: now,
                silence_limit: silence,
                ask_after,
                watches: !far.answers,
                watched: None,
            },
            stall: Stall::new(now),
            fed: None,
            more_ending: match &puller.dialect {
                Encoding::Plain(plain) => lock(plain).more_ending.clone(),
                Encoding::Extended => Arc::default(),
            },
            _connection: far.connection.drop_guard(),
        }
    }

    /// The next thing to be done for the peer. After an error the link is over; call [`Self::end`]. Cancel safe.
    pub async fn next(&mut self) -> Result<Event, LinkEnded> {
        loop {
            // Each event is dealt with before the next frame is read: what it does may bear on that.
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            self.keep_readers_ahead().await;
            if let Some(message) = self.reader.message()? {
                self.since_rest += message.data.len() + REST_EACH;
                self.on_message(message);
                if self.since_rest >= REST_AFTER {
                    self.since_rest = 0;
                    self.check_read(Instant::now())?;
                    tokio::task::yield_now().await;
                }
                continue;
            }
            let piece = self.piece().await?;
            self.reader.piece(piece);
        }
    }

    /// Takes the link out of service. Returns the sessions that need another path.
    pub fn end(&self, why: &LinkEnded) -> Vec<Parked> {
        let far = self.sender.peer.node().map_or("a pod".into(), |node| format!("node {node}"));
        let refusal = Refusal::new(Code::GivenUp, format!("the link to {far} is gone: {why}"));
        self.table.link_ended(&self.sender, &refusal, Instant::now())
    }

    /// Waits for the next bytes of the stream, pinging a silent peer.
    async fn piece(&mut self) -> Result<Bytes, LinkEnded> {
        loop {
            let next = self.next_look();
            let incoming = Pin::new(&mut self.incoming);
            tokio::select! {
                biased;
                piece = self.ahead.next_piece(incoming) => {
                    let now = Instant::now();
                    self.sender.received(now);
                    if self.alive.receives(now) {
                        self.check_life()?;
                    }
                    return piece.map_err(LinkEnded::from);
                }
                () = self.sender.stirred() => {
                    if self.sender.is_closed() {
                        return Err(LinkEnded::ClosedHere);
                    }
                    if self.alive.watches {
                        self.check_life()?;
                    }
                }
                () = sleep_until(next) => self.check_life()?,
                () = self.more_ending.notified(), if matches!(self.dialect, Encoding::Plain(_)) => {}
            }
        }
    }

    fn check_life(&mut self) -> Result<(), LinkEnded> {
        let now = Instant::now();
        let (silent, unasked) = (now - self.alive.last_received, now - self.alive.last_ping);
        self.alive.looked = now;
        if silent >= self.alive.silence_limit {
            return Err(LinkEnded::Silent);
        }
        self.check_read(now)?;
        let Encoding::Plain(plain) = &self.dialect else {
            let life = if self.alive.watches { self.sender.life(now) } else { Life::default() };
            match self.alive.look(life, now) {
                Look::Fine => {}
                Look::Ask => self.sender.ping(),
                Look::Silent => self.sender.fell_silent(),
            }
            return Ok(());
        };
        let plain = plain.clone();
        self.close_ended(&plain, now);
        let ended = lock(&plain).tick(now);
        if !self.answers && unasked >= HEARTBEAT_EVERY {
            self.alive.last_ping = now;
            self.sender.ping();
        }
        for decoded in ended {
            self.deliver(decoded, now);
        }
        self.sender.rouse();
        Ok(())
    }

    /// When to look at the link's life next, and at targets that have ended.
    fn next_look(&self) -> Instant {
        let next = self.alive.next();
        let Encoding::Plain(plain) = &self.dialect else { return next };
        lock(plain).next_end().map_or(next, |end| end.min(next))
    }

    /// A peer of the extended dialect never stops reading. If it did, the last frames that wait for it, and their
    /// sessions, would be kept for ever. A plain peer may stop for as long as one of its targets does.
    fn check_read(&self, now: Instant) -> Result<(), LinkEnded> {
        let unread = self.sender.resumes && self.sender.unpulled().is_some_and(|since| now - since >= UNREAD);
        if unread { Err(LinkEnded::Unread) } else { Ok(()) }
    }

    fn on_message(&mut self, message: StreamMsg) {
        let now = Instant::now();
        self.sender.count_received(message.data.len());
        let Encoding::Plain(plain) = &self.dialect else {
            match from_message(message, &self.sender.peer) {
                Ok(frame) => {
                    trace::log(RECEIVED, self.sender.id, &frame);
                    self.on_frame(frame, now);
                }
                Err(bad) => self.metrics.frames_dropped.count(bad.cause()),
            }
            return;
        };
        let meaning = lock(plain).on_message(message, now);
        match meaning {
            Received::Session(decoded) => {
                if trace::is_wanted() {
                    let log = |word| trace::log_word(RECEIVED, self.sender.id, decoded.id, word);
                    decoded.frames.iter().for_each(log);
                }
                self.deliver(decoded, now);
            }
            Received::Heartbeat if self.answers => self.sender.pong(None),
            Received::Heartbeat => {}
            Received::Answered => self.sender.rouse(),
            Received::Unknown(cause) => self.metrics.frames_dropped.count(cause),
        }
    }

    fn on_frame(&mut self, frame: Frame, now: Instant) {
        let node = frame.node;
        match frame.body {
            FrameKind::Ping(None) if !self.answers => {}
            FrameKind::Ping(number) => self.sender.pong(number),
            FrameKind::Pong(Some(number)) => {
                let trip = self.sender.ponged(number, now);
                self.metrics.round_trip.observe(trip);
            }
            FrameKind::Pong(None) => {}
            FrameKind::Session(id, category, frame) => {
                self.sender.moves(now);
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

/// How long a link may take nothing of what waits for it: longer than the largest frame takes on the worst line.
const UNREAD: Duration = Duration::from_secs(60);
/// The read loop gives way to other tasks after so many bytes.
const REST_AFTER: usize = 256 * 1024;
/// What a message counts for in that, beside its bytes.
const REST_EACH: usize = 128;
/// Said of a frame in the log.
const RECEIVED: &str = "frame received";
