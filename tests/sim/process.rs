//! A process of a run: a server, or an edge with the name of its node.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tunnel::registry::Finder;
use tunnel::registry::Registry;
use tunnel::route::SessionRouter;
use tunnel_base::metrics::Metrics;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_proto::frame::Remote;
use tunnel_proto::names::{Instance, NodeName};

use super::chance::chance;
use super::owner::Place;
use super::plan::Scenario;
use super::world::Simulation;

pub(crate) struct Process {
    /// Name of an edge, `None` for a server. Two processes may have the same name.
    pub(crate) node: Option<NodeName>,
    pub(crate) table: Arc<SessionTable>,
    pub(crate) metrics: Metrics,
    pub(crate) registry: Arc<Registry>,
    pub(crate) place: Place,
    pub(crate) alive: bool,
}

impl Process {
    pub(crate) fn is_server(&self) -> bool {
        self.node.is_none()
    }

    /// Returns the role of `other` from this process's view.
    pub(crate) fn sees(&self, other: &Self) -> Remote {
        match (&self.node, &other.node) {
            (Some(me), _) => Remote::Server(me.clone()),
            (None, Some(edge)) => Remote::Edge(edge.clone()),
            (None, None) => Remote::Peer,
        }
    }
}

impl Simulation {
    /// Starts a process: an edge if it has a name.
    pub(crate) fn start_process(&mut self, node: Option<NodeName>) -> usize {
        let at = self.processes.len();
        let (plan, kind) = (&self.plan, usize::from(node.is_some()));
        let metrics = || if kind == 0 { Metrics::server("", "") } else { Metrics::edge() };
        let (windows, memory, resume_timeout) = (plan.windows[kind], plan.memory[kind], plan.grace);
        let limits = SessionLimits {
            windows,
            memory,
            sessions: 1000,
            resume_timeout,
            max_resume_timeout: Duration::ZERO,
        };
        let counted = metrics();
        let table = SessionTable::new(Instance::from_bits(at as u128 + 1), limits, counted.clone());
        let registry = Registry::new(metrics());
        // Not longer than ended ids are remembered: otherwise a late Open would be dialled again.
        let patience = plan.grace.min(Duration::from_secs(12));
        let real = plan.scenario != Scenario::Pods && !plan.wild;
        let route = real.then(|| {
            let finder = Finder::without_peers(registry.clone(), table.instance());
            SessionRouter::new(finder, table.clone(), patience, plan.grace).with_chance(chance)
        });
        let place = Place {
            at,
            rng: self.rng.clone(),
            plan: self.shared_plan.clone(),
            ledger: self.ledger.clone(),
            spawner: self.tasks.spawner(at),
            route,
            node: node.clone(),
            table: table.clone(),
            paths: self.paths.clone(),
        };
        self.ledger.note(|| format!("process {at} starts: {node:?}"));
        self.processes.push(Process { node, table, metrics: counted, registry, place, alive: true });
        at
    }

    /// Kills a process with everything that it holds. The others notice in their own time.
    pub(crate) fn kill(&mut self, at: usize) {
        self.ledger.note(|| format!("process {at} dies"));
        let now = tokio::time::Instant::now();
        self.processes[at].alive = false;
        for line in &mut self.lines {
            if line.ends.iter().any(|end| end.at == at && !end.over) {
                line.cut(now, Duration::from_secs(4), &self.rng);
            }
            line.ends.iter_mut().filter(|end| end.at == at).for_each(|end| end.over = true);
        }
        self.paths.leave(at);
        self.ledger.died(at);
        self.tasks.kill(at);
    }

    /// Returns the running servers, or the running edges.
    pub(crate) fn living(&self, servers: bool) -> Vec<usize> {
        let all = self.processes.iter().enumerate();
        all.filter(|(_, p)| p.alive && p.is_server() == servers).map(|(at, _)| at).collect()
    }
}

/// A plan that tasks read as well.
pub(crate) type Shared<T> = Rc<RefCell<T>>;
