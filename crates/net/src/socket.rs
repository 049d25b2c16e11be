//! Sockets as streams that pass bytes on without copying, and hold no buffer while nothing arrives.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::{client, server};
use tokio_util::either::Either;

use crate::ChunkStream;
use crate::hooked::{Hooked, ReadHook};
use crate::keepalive::DisconnectDetector;
use crate::os::closed;
use crate::pool::{BufferPool, PooledBuffer};

/// The stream of a client or a target: TCP, TLS over TCP, or another kind.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send {
    /// Returns the underlying TCP socket. Its options decide how the remote sees the end of the connection.
    ///
    /// Returns `None` for a stream of another kind, which always ends cleanly.
    fn tcp(&self) -> Option<&TcpStream>;

    /// Completes once the remote has reset the connection, or never if the system does not report that.
    ///
    /// A remote that only finished its direction does not count. Reads nothing. Cancel safe.
    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        Box::pin(in_error(self.tcp()))
    }

    /// Returns the id of the local user at the remote end. Returns `None` for a stream that is no Unix socket, and
    /// for one within a user's shared socket.
    fn peer_uid(&self) -> Option<u32> {
        None
    }

    /// Returns true if a remote that has finished its direction may still read. Over TLS few do: a closing remote sends
    /// the same.
    fn may_half_close(&self) -> bool {
        true
    }

    /// Sets how the remote sees the end when this is dropped: as a reset (`true`) or as a clean end.
    ///
    /// A session may be aborted at any moment, and its bytes must not look complete then. After a clean end, nc and an
    /// ssh that uses it would even wait for the rest. So set `true` while bytes are copied, and `false` once all of
    /// them were. Has no effect on a closed socket.
    fn set_reset_on_drop(&self, broken: bool) {
        if let Some(tcp) = self.tcp() {
            let _ = SockRef::from(tcp).set_linger(broken.then_some(Duration::ZERO));
        }
    }
}

/// A connection of any kind. What serves it is compiled once for all of them.
pub type AnyConnection = Box<dyn Connection>;

/// Completes once a TCP socket has an error. Never completes for a stream of another kind. Cancel safe.
pub async fn in_error(tcp: Option<&TcpStream>) {
    match tcp {
        // Also completes, with an error, when the runtime shuts down.
        Some(tcp) => drop(tcp.ready(Interest::ERROR).await),
        None => std::future::pending().await,
    }
}

impl Connection for TcpStream {
    fn tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }
}

/// Always ends cleanly, because Unix sockets have no reset. The protocol inside has to mark its own end, as TLS does.
impl Connection for UnixStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }

    fn peer_uid(&self) -> Option<u32> {
        self.peer_cred().ok().map(|user| user.uid())
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        Box::pin(closed(self))
    }
}

/// Closing sends the remote a TLS alert. Breaking off sends none and resets the socket.
impl<T: Connection> Connection for server::TlsStream<T> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.get_ref().0.tcp()
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        self.get_ref().0.remote_reset()
    }

    fn may_half_close(&self) -> bool {
        false
    }
}

/// Like a server's stream.
impl<T: Connection> Connection for client::TlsStream<T> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.get_ref().0.tcp()
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        self.get_ref().0.remote_reset()
    }
}

impl<T: Connection, H: ReadHook<T> + Unpin + Send> Connection for Hooked<T, H> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.io.tcp()
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        self.io.remote_reset()
    }

    fn may_half_close(&self) -> bool {
        self.io.may_half_close()
    }
}

/// A transport, or another one over it.
impl<A: Connection, B: Connection> Connection for Either<A, B> {
    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Left(one) => one.tcp(),
            Self::Right(other) => other.tcp(),
        }
    }
}

/// A stream of hyper's.
impl<T: Connection> Connection for TokioIo<TokioIo<T>> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.inner().inner().tcp()
    }
}

impl<T: Connection + ?Sized> Connection for Box<T> {
    fn tcp(&self) -> Option<&TcpStream> {
        (**self).tcp()
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        (**self).remote_reset()
    }

    fn peer_uid(&self) -> Option<u32> {
        (**self).peer_uid()
    }

    fn may_half_close(&self) -> bool {
        (**self).may_half_close()
    }
}

