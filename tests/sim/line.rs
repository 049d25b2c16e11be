//! A link: two queues of frames with a rate and a latency. It can be cut.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tunnel_link::link::Link;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::{Decoder, encode_whole};
use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};
use tunnel_proto::names::SessionId;

use super::chance::SeededRng;
use super::ledger::Ledger;
use super::plan::{Plan, Scenario};
use super::relay_model::RelayModel;
use super::tasks::WakeFlag;
use super::turns::SchedulerModel;

pub(crate) struct Line {
    pub(crate) number: u64,
    /// Ends. With a single server, its end is the first.
    pub(crate) ends: [End; 2],
    /// Queues, from the first end first.
    wires: [Wire; 2],
    pub(crate) cut: bool,
    /// Whether everything that an end sends is lost.
    silent: [bool; 2],
    /// Server in the middle that can lose sessions, in runs without another one.
    pub(crate) relay_model: Option<RelayModel>,
    codec: bool,
}

pub(crate) struct End {
    /// Index of the process.
    pub(crate) at: usize,
    pub(crate) link: Arc<Link>,
    woken: Arc<WakeFlag>,
    waker: Waker,
    idle: bool,
    /// Time when this end notices that the link was cut.
    pub(crate) notices: Option<Instant>,
    /// Whether the link was removed at this end.
    pub(crate) over: bool,
    pub(crate) turns: SchedulerModel,
}

struct Wire {
    frames: VecDeque<(Instant, Frame)>,
    bytes: VecDeque<(Instant, Bytes)>,
    reader: Decoder,
    free_at: Instant,
    latency: Duration,
    rate: u64,
    lost: usize,
}

impl Line {
    pub(crate) fn new(number: u64, at: [usize; 2], outboxes: [Arc<Link>; 2], plan: &Plan) -> Self {
        let Plan { latency, rate, codec, .. } = *plan;
        let [a, b] = outboxes;
        let wire = || Wire {
            frames: VecDeque::new(),
            bytes: VecDeque::new(),
            reader: Decoder::default(),
            free_at: Instant::now(),
            latency,
            rate,
            lost: 0,
        };
        Self {
            number,
            ends: [End::new(at[0], a), End::new(at[1], b)],
            wires: [wire(), wire()],
            cut: false,
            silent: [false; 2],
            relay_model: (plan.scenario != Scenario::Pods).then(RelayModel::default),
            codec,
        }
    }

    /// Returns true if the link takes another frame from this end: it was woken or has more, and there is space in the
    /// queue.
    pub(crate) fn can_pull(&self, side: usize, now: Instant) -> bool {
        let (end, wire) = (&self.ends[side], &self.wires[side]);
        let room =
            if self.cut || self.silent[side] { wire.lost < BUFFER } else { wire.waiting(now) < BUFFER };
        !end.over && room && (!end.idle || end.woken.is())
    }

    /// Moves the next frame of this end to the line.
    pub(crate) fn pull(
        &mut self,
        side: usize,
        now: Instant,
        rng: &SeededRng,
        ledger: &Ledger,
    ) -> Option<Frame> {
        let end = &mut self.ends[side];
        end.woken.take();
        let frame = match end.link.poll_pull(&mut Context::from_waker(&end.waker), now) {
            Poll::Ready(Some(frame)) => frame,
            Poll::Pending => {
                end.idle = true;
                return None;
            }
            Poll::Ready(None) => {
                end.idle = true;
                end.notices.get_or_insert(now);
                self.close(now, rng);
                return None;
            }
        };
        end.idle = false;
        end.turns.pulled(&frame, ledger);
        let session = if let FrameKind::Session(id, ..) = &frame.body { ledger.number(*id) } else { None };
        ledger.note(|| format!("link {} {} {session:?} {}", self.number, [">", "<"][side], show(&frame)));
        let passes = self.relay_model.as_mut().is_none_or(|relay_model| relay_model.passes(side, &frame));
        let wire = &mut self.wires[side];
        if self.cut || self.silent[side] {
            wire.lost += weight(&frame);
        } else if passes {
            wire.push(frame.clone(), now, self.codec);
        }
        Some(frame)
    }

    /// Returns true if anything has arrived at the end `side`.
    pub(crate) fn has_arrived(&self, side: usize, now: Instant) -> bool {
        !self.ends[side].over && self.wires[1 - side].arrives().is_some_and(|at| at <= now)
    }

    /// Returns the time when the next frame arrives at either end.
    pub(crate) fn next_arrival(&self) -> Option<Instant> {
        (0..2).filter(|side| !self.ends[*side].over).filter_map(|side| self.wires[1 - side].arrives()).min()
    }

