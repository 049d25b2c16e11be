//! The end that stands for a peer that speaks plain: neutral frames as SuperEdge's words, and back.
//!
//! Of SuperEdge's generations it speaks the newest (docs/superedge.md#generations).
//!
//! A plain peer knows no limits, no half-close and no resume. So its limit is endless, what was handed to the link
//! counts as received, a finished direction is remembered until the other is finished too, and `closed` ends both. A
//! target that has ended is most often done with its client, which waits for nothing but that: then `closed` follows soon.

mod on_message;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::{Host, NodeName, SessionId, Target};
use crate::protocol::wire::codec::StreamMsg;
use crate::protocol::wire::extension::{HEARTBEAT, STREAM};
use crate::protocol::wire::frame::{Category, Code, Frame, FrameKind, Refusal, SessionFrame};

/// The sessions of one plain link, and how far each of them is.
#[derive(Debug)]
pub struct Plain {
    node: NodeName,
    by_topic: HashMap<String, SessionId>,
    sessions: HashMap<SessionId, PlainSession>,
    /// What is to be sent; bounded by [`MOST_WAITING`].
    waiting: VecDeque<StreamMsg>,
    /// Sessions whose target has ended, and when that is looked at: in this order.
    ending: VecDeque<(Instant, SessionId)>,
    /// Told when there is one more of them.
    pub(crate) more_ending: Arc<Notify>,
}

/// One session as the plain peer sees it.
#[derive(Debug)]
struct PlainSession {
    topic: String,
    category: Category,
    epoch: u64,
    /// Bytes handed to the link.
    sent: u64,
    /// Bytes that came from it.
    received: u64,
    /// Our direction is finished; said once the peer's is too, or after [`HALF_OPEN`] of silence.
    finished: bool,
    /// The target is at our end.
    accepted: bool,
    /// The peer has sent bytes after our direction was finished.
    goes_on: bool,
    last: Instant,
}

/// Words for one of our sessions.
#[derive(Debug, PartialEq)]
pub struct Decoded {
    /// Which session.
    pub id: SessionId,
    /// Its front end.
    pub category: Category,
    /// What is said, in order.
    pub frames: Vec<SessionFrame>,
}

