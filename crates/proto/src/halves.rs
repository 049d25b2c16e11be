//! The two directions of one end of a session: what is sent, and what is received.

pub mod recv;
pub mod send;

use bytes::Bytes;

/// The sizes in bytes between which a session's receive window grows.
#[derive(Debug, Clone, Copy)]
pub struct WindowLimits {
    /// Window of a new session, or of one that was idle.
    pub start: u64,
    /// Largest window of one session.
    pub max: u64,
}

/// Returns `last` followed by `more`.
///
/// Capacity grows by doubling, so that joining byte by byte copies each about twice. If `last` is shared, it is copied.
pub fn joined(last: Bytes, more: &[u8]) -> Bytes {
    match last.try_into_mut() {
        Ok(mut both) => {
            both.extend_from_slice(more);
            both.freeze()
        }
        Err(last) => [&last[..], more].concat().into(),
    }
}

/// Overhead of a queued piece in addition to its bytes: its place in the queue, and its allocation.
const PIECE: usize = 96;

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
