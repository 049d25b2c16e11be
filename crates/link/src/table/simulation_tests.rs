//! All sessions and links of three processes in one loop: no task, no I/O, no wait, and a clock that the loop advances.
//!
//! Two servers open a hundred sessions to an edge over ten links, directly or through each other. A seeded scheduler
//! decides whose turn it is. It cuts links, stalls them, moves sessions from link to link, and abandons sessions. Each
//! step is checked for what it has touched, so its cost does not grow with what exists. Owners and links are polled
//! only after they were woken, so a lost wake-up leaves a session unfinished.
//!
//! `SIM_SEED=n` runs one seed, `SIM_STEPS=n` sets the steps of each. `tests/sim` runs the same sessions with the
//! program's tasks, codec, registry and router.
#![expect(clippy::disallowed_methods, reason = "tests read environment variables set by the developer")]

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::runtime::Runtime;
use tunnel_net::ChunkStream;
use tunnel_net::tcp_info::TcpInfo;
use tunnel_proto::frame::FrameKind;
use tunnel_proto::state::{Actions, LinkId, Phase};

use super::handles::OpenOutcome;
use super::*;
use crate::liveness::{DEAD, Liveness, LivenessRole, LivenessVerdict};

mod checks;

/// Number of concurrent sessions.
const SESSIONS: usize = 100;
/// The processes at the ends of each link: two servers, and the edge.
const LINES: [[usize; 2]; 10] =
    [[0, EDGE], [0, EDGE], [0, EDGE], [0, EDGE], [1, EDGE], [1, EDGE], [1, EDGE], [0, 1], [0, 1], [0, 1]];
const EDGE: usize = 2;
const WINDOWS: WindowLimits = WindowLimits { start: 16 << 10, max: 256 << 10 };
const GRACE: Duration = Duration::from_secs(60);
/// Steps of a seed in the default run.
const STEPS: u64 = 100_000;
const SEEDS: u64 = 8;
/// Limit in bytes up to which small pieces are joined, and the overhead of a piece.
const JOINED: usize = 4 * 1024;
const PIECE: usize = 96;
/// Maximum number of bytes that a session keeps although the budget is spent, and one write more.
const MAX_FAIR: usize = 128 * 1024 + LONGEST_WRITE;
const LONGEST_WRITE: usize = 64 * 1024;

#[test]
fn every_byte_of_a_hundred_sessions_arrives_once_and_in_order_over_ten_failing_links() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let steps = number("SIM_STEPS").unwrap_or(STEPS);
    let seeds = number("SIM_SEED").map_or(0..SEEDS, |seed| seed..seed + 1);
    #[expect(clippy::disallowed_types, reason = "the rate of steps is one of real time, and is only printed")]
    let (began, mut counts) = (std::time::Instant::now(), Counts::default());
    for seed in seeds.clone() {
        let run = std::panic::catch_unwind(|| run(seed, steps));
        counts += run.unwrap_or_else(|_| panic!("SIM_SEED={seed} SIM_STEPS={steps} repeats it"));
    }
    let rate = counts.steps as f64 / began.elapsed().as_secs_f64();
    println!("seeds {seeds:?}: {rate:.0} steps a second, {counts:?}");
    let Counts { bytes, resumed, relayed, complete, .. } = counts;
    assert!(bytes > 0 && resumed > 0 && relayed > 0 && complete > 0, "{counts:?}");
}

#[test]
fn a_seed_reproduces_its_run() {
    assert_eq!(run(1, 5_000), run(1, 5_000));
}

/// What has happened in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    steps: u64,
    bytes: u64,
    /// Sessions of which both ends got everything.
    complete: u64,
    resumed: u64,
    relayed: u64,
    cuts: u64,
    abandoned: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.steps += more.steps;
        self.bytes += more.bytes;
        self.complete += more.complete;
        self.resumed += more.resumed;
        self.relayed += more.relayed;
        self.cuts += more.cuts;
        self.abandoned += more.abandoned;
    }
}

