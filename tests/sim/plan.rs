//! What kind of world a run has: drawn from its seed, so that rare mixtures come up.

use std::time::Duration;

use tunnel_proto::halves::WindowLimits;

use super::chance::Dice;

/// What a test is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    /// Links come and go; owners are faithful.
    Cuts,
    /// Owners drop, reset and refuse, and links come and go.
    Drops,
    /// One link that holds; who speaks first.
    Turns,
    /// Nobody comes back within the grace time.
    Grace,
    /// Many pods and edges: sessions pass through the middle, processes die, registries lie.
    Pods,
}

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) about: About,
    pub(crate) servers: usize,
    pub(crate) edges: usize,
    /// Edges with the name of another.
    pub(crate) impostors: usize,
    pub(crate) sessions: usize,
    /// Most bytes of one direction.
    pub(crate) most: usize,
    pub(crate) windows: [WindowLimits; 2],
    /// Of a pod and of an edge.
    pub(crate) memory: [usize; 2],
    pub(crate) grace: Duration,
    pub(crate) chaos: Duration,
    /// Harm ends after so many steps, if not before.
    pub(crate) steps: usize,
    /// Mean steps between two cuts; 0 for none.
    pub(crate) cuts: usize,
    /// Mean steps between two Lost of a pod in the middle; 0 for none.
    pub(crate) losses: usize,
    /// Mean steps between two deaths of a process; 0 for none.
    pub(crate) deaths: usize,
    /// One in so many answers about where a node is, is wrong; 0 for none.
    pub(crate) lies: usize,
    /// One in so many owners drops its end before its time; 0 for none.
    pub(crate) drops: usize,
    /// One in so many offers is refused.
    pub(crate) refusals: usize,
    /// One in so many reads is followed by a rest.
    pub(crate) rests: usize,
    /// Whether seekers and openers are ours, who ask again and again over any link, instead of the program's.
    pub(crate) wild: bool,
    /// Whether frames go through the codec, cut anywhere.
    pub(crate) codec: bool,
    pub(crate) latency: Duration,
    /// Bytes a second.
    pub(crate) rate: u64,
    /// Whether all who write much write about as much as there may be.
    pub(crate) bulk: bool,
    /// Whether all lines are slow.
    pub(crate) slow: bool,
    /// Whether harm is over, where there are many pods.
    pub(crate) healed: bool,
    /// How eagerly tasks, pulls, deliveries and the clock are chosen.
    pub(crate) weights: [usize; 4],
}

impl Plan {
    pub(crate) fn draw(about: About, dice: &Dice) -> Self {
        let calm = about == About::Turns;
        let windows = || {
            let starts = [1_000, 4_096, 32 << 10, 64 << 10, 256 << 10];
            let start = if calm { 64 << 10 } else { starts[dice.below(5)] };
            WindowLimits { start, max: start << dice.below(6) }
        };
        // Pods that can hold little for others.
        let tight = about == About::Pods && dice.one_in(3);
        let memory = || [if calm { 1 << 20 } else { 300 << 10 }, 8 << 20][dice.below(2)];
        let many = about == About::Pods;
        let harsh = matches!(about, About::Cuts | About::Drops | About::Pods);
        // Owners who are faithful, or who are not.
        let drops = about == About::Drops || many && dice.one_in(3);
        let mut plan = Self {
            about,
            servers: if many { dice.between(2, 4) } else { 1 },
            edges: if many { dice.between(1, 4) } else { 1 },
            impostors: if many { dice.below(2) } else { 0 },
            sessions: dice.between(1, [3, 12, if calm { 12 } else { 40 }][dice.below(3)]),
            most: if calm { 700_000 } else { [2_000, 100_000, 700_000][dice.below(3)] },
            windows: [if tight { WindowLimits { start: 1_000, max: 8_000 } } else { windows() }, windows()],
            memory: [if tight { 60_000 } else { memory() }, memory()],
            grace: if about == About::Grace {
                Duration::from_millis(500 << dice.below(4))
            } else {
                Duration::from_secs(60)
            },
            chaos: Duration::from_secs(dice.between(2, 16) as u64),
            steps: 300 << dice.below(6),
            cuts: if calm { 0 } else { [60, 300, 2_000][dice.below(3)] },
            losses: if harsh { [0, 0, 40, 400][dice.below(4)] } else { 0 },
            deaths: if many { [0, 0, 300, 1_500][dice.below(4)] } else { 0 },
            lies: if many { [0, 3, 10, 50][dice.below(4)] } else { 0 },
            drops: if drops { dice.between(2, 6) } else { 0 },
            refusals: if drops { dice.between(2, 9) } else { 0 },
            rests: if calm { 0 } else { [0, 3, 20][dice.below(3)] },
            wild: harsh && dice.one_in(2),
            codec: dice.one_in(2),
            latency: dice.time(Duration::from_millis(if about == About::Grace { 600 } else { 80 })),
            rate: [if calm { 1_000_000 } else { 20_000 }, 300_000, 2_500_000, 100_000_000][dice.below(4)],
            bulk: false,
            slow: false,
            healed: false,
            weights: std::array::from_fn(|_| [1, 3, 12][dice.below(3)]),
        };
        if about == About::Cuts && dice.one_in(6) {
            plan.spend(dice);
        }
        if many && dice.one_in(5) {
            plan.clog(dice);
        }
        plan
    }

    /// One side has no memory left for what it sends, while all of it is sent: only an answer lets it write on.
    fn spend(&mut self, dice: &Dice) {
        let memory = [300 << 10, 8 << 20];
        self.memory = if dice.one_in(2) { memory } else { [memory[1], memory[0]] };
        self.windows = [WindowLimits { start: 256 << 10, max: 1 << 20 }; 2];
        (self.sessions, self.most, self.bulk) = (dice.between(2, 8), 700_000, true);
        (self.cuts, self.losses, self.rests) = (2_000, 0, 0);
        (self.rate, self.latency) = (100_000_000, Duration::from_millis(dice.between(10, 80) as u64));
    }

    /// Lines are slow and readers too, so that answers and credits wait for one another.
    fn clog(&mut self, dice: &Dice) {
        (self.servers, self.edges, self.sessions) = (2, dice.between(1, 2), dice.between(20, 40));
        self.windows = [WindowLimits { start: 4_096, max: 4_096 }; 2];
        (self.memory, self.most, self.bulk) = ([8 << 20; 2], 60_000, true);
        (self.slow, self.rests, self.losses, self.cuts) = (true, 2, 40, 300);
        (self.chaos, self.steps) = (Duration::from_secs(16), 9_600);
    }

    /// Whether keystrokes and bulk are what it is about.
    pub(crate) fn is_calm(&self) -> bool {
        self.about == About::Turns
    }

    /// Whether a session may end although both owners are faithful.
    pub(crate) fn may_give_up(&self) -> bool {
        self.about == About::Grace
    }
}
