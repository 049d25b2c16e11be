//! Collects the nodes of all servers, and the metrics of this server's nodes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::admin::AdminContext;
use crate::admin::nodes::{ListedServer, NodeStatus, NodesResponse};
use crate::admin::server::ServerAdmin;
use crate::paths::PathProvider as _;
use crate::registry::history::{NodeLinkError, UnlinkedNode, WhyUnlinked};
use crate::registry::links::NodeWithLinks;
use crate::registry::peers::node_list::NodeListEnd;
use tunnel_base::metrics::format::ExpositionFormat;
use tunnel_base::metrics::nodes::{NodeMetrics, encode_nodes};
use tunnel_base::unix_time;
use tunnel_proto::names::NodeName;

impl AdminContext {
    /// Returns the nodes of a server and of its peers. Takes at most as long as [`Peers::list_nodes`].
    ///
    /// [`Peers::list_nodes`]: crate::registry::peers::Peers::list_nodes
    pub(crate) async fn nodes(&self, server: &ServerAdmin) -> NodesResponse {
        let peers = match server.finder.peers() {
            Some(peers) => peers.list_nodes().await,
            None => Arc::default(),
        };
        let handles: Vec<_> = peers.iter().map(|peer| peer.server.clone()).collect();
        let own: Vec<_> = server.finder.registry.views().iter().map(NodeWithLinks::listed).collect();
        // This server comes first: the commands take the first entry for the one that answers.
        let lists = peers.iter().map(|peer| (&peer.nodes, &peer.end));
        let lists = std::iter::once((&own, &NodeListEnd::Complete)).chain(lists);
        let now = Instant::now();
        let mut servers = Vec::new();
        let mut nodes = Vec::new();
        for ((listed, end), name) in lists.zip(self.server_names(server, &handles)) {
            let (state, error) = match end {
                NodeListEnd::Complete => ("complete", None),
                NodeListEnd::Truncated => ("truncated", None),
                NodeListEnd::Silent => ("does_not_tell", None),
                NodeListEnd::NotLinked(why) => ("not_linked", Some(why.clone())),
            };
            servers.push(ListedServer { name: name.clone(), nodes: 0, state: state.into(), error });
            nodes.extend(listed.iter().map(|listed| NodeStatus {
                name: listed.node.to_string(),
                server: name.clone(),
                since: self.clock.time(now.checked_sub(listed.age).unwrap_or(now)),
                address: listed.address.map(|address| address.to_string()),
                rtt_seconds: listed.round_trip.map(|trip| trip.as_secs_f64()),
                sessions: listed.sessions,
                version: listed.version.as_deref().map(Into::into),
                sent_bytes: listed.bytes.map(|[sent, _]| sent),
                received_bytes: listed.bytes.map(|[_, received]| received),
                websocket: listed.websocket.as_deref().map(Into::into),
                joined_at: None,
                last_seen: None,
            }));
        }
        // During a move two servers list the node.
        let mut nodes = newest(nodes);
        let mut down: Vec<_> =
            self.down(server).into_iter().map(|unlinked| self.disconnected(server, unlinked)).collect();
        // A peer that has just linked may not have announced all its nodes.
        down.retain(|lost| nodes.binary_search_by_key(&key(&lost.name), |node| key(&node.name)).is_err());
        if let Some(machines) = server.enrolment.get().map(|store| store.machines(unix_time::now())) {
            let times = |name: &str| {
                let machine = machines(&key(name));
                (machine.joined, machine.seen)
            };
            nodes.iter_mut().for_each(|node| (node.joined_at, node.last_seen) = times(&node.name));
            down.iter_mut().for_each(|lost| (lost.joined_at, lost.last_seen) = times(&lost.name));
        }
        let mut all = NodesResponse { now: self.clock.time(now), servers, nodes, down };
        all.count();
        all
    }

    /// Returns the response of `/metrics/nodes`.
    pub(crate) fn node_metrics(&self, server: &ServerAdmin, form: ExpositionFormat) -> String {
        let now = Instant::now();
        let here = server.finder.registry.views().into_iter().map(|view| {
            let last_seen = self.clock.since_epoch(now.checked_sub(view.idle_for()).unwrap_or(now));
            NodeMetrics {
                node: key(view.node.as_str()),
                last_seen: Some(last_seen),
                links: Some(view.listed()),
            }
        });
        let lost = self.down(server).into_iter().map(|lost| NodeMetrics {
            node: key(lost.node.as_str()),
            last_seen: (lost.why != WhyUnlinked::Absent).then(|| self.clock.since_epoch(lost.at)),
            links: None,
        });
        encode_nodes(here.chain(lost).collect(), form)
    }