fn run(seed: u64, steps: u64) -> Counts {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _clock = runtime.enter();
    let mut world = World::new(seed, &runtime);
    while world.counts.steps < steps {
        world.step();
    }
    world.finish();
    world.counts
}

struct World<'a> {
    runtime: &'a Runtime,
    rng: StdRng,
    now: Instant,
    tables: [Arc<SessionTable>; 3],
    /// Bytes of each budget of a table.
    memory: usize,
    lines: Vec<Line>,
    links: u64,
    pairs: Vec<Pair>,
    /// The places of sessions in `pairs`.
    places: HashMap<SessionId, usize>,
    /// The searches for a path, each with its process.
    parked: Vec<(usize, PathSearchRight)>,
    /// Whether nothing fails any longer, and no session begins.
    healed: bool,
    counts: Counts,
}

/// A link: its two ends, and the frames on their way from each.
struct Line {
    ends: [LineEnd; 2],
    wires: [VecDeque<Frame>; 2],
    cut: bool,
    /// Nothing is sent or received before this step.
    stalled_until: u64,
}

struct LineEnd {
    link: Arc<Link>,
    wake: Wakeup,
    liveness: Liveness,
    received_at: Instant,
    /// Bytes of data that it has sent.
    written: u64,
    /// Whether this end knows that the link is over.
    over: bool,
}

/// A waker, and whether it was called since the last poll.
struct Wakeup {
    flag: Arc<Flag>,
    waker: Waker,
}

struct Flag(AtomicBool);

/// A session with its owners at both ends: the opener's and the acceptor's.
struct Pair {
    id: SessionId,
    server: usize,
    owners: [Owner; 2],
    sides: [Side; 2],
    /// Whether an owner has abandoned it, or a limit: then the other one may get an error.
    excused: bool,
    /// The newest epoch that the opener has sent.
    epoch: u64,
}

/// What an owner has done and seen.
struct Side {
    wake: Wakeup,
    /// Bytes that it writes in total.
    size: u64,
    written: u64,
    finished: bool,
    read: u64,
    ended: bool,
    /// Whether it broke off after what it had written.
    broke: bool,
}

enum Owner {
    Opening(PendingOpen),
    Dialling(IncomingSession),
    Open(Session),
    None,
}

impl<'a> World<'a> {
    fn new(seed: u64, runtime: &'a Runtime) -> Self {
        let memory = if seed % 4 == 3 { 1 << 20 } else { 64 << 20 };
        let tables = [0, 1, 2].map(|process: u128| {
            let limits = SessionLimits {
                windows: WINDOWS,
                memory,
                sessions: 1000,
                resume_timeout: GRACE,
                max_resume_timeout: Duration::ZERO,
            };
            SessionTable::new(Instance::from_bits(process + 1), limits, Metrics::edge())
        });
        let mut world = Self {
            runtime,
            rng: StdRng::seed_from_u64(seed),
            now: Instant::now(),
            tables,
            memory,
            lines: Vec::new(),
            links: 0,
            pairs: Vec::new(),
            places: HashMap::new(),
            parked: Vec::new(),
            healed: false,
            counts: Counts::default(),
        };
        world.lines = (0..LINES.len()).map(|at| world.new_line(at)).collect();
        world
    }

    fn new_line(&mut self, at: usize) -> Line {
        self.links += 1;
        let ends = [0, 1].map(|side| {
            let [here, there] = [LINES[at][side], LINES[at][1 - side]];
            let peer = match (here, there) {
                (EDGE, _) => Remote::Server(node()),
                (_, EDGE) => Remote::Edge(node()),
                _ => Remote::Peer,
            };
            let role = if side == 0 { LivenessRole::Dialled } else { LivenessRole::Accepted };
            LineEnd {
                link: Link::new(LinkId(self.links), peer, Some(self.tables[there].instance())),
                wake: Wakeup::new(),
                liveness: Liveness::new(role, self.now),
                received_at: self.now,
                written: 0,
                over: false,
            }
        });
        Line { ends, wires: Default::default(), cut: false, stalled_until: 0 }
    }

