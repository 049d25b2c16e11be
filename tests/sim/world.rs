//! A run: servers, edges, the links between them, and an adversarial scheduler.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, advance};

use super::chance::SeededRng;
use super::check::Hops;
use super::interactive::InteractivePair;
use super::ledger::{Ledger, OPENER};
use super::line::Line;
use super::middle::CLOUD;
use super::paths::Paths;
use super::plan::{Plan, Scenario};
use super::process::{Process, Shared};
use super::silent::BackupPair;
use super::tasks::TaskSet;

pub(crate) struct Simulation {
    pub(crate) seed: u64,
    pub(crate) rng: SeededRng,
    pub(crate) plan: Plan,
    pub(crate) shared_plan: Shared<Plan>,
    pub(crate) ledger: Ledger,
    pub(crate) tasks: TaskSet,
    pub(crate) processes: Vec<Process>,
    pub(crate) paths: Paths,
    pub(crate) hops: Hops,
    pub(crate) lines: Vec<Line>,
    pub(crate) backup_pairs: Vec<BackupPair>,
    pub(crate) pairs: Vec<InteractivePair>,
    pub(crate) links: u64,
    pub(crate) steps: usize,
    pub(crate) ticked: Instant,
    /// Time when anything but the clock last progressed.
    pub(crate) moved: Instant,
    /// Number of sessions started.
    started: usize,
}

#[derive(Clone, Copy)]
enum Move {
    Task,
    Pull(usize, usize),
    Deliver(usize, usize),
    Clock,
}

impl Simulation {
    pub(crate) fn new(seed: u64, scenario: Scenario, ledger: Ledger) -> Self {
        let rng = SeededRng::new(seed);
        let plan = Plan::draw(scenario, &rng);
        let now = Instant::now();
        Self {
            seed,
            rng,
            shared_plan: Rc::new(RefCell::new(plan.clone())),
            plan,
            ledger,
            tasks: TaskSet::default(),
            processes: Vec::new(),
            paths: Paths::default(),
            hops: Hops::default(),
            lines: Vec::new(),
            backup_pairs: Vec::new(),
            pairs: Vec::new(),
            links: 0,
            steps: 0,
            ticked: now,
            moved: now,
            started: 0,
        }
    }

    /// Runs the whole simulation. Returns an error if a check fails.
    pub(crate) async fn live(mut self) -> Result<(), String> {
        self.ledger.start(self.plan.sessions, self.plan.may_give_up(), self.plan.evictions());
        self.ledger.note(|| format!("seed {}: {:?}", self.seed, self.plan));
        for _ in 0..self.plan.servers {
            self.start_process(None);
        }
        for edge in 0..self.plan.edges + self.plan.impostors {
            // An impostor has the name of an existing edge.
            let name = format!("edge{}", edge % self.plan.edges);
            self.start_process(Some(name.parse().unwrap()));
        }
        self.link_all();
        let until = Instant::now() + self.plan.chaos;
        while Instant::now() < until && self.steps < self.plan.steps {
            let many = self.plan.scenario == Scenario::Pods;
            while self.started < self.plan.sessions && (!many || self.rng.one_in(15)) {
                self.start();
            }
            self.step().await?;
            self.cause_failures();
        }
        while self.started < self.plan.sessions {
            self.start();
        }
        self.end_failures();
        self.rest(QUIET).await?;
        let unfinished = self.ledger.unfinished();
        if !unfinished.is_empty() {
            return Err(format!(
                "no more progress; waiting: {:?}; unfinished: {unfinished:#?}",
                self.tasks.names()
            ));
        }
        let undelivered = self.ledger.undelivered();
        let full =
            |process: &Process| ["memory", "sessions"].map(|cause| process.metrics.truncated.counted(cause));
        let faithful = self.plan.scenario != Scenario::Grace
            && self.processes.iter().all(|process| full(process) == [0, 0]);
        if faithful && !undelivered.is_empty() {
            return Err(format!("bytes written before an abort did not all arrive: {undelivered:#?}"));
        }
        // Each end learns that its remote no longer exists, by asking or by a frame. Only if the opener died or reached
        // another process before it was open, its acceptor may have to wait for the resume timeout.
        let one = self.plan.edges + self.plan.impostors == 1;
        // The acceptor may be in any server.
        let in_server =
            |name: &str| Ledger::acceptor_of(name).is_some_and(|process| self.processes[process].is_server());
        let ends_soon = |name: &str| one && !in_server(name) || self.ledger.is_end(name);
        let waits = |name: &&str| name.starts_with("opener") || ends_soon(name);
        let openers_must_end = faithful && self.plan.deaths == 0;
        if openers_must_end && self.tasks.names().iter().any(waits) {
            return Err(format!("no more progress, and openers wait: {:?}", self.tasks.names()));
        }
        self.rest(self.plan.grace + Duration::from_secs(20)).await?;
        self.check_nothing_is_left()
    }

