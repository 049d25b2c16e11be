//! How a plain link is read with care: a plain peer knows no limits, and no end of one direction.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::names::SessionId;
use crate::protocol::link::Link;
use crate::protocol::lock;
use crate::protocol::session::SessionCore;
use crate::protocol::wire::frame::{Code, Refusal};
use crate::protocol::wire::plain::Plain;

/// How long this plain link was left unread in the current ten seconds.
#[derive(Debug)]
pub(super) struct Stall {
    since: Instant,
    spent: Duration,
}

/// The session or link with more unread bytes than allowed.
#[derive(Debug, Clone, Copy)]
enum Over {
    Session,
    Link,
    Process,
}

impl Stall {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, spent: Duration::ZERO }
    }
}

impl Link {
    /// While the session that got data last, its link or the process has too much unread, the link is left unread too,
    /// but only so long: then the fullest session is reset, so that the others go on. To be called after each message,
    /// as each of them may be for another session.
    pub(super) async fn keep_readers_ahead(&mut self) {
        let Some(fed) = self.fed.take() else { return };
        while let Some(over) = self.over(fed) {
            let now = Instant::now();
            if now - self.stall.since >= STALL_PERIOD {
                self.stall = Stall::new(now);
            }
            let left = MOST_STALLED.saturating_sub(self.stall.spent);
            if left.is_zero() {
                self.metrics.resets.count("plain_reader_too_slow");
                self.give_up(fed, over);
                // There may be many that are small.
                tokio::task::yield_now().await;
                continue;
            }
            self.metrics.stalls.inc();
            // Ready or late: the next look sees both. Readers of other links do not wake this one.
            let patience = if matches!(over, Over::Process) { left.min(LOOK_EVERY) } else { left };
            let stalled = self.ahead.stall();
            let _ = timeout(patience, self.sender.read.notified()).await;
            drop(stalled);
            self.stall.spent += now.elapsed();
            self.alive.last_received = Instant::now();
        }
    }

    /// Sends `closed` for targets that have taken all that came for them.
    pub(super) fn close_ended(&mut self, plain: &Mutex<Plain>, now: Instant) {
        let ended = lock(plain).ended(now);
        for id in ended {
            let taken = self.unread(id) == 0;
            let mut plain = lock(plain);
            let closing = if taken { plain.close(id) } else { None };
            if !taken {
                plain.put_off(id, now);
            }
            drop(plain);
            if let Some(closing) = closing {
                self.deliver(closing, now);
            }
        }
    }

    /// Unread bytes of a session, if it runs here.
    fn unread(&self, id: SessionId) -> usize {
        self.table.session(id).map_or(0, |session| session.queued_from(self.sender.id))
    }

    fn over(&self, fed: SessionId) -> Option<Over> {
        match self.unread(fed) {
            0 => None,
            most if most >= PLAIN_QUEUE => Some(Over::Session),
            _ if self.table.unpromised.is_spent() => Some(Over::Process),
            // Alone it may have half of all.
            _ => self.sender.has_more_than_its_share(&self.table.unpromised).then_some(Over::Link),
        }
    }

    fn give_up(&self, fed: SessionId, over: Over) {
        let found = match over {
            Over::Session => None,
            Over::Link => fullest(self.table.on_link(&self.sender)),
            Over::Process => fullest(self.table.all()),
        };
        if let Some(session) = found.or_else(|| self.table.session(fed)) {
            session
                .reset_unread(Refusal::new(Code::Busy, "its reader is too slow for a link that cannot wait"));
        }
    }
}

/// Of those whose peer was promised nothing, the one with most unread bytes, if it has any.
fn fullest(sessions: Vec<Arc<SessionCore>>) -> Option<Arc<SessionCore>> {
    let unread = sessions.into_iter().map(|session| (session.unpromised(), session));
    unread.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes).map(|(_, session)| session)
}

/// Unread bytes of a plain peer's session at which its link is left unread.
const PLAIN_QUEUE: usize = 1024 * 1024;
/// How long a plain link may be left unread in each [`STALL_PERIOD`], all sessions together.
const MOST_STALLED: Duration = Duration::from_secs(2);
const STALL_PERIOD: Duration = Duration::from_secs(10);
/// How often it is looked whether other links' readers have made room.
const LOOK_EVERY: Duration = Duration::from_millis(50);
