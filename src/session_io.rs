//! Carrying an open session: copying its bytes until both ends are done, the verdict, the access line, the numbers.
//!
//! Every front end, the back end and the bridge to plain nodes end here.

pub mod copy;

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tracing::debug;

use crate::session_io::copy::close;
use crate::session_io::copy::{ByteCounter, CopyEnd, Counted, EndKind, Side, copy_bidirectional};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::metrics::{ActiveSession, Metrics};
use tunnel_base::names::SessionId;
use tunnel_link::session::stream::Session;
use tunnel_net::ByteStream;
use tunnel_net::pool::Pool;
use tunnel_net::socket::{ByteStreamIo, Connection, Socket};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// A session that was opened, with all that counts it.
#[derive(Debug)]
pub struct OpenSession<P> {
    /// This end of it, or the connection that stands for one.
    pub session: TargetStream,
    /// What was taken from it and counted already, and not given to who is at this end yet.
    pub buffered: Bytes,
    /// Its line in the access log.
    pub access: AccessLogEntry,
    /// Counts it among those that run.
    pub alive: ActiveSession,
    /// Its slot among the sessions of this process; freed when it ends, before its connection is closed with care.
    pub permit: P,
}

impl<P> OpenSession<P> {
    /// Writes the access line of a session that ended so, counts it, and frees its slot. Side A is the connection of
    /// `local`: if that broke off, the session is reset with the cause; otherwise it is given back, to be let go of.
    pub(crate) fn end(self, ended: CopyEnd, local: LocalPeer) -> Option<TargetStream> {
        let (result, why) = match (&self.session, ended) {
            (
                TargetStream::Direct(_),
                CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) },
            ) => (local.other().failed(), local.other().failure() + &kind.to_string()),
            (session, _) => end_reason(ended, local, session.ended().as_ref()),
        };
        let session = self.record_end(result, &why);
        if ended.by == Side::A && ended.how != EndKind::Finished {
            session.break_off(SessionError::new(ErrorCode::Cancelled, why));
            return None;
        }
        if ended.how == EndKind::Finished {
            session.is_over();
        }
        Some(session)
    }

    /// As [`Self::end`], of a session that this end breaks off for a reason of its own: a fixed word, and a sentence.
    pub(crate) fn break_off(self, result: &'static str, why: &str) {
        self.record_end(result, why).break_off(SessionError::new(ErrorCode::Cancelled, why));
    }

    fn record_end(self, result: &'static str, why: &str) -> TargetStream {
        let Self { session, mut access, alive, .. } = self;
        access.resumed = session.resumed();
        access.end(result, why);
        alive.end(result);
        session
    }
}

/// Who is at this end of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalPeer {
    /// A client: this is a front end.
    Client,
    /// What was dialled for it: this is the back end.
    Target,
}

impl LocalPeer {
    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Target => "target",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Client => Self::Target,
            Self::Target => Self::Client,
        }
    }

    /// The fixed word for a session that this one broke off.
    fn failed(self) -> &'static str {
        match self {
            Self::Client => "client_failed",
            Self::Target => "target_failed",
        }
    }

    /// How the sentence begins that both ends log once the connection of this one has failed; a cause follows.
    fn failure(self) -> String {
        format!("the {}'s connection failed: ", self.name())
    }

    /// The fixed word for a session that the far end reset. Its code for a connection that failed there is the one for
    /// any end that its owner wants; the sentence has the difference, so that both ends use one label for it.
    fn reset_by_other(self, why: &SessionError) -> &'static str {
        let other = self.other();
        let failed = why.code == ErrorCode::Cancelled && why.reason.starts_with(&other.failure());
        if failed { other.failed() } else { why.code.name() }
    }
}

/// Carries a session's bytes until both ends are done, writes the access line, and closes the connection.
///
/// Not cancel safe: a dropped call breaks the connection off and resets the session, and its access line shows that.
pub async fn run_session<C: Connection, P>(
    mut opened: OpenSession<P>,
    local: LocalPeer,
    mut socket: Socket<C>,
    metrics: &Metrics,
) {
    let OpenSession { session, buffered, access, .. } = &mut opened;
    let up = ByteCounter { one: &mut access.up, all: &metrics.bytes_up };
    let down = ByteCounter { one: &mut access.down, all: &metrics.bytes_down };
    let (taken, given) = match local {
        LocalPeer::Client => (down, up),
        LocalPeer::Target => (up, down),
    };
    let mut counted = Counted { stream: session, buffered: std::mem::take(buffered), taken, given };
    socket.io().breaks_off(true);
    let ended = copy_bidirectional(&mut socket, &mut counted).await.ended;
    drop(opened.end(ended, local));
    close(&mut socket, Side::A, ended).await;
}

