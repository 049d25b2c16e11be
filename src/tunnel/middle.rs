//! Sessions that only pass through this pod: which two links each of them is bound to.
//!
//! An Open or a Resume binds a session; frames from one of its two links then go to the other, unread. A binding goes
//! only together with a word that tells both ends, or by one of higher epoch (`protocol.md` 4). Words go into
//! [`Lane`]s after the lock is given back; as each binding has its own lanes, what comes late is never said.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::budget::Budget;
use super::frame::{Category, Code, Refusal, Word};
use super::lane::{Full, Lane};
use super::lock;
use super::outbox::Outbox;
use super::session::end::LinkId;
use crate::names::{NodeName, SessionId};

/// All bindings of this process.
#[derive(Debug)]
pub(super) struct Middle {
    bindings: Mutex<HashMap<SessionId, Binding>>,
    /// Most bytes that wait for one session and direction.
    most: usize,
    /// What waits for all of them together.
    queued: Arc<Budget>,
    /// Most bytes that wait on one link.
    most_on_link: usize,
}

/// Which Open or Resume is meant: an answer to an older one counts no more.
#[derive(Debug, Clone)]
pub(super) struct Attempt {
    pub(super) id: SessionId,
    pub(super) category: Category,
    pub(super) node: NodeName,
    pub(super) epoch: u64,
    pub(super) from: Arc<Outbox>,
}

#[derive(Debug)]
struct Binding {
    epoch: u64,
    opener: Hop,
    /// None while its way is sought.
    acceptor: Option<Hop>,
}

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
struct Hop {
    link: Arc<Outbox>,
    lane: Arc<Lane>,
}

impl Middle {
    /// No session passes; at most `most` bytes of each may wait in each direction, and `all` bytes together. No link
    /// takes more than a quarter of that, so that one that reads nothing leaves room for others.
    pub(super) fn new(most: usize, all: usize) -> Self {
        Self { bindings: Mutex::default(), most, queued: Budget::new(all), most_on_link: most.max(all / 4) }
    }

    /// Sessions that pass, or seek their way.
    pub(super) fn len(&self) -> usize {
        lock(&self.bindings).len()
    }

    /// Whether the session is one of them.
    pub(super) fn knows(&self, id: SessionId) -> bool {
        lock(&self.bindings).contains_key(&id)
    }

    /// Bytes that wait in all lanes, with what their frames cost.
    pub(super) fn queued(&self) -> usize {
        self.queued.used()
    }

    /// An Open or Resume came. False if it is not the newest of its session.
    pub(super) fn asked(&self, attempt: &Attempt) -> bool {
        let opener = self.hop(attempt, &attempt.from);
        let mut bindings = lock(&self.bindings);
        if bindings.get(&attempt.id).is_some_and(|known| known.epoch >= attempt.epoch) {
            return false;
        }
        let binding = Binding { epoch: attempt.epoch, opener: opener.clone(), acceptor: None };
        let before = bindings.insert(attempt.id, binding);
        drop(bindings);
        if let Some(before) = before {
            before.opener.close();
            // Whoever the attempt before reached may not be on the new one's way, and would wait for ever.
            if let Some(acceptor) = before.acceptor {
                acceptor.cut(Word::Lost { epoch: before.epoch });
            }
        }
        self.admit(attempt, &opener);
        true
    }

    /// Binds the session to the link behind which its acceptor is, and says the word there.
    pub(super) fn pass(&self, attempt: &Attempt, to: &Arc<Outbox>, word: Word) {
        let acceptor = self.hop(attempt, to);
        let bound = self.with(attempt, |binding| binding.acceptor = Some(acceptor.clone()));
        if bound.is_some() && self.admit(attempt, &acceptor) {
            // Never too much: it empties what waits.
            let _ = acceptor.push(word);
        }
    }

    /// The session goes no further: its opener hears `word`, if any.
    pub(super) fn end(&self, attempt: &Attempt, word: Option<Word>) {
        let mut bindings = lock(&self.bindings);
        let known = bindings.get(&attempt.id).is_some_and(|binding| binding.is(attempt));
        let binding = if known { bindings.remove(&attempt.id) } else { None };
        drop(bindings);
        let Some(binding) = binding else { return };
        // Nothing waits in its lane yet, so the answer need not go through it.
        binding.opener.close();
        if let Some(word) = word {
            attempt.from.reply(attempt.id, attempt.category, &attempt.node, word);
        }
    }

    /// Whether the attempt still counts.
    pub(super) fn seeks(&self, attempt: &Attempt) -> bool {
        self.with(attempt, |_| ()).is_some()
    }

