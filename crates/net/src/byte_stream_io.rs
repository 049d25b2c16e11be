//! A byte stream with tokio's traits, as a transport for TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::ChunkStream;
use crate::socket::{CHUNK, Connection};

/// Adapts a [`ChunkStream`] to tokio's traits.
///
/// It buffers at most one read chunk that did not fit, and one written chunk that was not accepted yet.
#[derive(Debug)]
pub struct ChunkStreamIo<D> {
    inner: D,
    unread: Bytes,
    unsent: Bytes,
}

impl<D> ChunkStreamIo<D> {
    /// Wraps a stream.
    pub fn new(inner: D) -> Self {
        Self { inner, unread: Bytes::new(), unsent: Bytes::new() }
    }

    /// Returns the inner stream.
    pub fn get_ref(&self) -> &D {
        &self.inner
    }

    /// Returns the inner stream, for a call that reads and writes nothing.
    pub fn get_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Returns the inner stream and the bytes that were read from it and not returned. Drops unsent bytes.
    pub fn into_parts(self) -> (D, Bytes) {
        (self.inner, self.unread)
    }
}

impl<D: ChunkStream> Connection for ChunkStreamIo<D> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.inner.tcp()
    }
}

impl<D: ChunkStream> ChunkStreamIo<D> {
    fn poll_push(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            ready!(self.inner.poll_write_chunk(cx, &mut self.unsent))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<D: ChunkStream> AsyncRead for ChunkStreamIo<D> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.unread.is_empty() {
            this.unread = ready!(this.inner.poll_read_chunk(cx))?;
        }
        let n = this.unread.len().min(out.remaining());
        out.put_slice(this.unread.get(..n).unwrap_or_default());
        this.unread.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<D: ChunkStream> AsyncWrite for ChunkStreamIo<D> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_push(cx))?;
        // The stream's own buffer is in a budget, and this one is not.
        ready!(self.inner.poll_write_chunk(cx, &mut Bytes::new()))?;
        let all: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut taken = BytesMut::with_capacity(all.min(CHUNK));
        for piece in pieces {
            let room = CHUNK - taken.len();
            taken.extend_from_slice(piece.get(..room).unwrap_or(piece));
        }
        let length = taken.len();
        self.unsent = taken.freeze();
        // The rest is buffered here, and thus counts as written.
        match self.poll_push(cx) {
            Poll::Ready(Err(cause)) => Poll::Ready(Err(cause)),
            _ => Poll::Ready(Ok(length)),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_push(cx))?;
        self.inner.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_push(cx))?;
        self.inner.poll_finish(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use crate::pool::BufferPool;
    use crate::socket::Socket;

    use super::*;

    #[tokio::test]
    async fn every_byte_passes_both_ways_through_a_small_stream() {
        let (near, far) = duplex(1000);
        let mut ours = ChunkStreamIo::new(Socket::new(near, BufferPool::new()));
        let (mut read, mut write) = tokio::io::split(far);
        let content: Vec<u8> = (0..300_000_u32).map(|n| n.to_be_bytes()[3]).collect();
        let echo = async {
            tokio::io::copy(&mut read, &mut write).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let talk = async {
            let (mut reads, mut writes) = tokio::io::split(&mut ours);
            let send = async {
                writes.write_all(&content).await.unwrap();
                writes.shutdown().await.unwrap();
            };
            let mut back = Vec::new();
            let (_, ()) = tokio::join!(reads.read_to_end(&mut back), send);
            back
        };
        let ((), back) = tokio::join!(echo, talk);
        assert!(back == content, "{} bytes", back.len());
    }
}
