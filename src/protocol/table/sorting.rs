//! Which sessions of a link move bulk, and which are interactive: where there is a link for the latter beside it, each is
//! moved to where it belongs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::names::SessionId;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::session::Parked;
use crate::protocol::table::SessionTable;

/// What is known of the sessions of a link, and of the one beside it, from one look to the next.
#[derive(Debug, Default)]
pub struct Sorting(HashMap<SessionId, Weight>);

/// What a look has shown.
#[derive(Debug, Default)]
pub struct Sorted {
    /// Sessions that move bulk.
    pub bulk: usize,
    /// Sessions that do not, of those that are known for a second.
    pub interactive: usize,
    /// Sessions that were opened here and have left their link for the other one: a path is to be sought for each.
    pub parked: Vec<Parked>,
}

/// How much one session moves.
#[derive(Debug, Default)]
struct Weight {
    /// Bytes in both directions, at the last look.
    moved: u64,
    bulk: bool,
    /// Looks in a row that speak against `bulk`.
    against: u32,
    /// Looks at it so far.
    looks: u32,
    /// Looks since it was seen last.
    unseen: u32,
}

impl Weight {
    /// The session has moved so many bytes in all. Whether it moves bulk.
    fn look(&mut self, moved: u64) -> bool {
        // What is relayed is counted anew with each path.
        let came = moved.checked_sub(self.moved).unwrap_or(moved);
        let came = if self.looks == 0 { 0 } else { came };
        self.moved = moved;
        self.looks = self.looks.saturating_add(1);
        self.unseen = 0;
        let busy = came > BUSY;
        self.against = if busy == self.bulk { 0 } else { self.against + 1 };
        let enough = if busy { BULK_AFTER } else { INTERACTIVE_AFTER };
        if self.against >= enough || busy && came >= BULK_AT_ONCE {
            (self.bulk, self.against) = (busy, 0);
        }
        self.bulk
    }

    fn is_interactive(&self) -> bool {
        !self.bulk && self.looks > KNOWN_AFTER
    }
}

impl Sorting {
    /// Between two looks.
    pub const EVERY: Duration = Duration::from_millis(250);

    fn look(&mut self, id: SessionId, moved: u64) -> &Weight {
        let weight = self.0.entry(id).or_default();
        weight.look(moved);
        weight
    }

    /// Forgets what was not seen for a while. What has lost its path is not seen until it has another one.
    fn forget(&mut self, busy: &LinkSender) {
        self.0.retain(|id, weight| {
            weight.unseen += 1;
            let stays = weight.unseen <= FORGOTTEN_AFTER;
            if !stays {
                busy.divert(*id, false);
            }
            stays
        });
    }
}

impl SessionTable {
    /// Looks at the sessions of that link and of the one beside it, if there is one, each [`Sorting::EVERY`]. With one beside
    /// it, interactive sessions that run here are moved there, and bulk that runs there is moved here: what was opened here
    /// leaves its path, and what is relayed to that link is released, so that its opener comes again. What was opened at
    /// the other end, that one sorts.
    pub fn sort(&self, busy: &Arc<LinkSender>, sorting: &mut Sorting) -> Sorted {
        let mut sorted = Sorted::default();
        let beside = busy.beside().filter(|beside| !beside.is_closed());
        // Once the busy link has ended, and until there is the next one, the one beside it is all that there is.
        let mut moves = if beside.is_some() && !busy.is_closed() { MOST_MOVES } else { 0 };
        let links = [Some((busy, false)), beside.as_ref().map(|beside| (beside, true))];
        for (link, is_beside) in links.into_iter().flatten() {
            let mut belongs_there = |id, moved| {
                let weight = sorting.look(id, moved);
                sorted.bulk += usize::from(weight.bulk);
                sorted.interactive += usize::from(weight.is_interactive());
                if is_beside { weight.bulk } else { weight.is_interactive() }
            };
            for session in self.on_link(link) {
                let Some((is_opener, moved)) = session.traffic(link.id) else { continue };
                if belongs_there(session.key.id, moved) && is_opener && moves > 0 {
                    moves -= 1;
                    busy.divert(session.key.id, !is_beside);
                    session.leave(link);
                    sorted.parked.extend(session.parked());
                }
            }
            for session in link.relayed() {
                let Some(moved) = self.relays.passed(session.id, link.id) else { continue };
                if belongs_there(session.id, moved) && moves > 0 {
                    moves -= 1;
                    busy.divert(session.id, !is_beside);
                    self.relays.lose(session.id, None);
                }
            }
        }
        sorting.forget(busy);
        sorted
    }
}

/// A session that moves more than so many bytes from one look to the next is busy: 32 KiB/s.
const BUSY: u64 = 8 * 1024;
/// So many show bulk at once.
const BULK_AT_ONCE: u64 = 128 * 1024;
/// Looks in a row at which a session is busy, before it counts as bulk; and at which it is not, before it does not any more.
const BULK_AFTER: u32 = 3;
const INTERACTIVE_AFTER: u32 = 16;
/// Looks after which a session may count as interactive: what will be bulk has shown it by then.
const KNOWN_AFTER: u32 = 4;
/// Looks after which a session that is not seen is forgotten.
const FORGOTTEN_AFTER: u32 = 40;
/// Sessions that are moved at one look.
const MOST_MOVES: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a session that moves so much from one look to the next.
    fn after(weight: &mut Weight, looks: u32, each: u64) -> (bool, bool) {
        for _ in 0..looks {
            let moved = weight.moved + each;
            weight.look(moved);
        }
        (weight.bulk, weight.is_interactive())
    }

    #[test]
    fn a_session_is_bulk_once_it_stays_busy_and_interactive_once_it_stays_quiet() {
        let mut weight = Weight { moved: 1 << 40, ..Weight::default() };
        assert_eq!(after(&mut weight, KNOWN_AFTER, 100), (false, false), "not known yet");
        assert_eq!(after(&mut weight, 1, 100), (false, true));
        assert_eq!(after(&mut weight, BULK_AFTER - 1, BUSY + 1), (false, true), "a burst");
        assert_eq!(after(&mut weight, 1, BUSY), (false, true));
        assert_eq!(after(&mut weight, BULK_AFTER, BUSY + 1), (true, false));
        assert_eq!(after(&mut weight, INTERACTIVE_AFTER - 1, 0), (true, false), "it may stand still");
        assert_eq!(after(&mut weight, 1, 0), (false, true));
        assert_eq!(after(&mut weight, 1, BULK_AT_ONCE), (true, false));
    }

    #[test]
    fn what_moved_before_the_first_look_counts_for_nothing_and_a_new_path_counts_anew() {
        let mut weight = Weight::default();
        assert!(!weight.look(1 << 30) && !weight.look(1 << 30));
        assert!(!weight.look(100), "counted anew");
        assert_eq!(weight.against, 0);
    }
}
