//! The periodic work of a table, and its shutdown: how old sessions end, and how all do.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::link::Link;
use crate::table::SessionTable;
use crate::table::session::ExpiryOutcome;
use tunnel_base::drain::Drain;
use tunnel_net::pool::BufferPool;
use tunnel_proto::budget::Budget;
use tunnel_proto::frame::{SessionError, SessionFrame};
use tunnel_proto::state::{Phase, SessionState};

impl SessionTable {
    /// Gives up sessions that have waited longer than the resume timeout for a path or for delivery, and takes memory
    /// back from idle ones. Must be called every few seconds.
    pub fn tick(&self, now: Instant) {
        self.metrics.sessions_relayed.set(i64::try_from(self.relays.len()).unwrap_or(i64::MAX));
        self.show_memory();
        if let Some(long_ago) = now.checked_sub(self.limits.resume_timeout.max(LATEST_OPEN)) {
            self.ended.lock().forget_before(long_ago);
        }
        let is_linked = self.metrics.links.all() > 0;
        let mut parked = Vec::new();
        for session in self.all() {
            let expiry = session.expire(now, self.limits.resume_timeout, is_linked);
            if expiry == ExpiryOutcome::Truncated {
                self.metrics.truncated.count("delivery_timeout");
            }
            if expiry == ExpiryOutcome::Evictable {
                self.add_orphan(&session);
            } else {
                self.orphans.lock().remove(&session.key.id);
            }
            let last = session.last_frame();
            self.clients.lock().mark(&session.key.id, false, last);
            parked.extend(session.long_parked(now));
        }
        self.bound_parked(parked);
    }

    /// Returns how long each session without a path has waited for one, and the time after which it ends.
    pub fn waits(&self) -> impl Iterator<Item = (Duration, Duration)> {
        let usual = self.limits.resume_timeout;
        let wait =
            move |state: &SessionState| Some((state.path_lost_at()?.elapsed(), state.resume_timeout(usual)));
        self.all().into_iter().filter_map(move |session| session.read(wait))
    }

    /// Names to a server the sessions of users that wait for a path here: it judges whether they may still be resumed.
    /// Those that have just lost theirs may depend on what that server has not read yet.
    pub fn report_parked(&self, link: &Link) {
        let is_parked = |state: &SessionState| {
            state.phase() == Phase::Parked && state.path_lost_at().is_some_and(|at| at.elapsed() >= READ_TIME)
        };
        for session in self.all().iter().filter(|session| session.read(is_parked)) {
            if let Some((device, target)) = session.origin.device()
                && link.abilities.resumes
                && !link.is_answer_queue_full(&session.client)
            {
                link.reply(&session.key, SessionFrame::Parked(Box::new((device.clone(), target.clone()))));
            }
        }
    }

