//! Sockets and byte streams: their common trait, and the code that listens, dials, encrypts and copies.

pub mod accept_loop;
pub mod byte_stream_io;
pub mod dial;
pub(crate) mod exact_read;
pub mod fair_map;
pub mod fd_limit;
pub mod guesses;
pub mod hooked;
pub mod http_proxy;
pub mod interfaces;
pub mod keepalive;
pub mod limiter;
pub mod listen;
pub mod mark;
#[cfg_attr(not(target_os = "macos"), path = "os/linux.rs")]
#[cfg_attr(target_os = "macos", path = "os/macos.rs")]
pub mod os;
pub mod path_mtu;
pub mod pki;
pub mod pool;
pub mod proxy_protocol;
pub mod reload;
pub mod resolver;
pub mod socket;
pub mod tcp_info;
pub mod tls;
pub mod unix_accept;
pub mod websocket;

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;

/// A byte stream with two directions that passes bytes on without copying them.
///
/// Implemented by sockets (`socket::Socket`) and by the tunnel's sessions; `copy_bidirectional` joins any two.
pub trait ChunkStream: Unpin + Send {
    /// Returns bytes that have arrived. Empty bytes mean that the remote end has finished its direction.
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>>;

    /// Accepts bytes from the front of `bytes` and advances it past them. Ready once at least one byte was accepted; if
    /// there are none, once the stream has room, unless it notices only on a write that it has none.
    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>>;

    /// Sends the bytes that [`Self::poll_write_chunk`] accepted and the stream still buffers, as TLS does while its
    /// socket is full.
    ///
    /// Call it when there is nothing more to write for now. A stream without a buffer need not implement it.
    fn poll_flush(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Finishes the sending direction after all written bytes. Reading stays open.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready with the cause once the stream is known to accept no more bytes, even if none are written.
    ///
    /// [`BrokenPipe`](io::ErrorKind::BrokenPipe) means that it can still be read to a clean end. A stream that notices
    /// its loss only on a write need not implement it.
    fn poll_lost(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        Poll::Pending
    }

    /// Returns the TCP socket below, if there is one.
    ///
    /// Its error makes [`Self::poll_lost`] ready, but wakes only a pending read. In other states, wait for it with
    /// [`in_error`](socket::in_error).
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}
