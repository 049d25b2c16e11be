//! Carrying an open session: copying its bytes until both ends are done, the verdict, the access line, the numbers.
//!
//! Every front end, the back end and the bridge to plain nodes end here.

mod far_end;

use bytes::Bytes;
use tracing::debug;

use crate::net::counted::{Counted, Tally};
use crate::net::socket::{Connection, Socket};
use crate::net::splice::{Ended, How, Side, close, splice};
use crate::protocol::{Code, Refusal, Session};
use crate::telemetry::{Access, Alive, Metrics};

pub use far_end::FarEnd;

/// A session that was opened, with all that counts it.
#[derive(Debug)]
pub struct Opened<P> {
    /// This end of it, or the connection that stands for one.
    pub session: FarEnd,
    /// What was taken from it and counted already, and not given to who is at this end yet.
    pub early: Bytes,
    /// Its line in the access log.
    pub access: Access,
    /// Counts it among those that run.
    pub alive: Alive,
    /// Its slot among the sessions of this process; freed when it ends, before its connection is closed with care.
    pub slot: P,
}

impl<P> Opened<P> {
    /// Writes the access line of a session that ended so, counts it, and frees its slot. Side A is the connection of
    /// `local`: if that broke off, the session is reset with the cause; otherwise it is given back, to be let go of.
    pub(crate) fn end(self, ended: Ended, local: LocalPeer) -> Option<FarEnd> {
        let (result, why) = match (&self.session, ended) {
            (
                FarEnd::Direct(_),
                Ended { by: Side::B, how: How::ReadFailed(kind) | How::WriteFailed(kind) },
            ) => (local.other().failed(), local.other().failure() + &kind.to_string()),
            (session, _) => verdict(ended, local, session.ended().as_ref()),
        };
        let session = self.settle(result, &why);
        if ended.by == Side::A && ended.how != How::Finished {
            session.break_off(Refusal::new(Code::GivenUp, why));
            return None;
        }
        if ended.how == How::Finished {
            session.is_over();
        }
        Some(session)
    }

    /// As [`Self::end`], of a session that this end breaks off for a reason of its own: a fixed word, and a sentence.
    pub(crate) fn break_off(self, result: &'static str, why: &str) {
        self.settle(result, why).break_off(Refusal::new(Code::GivenUp, why));
    }

    fn settle(self, result: &'static str, why: &str) -> FarEnd {
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
    fn reset_by_other(self, why: &Refusal) -> &'static str {
        let other = self.other();
        let failed = why.code == Code::GivenUp && why.reason.starts_with(&other.failure());
        if failed { other.failed() } else { why.code.name() }
    }
}

/// Carries a session's bytes until both ends are done, writes the access line, and closes the connection.
///
/// Not cancel safe: a dropped call breaks the connection off and resets the session, and its access line shows that.
pub async fn carry<C: Connection, P>(
    mut opened: Opened<P>,
    local: LocalPeer,
    mut socket: Socket<C>,
    metrics: &Metrics,
) {
    let Opened { session, early, access, .. } = &mut opened;
    let up = Tally { one: &mut access.up, all: &metrics.bytes_up };
    let down = Tally { one: &mut access.down, all: &metrics.bytes_down };
    let (taken, given) = match local {
        LocalPeer::Client => (down, up),
        LocalPeer::Target => (up, down),
    };
    let mut counted = Counted { stream: session, early: std::mem::take(early), taken, given };
    socket.io().breaks_off(true);
    let ended = splice(&mut socket, &mut counted).await.ended;
    drop(opened.end(ended, local));
    close(&mut socket, Side::A, ended).await;
}

/// Carries bytes between two sessions until both are done: this process is an end of each. If one is broken off, the
/// far end of the other one gets the cause.
pub async fn join(mut one: Session, mut other: Session, alive: Alive) {
    let ended = splice(&mut one, &mut other).await.ended;
    if ended.how == How::Finished {
        return alive.end("over");
    }
    let (broken, left) = if ended.by == Side::A { (one, other) } else { (other, one) };
    let why = broken.account().ended.unwrap_or_else(|| Refusal::new(Code::GivenUp, "the session broke"));
    debug!(%why, "a session with a plain node is over");
    alive.end(why.code.name());
    left.break_off(why);
}

/// Who ended a session and why, as a word and a sentence. Side A is the connection of who is `local`.
fn verdict(ended: Ended, local: LocalPeer, reset: Option<&Refusal>) -> (&'static str, String) {
    match (ended.by, ended.how) {
        (Side::A, How::Finished) => ("over", format!("the {} finished first", local.name())),
        (Side::B, How::Finished) => ("over", format!("the {} finished first", local.other().name())),
        (Side::A, How::ReadFailed(kind) | How::WriteFailed(kind)) => {
            (local.failed(), local.failure() + &kind.to_string())
        }
        (Side::B, How::ReadFailed(kind) | How::WriteFailed(kind)) => match reset {
            Some(refusal) => (local.reset_by_other(refusal), refusal.reason.clone()),
            None => ("session_failed", format!("the session failed: {kind}")),
        },
    }
}

#[cfg(test)]
pub(crate) mod tests;
