//! One run: a cloud, an edge, the links between them, and a scheduler that means no good.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, advance};
use tunnel::names::Instance;
use tunnel::registry::Registry;
use tunnel::registry::find::Finder;
use tunnel::route::Route;
use tunnel::telemetry::Metrics;
use tunnel::tunnel::frame::Body;
use tunnel::tunnel::{Event, Limits, Parked, Table};

use super::chance::Dice;
use super::crowd::Crowd;
use super::ledger::Ledger;
use super::line::Line;
use super::owner::Place;
use super::plan::{About, Plan};

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) dice: Dice,
    pub(crate) plan: Plan,
    pub(crate) ledger: Ledger,
    pub(crate) crowd: Crowd,
    pub(crate) place: Place,
    pub(crate) tables: [Arc<Table>; 2],
    pub(crate) registry: Arc<Registry>,
    pub(crate) lines: Vec<Line>,
    pub(crate) links: u64,
    pub(crate) steps: usize,
    pub(crate) ticked: Instant,
    /// When anything but the clock last moved.
    pub(crate) moved: Instant,
}

#[derive(Clone, Copy)]
enum Move {
    Task,
    Pull(usize, usize),
    Deliver(usize, usize),
    Clock,
}

impl World {
    pub(crate) fn new(seed: u64, about: About, ledger: Ledger) -> Self {
        let dice = Dice::new(seed);
        let plan = Plan::draw(about, &dice);
        let table = |side: usize| {
            let metrics = if side == 0 { Metrics::cloud("", "") } else { Metrics::edge() };
            let (windows, memory, grace) = (plan.windows[side], plan.memory, plan.grace);
            let limits = Limits { windows, memory, sessions: 1000, grace };
            Table::new(Instance::from_bits(side as u128 + 1), limits, metrics)
        };
        let tables = [table(0), table(1)];
        let registry = Registry::new(Metrics::cloud("", ""));
        let finder = Finder::alone(registry.clone(), tables[0].instance());
        let crowd = Crowd::default();
        // No longer than ended ids are remembered: else a late Open would be dialled again.
        let patience = plan.grace.min(Duration::from_secs(12));
        let place = Place {
            dice: dice.clone(),
            plan: Rc::new(RefCell::new(plan.clone())),
            ledger: ledger.clone(),
            cradle: crowd.cradle(),
            route: Route::new(finder, tables[0].clone(), patience, plan.grace),
            table: tables[0].clone(),
            paths: Rc::default(),
        };
        let now = Instant::now();
        let (lines, links, steps) = (Vec::new(), 0, 0);
        Self {
            seed,
            dice,
            plan,
            ledger,
            crowd,
            place,
            tables,
            registry,
            lines,
            links,
            steps,
            ticked: now,
            moved: now,
        }
    }

    /// The whole run; an error says what is wrong.
    pub(crate) async fn live(mut self) -> Result<(), String> {
        self.ledger.begin(self.plan.sessions, self.plan.may_give_up());
        self.ledger.note(|| format!("seed {}: {:?}", self.seed, self.plan));
        self.link();
        for number in 0..self.plan.sessions {
            let place = self.place.clone();
            self.place.cradle.spawn(format!("opener {number}"), place.open(number));
        }
        let until = Instant::now() + self.plan.chaos;
        while Instant::now() < until && self.steps < self.plan.steps {
            self.step().await?;
            self.harm();
        }
        self.heal().await?;
        self.rest(QUIET).await?;
        let unfinished = self.ledger.unfinished();
        if !unfinished.is_empty() {
            return Err(format!(
                "nothing moves any more; waiting: {:?}; unfinished: {unfinished:#?}",
                self.crowd.names()
            ));
        }
        // An opener finds out that nobody is there by asking; only an acceptor may have to wait for the grace time.
        let waits = |name: &&str| name.ends_with(".0") || name.starts_with("opener");
        if self.plan.about != About::Grace && self.crowd.names().iter().any(waits) {
            return Err(format!("nothing moves any more, and openers wait: {:?}", self.crowd.names()));
        }
        self.rest(self.plan.grace + Duration::from_secs(20)).await?;
        self.nothing_is_left()
    }

