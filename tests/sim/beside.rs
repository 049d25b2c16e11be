//! Interactive links next to busy links, and sessions that move between the two at any time.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_base::names::SessionId;
use tunnel_link::sender::LinkSender;
use tunnel_link::table::traffic_class::TrafficClassifier;

use super::plan::About;
use super::world::Simulation;

/// Two links between the same two processes: sessions of the first may be sent over the second.
pub(crate) struct Pair {
    /// Number of the second link.
    number: u64,
    /// Processes of the ends of both links.
    at: [usize; 2],
    busy: [Arc<LinkSender>; 2],
    beside: [Arc<LinkSender>; 2],
    sorting: [TrafficClassifier; 2],
    /// Whether checks come so fast that every session seems idle.
    hasty: bool,
    /// Sessions that each end has moved to the second link and not back.
    over: [HashSet<SessionId>; 2],
}

impl Simulation {
    /// Opens and closes second links, and moves sessions.
    pub(crate) fn sort(&mut self) {
        if !matches!(self.plan.about, About::Cuts | About::Drops | About::Pods) {
            return;
        }
        if self.dice.one_in(self.plan.cuts) {
            self.stand_beside();
        }
        for mut pair in std::mem::take(&mut self.pairs) {
            let side = self.dice.below(2);
            if self.processes[pair.at[side]].alive {
                self.harm_pair(&mut pair, side);
            }
            if !pair.beside.iter().all(|link| link.is_closed()) {
                self.pairs.push(pair);
            }
        }
    }

    /// Opens an interactive link next to a link of an edge. It is not registered.
    fn stand_beside(&mut self) {
        let lives = |at: &usize| !self.lines[*at].cut && !self.processes[self.lines[*at].ends[1].at].is_pod();
        let alive: Vec<_> = (0..self.lines.len()).filter(lives).collect();
        if alive.is_empty() {
            return;
        }
        let line = &self.lines[alive[self.dice.below(alive.len())]];
        let (number, at) = (line.number, [0, 1].map(|side| line.ends[side].at));
        let busy = [0, 1].map(|side| line.ends[side].sender.clone());
        let beside = self.lay(at);
        self.ledger.note(|| format!("link {} is the interactive link of link {number}", self.links));
        for side in [0, 1] {
            busy[side].set_interactive(Some(beside[side].clone()));
        }
        self.pairs.push(Pair {
            number: self.links,
            at,
            busy,
            beside,
            sorting: Default::default(),
            hasty: true,
            over: Default::default(),
        });
    }

    fn harm_pair(&mut self, pair: &mut Pair, side: usize) {
        let (at, number) = (pair.at[side], pair.number);
        let (busy, beside) = (pair.busy[side].clone(), pair.beside[side].clone());
        let table = self.processes[at].table.clone();
        pair.hasty ^= self.dice.one_in(400);
        if self.dice.one_in(if pair.hasty { 15 } else { 60 }) {
            for _ in 0..if pair.hasty { self.dice.between(1, 8) } else { 1 } {
                for id in table.classify(&busy, &mut pair.sorting[side]).moved {
                    let over = pair.over[side].insert(id);
                    if !over {
                        pair.over[side].remove(&id);
                    }
                    self.ledger.sorted(over);
                }
            }
        }
        if self.dice.one_in(60) {
            self.ledger.note(|| format!("process {at} stops sending over link {number}"));
            busy.set_interactive(None);
            pair.over[side].clear();
            table.detach_relays(&beside, None);
            (0..table.leave(&beside, None, |_| true)).for_each(|_| self.ledger.sorted(false));
        } else if self.dice.one_in(20) && busy.interactive().is_none() {
            busy.set_interactive(Some(beside));
        }
        let over = if pair.busy.iter().any(|link| link.is_closed()) { 100 } else { 1_000 };
        if self.dice.one_in(over) {
            self.ledger.note(|| format!("link {number} is no longer needed"));
            pair.busy.iter().for_each(|busy| drop(busy.set_interactive(None)));
            let line = self.lines.iter_mut().find(|line| line.number == number);
            line.into_iter().for_each(|line| line.cut(Instant::now(), Duration::from_secs(4), &self.dice));
        }
    }
}