/// What a message of the peer becomes.
#[derive(Debug, PartialEq)]
pub enum Received {
    /// Words for one session.
    Session(Decoded),
    /// A sign of life; a pod answers with the same message.
    Heartbeat,
    /// It was answered: [`Plain::next_message`] has the message.
    Answered,
    /// Nothing we know; a fixed word for metrics.
    Unknown(&'static str),
}

impl Plain {
    /// The sessions of a new link to or from `node`.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            by_topic: HashMap::new(),
            sessions: HashMap::new(),
            waiting: VecDeque::new(),
            ending: VecDeque::new(),
            more_ending: Arc::default(),
        }
    }

    /// Sends one of our frames. Returns the frames that our session gets at once, as the peer will send no answer.
    pub fn send_frame(&mut self, frame: Frame, now: Instant) -> Option<Decoded> {
        match frame.body {
            FrameKind::Ping(_) | FrameKind::Pong(_) => {
                self.waiting.push_back(heartbeat(&self.node));
                None
            }
            FrameKind::Session(id, category, word) => self.send_session_frame(id, category, word, now),
            // Never said on a plain link: its link sender takes no signals.
            FrameKind::Find(_) | FrameKind::Found(_) | FrameKind::Drain | FrameKind::Conflict(_) => None,
        }
    }

    /// The next message to send.
    pub fn next_message(&mut self) -> Option<StreamMsg> {
        self.waiting.pop_front()
    }

    /// Sends the ends of stream that waited long enough for the peer's.
    pub fn tick(&mut self, now: Instant) -> Vec<Decoded> {
        let late = |s: &PlainSession| s.finished && now - s.last >= HALF_OPEN;
        let ids: Vec<SessionId> = self.sessions.iter().filter(|(_, s)| late(s)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.close(id)).collect()
    }

    /// When [`Self::ended`] has something to tell next, if nothing changes.
    pub fn next_end(&self) -> Option<Instant> {
        self.ending.front().map(|(at, _)| *at)
    }

    /// Sessions whose target ended some time ago, and whose peer has sent nothing since: to be closed, or put off.
    pub fn ended(&mut self, now: Instant) -> Vec<SessionId> {
        let count = self.ending.iter().take_while(|(at, _)| *at <= now).count();
        let due = self.ending.drain(..count).map(|(_, id)| id);
        due.filter(|id| self.sessions.get(id).is_some_and(|session| !session.goes_on)).collect()
    }

    /// The target has not taken all that came from the peer: its end is looked at again later.
    pub fn put_off(&mut self, id: SessionId, now: Instant) {
        self.ending.push_back((now + AFTER_TARGET, id));
    }

    /// Ends a session in both directions. Returns the frames that our end gets.
    pub fn close(&mut self, id: SessionId) -> Option<Decoded> {
        self.end(id, "EOF").map(|session| over(id, &session))
    }

    fn send_session_frame(
        &mut self,
        id: SessionId,
        category: Category,
        word: SessionFrame,
        now: Instant,
    ) -> Option<Decoded> {
        if let SessionFrame::Open { target, epoch, .. } = word {
            self.open(id, category, &target, epoch, now);
            return None;
        }
        let session = self.sessions.get_mut(&id)?;
        session.last = now;
        let topic = session.topic.clone();
        let received = match word {
            SessionFrame::Opened { epoch, .. } => {
                session.epoch = epoch;
                self.send(category, "connected", topic, Bytes::new());
                return None;
            }
            SessionFrame::Data(bytes) => {
                session.sent += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                let received = session.sent;
                self.send(category, "tcp-forward", topic, bytes);
                received
            }
            SessionFrame::Finish { total } => {
                session.finished = true;
                if session.accepted {
                    self.put_off(id, now);
                    self.more_ending.notify_one();
                }
                total
            }
            SessionFrame::Refused { refusal, .. } => {
                self.drop_session(id);
                self.send(category, "connect-failed", topic, refusal.reason.into());
                return None;
            }
            SessionFrame::Reset { refusal, .. } => {
                self.end(id, if refusal.code == Code::Over { "EOF" } else { &refusal.reason });
                return None;
            }
            SessionFrame::Lost { .. } => {
                self.end(id, "the session went another way");
                return None;
            }
            _ => return None,
        };
        Some(Decoded { id, category, frames: vec![SessionFrame::Credit { received, limit: u64::MAX }] })
    }

    fn open(&mut self, id: SessionId, category: Category, target: &Target, epoch: u64, now: Instant) {
        let topic = id.topic();
        let addr = self.address(target);
        self.enter(
            id,
            PlainSession {
                topic: topic.clone(),
                category,
                epoch,
                sent: 0,
                received: 0,
                finished: false,
                accepted: false,
                goes_on: false,
                last: now,
            },
        );
        let text = format!("CONNECT {addr} HTTP/1.1\r\n\r\n\r\n");
        let message = StreamMsg { addr, ..self.message(category, "connecting", topic, text.into()) };
        self.waiting.push_back(message);
    }

    /// A plain edge dials what it is told: its own name may not resolve there, so it is called loopback.
    fn address(&self, target: &Target) -> String {
        match &target.host {
            Host::Name(name) if name.eq_ignore_ascii_case(self.node.as_str()) => {
                format!("127.0.0.1:{}", target.port)
            }
            _ => target.to_string(),
        }
    }

    fn end(&mut self, id: SessionId, text: &str) -> Option<PlainSession> {
        let session = self.drop_session(id)?;
        self.send(session.category, "closed", session.topic.clone(), Bytes::copy_from_slice(text.as_bytes()));
        Some(session)
    }

    fn enter(&mut self, id: SessionId, session: PlainSession) {
        self.by_topic.insert(session.topic.clone(), id);
        self.sessions.insert(id, session);
    }

    fn drop_session(&mut self, id: SessionId) -> Option<PlainSession> {
        let session = self.sessions.remove(&id)?;
        self.by_topic.remove(&session.topic);
        Some(session)
    }

    fn send(&mut self, category: Category, kind: &str, topic: String, data: Bytes) {
        let message = self.message(category, kind, topic, data);
        self.waiting.push_back(message);
    }

    fn message(&self, category: Category, kind: &str, topic: String, data: Bytes) -> StreamMsg {
        let node = self.node.as_str().to_owned();
        StreamMsg {
            node,
            category: name(category).into(),
            r#type: kind.into(),
            topic,
            data,
            addr: String::new(),
        }
    }
}

/// What a plain peer calls a category. It knows none for TCP ports any more, and does for `ssh` what they need.
fn name(category: Category) -> &'static str {
    match category {
        Category::Tcp => Category::Ssh.name(),
        category => category.name(),
    }
}

/// SuperEdge's sign of life: the same in both directions.
pub fn heartbeat(node: &NodeName) -> StreamMsg {
    StreamMsg {
        node: node.as_str().into(),
        category: STREAM.into(),
        r#type: HEARTBEAT.into(),
        topic: format!("{node}{HEARTBEAT}"),
        ..StreamMsg::default()
    }
}

/// The peer has closed both directions.
fn over(id: SessionId, session: &PlainSession) -> Decoded {
    let frames = vec![
        SessionFrame::Finish { total: session.received + 1 },
        SessionFrame::Reset {
            epoch: session.epoch,
            refusal: Refusal::new(Code::Over, "closed by the far end"),
        },
    ];
    Decoded { id, category: session.category, frames }
}

/// How long a finished direction waits for the other after the last byte, as `closed` ends both.
const HALF_OPEN: Duration = Duration::from_secs(30);
/// How long a target's end waits for the peer to send more: then nobody will.
const AFTER_TARGET: Duration = Duration::from_secs(1);
#[cfg(test)]
mod tests;
