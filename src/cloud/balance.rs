//! Tells the other pods how many nodes this one has, and whether it is to be told of theirs, and asks edges to link there if
//! it has too many.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::info_span;

use super::context::PodContext;
use crate::config::cloud::Cloud;
use crate::protocol::Load;
use crate::registry::{ANNOUNCE_EVERY, Balance, PodLoad, Siblings, Weights};

/// Runs until the pod's links end.
pub(super) fn spawn(shared: &PodContext, settings: &Cloud) {
    let (moves, catches) = (settings.registry.rebalance, settings.intercept.is_some());
    let Some(siblings) = shared.siblings.clone() else { return };
    let (shared, drain) = (shared.clone(), shared.ground.drain.clone());
    drain.clone().spawn(info_span!("balance"), async move {
        let (mut balance, mut told) = (Balance::default(), None::<Instant>);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = false;
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = shared.stopping.cancelled(), if !stopping => (stopping, told) = (true, None),
                _ = ticks.tick() => {}
            }
            let (nodes, asked) = shared.registry.held();
            if told.is_none_or(|told| told.elapsed() >= ANNOUNCE_EVERY) {
                told = Some(Instant::now());
                // Who has no nodes has nothing to compare; who catches is to hear of the others' at once.
                let hold = !stopping && (moves && nodes > 0 || catches);
                let load = Load { nodes: nodes as u64, stopping, catches: catches && !stopping };
                siblings.announce_load(load, hold);
            }
            if moves && !stopping {
                let asked = even_out(&mut balance, nodes.saturating_sub(asked), &siblings, &shared);
                shared.ground.metrics.moved.inc_by(asked as u64);
            }
        }
    });
}

/// Asks as many edges as it is time for. How many.
fn even_out(balance: &mut Balance, here: usize, siblings: &Siblings, shared: &PodContext) -> usize {
    let loads = siblings.loads();
    let nodes: Option<Vec<u64>> = loads.as_ref().map(|loads| loads.iter().map(|load| load.nodes).collect());
    let weights = nodes.as_deref().map(|others| Weights { here, others });
    let most = balance.step(weights, Instant::now());
    let (Some(weights), Some(loads)) = (weights.filter(|_| most > 0), loads) else { return 0 };
    let mean = weights.mean();
    let asked = shared.registry.ask_to_move(most, || elsewhere(&loads, mean, rand::random()));
    balance.asked(asked);
    asked
}

/// The address of a pod that has fewer nodes than the mean, the likelier the more it lacks; `chance` is from 0 to 1. None
/// if no such pod's address is known.
fn elsewhere(loads: &[PodLoad], mean: f64, chance: f64) -> Option<SocketAddr> {
    #[expect(clippy::cast_precision_loss, reason = "counts of nodes")]
    let lacks = loads.iter().filter_map(|load| Some((load.at?, (mean - load.nodes as f64).max(0.0))));
    let mut left = chance * lacks.clone().map(|(_, lack)| lack).sum::<f64>();
    lacks
        .filter(|(_, lack)| *lack > 0.0)
        .find(|(_, lack)| {
            left -= lack;
            left <= 0.0
        })
        .map(|(at, _)| at)
}

/// Between two looks.
const TICK: Duration = Duration::from_secs(1);
