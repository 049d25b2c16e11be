//! The trait of frame sources: an end of a session, or a relay queue.
//!
//! The link knows no sessions, only this trait, so the modules above may depend on it.

use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use crate::schedule::{FlowUsage, QueuedFlow};
use tunnel_proto::frame::{SessionFrame, SessionKey};
use tunnel_proto::state::{ControlPriority, LinkId};

/// An entry of a source in one of a link's queues.
#[derive(Debug, Clone)]
pub(crate) struct QueuedSource {
    pub(crate) source: Arc<dyn FrameSource>,
    /// Number of the source's stay on the link when it entered. A session that leaves a link and returns has another
    /// number, and the entries that it left behind are stale.
    pub(crate) stay: u64,
}

/// A source's turn to send a frame. Its entry has just left the queue.
#[derive(Debug)]
pub(crate) enum Turn {
    /// For an answer.
    Answer(QueuedFlow),
    /// For a credit.
    Credit(QueuedSource),
    /// For data: at most `longest` bytes, or nothing if the source has more than `most` to send.
    Data { flow: QueuedFlow, longest: usize, most: usize },
}

impl Turn {
    /// Returns the source's entry.
    pub(crate) fn entry(&self) -> &QueuedSource {
        match self {
            Self::Credit(entry) => entry,
            Self::Answer(flow) | Self::Data { flow, .. } => &flow.entry,
        }
    }
}

/// A source of frames that waits to send on a link. It creates each frame when the link can take it, under its own
/// lock; the link calls it without holding its own.
pub(crate) trait FrameSource: fmt::Debug + Send + Sync {
    /// Returns the session that its frames are about.
    fn key(&self) -> &SessionKey;

    /// Returns the client at whose cost its answers are sent.
    fn client(&self) -> &Arc<str>;

    /// Returns true if it will certainly send nothing for its entries of that stay. Takes no lock.
    fn is_stale(&self, stay: u64) -> bool;

    /// Returns what it sends in its turn. A turn for data keeps the account of it.
    fn next_frame(self: Arc<Self>, link: LinkId, turn: &mut Turn, now: Instant) -> TurnOutput;
}

/// The queues of a link in which a source waits, and what it has sent there. It has at most one entry in each, so they
/// cannot grow without bound.
#[derive(Debug, Default)]
pub(crate) struct QueueMembership {
    answers: bool,
    credits: bool,
    /// Whether its credit was reported as needed.
    needed: bool,
    turns: bool,
    usage: FlowUsage,
}

impl QueueMembership {
    /// Returns the entries that a source needs for a frame before data, and for its data, and does not have yet.
    pub(crate) fn request(
        &mut self,
        control: Option<ControlPriority>,
        backlog: Option<usize>,
    ) -> QueueRequest {
        let is_answer = control == Some(ControlPriority::Answer);
        let is_needed = control == Some(ControlPriority::Needed);
        let is_credit = is_needed || control == Some(ControlPriority::Credit);
        let request = QueueRequest {
            answer: is_answer && !self.answers,
            credit: is_credit && !self.credits,
            needed: is_needed && !self.needed,
            backlog: backlog.filter(|_| !self.turns),
            usage: self.usage,
            stay: 0,
        };
        self.answers |= is_answer;
        self.credits |= is_credit;
        self.needed |= is_needed;
        self.turns |= request.backlog.is_some();
        request
    }

    /// Records what was sent in a turn for an answer or a credit. It counts less than any takes on the wire.
    pub(crate) fn on_control(&mut self, turn: &mut Turn, frame: Option<SessionFrame>) -> TurnOutput {
        if let Turn::Answer(flow) = turn {
            self.answers = false;
            flow.charge(0);
        } else {
            (self.credits, self.needed) = (false, false);
        }
        let refusal = frame.as_ref().and_then(SessionFrame::refusal);
        let bytes = if frame.is_some() { 64 + refusal.map_or(16, |why| why.reason.len()) } else { 0 };
        TurnOutput { frame, bytes, ..TurnOutput::default() }
    }

    /// Records what was sent in a turn for data. The source needs another one for `backlog`. Between its turns it keeps
    /// the account itself.
    pub(crate) fn on_data(
        &mut self,
        flow: &mut QueuedFlow,
        frame: Option<SessionFrame>,
        backlog: Option<usize>,
    ) -> TurnOutput {
        let len = if let Some(SessionFrame::Data(data)) = &frame { data.len() } else { 0 };
        if frame.is_some() {
            flow.charge(len);
        }
        // The ends of thousands of sessions would fill a slow line.
        let bytes = if frame.is_some() { len.max(64) } else { 0 };
        self.usage = flow.usage;
        self.turns = backlog.is_some();
        TurnOutput { frame, bytes, backlog, ..TurnOutput::default() }
    }
}

/// The entries that a source, such as a session, needs in the queues of a link.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueRequest {
    /// Whether it needs one for an answer.
    pub(crate) answer: bool,
    /// Whether it needs one for a credit.
    pub(crate) credit: bool,
    /// Whether its credit has become urgent.
    pub(crate) needed: bool,
    /// Bytes that it has to send in a turn, if it needs one.
    pub(crate) backlog: Option<usize>,
    /// What it has sent on the link so far.
    pub(crate) usage: FlowUsage,
    /// Number of the source's stay on the link.
    pub(crate) stay: u64,
}

impl QueueRequest {
    /// Returns true if the source needs nothing.
    pub(crate) fn is_empty(&self) -> bool {
        !self.answer && !self.credit && !self.needed && self.backlog.is_none()
    }
}

/// What a source sends in its turn; nothing by default.
#[derive(Debug, Default)]
pub(crate) struct TurnOutput {
    pub(crate) frame: Option<SessionFrame>,
    /// Bytes in `frame` that count on the link.
    pub(crate) bytes: usize,
    /// Bytes that it still has to send, if it needs another turn for data.
    pub(crate) backlog: Option<usize>,
    /// Whether it needs another turn for a credit.
    pub(crate) credit: bool,
    /// Whether it is relayed and this was its last frame, so that the link no longer counts it. A session itself leaves
    /// its links.
    pub(crate) is_over: bool,
}
