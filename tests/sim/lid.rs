//! A user's program and an edge. Its line is away for hours, time and again, and no byte is lost.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::{Instant, advance};
use tunnel_base::metrics::Metrics;
use tunnel_link::link::Link;
use tunnel_link::table::handles::Session;
use tunnel_link::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::{ErrorCode, FrameKind, Remote, SessionCategory, SessionError, SessionKey};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::Instance;
use tunnel_proto::state::LinkId;

const GRANTED: Duration = Duration::from_secs(12 * 60 * 60);

/// One of the two processes, with its end of the session.
struct End {
    table: Arc<SessionTable>,
    link: Arc<Link>,
    session: Option<Session>,
    written: usize,
    read: usize,
}

impl End {
    fn new(process: u128) -> Self {
        let limits = SessionLimits {
            windows: WindowLimits { start: 16 << 10, max: 256 << 10 },
            memory: 16 << 20,
            sessions: 100,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: GRANTED,
        };
        let table = SessionTable::new(Instance::from_bits(process), limits, Metrics::edge());
        Self { table, link: link(1, process), session: None, written: 0, read: 0 }
    }

    /// Writes up to that many bytes, as far as the session takes them.
    fn write(&mut self, most: usize) {
        let mut cx = Context::from_waker(Waker::noop());
        let mut bytes: Bytes = (self.written..self.written + most).map(|at| (at % 251) as u8).collect();
        if self.session.as_mut().unwrap().poll_write_chunk(&mut cx, &mut bytes).is_ready() {
            self.written += most - bytes.len();
        }
    }

    fn read(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(bytes) = self.session.as_mut().unwrap().poll_read_chunk(&mut cx) {
            for byte in bytes.unwrap() {
                assert_eq!(usize::from(byte), self.read % 251, "at {}", self.read);
                self.read += 1;
            }
        }
    }

    /// Delivers at most that many frames to the other end. Returns the session if one was requested.
    fn deliver(&self, to: &Self, most: usize) -> Option<Session> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut accepted = None;
        for _ in 0..most {
            let now = Instant::now();
            let Poll::Ready(Some(frame)) = self.link.poll_pull(&mut cx, now) else { return accepted };
            let (id, category, mut frame) = match frame.body {
                FrameKind::Session(id, category, frame) => (id, category, frame),
                FrameKind::Ping(Some(number)) => {
                    self.link.handle_pong(number, now);
                    continue;
                }
                other => panic!("{other:?}"),
            };
            // As the user's server does.
            if let Some(opener) = frame.opener() {
                *opener = "client/alice/laptop".parse().ok();
            }
            let key = SessionKey { id, category, node: "node1".parse().unwrap() };
            if let Some(FrameEvent::Incoming(offer)) = to.table.on_frame(&to.link, key, frame, now) {
                accepted = Some(offer.accept());
            }
        }
        accepted
    }
}

fn link(number: u64, process: u128) -> Arc<Link> {
    Link::new(LinkId(number), Remote::Server("node1".parse().unwrap()), Some(Instance::from_bits(process)))
}

/// Delivers frames in both directions, and reads, until both ends have everything.
async fn settle(ends: &mut [End; 2]) {
    for _ in 0..1000 {
        let [laptop, edge] = &*ends;
        laptop.deliver(edge, usize::MAX);
        edge.deliver(laptop, usize::MAX);
        ends.iter_mut().for_each(End::read);
        if (ends[0].written, ends[1].written) == (ends[1].read, ends[0].read) {
            return;
        }
        // Some credits wait for others.
        advance(Duration::from_millis(10)).await;
    }
}

async fn open() -> [End; 2] {
    let [mut laptop, mut edge] = [1, 2].map(End::new);
    let node = "node1".parse().unwrap();
    let target = "node1:22".parse().unwrap();
    let opening = laptop.table.open(node, target, SessionCategory::Ssh, String::new(), "client").unwrap();
    opening.ask_resume_timeout(GRANTED * 2);
    opening.ask(&laptop.link, None);
    edge.session = laptop.deliver(&edge, 1);
    edge.deliver(&laptop, 1);
    let session = opening.into_session();
    assert_eq!(session.path_monitor().resume_timeout(), Some(GRANTED));
    laptop.session = Some(session);
    [laptop, edge]
}

async fn lose_line(ends: &mut [End; 2], number: u64, away: Duration) {
    let why = SessionError::new(ErrorCode::Cancelled, "the line is away");
    for (process, end) in (1..).zip(&mut *ends) {
        let lost = std::mem::replace(&mut end.link, link(number, process));
        end.table.link_ended(&lost, &why, Instant::now());
    }
    let until = Instant::now() + away;
    while Instant::now() < until {
        advance(Duration::from_secs(30).min(until - Instant::now())).await;
        ends.iter().for_each(|end| end.table.tick(Instant::now()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_login_loses_no_byte_while_its_line_is_away_for_hours() {
    for seed in 0..12 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut ends = open().await;
        for number in 2..8 {
            for _ in 0..rng.random_range(0..20) {
                let (from, to) = if rng.random() { (0, 1) } else { (1, 0) };
                ends[from].write(rng.random_range(1..40_000));
                ends[from].deliver(&ends[to], rng.random_range(0..4));
                ends[to].read();
            }
            lose_line(&mut ends, number, GRANTED.mul_f64(rng.random_range(0.0..0.99))).await;
            // Each end has been stopped after a while, and continues.
            ends.iter_mut().for_each(|end| end.write(50_000));
            let mut parked = ends[0].table.next_parked().now_or_never().unwrap();
            parked.resume(&ends[0].link);
            settle(&mut ends).await;
            assert!(!parked.needs_path(), "seed {seed}");
        }
        let [laptop, edge] = &ends;
        assert_eq!((laptop.written, edge.written), (edge.read, laptop.read), "seed {seed}");
        assert_eq!(edge.session.as_ref().unwrap().resumed(), 6);
    }
}

#[tokio::test(start_paused = true)]
async fn a_login_ends_at_both_ends_once_its_line_was_away_for_too_long() {
    let mut ends = open().await;
    lose_line(&mut ends, 2, GRANTED).await;
    assert!(ends[1].table.is_empty());
    let parked = ends[0].table.next_parked().now_or_never().unwrap();
    parked.resume(&ends[0].link);
    let [laptop, edge] = &ends;
    laptop.deliver(edge, 1);
    edge.deliver(laptop, 1);
    assert_eq!(laptop.session.as_ref().unwrap().ended().unwrap().code, ErrorCode::UnknownSession);
}
