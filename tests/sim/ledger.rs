//! What both owners of each session really did, to hold against what they are told.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use tokio::time::Instant;

use super::chance::content;

/// Shared by all tasks of a run.
#[derive(Clone)]
pub(crate) struct Ledger(Rc<RefCell<Inner>>);

struct Inner {
    fault: Option<String>,
    pairs: Vec<Pair>,
    /// Whether a faithful session may be given up.
    lenient: bool,
    trace: Option<Vec<String>>,
    began: Option<Instant>,
    /// Keystrokes just written: whose, which end, how long.
    typed: Vec<(usize, usize, usize)>,
    timed: usize,
    resumed: u32,
}

/// What runs have seen, so that none passes because nothing happened.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) bytes: u64,
    /// How often an opener's session went on on another path.
    pub(crate) resumed: u32,
    /// Keystrokes that were timed.
    pub(crate) timed: usize,
    /// Sessions that an owner ended before their time.
    pub(crate) killed: usize,
}

/// One session.
#[derive(Default)]
struct Pair {
    /// Opener first.
    ends: [End; 2],
    offered: u32,
    refused: Option<String>,
    open: bool,
    /// An owner ended it before its time, or never opened it.
    killed: bool,
}

#[derive(Default)]
struct End {
    written: u64,
    finished: bool,
    read: u64,
    ended: bool,
    dropped: bool,
}

