//! Classifies a link's sessions as bulk or interactive. If there is an interactive link next to it, each session is
//! moved to where it belongs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::link::Link;
use crate::table::SessionTable;
use crate::table::session::SharedSession;
use tunnel_proto::names::SessionId;

/// The state of the sessions of a link and its interactive link, kept from one sample to the next.
#[derive(Debug, Default)]
pub struct TrafficClassifier {
    sessions: HashMap<SessionId, SessionTraffic>,
    /// Bytes that all sessions have moved so far in this sample.
    here: u64,
    /// The most bytes that they have recently moved in a sample.
    all: u64,
    /// Time of the last sample.
    sampled: Option<Instant>,
}

/// The result of one sample of a link's sessions: how many are bulk, and which left the link.
#[derive(Debug, Default)]
pub struct ClassificationSummary {
    /// Number of sessions that move bulk.
    pub bulk: usize,
    /// Number of sessions that do not, among those sampled for long enough and not starting to.
    pub interactive: usize,
    /// Sessions that were opened here and have left their link for the other one.
    pub moved: Vec<SessionId>,
}

/// The recent traffic of one session, from which it is classified as bulk or interactive.
#[derive(Debug, Default)]
struct SessionTraffic {
    /// Bytes in both directions at the last sample.
    moved: u64,
    bulk: bool,
    /// Recent bytes beyond those of busy samples. Bursts, such as one window per RTT, add up here.
    ahead: u64,
    /// Consecutive samples that contradict `bulk`.
    against: u32,
    /// Number of samples so far.
    looks: u32,
    /// Samples since it was last seen.
    unseen: u32,
}

impl SessionTraffic {
    /// Takes the total bytes moved; the session is busy if it moves more than `busy_from` in a sample. Returns the
    /// bytes of this sample.
    fn sample(&mut self, moved: u64, busy_from: u64) -> u64 {
        // The count of a relayed session restarts with each path.
        let came = moved.checked_sub(self.moved).unwrap_or(moved);
        let came = if self.looks == 0 { 0 } else { came };
        self.moved = moved;
        self.looks = self.looks.saturating_add(1);
        self.unseen = 0;
        let busy = came > busy_from;
        let ahead = self.ahead.saturating_add(came);
        self.ahead = ahead.saturating_sub(busy_from);
        self.against = if busy == self.bulk { 0 } else { self.against + 1 };
        let enough = if busy { BULK_AFTER } else { INTERACTIVE_AFTER };
        if self.against >= enough || busy && ahead >= BULK_AHEAD * busy_from {
            (self.bulk, self.ahead, self.against) = (busy, 0, 0);
        }
        came
    }

    /// Returns true if the session is interactive on a path with that RTT: bulk would have started within another RTT,
    /// and no started burst may yet become bulk.
    fn is_interactive(&self, rtt: Duration) -> bool {
        let begins = rtt.as_millis() / TrafficClassifier::SAMPLE_INTERVAL.as_millis();
        !self.bulk && self.ahead == 0 && u128::from(self.looks) > u128::from(KNOWN_AFTER) + begins
    }
}

impl TrafficClassifier {
    /// Interval of samples.
    pub const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

    fn sample(&mut self, id: SessionId, moved: u64) -> &SessionTraffic {
        let busy_from = self.busy_from();
        let traffic = self.sessions.entry(id).or_default();
        self.here = self.here.saturating_add(traffic.sample(moved, busy_from));
        traffic
    }

    /// Returns the number of bytes per sample above which a session is busy. If many share a slow line, each moves
    /// little.
    fn busy_from(&self) -> u64 {
        if self.all < 2 * BUSY { BUSY } else { (self.all / 16).clamp(BUSY / 4, BUSY) }
    }

    /// Ends the sample. Forgets sessions not seen for a while; a session without a path is not seen until it has a new
    /// one.
    fn end_sample(&mut self, busy: &Link) {
        self.all = std::mem::take(&mut self.here).max(self.all / 8 * 7);
        self.sessions.retain(|id, traffic| {
            traffic.unseen += 1;
            let stays = traffic.unseen <= FORGOTTEN_AFTER;
            if !stays {
                busy.set_link_for(*id, false);
            }
            stays
        });
    }
}

