//! Interactive links next to busy links, and sessions that move between the two at any time.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_link::link::Link;
use tunnel_link::table::traffic_class::TrafficClassifier;
use tunnel_proto::names::SessionId;

use super::plan::Scenario;
use super::world::Simulation;

/// Two links between the same two processes: sessions of the first may be sent over the second.
pub(crate) struct InteractivePair {
    /// Number of the second link.
    number: u64,
    /// Processes of the ends of both links.
    at: [usize; 2],
    busy: [Arc<Link>; 2],
    interactive: [Arc<Link>; 2],
    classifiers: [TrafficClassifier; 2],
    /// Whether checks come so fast that every session seems idle.
    is_hasty: bool,
    /// Sessions that each end has moved to the second link and not back.
    moved: [HashSet<SessionId>; 2],
}

impl Simulation {
    /// Opens and closes second links, and moves sessions.
    pub(crate) fn disturb_interactive_links(&mut self) {
        if !matches!(self.plan.scenario, Scenario::Cuts | Scenario::Drops | Scenario::Pods) {
            return;
        }
        if self.rng.one_in(self.plan.cuts) {
            self.open_interactive_link();
        }
        for mut pair in std::mem::take(&mut self.pairs) {
            let side = self.rng.below(2);
            if self.processes[pair.at[side]].alive {
                self.disturb_pair(&mut pair, side);
            }
            if !pair.interactive.iter().all(|link| link.is_closed()) {
                self.pairs.push(pair);
            }
        }
    }

    /// Opens an interactive link next to a link of an edge. It is not registered.
    fn open_interactive_link(&mut self) {
        let is_live =
            |at: &usize| !self.lines[*at].cut && !self.processes[self.lines[*at].ends[1].at].is_server();
        let alive: Vec<_> = (0..self.lines.len()).filter(is_live).collect();
        if alive.is_empty() {
            return;
        }
        let line = &self.lines[alive[self.rng.below(alive.len())]];
        let (number, at) = (line.number, [0, 1].map(|side| line.ends[side].at));
        let busy = [0, 1].map(|side| line.ends[side].link.clone());
        let interactive = self.lay(at);
        self.ledger.note(|| format!("link {} is the interactive link of link {number}", self.links));
        for side in [0, 1] {
            busy[side].set_interactive(Some(interactive[side].clone()));
        }
        self.pairs.push(InteractivePair {
            number: self.links,
            at,
            busy,
            interactive,
            classifiers: Default::default(),
            is_hasty: true,
            moved: Default::default(),
        });
    }

    fn disturb_pair(&mut self, pair: &mut InteractivePair, side: usize) {
        let (at, number) = (pair.at[side], pair.number);
        let (busy, interactive) = (pair.busy[side].clone(), pair.interactive[side].clone());
        let table = self.processes[at].table.clone();
        pair.is_hasty ^= self.rng.one_in(400);
        if self.rng.one_in(if pair.is_hasty { 15 } else { 60 }) {
            for _ in 0..if pair.is_hasty { self.rng.between(1, 8) } else { 1 } {
                for id in table.classify(&busy, &mut pair.classifiers[side]).moved {
                    let moved = pair.moved[side].insert(id);
                    if !moved {
                        pair.moved[side].remove(&id);
                    }
                    self.ledger.classified(moved);
                }
            }
        }
        if self.rng.one_in(60) {
            self.ledger.note(|| format!("process {at} stops sending over link {number}"));
            busy.set_interactive(None);
            pair.moved[side].clear();
            (0..table.leave(&interactive, None, |_| true)).for_each(|_| self.ledger.classified(false));
        } else if self.rng.one_in(20) && busy.interactive().is_none() {
            busy.set_interactive(Some(interactive));
        }
        let odds = if pair.busy.iter().any(|link| link.is_closed()) { 100 } else { 1_000 };
        if self.rng.one_in(odds) {
            self.ledger.note(|| format!("link {number} is no longer needed"));
            pair.busy.iter().for_each(|busy| drop(busy.set_interactive(None)));
            let line = self.lines.iter_mut().find(|line| line.number == number);
            line.into_iter().for_each(|line| line.cut(Instant::now(), Duration::from_secs(4), &self.rng));
        }
    }
}
