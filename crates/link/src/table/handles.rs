//! The handles by which an owner uses a session: before it is open, while it searches for a path, and as a byte stream.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::link::Link;
use crate::lock::store_waker;
use crate::table::session::{AnyPermit, SharedSession};
use tunnel_net::ChunkStream;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionKey};
use tunnel_proto::names::{Instance, SessionId, Target};
use tunnel_proto::state::{Actions, Phase, SessionState};

/// A session that was requested and is not open yet.
///
/// Dropping it withdraws the request on the current path. It does so on the next path if there is none at that time
/// (see [`SessionTable::next_parked`](crate::table::SessionTable::next_parked)), or if the path is lost before the
/// remote has answered.
#[derive(Debug)]
#[must_use = "dropping a pending open withdraws the request"]
pub struct PendingOpen(Session);

/// The result of a [`PendingOpen`]: the answer of the remote end, or the loss of the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenOutcome {
    /// The target answered; see [`PendingOpen::into_session`].
    Open,
    /// The remote end refused, and no other path would help.
    Refused(SessionError),
    /// The link ended, or the node cannot be reached over it: another link may be tried.
    NoPath,
}

/// A session requested by the remote end and not answered yet. Dropping it refuses the session, so no opener is left
/// waiting.
#[derive(Debug)]
#[must_use = "dropping an offer refuses it"]
pub struct IncomingSession {
    pub(super) session: Session,
    /// The target to dial.
    pub target: Target,
    /// The client at the opener's end, for the log. It is the remote's text: printable, at most 200 bytes.
    pub client: String,
    /// How long the dial may take, so that the opener gets the answer in time.
    pub dial_timeout: Duration,
}

/// The right to search for a path of an opener's session, from
/// [`SessionTable::next_parked`](crate::table::SessionTable::next_parked).
///
/// There is at most one per session, so that two tasks never mistake each other's answers for late ones. Holding it
/// keeps nothing alive but memory. If it is dropped while the session still needs a path, the table hands out another.
#[derive(Debug)]
pub struct PathSearchRight {
    pub(super) shared: Arc<SharedSession>,
    /// Number of earlier consecutive losses of its path without a byte moved in between.
    pub consecutive_losses: u32,
    /// Whether another one may search, because the session needed no path when this one checked.
    pub(super) is_released: bool,
}

impl PendingOpen {
    pub(crate) fn new(shared: Arc<SharedSession>) -> Self {
        Self(Session::new(shared))
    }

    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.0.id()
    }

    /// Sends the request over a link; `process` is the process that has the node, if known. May be repeated with
    /// another link.
    pub fn ask(&self, link: &Arc<Link>, process: Option<Instance>) {
        self.0.shared.ask(link, process, false);
    }

    /// Keeps a permit until the session is over: its owner has left, and everything is delivered.
    pub fn keep(&self, permit: AnyPermit) {
        let shared = &self.0.shared;
        shared.with_state(|inner| (inner.permit.replace(permit), Actions::default()));
    }

    /// Asks the acceptor to keep the session for this long while it has no path. Only for users' programs.
    pub fn ask_resume_timeout(&self, timeout: Duration) {
        self.0.shared.lock().state.resume_timeout = Some(timeout);
    }

    /// Waits for the answer on the link of the last request.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn answer(&self) -> OpenOutcome {
        poll_fn(|cx| {
            watch(&self.0.shared, cx, |end| match end.phase() {
                // The session has been given up, and its acceptor, if there is one, has yet to be notified.
                _ if end.is_orphaned() => {
                    Some(OpenOutcome::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                Phase::Opening if end.path().is_some() => None,
                Phase::Opening => Some(OpenOutcome::NoPath),
                // The answer and the whole session may have arrived before its owner checked: then it was open.
                Phase::Closing | Phase::Closed
                    if end.ended().is_some() && end.recv.is_untouched() && !end.recv.is_ended() =>
                {
                    Some(OpenOutcome::Refused(end.ended().cloned().unwrap_or_else(given_up)))
                }
                _ => Some(OpenOutcome::Open),
            })
        })
        .await
    }

    /// Returns the open session, once [`Self::answer`] has returned [`OpenOutcome::Open`].
    pub fn into_session(self) -> Session {
        self.0
    }
}

impl IncomingSession {
    /// Returns its id, the kind of the opener's listener, and the node of the acceptor.
    pub fn key(&self) -> &SessionKey {
        &self.session.shared.key
    }

    /// Waits until the opener has given up.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn withdrawn(&self) {
        poll_fn(|cx| watch(&self.session.shared, cx, |end| (end.phase() == Phase::Closed).then_some(())))
            .await;
    }

    /// Sends Opened and returns the byte stream.
    pub fn accept(self) -> Session {
        self.session.shared.with_state(|inner| ((), inner.state.accept(Instant::now())));
        self.session
    }

    /// Sends Refused.
    pub fn refuse(self, why: SessionError) {
        self.session.reset(why);
    }
}

impl PathSearchRight {
    /// Returns the session's id, the kind of its listener, and the node of its acceptor.
    pub fn key(&self) -> &SessionKey {
        &self.shared.key
    }

    /// Returns the process of its remote end.
    pub fn instance(&self) -> Option<Instance> {
        self.shared.read(SessionState::instance)
    }

    /// Returns how long the session may be without a path; `usual` if nothing else was granted to it.
    pub fn resume_timeout(&self, usual: Duration) -> Duration {
        self.shared.read(|state| state.resume_timeout(usual))
    }

    /// Returns true if the session still needs a path. Once it returns false, the next loss creates another
    /// [`PathSearchRight`].
    pub fn needs_path(&mut self) -> bool {
        let mut inner = self.shared.lock();
        if !self.is_released && !inner.state.needs_path() {
            inner.is_searched = false;
            self.is_released = true;
        }
        !self.is_released
    }

