//! Eviction when sessions or memory run out, and the ids of ended sessions.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::table::SessionTable;
use crate::table::session::{Expiry, SessionCore};
use tunnel_base::drain::Drain;
use tunnel_base::names::SessionId;
use tunnel_net::fair_map::FairMap;
use tunnel_net::pool::BufferPool;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{ErrorCode, Opener, SessionError, SessionFrame};
use tunnel_proto::state::SessionState;

/// Sessions by client, each client's longest idle first.
pub(crate) type ByClient = FairMap<Arc<str>, SessionId, ()>;

impl SessionTable {
    /// Resets the longest idle session of the client that has most sessions. Returns false if none has more than
    /// `newcomer`.
    ///
    /// How long a session was idle is recorded by [`Self::tick`], and here for the few sessions that are looked at. So
    /// the cost does not grow with the number of sessions.
    pub(crate) fn evict_idle_session(&self, newcomer: &Arc<str>) -> bool {
        let mut idlest: Option<(Instant, Arc<SessionCore>)> = None;
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

// Orphaned sessions with undelivered bytes: some are evicted when memory or sessions run out.

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

    /// Resets every session, sends the reason to all remote ends, and waits until the last frame of each session has been
    /// sent on its path; at most 2.1 s.
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
    pub(crate) fn add_broken_off(&self, session: &Arc<SessionCore>) {
        self.add_orphan(session);
        while self.unacked.is_exhausted() && self.evict_orphan("memory") {}
    }

    /// Adds a session that may be evicted. Evicts another one if there are too many.
    fn add_orphan(&self, session: &Arc<SessionCore>) {
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

    /// Evicts the oldest orphan of the client that has most of them; `reason` names what ran out. Returns false if there
    /// is none.
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
    pub(crate) fn add(&mut self, client: &Arc<str>, id: SessionId, why: Option<ErrorCode>, now: Instant) {
        // These two would make the opener search elsewhere, or look like success.
        let why = why
            .filter(|code| !matches!(code, ErrorCode::NodeNotConnected | ErrorCode::NoError))
            .unwrap_or(ErrorCode::UnknownSession);
        self.0.insert(client, id, Ended { at: now, why }, now);
    }

    pub(crate) fn forget_before(&mut self, before: Instant) {
        self.0.retain(|ended| ended.at > before);
    }
}

impl SessionTable {
    /// Returns the answer to a Resume of a session that has no end here, and records its id: an Open that is still in
    /// flight, over a path that its opener has left, must not be served later.
    pub(crate) fn failed_resume(&self, id: SessionId, opener: Option<&Opener>, epoch: u64) -> SessionFrame {
        let mut ended = self.ended.lock();
        if ended.refusal(id).is_none() {
            // The source of the opener's sessions, so that both count as one.
            let client = opener.map(Opener::source).unwrap_or_default();
            ended.add(&client.into(), id, None, Instant::now());
        }
        SessionFrame::Reset { epoch, refusal: unknown_session() }
    }
}

/// Returns the refusal of a session that a remote does not find here.
pub(crate) fn unknown_session() -> SessionError {
    SessionError::new(ErrorCode::UnknownSession, "session unknown to this process")
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
        if let Some(long_ago) = now.checked_sub(self.limits.resume_timeout.max(LATEST_OPEN)) {
            self.ended.lock().forget_before(long_ago);
        }
        let timeout = self.limits.resume_timeout;
        let why = SessionError::new(ErrorCode::Cancelled, format!("no path for {timeout:?}"));
        for session in self.all() {
            let expiry = session.expire(now, timeout, &why);
            if expiry == Expiry::Truncated {
                self.metrics.truncated.count("delivery_timeout");
            }
            if expiry == Expiry::Evictable {
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

#[cfg(test)]
mod departed_tests {
    use std::future::poll_fn;

    use bytes::Bytes;

    use crate::sender::LinkSender;
    use crate::table::SessionLimits;
    use tunnel_base::metrics::Metrics;
    use tunnel_base::names::Instance;
    use tunnel_net::ByteStream as _;
    use tunnel_proto::frame::{Category, Remote, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::state::LinkId;

    use super::*;

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
            table.open(node, target, Category::Ssh, "c".into(), "test").is_err(),
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

#[cfg(test)]
mod ended_tests {
    use super::*;

    #[test]
    fn who_missed_the_first_refusal_learns_its_code_from_the_next() {
        let (mut ended, id, now) = (Tombstones::default(), SessionId::from_bits(1), Instant::now());
        assert_eq!(ended.refusal(id), None);
        for (why, expected) in [
            (Some(ErrorCode::Overloaded), ErrorCode::Overloaded),
            (Some(ErrorCode::TargetRefused), ErrorCode::TargetRefused),
            (Some(ErrorCode::NodeNotConnected), ErrorCode::UnknownSession),
            (Some(ErrorCode::NoError), ErrorCode::UnknownSession),
            (None, ErrorCode::UnknownSession),
        ] {
            ended.add(&"ann".into(), id, why, now);
            assert_eq!(ended.refusal(id).map(|refusal| refusal.code), Some(expected), "{why:?}");
        }
        ended.forget_before(now);
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
