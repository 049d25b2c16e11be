//! How a splice ends.

use std::io;

/// The result of a splice, for the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes written to `a`.
    pub to_a: u64,
    /// Bytes written to `b`.
    pub to_b: u64,
    /// Which side ended it, and how.
    pub ended: Ended,
}

/// Which side ended a splice, and how: the first failure if there was one, else the side that finished first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The side.
    pub by: Side,
    /// How it ended.
    pub how: How,
}

/// One of the two streams, by its position among the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first argument.
    A,
    /// The second argument.
    B,
}

/// How a side ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It finished its direction in good order.
    Finished,
    /// Reading from it failed: it was reset, or went silent.
    ReadFailed(io::ErrorKind),
    /// Writing to it failed while the other side still sent bytes, or would fail if it did.
    WriteFailed(io::ErrorKind),
}

impl Side {
    /// The other side.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// What has ended so far.
#[derive(Default)]
pub(super) struct Log {
    /// The side that finished first.
    pub(super) finished: Option<Side>,
    /// The first failure.
    pub(super) failed: Option<Ended>,
}

impl Log {
    /// Records a failure, unless it is not the first.
    pub(super) fn failed(&mut self, by: Side, how: How) {
        self.failed.get_or_insert(Ended { by, how });
    }

    /// How the splice ended, once it has.
    pub(super) fn ended(&self) -> Ended {
        let finished = Ended { by: self.finished.unwrap_or(Side::A), how: How::Finished };
        self.failed.unwrap_or(finished)
    }
}
