//! The number of nodes of each server, as reported between servers.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::registry::peers::peer::Peer;
use crate::registry::peers::{MAX_KNOWN, Peers};
use tunnel_link::link::Link;
use tunnel_proto::frame::{FrameKind, Load};
use tunnel_proto::names::NodeName;

/// A peer and its number of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLoad {
    /// The peer's gRPC address, as dialled from here.
    pub at: SocketAddr,
    /// Number of nodes that are linked to the peer.
    pub nodes: u64,
}

impl Peers {
    /// Sends a signal to every peer: this server's load every [`ANNOUNCE_INTERVAL`].
    pub fn broadcast(&self, body: &FrameKind) {
        let mut reported = HashSet::new();
        for link in self.links() {
            if link.instance.is_none_or(|server| reported.insert(server)) {
                link.signal(&NodeName::none(), body.clone());
            }
        }
    }

    /// Records the load that a peer reports.
    pub fn handle_load(&self, from: &Link, load: Load) {
        let Some(server) = from.instance else { return };
        let now = Instant::now();
        let mut loads = self.loads.lock();
        loads.retain(|_, (_, at)| now - *at < LOAD_TTL);
        if loads.len() < MAX_KNOWN || loads.contains_key(&server) {
            loads.insert(server, (load, now));
        }
    }

    /// Returns the problems that the peer at the remote end of a link has reported lately, if it has any.
    pub(crate) fn problems_at(&self, link: &Link) -> Option<String> {
        let loads = self.loads.lock();
        let (load, at) = loads.get(&link.instance?)?;
        (at.elapsed() < LOAD_TTL && !load.problems.is_empty()).then(|| load.problems.clone())
    }

    /// Returns the load of every peer that this server has dialled, unless it has not reported recently or is stopping.
    pub fn loads(&self) -> Vec<PeerLoad> {
        let linked = |peer: Arc<Peer>| Some((peer.up()?.instance?, peer.at));
        let linked: HashMap<_, _> = self.known().into_iter().filter_map(linked).collect();
        let loads = self.loads.lock();
        let fresh = |(server, at)| {
            let (load, received_at) = loads.get(&server)?;
            (!load.stopping && received_at.elapsed() < LOAD_TTL).then_some(PeerLoad { at, nodes: load.nodes })
        };
        linked.into_iter().filter_map(fresh).collect()
    }
}

/// Interval between two load reports to peers.
pub const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a reported load is valid.
const LOAD_TTL: Duration = Duration::from_secs(16);
