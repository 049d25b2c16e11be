//! How far a connection is read ahead of its link: HTTP/2's windows hold a fast line's bytes, and would keep as much of
//! a link that is left unread, and many times that in frames of one byte.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::io::ReadBuf;
use tonic::{Code, Status};

use tunnel_base::logging::printable;
use tunnel_net::listen::tune_interactive;
use tunnel_net::socket::{Connection, Hooked, ReadHook};
use tunnel_proto::hello::LinkPurpose;

/// What was read from one connection and not yet taken by its link, shared by both. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadAhead(Arc<Shared>);

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
pub(crate) struct ReadPauseGuard(ReadAhead);

/// An encrypted connection that is read no further ahead of its link than [`MAX_READ_AHEAD`].
pub(crate) type Bounded<IO> = Hooked<IO, ReadAhead>;

impl ReadAhead {
    /// Marks the link as left unread.
    pub(crate) fn stall(&self) -> ReadPauseGuard {
        self.0.stalled.fetch_add(1, SeqCst);
        ReadPauseGuard(self.clone())
    }

    /// Where the link stands, which only its hello has told. The next read of the connection sets its socket for that.
    pub(crate) fn stands_beside(&self, older: LinkPurpose) {
        self.0.interactive.store(older == LinkPurpose::Interactive, SeqCst);
    }

    /// The next bytes for the link, see [`next_piece`]. Cancel safe.
    pub(crate) async fn next_piece(&self, incoming: Pin<&mut Incoming>) -> Result<Bytes, StreamEnd> {
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
        if before.saturating_sub(len + FRAME_HEAD) <= MAX_READ_AHEAD / 2 {
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
        let has_room = || self.0.unread.load(SeqCst) < MAX_READ_AHEAD;
        if has_room() {
            return Poll::Ready(());
        }
        self.0.connection.register(cx.waker());
        self.0.link.wake();
        if has_room() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for ReadPauseGuard {
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
const MAX_READ_AHEAD: usize = 1 << 20;
/// The head of an HTTP/2 frame.
const FRAME_HEAD: usize = 9;

// The incoming bytes of a call, and its end.

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnd {
    /// The far end closed it, or the connection broke: the cause for people.
    Closed(String),
    /// The far end closed it because another process has this one's name.
    NameTaken(String),
}

/// The next bytes, or how the stream ended. Cancel safe.
pub(crate) async fn next_piece(mut incoming: Pin<&mut Incoming>) -> Result<Bytes, StreamEnd> {
    match poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
        None => Err(StreamEnd::Closed(END.into())),
        Some(Err(e)) => Err(StreamEnd::Closed(cause(&e))),
        Some(Ok(frame)) => frame.into_data().map_err(|frame| {
            let status = frame.trailers_ref().and_then(Status::from_header_map);
            match status {
                Some(status) if status.code() == Code::AlreadyExists => {
                    StreamEnd::NameTaken(printable(status.message()))
                }
                Some(status) if status.code() != Code::Ok => StreamEnd::Closed(printable(status.message())),
                _ => StreamEnd::Closed(END.into()),
            }
        }),
    }
}

/// An error with all its causes, for people. It may hold text of a peer.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        // The end of a process or of a line: the libraries' text is only about TLS.
        if source.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return CONNECTION_ABORTED.into();
        }
        text = format!("{text}: {source}");
        at = source.source();
    }
    // h2 gives the socket's error as text only, not as a source.
    if text.contains(NO_CLOSE_NOTIFY) { CONNECTION_ABORTED.into() } else { printable(&text) }
}

/// The text for the end of a process or of a line.
const CONNECTION_ABORTED: &str = "the connection was broken off";
/// The beginning of rustls' text for it, which goes on with a URL.
const NO_CLOSE_NOTIFY: &str = "without sending TLS close_notify";
const END: &str = "end of stream";

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncRead as _, AsyncReadExt as _};

    use super::*;

    type Endless = tokio::io::Join<tokio::io::Repeat, tokio::io::Sink>;

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
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
        assert_eq!(reads(&mut bounded).await, 0);
        ahead.took(16 * 1024 - FRAME_HEAD);
        assert_eq!(reads(&mut bounded).await, 16 * 1024);
        catches_up(&ahead);
        assert_eq!(reads(&mut bounded).await, MAX_READ_AHEAD);
    }

    #[tokio::test]
    async fn while_a_link_is_left_unread_another_that_has_taken_all_frees_nothing() {
        let ahead = ReadAhead::default();
        let mut bounded = Bounded { io: endless(), hook: ahead.clone() };
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
        let ahead = ReadAhead::default();
        let mut bounded = Bounded { io: endless(), hook: ahead.clone() };
        let (link, connection) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        ahead.caught_up(&Context::from_waker(&link.clone().into()));
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

#[cfg(test)]
mod inbound_tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("reading failed")]
    struct Reading(#[source] io::Error);

    #[test]
    fn a_connection_that_broke_off_is_said_in_plain_words_and_all_else_with_its_causes() {
        let broken = io::Error::new(io::ErrorKind::UnexpectedEof, "no close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(broken)), "the connection was broken off");
        let hidden = io::Error::other("closed without sending TLS close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(hidden)), "the connection was broken off");
        assert_eq!(cause(&Reading(io::Error::other("a disk"))), "reading failed: a disk");
    }
}