    /// A word from the link of `from` goes to the other side. False if it counts for nothing.
    pub(super) fn hear(&self, from: &Outbox, id: SessionId, word: Word) -> bool {
        let mut bindings = lock(&self.bindings);
        let Some(binding) = bindings.get(&id) else { return false };
        let of_opener = binding.opener.link.id == from.id;
        let (to, back) = if of_opener {
            (binding.acceptor.clone(), binding.opener.clone())
        } else if let Some(acceptor) = binding.acceptor.clone().filter(|hop| hop.link.id == from.id) {
            (Some(binding.opener.clone()), acceptor)
        } else {
            return false;
        };
        if let Word::Opened { .. } | Word::Resumed { .. } | Word::Refused { .. } = word
            && of_opener
        {
            return false;
        }
        let epoch = binding.epoch;
        // Whoever says Broken waits for an answer; a far end that does not know it hears Reset, and gives none.
        let unheard =
            matches!(word, Word::Broken { .. }) && to.as_ref().is_some_and(|to| !to.link.answers_breaks());
        let last = unheard || matches!(word, Word::Refused { .. } | Word::Reset { .. } | Word::Lost { .. });
        // Of an older attempt: its answer, and the end it tells of, do not concern this one. Of a newer one: its Open or
        // Resume was never said, for its opener thought better of it; it left this one before.
        if last && word.epoch().is_some_and(|of| of < epoch) {
            return false;
        }
        if last {
            bindings.remove(&id);
        }
        drop(bindings);
        let word = match word {
            Word::Broken { refusal, .. } if unheard => {
                back.cut(Word::Reset { epoch, refusal: Refusal::new(Code::Over, "") });
                Word::Reset { epoch, refusal }
            }
            word => {
                if last {
                    back.close();
                }
                word
            }
        };
        let Some(to) = to else { return last };
        if to.push(word).is_err() {
            self.lose(id, Some(epoch));
        }
        true
    }

    /// A link has ended: who is at the other side of the sessions that passed through it hears so.
    pub(super) fn link_ended(&self, link: LinkId, passing: impl IntoIterator<Item = SessionId>) {
        for id in passing {
            let mut bindings = lock(&self.bindings);
            let uses = |hop: &Hop| hop.link.id == link;
            let affected =
                bindings.get(&id).is_some_and(|b| uses(&b.opener) || b.acceptor.as_ref().is_some_and(uses));
            let binding = if affected { bindings.remove(&id) } else { None };
            drop(bindings);
            let Some(binding) = binding else { continue };
            for hop in [Some(binding.opener), binding.acceptor].into_iter().flatten() {
                if uses(&hop) {
                    hop.close();
                } else {
                    // Behind what waits there: it is as good as any other data.
                    let _ = hop.push(Word::Lost { epoch: binding.epoch });
                }
            }
        }
    }

    /// Lets a session go: both of its ends look for another path, or wait for one. With `epoch`, only that attempt.
    pub(super) fn lose(&self, id: SessionId, epoch: Option<u64>) {
        let mut bindings = lock(&self.bindings);
        let meant = bindings.get(&id).is_some_and(|b| epoch.is_none_or(|epoch| b.epoch == epoch));
        let binding = if meant { bindings.remove(&id) } else { None };
        drop(bindings);
        let Some(binding) = binding else { return };
        for hop in [Some(binding.opener), binding.acceptor].into_iter().flatten() {
            hop.cut(Word::Lost { epoch: binding.epoch });
        }
    }

    fn hop(&self, attempt: &Attempt, link: &Arc<Outbox>) -> Hop {
        let Attempt { id, category, node, .. } = attempt.clone();
        let budgets = (self.queued.share(), link.room_for_lanes(self.most_on_link));
        let lane = Lane::new(id, category, node, self.most, budgets);
        Hop { link: link.clone(), lane }
    }

    /// Makes the hop's link know the session; false if that link has ended, of which the other side then hears.
    fn admit(&self, attempt: &Attempt, hop: &Hop) -> bool {
        let alive = hop.link.pass(&hop.lane, attempt.epoch);
        if !alive {
            self.link_ended(hop.link.id, [attempt.id]);
        }
        alive
    }

    fn with<T>(&self, attempt: &Attempt, step: impl FnOnce(&mut Binding) -> T) -> Option<T> {
        lock(&self.bindings).get_mut(&attempt.id).filter(|binding| binding.is(attempt)).map(step)
    }
}

impl Binding {
    /// Whether it still seeks the way of this attempt.
    fn is(&self, attempt: &Attempt) -> bool {
        self.epoch == attempt.epoch && self.opener.link.id == attempt.from.id && self.acceptor.is_none()
    }
}

impl Hop {
    fn push(&self, word: Word) -> Result<(), Full> {
        let wish = self.lane.push(word)?;
        self.link.enter_lane(&self.lane, &wish);
        Ok(())
    }

    fn cut(&self, word: Word) {
        let wish = self.lane.cut(word);
        self.link.enter_lane(&self.lane, &wish);
    }

    fn close(&self) {
        self.lane.close();
        self.link.leave_lane(&self.lane);
    }
}

#[cfg(test)]
mod tests;
