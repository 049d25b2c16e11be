//! One session in the ledger, with the actions of each of its ends.

use std::collections::BTreeMap;

/// An end of a session: [`OPENER`], or [`acceptor`] in some process. A session may be offered to several processes, and
/// one of them becomes the remote.
pub(crate) type EndId = usize;

pub(crate) const OPENER: EndId = 0;

/// Returns the accepting end in `process`.
pub(crate) fn acceptor(process: usize) -> EndId {
    process + 1
}

/// Counts over several runs, so that none passes because nothing happened.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) bytes: u64,
    /// How often an opener's session was resumed on another path.
    pub(crate) resumed: u32,
    /// Number of keystrokes that were timed.
    pub(crate) timed: usize,
    /// Number of sessions that an owner ended early.
    pub(crate) killed: usize,
    /// Number of attempts relayed between servers.
    pub(crate) relayed: usize,
    /// Number of owners that aborted after writing.
    pub(crate) broke: usize,
    /// Number of processes that died.
    pub(crate) died: usize,
    /// Number of links that got a backup link.
    pub(crate) backup_links: usize,
    /// Number of sessions moved to an interactive link, and back.
    pub(crate) classified: [usize; 2],
}

/// A session.
#[derive(Debug, Default)]
pub(crate) struct SessionRecord {
    /// Process of the opener.
    pub(crate) from: Option<usize>,
    pub(crate) ends: BTreeMap<EndId, End>,
    /// Acceptor of which the opener received the reply.
    pub(crate) peer: Option<EndId>,
    pub(crate) refused: Option<String>,
    /// Whether an owner ended it early, or never opened it.
    pub(crate) killed: bool,
    /// Whether a process that holds one of its ends has died.
    pub(crate) died: bool,
    /// Whether it was evicted to make room for others.
    pub(crate) made_room: bool,
}

#[derive(Debug, Default)]
pub(crate) struct End {
    pub(crate) accepted: bool,
    pub(crate) written: u64,
    /// Written bytes that the session has taken.
    pub(crate) given: u64,
    /// Number of bytes taken when the owner aborted, if it did.
    pub(crate) broke: Option<u64>,
    pub(crate) finished: bool,
    pub(crate) read: u64,
    pub(crate) ended: bool,
    pub(crate) dropped: bool,
    /// Whether its owner dropped it before both directions were done.
    pub(crate) buffered: bool,
}

impl SessionRecord {
    pub(crate) fn end(&mut self, end_id: EndId) -> &mut End {
        self.ends.entry(end_id).or_default()
    }

    /// Returns the other end of `end_id`, if there is one.
    pub(crate) fn other(&self, end_id: EndId) -> Option<EndId> {
        match self.peer {
            Some(peer) if end_id == OPENER => Some(peer),
            Some(peer) if end_id == peer => Some(OPENER),
            _ => None,
        }
    }

    /// Returns true if an acceptor ended early.
    pub(crate) fn was_dropped_by_acceptor(&self, died: &[usize]) -> bool {
        let dead = |end_id: EndId| died.iter().any(|process| acceptor(*process) == end_id);
        self.ends.iter().any(|(end_id, end)| end.buffered || end.accepted && dead(*end_id))
    }

    /// Returns ends that aborted, and of which the remote, which stayed, has not read everything written before.
    pub(crate) fn undelivered(&self) -> Vec<EndId> {
        let is_incomplete = |(end_id, end): (&EndId, &End)| {
            let peer = self.ends.get(&self.other(*end_id)?)?;
            (!peer.buffered && end.broke? > peer.read).then_some(*end_id)
        };
        if self.died || self.made_room {
            Vec::new()
        } else {
            self.ends.iter().filter_map(is_incomplete).collect()
        }
    }

    /// Returns true if it was transferred in full, or need not be.
    pub(crate) fn is_complete(&self) -> bool {
        let done = |end_id: EndId| self.ends.get(&end_id).is_some_and(|end| end.ended && end.dropped);
        self.killed || done(OPENER) && self.peer.is_some_and(done)
    }
}