    /// Returns the nodes that this server or its peers have lost within a day, the latest first, and the joined ones that
    /// none has seen, without those that a peer is known to have.
    fn down(&self, server: &ServerAdmin) -> Vec<UnlinkedNode> {
        let lost = server.finder.registry.lost().into_iter().map(|lost| server.finder.last_loss(lost));
        let mut lost: Vec<_> = lost.chain(self.absent(server)).collect();
        lost.retain(|lost| lost.at.elapsed() < LOST && !server.finder.knows(&lost.node));
        lost.sort_by_key(|lost| Reverse(lost.at));
        lost
    }

    /// Returns the nodes that were not linked here since the start, by name: those that peers have lost within a day, and
    /// for a day after the start those that have joined.
    pub(crate) fn absent(&self, server: &ServerAdmin) -> Vec<UnlinkedNode> {
        let start = self.clock.at;
        let is_told = (ABSENT..LOST).contains(&start.elapsed());
        let store = server.enrolment.get().filter(|_| is_told);
        let joined = store.map(|store| store.known().joined()).unwrap_or_default().into_iter();
        let joined = joined.filter_map(|name| Some((name.clone(), name.parse().ok()?)));
        let mut nodes: BTreeMap<String, NodeName> = joined.collect();
        // A peer has seen them, so these are not awaited.
        let lost = server.finder.lost_at_peers(LOST).into_iter();
        nodes.extend(lost.map(|node| (key(node.as_str()), node)));
        let absent = nodes.into_values().filter(|node| !server.finder.has_linked(node));
        let why: Arc<str> = "joined, not linked since this server started".into();
        let unlinked = absent.map(|node| UnlinkedNode {
            node,
            at: start,
            error: Some(NodeLinkError { at: start, why: why.clone() }),
            why: WhyUnlinked::Absent,
        });
        unlinked.map(|absent| server.finder.last_loss(absent)).collect()
    }
}

/// Returns a port of each node as a target for Prometheus' `http_sd_configs`
/// (<https://prometheus.io/docs/prometheus/latest/http_sd/>). A node that is down stays a target, so that its `up` is 0.
pub(crate) fn scrape_targets(all: &NodesResponse, port: NonZeroU16) -> serde_json::Value {
    let linked = all.nodes.iter().map(|node| (&node.name, node.server.as_str(), node.version.as_deref()));
    let down = all.down.iter().map(|node| (&node.name, "", None));
    let target = |(name, server, version): (_, _, Option<&str>)| {
        let labels = json!({
            "__meta_tunnel_node": name,
            "__meta_tunnel_server": server,
            "__meta_tunnel_version": version.unwrap_or_default(),
        });
        json!({ "targets": [format!("{name}:{port}")], "labels": labels })
    };
    linked.chain(down).map(target).collect()
}

/// Returns a node's name in lower case, as an edge may spell it in another way after a restart.
fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

/// How long after the start a joined node is expected to link: edges dial at least once a minute.
const ABSENT: Duration = Duration::from_secs(90);
/// How long a lost node is reported.
const LOST: Duration = Duration::from_secs(24 * 3600);

/// Returns the newest link of each node, sorted by name. A node that moves has links to two servers for a while, and a
/// server notices late that a link is dead.
fn newest(mut nodes: Vec<NodeStatus>) -> Vec<NodeStatus> {
    nodes.sort_by(|one, two| key(&one.name).cmp(&key(&two.name)).then(two.since.total_cmp(&one.since)));
    nodes.dedup_by(|later, first| later.name.eq_ignore_ascii_case(&first.name));
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_links_to_two_servers_is_listed_once_with_the_newer_one() {
        let node = |name: &str, server: &str, since| NodeStatus {
            name: name.into(),
            server: server.into(),
            since,
            address: None,
            rtt_seconds: None,
            sessions: None,
            version: None,
            sent_bytes: None,
            received_bytes: None,
            websocket: None,
            joined_at: None,
            last_seen: None,
        };
        let all =
            vec![node("b", "s1", 1.0), node("a", "s1", 2.0), node("A", "s2", 3.0), node("b", "s2", 0.5)];
        assert_eq!(newest(all), [node("A", "s2", 3.0), node("b", "s1", 1.0)]);
    }
}
