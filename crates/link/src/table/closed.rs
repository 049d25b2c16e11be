//! Eviction when sessions or memory run out, and the ids of ended sessions.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::lock::Mutex;
use crate::table::SessionTable;
use crate::table::session::SessionCore;
use tunnel_base::drain::Drain;
use tunnel_base::names::SessionId;
use tunnel_net::limiter::FairMap;
use tunnel_net::pool::Pool;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{ErrorCode, Opener, SessionError};

/// The sessions that were opened from elsewhere, by client.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    of: HashMap<SessionId, Arc<str>>,
    counts: HashMap<Arc<str>, usize>,
}

impl Clients {
    /// Adds a session. Does nothing if it is known, as when its Open arrives on two links at once.
    pub(crate) fn add(&mut self, id: SessionId, client: &str) {
        if self.of.contains_key(&id) {
            return;
        }
        let (client, count) = match self.counts.get_key_value(client) {
            Some((known, count)) => (known.clone(), count + 1),
            None => (client.into(), 1),
        };
        self.counts.insert(client.clone(), count);
        self.of.insert(id, client);
    }

    /// Removes a session and returns its client; `None` if it has none or was removed before.
    pub(crate) fn remove(&mut self, id: SessionId) -> Option<Arc<str>> {
        let client = self.of.remove(&id)?;
        if let Some(count) = self.counts.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&client);
            }
        }
        Some(client)
    }

    /// Returns the sessions of the client that has most, if that is more than `newcomer` would have with another one.
    fn largest(&self, newcomer: &str) -> Vec<SessionId> {
        let own = self.counts.get(newcomer).map_or(0, |count| *count);
        let Some((fullest, most)) = self.counts.iter().max_by_key(|(_, count)| **count) else {
            return Vec::new();
        };
        let theirs = self.of.iter().filter(|(_, client)| *most > own + 1 && *client == fullest);
        theirs.map(|(id, _)| *id).collect()
    }
}

impl SessionTable {
    /// Resets the longest idle session of the client that has most sessions. Returns false if none has more than
    /// `newcomer`.
    pub(crate) fn evict_idle_session(&self, newcomer: &str) -> bool {
        let theirs = self.clients.lock().largest(newcomer);
        let sessions = theirs.into_iter().filter_map(|id| self.session(id));
        let Some(session): Option<Arc<SessionCore>> = sessions.min_by_key(|session| session.last_frame())
        else {
            return false;
        };
        self.add_ended(session.key.id, Some(ErrorCode::Overloaded));
        session.reset_unread(SessionError::new(
            ErrorCode::Overloaded,
            "evicted in favour of another client: its own client has most sessions, and it was idle for longest",
        ));
        true
    }
}

/// Returns the source of a client as an Open names it: its user, or its address, with one source for each /64 of IPv6.
pub(crate) fn source(client: &str) -> String {
    if let Some((user, _)) = client.rsplit_once('@') {
        return user.to_owned();
    }
    match client.parse().map(|at: SocketAddr| at.ip().to_canonical()) {
        Ok(IpAddr::V6(ip)) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).to_string(),
        Ok(ip) => ip.to_string(),
        Err(_) => client.to_owned(),
    }
}

// Orphaned sessions with undelivered bytes: the oldest are evicted when memory or sessions run out.

impl SessionTable {
    /// Waits until every session that is open here has been delivered. A session without its owner may still have bytes
    /// to send, or to retransmit on another path.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_delivered(&self) {
        let owes = |shard: &Mutex<HashMap<SessionId, Arc<SessionCore>>>| {
            let sessions: Vec<_> = shard.lock().values().cloned().collect();
            sessions.iter().any(|session| session.is_active())
        };
        while self.shards.iter().any(owes) {
            sleep(LOOK_INTERVAL).await;
        }
    }

    /// Waits until the last frame of each session that is reset has been sent on its path; at most 2 s.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_closed(&self) {
        let until = Instant::now() + LAST_FRAMES_TIMEOUT;
        while Instant::now() < until && self.all().iter().any(|session| session.owes_last_frame()) {
            sleep(LAST_FRAMES_POLL).await;
        }
    }

    /// Adds an orphaned session that still has bytes to deliver.
    pub(crate) fn add_departed(&self, id: SessionId) {
        let many = {
            let mut departed = self.departed.lock();
            departed.push_back(id);
            departed.len() > MAX_ORPHANS
        };
        if many {
            self.evict_oldest_orphan("sessions");
        }
        while self.unacked.is_exhausted() && self.evict_oldest_orphan("memory") {}
    }

    /// Evicts the oldest orphan; `reason` names what ran out. Returns false if there is none.
    pub(crate) fn evict_oldest_orphan(&self, reason: &'static str) -> bool {
        loop {
            let Some(id) = self.departed.lock().pop_front() else { return false };
            if self.session(id).is_some_and(|session| session.evict()) {
                self.metrics.truncated.count(reason);
                return true;
            }
        }
    }

    /// Removes sessions from the list of orphans that were delivered meanwhile.
    pub(crate) fn forget_delivered(&self) {
        let all = std::mem::take(&mut *self.departed.lock());
        let mut left: Vec<_> = all.into_iter().filter(|id| self.shard(*id).contains_key(id)).collect();
        let mut departed = self.departed.lock();
        left.extend(departed.drain(..));
        *departed = left.into();
    }
}

