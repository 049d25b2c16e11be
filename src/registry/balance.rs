//! How many edges an overloaded server asks to link elsewhere. Pure: times and weights are arguments.
//!
//! An edge that is asked dials again, and with a balancer it may reach any server, including this one. That is enough.
//! Only overloaded servers ask, so edges that reach a server with fewer nodes stay there, and the others are asked
//! again.

use std::time::Duration;

use tokio::time::Instant;

/// The numbers of nodes of this server and of its peers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeCounts<'a> {
    /// Nodes that are linked here and were not asked to move.
    pub here: usize,
    /// Nodes of each peer.
    pub others: &'a [u64],
}

/// The decision, second by second, how many edges are asked to link elsewhere.
#[derive(Debug, Default)]
pub struct Rebalancer {
    state: BalanceState,
    /// Number of failed rounds in a row.
    failed_moves: u32,
}

/// What a server is doing about having more nodes than its peers.
#[derive(Debug, Default)]
enum BalanceState {
    /// Nothing has to be done.
    #[default]
    Balanced,
    /// This server has had too many nodes since then.
    Overloaded(Instant),
    /// Edges are being asked to link elsewhere.
    Shedding(RebalanceRound),
    /// A round failed; nothing is tried until then.
    CoolingDown(Instant),
}

/// The progress of one round of asking edges.
#[derive(Debug)]
struct RebalanceRound {
    since: Instant,
    requested: usize,
    /// What the peers lacked to the mean at the start.
    lacked: f64,
    /// The fraction of the edges asked that moves to servers with too few nodes, if chance decides.
    share: f64,
}

impl Rebalancer {
    /// Returns how many edges to ask now. To be called once a second. `weights` is `None` if not all peers are known or
    /// one of them is stopping; nothing is done then, except that a cooldown continues.
    pub fn next_batch(&mut self, weights: Option<NodeCounts<'_>>, now: Instant) -> usize {
        let Some(weights) = weights.filter(|weights| !weights.others.is_empty()) else {
            if !matches!(self.state, BalanceState::CoolingDown(_)) {
                self.state = BalanceState::Balanced;
            }
            return 0;
        };
        match &mut self.state {
            BalanceState::Balanced if weights.is_crowded() => self.state = BalanceState::Overloaded(now),
            BalanceState::Overloaded(_) if !weights.is_crowded() => self.state = BalanceState::Balanced,
            BalanceState::Overloaded(since) if now - *since >= REBALANCE_DELAY => {
                let started = RebalanceRound::start(&weights, now);
                tracing::info!(nodes = weights.here, mean = weights.mean(), "rebalancing edges to peers");
                self.state = BalanceState::Shedding(started);
            }
            BalanceState::Shedding(_) if !weights.is_uneven() => {
                tracing::info!(nodes = weights.here, mean = weights.mean(), "rebalancing finished");
                (self.state, self.failed_moves) = (BalanceState::Balanced, 0);
            }
            BalanceState::Shedding(trial) if trial.is_over(&weights, now) => {
                if trial.was_effective(&weights) {
                    *trial = RebalanceRound::start(&weights, now);
                } else {
                    let rest = COOLDOWN.saturating_mul(1 << self.failed_moves.min(16)).min(MAX_COOLDOWN);
                    tracing::warn!(
                        asked = trial.requested,
                        cooldown = ?rest,
                        "edges do not move to peers, rebalancing paused"
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

    /// Records that `count` edges were asked.
    pub fn record_requested(&mut self, count: usize) {
        if let BalanceState::Shedding(trial) = &mut self.state {
            trial.requested += count;
        }
    }
}

impl RebalanceRound {
    fn start(weights: &NodeCounts<'_>, now: Instant) -> Self {
        let mean = weights.mean();
        let lacking = weights.others.iter().filter(|nodes| as_f64(**nodes) < mean).count();
        let share = as_f64(lacking as u64) / weights.servers();
        Self { since: now, requested: 0, lacked: weights.deficit(), share }
    }

    /// Returns true if enough edges were asked, and have had the time to link elsewhere and to be announced.
    fn is_over(&self, weights: &NodeCounts<'_>, now: Instant) -> bool {
        now - self.since >= ROUND_DURATION && self.requested >= (weights.here / 20).max(MIN_REQUESTED)
    }

    /// Returns true if the peers have gained at least a quarter of what chance alone would have given them.
    fn was_effective(&self, weights: &NodeCounts<'_>) -> bool {
        self.lacked - weights.deficit() >= as_f64(self.requested as u64) * self.share / 4.0
    }
}

impl NodeCounts<'_> {
    /// Returns the number of nodes per server if all had the same.
    pub fn mean(&self) -> f64 {
        (as_f64(self.here as u64) + self.others.iter().map(|nodes| as_f64(*nodes)).sum::<f64>())
            / self.servers()
    }

    fn servers(&self) -> f64 {
        as_f64(self.others.len() as u64 + 1)
    }

    fn fewest(&self) -> f64 {
        self.others.iter().min().map_or(f64::INFINITY, |least| as_f64(*least))
    }

    /// Returns what the peers lack to the mean.
    fn deficit(&self) -> f64 {
        let mean = self.mean();
        self.others.iter().map(|nodes| (mean - as_f64(*nodes)).max(0.0)).sum()
    }

    /// Returns how many nodes here are above the mean.
    fn excess(&self) -> usize {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of counts")]
        let mean = self.mean().ceil() as usize;
        self.here.saturating_sub(mean)
    }

    /// Returns true if this server has too many nodes: far more than the mean, or more than the mean while a peer has
    /// very few. The latter is the case for one new server among many.
    fn is_crowded(&self) -> bool {
        let here = as_f64(self.here as u64);
        let mean = self.mean();
        let new = mean >= MIN_SIGNIFICANT_MEAN && self.fewest() < mean * 0.5;
        self.excess() > 0 && (here > mean * 1.2 || new)
    }

    /// Returns true if a running round should continue.
    fn is_uneven(&self) -> bool {
        let here = as_f64(self.here as u64);
        let mean = self.mean();
        let new = mean >= MIN_SIGNIFICANT_MEAN && self.fewest() < mean * 0.8;
        self.excess() > 0 && (here > mean * 1.05 || new)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of nodes and servers")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

/// How long a server is overloaded before it asks edges: after a restart many edges are still about to link again.
const REBALANCE_DELAY: Duration = Duration::from_secs(10);
/// Maximum number of edges asked per second: each causes a handshake at another server.
const MAX_MOVED_AT_ONCE: usize = 200;
/// Minimum mean of nodes per server for which a server with less than half of it is not explained by chance.
const MIN_SIGNIFICANT_MEAN: f64 = 20.0;
/// Minimum number of edges asked and time passed before a round is evaluated.
const MIN_REQUESTED: usize = 20;
const ROUND_DURATION: Duration = Duration::from_secs(30);
/// Pause after a failed round; doubled each time.
const COOLDOWN: Duration = Duration::from_secs(600);
const MAX_COOLDOWN: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests;
