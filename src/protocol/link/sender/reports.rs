//! When the peer is told what has come: Pongs and credits, together and a few times in a round trip.
//!
//! While bulk comes, each would be a packet of its own. The kernel's congestion window grows as long as such packets use
//! half of it, and from 16 packets on, with nine acknowledgements in a round trip, cubic ends its slow start for good if they
//! take longer than they did. They wait behind the bulk in the line's queue; so bulk of ours would later begin at the rate of
//! the little packets. Four in a round trip, and what goes out beside them, leave the window about where it begins, at ten.

use std::time::Duration;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfo;

/// When Pongs and credits go out on one link.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// When some did last.
    went: Option<Instant>,
    /// From then on others wait so long.
    apart: Duration,
    /// They do not wait: one of them is needed, or something else goes out, too.
    hurried: bool,
    /// When the kernel was read.
    read: Option<Instant>,
}

impl Reports {
    /// Whether they may go now.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        self.hurried || self.next().is_none_or(|next| next <= now)
    }

    /// From when on they may go, if nothing else does before.
    pub(super) fn next(&self) -> Option<Instant> {
        self.went.map(|went| went + self.apart)
    }

    /// One goes now, and the others with it.
    pub(super) fn go(&mut self, now: Instant) {
        self.went = Some(now);
        self.hurried = true;
    }

    /// They go with the next frame.
    pub(super) fn hurry(&mut self) {
        self.hurried = true;
    }

    /// All that may go has gone.
    pub(super) fn rest(&mut self) {
        self.hurried = false;
    }

    /// Whether the kernel should be read before [`Self::may_go`] is asked for one that waits. Never for those that are rare.
    pub(super) fn wants_reading(&self, now: Instant) -> bool {
        let known = self.read.is_some_and(|read| now - read < FRESH);
        !self.hurried && !known && self.went.is_some_and(|went| now - went < LONGEST_WAIT)
    }

    /// What the kernel knows just now.
    pub(super) fn read(&mut self, reading: &TcpInfo, now: Instant) {
        let least = reading.least_round_trip;
        self.read = Some(now);
        // As it is, with a queue; but not a long one of others.
        self.apart =
            if least < SHORT { Duration::ZERO } else { reading.round_trip.clamp(least, least * 2) / TIMES };
        self.apart = self.apart.min(LONGEST_WAIT);
    }
}

/// How often in a round trip they go.
const TIMES: u32 = 4;
/// On a shorter way they do not wait.
const SHORT: Duration = Duration::from_millis(5);
/// They wait no longer on any way.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
/// A reading of the round trip is renewed after so long.
const FRESH: Duration = Duration::from_millis(100);

#[cfg(test)]
pub(super) mod tests {
    use std::future::poll_fn;
    use std::sync::{Arc, Mutex};

    use futures_util::FutureExt as _;

    use super::*;
    use crate::names::{NodeName, SessionId};
    use crate::protocol::link::schedule::Turn;
    use crate::protocol::link::sender::LinkSender;
    use crate::protocol::link::source::{Control, FrameSource, LinkId, SendIntent, Sent};
    use crate::protocol::lock;
    use crate::protocol::wire::frame::{Category, FrameKind, SessionFrame, SessionKey};
    use crate::protocol::wire::hello::Dialect;
    use crate::protocol::wire::peer::Peer;

    /// A session that always has credit to send, and no data however often it is its turn.
    #[derive(Debug)]
    pub(in crate::protocol::link::sender) struct Speaker(pub(in crate::protocol::link::sender) SessionKey);

    impl FrameSource for Speaker {
        fn key(&self) -> &SessionKey {
            &self.0
        }

        fn is_closed(&self) -> bool {
            false
        }

        fn next_control(self: Arc<Self>, _: LinkId, _: Instant) -> (Option<SessionFrame>, bool) {
            (Some(SessionFrame::Credit { received: 1, limit: 2 }), false)
        }

        fn next_turn(
            self: Arc<Self>,
            _: LinkId,
            turn: &Turn<Arc<dyn FrameSource>>,
            _: usize,
            _: usize,
            _: Instant,
        ) -> Sent {
            Sent { frame: None, bytes: 0, standing: turn.standing(), backlog: None }
        }

        fn is_over(&self) -> bool {
            false
        }
    }