    /// Returns the next arrivals at the end `side`: a frame, or all frames that end in one piece of the stream.
    pub(crate) fn deliver(&mut self, side: usize, rng: &SeededRng, ledger: &Ledger) -> Vec<Frame> {
        let wire = &mut self.wires[1 - side];
        if let Some((_, frame)) = wire.frames.pop_front() {
            return vec![frame];
        }
        let Some((at, mut bytes)) = wire.bytes.pop_front() else { return Vec::new() };
        let piece = if rng.one_in(2) {
            bytes.split_to(rng.magnitude(bytes.len()))
        } else {
            std::mem::take(&mut bytes)
        };
        if !bytes.is_empty() {
            wire.bytes.push_front((at, bytes));
        }
        wire.reader.push(piece);
        let mut frames = Vec::new();
        loop {
            match wire.reader.next_message() {
                Ok(Some(message)) => match from_message(message, &self.ends[side].link.peer) {
                    Ok(frame) => frames.push(frame),
                    Err(why) => ledger.error(format!("invalid message: {why}")),
                },
                Ok(None) => return frames,
                Err(why) => {
                    ledger.error(format!("invalid stream: {why}"));
                    return frames;
                }
            }
        }
    }

    /// Cuts the line: data in flight is lost after a random position, and each end notices in its own time.
    pub(crate) fn cut(&mut self, now: Instant, slowest: Duration, rng: &SeededRng) {
        if self.cut {
            return;
        }
        self.cut = true;
        for (end, wire) in self.ends.iter_mut().zip(&mut self.wires) {
            wire.frames.truncate(rng.below(wire.frames.len() + 1));
            wire.bytes.truncate(rng.below(wire.bytes.len() + 1));
            if let Some((_, last)) = wire.bytes.back_mut()
                && rng.one_in(2)
            {
                last.truncate(rng.below(last.len()));
            }
            end.notices.get_or_insert(now + rng.time(slowest));
        }
    }

    /// Drops everything that these ends send from now on, without notice.
    pub(crate) fn fall_silent(&mut self, silent: [bool; 2]) {
        for (side, falls) in silent.into_iter().enumerate() {
            self.silent[side] |= falls;
        }
    }

    /// Returns true if it carries nothing in at least one direction, without notice.
    pub(crate) fn is_silent(&self) -> bool {
        !self.cut && self.silent != [false; 2]
    }

    /// Makes the line fast.
    pub(crate) fn end_failures(&mut self) {
        for wire in &mut self.wires {
            (wire.rate, wire.latency) = HEALED;
        }
    }

    /// Closes the line after an end has sent everything. The other end receives the data in flight, or loses it.
    fn close(&mut self, now: Instant, rng: &SeededRng) {
        if rng.one_in(2) {
            return self.cut(now, Duration::from_secs(3), rng);
        }
        let last = self.wires.iter().filter_map(Wire::last).max().unwrap_or(now);
        self.cut = true;
        for end in &mut self.ends {
            end.notices.get_or_insert(last + rng.time(Duration::from_secs(1)));
        }
    }

    /// Loses a session at the server in the middle, and notifies both ends after the data sent before.
    pub(crate) fn lose(&mut self, id: SessionId, now: Instant, ledger: &Ledger) {
        let Some(lost) = self.relay_model.as_mut().and_then(|relay_model| relay_model.lose(id)) else {
            return;
        };
        ledger
            .note(|| format!("link {} loses session {:?}: {}", self.number, ledger.number(id), show(&lost)));
        if !self.cut {
            self.wires.iter_mut().for_each(|wire| wire.push(lost.clone(), now, self.codec));
        }
    }
}

impl End {
    fn new(at: usize, link: Arc<Link>) -> Self {
        let woken = Arc::new(WakeFlag::default());
        let waker = woken.clone().into();
        Self {
            at,
            link,
            woken,
            waker,
            idle: false,
            notices: None,
            over: false,
            turns: SchedulerModel::default(),
        }
    }
}

impl Wire {
    fn push(&mut self, frame: Frame, now: Instant, codec: bool) {
        let time = Duration::from_secs_f64(weight(&frame) as f64 / self.rate as f64);
        self.free_at = self.free_at.max(now) + time;
        let at = self.free_at + self.latency;
        if codec {
            self.bytes.push_back((at, encode_whole(to_message(frame))));
        } else {
            self.frames.push_back((at, frame));
        }
    }

    /// Returns the number of bytes that have not left this end yet.
    fn waiting(&self, now: Instant) -> usize {
        ((self.free_at.saturating_duration_since(now)).as_secs_f64() * self.rate as f64) as usize
    }

    fn arrives(&self) -> Option<Instant> {
        self.frames.front().map(|f| f.0).or(self.bytes.front().map(|b| b.0))
    }

    fn last(&self) -> Option<Instant> {
        self.frames.back().map(|f| f.0).or(self.bytes.back().map(|b| b.0))
    }
}

fn weight(frame: &Frame) -> usize {
    100 + if let FrameKind::Session(_, _, SessionFrame::Data(bytes)) = &frame.body { bytes.len() } else { 0 }
}

/// Formats a frame for the trace, without the session's random id.
pub(crate) fn show(frame: &Frame) -> String {
    match &frame.body {
        FrameKind::Session(_, _, SessionFrame::Data(bytes)) => format!("{} bytes", bytes.len()),
        FrameKind::Session(_, _, word) => format!("{word:?}"),
        body => format!("{body:?}"),
    }
}

/// Bytes that HTTP/2 buffers before the line.
const BUFFER: usize = 64 * 1024;
/// Rate and latency after all failures have ended.
pub(crate) const HEALED: (u64, Duration) = (5_000_000, Duration::from_millis(5));
