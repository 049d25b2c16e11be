//! What happens to links: they come, break, are lost in the middle, and heal.

use std::time::Duration;

use tokio::time::Instant;
use tunnel::registry::Linked;
use tunnel::tunnel::session::end::LinkId;
use tunnel::tunnel::{Code, Outbox, Peer, Refusal};

use super::line::Line;
use super::plan::{About, Plan};
use super::world::World;

impl World {
    /// A new link between the two.
    pub(crate) fn link(&mut self) {
        self.links += 1;
        let node = || "edge1".parse().unwrap();
        let outboxes = [0, 1].map(|side| {
            let peer = if side == 0 { Peer::Edge(node()) } else { Peer::Cloud(node()) };
            let far = self.tables[usize::from(side == 0)].instance();
            Outbox::new(LinkId(self.links * 2 + side), peer, Some(far), true)
        });
        let Plan { latency, rate, codec, .. } = self.plan;
        let (outbox, instance) = (outboxes[0].clone(), Some(self.tables[1].instance()));
        self.lines.push(Line::new(self.links, outboxes, latency, rate, codec));
        self.ledger.note(|| format!("link {} is made", self.links));
        self.place.paths.borrow_mut().push(outbox.clone());
        if !self.plan.wild {
            self.registry.insert(Linked { outbox, instance, from: ([127, 0, 0, 1], 1).into() });
        }
    }

    /// Links are cut, lost in the middle, joined by others; pings are asked for.
    pub(crate) fn harm(&mut self) {
        let now = Instant::now();
        let alive: Vec<usize> = (0..self.lines.len()).filter(|at| !self.lines[*at].cut).collect();
        if self.dice.one_in(self.plan.cuts) && !alive.is_empty() {
            let line = &mut self.lines[alive[self.dice.below(alive.len())]];
            self.ledger.note(|| format!("link {} is cut", line.number));
            line.cut(now, Duration::from_secs(4), &self.dice);
        }
        let outage = if self.plan.about == About::Grace { 4_000 } else { 60 };
        if self.plan.cuts > 0
            && (alive.is_empty() && self.dice.one_in(outage) || self.dice.one_in(self.plan.cuts * 4))
        {
            self.link();
        }
        if self.dice.one_in(self.plan.losses) && !alive.is_empty() {
            let line = &mut self.lines[alive[self.dice.below(alive.len())]];
            let mut bound: Vec<_> = line.bound.keys().map(|id| (self.ledger.number(*id), *id)).collect();
            bound.sort_unstable();
            if !bound.is_empty() {
                line.lose(bound[self.dice.below(bound.len())].1, now, &self.ledger);
            }
        }
        if self.dice.one_in(40) && !self.lines.is_empty() {
            let line = self.dice.below(self.lines.len());
            let end = &mut self.lines[line].ends[self.dice.below(2)];
            if !end.outbox.is_closed() {
                end.outbox.ping();
                end.turns.ping();
            }
        }
    }

    /// Ends find out that their link is gone.
    pub(crate) fn notice(&mut self) {
        let now = Instant::now();
        for at in 0..self.lines.len() {
            for side in 0..2 {
                let line = &mut self.lines[at];
                if line.ends[side].over || line.ends[side].notices.is_none_or(|when| when > now) {
                    continue;
                }
                line.ends[side].over = true;
                self.ledger.note(|| format!("end {side} of link {} notices", line.number));
                let outbox = line.ends[side].outbox.clone();
                let mut parked =
                    self.tables[side].link_ended(&outbox, &Refusal::new(Code::GivenUp, "link gone"), now);
                // In the order in which they were opened, not in that of a map of random ids.
                parked.sort_by_key(|session| self.ledger.number(session.id()));
                parked.into_iter().for_each(|session| self.seek(session, side));
                if side == 0 {
                    self.registry.remove(&outbox);
                }
            }
        }
        // Paths that have ended stay known for a while, as in a registry that was not told yet.
        if self.steps.is_multiple_of(50) {
            self.place.paths.borrow_mut().retain(|path| !path.is_closed());
            self.lines.retain(|line| line.ends.iter().any(|end| !end.over));
        }
    }

    /// No more harm: every end knows its dead links, and a good one comes.
    pub(crate) async fn heal(&mut self) -> Result<(), String> {
        self.ledger.note(|| "no more harm".into());
        let mut plan = self.place.plan.borrow_mut();
        (plan.drops, plan.refusals, plan.rests) = (0, 0, 0);
        drop(plan);
        if self.plan.cuts > 0 || self.plan.losses > 0 {
            let now = Instant::now();
            for line in &mut self.lines {
                line.cut(now, Duration::from_millis(100), &self.dice);
                for end in &mut line.ends {
                    end.notices = Some(now + self.dice.time(Duration::from_secs(1)));
                }
            }
            (self.plan.rate, self.plan.latency) = (5_000_000, Duration::from_millis(5));
            self.link();
        }
        self.plan.weights = [3, 3, 3, 1];
        Ok(())
    }
}
