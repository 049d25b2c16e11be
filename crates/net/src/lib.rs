//! Sockets and byte streams: the trait they share, and the parts that listen, dial, encrypt and copy.

pub mod accept_loop;
pub mod dial;
pub mod fd_limit;
pub mod http_proxy;
pub mod interfaces;
pub mod limiter;
pub mod listen;
pub mod network_monitor;
pub mod pki;
pub mod pool;
pub mod reload;
pub mod resolver;
pub mod socket;
pub mod tcp_info;
pub mod tls;

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;

/// A byte stream with two halves that hands bytes over without copying them.
///
/// Implemented by sockets (`socket::Socket`) and by the tunnel's sessions; `copy_bidirectional::copy_bidirectional` joins any two.
pub trait ByteStream: Unpin + Send {
    /// Returns bytes that have arrived; empty means that the far end has finished its direction.
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>>;

    /// Accepts bytes from the front of `bytes`, and advances it past them; ready once at least one was accepted.
    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>>;

    /// Sends what [`Self::poll_write_chunk`] accepted and the stream still buffers (TLS does so while its socket is
    /// full). Call it when there is nothing more to write for now. A stream without a buffer need not implement it.
    fn poll_flush(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Finishes the sending direction behind all that was written. Reading stays open.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready once a stream that was read to its end is known to take nothing more either, though nothing was written. A
    /// stream of which only a write shows that need not implement it.
    fn poll_lost(&self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
