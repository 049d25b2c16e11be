//! Reports this server's number of nodes to its peers. Asks edges to link to peers that have fewer, and refuses those for
//! which it has no memory.

use std::convert::identity;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::info_span;

use crate::registry::balance::pause;
use crate::registry::peers::Peers;
use crate::registry::peers::node_counts::ANNOUNCE_INTERVAL;
use crate::server::ServerContext;
use crate::server::link_denial::LinkDenial;
use crate::server::running::part::RunningPart;
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_link::grpc::accept::CallRejection;
use tunnel_proto::frame::{FrameKind, Load};
use tunnel_proto::printable::printable;

/// Spawns the tasks that report the load, and that ask edges to move if this is enabled.
pub(crate) fn spawn_balance(peers: Arc<Peers>, part: &RunningPart) {
    let RunningPart { server, settings, drain, .. } = part;
    drain.spawn(info_span!("load"), report_load(peers.clone(), server.clone(), drain.clone()));
    if settings.peers.rebalance {
        let moving = move_edges(peers, server.clone(), drain.clone());
        drain.spawn(info_span!("balance"), moving);
    }
}

/// Reports the load at intervals, and at once when the server begins to stop. Returns when draining starts.
async fn report_load(peers: Arc<Peers>, shared: Arc<ServerContext>, drain: Drain) {
    loop {
        let stopping = shared.stopping.is_cancelled();
        let problems = shared.readiness.check().unwrap_or_else(identity);
        let problems = printable(&problems.trim_end().replace('\n', "; "));
        let nodes = shared.registry.node_count() as u64;
        peers.broadcast(&FrameKind::Load(Load { nodes, stopping, problems }));
        // Most often there is no question, because kube-apiserver answers.
        let pod_tokens = shared.edge_links.proofs.borrow().pod_tokens.clone();
        if let Some(question) = pod_tokens.and_then(|tokens| tokens.question()) {
            peers.broadcast(&FrameKind::Cluster(question.into()));
        }
        tokio::select! {
            () = drain.draining() => return,
            () = shared.stopping.cancelled(), if !stopping => {}
            () = sleep(ANNOUNCE_INTERVAL) => {}
        }
    }
}

/// Asks edges to link to peers that have fewer nodes, until draining starts or the server begins to stop.
async fn move_edges(peers: Arc<Peers>, shared: Arc<ServerContext>, drain: Drain) {
    let metrics = &shared.link_context.metrics;
    loop {
        let mut asked = 0;
        if let Some((to, links)) = shared.registry.links_to_move(&peers.loads()) {
            asked = links.iter().filter(|link| link.request_move(to)).count();
            limited!(
                metrics.refusals.may_log_once("edges_moved", to) => info,
                server_addr = %to, "asking edges to link to a peer with fewer nodes"
            );
        }
        metrics.edges_rebalanced.inc_by(asked as u64);
        tokio::select! {
            () = drain.draining() => return,
            () = shared.stopping.cancelled() => return,
            () = sleep(pause(asked, shared.registry.node_count())) => {}
        }
    }
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

/// Memory in bytes of the link of an idle edge or user, with TLS and HTTP/2.
pub(crate) const LINK_MEMORY: usize = 56 * 1024;
/// The condition in `/readyz`: there is memory for more links.
const ROOM_CONDITION: &str = "room";
/// How long a refusal for lack of memory is reported.
const NOTED: Duration = Duration::from_secs(60);
