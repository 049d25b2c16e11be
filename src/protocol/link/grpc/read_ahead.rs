//! How far a connection is read ahead of its link: HTTP/2's windows hold a fast line's bytes, and would keep as much of
//! a link that is left unread, and many times that in frames of one byte.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use hyper::body::Incoming;
use tokio::io::ReadBuf;

use crate::net::hooked::{Hooked, ReadHook};
use crate::net::listen::tune_interactive;
use crate::net::socket::Connection;
use crate::protocol::wire::codec::inbound::{StreamEnded, next_piece};
use crate::protocol::wire::hello::Older;

/// What was read from one connection and not yet taken by its link, shared by both. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(in crate::protocol) struct ReadAhead(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Bytes below HTTP/2, its frames' heads included.
    unread: AtomicUsize,
    /// How many links of the connection are left unread: then what waits is theirs, even if another has taken all of
    /// its own.
    stalled: AtomicUsize,
    /// The link is an interactive one, and its socket not yet set for that.
    interactive: AtomicBool,
    connection: AtomicWaker,
    link: AtomicWaker,
}

/// While it lives, a link is left unread.
#[derive(Debug)]
pub(in crate::protocol::link) struct Stalled(ReadAhead);

/// An encrypted connection that is read no further ahead of its link than [`MOST_AHEAD`].
pub(super) type Bounded<IO> = Hooked<IO, ReadAhead>;

impl ReadAhead {
    /// Marks the link as left unread.
    pub(in crate::protocol::link) fn stall(&self) -> Stalled {
        self.0.stalled.fetch_add(1, SeqCst);
        Stalled(self.clone())
    }

    /// Where the link stands, which only its hello has told. The next read of the connection sets its socket for that.
    pub(super) fn stands_beside(&self, older: Older) {
        self.0.interactive.store(older == Older::Busy, SeqCst);
    }

    /// The next bytes for the link, see [`next_piece`]. Cancel safe.
    pub(in crate::protocol::link) async fn next_piece(
        &self,
        incoming: Pin<&mut Incoming>,
    ) -> Result<Bytes, StreamEnded> {
        let mut next = pin!(next_piece(incoming));
        poll_fn(|cx| {
            let piece = next.as_mut().poll(cx);
            match &piece {
                Poll::Ready(Ok(bytes)) => self.took(bytes.len()),
                Poll::Ready(Err(_)) => {}
                Poll::Pending => self.caught_up(cx),
            }
            piece
        })
        .await
    }

    /// The link has taken the data of one frame.
    fn took(&self, len: usize) {
        let less = |unread: usize| Some(unread.saturating_sub(len + FRAME_HEAD));
        let before = self.0.unread.fetch_update(SeqCst, SeqCst, less).unwrap_or_default();
        // Not for each frame, or both would run by turns.
        if before.saturating_sub(len + FRAME_HEAD) <= MOST_AHEAD / 2 {
            self.0.connection.wake();
        }
    }

    /// The link has taken all its data: the rest of what was read was HTTP/2's own. The link is woken to call this
    /// again if the connection reaches its bound.
    fn caught_up(&self, cx: &Context<'_>) {
        self.0.link.register(cx.waker());
        if self.0.stalled.load(SeqCst) == 0 {
            self.0.unread.store(0, SeqCst);
            self.0.connection.wake();
        }
    }

    fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        let has_room = || self.0.unread.load(SeqCst) < MOST_AHEAD;
        if has_room() {
            return Poll::Ready(());
        }
        self.0.connection.register(cx.waker());
        self.0.link.wake();
        if has_room() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        self.0.0.stalled.fetch_sub(1, SeqCst);
    }
}

impl<T: Connection> ReadHook<T> for ReadAhead {
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.interactive.load(SeqCst) {
            self.0.interactive.store(false, SeqCst);
            if let Some(tcp) = io.tcp() {
                tune_interactive(tcp);
            }
        }
        ready!(self.poll_room(cx));
        let before = out.filled().len();
        let read = io.poll_read(cx, out);
        self.0.unread.fetch_add(out.filled().len().saturating_sub(before), SeqCst);
        read
    }
}

/// Bytes that a connection may be read ahead of its link; the last read may go beyond it. Twice this keeps a link that
/// takes as fast as it can busy between two turns of the connection.
const MOST_AHEAD: usize = 1 << 20;
/// The head of an HTTP/2 frame.
const FRAME_HEAD: usize = 9;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncRead as _, AsyncReadExt as _};
    use tokio::net::TcpStream;

    use super::*;

    type Endless = tokio::io::Join<tokio::io::Repeat, tokio::io::Sink>;

    impl Connection for Endless {
        fn tcp(&self) -> Option<&TcpStream> {
            None
        }
    }

    fn endless() -> Endless {
        tokio::io::join(tokio::io::repeat(0), tokio::io::sink())
    }

    /// How much is read of an endless stream that never waits, before the bound does.
    async fn reads(bounded: &mut Bounded<Endless>) -> usize {
        let (mut all, mut buf) = (0, [0; 8192]);
        while let Some(read) = tokio::task::unconstrained(bounded.read(&mut buf)).now_or_never() {
            all += read.unwrap();
        }
        all
    }

    fn catches_up(ahead: &ReadAhead) {
        ahead.caught_up(&Context::from_waker(std::task::Waker::noop()));
    }

    #[tokio::test]
    async fn a_connection_is_read_a_bound_ahead_and_goes_on_as_its_link_takes() {
        let ahead = ReadAhead::default();
        let mut bounded = Bounded { io: endless(), hook: ahead.clone() };
        assert_eq!(reads(&mut bounded).await, MOST_AHEAD);
        assert_eq!(reads(&mut bounded).await, 0);
        ahead.took(16 * 1024 - FRAME_HEAD);
        assert_eq!(reads(&mut bounded).await, 16 * 1024);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, MOST_AHEAD);
    }

    #[tokio::test]
    async fn while_a_link_is_left_unread_another_that_has_taken_all_frees_nothing() {
        let ahead = ReadAhead::default();
        let mut bounded = Bounded { io: endless(), hook: ahead.clone() };
        let stalled = ahead.stall();
        assert_eq!(reads(&mut bounded).await, MOST_AHEAD);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, 0);
        drop(stalled);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, MOST_AHEAD);
    }

    #[tokio::test]
    async fn a_connection_at_its_bound_wakes_its_link_and_is_woken_by_it() {
        let ahead = ReadAhead::default();
        let mut bounded = Bounded { io: endless(), hook: ahead.clone() };
        let (link, connection) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        ahead.caught_up(&Context::from_waker(&link.clone().into()));
        assert_eq!(reads(&mut bounded).await, MOST_AHEAD);
        assert_eq!(link.0.load(SeqCst), 1);
        let mut buf = [0; 1];
        let waker = connection.clone().into();
        let polled =
            Pin::new(&mut bounded).poll_read(&mut Context::from_waker(&waker), &mut ReadBuf::new(&mut buf));
        assert!(polled.is_pending());
        ahead.took(MOST_AHEAD / 4);
        assert_eq!(connection.0.load(SeqCst), 0);
        ahead.took(MOST_AHEAD / 4);
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
