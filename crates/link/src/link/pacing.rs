//! When a link sends bulk: the congestion control, fed with pings and the kernel's readings.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::congestion::CongestionController;
use crate::link::ack_pacing::AckPacing;
use crate::link::{Link, LinkState};
use crate::lock::MutexGuard;
use tunnel_net::tcp_info::{TcpInfo, TcpInfoReader};

/// Decides when one link sends bulk, and acknowledgements.
#[derive(Debug)]
pub(crate) struct Pacing {
    /// The congestion control, which holds bulk back. `None` on a plain link, because a plain remote must not be pinged
    /// often.
    pub(crate) bulk: Option<CongestionController>,
    pub(crate) acks: AckPacing,
    /// Reads the kernel for both; `None` if that is not possible.
    tcp_info: Option<TcpInfoReader>,
    /// When to check again whether one of them may be sent.
    look: Option<Pin<Box<Sleep>>>,
}

impl Pacing {
    /// Creates the state of a new link; `paced` if the remote answers pings.
    pub(crate) fn new(paced: bool) -> Self {
        let bulk = paced.then(CongestionController::new);
        Self { bulk, acks: AckPacing::default(), tcp_info: None, look: None }
    }

    /// Makes bulk leave a little of the line free while there is an interactive link.
    pub(crate) fn set_shared(&mut self, shared: bool) {
        self.bulk.iter_mut().for_each(|bulk| bulk.set_shared(shared));
    }

    /// Returns the reader to call, without the queue's lock, before the next decision. Its result goes to
    /// [`Self::read`]. The arguments tell whether any acknowledgements, and any sessions, wait.
    pub(crate) fn reader(&self, acks_wait: bool, sessions_wait: bool, now: Instant) -> Option<TcpInfoReader> {
        let bulk = self.bulk.as_ref()?;
        let is_due = acks_wait && self.acks.wants_reading(now) || sessions_wait && bulk.wants_reading(now);
        if is_due { self.tcp_info.clone() } else { None }
    }

    /// Takes a reading of the kernel. `None` means that the kernel provides none, now or later.
    pub(crate) fn read(&mut self, reading: Option<TcpInfo>, sessions_wait: bool, now: Instant) {
        match (&mut self.bulk, reading) {
            (Some(bulk), Some(reading)) => {
                self.acks.read(&reading, now);
                if sessions_wait && bulk.wants_reading(now) {
                    bulk.read(reading, now);
                }
            }
            (Some(bulk), None) => {
                bulk.kernel = None;
                self.tcp_info = None;
            }
            (None, _) => {}
        }
    }

    /// Called when nothing can be sent now. Wakes the caller when acknowledgements that wait, or bulk that is `capped`,
    /// may be sent.
    pub(crate) fn look_later(&mut self, cx: &mut Context<'_>, now: Instant, acks_wait: bool, capped: bool) {
        let acks = if acks_wait { self.acks.next() } else { None };
        self.acks.on_flushed();
        let bulk = if capped { self.bulk.as_mut().and_then(CongestionController::retry_after) } else { None };
        let Some(at) = bulk.map(|after| now + after).into_iter().chain(acks).min() else { return };
        let look = self.look.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if look.deadline() <= now || look.deadline() > at {
            look.as_mut().reset(at);
        }
        if look.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }
}

impl Link {
    /// Sets the reader for the kernel's TCP state of a new link. The link's RTT is the kernel's until a ping is
    /// answered. A plain link has no congestion control, so its reader is not used afterwards.
    pub(crate) fn set_tcp_info_reader(&self, reader: Option<TcpInfoReader>) {
        if let Some(info) = reader.as_ref().and_then(TcpInfoReader::read) {
            self.set_rtt(info.rtt);
        }
        let _before = self.with_state(|state| std::mem::replace(&mut state.queue.pacing.tcp_info, reader));
    }

    /// Returns the kernel's RTT to the next machine that terminates the connection, or `None` if it reports none.
    pub fn line_round_trip(&self) -> Option<Duration> {
        let reader = self.lock().queue.pacing.tcp_info.clone();
        reader?.read().map(|info| info.rtt)
    }

    /// Locks the link. Reads the kernel first if something waits for a turn and the last reading is old; no lock is
    /// held meanwhile.
    pub(crate) fn lock_informed(&self, now: Instant) -> MutexGuard<'_, LinkState> {
        let state = self.lock();
        let queue = &state.queue;
        let sessions_wait = state.queue.waiting.turns.len() > 0;
        let Some(reader) = queue.pacing.reader(queue.acks_wait(), sessions_wait, now) else { return state };
        drop(state);
        let info = reader.read();
        let mut state = self.lock();
        let sessions_wait = state.queue.waiting.turns.len() > 0;
        state.queue.pacing.read(info, sessions_wait, now);
        state
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::link::ack_pacing::MAX_WAIT;
    use std::future::poll_fn;
    use std::sync::Arc;

    use futures_util::FutureExt as _;