impl SessionTable {
    /// Samples the sessions of that link and its interactive link; must be called each
    /// [`TrafficClassifier::SAMPLE_INTERVAL`].
    ///
    /// If there is an interactive link, interactive sessions are moved there and bulk is moved here. Sessions opened
    /// here leave their path; relayed ones are released, so that their opener resumes them. Those opened at the remote
    /// end are moved by the remote end.
    pub fn classify(&self, busy: &Arc<Link>, classifier: &mut TrafficClassifier) -> ClassificationSummary {
        let interactive = busy.interactive().filter(|link| !link.is_closed());
        let rtt = busy.min_rtt().unwrap_or_default();
        let before = classifier.sampled.replace(Instant::now());
        let mut result = ClassificationSummary::default();
        let mut misplaced = Vec::new();
        for link in [Some(busy), interactive.as_ref()].into_iter().flatten() {
            for session in self.sample(link) {
                let traffic = classifier.sample(session.id, session.moved);
                let is_bulk = traffic.bulk;
                let is_interactive = traffic.is_interactive(rtt);
                result.bulk += usize::from(is_bulk);
                result.interactive += usize::from(is_interactive);
                let leaves = if link.id == busy.id { is_interactive } else { is_bulk };
                if leaves && session.is_movable {
                    misplaced.push((session, link.clone()));
                }
            }
        }
        classifier.end_sample(busy);
        // Between the end of the busy link and the next one, only the interactive link is left, so nothing is moved.
        let Some(interactive) = interactive.filter(|_| !busy.is_closed()) else { return result };
        let leads_to = |link: &Link| if link.id == busy.id { &interactive } else { busy };
        let movable = misplaced.into_iter().filter(|(_, link)| may_enter(leads_to(link), before));
        for (session, link) in movable.take(MAX_MOVES_PER_SAMPLE) {
            busy.set_link_for(session.id, link.id == busy.id);
            match session.end {
                Some(end) if end.leave(&link) => result.moved.push(session.id),
                Some(_) => {}
                None => self.relays.path_lost(session.id, None),
            }
        }
        result
    }

    /// Returns the sessions that run on that link, with the bytes that they have moved.
    fn sample(&self, link: &Link) -> Vec<SampledSession> {
        let own = self.on_link(link, None).into_iter().filter_map(|end| {
            let (is_movable, moved) = end.traffic(link.id)?;
            Some(SampledSession { id: end.key.id, moved, is_movable, end: Some(end) })
        });
        let relayed = link.relayed(None).into_iter().filter_map(|id| {
            let moved = self.relays.passed(id, link.id)?;
            Some(SampledSession { id, moved, is_movable: true, end: None })
        });
        own.chain(relayed).collect()
    }
}

/// A session on a link at one sample.
struct SampledSession {
    id: SessionId,
    /// Bytes in both directions.
    moved: u64,
    /// Whether this process moves it: it was opened here, or is relayed.
    is_movable: bool,
    /// Its end here; `None` if it is relayed.
    end: Option<Arc<SharedSession>>,
}

/// Returns true if a session may be moved to that link: it has answered since the last sample.
///
/// Otherwise pings the link, as it may be dead, and the session stays until a later sample.
fn may_enter(link: &Link, since: Option<Instant>) -> bool {
    let Some(since) = since else { return false };
    let lives = link.has_answered_since(since);
    if !lives && link.unanswered().is_none() {
        link.probe();
    }
    lives
}

