//! Pieces of a byte stream that wait in memory: what is small is joined to what came before it.

use bytes::Bytes;

/// `last` with `more` behind it. Room grows by doubling, so that joining byte after byte copies each about twice; a
/// `last` that somebody else holds too is copied.
pub(super) fn joined(last: Bytes, more: &[u8]) -> Bytes {
    match last.try_into_mut() {
        Ok(mut both) => {
            both.extend_from_slice(more);
            both.freeze()
        }
        Err(last) => [&last[..], more].concat().into(),
    }
}

/// What a piece that waits costs beside its bytes: its place in a queue, and its allocation.
pub(super) const PIECE: usize = 96;
