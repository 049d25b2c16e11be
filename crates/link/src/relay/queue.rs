//! What waits on one link for a relayed session.
//!
//! A queue belongs to one binding and one direction: a session that is bound again gets new queues, so frames that a
//! late thread still adds to an old one are never sent. Data, Fin, ResetAt, Reset and PathLost stay in order; the other
//! frames overtake them. Open, Opened, Resume and Resumed discard what waits, including credits
//! (docs/protocol.md#relaying; docs/protocol.md#traps, 1 to 3).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use bytes::Bytes;
use tokio::time::Instant;

use crate::lock::Mutex;
use crate::schedule::frame_source::{FrameSource, QueueMembership, QueueRequest, Turn, TurnOutput};
use tunnel_proto::budget::PairedReservation;
use tunnel_proto::frame::{SessionFrame, SessionKey};
use tunnel_proto::halves::joined;
use tunnel_proto::state::{ControlPriority, LinkId};

/// One direction of a relayed session, on its outgoing link.
#[derive(Debug)]
pub(crate) struct RelayQueue {
    key: SessionKey,
    /// At whose cost its answers are.
    client: Arc<str>,
    queue: Mutex<RelayQueueState>,
    /// Set once it is closed. The link reads it without the queue's lock, to drop stale entries. An outdated
    /// read only keeps an entry a little longer.
    closed: AtomicBool,
    /// Bytes of data received so far.
    passed: AtomicU64,
}

/// An error: the [`RelayQueue`] of a session has reached its limit, so the frame was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// The frames that wait in a [`RelayQueue`], under its lock.
#[derive(Debug)]
struct RelayQueueState {
    /// Open, Opened, Refused, Resume or Resumed.
    answer: Option<SessionFrame>,
    credit: Option<SessionFrame>,
    /// The limit of the last credit that was sent.
    limit: u64,
    /// Data, Fin, ResetAt, Reset or PathLost.
    ordered: VecDeque<SessionFrame>,
    /// Bytes of data in `ordered`.
    bytes: usize,
    /// Reservations for `ordered`, as bytes plus an overhead per frame: of all queues together, and of those of its
    /// link.
    taken: PairedReservation,
    most: usize,
    /// Whether further frames are dropped: the last frame waits or was sent.
    sealed: bool,
    /// Whether it took the place of another queue of its session, whose last frame was not sent.
    follows: bool,
    places: QueueMembership,
}

impl RelayQueue {
    /// Creates an empty queue for at most `most` bytes, which both budgets limit as well.
    pub(crate) fn new(key: SessionKey, client: Arc<str>, most: usize, taken: PairedReservation) -> Arc<Self> {
        let queue = RelayQueueState {
            answer: None,
            credit: None,
            limit: 0,
            ordered: VecDeque::new(),
            bytes: 0,
            taken,
            most,
            sealed: false,
            follows: false,
            places: QueueMembership::default(),
        };
        Arc::new(Self {
            key,
            client,
            queue: Mutex::new(queue),
            closed: AtomicBool::new(false),
            passed: AtomicU64::new(0),
        })
    }

    /// Adds a frame. Frames after the last frame are dropped.
    pub(crate) fn push(&self, frame: SessionFrame) -> Result<QueueRequest, QueueFull> {
        let mut queue = self.queue.lock();
        if queue.sealed {
            return Ok(QueueRequest::default());
        }
        match frame {
            SessionFrame::Open { .. }
            | SessionFrame::Opened { .. }
            | SessionFrame::Resume { .. }
            | SessionFrame::Resumed { .. } => {
                queue.empty();
                queue.answer = Some(frame);
            }
            SessionFrame::Refused { .. } => {
                queue.empty();
                queue.sealed = true;
                queue.answer = Some(frame);
            }
            SessionFrame::Credit { .. } => queue.credit = Some(frame),
            SessionFrame::Data(bytes) => {
                let received = bytes.len() as u64;
                queue.data(bytes)?;
                self.passed.fetch_add(received, Relaxed);
            }
            SessionFrame::Fin { .. } | SessionFrame::ResetAt { .. } => queue.finish(frame)?,
            // Never relayed: they concern an acceptor without a path.
            SessionFrame::Revoked { .. } | SessionFrame::Parked(_) => {}
            SessionFrame::Reset { .. } | SessionFrame::PathLost { .. } => {
                queue.credit = None;
                queue.end(frame);
            }
        }
        Ok(queue.take_request())
    }

    /// Returns true if it has sent its last frame.
    pub(crate) fn is_over(&self) -> bool {
        self.queue.lock().is_over()
    }