/// Maximum number of orphans kept, at 16 bytes each.
const MAX_ORPHANS: usize = 20_000;
/// Timeout of the wait for last frames, and its poll interval.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_secs(2);
const LAST_FRAMES_POLL: Duration = Duration::from_millis(10);
/// Interval of checks whether everything is delivered.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

// Ids of ended sessions, so that a late Open does not dial again but gets the reason.

/// Ids of ended sessions by client, kept for as long as a late Open could arrive.
#[derive(Debug)]
pub(crate) struct Tombstones(FairMap<Arc<str>, SessionId, Ended>);

/// An ended session in [`Tombstones`].
#[derive(Debug)]
struct Ended {
    /// When it ended.
    at: Instant,
    /// The code for the answer to a late Open.
    why: ErrorCode,
}

impl Default for Tombstones {
    fn default() -> Self {
        Self(FairMap::new(MAX_TOMBSTONES))
    }
}

impl Tombstones {
    /// Returns the answer to a request for a recently ended session: the remote may have missed the first answer.
    pub(crate) fn refusal(&self, id: SessionId) -> Option<SessionError> {
        self.0.get(&id).map(|ended| SessionError::new(ended.why, "session has ended"))
    }

    /// Adds an ended session of a client; `why` is set if it did not end cleanly.
    fn add(&mut self, client: &Arc<str>, id: SessionId, why: Option<ErrorCode>, now: Instant) {
        // These two would make the opener search elsewhere, or look like success.
        let why = why
            .filter(|code| !matches!(code, ErrorCode::NodeNotConnected | ErrorCode::NoError))
            .unwrap_or(ErrorCode::UnknownSession);
        self.0.insert(client, id, Ended { at: now, why }, now);
    }

    pub(crate) fn forget_before(&mut self, before: Instant, now: Instant) {
        self.0.retain(|ended| ended.at > before, now);
    }
}

impl SessionTable {
    /// Records that a session has ended here, or will. Only sessions opened by another process can be requested again.
    pub(crate) fn add_ended(&self, id: SessionId, why: Option<ErrorCode>) {
        let Some(client) = self.clients.lock().remove(id) else { return };
        self.ended.lock().add(&client, id, why, Instant::now());
    }

    /// Records an unknown session that another process tried to resume. An Open that is still in flight, over a path
    /// that its opener has left, must not be served later.
    pub(crate) fn add_unknown(&self, id: SessionId, opener: Option<&Opener>) {
        let mut ended = self.ended.lock();
        if ended.refusal(id).is_none() {
            // The client name of an edge's sessions, so that both count as one source.
            let client = match opener {
                Some(Opener::Node(node)) => format!("node {node}"),
                Some(Opener::Server(_)) | None => String::new(),
            };
            ended.add(&client.into(), id, None, Instant::now());
        }
    }
}

/// Maximum number of ids of ended sessions.
const MAX_TOMBSTONES: usize = 8192;

// Periodic work: gives up old sessions and updates metrics.

impl SessionTable {
    /// Gives up sessions that have waited longer than the resume timeout for a path or for delivery. Must be called
    /// every few seconds.
    pub fn tick(&self, now: Instant) {
        self.metrics.sessions_relayed.set(i64::try_from(self.relays.len()).unwrap_or(i64::MAX));
        self.show_memory();
        if let Some(long_ago) = now.checked_sub(self.limits.grace.max(LATEST_OPEN)) {
            self.ended.lock().forget_before(long_ago, now);
        }
        self.forget_delivered();
        let Some(before) = now.checked_sub(self.limits.grace) else { return };
        let why = SessionError::new(ErrorCode::Cancelled, format!("no path for {:?}", self.limits.grace));
        for shard in &self.shards {
            let sessions: Vec<_> = shard.lock().values().cloned().collect();
            for session in sessions {
                if session.expire(before, &why) {
                    self.metrics.truncated.count("delivery_timeout");
                }
            }
        }
    }

    /// Gives up old sessions and releases unused buffers of `pool` every few seconds, until draining starts.
    ///
    /// Less often it returns free memory to the system, so that a process that was large for a while, or has just
    /// started, does not stay large.
    pub async fn upkeep(self: Arc<Self>, pool: Pool, drain: Drain) {
        let mut ticks = tokio::time::interval(UPKEEP);
        let mut trimmed = Instant::now();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                _ = ticks.tick() => {
                    self.tick(Instant::now());
                    pool.trim();
                    if trimmed.elapsed() >= TRIM_INTERVAL && self.freed.swap(false, Relaxed) {
                        trimmed = Instant::now();
                        tunnel_pages::trim_heap();
                    }
                }
            }
        }
    }

    /// Updates the metrics of each budget and its limit.
    pub(crate) fn show_memory(&self) {
        let budgets: [(_, &Budget); 4] = [
            ("reserved", &self.reserved),
            ("unacknowledged", &self.unacked),
            ("relayed", self.relays.budget()),
            ("unreserved", &self.unreserved),
        ];
        for (name, budget) in budgets {
            self.metrics.buffers.set(name, budget.used(), budget.limit());
        }
    }
}

