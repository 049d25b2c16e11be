//! Bounds how far a connection is read ahead of its link.
//!
//! HTTP/2's windows are large enough for a fast line. Without a bound they would buffer as many bytes for a link that
//! is left unread, and many times that in frames of one byte.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::io::ReadBuf;

use crate::grpc::link_end::{LinkEnd, cause};
use tunnel_net::hooked::{Hooked, ReadHook};
use tunnel_net::listen::tune_interactive;
use tunnel_net::socket::Connection;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::hello::LinkPurpose;

/// Bytes read from one connection and not yet taken by its link; shared by both. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadAheadBound(Arc<Shared>);

/// The state that a connection and its link share through clones of [`ReadAheadBound`].
#[derive(Debug, Default)]
struct Shared {
    /// Bytes below HTTP/2, including its frame headers.
    unread: AtomicUsize,
    /// Number of links of the connection that are left unread. If there are any, the unread bytes may be theirs, even
    /// if another link has taken all its own.
    stalled: AtomicUsize,
    /// Whether no call of the connection has been accepted yet.
    unproven: AtomicBool,
    /// Whether the link is an interactive one and its socket is not configured for that yet.
    interactive: AtomicBool,
    /// Whether any byte was read from the connection.
    has_received: AtomicBool,
    /// The alert by which the remote rejected this end's certificate. In TLS 1.3 it follows the caller's handshake.
    rejection: OnceLock<TlsHandshakeError>,
    connection: AtomicWaker,
    link: AtomicWaker,
}

/// Marks a link as left unread until dropped.
#[derive(Debug)]
pub(crate) struct ReadPauseGuard(ReadAheadBound);

/// An encrypted connection that is read at most [`MAX_READ_AHEAD`] bytes ahead of its link.
pub(crate) type BoundedReadStream<IO> = Hooked<IO, ReadAheadBound>;

impl ReadAheadBound {
    /// Returns the bound of a connection that has proven nothing: it is closed if it sends more than [`MAX_UNPROVEN`].
    pub(crate) fn unproven() -> Self {
        let bound = Self::default();
        bound.0.unproven.store(true, SeqCst);
        bound
    }

    /// Records that a call of the connection has been accepted.
    pub(crate) fn on_accepted(&self) {
        self.0.unproven.store(false, SeqCst);
    }

    /// Marks the link as left unread.
    pub(crate) fn stall(&self) -> ReadPauseGuard {
        self.0.stalled.fetch_add(1, SeqCst);
        ReadPauseGuard(self.clone())
    }

    /// Records the link's purpose, known from its hello. The connection's next read configures the socket for it.
    pub(crate) fn set_purpose(&self, purpose: LinkPurpose) {
        self.0.interactive.store(purpose == LinkPurpose::Interactive, SeqCst);
    }

    /// Returns the alert by which the remote rejected this end's certificate, if it has.
    pub(crate) fn rejection(&self) -> Option<&TlsHandshakeError> {
        self.0.rejection.get()
    }

    /// Returns the next bytes for the link, or how the stream ended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn next_piece(&self, mut incoming: Pin<&mut Incoming>) -> Result<Bytes, LinkEnd> {
        let next = poll_fn(|cx| {
            let next = incoming.as_mut().poll_frame(cx);
            if next.is_pending() {
                self.on_all_taken(cx);
            }
            next
        });
        let piece = match next.await {
            Some(Ok(frame)) => {
                frame.into_data().map_err(|frame| LinkEnd::of_trailers(frame.trailers_ref()))?
            }
            Some(Err(e)) => return Err(LinkEnd::Closed(cause(&e))),
            None => return Err(LinkEnd::of_stream()),
        };
        self.took(piece.len());
        Ok(piece)
    }

    /// Records that the link has taken the data of one frame.
    fn took(&self, len: usize) {
        let less = |unread: usize| Some(unread.saturating_sub(len + FRAME_HEAD));
        let before = self.0.unread.fetch_update(SeqCst, SeqCst, less).unwrap_or_default();
        // Not for each frame; otherwise link and connection would run in turns.
        if before.saturating_sub(len + FRAME_HEAD) <= MAX_READ_AHEAD / 2 {
            self.0.connection.wake();
        }
    }

    /// Records that the link has taken all its data, so the remaining unread bytes were HTTP/2's own.
    ///
    /// Registers the link to be woken, to call this again, when the connection reaches its bound.
    fn on_all_taken(&self, cx: &Context<'_>) {
        self.0.link.register(cx.waker());
        if self.0.stalled.load(SeqCst) == 0 {
            self.0.unread.store(0, SeqCst);
            self.0.connection.wake();
        }
    }

    fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        if self.has_room() {
            return Poll::Ready(());
        }
        self.0.connection.register(cx.waker());
        self.0.link.wake();
        if self.has_room() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn has_room(&self) -> bool {
        self.0.unread.load(SeqCst) < MAX_READ_AHEAD
    }
}