    /// Returns the bytes of data received so far. Takes no lock.
    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Relaxed)
    }

    /// Replaces everything that waits with this last frame; an answer that waits is still sent before it.
    pub(crate) fn cut(&self, frame: SessionFrame) -> QueueRequest {
        let mut queue = self.queue.lock();
        if queue.sealed {
            return QueueRequest::default();
        }
        let answer = queue.answer.take();
        queue.empty();
        queue.answer = answer;
        queue.end(frame);
        queue.take_request()
    }

    /// Closes the queue: it sends nothing more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Relaxed);
        let mut queue = self.queue.lock();
        queue.empty();
        queue.sealed = true;
    }

    /// Notes that this queue takes the place of another one, which does not report its end.
    pub(crate) fn follow(&self) {
        self.queue.lock().follows = true;
    }

    /// Closes the queue, because another one relays the session for attempt `epoch`.
    ///
    /// A PathLost of a newer attempt is still sent. A late Open or Resume of an old attempt does not end that attempt
    /// at its remote end, which would stay bound forever.
    pub(crate) fn retire(&self, epoch: u64) {
        let mut queue = self.queue.lock();
        let is_newer =
            |last: &SessionFrame| matches!(last, SessionFrame::PathLost { epoch: of } if *of > epoch);
        let lost = queue.ordered.pop_back().filter(is_newer);
        self.closed.store(lost.is_none(), Relaxed);
        queue.empty();
        queue.ordered.extend(lost);
        queue.sealed = true;
    }
}

impl FrameSource for RelayQueue {
    fn key(&self) -> &SessionKey {
        &self.key
    }

    fn client(&self) -> &Arc<str> {
        &self.client
    }

    fn is_stale(&self, _stay: u64) -> bool {
        self.closed.load(Relaxed)
    }

    fn next_frame(self: Arc<Self>, _link: LinkId, turn: &mut Turn, _now: Instant) -> TurnOutput {
        let mut queue = self.queue.lock();
        let output = match turn {
            Turn::Answer(_) | Turn::Credit(_) => {
                let frame = queue.answer.take().or_else(|| queue.credit.take());
                if let Some(SessionFrame::Credit { limit, .. }) = &frame {
                    queue.limit = *limit;
                }
                let output = queue.places.on_control(turn, frame);
                let more = queue.control();
                TurnOutput { credit: queue.places.request(more, None).credit, ..output }
            }
            Turn::Data { flow, longest, most } => {
                let is_held = queue.bytes > *most;
                let next = |queue: &mut RelayQueueState| queue.answer.take().or_else(|| queue.take(*longest));
                let frame = if is_held { None } else { next(&mut queue) };
                let backlog = queue.backlog();
                queue.places.on_data(flow, frame, backlog)
            }
        };
        TurnOutput { is_over: queue.is_over(), ..output }
    }
}

impl RelayQueueState {
    fn is_over(&self) -> bool {
        self.sealed && self.answer.is_none() && self.ordered.is_empty()
    }

    fn empty(&mut self) {
        self.answer = None;
        self.credit = None;
        self.ordered = VecDeque::new();
        self.bytes = 0;
        self.give_back(usize::MAX);
    }

    /// Adds the last frame. An Open that was not sent is dropped, and so is a Resume of which only the path is lost; the
    /// last frame, too, if the remote knows nothing of that attempt.
    fn end(&mut self, last: SessionFrame) {
        self.sealed = true;
        let is_needless = |answer: &mut SessionFrame| match answer {
            SessionFrame::Open { .. } => true,
            SessionFrame::Resume { .. } => matches!(last, SessionFrame::PathLost { .. }),
            _ => false,
        };
        let is_unsent = self.answer.take_if(is_needless).is_some();
        if !is_unsent || self.follows {
            self.ordered.push_back(last);
        }
    }

    fn finish(&mut self, frame: SessionFrame) -> Result<(), QueueFull> {
        self.grow(cost(&frame))?;
        self.ordered.push_back(frame);
        Ok(())
    }

    fn grow(&mut self, cost: usize) -> Result<(), QueueFull> {
        let fits = self.taken.size() + cost <= self.most && self.taken.try_grow(cost);
        if fits { Ok(()) } else { Err(QueueFull) }
    }

    fn give_back(&mut self, cost: usize) {
        self.taken.resize(self.taken.size().saturating_sub(cost));
    }

