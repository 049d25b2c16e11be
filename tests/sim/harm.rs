//! Failures of links and processes: they start, break, lose sessions, die and recover.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tunnel::registry::LinkedNode;
use tunnel_link::link::Link;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::state::LinkId;

use super::line::{HEALED, Line};
use super::plan::Scenario;
use super::process::Process;
use super::world::Simulation;

impl Simulation {
    /// Creates a link between two processes.
    pub(crate) fn link(&mut self, at: [usize; 2]) {
        self.link_as(at, false);
    }

    /// Like [`Self::link`], but an older link stays open if `is_backup` is set.
    ///
    /// Returns the older link's end at the server, if the server knows it as the node's.
    pub(crate) fn link_as(&mut self, at: [usize; 2], is_backup: bool) -> Option<Arc<Link>> {
        let outboxes = self.lay(at);
        for side in [0, 1] {
            self.paths.add(at[side], at[1 - side], &outboxes[side]);
        }
        let (server, link) = (&self.processes[at[0]], outboxes[0].clone());
        let mut older = None;
        if server.place.route.is_some() {
            let linked = LinkedNode { link, from: ([127, 0, 0, 1], 1).into() };
            older = server.registry.insert(linked, is_backup);
        }
        older
    }

    /// Creates a line between two processes, with a link that is not registered.
    pub(crate) fn lay(&mut self, at: [usize; 2]) -> [Arc<Link>; 2] {
        self.links += 1;
        let outboxes = [0, 1].map(|side| {
            let (me, other) = (&self.processes[at[side]], &self.processes[at[1 - side]]);
            let far = Some(other.table.instance());
            Link::new(LinkId(self.links * 2 + side as u64), me.sees(other), far)
        });
        self.ledger.note(|| format!("link {} is created between {at:?}", self.links));
        let mut plan = self.plan.clone();
        if !plan.healed && plan.scenario == Scenario::Pods {
            // Frames that arrive fast and leave slowly are queued in between.
            plan.rate =
                [20_000, 300_000, 2_500_000, 100_000_000][self.rng.below(if plan.slow { 2 } else { 4 })];
        }
        self.lines.push(Line::new(self.links, at, outboxes.clone(), &plan));
        outboxes
    }

    /// Creates a random link: between two servers, or from an edge to any server, to which it may already be connected.
    pub(crate) fn link_any(&mut self) {
        let (servers, edges) = (self.living(true), self.living(false));
        let server = servers[self.rng.below(servers.len())];
        let others = if self.rng.one_in(3) { servers } else { edges };
        let other = others[self.rng.below(others.len())];
        if other != server {
            self.link([server, other]);
        }
    }

    /// Applies random failures: links are cut, lose sessions, get a backup link; processes die. Also sends pings.
    pub(crate) fn cause_failures(&mut self) {
        let now = Instant::now();
        let alive: Vec<usize> = (0..self.lines.len()).filter(|at| !self.lines[*at].cut).collect();
        if self.rng.one_in(self.plan.cuts) && !alive.is_empty() {
            let line = &mut self.lines[alive[self.rng.below(alive.len())]];
            self.ledger.note(|| format!("link {} is cut", line.number));
            line.cut(now, Duration::from_secs(4), &self.rng);
        }
        if self.plan.scenario != Scenario::Grace && self.rng.one_in(self.plan.cuts * 2) && !alive.is_empty() {
            self.open_backup_link(alive[self.rng.below(alive.len())]);
        }
        self.choose_links(now);
        self.disturb_interactive_links();
        let outage = if self.plan.scenario == Scenario::Grace { 4_000 } else { 60 };
        let scarce = alive.len() < self.processes.len() - 1;
        if self.plan.cuts > 0 && (scarce && self.rng.one_in(outage) || self.rng.one_in(self.plan.cuts * 4)) {
            self.link_any();
        }
        if self.rng.one_in(self.plan.losses) && !alive.is_empty() {
            let line = alive[self.rng.below(alive.len())];
            self.lose(line, now);
        }
        if self.rng.one_in(self.plan.deaths) {
            self.replace_process();
        }
        if self.rng.one_in(40) && !self.lines.is_empty() {
            let line = self.rng.below(self.lines.len());
            let end = &mut self.lines[line].ends[self.rng.below(2)];
            if !end.link.is_closed() {
                end.link.ping();
                end.turns.ping();
            }
        }
    }

