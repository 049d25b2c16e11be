//! The periodic work of a table, and its shutdown: how old sessions end, and how all do.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::table::SessionTable;
use crate::table::session::ExpiryOutcome;
use tunnel_base::drain::Drain;
use tunnel_net::pool::BufferPool;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::state::SessionState;

impl SessionTable {
    /// Gives up sessions that have waited longer than the resume timeout for a path or for delivery, and takes memory
    /// back from idle ones. Must be called every few seconds.
    pub fn tick(&self, now: Instant) {
        self.metrics.sessions_relayed.set(i64::try_from(self.relays.len()).unwrap_or(i64::MAX));
        self.show_memory();
        if let Some(long_ago) = now.checked_sub(self.limits.resume_timeout.max(LATEST_OPEN)) {
            self.ended.lock().forget_before(long_ago);
        }
        let timeout = self.limits.resume_timeout;
        let why = SessionError::new(ErrorCode::Cancelled, format!("no path for {timeout:?}"));
        for session in self.all() {
            let expiry = session.expire(now, timeout, &why);
            if expiry == ExpiryOutcome::Truncated {
                self.metrics.truncated.count("delivery_timeout");
            }
            if expiry == ExpiryOutcome::Evictable {
                self.add_orphan(&session);
            } else {
                self.orphans.lock().remove(&session.key.id);
            }
            let last = session.last_frame();
            self.clients.lock().renew(&session.key.id, last);
        }
    }

    /// Returns how long each session without a path has waited for one, and the time after which it ends.
    pub fn waits(&self) -> impl Iterator<Item = (Duration, Duration)> {
        let sessions = self.all().into_iter();
        let timeout = self.limits.resume_timeout;
        sessions
            .filter_map(move |session| Some((session.read(SessionState::path_lost_at)?.elapsed(), timeout)))
    }

    /// Gives up old sessions and releases unused buffers of `pool` every few seconds, until draining starts.
    pub async fn upkeep(self: Arc<Self>, pool: BufferPool, drain: Drain) {
        let mut ticks = tokio::time::interval(UPKEEP);
        while drain.run_until(ticks.tick()).await.is_some() {
            self.tick(Instant::now());
            pool.trim();
        }
    }

    /// Updates the metrics of each budget and its limit.
    pub(crate) fn show_memory(&self) {
        let budgets: [(_, &Budget); 4] = [
            ("reserved", &self.reserved),
            ("unacknowledged", &self.unacked),
            ("relayed", &self.relays.queued),
            ("unreserved", &self.unreserved),
        ];
        for (name, budget) in budgets {
            self.metrics.buffers.set(name, budget.used(), budget.limit());
        }
    }

    /// Waits until every session that is open here has been delivered, or has had no working path for 2 s. A session
    /// without its owner may still have bytes to send, or to retransmit on another path.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_delivered(&self) {
        while self.all().iter().any(|session| session.can_deliver(Instant::now())) {
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
}

/// Interval of the periodic work.
const UPKEEP: Duration = Duration::from_secs(5);
/// No opener retries for longer than this, so an ended id is kept at least this long.
const LATEST_OPEN: Duration = Duration::from_secs(60);
/// Time for tasks to notice that their session was reset.
const FLUSH_TIME: Duration = Duration::from_millis(100);
/// Timeout of the wait for last frames, and its poll interval.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_secs(2);
const LAST_FRAMES_POLL: Duration = Duration::from_millis(10);
/// Interval of checks whether everything is delivered.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