    fn data(&mut self, bytes: Bytes) -> Result<(), QueueFull> {
        let merged = matches!(self.ordered.back(), Some(SessionFrame::Data(last)) if last.len() + bytes.len() <= MERGE_BELOW);
        self.grow(bytes.len() + if merged { 0 } else { OVERHEAD })?;
        self.bytes += bytes.len();
        if merged && let Some(SessionFrame::Data(last)) = self.ordered.back_mut() {
            *last = joined(std::mem::take(last), &bytes);
        } else {
            self.ordered.push_back(SessionFrame::Data(bytes));
        }
        Ok(())
    }

    fn take(&mut self, longest: usize) -> Option<SessionFrame> {
        let frame = self.ordered.pop_front()?;
        let SessionFrame::Data(mut bytes) = frame else {
            if let SessionFrame::Fin { .. } | SessionFrame::ResetAt { .. } = frame {
                self.give_back(cost(&frame));
            }
            return Some(frame);
        };
        let rest = bytes.split_off(longest.min(bytes.len()));
        self.bytes -= bytes.len();
        let mut cost = bytes.len();
        if rest.is_empty() {
            cost += OVERHEAD;
        } else {
            self.ordered.push_front(SessionFrame::Data(rest));
        }
        self.give_back(cost);
        Some(SessionFrame::Data(bytes))
    }

    /// Returns the bytes of data that wait, or `None` if nothing waits.
    fn backlog(&self) -> Option<usize> {
        (!self.ordered.is_empty()).then_some(self.bytes)
    }

    /// Returns what goes before data. A credit is needed once half of the bytes that the last one allowed were
    /// received.
    fn control(&self) -> Option<ControlPriority> {
        let credit = self.credit.as_ref().map(|credit| match credit {
            SessionFrame::Credit { received, limit }
                if self.limit.saturating_sub(*received) > limit.saturating_sub(*received) / 2 =>
            {
                ControlPriority::Credit
            }
            _ => ControlPriority::Needed,
        });
        self.answer.as_ref().map(|_| ControlPriority::Answer).or(credit)
    }

    /// Takes the request for the turns that it needs and has not requested yet.
    fn take_request(&mut self) -> QueueRequest {
        self.places.request(self.control(), self.backlog())
    }
}

/// Returns the cost of the end of the data: a ResetAt has a text.
fn cost(end: &SessionFrame) -> usize {
    OVERHEAD + end.refusal().map_or(0, |why| why.reason.len())
}

/// Cost of a frame in addition to its bytes: its place in a queue that has up to twice as many, and its allocation.
const OVERHEAD: usize = 2 * size_of::<SessionFrame>() + 64;
/// Small adjacent pieces are joined up to this number of bytes, so that queued keystrokes cost little.
const MERGE_BELOW: usize = 4 * 1024;

#[cfg(test)]
mod tests {
    use crate::schedule::frame_source::QueuedSource;
    use tunnel_proto::budget::Budget;
    use tunnel_proto::frame::SessionCategory;
    use tunnel_proto::names::{NodeName, SessionId};

    use super::*;

    #[test]
    fn a_credit_that_waits_is_needed_once_half_of_the_room_is_used_and_keeps_back_no_answer() {
        let key = SessionKey {
            id: SessionId::from_bits(1),
            category: SessionCategory::Ssh,
            node: NodeName::none(),
        };
        let budget = Budget::new(1 << 20);
        let queue = RelayQueue::new(
            key,
            "".into(),
            1 << 20,
            PairedReservation { all: budget.reservation(), of_link: budget.reservation() },
        );
        let push = |frame| queue.push(frame).unwrap();
        let [answer, credit, needed] =
            [(true, false, false), (false, true, false), (false, false, true)].map(
                |(answer, credit, needed)| QueueRequest { answer, credit, needed, ..QueueRequest::default() },
            );
        let granted = |received, limit| SessionFrame::Credit { received, limit };
        // For the first credit the used part is unknown.
        assert_eq!(push(granted(0, 1000)), QueueRequest { credit: true, ..needed });
        let mut turn = Turn::Credit(QueuedSource { source: queue.clone(), stay: 0 });
        let sent = queue.clone().next_frame(LinkId(1), &mut turn, Instant::now());
        assert_eq!((sent.frame, sent.credit), (Some(granted(0, 1000)), false));
        assert_eq!(push(granted(400, 1400)), credit);
        assert_eq!(push(granted(499, 1499)), QueueRequest::default());
        assert_eq!(push(granted(500, 1500)), needed);
        assert_eq!(push(granted(900, 1900)), QueueRequest::default());
        let resumed = SessionFrame::Resumed { received: 0, limit: 9, epoch: 1 };
        assert_eq!(push(resumed), answer);
    }
}
