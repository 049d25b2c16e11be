//! Records the actions of both owners of each session, and compares them with the results reported to them.

mod broke;
mod pair;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use tokio::time::Instant;
use tunnel_proto::names::{Instance, SessionId, Target};

use pair::{End, SessionRecord};

pub(crate) use pair::{EndId, OPENER, Seen, acceptor};

use super::chance::content;

/// The record of a run. All tasks share it.
#[derive(Clone)]
pub(crate) struct Ledger(Rc<RefCell<Inner>>);

struct Inner {
    fault: Option<String>,
    pairs: Vec<SessionRecord>,
    /// Whether a session may end although both owners are faithful.
    lenient: bool,
    /// Parts of errors that faithful owners may get, as a process makes room for others.
    evictions: &'static [&'static str],
    trace: Option<Vec<String>>,
    began: Option<Instant>,
    /// Keystrokes just written: session, end, length.
    typed: Vec<(usize, usize, usize)>,
    timed: usize,
    resumed: u32,
    relayed: usize,
    backup_links: usize,
    classified: [usize; 2],
    died: Vec<usize>,
    numbers: HashMap<SessionId, usize>,
    /// The first process that answered each attempt.
    answers: HashMap<(SessionId, u64), EndId>,
}

impl Ledger {
    pub(crate) fn new(traced: bool) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            fault: None,
            pairs: Vec::new(),
            lenient: false,
            evictions: &[],
            trace: traced.then(Vec::new),
            began: None,
            typed: Vec::new(),
            timed: 0,
            resumed: 0,
            relayed: 0,
            backup_links: 0,
            classified: [0; 2],
            died: Vec::new(),
            numbers: HashMap::new(),
            answers: HashMap::new(),
        })))
    }

    pub(crate) fn start(&self, sessions: usize, lenient: bool, evictions: &'static [&'static str]) {
        let mut inner = self.0.borrow_mut();
        inner.pairs.resize_with(sessions, SessionRecord::default);
        (inner.lenient, inner.evictions) = (lenient, evictions);
        inner.began = Some(Instant::now());
    }

    pub(crate) fn error(&self, why: impl Into<String>) {
        self.0.borrow_mut().fault.get_or_insert(why.into());
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.borrow().fault.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.0.borrow().trace.is_none() {
            return;
        }
        // It may borrow the ledger as well.
        let text = text();
        let inner = &mut *self.0.borrow_mut();
        if let (Some(trace), Some(began)) = (&mut inner.trace, inner.began) {
            trace.push(format!("{:>12?} {text}", began.elapsed()));
        }
    }

    pub(crate) fn trace(&self) -> Vec<String> {
        self.0.borrow_mut().trace.take().unwrap_or_default()
    }

    /// Records the session of `id`, which is known from its Open.
    pub(crate) fn record_session(&self, id: SessionId, target: &Target) {
        self.0.borrow_mut().numbers.insert(id, usize::from(target.port) - 1);
    }

    pub(crate) fn number(&self, id: SessionId) -> Option<usize> {
        self.0.borrow().numbers.get(&id).copied()
    }

    /// Records that an acceptor sends an Opened.
    pub(crate) fn answers(&self, id: SessionId, epoch: u64, process: usize) {
        self.0.borrow_mut().answers.entry((id, epoch)).or_insert(acceptor(process));
    }

    pub(crate) fn record_opener(&self, session: usize, process: usize) {
        self.with(session, |pair| {
            pair.from = Some(process);
            None
        });
    }

    pub(crate) fn offered(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            let before = pair.ends.insert(end_id, End::default());
            before.map(|_| "was offered twice".into())
        });
    }

    pub(crate) fn accepted(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            pair.end(end_id).accepted = true;
            None
        });
    }

    pub(crate) fn refused(&self, session: usize, why: String) {
        self.with(session, |pair| {
            (pair.refused, pair.killed) = (Some(why), true);
            None
        });
    }

    /// Returns the process that answered the last answered attempt up to `epoch`.
    pub(crate) fn answerer(&self, id: SessionId, epoch: u64) -> Option<EndId> {
        let answers = &self.0.borrow().answers;
        (0..=epoch).rev().find_map(|epoch| answers.get(&(id, epoch)).copied())
    }

    /// Records that the opener received the reply of `end_id`.
    pub(crate) fn opened(&self, session: usize, end_id: Option<EndId>) {
        let dead = self.0.borrow().died.iter().any(|process| Some(acceptor(*process)) == end_id);
        self.with(session, |pair| {
            pair.peer = end_id;
            let peer = end_id.and_then(|end_id| pair.ends.get(&end_id));
            pair.killed |= dead || peer.is_some_and(|end| end.buffered);
            pair.died |= dead;
            let accepted = peer.is_some_and(|end| end.accepted);
            (!accepted).then(|| "is open, but was not accepted".into())
        });
    }

    /// Returns true if the process of a session's other end has died.
    pub(crate) fn is_dead(&self, instance: Instance) -> bool {
        let inner = self.0.borrow();
        inner.died.iter().any(|process| Instance::from_bits(*process as u128 + 1) == instance)
    }

    /// Records the death of a process and of all ends in it.
    pub(crate) fn died(&self, process: usize) {
        let mut inner = self.0.borrow_mut();
        inner.died.push(process);
        for pair in &mut inner.pairs {
            let mine = pair.from == Some(process) || pair.peer == Some(acceptor(process));
            pair.killed |= mine;
            pair.died |= mine;
        }
    }

    /// Records that the opener received the refusal `why`. It must be the acceptor's text, unless links
    /// `came_and_went`.
    pub(crate) fn was_refused(&self, session: usize, why: &str, came_and_went: bool) {
        let died = self.0.borrow().died.clone();
        self.with(session, |pair| match &pair.refused {
            Some(reason) if reason == why || came_and_went => None,
            None if pair.killed => None,
            // Accepted, and dropped by its owner or with its process before the opener learned of it.
            None if pair.was_dropped_by_acceptor(&died) => {
                pair.killed = true;
                None
            }
            reason => Some(format!("was refused with {reason:?}, but the opener received {why:?}")),
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

    pub(crate) fn wrote(&self, session: usize, end_id: EndId, bytes: usize) {
        self.with(session, |pair| {
            pair.end(end_id).written += bytes as u64;
            None
        });
    }

    pub(crate) fn typed(&self, session: usize, end_id: EndId, bytes: usize) {
        self.0.borrow_mut().typed.push((session, end_id, bytes));
    }

    pub(crate) fn take_typed(&self) -> Vec<(usize, usize, usize)> {
        std::mem::take(&mut self.0.borrow_mut().typed)
    }

    pub(crate) fn timed(&self) {
        self.0.borrow_mut().timed += 1;
    }

    pub(crate) fn relayed(&self) {
        self.0.borrow_mut().relayed += 1;
    }

    pub(crate) fn backup_links(&self) {
        self.0.borrow_mut().backup_links += 1;
    }

    /// Records that a session was moved to the interactive link, or back.
    pub(crate) fn classified(&self, to_interactive: bool) {
        self.0.borrow_mut().classified[usize::from(!to_interactive)] += 1;
    }

    pub(crate) fn resumed(&self, times: u32) {
        self.0.borrow_mut().resumed += times;
    }

    pub(crate) fn add_to(&self, seen: &mut Seen) {
        let inner = self.0.borrow();
        seen.bytes += inner.pairs.iter().flat_map(|pair| pair.ends.values()).map(|end| end.read).sum::<u64>();
        seen.resumed += inner.resumed;
        seen.timed += inner.timed;
        seen.relayed += inner.relayed;
        seen.died += inner.died.len();
        seen.backup_links += inner.backup_links;
        seen.classified = [0, 1].map(|way| seen.classified[way] + inner.classified[way]);
        seen.killed += inner.pairs.iter().filter(|pair| pair.killed).count();
    }

    pub(crate) fn finished(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            pair.end(end_id).finished = true;
            None
        });
    }

    pub(crate) fn read(&self, session: usize, end_id: EndId, bytes: &[u8]) {
        self.with(session, |pair| {
            let Some(peer) = pair.other(end_id) else {
                return Some(format!("end {end_id} read bytes, but its opener uses another acceptor"));
            };
            let written = pair.end(peer).written;
            let end = pair.end(end_id);
            let right = content(session, peer, end.read, bytes.len()) == bytes;
            end.read += bytes.len() as u64;
            if end.ended {
                return Some(format!("end {end_id} read bytes after the end of stream"));
            }
            if end.read > written {
                return Some(format!("end {end_id} read more than was written"));
            }
            (!right).then(|| format!("end {end_id} read wrong bytes up to {}", end.read))
        });
    }

    pub(crate) fn ended(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            let Some(peer) = pair.other(end_id) else {
                return Some(format!(
                    "end {end_id} read an end of stream, but its opener uses another acceptor"
                ));
            };
            let (finished, written) = (pair.end(peer).finished, pair.end(peer).written);
            let end = pair.end(end_id);
            end.ended = true;
            (!finished || end.read != written).then(|| {
                format!("end {end_id} read the end of stream at {}, {written} were written", end.read)
            })
        });
    }

    /// Records that an owner got an error before the end of its session.
    pub(crate) fn broken(&self, session: usize, end_id: EndId, error: &io::Error) {
        let Inner { lenient, evictions, .. } = *self.0.borrow();
        let error = error.to_string();
        let violation = error.contains("protocol error");
        let made_room = evictions.iter().any(|part| error.contains(part));
        self.with(session, |pair| {
            let concerns = pair.other(end_id).is_some();
            let excused = pair.killed || lenient || made_room || !concerns;
            pair.killed |= (lenient || made_room) && concerns;
            pair.made_room |= made_room;
            (!excused || violation).then(|| format!("end {end_id} broke: {error}"))
        });
    }

    /// Records that an owner drops its end.
    pub(crate) fn dropped(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            let concerns = pair.other(end_id).is_some();
            let end = pair.end(end_id);
            end.dropped = true;
            end.buffered = !(end.finished && end.ended);
            pair.killed |= end.buffered && concerns;
            None
        });
    }

    /// Returns sessions that were not transferred in full, but should have been.
    pub(crate) fn unfinished(&self) -> Vec<String> {
        let inner = self.0.borrow();
        let unfinished = inner.pairs.iter().enumerate().filter(|(_, pair)| !pair.is_complete());
        unfinished.map(|(at, pair)| format!("session {at}: {pair:?}")).collect()
    }

    fn with(&self, session: usize, step: impl FnOnce(&mut SessionRecord) -> Option<String>) {
        let fault = step(&mut self.0.borrow_mut().pairs[session]);
        if let Some(why) = fault {
            self.error(format!("session {session}: {why}"));
        }
    }
}