    /// Loses a session at a server on the path, or drops all of them.
    fn lose(&mut self, at: usize, now: Instant) {
        let line = &mut self.lines[at];
        if let Some(relay_model) = &line.relay_model {
            let sessions = relay_model.sessions().into_iter();
            let mut bound: Vec<_> = sessions.map(|id| (self.ledger.number(id), id)).collect();
            bound.sort_unstable();
            if !bound.is_empty() {
                line.lose(bound[self.rng.below(bound.len())].1, now, &self.ledger);
            }
            return;
        }
        let end = &line.ends[self.rng.below(2)];
        let (process, link) = (end.at, end.link.clone());
        let table = self.processes[process].table.clone();
        if self.rng.one_in(2) {
            self.ledger
                .note(|| format!("process {process} releases what is relayed by link {}", line.number));
            table.leave(&link, None, |_| false);
        } else {
            self.ledger.note(|| format!("process {process} leaves link {}", line.number));
            table.leave(&link, None, |_| true);
        }
    }

    /// Kills a process and starts another one in its place.
    fn replace_process(&mut self) {
        let servers = self.rng.one_in(2);
        let living = self.living(servers);
        let at = living[self.rng.below(living.len())];
        let node = self.processes[at].node.clone();
        self.kill(at);
        let new = self.start_process(node);
        if !servers {
            let servers = self.living(true);
            self.link([servers[self.rng.below(servers.len())], new]);
        }
    }

    /// Notifies ends of lines that were cut.
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
                let (link, process) = (line.ends[side].link.clone(), line.ends[side].at);
                let Process { table, registry, .. } = &self.processes[process];
                table.link_ended(&link, &SessionError::new(ErrorCode::Cancelled, "link closed"), now);
                registry.remove(&link);
            }
        }
        // Closed paths stay known for a while, as in a registry that is not up to date.
        if self.steps.is_multiple_of(50) {
            self.paths.tidy();
            self.lines.retain(|line| line.ends.iter().any(|end| !end.over));
        }
    }

    /// Ends all failures: every end learns of its dead links, and good links are created.
    pub(crate) fn end_failures(&mut self) {
        self.ledger.note(|| "no more harm".into());
        let mut plan = self.shared_plan.borrow_mut();
        (plan.drops, plan.refusals, plan.rests, plan.lies) = (0, 0, 0, 0);
        plan.healed = plan.scenario == Scenario::Pods;
        self.plan.healed = plan.healed;
        drop(plan);
        self.finish_choices();
        if self.plan.cuts > 0 || self.plan.losses > 0 {
            let now = Instant::now();
            for line in &mut self.lines {
                // Sessions on a good line must continue there: nothing helps an end that has not noticed a loss.
                if self.plan.scenario != Scenario::Pods {
                    line.cut(now, Duration::from_millis(100), &self.rng);
                }
                line.end_failures();
                for end in line.ends.iter_mut().filter(|_| line.cut) {
                    end.notices = Some(now + self.rng.time(Duration::from_secs(1)));
                }
            }
            (self.plan.rate, self.plan.latency) = HEALED;
            self.link_all();
        }
        self.plan.weights = [3, 3, 3, 1];
    }

    /// Connects each edge to one server, some to two, and each server to each other.
    pub(crate) fn link_all(&mut self) {
        let (servers, edges) = (self.living(true), self.living(false));
        for edge in edges {
            for _ in 0..if self.plan.scenario == Scenario::Pods { self.rng.between(1, 2) } else { 1 } {
                self.link([servers[self.rng.below(servers.len())], edge]);
            }
        }
        for (nth, server) in servers.iter().enumerate() {
            for other in &servers[..nth] {
                self.link([*server, *other]);
            }
        }
    }
}
