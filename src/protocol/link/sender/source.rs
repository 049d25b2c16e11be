//! Who speaks on a link: an end of a session, or what only passes through.

use std::sync::Arc;

use tokio::time::Instant;

use crate::names::{NodeName, SessionId};
use crate::protocol::link::schedule::Turn;
use crate::protocol::relay::queue::RelayQueue;
use crate::protocol::session::SessionCore;
use crate::protocol::session::state::LinkId;
use crate::protocol::wire::frame::{Category, SessionFrame};

/// One that waits to speak.
#[derive(Debug, Clone)]
pub(crate) enum FrameSource {
    /// An end of a session in this process.
    LocalAddresses(Arc<SessionCore>),
    /// One direction of a session that passes through.
    Passing(Arc<RelayQueue>),
}

/// What someone who wants to speak has to say.
#[derive(Debug, Default)]
pub(crate) struct SendIntent {
    /// Has an answer or credit, which overtake data.
    pub(crate) control: Option<Control>,
    /// Has data: where its account stands, and how many bytes.
    pub(crate) data: Option<(u64, usize)>,
}

/// What overtakes data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Control {
    /// An answer, a request or a last word; perhaps credit behind it.
    Answer,
    /// Credit alone.
    Credit,
}

/// What was said in a turn.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) frame: Option<SessionFrame>,
    /// Bytes of data in `frame`.
    pub(crate) bytes: usize,
    /// Where the speaker's account stands now.
    pub(crate) account: u64,
    /// Bytes it still has to say, if it wants another turn.
    pub(crate) backlog: Option<usize>,
}

impl FrameSource {
    /// Which session, which front end asked for it, and at which node its acceptor is.
    pub(crate) fn about(&self) -> (SessionId, Category, &NodeName) {
        match self {
            Self::LocalAddresses(session) => (session.id, session.category, &session.node),
            Self::Passing(queue) => (queue.id, queue.category, &queue.node),
        }
    }

    /// Whether it will say nothing more here, for certain.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::LocalAddresses(_) => false,
            Self::Passing(queue) => queue.is_closed(),
        }
    }

    /// What it says before data, if anything, and whether it has more of that kind to say.
    pub(crate) fn next_control(&self, link: LinkId, now: Instant) -> (Option<SessionFrame>, bool) {
        match self {
            Self::LocalAddresses(session) => (session.next_control(link, now), false),
            Self::Passing(queue) => queue.next_control(),
        }
    }

    /// What it says in its turn: at most `longest` bytes, nothing if it has more than `most` to say.
    pub(crate) fn next_turn(
        &self,
        link: LinkId,
        turn: &Turn<Self>,
        longest: usize,
        most: usize,
        now: Instant,
    ) -> Sent {
        match self {
            Self::LocalAddresses(session) => session.next_turn(link, turn, longest, most, now),
            Self::Passing(queue) => queue.next_turn(turn, longest, most),
        }
    }
}
