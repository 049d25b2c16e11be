//! Sockets and byte streams: the trait they share, and the parts that listen, dial, encrypt and copy.

pub mod backoff;
pub mod counted;
pub mod dial;
pub mod door;
pub mod entrance;
pub mod files;
pub mod hooked;
pub mod listen;
pub mod pem;
pub mod pool;
pub mod proxied;
pub mod proxy;
pub mod reload;
pub mod resolver;
pub mod secret;
pub mod socket;
pub mod splice;
pub mod tls;
mod unacknowledged;

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;

/// A byte stream with two halves that hands bytes over without copying them.
///
/// Implemented by sockets (`socket::Socket`) and by the tunnel's sessions; `splice::splice` joins any two.
pub trait ByteStream: Unpin + Send {
    /// Takes bytes that have arrived; empty means that the far end has finished its direction.
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>>;

    /// Gives bytes to send, from the front of `bytes`, which is advanced past what was taken; ready once some were.
    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>>;

    /// Pushes on what was taken by [`Self::poll_write_chunk`] and is held back here (TLS does so while its socket is full).
    /// To be called when there is nothing more to give for now. Streams that hold nothing back need not implement it.
    fn poll_flush(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Finishes the sending direction, once all that was given is on its way. Reading stays open.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}
