//! Owners that abort their session: all bytes that they wrote before must be read.

use super::{EndId, Ledger, Seen};

impl Ledger {
    /// Records that the session has taken `bytes` bytes.
    pub(crate) fn gave(&self, session: usize, end_id: EndId, bytes: usize) {
        self.with(session, |pair| {
            pair.end(end_id).given += bytes as u64;
            None
        });
    }

    /// Records that an owner aborts now.
    pub(crate) fn broke(&self, session: usize, end_id: EndId) {
        self.with(session, |pair| {
            let end = pair.end(end_id);
            end.broke = Some(end.given);
            None
        });
    }

    pub(crate) fn add_broken(&self, seen: &mut Seen) {
        let inner = self.0.borrow();
        let ends = inner.pairs.iter().filter(|pair| !pair.died).flat_map(|pair| pair.ends.values());
        seen.broke += ends.filter(|end| end.broke.is_some_and(|given| given > 0)).count();
    }

    /// Returns true if `task` is the reader or writer of an end known to its remote.
    pub(crate) fn is_end(&self, task: &str) -> bool {
        end(task).is_some_and(|(session, end_id)| self.0.borrow().pairs[session].other(end_id).is_some())
    }

    /// Returns the process of `task`, if it is the reader or writer of an acceptor.
    pub(crate) fn acceptor_of(task: &str) -> Option<usize> {
        end(task)?.1.checked_sub(1)
    }

    /// Returns sessions in which bytes written before an abort did not all arrive.
    pub(crate) fn undelivered(&self) -> Vec<String> {
        let inner = self.0.borrow();
        let undelivered = inner.pairs.iter().enumerate().filter(|(_, pair)| !pair.undelivered().is_empty());
        undelivered.map(|(at, pair)| format!("session {at}: {pair:?}")).collect()
    }
}

/// Returns the session and end of which `task` is the reader or writer.
fn end(task: &str) -> Option<(usize, EndId)> {
    let (session, end_id) = task.split_once(' ')?.1.split_once('.')?;
    Some((session.parse().unwrap(), end_id.parse().unwrap()))
}
