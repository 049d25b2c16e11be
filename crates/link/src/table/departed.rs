//! Orphaned sessions with undelivered bytes: some are evicted when memory or sessions run out.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::table::SessionTable;
use crate::table::session::SharedSession;
use tunnel_base::names::SessionId;
use tunnel_proto::frame::SessionError;
use tunnel_proto::state::SessionState;

impl SessionTable {
    /// Waits until every session that is open here has been delivered. A session without its owner may still have bytes
    /// to send, or to retransmit on another path.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_delivered(&self) {
        while self.all().iter().any(|session| session.read(SessionState::is_active)) {
            sleep(LOOK_INTERVAL).await;
        }
    }

    /// Resets every session, sends the reason to all remote ends, and waits until the last frame of each session has
    /// been sent on its path; at most 2.1 s.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn end_all(&self, why: &SessionError) {
        self.reset_all(why);
        sleep(FLUSH_TIME).await;
        let until = Instant::now() + LAST_FRAMES_TIMEOUT;
        while Instant::now() < until
            && self.all().iter().any(|session| session.read(SessionState::has_pending_close))
        {
            sleep(LAST_FRAMES_POLL).await;
        }
    }

    /// Adds a session whose owner has left before its end. It may be evicted at once.
    pub(crate) fn add_broken_off(&self, session: &Arc<SharedSession>) {
        self.add_orphan(session);
        while self.unacked.is_exhausted() && self.evict_orphan("memory") {}
    }

    /// Adds a session that may be evicted. Evicts another one if there are too many.
    pub(super) fn add_orphan(&self, session: &Arc<SharedSession>) {
        let (id, now) = (session.key.id, Instant::now());
        let lost = {
            let mut orphans = self.orphans.lock();
            if orphans.get(&id).is_some() { None } else { orphans.insert(&session.client, id, (), now) }
        };
        if let Some(lost) = lost {
            self.evict(lost.key, "sessions");
        }
        // It may have ended before it was added.
        if self.session(id).is_none() {
            self.orphans.lock().remove(&id);
        }
    }

    /// Evicts the oldest orphan of the client that has most of them; `reason` names what ran out. Returns false if
    /// there is none.
    pub fn evict_orphan(&self, reason: &'static str) -> bool {
        loop {
            let Some(oldest) = self.orphans.lock().pop() else { return false };
            if self.evict(oldest.key, reason) {
                return true;
            }
        }
    }

    fn evict(&self, id: SessionId, reason: &'static str) -> bool {
        let evicted = self.session(id).and_then(|session| session.evict());
        if evicted == Some(true) {
            self.metrics.truncated.count(reason);
        }
        evicted.is_some()
    }
}

/// Maximum number of orphans that may be evicted, at about 300 bytes each.
pub(crate) const MAX_ORPHANS: usize = 20_000;
/// Time for tasks to notice that their session was reset.
const FLUSH_TIME: Duration = Duration::from_millis(100);
/// Timeout of the wait for last frames, and its poll interval.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_secs(2);
const LAST_FRAMES_POLL: Duration = Duration::from_millis(10);
/// Interval of checks whether everything is delivered.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use bytes::Bytes;

    use crate::sender::LinkSender;
    use crate::table::SessionLimits;
    use tunnel_base::metrics::Metrics;
    use tunnel_base::names::Instance;
    use tunnel_net::ByteStream as _;
    use tunnel_proto::frame::{Remote, SessionCategory, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::state::LinkId;

    use super::*;
    use tunnel_proto::frame::ErrorCode;
    use tunnel_proto::frame::SessionFrame;

    const SESSIONS: usize = 8;

    fn table(memory: usize) -> (Arc<SessionTable>, Arc<LinkSender>) {
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits =
            SessionLimits { windows, memory, sessions: SESSIONS, resume_timeout: Duration::from_secs(60) };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        (table, LinkSender::new(LinkId(1), Remote::Edge("node1".parse().unwrap()), Some(Instance::random())))
    }

    /// Returns a session that was aborted with undelivered bytes which the remote has no room for.
    async fn broken(table: &Arc<SessionTable>, link: &Arc<LinkSender>, bytes: usize) -> SessionId {
        let node = "node1".parse().unwrap();
        let opening =
            table.open(node, "node1:22".parse().unwrap(), SessionCategory::Ssh, "c".into(), "test").unwrap();
        opening.ask(link, None);
        let (id, opened) = (opening.id(), SessionFrame::Opened { limit: 0, epoch: 1, instance: None });
        let key = SessionKey { id, category: SessionCategory::Ssh, node: "node1".parse().unwrap() };
        table.on_frame(link, key, opened, Instant::now());
        let mut session = opening.into_session();
        let mut bytes = Bytes::from(vec![0; bytes]);
        poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        session.break_off(SessionError::new(ErrorCode::Cancelled, "broken"));
        id
    }

    fn knows(table: &SessionTable, id: SessionId) -> bool {
        table.session(id).is_some_and(|session| session.read(SessionState::is_active))
    }

    #[tokio::test]
    async fn the_oldest_that_is_to_be_delivered_gives_way_when_memory_runs_out() {
        let (table, link) = table(100_000);
        let (first, second) = (broken(&table, &link, 40_000).await, broken(&table, &link, 40_000).await);
        assert!(knows(&table, first) && knows(&table, second));
        let third = broken(&table, &link, 40_000).await;
        assert!(!knows(&table, first) && knows(&table, second) && knows(&table, third));
        assert_eq!(table.metrics.truncated.counted("memory"), 1);
    }

    #[tokio::test]
    async fn the_oldest_that_is_to_be_delivered_gives_way_to_a_new_session() {
        let (table, link) = table(1 << 20);
        let mut all = Vec::new();
        for _ in 0..=SESSIONS {
            all.push(broken(&table, &link, 10).await);
        }
        assert!(!knows(&table, all[0]) && all[1..].iter().all(|id| knows(&table, *id)));
        assert_eq!(table.metrics.truncated.counted("sessions"), 1);
        let (node, target) = ("node1".parse().unwrap(), "node1:22".parse().unwrap());
        assert!(
            table.open(node, target, SessionCategory::Ssh, "c".into(), "test").is_err(),
            "last frames wait on the link"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_is_not_delivered_within_the_resume_timeout_is_forgotten() {
        let (table, link) = table(1 << 20);
        let id = broken(&table, &link, 10).await;
        tokio::time::advance(Duration::from_secs(59)).await;
        table.tick(Instant::now());
        assert!(knows(&table, id));
        tokio::time::advance(Duration::from_secs(1)).await;
        table.tick(Instant::now());
        assert!(!knows(&table, id) && table.memory().1 == 0);
        assert_eq!(table.metrics.truncated.counted("delivery_timeout"), 1);
        assert!(table.orphans.lock().get(&id).is_none());
    }
}
