//! A stream that is read through a hook. Writes are passed on unchanged, and the hook is polled after a failed one.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream, and the hook for its reads.
#[derive(Debug)]
pub struct Hooked<T, H> {
    /// The stream.
    pub io: T,
    /// The hook.
    pub hook: H,
}

/// Reads the inner stream for the reader of a [`Hooked`] stream.
pub trait ReadHook<T> {
    /// Like [`AsyncRead::poll_read`] of the stream `io`.
    fn poll_read(&mut self, io: &mut T, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>>;

    /// Polled after a failed write of the stream `io`. Pending delays the report of the failure.
    fn poll_write_failed(&mut self, _io: &mut T, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }
}

impl<T: Unpin, H: ReadHook<T>> Hooked<T, H> {
    fn written<R>(&mut self, written: Poll<io::Result<R>>, cx: &mut Context<'_>) -> Poll<io::Result<R>> {
        if let Poll::Ready(Err(_)) = written {
            ready!(self.hook.poll_write_failed(&mut self.io, cx));
        }
        written
    }
}

impl<T: AsyncRead + Unpin, H: ReadHook<T> + Unpin> AsyncRead for Hooked<T, H> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { io, hook } = self.get_mut();
        hook.poll_read(io, cx, out)
    }
}

impl<T: AsyncWrite + Unpin, H: ReadHook<T> + Unpin> AsyncWrite for Hooked<T, H> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.written(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bytes);
        self.written(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.written(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
