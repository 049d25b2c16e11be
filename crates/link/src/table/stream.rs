//! An open session as its owner holds it: a byte stream without copies.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::time::Instant;

use crate::table::session::SharedSession;
use crate::table::waits::{given_up, keep};
use tunnel_base::names::SessionId;
use tunnel_net::ByteStream;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::state::{Actions, SessionState};

/// A proxied TCP connection as a byte stream without copies.
///
/// Reading ends with empty bytes once the remote end has finished its direction. It fails with
/// [`io::ErrorKind::ConnectionReset`] once the session is closed and everything received has been read. While the
/// session has no path, reads and writes wait. Finishing the writing side leaves the reading side open.
///
/// Dropping a session that is open in either direction resets it and drops undelivered bytes. A session that is
/// finished in both directions is delivered in the background, and so is one after [`Self::break_off`].
#[derive(Debug)]
pub struct Session {
    pub(super) shared: Arc<SharedSession>,
    /// Whether its owner has given a reason for its end. Then dropping it does nothing.
    left: bool,
}

impl Session {
    pub(crate) fn new(shared: Arc<SharedSession>) -> Self {
        Self { shared, left: false }
    }

    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.shared.key.id
    }

    /// Returns how often it was resumed on another path.
    pub fn resumed(&self) -> u32 {
        self.shared.read(SessionState::resumed)
    }

    /// Returns why it ended, if it did not end cleanly.
    pub fn ended(&self) -> Option<SessionError> {
        self.shared.read(|state| state.ended().cloned())
    }

    /// Returns a monitor of its path.
    pub fn path_monitor(&self) -> SessionMonitor {
        SessionMonitor(self.shared.clone())
    }

    /// Ends the session at once, with the reason. Bytes that were not delivered are dropped, in both directions.
    pub fn reset(mut self, why: SessionError) {
        self.left = true;
        self.shared.reset(why);
    }

    /// Ends the session like an aborted connection: delivers everything written, then the reason. Received bytes are
    /// dropped.
    pub fn break_off(mut self, why: SessionError) {
        self.left = true;
        self.shared.abort(why);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.left {
            self.shared.reset(given_up());
        }
    }
}

/// Reports whether the path of a session works, and why the session ended. It does not keep the session open.
#[derive(Debug, Clone)]
pub struct SessionMonitor(Arc<SharedSession>);

impl SessionMonitor {
    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.0.key.id
    }

    /// Returns since when the session has had no path, or the remote of its link has not answered; `None` if its path
    /// works.
    pub fn lost_since(&self) -> Option<Instant> {
        let (lost, sender) = {
            let inner = self.0.lock();
            let lost = inner.lost.filter(|_| inner.state.needs_path()).map(|loss| loss.at);
            (lost, inner.sender.clone())
        };
        lost.or_else(|| sender?.unresponsive_since(Instant::now()))
    }

    /// Returns true if nothing is sent or received any longer.
    pub fn is_over(&self) -> bool {
        self.0.read(SessionState::is_over)
    }

    /// Returns why the session ended, if it did not end cleanly.
    pub fn ended(&self) -> Option<SessionError> {
        self.0.read(|state| state.ended().cloned())
    }
}

impl ByteStream for Session {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        self.shared.with_state(|inner| {
            let rtt = self.shared.path_rtt(inner);
            let read = if let Some(bytes) = inner.state.recv.take(Instant::now(), rtt) {
                if let Some(sender) = inner.sender.as_ref().filter(|sender| sender.is_plain()) {
                    sender.read.notify_one();
                }
                Poll::Ready(Ok(bytes))
            } else if inner.state.recv.is_ended() && !inner.state.is_truncated() {
                Poll::Ready(Ok(Bytes::new()))
            } else if let Some(why) = over(&inner.state, io::ErrorKind::ConnectionReset) {
                Poll::Ready(Err(why))
            } else {
                keep(&mut inner.reader, cx);
                Poll::Pending
            };
            (read, Actions::default())
        })
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        self.shared.with_state(|inner| {
            let written = if let Some(why) = over(&inner.state, write_failure(&inner.state)) {
                Poll::Ready(Err(why))
            } else if inner.state.send.has_room() {
                inner.state.send.write(std::mem::take(bytes));
                Poll::Ready(Ok(()))
            } else {
                keep(&mut inner.writer, cx);
                Poll::Pending
            };
            (written, Actions::default())
        })
    }

    fn poll_finish(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.with_state(|inner| (inner.state.send.finish(), Actions::default()));
        Poll::Ready(Ok(()))
    }

    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut inner = self.shared.lock();
        if let Some(why) = inner.state.ended() {
            return Poll::Ready(io::Error::new(write_failure(&inner.state), why.clone()));
        }
        keep(&mut inner.reader, cx);
        Poll::Pending
    }
}

/// Returns the kind of a failed write: `BrokenPipe` if the remote's stream has arrived up to its clean end.
fn write_failure(end: &SessionState) -> io::ErrorKind {
    match end.recv.is_ended() && !end.is_truncated() {
        true => io::ErrorKind::BrokenPipe,
        false => io::ErrorKind::ConnectionReset,
    }
}

/// Returns the error of an end that is over, for its owner.
fn over(end: &SessionState, kind: io::ErrorKind) -> Option<io::Error> {
    let why =
        || end.ended().cloned().unwrap_or_else(|| SessionError::new(ErrorCode::NoError, "session is over"));
    end.is_over().then(|| io::Error::new(kind, why()))
}
