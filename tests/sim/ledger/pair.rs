//! One session in the ledger, with what each of its ends did.

use std::collections::BTreeMap;

/// Which end of a session: [`OPENER`], or [`acceptor`] in some process; a session may be offered in more than one, of
/// which one becomes the peer.
pub(crate) type Who = usize;

pub(crate) const OPENER: Who = 0;

/// The end that dials, in that process.
pub(crate) fn acceptor(process: usize) -> Who {
    process + 1
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
    /// Attempts that went from pod to pod.
    pub(crate) relayed: usize,
    /// Owners that broke off, of whom all was to be read.
    pub(crate) broke: usize,
    /// Processes that vanished.
    pub(crate) died: usize,
    /// Links that got another one beside them.
    pub(crate) doubled: usize,
    /// Sessions that were moved to a link beside their own, and back.
    pub(crate) sorted: [usize; 2],
}

/// One session.
#[derive(Debug, Default)]
pub(crate) struct Pair {
    /// The process of the opener.
    pub(crate) from: Option<usize>,
    pub(crate) ends: BTreeMap<Who, End>,
    /// The acceptor whose answer the opener heard.
    pub(crate) peer: Option<Who>,
    pub(crate) refused: Option<String>,
    /// An owner ended it before its time, or never opened it.
    pub(crate) killed: bool,
    /// A process that holds one of its ends is gone.
    pub(crate) died: bool,
    /// It was given up for a client that had fewer.
    pub(crate) made_room: bool,
}

#[derive(Debug, Default)]
pub(crate) struct End {
    pub(crate) accepted: bool,
    pub(crate) written: u64,
    /// Of these, what the session has taken.
    pub(crate) given: u64,
    /// Its owner broke off, and how many bytes were given by then.
    pub(crate) broke: Option<u64>,
    pub(crate) finished: bool,
    pub(crate) read: u64,
    pub(crate) ended: bool,
    pub(crate) dropped: bool,
    /// Its owner let it go before both directions were done.
    pub(crate) buffered: bool,
}

impl Pair {
    pub(crate) fn end(&mut self, who: Who) -> &mut End {
        self.ends.entry(who).or_default()
    }

    /// Whom the end `who` speaks with, if it was taken up.
    pub(crate) fn other(&self, who: Who) -> Option<Who> {
        match self.peer {
            Some(peer) if who == OPENER => Some(peer),
            Some(peer) if who == peer => Some(OPENER),
            _ => None,
        }
    }

    /// Whether an acceptor is gone before its time.
    pub(crate) fn is_let_go(&self, died: &[usize]) -> bool {
        let dead = |who: Who| died.iter().any(|process| acceptor(*process) == who);
        self.ends.iter().any(|(who, end)| end.buffered || end.accepted && dead(*who))
    }

    /// Ends that broke off, and whose peers, which stayed, have not read all that was given before.
    pub(crate) fn undelivered(&self) -> Vec<Who> {
        let cheated = |(who, end): (&Who, &End)| {
            let peer = self.ends.get(&self.other(*who)?)?;
            (!peer.buffered && end.broke? > peer.read).then_some(*who)
        };
        if self.died || self.made_room { Vec::new() } else { self.ends.iter().filter_map(cheated).collect() }
    }

    /// Whether it was carried in full, or need not be.
    pub(crate) fn is_whole(&self) -> bool {
        let done = |who: Who| self.ends.get(&who).is_some_and(|end| end.ended && end.dropped);
        self.killed || done(OPENER) && self.peer.is_some_and(done)
    }
}
