//! Transfers an open session: copies its bytes until both ends are done, then records result, access line and metrics.
//!
//! Used by all listeners, the acceptor, and bridges between two sessions of one server.

pub mod copy;
pub mod judged;
pub mod rights;
pub mod session_stream;
pub(crate) mod tls;

use bytes::Bytes;
use tracing::debug;

use crate::session_io::copy::close::close;
use crate::session_io::copy::{ByteCounter, CopyDirection, CopyEnd, EndKind, Side, copy};
use crate::session_io::judged::JudgedSession;
use crate::session_io::session_stream::SessionStream;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::metrics::{ActiveSessionGuard, Metrics};
use tunnel_link::relay::bindings::RelayOutcome;
use tunnel_link::table::handles::Session;
use tunnel_link::table::session::AnyPermit;
use tunnel_net::socket::{AnyConnection, Connection as _, Socket};
use tunnel_proto::frame::{ErrorCode, SessionError};

/// An open session with its access line, counters and permit.
#[derive(Debug)]
pub struct OpenSession {
    /// The stream to the remote.
    pub session: SessionStream,
    /// Bytes that were read from the session and counted, but not yet given to the client or target at this end.
    pub buffered: Bytes,
    /// The session's access log entry.
    pub access: AccessLogEntry,
    /// The session as it is judged; once it is revoked, it is ended.
    pub judged: JudgedSession,
    /// Counts the session as active.
    pub alive: ActiveSessionGuard,
    /// A client's permit. Released when the session ends, before its connection is closed gracefully. The session
    /// shares it, and keeps it until its last bytes are delivered.
    pub permit: Option<AnyPermit>,
}

impl OpenSession {
    /// Writes the access line of an ended session, counts it, and releases its permit. Side A is the connection of
    /// `local`.
    ///
    /// If that connection failed, resets the session with the error. Otherwise returns the session, which the caller
    /// must drop.
    pub(crate) fn end(self, ended: CopyEnd, local: LocalParty) -> Option<SessionStream> {
        let this = self.unless_revoked()?;
        let (result, why) = match (&this.session, ended) {
            (
                SessionStream::Direct(_),
                CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) },
            ) => (local.other().failed(), local.other().failure() + &kind.to_string()),
            (session, _) => end_reason(ended, local, session.ended().as_ref()),
        };
        let session = this.record_end(result, &why);
        if ended.by == Side::A && ended.how != EndKind::Finished {
            session.break_off(SessionError::new(ErrorCode::ConnectionFailed, why));
            return None;
        }
        if ended.how == EndKind::Finished {
            session.mark_finished();
        }
        Some(session)
    }

    /// Like [`Self::end`], but this end breaks off the session. `result` is a fixed word for the access line, and `why`
    /// is sent to the remote.
    pub(crate) fn break_off(self, result: &'static str, why: SessionError) {
        if let Some(this) = self.unless_revoked() {
            this.record_end(result, &why.reason).break_off(why);
        }
    }

    /// Returns the session unless it was revoked. Then ends it like [`Self::end`]: both ends get the reason, and
    /// no byte is delivered any longer.
    fn unless_revoked(self) -> Option<Self> {
        let Some(why) = self.judged.revocation().map(str::to_owned) else { return Some(self) };
        self.record_end(REVOKED, &why).reset(SessionError::new(ErrorCode::NotAllowed, why));
        None
    }

    fn record_end(self, result: &'static str, why: &str) -> SessionStream {
        let Self { session, mut access, alive, .. } = self;
        access.resumed = session.resumed();
        access.end(result, why);
        alive.end(result);
        session
    }
}

/// The result of a session that was revoked.
pub(crate) const REVOKED: &str = "revoked";

/// The party at this end of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
#[display(rename_all = "lowercase")]
pub enum LocalParty {
    /// A client: this end is a listener.
    Client,
    /// A dialled target: this end is the acceptor.
    Target,
}

impl LocalParty {
    fn other(self) -> Self {
        match self {
            Self::Client => Self::Target,
            Self::Target => Self::Client,
        }
    }

    /// Returns the fixed word for a session that ended because this party's connection failed.
    fn failed(self) -> &'static str {
        match self {
            Self::Client => "client_io_error",
            Self::Target => "target_io_error",
        }
    }

    /// Returns the prefix of the text that both ends log after this party's connection has failed; an error follows.
    fn failure(self) -> String {
        format!("the {self}'s connection failed: ")
    }

    /// Returns the fixed word for a session that the remote reset: the same word as at the remote if a connection
    /// failed.
    fn reset_by_other(self, why: &SessionError) -> &'static str {
        match why.code {
            ErrorCode::ConnectionFailed => self.other().failed(),
            // Only the loss of a right ends an open session like that.
            ErrorCode::NotAllowed | ErrorCode::NodeNotAllowed => REVOKED,
            code => code.name(),
        }
    }
}