/// Interval of the periodic work.
const UPKEEP: Duration = Duration::from_secs(5);
/// Minimum time between two calls of `trim_heap`, which takes some milliseconds in a process of hundreds of MiB.
const TRIM_INTERVAL: Duration = Duration::from_secs(20);
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
            assert_eq!(source(client), expected, "{client}");
        }
    }

    #[test]
    fn who_has_most_gives_way_to_who_has_less() {
        let mut clients = Clients::default();
        for id in 0..3 {
            clients.add(SessionId::from_bits(id), "ann");
        }
        assert!(clients.largest("ann").is_empty(), "a single client may have all");
        for id in 3..6 {
            assert_eq!(clients.largest("bob").len(), [3, 3, 0][id as usize - 3], "{id}");
            clients.add(SessionId::from_bits(id), "bob");
        }
        for id in 0..6 {
            clients.remove(SessionId::from_bits(id));
        }
        assert!(clients.of.is_empty() && clients.counts.is_empty());
    }
}

#[cfg(test)]
mod departed_tests {
    use std::future::poll_fn;

    use bytes::Bytes;

    use crate::sender::LinkSender;
    use crate::table::SessionLimits;
    use tunnel_base::metrics::Metrics;
    use tunnel_base::names::Instance;
    use tunnel_net::ByteStream as _;
    use tunnel_proto::frame::{Category, ErrorCode, Remote, SessionError, SessionFrame, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::hello::Dialect;
    use tunnel_proto::state::LinkId;

    use super::*;

    const SESSIONS: usize = 8;

    fn table(memory: usize) -> (Arc<SessionTable>, Arc<LinkSender>) {
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits { windows, memory, sessions: SESSIONS, grace: Duration::from_secs(60) };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        (table, LinkSender::new(LinkId(1), Remote::Edge("node1".parse().unwrap()), None, Dialect::NEWEST))
    }

    /// Returns a session that was aborted with undelivered bytes which the remote has no room for.
    async fn broken(table: &Arc<SessionTable>, link: &Arc<LinkSender>, bytes: usize) -> SessionId {
        let node = "node1".parse().unwrap();
        let opening =
            table.open(node, "node1:22".parse().unwrap(), Category::Ssh, "c".into(), "test").unwrap();
        opening.ask(link, None);
        let (id, opened) = (opening.id(), SessionFrame::Opened { limit: 0, epoch: 1, instance: None });
        let key = SessionKey { id, category: Category::Ssh, node: "node1".parse().unwrap() };
        table.on_frame(link, key, opened, Instant::now());
        let mut session = opening.into_session();
        let mut bytes = Bytes::from(vec![0; bytes]);
        poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        session.break_off(SessionError::new(ErrorCode::Cancelled, "broken"));
        id
    }

    fn knows(table: &SessionTable, id: SessionId) -> bool {
        table.session(id).is_some_and(|session| session.is_active())
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
            table.open(node, target, Category::Ssh, "c".into(), "test").is_err(),
            "last frames wait on the link"
        );
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
        assert_eq!(table.metrics.truncated.counted("delivery_timeout"), 1);
        assert!(table.departed.lock().len() <= 1);
    }
}

#[cfg(test)]
mod ended_tests {
    use super::*;

    #[test]
    fn who_missed_the_first_refusal_learns_its_code_from_the_next() {
        let (mut ended, id, now) = (Tombstones::default(), SessionId::from_bits(1), Instant::now());
        assert_eq!(ended.refusal(id), None);
        for (why, told) in [
            (Some(ErrorCode::Overloaded), ErrorCode::Overloaded),
            (Some(ErrorCode::TargetRefused), ErrorCode::TargetRefused),
            (Some(ErrorCode::NodeNotConnected), ErrorCode::UnknownSession),
            (Some(ErrorCode::NoError), ErrorCode::UnknownSession),
            (None, ErrorCode::UnknownSession),
        ] {
            ended.add(&"ann".into(), id, why, now);
            assert_eq!(ended.refusal(id).map(|refusal| refusal.code), Some(told), "{why:?}");
        }
        ended.forget_before(now, now);
        assert_eq!(ended.refusal(id), None);
    }

    #[test]
    fn who_ends_many_sessions_drives_out_none_of_another() {
        let (mut ended, now) = (Tombstones::default(), Instant::now());
        ended.add(&"ann".into(), SessionId::from_bits(0), Some(ErrorCode::Overloaded), now);
        for id in 1..=2 * MAX_TOMBSTONES as u128 {
            ended.add(&"node mallory".into(), SessionId::from_bits(id), None, now);
        }
        assert!(ended.refusal(SessionId::from_bits(0)).is_some());
        assert!(ended.refusal(SessionId::from_bits(1)).is_none());
    }
}
