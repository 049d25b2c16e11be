//! Bytes that have arrived and were not read, and the memory that they take.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::protocol::budget::Share;
use crate::protocol::pieces::{PIECE, joined};

/// Bytes that wait for a reader. Small pieces are joined where they arrive, so that one-byte frames cost no more than
/// large ones.
#[derive(Debug)]
pub(super) struct Queue {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    /// The overhead of the pieces; without a limit, their bytes too.
    cost: Share,
    /// Without a limit: the same, counted against the budget of the peer's link.
    of_link: Option<Share>,
}

impl Queue {
    /// An empty queue for a peer that keeps to a limit.
    pub(super) fn new(cost: Share) -> Self {
        Self { pieces: VecDeque::new(), bytes: 0, cost, of_link: None }
    }

    /// From now on all is counted, in one budget for the process and one for the link; or, without the latter, only
    /// what pieces cost beside their bytes.
    pub(super) fn count_in(&mut self, cost: Share, of_link: Option<Share>) {
        (self.cost, self.of_link) = (cost, of_link);
        self.count();
    }

    /// Whether the bytes themselves are counted, because the peer has no limit.
    pub(super) fn is_unpromised(&self) -> bool {
        self.of_link.is_some()
    }

    pub(super) fn push(&mut self, bytes: Bytes) {
        self.bytes += bytes.len();
        match self.pieces.pop_back() {
            Some(last) if last.len() + bytes.len() <= JOINED => self.pieces.push_back(joined(last, &bytes)),
            last => self.pieces.extend(last.into_iter().chain([bytes])),
        }
        self.count();
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        let bytes = self.pieces.pop_front()?;
        self.bytes -= bytes.len();
        self.count();
        Some(bytes)
    }

    pub(super) fn clear(&mut self) {
        (self.pieces, self.bytes) = (VecDeque::new(), 0);
        self.count();
    }

    /// Bytes that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn count(&mut self) {
        let pieces = self.pieces.len() * PIECE;
        match &mut self.of_link {
            None => self.cost.set(pieces),
            Some(of_link) => {
                self.cost.set(self.bytes + pieces);
                of_link.set(self.bytes + pieces);
            }
        }
    }
}

/// Pieces that follow one another are joined up to this many bytes.
const JOINED: usize = 4 * 1024;