impl Ledger {
    pub(crate) fn new(traced: bool) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            fault: None,
            pairs: Vec::new(),
            lenient: false,
            trace: traced.then(Vec::new),
            began: None,
            typed: Vec::new(),
            timed: 0,
            resumed: 0,
        })))
    }

    pub(crate) fn begin(&self, sessions: usize, lenient: bool) {
        let mut inner = self.0.borrow_mut();
        inner.pairs.resize_with(sessions, Pair::default);
        inner.lenient = lenient;
        inner.began = Some(Instant::now());
    }

    /// The first fault ends the run.
    pub(crate) fn fault(&self, why: impl Into<String>) {
        self.0.borrow_mut().fault.get_or_insert(why.into());
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.borrow().fault.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        let inner = &mut *self.0.borrow_mut();
        if let (Some(trace), Some(began)) = (&mut inner.trace, inner.began) {
            trace.push(format!("{:>12?} {}", began.elapsed(), text()));
        }
    }

    pub(crate) fn trace(&self) -> Vec<String> {
        self.0.borrow_mut().trace.take().unwrap_or_default()
    }

    pub(crate) fn offered(&self, session: usize) {
        self.with(session, |pair| {
            pair.offered += 1;
            (pair.offered > 1).then(|| "was offered twice".into())
        });
    }

    pub(crate) fn refused(&self, session: usize, why: String) {
        self.with(session, |pair| {
            (pair.refused, pair.killed) = (Some(why), true);
            None
        });
    }

    pub(crate) fn opened(&self, session: usize) {
        self.with(session, |pair| {
            pair.open = true;
            (pair.offered == 0 || pair.refused.is_some()).then(|| "is open, but nobody accepted it".into())
        });
    }

    /// The opener was told `why`; it must be what the acceptor said, unless links `came_and_went`.
    pub(crate) fn was_refused(&self, session: usize, why: &str, came_and_went: bool) {
        self.with(session, |pair| match &pair.refused {
            Some(said) if said == why || came_and_went => None,
            None if pair.killed => None,
            said => Some(format!("was refused by {said:?}, the opener heard {why:?}")),
        });
    }

    pub(crate) fn kill(&self, session: usize) {
        self.with(session, |pair| {
            pair.killed = true;
            None
        });
    }

    pub(crate) fn is_killed(&self, session: usize) -> bool {
        self.0.borrow().pairs[session].killed
    }

    pub(crate) fn wrote(&self, session: usize, side: usize, bytes: usize) {
        self.with(session, |pair| {
            pair.ends[side].written += bytes as u64;
            None
        });
    }

    pub(crate) fn typed(&self, session: usize, side: usize, bytes: usize) {
        self.0.borrow_mut().typed.push((session, side, bytes));
    }

    pub(crate) fn take_typed(&self) -> Vec<(usize, usize, usize)> {
        std::mem::take(&mut self.0.borrow_mut().typed)
    }

    pub(crate) fn timed(&self) {
        self.0.borrow_mut().timed += 1;
    }

    pub(crate) fn resumed(&self, times: u32) {
        self.0.borrow_mut().resumed += times;
    }

    pub(crate) fn add_to(&self, seen: &mut Seen) {
        let inner = self.0.borrow();
        seen.bytes += inner.pairs.iter().flat_map(|pair| &pair.ends).map(|end| end.read).sum::<u64>();
        seen.resumed += inner.resumed;
        seen.timed += inner.timed;
        seen.killed += inner.pairs.iter().filter(|pair| pair.killed).count();
    }

    pub(crate) fn finished(&self, session: usize, side: usize) {
        self.with(session, |pair| {
            pair.ends[side].finished = true;
            None
        });
    }

    pub(crate) fn read(&self, session: usize, side: usize, bytes: &[u8]) {
        self.with(session, |pair| {
            let from = pair.ends[side].read;
            let right = content(session, 1 - side, from, bytes.len()) == bytes;
            let end = &mut pair.ends[side];
            end.read += bytes.len() as u64;
            if end.ended {
                return Some(format!("end {side} read bytes after the end of stream"));
            }
            if end.read > pair.ends[1 - side].written {
                return Some(format!("end {side} read more than was written"));
            }
            (!right).then(|| format!("end {side} read wrong bytes at {from}"))
        });
    }

    pub(crate) fn ended(&self, session: usize, side: usize) {
        self.with(session, |pair| {
            pair.ends[side].ended = true;
            let (read, other) = (pair.ends[side].read, &pair.ends[1 - side]);
            (!other.finished || read != other.written).then(|| {
                format!("end {side} read the end of stream at {read}, {} were written", other.written)
            })
        });
    }

    /// An owner was told that its session is over before its time.
    pub(crate) fn broken(&self, session: usize, side: usize, error: &io::Error) {
        let lenient = self.0.borrow().lenient;
        let violation = error.to_string().contains("the peer");
        self.with(session, |pair| {
            let excused = pair.killed || lenient;
            pair.killed |= lenient;
            (!excused || violation).then(|| format!("end {side} broke: {error}"))
        });
    }

    /// An owner lets its end go.
    pub(crate) fn dropped(&self, session: usize, side: usize) {
        self.with(session, |pair| {
            let end = &mut pair.ends[side];
            end.dropped = true;
            pair.killed |= !(end.finished && end.ended);
            None
        });
    }

    /// Sessions that should have been carried in full, and were not.
    pub(crate) fn unfinished(&self) -> Vec<String> {
        let inner = self.0.borrow();
        let whole = |pair: &Pair| pair.killed || pair.ends.iter().all(|end| end.ended && end.dropped);
        let unfinished = inner.pairs.iter().enumerate().filter(|(_, pair)| !whole(pair));
        unfinished
            .map(|(at, pair)| {
                let side = |end: &End| {
                    format!(
                        "wrote {}, finished {}, read {}, end {}",
                        end.written, end.finished, end.read, end.ended
                    )
                };
                format!("session {at} (open {}): {}; {}", pair.open, side(&pair.ends[0]), side(&pair.ends[1]))
            })
            .collect()
    }

    fn with(&self, session: usize, step: impl FnOnce(&mut Pair) -> Option<String>) {
        let fault = step(&mut self.0.borrow_mut().pairs[session]);
        if let Some(why) = fault {
            self.fault(format!("session {session}: {why}"));
        }
    }
}
