//! An Open or a Resume that reached a pod: somebody wants to get to a node through it.

use std::sync::Arc;

use super::frame::{Code, Refusal, Word};
use super::middle::Attempt;
use super::outbox::{Outbox, Peer, unknown};
use super::session::Offer;
use super::table::{Event, Table};
use crate::names::{Instance, NodeName, Target};

/// Somebody wants to reach a node through this pod: pass it on, take it as its end, or refuse it.
///
/// Dropping it refuses it, so no opener is ever left waiting.
#[derive(Debug)]
#[must_use = "dropping it refuses it"]
pub struct Asked {
    table: Arc<Table>,
    attempt: Attempt,
    /// The Open or Resume itself, until it is passed on.
    word: Option<Word>,
}

impl Asked {
    pub(super) fn new(table: Arc<Table>, attempt: Attempt, word: Word) -> Self {
        Self { table, attempt, word: Some(word) }
    }

    /// Which node.
    pub fn node(&self) -> &NodeName {
        &self.attempt.node
    }

    /// By which link it came.
    pub fn from(&self) -> &Arc<Outbox> {
        &self.attempt.from
    }

    /// The process that holds the session's other end, if this is to resume it: no other may be asked.
    pub fn instance(&self) -> Option<Instance> {
        match &self.word {
            Some(Word::Resume { instance, .. }) => *instance,
            _ => None,
        }
    }

    /// What is to be dialled there, if this is to open a session.
    pub fn target(&self) -> Option<&Target> {
        match &self.word {
            Some(Word::Open { target, .. }) => Some(target),
            _ => None,
        }
    }

    /// Whether its opener still waits for this attempt to be answered.
    pub fn is_wanted(&self) -> bool {
        self.table.middle.seeks(&self.attempt)
    }

    /// Passes it on: this pod is the session's middle from now on. What came from a pod goes to no other pod, and
    /// nothing goes back to the process it came from; both are refused as *not here*.
    pub fn pass(mut self, to: &Arc<Outbox>) {
        let from = &self.attempt.from;
        let second_hop = from.peer == Peer::Pod && to.peer == Peer::Pod;
        let back = from.id == to.id || to.instance.is_some() && to.instance == from.instance;
        if second_hop || back || !to.resumes {
            return self.refuse(Refusal::new(Code::NotHere, "the node is not linked to this pod"));
        }
        if let Some(word) = self.word.take() {
            self.table.middle.pass(&self.attempt, to, word);
        }
    }

    /// Tells the opener that it goes no further: [`Code::NotHere`] lets it look elsewhere.
    pub fn refuse(mut self, why: Refusal) {
        self.answer(why);
    }

    /// Takes it as the session's acceptor; none if it cannot be one: a session to resume is not here, and a new one may
    /// be too many.
    pub fn offer(mut self) -> Option<Offer> {
        let Attempt { id, category, node, epoch, from, .. } = self.attempt.clone();
        let word = self.word.take();
        if !self.is_wanted() {
            return None;
        }
        let Some(Word::Open { target, limit, client, opener, .. }) = word else {
            self.table.middle.end(&self.attempt, Some(unknown(epoch)));
            return None;
        };
        self.table.middle.end(&self.attempt, None);
        match self.table.offered(&from, (id, category, node), (target, client, opener), (limit, epoch))? {
            Event::Offer(offer) => Some(offer),
            _ => None,
        }
    }

    fn answer(&mut self, refusal: Refusal) {
        if let Some(word) = self.word.take() {
            self.table.middle.end(&self.attempt, Some(refused(&word, refusal)));
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.answer(Refusal::new(Code::Busy, "this pod is stopping"));
    }
}

/// The answer that refuses an Open or a Resume.
pub(super) fn refused(word: &Word, refusal: Refusal) -> Word {
    let epoch = word.epoch().unwrap_or(0);
    match word {
        Word::Open { .. } => Word::Refused { epoch, refusal },
        _ => Word::Reset { epoch, refusal },
    }
}
