//! Parameters of a run: drawn from its seed, so that rare combinations occur.

use std::time::Duration;

use tunnel_proto::halves::WindowLimits;

use super::chance::SeededRng;
use super::check::MAX_FAIR;

/// The subject of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Links come and go; owners are faithful.
    Cuts,
    /// Owners drop, reset and refuse; links come and go.
    Drops,
    /// One link that stays up: the order of frames.
    Turns,
    /// No session is resumed within the resume timeout.
    Grace,
    /// Many servers and edges: sessions are relayed, processes die, registries return wrong answers.
    Pods,
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) scenario: Scenario,
    pub(crate) servers: usize,
    pub(crate) edges: usize,
    /// Number of edges with the name of another edge.
    pub(crate) impostors: usize,
    pub(crate) sessions: usize,
    /// Maximum number of bytes of one direction.
    pub(crate) most: usize,
    pub(crate) windows: [WindowLimits; 2],
    /// Memory of a server and of an edge.
    pub(crate) memory: [usize; 2],
    pub(crate) grace: Duration,
    pub(crate) chaos: Duration,
    /// Maximum number of steps with failures.
    pub(crate) steps: usize,
    /// Mean number of steps between two cuts; 0 for none.
    pub(crate) cuts: usize,
    /// Mean number of steps between two sessions lost by a server on the path; 0 for none.
    pub(crate) losses: usize,
    /// Mean number of steps between two deaths of a process; 0 for none.
    pub(crate) deaths: usize,
    /// One in this many lookups of a node is wrong; 0 for none.
    pub(crate) lies: usize,
    /// One in this many owners drops its end early; 0 for none.
    pub(crate) drops: usize,
    /// One in this many offers is refused.
    pub(crate) refusals: usize,
    /// One in this many reads is followed by a pause.
    pub(crate) rests: usize,
    /// Whether this simulation opens and searches itself, repeatedly over any link, instead of the program's router.
    pub(crate) wild: bool,
    /// Whether frames pass through the codec, split at random.
    pub(crate) codec: bool,
    pub(crate) latency: Duration,
    /// Bytes per second.
    pub(crate) rate: u64,
    /// Whether everyone who writes much writes about the maximum.
    pub(crate) bulk: bool,
    /// Whether all lines are slow.
    pub(crate) slow: bool,
    /// Whether failures have ended, in a run with many servers.
    pub(crate) healed: bool,
    /// Weights for choosing tasks, pulls, deliveries and the clock.
    pub(crate) weights: [usize; 4],
}

impl Plan {
    pub(crate) fn draw(scenario: Scenario, rng: &SeededRng) -> Self {
        let calm = scenario == Scenario::Turns;
        let windows = || {
            let starts = [1_000, 4_096, 32 << 10, 64 << 10, 256 << 10];
            let start = if calm { 64 << 10 } else { starts[rng.below(5)] };
            WindowLimits { start, max: start << rng.below(6) }
        };
        // Servers with little memory for others.
        let tight = scenario == Scenario::Pods && rng.one_in(3);
        let memory = || [if calm { 1 << 20 } else { 300 << 10 }, 8 << 20][rng.below(2)];
        let many = scenario == Scenario::Pods;
        let harsh = matches!(scenario, Scenario::Cuts | Scenario::Drops | Scenario::Pods);
        // Faithful owners, or others.
        let drops = scenario == Scenario::Drops || many && rng.one_in(3);
        let mut plan = Self {
            scenario,
            servers: if many { rng.between(2, 4) } else { 1 },
            edges: if many { rng.between(1, 4) } else { 1 },
            impostors: if many { rng.below(2) } else { 0 },
            sessions: rng.between(1, [3, 12, if calm { 12 } else { 40 }][rng.below(3)]),
            most: if calm { 700_000 } else { [2_000, 100_000, 700_000][rng.below(3)] },
            windows: [if tight { WindowLimits { start: 1_000, max: 8_000 } } else { windows() }, windows()],
            memory: [if tight { 60_000 } else { memory() }, memory()],
            grace: if scenario == Scenario::Grace {
                Duration::from_millis(500 << rng.below(4))
            } else {
                Duration::from_secs(60)
            },
            chaos: Duration::from_secs(rng.between(2, 16) as u64),
            steps: 300 << rng.below(6),
            cuts: if calm { 0 } else { [60, 300, 2_000][rng.below(3)] },
            losses: if harsh { [0, 0, 40, 400][rng.below(4)] } else { 0 },
            deaths: if many { [0, 0, 300, 1_500][rng.below(4)] } else { 0 },
            lies: if many { [0, 3, 10, 50][rng.below(4)] } else { 0 },
            drops: if drops { rng.between(2, 6) } else { 0 },
            refusals: if drops { rng.between(2, 9) } else { 0 },
            rests: if calm { 0 } else { [0, 3, 20][rng.below(3)] },
            wild: harsh && rng.one_in(2),
            codec: rng.one_in(2),
            latency: rng.time(Duration::from_millis(if scenario == Scenario::Grace { 600 } else { 80 })),
            rate: [if calm { 1_000_000 } else { 20_000 }, 300_000, 2_500_000, 100_000_000][rng.below(4)],
            bulk: false,
            slow: false,
            healed: false,
            weights: std::array::from_fn(|_| [1, 3, 12][rng.below(3)]),
        };
        if scenario == Scenario::Cuts && rng.one_in(6) {
            plan.spend(rng);
        }
        if many && rng.one_in(5) {
            plan.clog(rng);
        }
        plan
    }

    /// Makes one side run out of memory for unacknowledged bytes, so that only an acknowledgement lets it write.
    fn spend(&mut self, rng: &SeededRng) {
        let memory = [300 << 10, 8 << 20];
        self.memory = if rng.one_in(2) { memory } else { [memory[1], memory[0]] };
        self.windows = [WindowLimits { start: 256 << 10, max: 1 << 20 }; 2];
        (self.sessions, self.most, self.bulk) = (rng.between(2, 8), 700_000, true);
        (self.cuts, self.losses, self.rests) = (2_000, 0, 0);
        (self.rate, self.latency) = (100_000_000, Duration::from_millis(rng.between(10, 80) as u64));
    }

    /// Makes lines and readers slow, so that replies and credits wait for each other.
    fn clog(&mut self, rng: &SeededRng) {
        (self.servers, self.edges, self.sessions) = (2, rng.between(1, 2), rng.between(20, 40));
        self.windows = [WindowLimits { start: 4_096, max: 4_096 }; 2];
        (self.memory, self.most, self.bulk) = ([8 << 20; 2], 60_000, true);
        (self.slow, self.rests, self.losses, self.cuts) = (true, 2, 40, 300);
        (self.chaos, self.steps) = (Duration::from_secs(16), 9_600);
    }

    /// Returns true if the run is about keystrokes and bulk data.
    pub(crate) fn is_calm(&self) -> bool {
        self.scenario == Scenario::Turns
    }

    /// Returns true if a session may end although both owners are faithful.
    pub(crate) fn may_give_up(&self) -> bool {
        self.scenario == Scenario::Grace
    }

    /// Returns parts of the errors that faithful owners may get: with little memory, and with several clients.
    pub(crate) fn evictions(&self) -> &'static [&'static str] {
        let is_ample = |memory: &usize| self.sessions * MAX_FAIR <= memory / 4;
        let first = usize::from(self.memory.iter().all(is_ample));
        let several = usize::from(self.scenario == Scenario::Pods);
        &["has most bytes that the other end has not confirmed", "evicted in favour of another client"]
            [first..=several]
    }
}