/// A socket, or TLS over one, as a [`ChunkStream`]. It holds a read buffer only while a read is filling it.
#[derive(derive_more::Debug)]
#[debug("Socket({io:?}, {} bytes)", buffered.len())]
pub struct Socket<T> {
    /// The stream. Reading it directly would skip buffered bytes.
    pub io: T,
    pool: BufferPool,
    /// Bytes that were read after a header. They are returned first.
    buffered: Bytes,
    loss: DisconnectDetector,
    /// Whether the sending direction was finished, so that the bytes written are complete.
    finished: bool,
}

/// A socket below TLS, read in pieces of 64 KiB. The TLS library alone would read 4 KiB per system call.
///
/// Bytes that have arrived are stored in a pool buffer, which is returned once a read finds nothing. Writes are not
/// buffered.
pub type Buffered<T> = Hooked<T, TlsInputBuffer>;

/// Bytes read from the socket of a [`Buffered`] that TLS has not taken yet.
#[derive(Debug)]
pub struct TlsInputBuffer {
    pool: BufferPool,
    /// The buffer of the last read, until a read finds nothing.
    buffer: Option<PooledBuffer>,
    /// Positions of the bytes in the buffer that were read and not yet returned.
    unread: Range<usize>,
}

impl<T> Socket<T> {
    /// Wraps a stream.
    pub fn new(io: T, pool: BufferPool) -> Self {
        Self::with_early(io, pool, Bytes::new())
    }

    /// Wraps a stream of which the bytes `buffered` have already been read.
    pub fn with_early(io: T, pool: BufferPool, buffered: Bytes) -> Self {
        Self { io, pool, buffered, loss: DisconnectDetector::default(), finished: false }
    }

    /// Returns true if the sending direction was finished.
    pub fn is_finished(&self) -> bool {
        self.finished
    }
}

impl<T> Buffered<T> {
    /// Wraps a socket.
    pub fn new(io: T, pool: BufferPool) -> Self {
        Self { io, hook: TlsInputBuffer { pool, buffer: None, unread: 0..0 } }
    }
}

impl<T: Connection> ChunkStream for Socket<T> {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        if !self.buffered.is_empty() {
            return Poll::Ready(Ok(std::mem::take(&mut self.buffered)));
        }
        let mut buffer = self.pool.take();
        let room = buffer.get_mut(..CHUNK).unwrap_or_default();
        let mut unfilled = ReadBuf::new(room);
        let read = Pin::new(&mut self.io).poll_read(cx, &mut unfilled);
        self.loss.on_read(&read);
        ready!(read)?;
        let n = unfilled.filled().len();
        Poll::Ready(Ok(buffer.freeze(n)))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(()));
        }
        match ready!(Pin::new(&mut self.io).poll_write(cx, bytes))? {
            0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            n => {
                bytes.advance(n.min(bytes.len()));
                self.loss.on_write();
                Poll::Ready(Ok(()))
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.finished {
            ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            ready!(Pin::new(&mut self.io).poll_shutdown(cx))?;
            self.finished = true;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let Self { io, loss, .. } = self;
        loss.poll(cx, io.tcp(), || io.remote_reset().now_or_never().is_some())
    }

    fn tcp(&self) -> Option<&TcpStream> {
        self.io.tcp()
    }
}

impl<T: AsyncRead + Unpin> ReadHook<T> for TlsInputBuffer {
    fn poll_read(&mut self, io: &mut T, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            // If nothing is there, the buffer is returned to its pool.
            let mut buffer = self.buffer.take().unwrap_or_else(|| self.pool.take());
            let mut unfilled = ReadBuf::new(&mut buffer);
            ready!(Pin::new(io).poll_read(cx, &mut unfilled))?;
            self.unread = 0..unfilled.filled().len();
            self.buffer = Some(buffer).filter(|_| !self.unread.is_empty());
        }
        if let Some(buffer) = &self.buffer {
            let unread = buffer.get(self.unread.clone()).unwrap_or_default();
            let part = unread.get(..out.remaining()).unwrap_or(unread);
            out.put_slice(part);
            self.unread.start += part.len();
        }
        Poll::Ready(Ok(()))
    }
}