/// Copies a session's bytes until both ends are done, writes the access line, and closes the connection. Aborts both if
/// it is revoked.
///
/// Not cancel safe: a dropped call aborts the connection, resets the session, and records that in the access line.
pub async fn run_session(
    mut opened: OpenSession,
    local: LocalParty,
    mut socket: Socket<AnyConnection>,
    metrics: &Metrics,
) {
    let OpenSession { session, buffered, access, judged, .. } = &mut opened;
    let early = std::mem::take(buffered);
    let up = ByteCounter { one: &mut access.up, all: &metrics.bytes_to_target };
    let down = ByteCounter { one: &mut access.down, all: &metrics.bytes_to_client };
    let (taken, given) = match local {
        LocalParty::Client => (down, up),
        LocalParty::Target => (up, down),
    };
    let mut to_session = CopyDirection::counted(Side::A, Bytes::new(), given);
    let mut from_session = CopyDirection::counted(Side::B, early, taken);
    // Dropped in the middle, the connection must not look complete to its party.
    socket.io.set_reset_on_drop(true);
    let ended = tokio::select! {
        biased;
        () = judged.revoked() => None,
        ended = copy(&mut socket, session, &mut to_session, &mut from_session) => Some(ended),
    };
    match ended {
        Some(ended) => {
            // The session ends first: its access line does not wait for a party that is slow to close.
            drop(opened.end(ended, local));
            close(&mut socket, Side::A, ended).await;
        }
        // Dropping the connection resets it.
        None => drop(opened.unless_revoked()),
    }
}

/// Copies bytes between two sessions until both are done. This process is an end of each.
///
/// If one session fails, the remote of the other receives the error. Once `revoked` completes, both remotes receive its
/// error. Returns why they ended, and the bytes that passed.
pub async fn bridge_sessions(
    mut opener: Session,
    mut acceptor: Session,
    alive: ActiveSessionGuard,
    revoked: impl Future<Output = SessionError>,
) -> RelayOutcome {
    let mut up = CopyDirection::new(Side::A);
    let mut down = CopyDirection::new(Side::B);
    // Biased: no byte passes after a revocation.
    let ended = tokio::select! {
        biased;
        why = revoked => Err(why),
        ended = copy(&mut opener, &mut acceptor, &mut up, &mut down) => Ok(ended),
    };
    let end = |why| RelayOutcome { why: Some(why), to_acceptor: up.given, to_opener: down.given };
    match ended {
        Err(why) => {
            alive.end(REVOKED);
            // Bytes that wait are discarded, as the right to them is lost.
            opener.reset(why.clone());
            acceptor.reset(why.clone());
            end(why)
        }
        Ok(CopyEnd { how: EndKind::Finished, .. }) => {
            alive.end("ok");
            end(SessionError::new(ErrorCode::NoError, ""))
        }
        Ok(ended) => {
            let (broken, left) = if ended.by == Side::A { (opener, acceptor) } else { (acceptor, opener) };
            let why = broken
                .ended()
                .unwrap_or_else(|| SessionError::new(ErrorCode::Cancelled, "the session failed"));
            debug!(error = %why, "bridged session failed");
            alive.end(why.code.name());
            // The other remote gets all bytes that have arrived here, and then the reason.
            left.break_off(why.clone());
            end(why)
        }
    }
}

/// Returns which side ended a session and why, as a word and a text. Side A is the connection of `local`.
fn end_reason(ended: CopyEnd, local: LocalParty, reset: Option<&SessionError>) -> (&'static str, String) {
    match (ended.by, ended.how) {
        (Side::A, EndKind::Finished) => ("ok", format!("the {local} finished first")),
        (Side::B, EndKind::Finished) => ("ok", format!("the {} finished first", local.other())),
        (Side::A, EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind)) => {
            (local.failed(), local.failure() + &kind.to_string())
        }
        (Side::B, EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind)) => match reset {
            Some(refusal) => (local.reset_by_other(refusal), refusal.reason.clone()),
            None => ("session_error", format!("the session failed: {kind}")),
        },
    }
}

#[cfg(test)]
pub(crate) mod tests;
