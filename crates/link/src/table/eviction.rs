//! Eviction: which sessions end when sessions or memory run out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::time::Instant;

use crate::table::SessionTable;
use crate::table::session::{LongParked, SessionOrigin, SharedSession};
use tunnel_base::policy::source_of;
use tunnel_net::fair_map::FairMap;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError, SessionFrame};
use tunnel_proto::names::SessionId;
use tunnel_proto::state::Phase;

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
            self.clients.lock().mark(&id, false, last);
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

    /// Resets sessions of the client that keeps most unacknowledged bytes, the largest first, until the budget for them
    /// has room again.
    ///
    /// It looks at all sessions. That is rare: what the client kept must be written again before the budget is overdrawn.
    pub(super) fn evict_largest(&self) {
        let mut by_client: HashMap<Arc<str>, Vec<(usize, Arc<SharedSession>)>> = HashMap::new();
        for session in self.all() {
            let kept = session.read(|state| state.send.memory());
            by_client.entry(session.client.clone()).or_default().push((kept, session));
        }
        let sum = |sessions: &Vec<(usize, _)>| sessions.iter().map(|(kept, _)| kept).sum::<usize>();
        let Some(mut sessions) = by_client.into_values().max_by_key(sum) else { return };
        sessions.sort_by_key(|(kept, _)| *kept);
        while self.unacked.is_exhausted()
            && let Some((kept, session)) = sessions.pop()
            && kept > 0
        {
            session.reset_unread(SessionError::new(
                ErrorCode::Overloaded,
                "no memory left here: its client has most bytes that the other end has not confirmed",
            ));
            self.metrics.truncated.count("memory");
        }
    }

    /// Adds a session whose owner has left before its end. It may be evicted at once.
    pub(crate) fn add_broken_off(&self, session: &Arc<SharedSession>) {
        self.add_orphan(session);
        while self.unacked.is_exhausted() && self.evict_orphan("memory") {}
    }

    /// Adds a session that may be evicted. Evicts another one if there are too many.
    pub(super) fn add_orphan(&self, session: &Arc<SharedSession>) {
        let id = session.key.id;
        let now = Instant::now();
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

    /// Ends the sessions beyond what may wait for a path for long. Each device keeps its logins, and then its newest
    /// sessions: who has restarted her machine cannot resume the older ones. Users have equal shares. Of the bytes of all,
    /// the largest sessions give up theirs.
    pub(super) fn bound_parked(&self, mut parked: Vec<LongParked>) {
        let end = |one: &LongParked, why: &str| {
            one.session.reset_unread(SessionError::new(ErrorCode::Overloaded, why));
            false
        };
        // Each with its place among those of its device, and of its user; logins, which have the longest time, come first.
        // The opener's end counts none.
        parked.sort_by_key(|one| Reverse((one.timeout, one.lost)));
        let mut counts: HashMap<String, usize> = HashMap::new();
        let mut place = |of: String| *counts.entry(of).and_modify(|count| *count += 1).or_insert(1);
        parked.retain(|one| {
            let at = one.device.as_ref().map_or(0, |device| place(device.to_string()));
            at <= MAX_PARKED_OF_DEVICE
                || end(one, "its device has 8 other sessions at this node that wait for a path for long")
        });
        parked.sort_by_cached_key(|one| {
            let at = one.device.as_ref().map_or(0, |device| place(device.user.to_string()));
            (at, Reverse(one.lost))
        });
        let mut counted = 0;
        parked.retain(|one| {
            counted += usize::from(one.device.is_some());
            counted <= MAX_PARKED
                || end(one, "32 other sessions at this node wait for a path for long, and its user has most")
        });
        parked.sort_by_key(|one| one.kept);
        let mut sum = 0;
        for one in parked {
            sum += one.kept;
            if sum > self.limits.memory / 4 {
                self.metrics.truncated.count("memory");
                end(
                    &one,
                    "of the sessions that wait for a path for long it keeps most, and their memory is used up",
                );
            }
        }
    }

    /// Ends the sessions without a path that the same device has opened before the last boot of the same machine: nothing
    /// there can resume them.
    pub(super) fn end_earlier_boots(&self, of: &SessionOrigin) {
        let SessionOrigin::Remote { opener: device, boot: Some(boot), .. } = of else { return };
        for session in self.all() {
            if let SessionOrigin::Remote { opener, boot: Some(earlier), .. } = &session.origin
                && opener == device
                && earlier >> 64 == boot >> 64
                && earlier != boot
                && session.read(|state| state.phase() == Phase::Parked)
            {
                session.reset_unread(SessionError::new(ErrorCode::Cancelled, "its device was restarted"));
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

/// Maximum number of sessions of one device that are without a path for long at one node, and of all.
const MAX_PARKED_OF_DEVICE: usize = 8;
const MAX_PARKED: usize = 32;
/// Maximum number of sessions that are looked at for one to evict.
const MAX_CANDIDATES: usize = 8;
/// Maximum number of orphans that may be evicted, at about 300 bytes each.
pub(crate) const MAX_ORPHANS: usize = 20_000;

/// Returns the source of a client as an Open names it: its user, whichever of her devices it is, or its address, with
/// one source for each /64 of IPv6.
pub(crate) fn source(client: &str) -> Arc<str> {
    if let Some((user, _)) = client.rsplit_once('@') {
        return user.split_once('/').map_or(user, |(user, _device)| user).into();
    }
    match client.parse::<SocketAddr>() {
        Ok(at) => source_of(at.ip()).to_string().into(),
        Err(_) => client.into(),
    }
}

/// Returns the source at whose cost the answer to a frame is: the edge or user that sent it, for she could name anyone.
/// Of a server's frame it is the client that an Open names, or the opener of a Resume.
pub(crate) fn client_of(peer: &Remote, frame: &SessionFrame) -> Arc<str> {
    match (peer.requester(), frame) {
        (Some(requester), _) => requester.into(),
        (None, SessionFrame::Open { client, .. }) => source(client),
        (None, SessionFrame::Resume { opener: Some(opener), .. }) => opener.source().into(),
        _ => Arc::default(),
    }
}

#[cfg(test)]
mod parked_tests;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use bytes::Bytes;

    use crate::link::Link;
    use crate::table::SessionLimits;
    use crate::table::handles::Session;
    use tunnel_base::metrics::Metrics;
    use tunnel_net::ChunkStream as _;
    use tunnel_proto::frame::{Remote, SessionCategory, SessionFrame, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::names::Instance;
    use tunnel_proto::state::{LinkId, SessionState};

    use super::*;

    const SESSIONS: usize = 8;

    fn table(memory: usize) -> (Arc<SessionTable>, Arc<Link>) {
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits {
            windows,
            memory,
            sessions: SESSIONS,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        (table, Link::new(LinkId(1), Remote::Edge("node1".parse().unwrap()), Some(Instance::random())))
    }

    /// Returns a session that was aborted with undelivered bytes which the remote has no room for.
    async fn broken(table: &Arc<SessionTable>, link: &Arc<Link>, bytes: usize) -> SessionId {
        let session = open(table, link, "c", bytes).await;
        let id = session.id();
        session.break_off(SessionError::new(ErrorCode::Cancelled, "broken"));
        id
    }

    /// Returns a session whose client has written bytes which the remote has no room for.
    async fn open(table: &Arc<SessionTable>, link: &Arc<Link>, client: &str, bytes: usize) -> Session {
        let node = "node1".parse().unwrap();
        let opening = table
            .open(node, "node1:22".parse().unwrap(), SessionCategory::Ssh, client.into(), "test")
            .unwrap();
        opening.ask(link, None);
        let id = opening.id();
        let opened = SessionFrame::opened(0, 1);
        let key = SessionKey { id, category: SessionCategory::Ssh, node: "node1".parse().unwrap() };
        table.on_frame(link, key, opened, Instant::now());
        let mut session = opening.into_session();
        let mut bytes = Bytes::from(vec![0; bytes]);
        poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        session
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
    async fn the_client_with_most_unacknowledged_bytes_loses_its_largest_session_when_memory_runs_out() {
        let (table, link) = table(100_000);
        let mut sessions = Vec::new();
        for (client, bytes) in
            [("few", 60_000), ("most", 20_000), ("most", 25_000), ("few", 1), ("most", 24_000)]
        {
            sessions.push(open(&table, &link, client, bytes).await);
        }
        let alive: Vec<bool> = sessions.iter().map(|session| knows(&table, session.id())).collect();
        assert_eq!(alive, [true, true, false, true, false]);
        assert!(table.memory().1 < 100_000);
        assert_eq!(table.metrics.truncated.counted("memory"), 2);
        let error = poll_fn(|cx| sessions[2].poll_read_chunk(cx)).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory);
    }

    #[tokio::test]
    async fn a_session_that_keeps_nothing_is_not_reset_for_memory() {
        let (table, link) = table(100_000);
        let mut sessions = Vec::new();
        for (client, bytes) in
            [("a", 26_001), ("a", 0), ("b", 26_000), ("c", 26_000), ("d", 26_000), ("e", 26_000)]
        {
            sessions.push(open(&table, &link, client, bytes).await);
        }
        let alive: Vec<bool> = sessions.iter().map(|session| knows(&table, session.id())).collect();
        assert_eq!(alive, [false, true, true, true, true, true]);
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
