//! One session in the ledger, with the actions of each of its ends.

use std::collections::BTreeMap;

/// An end of a session: [`OPENER`], or [`acceptor`] in some process. A session may be offered to several processes, and
/// one of them becomes the remote.
pub(crate) type Who = usize;

pub(crate) const OPENER: Who = 0;

/// Returns the accepting end in `process`.
pub(crate) fn acceptor(process: usize) -> Who {
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
    pub(crate) doubled: usize,
    /// Number of sessions moved to an interactive link, and back.
    pub(crate) sorted: [usize; 2],
}

/// A session.
#[derive(Debug, Default)]
pub(crate) struct Pair {
    /// Process of the opener.
    pub(crate) from: Option<usize>,
    pub(crate) ends: BTreeMap<Who, End>,
    /// Acceptor of which the opener received the reply.
    pub(crate) peer: Option<Who>,
    pub(crate) refused: Option<String>,
    /// Whether an owner ended it early, or never opened it.
    pub(crate) killed: bool,
    /// Whether a process that holds one of its ends has died.
    pub(crate) died: bool,
    /// Whether it was evicted in favour of a client with fewer sessions.
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

impl Pair {
    pub(crate) fn end(&mut self, who: Who) -> &mut End {
        self.ends.entry(who).or_default()
    }

    /// Returns the other end of `who`, if there is one.
    pub(crate) fn other(&self, who: Who) -> Option<Who> {
        match self.peer {
            Some(peer) if who == OPENER => Some(peer),
            Some(peer) if who == peer => Some(OPENER),
            _ => None,
        }
    }

    /// Returns true if an acceptor ended early.
    pub(crate) fn is_let_go(&self, died: &[usize]) -> bool {
        let dead = |who: Who| died.iter().any(|process| acceptor(*process) == who);
        self.ends.iter().any(|(who, end)| end.buffered || end.accepted && dead(*who))
    }

    /// Returns ends that aborted, and of which the remote, which stayed, has not read everything written before.
    pub(crate) fn undelivered(&self) -> Vec<Who> {
        let cheated = |(who, end): (&Who, &End)| {
            let peer = self.ends.get(&self.other(*who)?)?;
            (!peer.buffered && end.broke? > peer.read).then_some(*who)
        };
        if self.died || self.made_room { Vec::new() } else { self.ends.iter().filter_map(cheated).collect() }
    }

    /// Returns true if it was transferred in full, or need not be.
    pub(crate) fn is_whole(&self) -> bool {
        let done = |who: Who| self.ends.get(&who).is_some_and(|end| end.ended && end.dropped);
        self.killed || done(OPENER) && self.peer.is_some_and(done)
    }
}