/// A session that moves more than these bytes from one sample to the next is busy in any case: 32 KiB/s.
const BUSY: u64 = 8 * 1024;
/// Beyond that, the bytes of this number of busy samples indicate bulk at once.
const BULK_AHEAD: u64 = 16;
/// Consecutive busy samples before a session counts as bulk, and consecutive quiet ones before it no longer does.
const BULK_AFTER: u32 = 3;
const INTERACTIVE_AFTER: u32 = 16;
/// Samples after which a session may count as interactive: bulk has shown itself by then.
const KNOWN_AFTER: u32 = 4;
/// Samples after which a session that is not seen is forgotten.
const FORGOTTEN_AFTER: u32 = 40;
/// Maximum number of sessions moved per sample.
const MAX_MOVES_PER_SAMPLE: usize = 100;

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use tokio::time::advance;

    use crate::table::SessionLimits;
    use tunnel_base::metrics::Metrics;
    use tunnel_proto::frame::{FrameKind, Remote, SessionCategory, SessionFrame, SessionKey};
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::names::{Instance, NodeName};
    use tunnel_proto::state::LinkId;

    use super::*;

    /// Makes the remote answer every ping sent so far. Returns whether there was any.
    fn answers(link: &Link) -> bool {
        let (mut cx, now, mut pinged) = (Context::from_waker(Waker::noop()), Instant::now(), false);
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, now) {
            if let FrameKind::Ping(Some(number)) = frame.body {
                link.handle_pong(number, now);
                pinged = true;
            }
        }
        pinged
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_moved_only_to_a_link_that_has_answered_since_the_last_look() {
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits {
            windows,
            memory: 1 << 20,
            sessions: 10,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let table = SessionTable::new(Instance::from_bits(1), limits, Metrics::server("", ""));
        let node: NodeName = "node1".parse().unwrap();
        let [busy, interactive] = [1, 2]
            .map(|number| Link::new(LinkId(number), Remote::Edge(node.clone()), Some(Instance::random())));
        let opening = table
            .open(node.clone(), "node1:22".parse().unwrap(), SessionCategory::Ssh, "me".into(), "test")
            .unwrap();
        opening.ask(&busy, None);
        let key = SessionKey { id: opening.id(), category: SessionCategory::Ssh, node };
        let opened = SessionFrame::opened(1000, 1);
        table.on_frame(&busy, key, opened, Instant::now());
        let _session = opening.into_session();
        busy.set_interactive(Some(interactive.clone()));
        interactive.ping();
        assert!(answers(&interactive));
        let mut classifier = TrafficClassifier::default();
        let mut has_moved = async |samples: u32| {
            for _ in 0..samples {
                table.classify(&busy, &mut classifier);
                advance(TrafficClassifier::SAMPLE_INTERVAL).await;
            }
            busy.sessions() == 0
        };
        assert!(!has_moved(20).await, "the link has not answered since");
        assert!(answers(&interactive), "the link was pinged");
        assert!(has_moved(1).await);
    }

    /// Samples a session `looks` times, with `each` bytes per sample.
    fn after(traffic: &mut SessionTraffic, looks: u32, each: u64) -> (bool, bool) {
        for _ in 0..looks {
            let moved = traffic.moved + each;
            traffic.sample(moved, BUSY);
        }
        (traffic.bulk, traffic.is_interactive(Duration::ZERO))
    }

    #[test]
    fn a_session_is_bulk_once_it_stays_busy_and_interactive_once_it_stays_quiet() {
        let mut traffic = SessionTraffic { moved: 1 << 40, ..SessionTraffic::default() };
        assert_eq!(after(&mut traffic, KNOWN_AFTER, 100), (false, false), "not known yet");
        assert_eq!(after(&mut traffic, 1, 100), (false, true));
        assert_eq!(
            after(&mut traffic, BULK_AFTER - 1, BUSY + 1),
            (false, false),
            "a burst, or the start of bulk"
        );
        assert_eq!(after(&mut traffic, 1, 100), (false, true));
        assert_eq!(after(&mut traffic, BULK_AFTER, BUSY + 1), (true, false));
        assert_eq!(after(&mut traffic, INTERACTIVE_AFTER - 1, 0), (true, false), "bulk may pause");
        assert_eq!(after(&mut traffic, 1, 0), (false, true));
        assert_eq!(after(&mut traffic, 1, BULK_AHEAD * BUSY), (true, false));
    }

    #[test]
    fn bulk_that_comes_in_bursts_is_bulk_and_what_is_drawn_on_a_screen_now_and_then_is_not() {
        let bursts = |bytes: u64, every: u32| {
            let mut traffic = SessionTraffic::default();
            (0..400).position(|look| after(&mut traffic, 1, if look % every == 0 { bytes } else { 0 }).0)
        };
        // A window of 64 KiB on a path of 600 ms.
        assert!(bursts(64 << 10, 3).is_some_and(|looks| looks < 10));
        // A window of 32 KiB, started late, does not count as interactive before.
        let mut traffic = SessionTraffic::default();
        let interactive = (0..100u32).any(|look| {
            let came = if look >= 5 && look % 3 == 2 { 32 << 10 } else { 0 };
            !after(&mut traffic, 1, came).0 && traffic.is_interactive(Duration::from_millis(600))
        });
        assert!(!interactive && traffic.bulk);
        assert_eq!(bursts(100 << 10, 16), None);
        assert_eq!(bursts(4 << 10, 1), None);
    }

    #[test]
    fn slow_bulk_of_many_is_bulk_and_what_one_terminal_says_is_not() {
        let busy = Link::new(LinkId(1), Remote::Peer, Some(Instance::random()));
        let bulk = |sessions: u128, each: u64, every: u64| {
            let mut classifier = TrafficClassifier::default();
            for look in 0..16 {
                for n in 0..sessions {
                    classifier.sample(SessionId::from_bits(n), (look + n as u64) / every * each);
                }
                classifier.end_sample(&busy);
            }
            classifier.sessions.values().filter(|traffic| traffic.bulk).count()
        };
        assert_eq!(bulk(4, 5 << 10, 1), 4);
        // Each session in its turn gets 16 KiB.
        assert_eq!(bulk(4, 16 << 10, 3), 4);
        assert_eq!((bulk(1, 5 << 10, 1), bulk(8, 1 << 10, 1)), (0, 0));
    }

    #[test]
    fn the_longer_the_way_the_longer_bulk_has_to_begin() {
        let looks = |millis| {
            let mut traffic = SessionTraffic::default();
            let known = |_: &u32| {
                traffic.sample(0, BUSY);
                traffic.is_interactive(Duration::from_millis(millis))
            };
            (1..100).find(known)
        };
        assert_eq!([0, 200, 600, 2000].map(looks), [5, 5, 7, 13].map(Some));
    }

    #[test]
    fn what_moved_before_the_first_look_counts_for_nothing_and_a_new_path_counts_again() {
        let mut traffic = SessionTraffic::default();
        assert_eq!(
            [1 << 30, 1 << 30, 100].map(|moved| traffic.sample(moved, BUSY)),
            [0, 0, 100],
            "the count restarts"
        );
        assert_eq!((traffic.bulk, traffic.against), (false, 0));
    }
}
