//! The open session as its owner sees it: a byte stream without copies.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::time::Instant;

use crate::names::SessionId;
use crate::net::ByteStream;
use crate::protocol::session::owned::{ResetOnDrop, keep};
use crate::protocol::session::state::{Effects, Phase, SessionState};
use crate::protocol::wire::frame::{Code, Refusal};

/// One proxied TCP conversation, seen as a byte stream without copies.
///
/// Reading ends with empty bytes once the peer has finished its direction, and with
/// [`io::ErrorKind::ConnectionReset`] once the session is gone and all that arrived has been read. While the session
/// has no path, reads and writes wait. Finishing the writing side leaves the reading side open. Dropping a session that
/// is open in either direction resets it and forgets what was not delivered; one that is ended in both is delivered in
/// the background, and so is one that [breaks off](Self::break_off).
#[derive(Debug)]
pub struct Session(pub(super) ResetOnDrop);

/// Bytes and end of a session, for the access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Bytes its owner wrote.
    pub sent: u64,
    /// Bytes its owner read.
    pub received: u64,
    /// How often it was resumed on another path.
    pub resumed: u32,
    /// Why it ended, if it did not end in good order.
    pub ended: Option<Refusal>,
}

impl Session {
    /// The session's id.
    pub fn id(&self) -> SessionId {
        self.0.id()
    }

    /// Its account so far.
    pub fn account(&self) -> Account {
        let mut account = Account { sent: 0, received: 0, resumed: 0, ended: None };
        self.0.with(|shared| {
            let inner = shared.lock();
            account = Account {
                sent: inner.state.send.written(),
                received: inner.state.recv.taken(),
                resumed: inner.state.resumed(),
                ended: inner.state.ended().cloned(),
            };
        });
        account
    }

    /// Ends it like a connection that broke off: delivers what was written, then sends the reason. Bytes from the far
    /// end are dropped.
    pub fn break_off(mut self, why: Refusal) {
        if let Some(shared) = self.0.shared.take() {
            shared.break_off(why);
        }
    }
}

impl ByteStream for Session {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        let Some(shared) = &self.0.shared else { return Poll::Ready(Ok(Bytes::new())) };
        let mut inner = shared.lock();
        let way = shared.way(&inner);
        if let Some(bytes) = inner.state.recv.take(Instant::now(), way) {
            if let Some(sender) = inner.sender.as_ref().filter(|o| !o.resumes) {
                sender.read.notify_one();
            }
            shared.settle(inner, Effects::default());
            return Poll::Ready(Ok(bytes));
        }
        if inner.state.recv.is_ended() && !inner.state.is_cut() {
            return Poll::Ready(Ok(Bytes::new()));
        }
        if let Some(why) = over(&inner.state, io::ErrorKind::ConnectionReset) {
            return Poll::Ready(Err(why));
        }
        keep(&mut inner.reader, cx);
        Poll::Pending
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        let Some(shared) = &self.0.shared else { return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())) };
        let mut inner = shared.lock();
        if let Some(why) = over(&inner.state, io::ErrorKind::BrokenPipe) {
            return Poll::Ready(Err(why));
        }
        if !inner.state.send.has_room() {
            keep(&mut inner.writer, cx);
            return Poll::Pending;
        }
        inner.state.send.write(std::mem::take(bytes));
        shared.settle(inner, Effects::default());
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.with(|shared| {
            shared.act(|inner| {
                inner.state.send.finish();
                Effects::default()
            });
        });
        Poll::Ready(Ok(()))
    }

    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(shared) = &self.0.shared else { return Poll::Ready(()) };
        let mut inner = shared.lock();
        if inner.state.ended().is_some() {
            return Poll::Ready(());
        }
        keep(&mut inner.reader, cx);
        Poll::Pending
    }
}

/// The error of an end that is over, for its owner.
fn over(end: &SessionState, kind: io::ErrorKind) -> Option<io::Error> {
    let over = matches!(end.phase(), Phase::Leaving | Phase::Gone) || end.ended().is_some();
    over.then(|| {
        io::Error::new(
            kind,
            end.ended().cloned().unwrap_or_else(|| Refusal::new(Code::Over, "session is over")),
        )
    })
}