    /// Sends Resume over a link, or over its interactive link if the session should run there.
    pub fn resume(&self, link: &Arc<Link>) {
        self.shared.ask(&link.link_for(self.key().id), None, true);
    }

    /// Waits until the last [`Self::resume`] is answered or its path is lost.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn answered(&self) {
        poll_fn(|cx| watch(&self.shared, cx, |end| (end.phase() != Phase::Resuming).then_some(()))).await;
    }

    /// Ends the session because no path was found.
    pub fn give_up(self, why: SessionError) {
        self.shared.with_state(|inner| ((), inner.state.give_up(why)));
    }
}

impl Drop for PathSearchRight {
    fn drop(&mut self) {
        if !self.is_released {
            self.shared.with_state(|inner| {
                inner.is_searched = false;
                ((), Actions::default())
            });
        }
    }
}

/// A proxied TCP connection as a byte stream without copies.
///
/// Reading ends with empty bytes once the remote end has finished its direction. It fails with
/// [`io::ErrorKind::ConnectionReset`] once the session is closed and everything received has been read, or with
/// [`io::ErrorKind::OutOfMemory`] if this end has dropped it. While the
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

    /// Returns how long the session may be without a path, if the acceptor has granted anything.
    pub fn resume_timeout(&self) -> Option<Duration> {
        self.0.read(|state| state.resume_timeout)
    }

    /// Returns since when the session has had no path, or the remote of its link has not answered; `None` if its path
    /// works.
    pub fn lost_since(&self) -> Option<Instant> {
        let (lost, link) = {
            let inner = self.0.lock();
            let lost = inner.lost.filter(|_| inner.state.needs_path()).map(|loss| loss.at);
            (lost, inner.link.clone())
        };
        lost.or_else(|| link?.unresponsive_since(Instant::now()))
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

impl ChunkStream for Session {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        let (read, _replaced, plain) = self.shared.with_state(|inner| {
            let rtt = self.shared.path_rtt(inner);
            let mut replaced = None;
            let mut plain = None;
            let read = if let Some(bytes) = inner.state.recv.take(Instant::now(), rtt) {
                plain = inner.link.as_ref().and_then(|link| link.plain.get().cloned());
                Poll::Ready(Ok(bytes))
            } else if inner.state.recv.is_ended() && !inner.state.is_truncated() {
                Poll::Ready(Ok(Bytes::new()))
            } else if let Some(why) = over(&inner.state) {
                Poll::Ready(Err(why))
            } else {
                replaced = store_waker(&mut inner.reader, cx);
                Poll::Pending
            };
            ((read, replaced, plain), Actions::default())
        });
        if let Some(plain) = plain {
            plain.taken.notify_one();
        }
        read
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        // A copy asks for room before each read. Nothing follows from that.
        if bytes.is_empty() && self.shared.read(|end| !end.is_over() && end.send.has_room()) {
            return Poll::Ready(Ok(()));
        }
        let (written, _replaced) = self.shared.with_state(|inner| {
            let mut replaced = None;
            let written = if let Some(why) = over(&inner.state) {
                Poll::Ready(Err(why))
            } else if inner.state.send.has_room() {
                inner.state.send.write(std::mem::take(bytes));
                Poll::Ready(Ok(()))
            } else {
                replaced = store_waker(&mut inner.writer, cx);
                Poll::Pending
            };
            ((written, replaced), Actions::default())
        });
        if written.is_ready()
            && let Some(table) = self.shared.table.upgrade()
            && table.unacked.is_overdrawn()
        {
            table.evict_largest();
        }
        written
    }

    fn poll_finish(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.with_state(|inner| (inner.state.send.finish(), Actions::default()));
        Poll::Ready(Ok(()))
    }

    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut inner = self.shared.lock();
        if let Some(why) = inner.state.ended() {
            return Poll::Ready(io::Error::new(failure(&inner.state), why.clone()));
        }
        let replaced = store_waker(&mut inner.reader, cx);
        drop(inner);
        drop(replaced);
        Poll::Pending
    }
}

/// Returns the kind of a failure: `BrokenPipe` if the remote's stream has arrived up to its clean end, and `OutOfMemory`
/// if what had arrived was dropped to free memory.
fn failure(end: &SessionState) -> io::ErrorKind {
    match end.is_truncated() {
        true => io::ErrorKind::OutOfMemory,
        false if end.recv.is_ended() => io::ErrorKind::BrokenPipe,
        false => io::ErrorKind::ConnectionReset,
    }
}

/// Returns the error of an end that is over, for its owner.
fn over(end: &SessionState) -> Option<io::Error> {
    if !end.is_over() {
        return None;
    }
    let why = end.ended().cloned();
    let why = why.unwrap_or_else(|| SessionError::new(ErrorCode::NoError, "session is over"));
    Some(io::Error::new(failure(end), why))
}

/// Polls `ready`; while it is pending, the task is woken at each change.
fn watch<T>(
    shared: &Arc<SharedSession>,
    cx: &Context<'_>,
    ready: impl FnOnce(&SessionState) -> Option<T>,
) -> Poll<T> {
    let mut inner = shared.lock();
    if let Some(ready) = ready(&inner.state) {
        return Poll::Ready(ready);
    }
    let replaced = store_waker(&mut inner.watcher, cx);
    drop(inner);
    drop(replaced);
    Poll::Pending
}

/// Returns the refusal of a session that its owner dropped without a reason.
fn given_up() -> SessionError {
    SessionError::new(ErrorCode::Cancelled, "given up by its owner")
}
