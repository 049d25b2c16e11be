//! Lines that fall silent, or only seem to: a second link beside the first, until whoever dialled has chosen.

use std::time::Duration;

use tokio::time::Instant;

use super::world::Simulation;

/// Two links between the same two processes, by their numbers.
pub(crate) struct Doubled {
    old: u64,
    new: u64,
    /// When whoever dialled chooses, and whether the new one.
    when: Instant,
    takes_new: bool,
}

impl Simulation {
    /// A line falls silent in some directions, or is only slow: its end at the edge, or at the pod that dialled, makes
    /// another one beside it, and the far end moves there what it may.
    pub(crate) fn double(&mut self, at: usize) {
        let line = &mut self.lines[at];
        let silent = [self.dice.one_in(2), self.dice.one_in(2)];
        line.fall_silent(silent);
        let (old, between) = (line.number, [line.ends[0].at, line.ends[1].at]);
        let called = line.ends[0].sender.clone();
        self.ledger.note(|| format!("link {old} falls silent in {silent:?}, and gets another one beside it"));
        self.ledger.doubled();
        let known = self.link_as(between, true);
        let table = self.processes[between[0]].table.clone();
        let moves = known.unwrap_or(called);
        table.detach_relays(&moves, |_| true);
        self.sought(table.leave(&moves, |_, _| true), between[0]);
        let takes_new = silent != [false; 2] || self.dice.one_in(2);
        let when = Instant::now() + self.dice.time(Duration::from_millis(500));
        self.doubled.push(Doubled { old, new: self.links, when, takes_new });
    }

    /// Whoever dialled ends one of the two. The other side hears of it soon, or if the line is silent, late.
    pub(crate) fn choose(&mut self, now: Instant) {
        let due: Vec<_> = self.doubled.extract_if(.., |doubled| doubled.when <= now).collect();
        for Doubled { old, new, takes_new, .. } in due {
            let goes = if takes_new { old } else { new };
            let Some(line) = self.lines.iter_mut().find(|line| line.number == goes) else { continue };
            self.ledger.note(|| format!("link {goes} is not wanted any more"));
            line.cut(now, Duration::from_secs(4), &self.dice);
            line.ends[1].notices = Some(now);
        }
    }

    /// All choices are made, and no line is silent any more without both ends hearing of it.
    pub(crate) fn chosen_at_last(&mut self) {
        let now = Instant::now();
        self.doubled.iter_mut().for_each(|doubled| doubled.when = now);
        self.choose(now);
        for line in self.lines.iter_mut().filter(|line| line.is_silent()) {
            line.cut(now, Duration::from_millis(100), &self.dice);
        }
    }
}
