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

/// A violation of a session's flow control by the remote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlowControlError {
    /// The remote sent data beyond the limit.
    #[error("protocol error: remote sent data up to offset {0}, but the limit is {1}")]
    PastLimit(u64, u64),
    /// The remote sent data after its end of stream.
    #[error("protocol error: remote sent data after its end of stream")]
    PastEnd,
    /// An idle session has given its memory back, and now there is none. The bytes that had no room were dropped.
    #[error("no memory for what the remote sent")]
    NoMemory,
    /// The offset of the end of stream is not the end of the data.
    #[error("protocol error: remote ended its direction at {0}, but {1} were received")]
    WrongEnd(u64, u64),
    /// The remote acknowledged an offset outside the bytes that were sent and may still be acknowledged.
    #[error("protocol error: remote acknowledged offset {0}, but the bytes sent are {1} to {2}")]
    WrongAck(u64, u64, u64),
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