/// Carries bytes between two sessions until both are done: this process is an end of each. If one is broken off, the
/// far end of the other one gets the cause.
pub async fn bridge_sessions(mut one: Session, mut other: Session, alive: ActiveSession) {
    let ended = copy_bidirectional(&mut one, &mut other).await.ended;
    if ended.how == EndKind::Finished {
        return alive.end("over");
    }
    let (broken, left) = if ended.by == Side::A { (one, other) } else { (other, one) };
    let why = broken
        .account()
        .ended
        .unwrap_or_else(|| SessionError::new(ErrorCode::Cancelled, "the session broke"));
    debug!(%why, "a session with a plain node is over");
    alive.end(why.code.name());
    left.break_off(why);
}

/// Who ended a session and why, as a word and a sentence. Side A is the connection of who is `local`.
fn end_reason(ended: CopyEnd, local: LocalPeer, reset: Option<&SessionError>) -> (&'static str, String) {
    match (ended.by, ended.how) {
        (Side::A, EndKind::Finished) => ("over", format!("the {} finished first", local.name())),
        (Side::B, EndKind::Finished) => ("over", format!("the {} finished first", local.other().name())),
        (Side::A, EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind)) => {
            (local.failed(), local.failure() + &kind.to_string())
        }
        (Side::B, EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind)) => match reset {
            Some(refusal) => (local.reset_by_other(refusal), refusal.reason.clone()),
            None => ("session_failed", format!("the session failed: {kind}")),
        },
    }
}

// What was opened for a client: a session, or a connection of this process's own; and TLS over either.

/// The far end of what was opened for a client. Dropping it breaks it off, unless it is over in both directions.
#[derive(Debug)]
pub enum TargetStream {
    /// A session.
    Session(Session),
    /// A connection that this process has dialled itself.
    Direct(Socket<TcpStream>),
    /// One of the two, under TLS that this process speaks with the target.
    Tls(Box<TlsOverTarget>),
}

/// TLS over a far end.
type TlsOverTarget = Socket<TlsStream<ByteStreamIo<TargetStream>>>;

impl TargetStream {
    /// A connection of this process's own, which breaks off when it is dropped.
    pub fn direct(connection: TcpStream, pool: Pool) -> Self {
        connection.breaks_off(true);
        Self::Direct(Socket::new(connection, pool))
    }

    /// Shakes hands with the target that is to have this name. Not cancel safe: a dropped call breaks it off.
    ///
    /// # Errors
    ///
    /// TLS has failed; it is broken off.
    pub async fn encrypted(
        self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        pool: Pool,
    ) -> io::Result<Self> {
        let stream = TlsConnector::from(config).connect(name, ByteStreamIo::new(self)).await?;
        Ok(Self::Tls(Box::new(Socket::new(stream, pool))))
    }

    /// The session's id, if it is one.
    pub fn id(&self) -> Option<SessionId> {
        match self {
            Self::Session(session) => Some(session.id()),
            Self::Direct(_) => None,
            Self::Tls(over) => inside(over).id(),
        }
    }

    /// How often it was resumed on another path.
    pub fn resumed(&self) -> u32 {
        match self {
            Self::Session(session) => session.account().resumed,
            Self::Direct(_) => 0,
            Self::Tls(over) => inside(over).resumed(),
        }
    }

    /// Why the session was ended, if it did not end in good order.
    pub fn ended(&self) -> Option<SessionError> {
        match self {
            Self::Session(session) => session.account().ended,
            Self::Direct(_) => None,
            Self::Tls(over) => inside(over).ended(),
        }
    }

    /// Ends it like a connection that broke off.
    pub fn break_off(self, why: SessionError) {
        match self {
            Self::Session(session) => session.break_off(why),
            Self::Direct(_) => {}
            Self::Tls(over) => over.into_io().into_inner().0.into_inner().break_off(why),
        }
    }

    /// Both directions have been finished: what is still on its way is delivered in the background.
    pub fn is_over(&self) {
        match self {
            Self::Session(_) => {}
            Self::Direct(connection) => connection.io().breaks_off(false),
            Self::Tls(over) => inside(over).is_over(),
        }
    }
}

/// What TLS sits on.
fn inside(over: &TlsOverTarget) -> &TargetStream {
    over.io().get_ref().0.get_ref()
}

impl From<Session> for TargetStream {
    fn from(session: Session) -> Self {
        Self::Session(session)
    }
}

impl ByteStream for TargetStream {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        match self {
            Self::Session(session) => session.poll_read_chunk(cx),
            Self::Direct(connection) => connection.poll_read_chunk(cx),
            Self::Tls(over) => over.poll_read_chunk(cx),
        }
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_write_chunk(cx, bytes),
            Self::Direct(connection) => connection.poll_write_chunk(cx, bytes),
            Self::Tls(over) => over.poll_write_chunk(cx, bytes),
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_flush(cx),
            Self::Direct(connection) => connection.poll_flush(cx),
            Self::Tls(over) => over.poll_flush(cx),
        }
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_finish(cx),
            Self::Direct(connection) => connection.poll_finish(cx),
            Self::Tls(over) => over.poll_finish(cx),
        }
    }

    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Session(session) => session.poll_lost(cx),
            Self::Direct(connection) => connection.poll_lost(cx),
            Self::Tls(over) => inside(over).poll_lost(cx),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