    /// Gives up old sessions and releases unused buffers of `pool` every few seconds, until draining starts. Takes memory
    /// back from silent sessions when a window cannot grow.
    pub async fn upkeep(self: Arc<Self>, pool: BufferPool, drain: Drain) {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            tokio::select! {
                () = drain.draining() => return,
                _ = ticks.tick() => {
                    self.tick(Instant::now());
                    pool.trim();
                }
                () = self.reserved.wanted.notified() => {
                    let now = Instant::now();
                    for session in self.all() {
                        session.lock().state.recv.release_silent(now);
                    }
                    sleep(RELEASE_PAUSE).await;
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

/// Time after which every server has read a right.
const READ_TIME: Duration = Duration::from_secs(2);
/// Interval of the periodic work.
const UPKEEP: Duration = Duration::from_secs(5);
/// Pause after memory was taken back: windows that cannot grow ask all the time.
const RELEASE_PAUSE: Duration = Duration::from_millis(250);
/// No opener retries for longer than this, so an ended id is kept at least this long.
const LATEST_OPEN: Duration = Duration::from_secs(60);
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
    use std::task::{Context, Poll, Waker};

    use bytes::Bytes;
    use tracing::Span;

    use super::*;
    use crate::table::SessionLimits;
    use crate::table::handles::Session;
    use tunnel_base::metrics::Metrics;
    use tunnel_net::ChunkStream as _;
    use tunnel_proto::frame::{FrameKind, Remote, SessionCategory, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::names::{Instance, NodeName};
    use tunnel_proto::state::LinkId;

    /// A session whose remote always has more to send, over a link with [`RTT`].
    struct Download {
        session: Session,
        key: SessionKey,
        link: Arc<Link>,
        sent: u64,
        limit: u64,
    }

    const RTT: Duration = Duration::from_millis(100);

    impl Download {
        fn open(table: &Arc<SessionTable>) -> Self {
            let link = Link::new(LinkId(1), Remote::Edge("node1".parse().unwrap()), Some(Instance::random()));
            let category = SessionCategory::Ssh;
            let node: NodeName = "node1".parse().unwrap();
            let target = "node1:22".parse().unwrap();
            let opening = table.open(node.clone(), target, category, "client".into(), "test").unwrap();
            let key = SessionKey { id: opening.id(), category, node };
            opening.ask(&link, None);
            let limit = Self::newest_limit(&link).unwrap();
            let opened = SessionFrame::opened(0, 1);
            table.on_frame(&link, key.clone(), opened, Instant::now());
            Self { session: opening.into_session(), key, link, sent: 0, limit }
        }

        /// Returns the limit of the last frame that waits on the link, if any does.
        fn newest_limit(link: &Link) -> Option<u64> {
            let mut newest = None;
            let mut cx = Context::from_waker(Waker::noop());
            while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
                if let FrameKind::Session(_, _, frame) = frame.body
                    && let SessionFrame::Open { limit, .. } | SessionFrame::Credit { limit, .. } = frame
                {
                    newest = Some(limit);
                }
            }
            newest
        }

        /// Transfers this many bytes, as fast as the window allows. Returns the number of RTTs.
        async fn transfer(&mut self, table: &Arc<SessionTable>, bytes: u64) -> u32 {
            let until = self.sent + bytes;
            let mut trips = 0;
            while self.sent < until {
                while self.sent < self.limit.min(until) {
                    let len = (self.limit.min(until) - self.sent).min(64 << 10);
                    let data = SessionFrame::Data(Bytes::from(vec![0; len as usize]));
                    table.on_frame(&self.link, self.key.clone(), data, Instant::now());
                    poll_fn(|cx| self.session.poll_read_chunk(cx)).await.unwrap();
                    self.sent += len;
                }
                self.limit = Self::newest_limit(&self.link).unwrap_or(self.limit);
                sleep(RTT).await;
                assert!(trips < 1000, "{} of {until} bytes", self.sent);
                trips += 1;
            }
            trips
        }
    }

    /// Returns the table of an edge, which does its periodic work.
    fn table(drain: &Drain) -> Arc<SessionTable> {
        let windows = WindowLimits { start: 32 << 10, max: 4 << 20 };
        let limits = SessionLimits {
            windows,
            memory: 12 << 20,
            sessions: 100,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::edge());
        drain.spawn(Span::none(), table.clone().upkeep(BufferPool::new(), drain.clone()));
        table
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_that_were_fast_a_moment_ago_do_not_slow_the_next_one() {
        let drain = Drain::new();
        let [empty, full] = [0; 2].map(|_| table(&drain));
        let alone = Download::open(&empty).transfer(&empty, 24 << 20).await;
        let mut idle = Vec::new();
        for _ in 0..32 {
            let mut download = Download::open(&full);
            download.transfer(&full, 8 << 20).await;
            idle.push(download);
        }
        let next = Download::open(&full).transfer(&full, 24 << 20).await;
        assert!(next * 10 <= alone * 11, "{next} RTTs next to {}, {alone} alone", idle.len());
    }
}
