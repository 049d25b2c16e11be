//! A pool of read buffers of 64 KiB, so that reading costs no page faults.

use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Hands out read buffers and keeps a bounded number of returned ones. Cheap to clone; clones share the buffers.
#[derive(derive_more::Debug, Clone, Default)]
#[debug("BufferPool({} idle)", self.idle())]
pub struct BufferPool(Arc<Mutex<IdleBuffers>>);

/// A read buffer of [`BUFFER`] bytes, returned to its pool on drop.
///
/// It still contains bytes of earlier reads: only bytes that a read has just filled are valid.
#[derive(derive_more::Debug, derive_more::Deref, derive_more::DerefMut)]
#[debug("PooledBuffer({})", bytes.len())]
pub struct PooledBuffer {
    #[deref(forward)]
    #[deref_mut(forward)]
    bytes: Box<[u8]>,
    home: Arc<Mutex<IdleBuffers>>,
}

impl BufferPool {
    /// Creates an empty pool. A process should have one, so that its sessions share the buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes an idle buffer, or allocates one.
    pub fn take(&self) -> PooledBuffer {
        let kept = {
            let mut idle = self.0.lock();
            let kept = idle.buffers.pop();
            idle.least = idle.least.min(idle.buffers.len());
            kept
        };
        let bytes = kept.unwrap_or_else(|| vec![0; BUFFER].into());
        PooledBuffer { bytes, home: Arc::clone(&self.0) }
    }

    /// Frees the buffers that were not needed since the last call. Call it every few seconds.
    pub fn trim(&self) {
        let unused = {
            let mut idle = self.0.lock();
            let keep = idle.buffers.len() - idle.least.min(idle.buffers.len());
            let unused = idle.buffers.split_off(keep);
            idle.least = keep;
            unused
        };
        // Freed here, outside the lock.
        drop(unused);
    }

    /// Returns the number of idle buffers.
    pub fn idle(&self) -> usize {
        self.0.lock().buffers.len()
    }
}

impl PooledBuffer {
    /// Returns the first `n` bytes, without copying them unless they are few. A larger `n` is limited to the buffer's
    /// length.
    ///
    /// Few bytes are copied and the buffer is returned at once, because a retained slice of one byte would pin all of
    /// it. Otherwise the buffer is returned when the last clone of the result is dropped.
    pub fn freeze(self, n: usize) -> Bytes {
        let filled = FilledBuffer { len: n.min(self.bytes.len()), buffer: self };
        if filled.len < COPY_BELOW {
            Bytes::copy_from_slice(filled.as_ref())
        } else {
            Bytes::from_owner(filled)
        }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let bytes = mem::take(&mut self.bytes);
        let mut idle = self.home.lock();
        if idle.buffers.len() < MAX_IDLE_BUFFERS {
            idle.buffers.push(bytes);
        }
    }
}

/// The idle buffers, shared by a [`BufferPool`] and its buffers.
#[derive(Default)]
struct IdleBuffers {
    /// A stack, so that the buffer most likely to be in the CPU cache is used first.
    buffers: Vec<Box<[u8]>>,
    /// Minimum number of idle buffers since the last trim: that many were not needed.
    least: usize,
}

/// The owner of [`Bytes`] made from a buffer: returns the buffer to its pool when the last clone is dropped.
struct FilledBuffer {
    buffer: PooledBuffer,
    len: usize,
}

impl AsRef<[u8]> for FilledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.buffer.bytes.get(..self.len).unwrap_or_default()
    }
}

/// Bytes in a buffer. Reads of 64 KiB took 20 to 40 % less CPU time than reads of 8 KiB.
pub const BUFFER: usize = 64 * 1024;

/// Maximum number of idle buffers: 4 MiB, enough for concurrently active sessions on a machine with many cores.
const MAX_IDLE_BUFFERS: usize = 64;

/// Reads shorter than this are copied.
///
/// So the bytes that a budget counts take at most a third more memory, whatever the size of a target's writes.
const COPY_BELOW: usize = BUFFER / 4 * 3;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_dropped_buffer_is_reused() {
        let pool = BufferPool::new();
        let mut buffer = pool.take();
        buffer[0] = 7;
        drop(buffer);
        assert_eq!(pool.idle(), 1);
        assert_eq!(pool.take()[0], 7);
    }

    #[test]
    fn a_few_bytes_do_not_pin_their_buffer() {
        let pool = BufferPool::new();
        let one = pool.take().freeze(1);
        assert_eq!((one.len(), pool.idle()), (1, 1));
    }

    #[test]
    fn bytes_that_are_kept_take_little_more_memory_than_they_are() {
        let pool = BufferPool::new();
        for length in [1, BUFFER / 4, BUFFER / 2, BUFFER / 4 * 3, BUFFER] {
            let kept = pool.take().freeze(length);
            let pinned = if pool.idle() == 0 { BUFFER } else { length };
            assert!(pinned * 3 <= length * 4, "{pinned} for {}", kept.len());
        }
    }

    #[test]
    fn many_bytes_hold_their_buffer_until_the_last_clone_is_dropped() {
        let pool = BufferPool::new();
        let buffer = pool.take();
        let at = buffer.as_ptr();
        let bytes = buffer.freeze(BUFFER);
        assert_eq!(bytes.as_ptr(), at, "not copied");
        let tail = bytes.slice(BUFFER - 1..);
        drop(bytes);
        assert_eq!(pool.idle(), 0);
        drop(tail);
        assert_eq!(pool.idle(), 1);
    }

    #[test]
    fn the_number_of_idle_buffers_is_bounded() {
        let pool = BufferPool::new();
        let all: Vec<_> = (0..MAX_IDLE_BUFFERS + 10).map(|_| pool.take()).collect();
        drop(all);
        assert_eq!(pool.idle(), MAX_IDLE_BUFFERS);
    }

    #[test]
    fn a_trim_releases_buffers_unused_since_the_last_trim() {
        let pool = BufferPool::new();
        drop([pool.take(), pool.take(), pool.take()]);
        pool.trim();
        assert_eq!(pool.idle(), 3, "just used");
        drop([pool.take(), pool.take()]);
        pool.trim();
        assert_eq!(pool.idle(), 2, "one was idle all the time");
        pool.trim();
        assert_eq!(pool.idle(), 0);
    }

    proptest! {
        #[test]
        fn frozen_bytes_are_the_ones_read(n in 0..=BUFFER + 10, fill: u8) {
            let pool = BufferPool::new();
            let mut buffer = pool.take();
            buffer.fill(fill);
            let bytes = buffer.freeze(n);
            prop_assert_eq!(bytes.len(), n.min(BUFFER));
            prop_assert!(bytes.iter().all(|b| *b == fill));
        }
    }
}
