//! Eviction when sessions or memory run out, and the periodic end of old sessions.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::table::SessionTable;
use crate::table::session::{ExpiryOutcome, SharedSession};
use tunnel_base::drain::Drain;
use tunnel_base::names::SessionId;
use tunnel_net::fair_map::FairMap;
use tunnel_net::pool::BufferPool;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// Sessions by client, each client's longest idle first.
pub(crate) type ByClient = FairMap<Arc<str>, SessionId, ()>;

impl SessionTable {
    /// Resets the longest idle session of the client that has most sessions. Returns false if none has more than
    /// `newcomer`.
    ///
    /// How long a session was idle is recorded by [`Self::tick`], and here for the few sessions that are looked at. So
    /// the cost does not grow with the number of sessions.
    pub(crate) fn evict_idle_session(&self, newcomer: &Arc<str>) -> bool {
        let mut idlest: Option<(Instant, Arc<SharedSession>)> = None;
        for _ in 0..MAX_CANDIDATES {
            let Some((id, since)) = self.clients.lock().victim_for(newcomer) else { break };
            let Some(session) = self.session(id) else {
                self.clients.lock().remove(&id);
                continue;
            };
            let last = session.last_frame();
            self.clients.lock().renew(&id, last);
            if idlest.as_ref().is_none_or(|(idle, _)| last < *idle) {
                idlest = Some((last, session));
            }
            if last <= since {
                break;
            }
        }
        let Some((_, session)) = idlest else { return false };
        self.clients.lock().remove(&session.key.id);
        session.reset_unread(SessionError::new(
            ErrorCode::Overloaded,
            "evicted in favour of another client: its own client has most sessions, and it was idle for longest",
        ));
        true
    }
}

/// Maximum number of sessions that are looked at for one to evict.
const MAX_CANDIDATES: usize = 8;

/// Returns the source of a client as an Open names it: its user, whichever of her devices it is, or its address, with
/// one source for each /64 of IPv6.
pub(crate) fn source(client: &str) -> Arc<str> {
    if let Some((user, _)) = client.rsplit_once('@') {
        return user.split_once('/').map_or(user, |(user, _device)| user).into();
    }
    match client.parse().map(|at: SocketAddr| at.ip().to_canonical()) {
        Ok(IpAddr::V6(ip)) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).to_string().into(),
        Ok(ip) => ip.to_string().into(),
        Err(_) => client.into(),
    }
}

impl SessionTable {
    /// Gives up sessions that have waited longer than the resume timeout for a path or for delivery. Must be called
    /// every few seconds.
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

    /// Gives up old sessions and releases unused buffers of `pool` every few seconds, until draining starts.
    pub async fn upkeep(self: Arc<Self>, pool: BufferPool, drain: Drain) {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            tokio::select! {
                () = drain.draining() => return,
                _ = ticks.tick() => {
                    self.tick(Instant::now());
                    pool.trim();
                }
            }
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
}

/// Interval of the periodic work.
const UPKEEP: Duration = Duration::from_secs(5);
/// No opener retries for longer than this, so an ended id is kept at least this long.
const LATEST_OPEN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_its_user_or_else_its_address() {
        for (client, expected) in [
            ("10.0.0.1:4711", "10.0.0.1"),
            ("[::ffff:10.0.0.1]:4711", "10.0.0.1"),
            ("[2001:db8:1:2:3::4]:4711", "2001:db8:1:2::"),
            ("ann@10.0.0.1:4711", "ann"),
            ("ann@example.org@[::1]:4711", "ann@example.org"),
            ("node edge-1", "node edge-1"),
            ("", ""),
        ] {
            assert_eq!(&*source(client), expected, "{client}");
        }
    }
}
