//! The nodes of all servers, as JSON.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::admin::Admin;
use crate::admin::status::ServerView;
use crate::registry::links::LinkRole;
use crate::registry::peers::node_list::{ListEnd, PeerNodes};

/// The response to `GET /nodes` of a server. Times are seconds since 1970, by the clock of that server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodesResponse {
    /// Time of this response.
    pub now: f64,
    /// This server, then its peers.
    pub servers: Vec<ServerNodes>,
    /// The nodes, sorted by name. A node with links to several servers is listed once, with its newest link.
    pub nodes: Vec<NodeStatus>,
}

/// A server in the list of nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerNodes {
    /// Address of the server, or the id of its process. The id if it is this server.
    pub name: String,
    /// Number of its nodes in the list.
    pub nodes: usize,
    /// Whether the list has all nodes of the server:
    ///
    /// - `complete`: all nodes
    /// - `truncated`: the first ones; the list of all servers is limited
    /// - `does_not_tell`: the server did not answer, for example because its version does not know the request
    /// - `not_linked`: a server without a link
    pub state: String,
    /// Why there is no link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A node in the list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of the node.
    pub name: String,
    /// Name of its server.
    pub server: String,
    /// Time since which it is linked.
    pub since: f64,
    /// Address from which it is linked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

impl Admin {
    /// Returns the nodes of a server and of its peers. Takes at most as long as [`Peers::list_nodes`].
    ///
    /// [`Peers::list_nodes`]: crate::registry::peers::Peers::list_nodes
    pub(crate) async fn nodes(&self, server: &ServerView) -> NodesResponse {
        let peers = match &server.peers {
            Some(peers) => peers.list_nodes().await,
            None => Arc::default(),
        };
        let own = format!("{:?}", server.table.instance());
        let linked = server.registry.overview(0).linked;
        let primary = linked.into_iter().filter(|(_, role, ..)| *role == LinkRole::Primary);
        let mut nodes: Vec<_> = primary
            .map(|(node, _, linked, _)| NodeStatus {
                name: node.to_string(),
                server: own.clone(),
                since: self.clock.time(linked.sender.created_at()),
                address: Some(linked.from.to_string()),
            })
            .collect();
        let local = ServerNodes { name: own, nodes: 0, state: "complete".into(), error: None };
        let now = self.clock.time(Instant::now());
        let mut servers = vec![local];
        for PeerNodes { server, nodes: listed, end } in peers.iter() {
            let name = server.to_string();
            let (state, error) = match end {
                ListEnd::Complete => ("complete", None),
                ListEnd::Truncated => ("truncated", None),
                ListEnd::Silent => ("does_not_tell", None),
                ListEnd::NotLinked(why) => ("not_linked", Some(why.clone())),
            };
            servers.push(ServerNodes { name: name.clone(), nodes: 0, state: state.into(), error });
            nodes.extend(listed.iter().map(|listed| NodeStatus {
                name: listed.node.to_string(),
                server: name.clone(),
                since: now - listed.age.as_secs_f64(),
                address: listed.address.map(|address| address.to_string()),
            }));
        }
        let nodes = newest(nodes);
        for server in &mut servers {
            server.nodes = nodes.iter().filter(|node| node.server == server.name).count();
        }
        NodesResponse { now, servers, nodes }
    }
}

/// Returns the newest link of each node, sorted by name. A node that moves has links to two servers for a while, and a
/// server notices late that a link is dead.
fn newest(mut nodes: Vec<NodeStatus>) -> Vec<NodeStatus> {
    let name = |node: &NodeStatus| node.name.to_ascii_lowercase();
    nodes.sort_by(|one, two| name(one).cmp(&name(two)).then(two.since.total_cmp(&one.since)));
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
        };
        let all =
            vec![node("b", "s1", 1.0), node("a", "s1", 2.0), node("A", "s2", 3.0), node("b", "s2", 0.5)];
        assert_eq!(newest(all), [node("A", "s2", 3.0), node("b", "s1", 1.0)]);
    }
}
