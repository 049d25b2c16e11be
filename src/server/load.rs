//! Reports this server's number of nodes to its peers. Asks edges to link to peers if it has too many, and refuses those
//! for which it has no memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::info_span;

use crate::registry::balance::{NodeCounts, Rebalancer};
use crate::registry::peers::Peers;
use crate::registry::peers::node_counts::{ANNOUNCE_INTERVAL, PeerLoad};
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use crate::server::link_denial::LinkDenial;
use tunnel_link::grpc::accept::CallRejection;
use tunnel_proto::frame::Load;

/// Spawns the task, which runs until the server's links end.
pub(crate) fn spawn_balance(shared: &Arc<ServerContext>, settings: &ServerConfig) {
    let moves = settings.peers.rebalance;
    let Some(peers) = shared.finder.peers().cloned() else { return };
    let drain = shared.link_context.drain.clone();
    let shared = shared.clone();
    drain.clone().spawn(info_span!("balance"), async move {
        let mut balance = Rebalancer::default();
        let mut last_report = None::<Instant>;
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = false;
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = shared.stopping.cancelled(), if !stopping => (stopping, last_report) = (true, None),
                _ = ticks.tick() => {}
            }
            let (nodes, moved) = shared.registry.node_counts();
            if last_report.is_none_or(|last_report| last_report.elapsed() >= ANNOUNCE_INTERVAL) {
                last_report = Some(Instant::now());
                peers.broadcast_load(Load { nodes: nodes as u64, stopping });
            }
            if moves && !stopping {
                let moved = rebalance(&mut balance, nodes.saturating_sub(moved), &peers, &shared);
                shared.link_context.metrics.edges_rebalanced.inc_by(moved as u64);
            }
        }
    });
}

impl ServerContext {
    /// Checks whether there is memory for another link. If not, `/readyz` says so for a minute.
    ///
    /// # Errors
    ///
    /// Returns the denial, after which an edge dials another server, and this one again after its usual delay.
    pub(crate) fn check_room(&self) -> Result<(), LinkDenial> {
        let links = usize::try_from(self.link_context.metrics.links.all()).unwrap_or_default();
        if links < self.max_links {
            return Ok(());
        }
        let answer = CallRejection::NoRoom(self.max_links);
        self.readiness.note_until(ROOM_CONDITION, answer.to_string(), Instant::now() + NOTED);
        Err(LinkDenial::new("no_room", answer).logged())
    }
}

/// Asks as many edges as are due. Returns how many were asked.
fn rebalance(balance: &mut Rebalancer, here: usize, peers: &Peers, shared: &ServerContext) -> usize {
    let loads = peers.loads();
    let nodes: Option<Vec<u64>> = loads.as_ref().map(|loads| loads.iter().map(|load| load.nodes).collect());
    let weights = nodes.as_deref().map(|others| NodeCounts { here, others });
    let most = balance.next_batch(weights, Instant::now());
    let (Some(weights), Some(loads)) = (weights.filter(|_| most > 0), loads) else { return 0 };
    let mean = weights.mean();
    let moved = shared.registry.drain_some(most, || pick_server(&loads, mean, rand::random()));
    balance.record_requested(moved);
    moved
}

/// Returns the address of a server with fewer nodes than the mean, chosen in proportion to what it lacks. `chance` is
/// from 0 to 1. Returns `None` if no such server's address is known.
fn pick_server(loads: &[PeerLoad], mean: f64, chance: f64) -> Option<SocketAddr> {
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

/// Memory in bytes of the link of an idle edge or user, with TLS and HTTP/2.
pub(crate) const LINK_MEMORY: usize = 56 * 1024;
/// The condition in `/readyz`: there is memory for more links.
const ROOM_CONDITION: &str = "room";
/// How long a refusal for lack of memory is reported.
const NOTED: Duration = Duration::from_secs(60);
/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(1);
