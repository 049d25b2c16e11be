//! How many edges a pod that has too many asks to link elsewhere. Pure: times and weights are arguments.
//!
//! An edge that is asked dials again, and behind a balancer it may come to any pod, to this one too. That is enough:
//! only who has too many asks, so whatever falls to a pod that has room stays there, and the rest is thrown again.

use std::time::Duration;

use tokio::time::Instant;

/// The nodes of this pod and of the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeCounts<'a> {
    /// Nodes that are linked here and were not asked to leave.
    pub here: usize,
    /// Nodes of each other pod.
    pub others: &'a [u64],
}

/// Decides, second by second, how many edges are asked to link elsewhere.
#[derive(Debug, Default)]
pub struct Balance {
    state: BalanceState,
    /// How often in a row edges were asked to no avail.
    failed_moves: u32,
}

#[derive(Debug, Default)]
enum BalanceState {
    /// Nothing is to be done.
    #[default]
    Balanced,
    /// This pod has had too many since then.
    Overloaded(Instant),
    Shedding(RebalanceRound),
    /// It was to no avail; until then nothing is tried.
    CoolingDown(Instant),
}

/// What asking has brought so far.
#[derive(Debug)]
struct RebalanceRound {
    since: Instant,
    asked: usize,
    /// What the others lacked to the mean when it began.
    lacked: f64,
    /// The part of what is asked that goes where nodes are lacking, if chance decides.
    share: f64,
}

impl Balance {
    /// How many edges to ask now. To be called once a second; `None`: not all other pods are known, or one of them is
    /// stopping, so nothing is done.
    pub fn next_batch(&mut self, weights: Option<NodeCounts<'_>>, now: Instant) -> usize {
        let Some(weights) = weights.filter(|weights| !weights.others.is_empty()) else {
            self.state = BalanceState::Balanced;
            return 0;
        };
        match &mut self.state {
            BalanceState::Balanced if weights.is_crowded() => self.state = BalanceState::Overloaded(now),
            BalanceState::Overloaded(_) if !weights.is_crowded() => self.state = BalanceState::Balanced,
            BalanceState::Overloaded(since) if now - *since >= REBALANCE_DELAY => {
                let started = RebalanceRound::start(&weights, now);
                tracing::info!(
                    nodes = weights.here,
                    mean = weights.mean(),
                    "other pods have fewer nodes: edges are asked to link there"
                );
                self.state = BalanceState::Shedding(started);
            }
            BalanceState::Shedding(_) if !weights.is_uneven() => {
                tracing::info!(
                    nodes = weights.here,
                    mean = weights.mean(),
                    "no more edges are asked to link elsewhere"
                );
                (self.state, self.failed_moves) = (BalanceState::Balanced, 0);
            }
            BalanceState::Shedding(trial) if trial.is_over(&weights, now) => {
                if trial.was_of_use(&weights) {
                    *trial = RebalanceRound::start(&weights, now);
                } else {
                    let rest = COOLDOWN.saturating_mul(1 << self.failed_moves.min(16)).min(MAX_REST);
                    tracing::warn!(
                        asked = trial.asked,
                        ?rest,
                        "edges that were asked to link to pods with fewer nodes do not come there: they are left in peace"
                    );
                    self.failed_moves += 1;
                    self.state = BalanceState::CoolingDown(now + rest);
                }
            }
            BalanceState::CoolingDown(until) if now >= *until => self.state = BalanceState::Balanced,
            BalanceState::Balanced
            | BalanceState::Overloaded(_)
            | BalanceState::Shedding(_)
            | BalanceState::CoolingDown(_) => {}
        }
        match self.state {
            BalanceState::Shedding(_) => {
                (weights.here / 100).clamp(1, MAX_MOVED_AT_ONCE).min(weights.excess())
            }
            _ => 0,
        }
    }

    /// So many were asked.
    pub fn asked(&mut self, count: usize) {
        if let BalanceState::Shedding(trial) = &mut self.state {
            trial.asked += count;
        }
    }
}

impl RebalanceRound {
    fn start(weights: &NodeCounts<'_>, now: Instant) -> Self {
        let mean = weights.mean();
        let lacking = weights.others.iter().filter(|nodes| real(**nodes) < mean).count();
        let share = real(lacking as u64) / weights.servers();
        Self { since: now, asked: 0, lacked: weights.deficit(), share }
    }

    /// Enough were asked, and they have had the time to link elsewhere and to be told of.
    fn is_over(&self, weights: &NodeCounts<'_>, now: Instant) -> bool {
        now - self.since >= TRIAL && self.asked >= (weights.here / 20).max(MIN_ASKED)
    }

    /// Whether the others have gained a quarter of what chance alone would have given them.
    fn was_of_use(&self, weights: &NodeCounts<'_>) -> bool {
        self.lacked - weights.deficit() >= real(self.asked as u64) * self.share / 4.0
    }
}

impl NodeCounts<'_> {
    /// Nodes of a pod if all had as many.
    pub fn mean(&self) -> f64 {
        (real(self.here as u64) + self.others.iter().map(|nodes| real(*nodes)).sum::<f64>()) / self.servers()
    }

    fn servers(&self) -> f64 {
        real(self.others.len() as u64 + 1)
    }

    fn fewest(&self) -> f64 {
        self.others.iter().min().map_or(f64::INFINITY, |least| real(*least))
    }

    /// What the others lack to the mean.
    fn deficit(&self) -> f64 {
        let mean = self.mean();
        self.others.iter().map(|nodes| (mean - real(*nodes)).max(0.0)).sum()
    }

    /// How many of ours are above the mean.
    fn excess(&self) -> usize {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of counts")]
        let mean = self.mean().ceil() as usize;
        self.here.saturating_sub(mean)
    }

    /// Whether this pod has too many: far more than the mean, or above it while another one has next to none, as a new
    /// one among many has.
    fn is_crowded(&self) -> bool {
        let (here, mean) = (real(self.here as u64), self.mean());
        let new = mean >= MANY && self.fewest() < mean * 0.5;
        self.excess() > 0 && (here > mean * 1.2 || new)
    }

    /// Whether to go on, once it has begun.
    fn is_uneven(&self) -> bool {
        let (here, mean) = (real(self.here as u64), self.mean());
        let new = mean >= MANY && self.fewest() < mean * 0.8;
        self.excess() > 0 && (here > mean * 1.05 || new)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of nodes and pods")]
fn real(count: u64) -> f64 {
    count as f64
}

/// How long a pod has too many before it asks anybody: those that come back after a restart are still on their way.
const REBALANCE_DELAY: Duration = Duration::from_secs(10);
/// Edges that are asked in a second, at most: each is a handshake at another pod.
const MAX_MOVED_AT_ONCE: usize = 200;
/// Nodes of a pod from which on one that has less than half of them has so few by no chance.
const MANY: f64 = 20.0;
/// Edges that are asked, and time that passes, before it is judged what came of it.
const MIN_ASKED: usize = 20;
const TRIAL: Duration = Duration::from_secs(30);
/// How long nothing is tried after it was to no avail; doubled each time.
const COOLDOWN: Duration = Duration::from_secs(600);
const MAX_REST: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests;