    /// One thing that may happen next, happens.
    async fn step(&mut self) -> Result<(), String> {
        let now = Instant::now();
        let mut kinds: [Vec<Move>; 4] = Default::default();
        if self.crowd.ready() > 0 {
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
        let mut ticket = self.dice.below((0..4).map(weight).sum());
        let chosen = (0..4).find(|kind| {
            let hit = ticket < weight(*kind);
            ticket = ticket.wrapping_sub(if hit { 0 } else { weight(*kind) });
            hit
        });
        let kind = &kinds[chosen.unwrap_or(3)];
        match kind[self.dice.below(kind.len())] {
            Move::Task => self.run_task(),
            Move::Pull(line, side) => self.lines[line].pull(side, now, &self.dice, &self.ledger),
            Move::Deliver(line, side) => self.deliver(line, side, now),
            Move::Clock => self.pass_time(busy, now).await,
        }
        if busy {
            self.moved = Instant::now();
        }
        self.steps += 1;
        self.notice();
        self.check_memory()?;
        self.ledger.check()
    }

    fn run_task(&mut self) {
        let ready = self.crowd.ready();
        let name = self.crowd.run(self.dice.below(ready));
        self.ledger.note(|| format!("{name} runs"));
        for (session, side, _) in self.ledger.take_typed() {
            if self.plan.about == About::Turns {
                self.lines.iter_mut().for_each(|line| line.ends[side].turns.typed(session));
            }
        }
    }

    async fn pass_time(&mut self, busy: bool, now: Instant) {
        let arrival = self.lines.iter().filter_map(Line::next_arrival).min();
        let until = arrival.filter(|at| *at > now && self.dice.one_in(2)).map(|at| at - now);
        let (short, long) = if self.plan.is_calm() { (1, 50) } else { (20, 900) };
        let most = Duration::from_millis(if busy { short } else { long });
        let step = until.unwrap_or(Duration::ZERO).max(self.dice.time(most)).min(Duration::from_secs(1));
        advance(step + Duration::from_micros(10)).await;
        let now = Instant::now();
        if now - self.ticked >= Duration::from_secs(5) {
            self.ticked = now;
            self.tables.iter().for_each(|table| table.tick(now));
        }
    }

    fn deliver(&mut self, line: usize, side: usize, now: Instant) {
        for frame in self.lines[line].deliver(side, &self.dice, &self.ledger) {
            let end = &mut self.lines[line].ends[side];
            end.turns.heard(&frame.body);
            let outbox = end.outbox.clone();
            match frame.body {
                Body::Ping(number) => outbox.pong(number),
                Body::Pong(Some(number)) => drop(outbox.ponged(number, now)),
                Body::Pong(None) => self.ledger.fault("a pong without a number"),
                Body::Session(id, category, word) => {
                    let event = self.tables[side].hear(&outbox, frame.node, id, category, word, now);
                    self.event(event, side);
                }
                other => self.ledger.fault(format!("nobody says {other:?} here")),
            }
        }
    }

    fn event(&self, event: Option<Event>, side: usize) {
        match event {
            Some(Event::Offer(offer)) if side == 1 => {
                self.place.cradle.spawn("acceptor".into(), self.place.clone().answer(offer));
            }
            Some(Event::Offer(_)) => self.ledger.fault("the cloud was offered a session"),
            Some(Event::Parked(parked)) => self.seek(parked, side),
            Some(other) => self.ledger.fault(format!("unexpected: {other:?}")),
            None => {}
        }
    }

    pub(crate) fn seek(&self, parked: Parked, side: usize) {
        if side == 0 {
            self.place.cradle.spawn("seeker".into(), self.place.clone().seek(parked));
        }
    }

    /// Goes on until nothing but the clock has moved for so long.
    async fn rest(&mut self, quiet: Duration) -> Result<(), String> {
        self.moved = Instant::now();
        let most = self.steps + MOST_STEPS;
        while self.moved.elapsed() < quiet {
            self.step().await?;
            if self.steps > most {
                return Err("it goes on for ever".into());
            }
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<(), String> {
        if !self.steps.is_multiple_of(16) {
            return Ok(());
        }
        for (side, table) in self.tables.iter().enumerate() {
            let ((promised, kept), queued) = (table.memory(), table.queued());
            if promised > self.plan.memory || queued > promised {
                return Err(format!(
                    "side {side} promised {promised} of {}, stores {queued}",
                    self.plan.memory
                ));
            }
            if kept > self.plan.memory + self.plan.sessions * MOST_FAIR {
                return Err(format!("side {side} keeps {kept}"));
            }
        }
        Ok(())
    }

    fn nothing_is_left(&mut self) -> Result<(), String> {
        let mut left = Vec::new();
        for (side, table) in self.tables.iter().enumerate() {
            if !table.is_empty() || table.memory() != (0, 0) {
                left.push(format!("side {side}: {} sessions, memory {:?}", table.len(), table.memory()));
            }
        }
        for line in &self.lines {
            for (side, end) in line.ends.iter().enumerate() {
                let (sessions, waiting) = (end.outbox.sessions(), end.outbox.waiting());
                if sessions + waiting + end.turns.unanswered > 0 {
                    let unanswered = end.turns.unanswered;
                    left.push(format!(
                        "end {side} of link {}: {sessions} sessions, {waiting} waiting, {unanswered} pings unanswered",
                        line.number
                    ));
                }
            }
        }
        left.extend(self.crowd.names().into_iter().map(String::from));
        if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:#?}")) }
    }
}

/// A run that takes more is cut short.
const MOST_STEPS: usize = 400_000;
/// Less than any patience of the program, so that no timer hides a lost wake-up; more than any rest of an owner.
const QUIET: Duration = Duration::from_secs(7);
/// What a session may keep although the budget is spent, and one piece more.
const MOST_FAIR: usize = 128 * 1024 + 64 * 1024 + 1_000;