    /// Performs one step that the scheduler chooses.
    fn step(&mut self) {
        let done = match self.below(1000) {
            0..300 => self.pull(),
            300..600 => self.deliver(),
            600..920 => self.act(),
            920..950 => self.search(),
            950..980 => self.pass_time(),
            980..982 => self.check_liveness(),
            982..993 => self.move_session(),
            993 => self.release_idle(),
            994..996 => self.abandon(),
            996..998 => self.fail(),
            _ => self.notice(),
        };
        if done {
            self.counts.steps += 1;
            self.check_memory();
        }
    }

    /// Ends all failures. Every session has to end, and then nothing may be left.
    fn finish(&mut self) {
        self.healed = true;
        self.lines.iter_mut().for_each(|line| line.stalled_until = 0);
        let (mut idle, mut last) = (0, self.counts.steps);
        while idle < 100 {
            for _ in 0..1000 {
                let done = [self.pull(), self.deliver(), self.act(), self.search(), self.notice()];
                self.counts.steps += done.iter().filter(|done| **done).count() as u64;
                self.check_memory();
            }
            idle = if self.progress() == last { idle + 1 } else { 0 };
            last = self.progress();
            self.advance(Duration::from_millis(100));
        }
        for pair in &self.pairs {
            let [opener, acceptor] = &pair.owners;
            assert!(matches!(opener, Owner::None) && matches!(acceptor, Owner::None), "{}", pair.describe());
        }
        assert!(self.parked.is_empty(), "a search is left");
        for _ in 0..2 {
            self.advance(GRACE + Duration::from_secs(1));
            self.tables.iter().for_each(|table| table.tick(self.now));
            while self.pull() | self.deliver() {}
        }
        for table in &self.tables {
            assert_eq!((table.len(), table.memory(), table.relayed()), (0, (0, 0), (0, 0)));
        }
        for end in self.lines.iter().flat_map(|line| &line.ends) {
            assert_eq!(end.link.sessions(), 0, "link {} has sessions", end.link.id);
        }
    }

    /// Returns a number that changes with everything that an owner does.
    fn progress(&self) -> u64 {
        let sides = self.pairs.iter().flat_map(|pair| &pair.sides);
        let moved: u64 = sides.map(|side| side.written + side.read + u64::from(side.ended)).sum();
        let owners = self.pairs.iter().flat_map(|pair| &pair.owners);
        moved + owners.filter(|owner| matches!(owner, Owner::None)).count() as u64
    }

    /// Moves the next frame of a link's end, if it was woken, to the line.
    fn pull(&mut self) -> bool {
        let (at, side) = self.some_end();
        let (step, reading) = (self.counts.steps, self.reading(at, side));
        let line = &mut self.lines[at];
        let end = &mut line.ends[side];
        if end.over || step < line.stalled_until || line.wires[side].len() >= 64 || !end.wake.take() {
            return false;
        }
        if reading.is_some() {
            let queue = &mut end.link.lock().queue;
            queue.pacing.read(reading, queue.waiting.turns.len() > 0, self.now);
        }
        match end.link.poll_pull(&mut Context::from_waker(&end.wake.waker), self.now) {
            Poll::Pending => return true,
            Poll::Ready(None) => line.cut = true,
            Poll::Ready(Some(frame)) => {
                end.wake.set();
                // Any frame takes more on the wire than what the link counts for it.
                if let FrameKind::Session(_, _, frame) = &frame.body {
                    let data = if let SessionFrame::Data(bytes) = frame { bytes.len() } else { 0 };
                    let reason = frame.refusal().map_or(0, |why| why.reason.len());
                    end.written += (data + reason + 100) as u64;
                }
                let link = end.link.id;
                self.check_sent(LINES[at][side], link, &frame);
                if !self.lines[at].cut {
                    self.lines[at].wires[side].push_back(frame);
                }
            }
        }
        true
    }

