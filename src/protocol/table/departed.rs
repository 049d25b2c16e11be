//! Sessions whose owner has left before they were delivered: the oldest give way when memory or places run out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::names::SessionId;
use crate::protocol::lock;
use crate::protocol::session::{Parked, SessionCore};
use crate::protocol::table::SessionTable;

impl SessionTable {
    /// Waits until every session that is open here has been delivered: one whose owner is done may still have bytes to
    /// send, or to send again on another path. Cancel safe.
    pub async fn delivered(&self) {
        let owes = |shard: &Mutex<HashMap<SessionId, Arc<SessionCore>>>| {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            sessions.iter().any(|session| session.owes())
        };
        while self.shards.iter().any(owes) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until the last frame of each session that is reset has left on its path; 2 s at most. Cancel safe.
    pub async fn last_frames_sent(&self) {
        let until = Instant::now() + LAST_FRAMES_TIMEOUT;
        while Instant::now() < until && self.all().iter().any(|session| session.owes_last_frame()) {
            sleep(LAST_FRAMES_POLL).await;
        }
    }

    /// Waits for an opening that was given up while it had no path, and whose acceptor still has to get the reset. For
    /// one task, which has a path sought for each. Cancel safe.
    pub async fn given_up(&self) -> Parked {
        loop {
            let came = self.came.notified();
            if let Some(parked) = lock(&self.unsought).pop_front() {
                return parked;
            }
            came.await;
        }
    }

    /// A session's owner has left, and it is still to be delivered.
    pub(super) fn add_departed(&self, id: SessionId) {
        // What has lost its path while it was open has a seeker already.
        if let Some(parked) = self.session(id).and_then(|session| session.parked()) {
            lock(&self.unsought).push_back(parked);
            self.came.notify_one();
        }
        let many = {
            let mut departed = lock(&self.departed);
            departed.push_back(id);
            departed.len() > MOST_DEPARTED
        };
        if many {
            self.oldest_gives_way("sessions");
        }
        while self.kept.is_spent() && self.oldest_gives_way("memory") {}
    }

    /// Whether there may be one more session. The oldest that is only to be delivered gives way to it; but its last
    /// word may have to wait on a slow link, and there is an end to that.
    pub(super) fn has_place(&self) -> bool {
        let (len, most) = (self.len(), self.limits.sessions);
        len < most || len < most + most / LAST_WORDS && self.oldest_gives_way("sessions")
    }

    /// Forgets the session that has waited longest to be delivered, for want of what `cause` names. False if none
    /// waits.
    pub(super) fn oldest_gives_way(&self, cause: &'static str) -> bool {
        loop {
            let Some(id) = lock(&self.departed).pop_front() else { return false };
            if self.session(id).is_some_and(|session| session.give_way()) {
                self.metrics.undelivered.count(cause);
                return true;
            }
        }
    }

    /// What was delivered meanwhile needs no place among those that are not.
    pub(super) fn forget_delivered(&self) {
        let all = std::mem::take(&mut *lock(&self.departed));
        let mut left: Vec<_> = all.into_iter().filter(|id| self.shard(*id).contains_key(id)).collect();
        let mut departed = lock(&self.departed);
        left.extend(departed.drain(..));
        *departed = left.into();
    }
}

/// One in so many sessions may be above the most, while its last word waits.
const LAST_WORDS: usize = 8;
/// Ids of sessions that may still be delivered, at the most: 16 bytes each.
const MOST_DEPARTED: usize = 20_000;
/// How long last words are waited for, and between two looks.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_secs(2);
const LAST_FRAMES_POLL: Duration = Duration::from_millis(10);
/// Between two looks whether all is delivered.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::names::Instance;
    use crate::net::ByteStream as _;
    use crate::protocol::link::sender::LinkSender;
    use crate::protocol::link::source::LinkId;
    use crate::protocol::session::recv::Windows;
    use crate::protocol::table::SessionLimits;
    use crate::protocol::wire::frame::{Category, Code, Refusal, SessionFrame, SessionKey};
    use crate::protocol::wire::hello::Dialect;
    use crate::protocol::wire::peer::Peer;
    use crate::telemetry::Metrics;
    use bytes::Bytes;

    const SESSIONS: usize = 8;

    fn table(memory: usize) -> (Arc<SessionTable>, Arc<LinkSender>) {
        let windows = Windows { start: 1000, max: 1000 };
        let limits = SessionLimits { windows, memory, sessions: SESSIONS, grace: Duration::from_secs(60) };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        (table, LinkSender::new(LinkId(1), Peer::Edge("node1".parse().unwrap()), None, Dialect::NEWEST))
    }

    /// A session that broke off with so many bytes for which the peer has no room.
    async fn broken(table: &Arc<SessionTable>, link: &Arc<LinkSender>, bytes: usize) -> SessionId {
        let node = "node1".parse().unwrap();
        let opening = table.open(node, "node1:22".parse().unwrap(), Category::Ssh, "c".into()).unwrap();
        opening.ask(link, None);
        let (id, opened) = (opening.id(), SessionFrame::Opened { limit: 0, epoch: 1, instance: None });
        let key = SessionKey { id, category: Category::Ssh, node: "node1".parse().unwrap() };
        table.on_frame(link, key, opened, Instant::now());
        let mut session = opening.into_session();
        let mut bytes = Bytes::from(vec![0; bytes]);
        poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        session.break_off(Refusal::new(Code::GivenUp, "broken"));
        id
    }

    fn knows(table: &SessionTable, id: SessionId) -> bool {
        table.shard(id).get(&id).is_some_and(|session| session.owes())
    }

    #[tokio::test]
    async fn the_oldest_that_is_to_be_delivered_gives_way_when_memory_runs_out() {
        let (table, link) = table(100_000);
        let (first, second) = (broken(&table, &link, 40_000).await, broken(&table, &link, 40_000).await);
        assert!(knows(&table, first) && knows(&table, second));
        let third = broken(&table, &link, 40_000).await;
        assert!(!knows(&table, first) && knows(&table, second) && knows(&table, third));
        assert_eq!(table.metrics.undelivered.counted("memory"), 1);
    }

    #[tokio::test]
    async fn the_oldest_that_is_to_be_delivered_gives_way_to_a_new_session() {
        let (table, link) = table(1 << 20);
        let mut all = Vec::new();
        for _ in 0..=SESSIONS {
            all.push(broken(&table, &link, 10).await);
        }
        assert!(!knows(&table, all[0]) && all[1..].iter().all(|id| knows(&table, *id)));
        assert_eq!(table.metrics.undelivered.counted("sessions"), 1);
        let (node, target) = ("node1".parse().unwrap(), "node1:22".parse().unwrap());
        assert!(table.open(node, target, Category::Ssh, "c".into()).is_err(), "last words wait on the link");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_delivered_within_the_grace_time_is_forgotten() {
        let (table, link) = table(1 << 20);
        let id = broken(&table, &link, 10).await;
        tokio::time::advance(Duration::from_secs(59)).await;
        table.tick(Instant::now());
        assert!(knows(&table, id));
        tokio::time::advance(Duration::from_secs(1)).await;
        table.tick(Instant::now());
        assert!(!knows(&table, id) && table.memory().1 == 0);
        assert_eq!(table.metrics.undelivered.counted("too_late"), 1);
        assert!(lock(&table.departed).len() <= 1);
    }
}
