//! A byte stream as tokio's traits have it, for TLS to sit on.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::ByteStream;
use super::socket::CHUNK;

/// Wraps a [`ByteStream`]. It holds what was read and does not fit, and what was written and has no room yet: at most one
/// piece of each.
#[derive(Debug)]
pub struct UnderTls<D> {
    inner: D,
    unread: Bytes,
    unsent: Bytes,
}

impl<D> UnderTls<D> {
    /// Wraps a stream.
    pub fn new(inner: D) -> Self {
        Self { inner, unread: Bytes::new(), unsent: Bytes::new() }
    }

    /// The stream inside.
    pub fn get_ref(&self) -> &D {
        &self.inner
    }

    /// The stream itself, without what it was not given yet.
    pub fn into_inner(self) -> D {
        self.inner
    }
}

impl<D: ByteStream> UnderTls<D> {
    fn poll_push(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            ready!(self.inner.poll_write_chunk(cx, &mut self.unsent))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<D: ByteStream> AsyncRead for UnderTls<D> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            self.unread = ready!(self.inner.poll_read_chunk(cx))?;
        }
        let n = self.unread.len().min(out.remaining());
        out.put_slice(self.unread.get(..n).unwrap_or_default());
        self.unread.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<D: ByteStream> AsyncWrite for UnderTls<D> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_push(cx))?;
        let taken = bytes.get(..CHUNK).unwrap_or(bytes);
        self.unsent = Bytes::copy_from_slice(taken);
        // What has no room waits here: it is taken.
        match self.poll_push(cx) {
            Poll::Ready(Err(cause)) => Poll::Ready(Err(cause)),
            _ => Poll::Ready(Ok(taken.len())),
        }
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
    use super::*;
    use crate::net::pool::Pool;
    use crate::net::socket::Socket;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    #[tokio::test]
    async fn every_byte_passes_both_ways_through_a_stream_with_little_room() {
        let (near, far) = duplex(1000);
        let mut ours = UnderTls::new(Socket::new(near, Pool::new()));
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