    /// Delivers the next frame on a link.
    fn deliver(&mut self) -> bool {
        let (at, side) = self.some_end();
        let (step, now) = (self.counts.steps, self.now);
        let line = &mut self.lines[at];
        if line.ends[side].over || step < line.stalled_until {
            return false;
        }
        let Some(frame) = line.wires[1 - side].pop_front() else { return false };
        let end = &mut line.ends[side];
        end.link.handle_received(now);
        end.liveness.handle_received(now);
        end.received_at = now;
        match frame.body {
            FrameKind::Ping(number) => end.link.pong(number),
            FrameKind::Pong(Some(number)) => {
                end.link.handle_pong(number, now);
            }
            FrameKind::Session(id, category, session_frame) => {
                let (link, process) = (end.link.clone(), LINES[at][side]);
                link.mark_active(now);
                let key = SessionKey { id, category, node: frame.node };
                match self.tables[process].on_frame(&link, key, session_frame, now) {
                    Some(FrameEvent::Incoming(offer)) => self.offer(offer),
                    Some(FrameEvent::RelayRequest(request)) => self.relay(process, request),
                    Some(_) | None => {}
                }
                self.check_session(process, id);
            }
            _ => {}
        }
        true
    }

    /// Hands an offer to the acceptor's owner, or drops it if its opener's owner has left.
    fn offer(&mut self, offer: IncomingSession) {
        let Some(at) = self.places.get(&offer.key().id) else { return };
        let pair = &mut self.pairs[*at];
        assert!(matches!(pair.owners[1], Owner::None) && pair.sides[1].is_new(), "{} twice", pair.describe());
        pair.owners[1] = Owner::Dialling(offer);
        pair.sides[1].wake.set();
    }