/// Maximum number of bytes that a [`Socket`] returns at once.
///
/// A link sends them in one frame. With its headers and those of TLS, it fits into one HTTP/2 frame, and into one
/// segment on loopback. Splitting the frame would nearly double the number of system calls.
pub const CHUNK: usize = 65_200;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use crate::pool::BUFFER;

    use super::*;

    #[tokio::test]
    async fn early_bytes_are_read_before_the_sockets() {
        let (mut far, near) = duplex(64);
        let mut socket = Socket::with_early(near, BufferPool::new(), Bytes::from_static(b"early "));
        far.write_all(b"late").await.unwrap();
        drop(far);
        let mut all = Vec::new();
        loop {
            match poll_fn(|cx| socket.poll_read_chunk(cx)).await.unwrap() {
                end if end.is_empty() => break,
                bytes => all.extend_from_slice(&bytes),
            }
        }
        assert_eq!(all, b"early late");
    }

    #[tokio::test]
    async fn a_socket_with_nothing_to_read_holds_no_buffer() {
        let (far, near) = duplex(64);
        let pool = BufferPool::new();
        let mut socket = Socket::new(near, pool.clone());
        let mut buffered = Buffered::new(far, pool.clone());
        poll_fn(|cx| {
            assert!(socket.poll_read_chunk(cx).is_pending());
            let mut space = [0; 8];
            assert!(Pin::new(&mut buffered).poll_read(cx, &mut ReadBuf::new(&mut space)).is_pending());
            Poll::Ready(())
        })
        .await;
        assert_eq!(pool.idle(), 1, "the one buffer that both used was returned");
        assert!(buffered.hook.buffer.is_none());
    }

    #[tokio::test]
    async fn a_chunk_is_never_longer_than_a_frame_carries() {
        let (mut far, near) = duplex(4 * BUFFER);
        far.write_all(&vec![7; 2 * BUFFER]).await.unwrap();
        let mut socket = Socket::new(near, BufferPool::new());
        let chunk = poll_fn(|cx| socket.poll_read_chunk(cx)).await.unwrap();
        assert_eq!(chunk.len(), CHUNK);
    }

    #[tokio::test]
    async fn finishing_leaves_the_reading_side_open() {
        let (mut far, near) = duplex(64);
        let mut socket = Socket::new(near, BufferPool::new());
        let mut bytes = Bytes::from_static(b"question");
        poll_fn(|cx| socket.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        assert!(bytes.is_empty());
        poll_fn(|cx| socket.poll_finish(cx)).await.unwrap();
        let mut received = String::new();
        far.read_to_string(&mut received).await.unwrap();
        far.write_all(b"answer").await.unwrap();
        assert_eq!(
            (received.as_str(), &poll_fn(|cx| socket.poll_read_chunk(cx)).await.unwrap()[..]),
            ("question", &b"answer"[..])
        );
    }

    #[tokio::test]
    async fn a_socket_that_accepts_no_bytes_is_an_error() {
        let mut socket = Socket::new(
            tokio::io::join(tokio::io::empty(), io::Cursor::new(Box::<[u8]>::default())),
            BufferPool::new(),
        );
        let mut bytes = Bytes::from_static(b"x");
        let failed = poll_fn(|cx| socket.poll_write_chunk(cx, &mut bytes)).await.unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::WriteZero);
    }

    proptest! {
        #[test]
        fn small_reads_through_a_buffer_return_every_byte(
            len in 0..3 * BUFFER, pipe in 1..2 * BUFFER, step in 1..5000usize,
        ) {
            let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let expected = sent.clone();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let got = runtime.block_on(async move {
                let (mut far, near) = duplex(pipe);
                let mut buffered = Buffered::new(near, BufferPool::new());
                let write = async move { far.write_all(&sent).await.unwrap() };
                let read = async move {
                    let (mut got, mut space) = (Vec::new(), vec![0; step]);
                    loop {
                        match buffered.read(&mut space).await.unwrap() {
                            0 => return got,
                            n => got.extend_from_slice(&space[..n]),
                        }
                    }
                };
                tokio::join!(write, read).1
            });
            prop_assert!(got == expected);
        }
    }
}