    /// Starts a session: from the server to the edge, or with many servers, from any process to any other.
    fn start(&mut self) {
        let number = self.started;
        self.started += 1;
        let mut from = 0;
        let mut node = format!("edge{}", self.rng.below(self.plan.edges));
        if self.plan.scenario == Scenario::Pods {
            let openers = self.living(self.rng.one_in(2));
            from = openers[self.rng.below(openers.len())];
            if !self.processes[from].is_server() && self.rng.one_in(4) {
                node = CLOUD.into();
            }
        }
        let place = self.processes[from].place.clone();
        self.ledger.record_opener(number, from);
        let spawner = place.spawner.clone();
        spawner.spawn(format!("opener {number}"), place.open(number, node.parse().unwrap()));
    }

    /// Performs one of the possible next steps.
    async fn step(&mut self) -> Result<(), String> {
        let now = Instant::now();
        let mut kinds: [Vec<Move>; 4] = Default::default();
        if self.tasks.ready() > 0 {
            kinds[0].push(Move::Task);
        }
        for (at, line) in self.lines.iter().enumerate() {
            for side in 0..2 {
                if line.can_pull(side, now) {
                    kinds[1].push(Move::Pull(at, side));
                }
                if line.has_arrived(side, now) {
                    kinds[2].push(Move::Deliver(at, side));
                }
            }
        }
        let busy = kinds.iter().any(|kind| !kind.is_empty());
        kinds[3].push(Move::Clock);
        let weight = |kind: usize| if kinds[kind].is_empty() { 0 } else { self.plan.weights[kind] };
        let mut ticket = self.rng.below((0..4).map(weight).sum());
        let chosen = (0..4).find(|kind| {
            let hit = ticket < weight(*kind);
            ticket = ticket.wrapping_sub(if hit { 0 } else { weight(*kind) });
            hit
        });
        let kind = &kinds[chosen.unwrap_or(3)];
        match kind[self.rng.below(kind.len())] {
            Move::Task => self.run_task(),
            Move::Pull(line, side) => self.pull(line, side, now),
            Move::Deliver(line, side) => self.deliver(line, side, now),
            Move::Clock => self.pass_time(busy, now).await,
        }
        self.seek();
        if busy {
            self.moved = Instant::now();
        }
        self.steps += 1;
        self.notice();
        self.check_memory()?;
        self.ledger.check()
    }

    fn run_task(&mut self) {
        let ready = self.tasks.ready();
        let name = self.tasks.run(self.rng.below(ready));
        self.ledger.note(|| format!("{name} runs"));
        for (session, end_id, _) in self.ledger.take_typed() {
            if self.plan.scenario == Scenario::Turns {
                let side = usize::from(end_id != OPENER);
                self.lines.iter_mut().for_each(|line| line.ends[side].turns.typed(session));
            }
        }
    }

    async fn pass_time(&mut self, busy: bool, now: Instant) {
        let arrival = self.lines.iter().filter_map(Line::next_arrival).min();
        let until = arrival.filter(|at| *at > now && self.rng.one_in(2)).map(|at| at - now);
        let (short, long) = if self.plan.is_calm() { (1, 50) } else { (20, 900) };
        let most = Duration::from_millis(if busy { short } else { long });
        let step = until.unwrap_or(Duration::ZERO).max(self.rng.time(most)).min(Duration::from_secs(1));
        advance(step + Duration::from_micros(10)).await;
        let now = Instant::now();
        if now - self.ticked >= Duration::from_secs(5) {
            self.ticked = now;
            self.processes.iter().filter(|p| p.alive).for_each(|p| p.table.tick(now));
        }
    }

    /// Continues until nothing but the clock has progressed for `quiet`.
    async fn rest(&mut self, quiet: Duration) -> Result<(), String> {
        self.moved = Instant::now();
        let most = self.steps + MAX_STEPS;
        while self.moved.elapsed() < quiet {
            self.step().await?;
            if self.steps > most {
                return Err("the run does not end".into());
            }
        }
        Ok(())
    }
}

/// Maximum number of steps of a run.
const MAX_STEPS: usize = 400_000;
/// Shorter than every timeout of the program, so that no timer hides a lost wake-up; longer than any pause of an owner.
const QUIET: Duration = Duration::from_secs(7);