    fn relay(&mut self, process: usize, request: RelayRequest) {
        let way = self.some_link(process, true).filter(|_| self.healed || self.rng.random_ratio(15, 16));
        match way {
            Some(link) => {
                self.counts.relayed += 1;
                request.pass(&link);
            }
            None => request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "not here")),
        }
    }

    /// Lets the owner of one end continue, if it was woken. A session of which both have left is followed by another.
    fn act(&mut self) -> bool {
        let at = self.below(SESSIONS);
        if at >= self.pairs.len() || self.pairs[at].is_over() && !self.healed {
            return self.open(at);
        }
        let side = self.below(2);
        if !self.pairs[at].sides[side].wake.take() {
            return false;
        }
        match std::mem::replace(&mut self.pairs[at].owners[side], Owner::None) {
            Owner::None => return false,
            Owner::Opening(opening) => self.wait_open(at, opening),
            Owner::Dialling(offer) => self.answer(at, offer),
            Owner::Open(session) => self.transfer(at, side, session),
        }
        let pair = &self.pairs[at];
        let (id, process) = (pair.id, [pair.server, EDGE][side]);
        self.check_session(process, id);
        true
    }

    fn open(&mut self, at: usize) -> bool {
        let (server, client) = (self.below(2), self.below(7));
        let target = "node:22".parse().unwrap();
        let client = format!("10.0.0.{client}:1");
        let Ok(opening) = self.tables[server].open(node(), target, SessionCategory::Ssh, client, "sim")
        else {
            return false;
        };
        let pair = Pair {
            id: opening.id(),
            server,
            owners: [Owner::Opening(opening), Owner::None],
            sides: [self.new_side(), self.new_side()],
            excused: false,
            epoch: 0,
        };
        if at < self.pairs.len() {
            self.places.remove(&self.pairs[at].id);
            self.counts.complete += u64::from(self.pairs[at].is_complete());
            self.pairs[at] = pair;
        } else {
            self.pairs.push(pair);
        }
        let at = at.min(self.pairs.len() - 1);
        self.places.insert(self.pairs[at].id, at);
        true
    }

    fn new_side(&mut self) -> Side {
        let bits = self.rng.random_range(0..20);
        let size = self.rng.random_range(0..1 << bits);
        Side { wake: Wakeup::new(), size, written: 0, finished: false, read: 0, ended: false, broke: false }
    }

    fn wait_open(&mut self, at: usize, opening: PendingOpen) {
        let answer = {
            let mut cx = Context::from_waker(&self.pairs[at].sides[0].wake.waker);
            pin!(opening.answer()).poll(&mut cx)
        };
        self.pairs[at].owners[0] = match answer {
            Poll::Ready(OpenOutcome::Open) => {
                self.pairs[at].sides[0].wake.set();
                Owner::Open(opening.into_session())
            }
            Poll::Ready(OpenOutcome::Refused(why)) => {
                let pair = &mut self.pairs[at];
                let is_full = why.code == ErrorCode::Overloaded;
                assert!(pair.excused || is_full, "{}: refused: {why}", pair.describe());
                pair.excused = true;
                Owner::None
            }
            Poll::Ready(OpenOutcome::NoPath) => {
                if let Some(link) = self.some_link(self.pairs[at].server, false) {
                    opening.ask(&link, None);
                }
                self.pairs[at].sides[0].wake.set();
                Owner::Opening(opening)
            }
            Poll::Pending => Owner::Opening(opening),
        };
    }

    /// Accepts an offer, refuses it, or takes longer to dial.
    fn answer(&mut self, at: usize, offer: IncomingSession) {
        let chance = self.below(64);
        let pair = &mut self.pairs[at];
        if offer.withdrawn().now_or_never().is_some() {
            // Its opener left before it was open, and the remote end of this one is gone.
            return;
        }
        pair.sides[1].wake.set();
        pair.owners[1] = match chance {
            0 if !self.healed => {
                pair.excused = true;
                offer.refuse(SessionError::new(ErrorCode::TargetRefused, "refused"));
                Owner::None
            }
            1..32 => Owner::Dialling(offer),
            _ => Owner::Open(offer.accept()),
        };
    }

    /// Writes and reads once. The owner leaves when it has written and read everything, or after an error.
    fn transfer(&mut self, at: usize, side: usize, mut session: Session) {
        let bits = self.below(17);
        let length = self.rng.random_range(1..=1 << bits);
        let slow = !self.healed && self.below(4) == 0;
        let pair = &mut self.pairs[at];
        let waker = pair.sides[side].wake.waker.clone();
        let mut cx = Context::from_waker(&waker);
        let me = &mut pair.sides[side];
        let length = length.min(me.size - me.written).min(LONGEST_WRITE as u64);
        let mut moved = slow;
        if length > 0 {
            let mut bytes = content(at, side, me.written, length as usize);
            if let Poll::Ready(Ok(())) = session.poll_write_chunk(&mut cx, &mut bytes) {
                me.written += length;
                moved = true;
            }
        } else if !me.finished {
            me.finished = session.poll_finish(&mut cx).is_ready();
        }
        if !slow && !me.ended {
            match session.poll_read_chunk(&mut cx) {
                Poll::Pending => {}
                Poll::Ready(Ok(bytes)) => {
                    moved = true;
                    self.counts.bytes += bytes.len() as u64;
                    pair.check_read(at, side, &bytes);
                }
                Poll::Ready(Err(_)) => {
                    pair.check_broken(side, session.ended().as_ref());
                    self.counts.resumed += u64::from(session.resumed());
                    return;
                }
            }
        }
        let me = &pair.sides[side];
        if me.finished && me.ended {
            self.counts.resumed += u64::from(session.resumed());
            drop(session);
            return;
        }
        // After its end of stream only the loss of the session wakes an owner that still writes.
        if me.ended && !moved && session.poll_lost(&mut cx).is_ready() {
            pair.check_broken(side, session.ended().as_ref());
            return;
        }
        if moved {
            pair.sides[side].wake.set();
        }
        pair.owners[side] = Owner::Open(session);
    }

    /// Takes a session without a path, or sends its Resume on some link, perhaps before the last one is answered.
    fn search(&mut self) -> bool {
        let process = self.below(2);
        if let Some(parked) = self.tables[process].next_parked().now_or_never() {
            self.parked.push((process, parked));
            return true;
        }
        if self.parked.is_empty() {
            return false;
        }
        let at = self.below(self.parked.len());
        let (process, parked) = &mut self.parked[at];
        let waits = parked.answered().now_or_never().is_none();
        if !parked.needs_path() || !self.healed && self.rng.random_ratio(1, 32) {
            self.parked.swap_remove(at);
            return true;
        }
        if waits && (self.healed || self.rng.random_ratio(15, 16)) {
            return false;
        }
        let (process, id) = (*process, parked.key().id);
        let Some(link) = self.some_link(process, false) else { return false };
        self.parked[at].1.resume(&link);
        self.check_session(process, id);
        true
    }

    fn pass_time(&mut self) -> bool {
        let most = if self.below(200) == 0 { 3_000_000 } else { 20_000 };
        let time = self.rng.random_range(1..most);
        self.advance(Duration::from_micros(time));
        true
    }

    fn advance(&mut self, time: Duration) {
        self.runtime.block_on(tokio::time::advance(time));
        self.now = Instant::now();
    }

    /// Checks whether a link's end lives. A link on which something arrived is never declared dead.
    fn check_liveness(&mut self) -> bool {
        let (at, side) = self.some_end();
        let (now, line) = (self.now, &mut self.lines[at]);
        let end = &mut line.ends[side];
        match end.liveness.handle_timeout(end.link.signs(now), now) {
            LivenessVerdict::Alive => {}
            LivenessVerdict::PingDue => end.link.ping(),
            LivenessVerdict::Dead(_) => {
                assert!(now - end.received_at >= DEAD, "link {} was alive", end.link.id);
                line.cut = true;
            }
            LivenessVerdict::Unresponsive | LivenessVerdict::Stalled => line.cut = true,
        }
        true
    }

    /// Takes memory back from sessions that were idle. A limit that was announced can still be used.
    fn release_idle(&mut self) -> bool {
        let process = self.below(3);
        for session in self.tables[process].all() {
            session.with_state(|inner| {
                inner.state.recv.release_idle();
                inner.state.recv.release_silent(self.now);
                ((), Actions::default())
            });
        }
        true
    }

    /// Makes a session leave its link, which still works, or asks for it on another link before the answer.
    fn move_session(&mut self) -> bool {
        if self.pairs.is_empty() {
            return false;
        }
        let at = self.below(self.pairs.len());
        let (id, process) = (self.pairs[at].id, self.pairs[at].server);
        let link = self.some_link(process, false);
        if let (Owner::Opening(opening), Some(link)) = (&self.pairs[at].owners[0], link) {
            opening.ask(&link, None);
        } else if let Some(session) = self.tables[process].session(id) {
            let link = session.lock().link.clone();
            let _ = link.is_some_and(|link| session.leave(&link));
        }
        self.check_session(process, id);
        true
    }

    /// Makes an owner give up its end.
    fn abandon(&mut self) -> bool {
        if self.pairs.is_empty() {
            return false;
        }
        let (at, side, how) = (self.below(self.pairs.len()), self.below(2), self.below(3));
        let pair = &mut self.pairs[at];
        let why = SessionError::new(ErrorCode::ConnectionFailed, "abandoned");
        match std::mem::replace(&mut pair.owners[side], Owner::None) {
            Owner::None => return false,
            Owner::Open(session) if how == 0 => {
                pair.sides[side].broke = !pair.excused;
                session.break_off(why);
            }
            Owner::Open(session) if how == 1 => session.reset(why),
            dropped => drop(dropped),
        }
        pair.excused = true;
        self.counts.abandoned += 1;
        let (id, process) = (pair.id, [pair.server, EDGE][side]);
        self.check_session(process, id);
        true
    }

    /// Cuts a link, stalls one, closes one at an end, or loses its relayed sessions.
    fn fail(&mut self) -> bool {
        let (at, side) = self.some_end();
        let stall = self.rng.random_range(1..10_000);
        match self.below(5) {
            0 => self.cut(at),
            1 | 2 => self.lines[at].stalled_until = self.counts.steps + stall,
            3 => {
                let end = &self.lines[at].ends[side];
                self.tables[LINES[at][side]].leave(&end.link, None, |_| false);
            }
            _ => self.lines[at].ends[side].link.close(),
        }
        true
    }

    /// Cuts a link: what is on its way is lost after a random frame.
    fn cut(&mut self, at: usize) {
        self.counts.cuts += 1;
        let line = &mut self.lines[at];
        line.cut = true;
        for wire in &mut line.wires {
            wire.truncate(self.rng.random_range(0..=wire.len()));
        }
    }

    /// Lets an end of a cut link notice it. A link that is over at both ends is replaced.
    fn notice(&mut self) -> bool {
        let (at, side) = self.some_end();
        if !self.lines[at].cut || self.lines[at].ends[side].over {
            return false;
        }
        let (process, link) = (LINES[at][side], self.lines[at].ends[side].link.clone());
        self.check_link(process, &link);
        let why = SessionError::new(ErrorCode::Cancelled, "the link is over");
        self.tables[process].link_ended(&link, &why, self.now);
        assert!(link.sessions() == 0 && link.waiting() == 0, "link {} is not empty", link.id);
        self.lines[at].ends[side].over = true;
        if self.lines[at].ends.iter().all(|end| end.over) {
            self.lines[at] = self.new_line(at);
        }
        true
    }

    /// Returns a link of a process that it does not know to be over; only one to the edge if `to_edge`.
    fn some_link(&mut self, process: usize, to_edge: bool) -> Option<Arc<Link>> {
        let first = self.below(LINES.len());
        let mut all = (0..LINES.len()).map(|more| (first + more) % LINES.len());
        let at = all.find(|at| {
            let side = usize::from(LINES[*at][0] != process);
            let fits = LINES[*at][side] == process && (!to_edge || LINES[*at][1 - side] == EDGE);
            fits && !self.lines[*at].ends[side].over
        })?;
        Some(self.lines[at].ends[usize::from(LINES[at][0] != process)].link.clone())
    }

    fn some_end(&mut self) -> (usize, usize) {
        (self.below(LINES.len()), self.below(2))
    }

    fn below(&mut self, n: usize) -> usize {
        self.rng.random_range(0..n)
    }

    /// Returns what a kernel might report of an end of every other link, which holds bulk and acknowledgements back.
    fn reading(&mut self, at: usize, side: usize) -> Option<TcpInfo> {
        let written = self.lines[at].ends[side].written;
        let least = Duration::from_micros(self.rng.random_range(20..50_000));
        let in_flight = if self.healed { 0 } else { self.rng.random_range(0..=written.min(100_000)) };
        let info = TcpInfo {
            rtt: least * self.rng.random_range(1..4),
            least_round_trip: least,
            variation: least / 4,
            pacing: self.rng.random_range(10_000..100_000_000),
            delivered: (written / 1400) as u32,
            segment: 1400,
            in_flight,
            unsent: 0,
            written,
        };
        at.is_multiple_of(2).then_some(info)
    }
}

impl Side {
    fn is_new(&self) -> bool {
        self.written == 0 && self.read == 0 && !self.finished
    }
}

impl Wakeup {
    fn new() -> Self {
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        Self { waker: flag.clone().into(), flag }
    }

    fn take(&self) -> bool {
        self.flag.0.swap(false, Relaxed)
    }

    fn set(&self) {
        self.flag.0.store(true, Relaxed);
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

fn node() -> NodeName {
    "node".parse().unwrap()
}

/// Returns the bytes that a side of a session writes at `offset`. They differ at any two places.
fn content(session: usize, side: usize, offset: u64, len: usize) -> Bytes {
    let start = session * 7919 + side * 104_729;
    let at = (start as u64 + offset) as usize % PERIOD;
    TABLE.slice(at..at + len)
}

static TABLE: LazyLock<Bytes> = LazyLock::new(|| {
    let mut period = vec![0; PERIOD];
    StdRng::seed_from_u64(7).fill_bytes(&mut period);
    period.repeat(2).into()
});

/// Prime, so that no shift by a frame, window or page yields the same bytes.
const PERIOD: usize = 262_147;