    /// A link of which the kernel says that it is so long.
    fn link(millis: u64) -> (Arc<LinkSender>, Arc<Speaker>) {
        let link = LinkSender::new(LinkId(1), Peer::Cloud(NodeName::none()), None, Dialect::NEWEST);
        let trip = Duration::from_millis(millis);
        link.lock().reports.read(&reading(trip), Instant::now());
        let key = SessionKey { id: SessionId::from_bits(1), category: Category::Ssh, node: NodeName::none() };
        (link, Arc::new(Speaker(key)))
    }

    fn reading(trip: Duration) -> TcpInfo {
        TcpInfo {
            round_trip: trip,
            least_round_trip: trip,
            variation: Duration::ZERO,
            pacing: 1_000_000,
            delivered: 0,
            in_flight: 0,
            unsent: 0,
            written: 0,
        }
    }

    fn wants(link: &LinkSender, reader: &Arc<Speaker>, control: Control) {
        link.enter(reader, &SendIntent { control: Some(control), data: None });
    }

    /// What goes out just now.
    fn pulled(link: &LinkSender) -> Vec<FrameKind> {
        let next = || poll_fn(|cx| link.poll_pull(cx, Instant::now())).now_or_never();
        std::iter::from_fn(next).flatten().map(|frame| frame.body).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_come_is_told_together_and_four_times_in_a_round_trip() {
        let ((link, reader), told) = (link(200), Mutex::new(Vec::new()));
        let began = Instant::now();
        let pulls = async {
            while let Some(frame) = poll_fn(|cx| link.poll_pull(cx, Instant::now())).await {
                lock(&told).push((began.elapsed().as_millis(), matches!(frame.body, FrameKind::Pong(_))));
            }
        };
        let comes = async {
            for number in 0..400 {
                link.pong(Some(number));
                wants(&link, &reader, Control::Credit);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::time::sleep(Duration::from_millis(55)).await;
        };
        tokio::select! {
            () = pulls => {}
            () = comes => {}
        }
        let told = lock(&told).clone();
        let mut bursts: Vec<u128> = told.iter().map(|(at, _)| *at).collect();
        bursts.dedup();
        assert!((38..=41).contains(&bursts.len()), "{} in ten round trips", bursts.len());
        let pongs = told.iter().filter(|(_, pong)| *pong).count();
        assert_eq!((pongs, told.len() - pongs), (bursts.len(), 400), "one answers all pings before it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_credit_that_is_needed_or_a_frame_of_another_kind_takes_the_others_along() {
        let (link, reader) = link(200);
        for control in [Control::Needed, Control::Answer] {
            wants(&link, &reader, Control::Credit);
            assert_eq!(pulled(&link).len(), 1);
            tokio::time::advance(Duration::from_millis(5)).await;
            link.pong(Some(1));
            wants(&link, &reader, Control::Credit);
            assert_eq!(pulled(&link), []);
            wants(&link, &reader, control);
            assert_eq!(pulled(&link).len(), 3);
            tokio::time::advance(Duration::from_millis(50)).await;
        }
        link.pong(Some(2));
        assert_eq!(pulled(&link).len(), 1);
        link.pong(Some(3));
        assert_eq!(pulled(&link), []);
        link.ping();
        assert!(matches!(pulled(&link)[..], [FrameKind::Ping(_), FrameKind::Pong(Some(3))]));
    }

    #[tokio::test(start_paused = true)]
    async fn on_a_short_way_or_an_unknown_one_nothing_waits() {
        let unknown = LinkSender::new(LinkId(2), Peer::Pod, None, Dialect::NEWEST);
        for link in [link(4).0, unknown] {
            for number in 0..10 {
                link.pong(Some(number));
                assert_eq!(pulled(&link), [FrameKind::Pong(Some(number))]);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_kernel_is_read_only_for_what_comes_often_and_a_queue_of_others_counts_little() {
        let (mut reports, trip) = (Reports::default(), Duration::from_millis(100));
        let mut now = Instant::now();
        for _ in 0..5 {
            assert!(!reports.wants_reading(now));
            reports.go(now);
            reports.rest();
            now += Duration::from_millis(500);
        }
        reports.go(now);
        reports.rest();
        assert!(reports.wants_reading(now));
        reports.read(&TcpInfo { round_trip: trip * 9, ..reading(trip) }, now);
        assert!(!reports.wants_reading(now));
        assert_eq!(reports.next(), Some(now + Duration::from_millis(50)));
        reports.read(&TcpInfo { round_trip: trip * 9, ..reading(trip * 9) }, now);
        assert_eq!(reports.next(), Some(now + LONGEST_WAIT));
    }
}
