//! How many edges a pod that has too many asks to link elsewhere. Pure: times and weights are arguments.
//!
//! An edge that is asked dials again, and behind a balancer it may come to any pod, to this one too. That is enough:
//! only who has too many asks, so whatever falls to a pod that has room stays there, and the rest is thrown again.

use std::time::Duration;

use tokio::time::Instant;

/// The nodes of this pod and of the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights<'a> {
    /// Nodes that are linked here and were not asked to leave.
    pub here: usize,
    /// Nodes of each other pod.
    pub others: &'a [u64],
}

/// Decides, second by second, how many edges are asked to link elsewhere.
#[derive(Debug, Default)]
pub struct Balance {
    state: State,
    /// How often in a row edges were asked to no avail.
    in_vain: u32,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing is to be done.
    #[default]
    Even,
    /// This pod has had too many since then.
    Crowded(Instant),
    Moving(Trial),
    /// It was to no avail; until then nothing is tried.
    Resting(Instant),
}

/// What asking has brought so far.
#[derive(Debug)]
struct Trial {
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
    pub fn step(&mut self, weights: Option<Weights<'_>>, now: Instant) -> usize {
        let Some(weights) = weights.filter(|weights| !weights.others.is_empty()) else {
            self.state = State::Even;
            return 0;
        };
        match &mut self.state {
            State::Even if weights.is_crowded() => self.state = State::Crowded(now),
            State::Crowded(_) if !weights.is_crowded() => self.state = State::Even,
            State::Crowded(since) if now - *since >= PATIENCE => {
                let begun = Trial::begin(&weights, now);
                tracing::info!(
                    nodes = weights.here,
                    mean = weights.mean(),
                    "other pods have fewer nodes: edges are asked to link there"
                );
                self.state = State::Moving(begun);
            }
            State::Moving(_) if !weights.is_uneven() => {
                tracing::info!(
                    nodes = weights.here,
                    mean = weights.mean(),
                    "no more edges are asked to link elsewhere"
                );
                (self.state, self.in_vain) = (State::Even, 0);
            }
            State::Moving(trial) if trial.is_over(&weights, now) => {
                if trial.was_of_use(&weights) {
                    *trial = Trial::begin(&weights, now);
                } else {
                    let rest = REST.saturating_mul(1 << self.in_vain.min(16)).min(LONGEST_REST);
                    tracing::warn!(
                        asked = trial.asked,
                        ?rest,
                        "edges that were asked to link to pods with fewer nodes do not come there: they are left in peace"
                    );
                    self.in_vain += 1;
                    self.state = State::Resting(now + rest);
                }
            }
            State::Resting(until) if now >= *until => self.state = State::Even,
            State::Even | State::Crowded(_) | State::Moving(_) | State::Resting(_) => {}
        }
        match self.state {
            State::Moving(_) => (weights.here / 100).clamp(1, MOST).min(weights.excess()),
            _ => 0,
        }
    }

    /// So many were asked.
    pub fn asked(&mut self, count: usize) {
        if let State::Moving(trial) = &mut self.state {
            trial.asked += count;
        }
    }
}

impl Trial {
    fn begin(weights: &Weights<'_>, now: Instant) -> Self {
        let mean = weights.mean();
        let lacking = weights.others.iter().filter(|nodes| real(**nodes) < mean).count();
        let share = real(lacking as u64) / weights.pods();
        Self { since: now, asked: 0, lacked: weights.lack(), share }
    }

    /// Enough were asked, and they have had the time to link elsewhere and to be told of.
    fn is_over(&self, weights: &Weights<'_>, now: Instant) -> bool {
        now - self.since >= TRIAL && self.asked >= (weights.here / 20).max(LEAST_ASKED)
    }

    /// Whether the others have gained a quarter of what chance alone would have given them.
    fn was_of_use(&self, weights: &Weights<'_>) -> bool {
        self.lacked - weights.lack() >= real(self.asked as u64) * self.share / 4.0
    }
}

impl Weights<'_> {
    /// Nodes of a pod if all had as many.
    pub fn mean(&self) -> f64 {
        (real(self.here as u64) + self.others.iter().map(|nodes| real(*nodes)).sum::<f64>()) / self.pods()
    }

    fn pods(&self) -> f64 {
        real(self.others.len() as u64 + 1)
    }

    fn fewest(&self) -> f64 {
        self.others.iter().min().map_or(f64::INFINITY, |least| real(*least))
    }

    /// What the others lack to the mean.
    fn lack(&self) -> f64 {
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
const PATIENCE: Duration = Duration::from_secs(10);
/// Edges that are asked in a second, at most: each is a handshake at another pod.
const MOST: usize = 200;
/// Nodes of a pod from which on one that has less than half of them has so few by no chance.
const MANY: f64 = 20.0;
/// Edges that are asked, and time that passes, before it is judged what came of it.
const LEAST_ASKED: usize = 20;
const TRIAL: Duration = Duration::from_secs(30);
/// How long nothing is tried after it was to no avail; doubled each time.
const REST: Duration = Duration::from_secs(600);
const LONGEST_REST: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests;
