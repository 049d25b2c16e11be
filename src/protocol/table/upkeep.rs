//! Work of every few seconds: gives old sessions up, and sets metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;

use crate::drain::Drain;
use crate::net::pool::Pool;
use crate::protocol::budget::Budget;
use crate::protocol::lock;
use crate::protocol::table::SessionTable;
use crate::protocol::wire::frame::{Code, Refusal};

impl SessionTable {
    /// Gives up what waited for a path, or to be delivered, longer than the grace time. To be called every few seconds.
    pub fn tick(&self, now: Instant) {
        self.metrics.passing.set(i64::try_from(self.relays.len()).unwrap_or(i64::MAX));
        self.show_memory();
        if let Some(long_ago) = now.checked_sub(self.limits.grace.max(LATEST_OPEN)) {
            lock(&self.ended).forget_before(long_ago, now);
        }
        self.forget_delivered();
        let Some(before) = now.checked_sub(self.limits.grace) else { return };
        let why = Refusal::new(Code::GivenUp, format!("no path for {:?}", self.limits.grace));
        for shard in &self.shards {
            let sessions: Vec<_> = lock(shard).values().cloned().collect();
            for session in sessions {
                if session.expire(before, &why) {
                    self.metrics.undelivered.count("too_late");
                }
            }
        }
    }

    /// Gives up old sessions, and unused buffers of `pool`, every few seconds until draining begins. Less often has
    /// `give_back` give the system what is free, so that a process which was large for a while, or has just started, does
    /// not stay so.
    pub async fn upkeep(self: Arc<Self>, pool: Pool, drain: Drain, give_back: fn()) {
        let mut ticks = tokio::time::interval(UPKEEP);
        let mut trimmed = Instant::now();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                _ = ticks.tick() => {
                    self.tick(Instant::now());
                    pool.trim();
                    if trimmed.elapsed() >= TRIM_EVERY && self.freed.swap(false, Relaxed) {
                        trimmed = Instant::now();
                        give_back();
                    }
                }
            }
        }
    }

    /// Shows each budget and its bound.
    pub(super) fn show_memory(&self) {
        let budgets: [(_, &Budget); 4] = [
            ("promised", &self.promised),
            ("kept", &self.kept),
            ("passing", self.relays.budget()),
            ("unpromised", &self.unpromised),
        ];
        for (name, budget) in budgets {
            self.metrics.memory.set(name, budget.used(), budget.limit());
        }
    }
}

/// Between two rounds of upkeep.
const UPKEEP: Duration = Duration::from_secs(5);
/// Between two times that memory is given back. One takes some milliseconds in a process of hundreds of MiB.
const TRIM_EVERY: Duration = Duration::from_secs(20);
/// No opener asks again for longer than this, so an ended id is remembered at least so long.
const LATEST_OPEN: Duration = Duration::from_secs(60);