    use crate::lock::Mutex;
    use crate::schedule::frame_source::QueueMembership;
    use crate::schedule::tests::Speaker;
    use tunnel_proto::frame::{FrameKind, Remote};
    use tunnel_proto::names::{Instance, NodeName};
    use tunnel_proto::state::{ControlPriority, LinkId};

    use super::*;

    /// Returns a link with that RTT according to the kernel.
    fn link(millis: u64) -> (Arc<Link>, Arc<Speaker>) {
        let link = Link::new(LinkId(1), Remote::Server(NodeName::none()), Some(Instance::random()));
        let rtt = Duration::from_millis(millis);
        link.lock().queue.pacing.acks.read(&reading(rtt), Instant::now());
        (link, Speaker::new())
    }

    pub(crate) fn reading(rtt: Duration) -> TcpInfo {
        TcpInfo {
            rtt,
            least_round_trip: rtt,
            variation: Duration::ZERO,
            pacing: 1_000_000,
            delivered: 0,
            segment: 1448,
            in_flight: 0,
            unsent: 0,
            written: 0,
        }
    }

    fn wants(link: &Link, reader: &Arc<Speaker>, control: ControlPriority) {
        link.enter(reader, &QueueMembership::default().request(Some(control), None));
    }

    /// Returns what is sent now.
    fn pulled(link: &Link) -> Vec<FrameKind> {
        let next = || poll_fn(|cx| link.poll_pull(cx, Instant::now())).now_or_never();
        std::iter::from_fn(next).flatten().map(|frame| frame.body).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_are_sent_together_four_times_per_rtt() {
        let ((link, reader), sent) = (link(200), Mutex::new(Vec::new()));
        let began = Instant::now();
        let pulls = async {
            while let Some(frame) = poll_fn(|cx| link.poll_pull(cx, Instant::now())).await {
                // Credits count on the line, so that a ping is sent now and then.
                if !matches!(frame.body, FrameKind::Ping(_)) {
                    sent.lock().push((began.elapsed().as_millis(), matches!(frame.body, FrameKind::Pong(_))));
                }
            }
        };
        let comes = async {
            for number in 0..400 {
                link.pong(Some(number));
                wants(&link, &reader, ControlPriority::Credit);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::time::sleep(Duration::from_millis(55)).await;
        };
        tokio::select! {
            () = pulls => {}
            () = comes => {}
        }
        let sent = sent.lock().clone();
        let mut bursts: Vec<u128> = sent.iter().map(|(at, _)| *at).collect();
        bursts.dedup();
        assert!((38..=41).contains(&bursts.len()), "{} in ten RTTs", bursts.len());
        let pongs = sent.iter().filter(|(_, pong)| *pong).count();
        assert_eq!((pongs, sent.len() - pongs), (bursts.len(), 400), "a pong answers all earlier pings");
    }

    #[tokio::test(start_paused = true)]
    async fn a_credit_that_is_needed_or_a_frame_of_another_kind_takes_the_others_along() {
        let (link, reader) = link(200);
        for control in [ControlPriority::Needed, ControlPriority::Answer] {
            wants(&link, &reader, ControlPriority::Credit);
            assert_eq!(pulled(&link).len(), 1);
            tokio::time::advance(Duration::from_millis(5)).await;
            link.pong(Some(1));
            wants(&link, &reader, ControlPriority::Credit);
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
        let unknown = Link::new(LinkId(2), Remote::Peer, Some(Instance::random()));
        for link in [link(4).0, unknown] {
            for number in 0..10 {
                link.pong(Some(number));
                assert_eq!(pulled(&link), [FrameKind::Pong(Some(number))]);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_kernel_is_read_only_for_what_comes_often_and_a_queue_of_others_counts_little() {
        let (mut reports, rtt) = (AckPacing::default(), Duration::from_millis(100));
        let mut now = Instant::now();
        for _ in 0..5 {
            assert!(!reports.wants_reading(now));
            reports.on_sent(now);
            reports.on_flushed();
            now += Duration::from_millis(500);
        }
        reports.on_sent(now);
        reports.on_flushed();
        assert!(reports.wants_reading(now));
        reports.read(&TcpInfo { rtt: rtt * 9, ..reading(rtt) }, now);
        assert!(!reports.wants_reading(now));
        assert_eq!(reports.next(), Some(now + Duration::from_millis(50)));
        reports.read(&TcpInfo { rtt: rtt * 9, ..reading(rtt * 9) }, now);
        assert_eq!(reports.next(), Some(now + MAX_WAIT));
    }
}

#[cfg(test)]
mod tcp_info_tests {
    use tokio::net::{TcpListener, TcpStream};

    use tunnel_proto::frame::Remote;
    use tunnel_proto::names::NodeName;
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test]
    async fn a_new_links_round_trip_is_the_kernels() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap());
        let (_far, near) = tokio::join!(far, listener.accept());
        let (near, _) = near.unwrap();
        let reader = TcpInfoReader::of(&near).unwrap();
        let link = Link::new(LinkId(1), Remote::Edge(NodeName::none()), None);
        let assumed = link.round_trip();
        link.set_tcp_info_reader(Some(reader));
        assert!(link.round_trip() < assumed, "{:?}", link.round_trip());
    }
}
