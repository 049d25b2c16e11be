//! The trait of what has frames to send on a link: an end of a session, or a relay queue.
//!
//! The link sender knows no sessions and no relays, only these: so the rooms above it may know it.

use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use crate::protocol::link::schedule::{Standing, Turn};
use crate::protocol::wire::frame::{SessionFrame, SessionKey};

/// Which link of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One that waits to send on a link. It makes each frame when the link can take it, under its own lock; the link sender
/// calls it without holding its own.
pub(crate) trait FrameSource: fmt::Debug + Send + Sync {
    /// Which session its frames are about.
    fn key(&self) -> &SessionKey;

    /// Whether it will send nothing more here, for certain. Looks at no lock.
    fn is_closed(&self) -> bool;

    /// What it sends before data, if anything, and whether it has more of that kind to send.
    fn next_control(self: Arc<Self>, link: LinkId, now: Instant) -> (Option<SessionFrame>, bool);

    /// What it sends in its turn: at most `longest` bytes, nothing if it has more than `most` to send.
    fn next_turn(
        self: Arc<Self>,
        link: LinkId,
        turn: &Turn<Arc<dyn FrameSource>>,
        longest: usize,
        most: usize,
        now: Instant,
    ) -> Sent;

    /// Whether it is relayed and has sent its last frame, so that the link need not count it any more.
    fn is_over(&self) -> bool;
}

/// One direction of a session that is relayed. Its link keeps it, so that a newer attempt can end an older one there.
pub(crate) trait RelaySource: FrameSource {
    /// It sends nothing more.
    fn close(&self);

    /// The session is relayed by another source, for attempt `epoch`.
    fn retire(&self, epoch: u64);
}

/// What someone who wants to send has to send.
#[derive(Debug, Default)]
pub(crate) struct SendIntent {
    /// Has an answer or credit, which overtake data.
    pub(crate) control: Option<Control>,
    /// Has data: where it stands, and how many bytes.
    pub(crate) data: Option<(Standing, usize)>,
}

/// What overtakes data.
///
/// The later one of two is the more urgent: who waits for one asks again only for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Control {
    /// Credit alone.
    Credit,
    /// Credit without which the peer would soon have to stop, or that ends the session.
    Needed,
    /// An answer, a request or a last frame; perhaps credit behind it.
    Answer,
}

/// What was sent in a turn.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) frame: Option<SessionFrame>,
    /// Bytes of data in `frame`.
    pub(crate) bytes: usize,
    /// Where the source stands now.
    pub(crate) standing: Standing,
    /// Bytes it still has to send, if it wants another turn.
    pub(crate) backlog: Option<usize>,
}