impl Drop for ReadPauseGuard {
    fn drop(&mut self) {
        self.0.0.stalled.fetch_sub(1, SeqCst);
    }
}

impl<T: Connection> ReadHook<T> for ReadAheadBound {
    fn poll_read(&mut self, io: &mut T, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.0.interactive.load(SeqCst) {
            self.0.interactive.store(false, SeqCst);
            if let Some(tcp) = io.tcp() {
                tune_interactive(tcp);
            }
        }
        if self.0.unread.load(SeqCst) > MAX_UNPROVEN && self.0.unproven.load(SeqCst) {
            return Poll::Ready(Err(io::Error::other("too many bytes before an accepted call")));
        }
        ready!(self.poll_room(cx));
        let before = out.filled().len();
        let read = Pin::new(io).poll_read(cx, out);
        let received = out.filled().len().saturating_sub(before);
        self.0.unread.fetch_add(received, SeqCst);
        // Stored once only: this runs for each read.
        if received > 0 && !self.0.has_received.load(SeqCst) {
            self.0.has_received.store(true, SeqCst);
        }
        if let Poll::Ready(Err(error)) = &read
            && let alert @ TlsHandshakeError::AlertReceived(_) = TlsHandshakeError::of(error)
        {
            let _ = self.0.rejection.set(alert);
        }
        read
    }

    /// Reads the alert of a remote that rejects this end's certificate: it is the first that such a remote sends, and
    /// HTTP/2 reads nothing after a failed write.
    fn poll_write_failed(&mut self, io: &mut T, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.has_received.load(SeqCst) {
            return Poll::Ready(());
        }
        self.poll_read(io, cx, &mut ReadBuf::new(&mut [0; 1024])).map(drop)
    }
}

/// Maximum number of bytes by which a connection is read ahead of its link; the last read may exceed it. Twice this
/// keeps a link that reads at full speed busy between two polls of the connection.
const MAX_READ_AHEAD: usize = 1 << 20;
/// Maximum number of bytes of a connection without an accepted call; the last read may exceed it. The longest metadata
/// of a call fits, or several calls of usual length.
const MAX_UNPROVEN: usize = 32 * 1024;
/// Size of an HTTP/2 frame header in bytes.
const FRAME_HEAD: usize = 9;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncRead as _, AsyncReadExt as _};

    use super::*;

    type Endless = tokio::io::Join<tokio::io::Repeat, tokio::io::Sink>;

    fn endless() -> Endless {
        tokio::io::join(tokio::io::repeat(0), tokio::io::sink())
    }

    /// Returns how many bytes are read from an endless stream before the bound applies.
    async fn reads(bounded: &mut BoundedReadStream<Endless>) -> usize {
        let (mut all, mut buf) = (0, [0; 8192]);
        while let Some(read) = tokio::task::unconstrained(bounded.read(&mut buf)).now_or_never() {
            all += read.unwrap();
        }
        all
    }

    fn catches_up(ahead: &ReadAheadBound) {
        ahead.on_all_taken(&Context::from_waker(std::task::Waker::noop()));
    }

    #[tokio::test]
    async fn a_connection_is_read_a_bound_ahead_and_goes_on_as_its_link_takes() {
        let ahead = ReadAheadBound::default();
        let mut bounded = BoundedReadStream { io: endless(), hook: ahead.clone() };
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
        assert_eq!(reads(&mut bounded).await, 0);
        ahead.took(16 * 1024 - FRAME_HEAD);
        assert_eq!(reads(&mut bounded).await, 16 * 1024);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
    }

    #[tokio::test]
    async fn while_a_link_is_left_unread_another_that_has_taken_all_frees_nothing() {
        let ahead = ReadAheadBound::default();
        let mut bounded = BoundedReadStream { io: endless(), hook: ahead.clone() };
        let stalled = ahead.stall();
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, 0);
        drop(stalled);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
    }

    #[tokio::test]
    async fn a_connection_at_its_bound_wakes_its_link_and_is_woken_by_it() {
        let ahead = ReadAheadBound::default();
        let mut bounded = BoundedReadStream { io: endless(), hook: ahead.clone() };
        let (link, connection) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        ahead.on_all_taken(&Context::from_waker(&link.clone().into()));
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
        assert_eq!(link.0.load(SeqCst), 1);
        let mut buf = [0; 1];
        let waker = connection.clone().into();
        let polled =
            Pin::new(&mut bounded).poll_read(&mut Context::from_waker(&waker), &mut ReadBuf::new(&mut buf));
        assert!(polled.is_pending());
        ahead.took(MAX_READ_AHEAD / 4);
        assert_eq!(connection.0.load(SeqCst), 0);
        ahead.took(MAX_READ_AHEAD / 4);
        assert_eq!(connection.0.load(SeqCst), 1);
    }

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
}
