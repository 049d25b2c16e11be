//! Owners whose connection breaks off: what they gave before that has to be read.

use super::{Ledger, Seen, Who};

impl Ledger {
    /// The session has taken so many bytes.
    pub(crate) fn gave(&self, session: usize, who: Who, bytes: usize) {
        self.with(session, |pair| {
            pair.end(who).given += bytes as u64;
            None
        });
    }

    /// An owner breaks off now.
    pub(crate) fn broke(&self, session: usize, who: Who) {
        self.with(session, |pair| {
            let end = pair.end(who);
            end.broke = Some(end.given);
            None
        });
    }

    pub(crate) fn add_broken(&self, seen: &mut Seen) {
        let inner = self.0.borrow();
        let ends = inner.pairs.iter().filter(|pair| !pair.died).flat_map(|pair| pair.ends.values());
        seen.broke += ends.filter(|end| end.broke.is_some_and(|given| given > 0)).count();
    }

    /// Whether it is the reader or writer of an end whose peer has heard of it.
    pub(crate) fn is_end(&self, task: &str) -> bool {
        end(task).is_some_and(|(session, who)| self.0.borrow().pairs[session].other(who).is_some())
    }

    /// The process in which a task is the reader or writer of an acceptor.
    pub(crate) fn acceptor_of(task: &str) -> Option<usize> {
        end(task)?.1.checked_sub(1)
    }

    /// Sessions of which not all arrived that was given before an owner broke off.
    pub(crate) fn undelivered(&self) -> Vec<String> {
        let inner = self.0.borrow();
        let undelivered = inner.pairs.iter().enumerate().filter(|(_, pair)| !pair.undelivered().is_empty());
        undelivered.map(|(at, pair)| format!("session {at}: {pair:?}")).collect()
    }
}

/// Of which session and end a task is the reader or writer.
fn end(task: &str) -> Option<(usize, Who)> {
    let (session, who) = task.split_once(' ')?.1.split_once('.')?;
    Some((session.parse().unwrap(), who.parse().unwrap()))
}
