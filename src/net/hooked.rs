//! A stream that is read through a hook, while what is written passes straight through.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream, and the hook that its reads go through.
#[derive(Debug)]
pub struct Hooked<T, H> {
    /// The stream.
    pub io: T,
    /// Reads it.
    pub hook: H,
}

/// Reads the inner stream for a reader of the [`Hooked`] one.
pub trait ReadHook<T> {
    /// As [`AsyncRead::poll_read`] of the stream `io`.
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>>;
}

impl<T: AsyncRead + Unpin, H: ReadHook<T> + Unpin> AsyncRead for Hooked<T, H> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { io, hook } = self.get_mut();
        hook.poll_read(Pin::new(io), cx, out)
    }
}

impl<T: AsyncWrite + Unpin, H: Unpin> AsyncWrite for Hooked<T, H> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
