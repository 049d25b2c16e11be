//! The nodes of all servers, as JSON.

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::admin::Admin;
use crate::admin::status::ServerView;
use crate::registry::history::LinkRole;
use crate::registry::peers::node_list::{ListEnd, PeerNodes};

/// The response to `GET /nodes` of a server. Times are seconds since 1970, by the clock of that server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CloudNodes {
    /// Time of this response.
    pub now: f64,
    /// This server, then its peers.
    pub servers: Vec<ServerNodes>,
    /// The nodes, sorted by name. A node that has just moved may be listed at two servers.
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
    pub(crate) async fn nodes(&self, server: &ServerView) -> CloudNodes {
        let peers = match &server.peers {
            Some(peers) => peers.list_nodes().await,
            None => Vec::new(),
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
        let local = ServerNodes { name: own, nodes: nodes.len(), state: "complete".into(), error: None };
        let now = self.clock.time(Instant::now());
        let mut servers = vec![local];
        for PeerNodes { server, nodes: listed, end } in peers {
            let name = server.to_string();
            let (state, error) = match end {
                ListEnd::Complete => ("complete", None),
                ListEnd::Truncated => ("truncated", None),
                ListEnd::Silent => ("does_not_tell", None),
                ListEnd::NotLinked(why) => ("not_linked", Some(why)),
            };
            servers.push(ServerNodes { name: name.clone(), nodes: listed.len(), state: state.into(), error });
            nodes.extend(listed.into_iter().map(|listed| NodeStatus {
                name: listed.node.to_string(),
                server: name.clone(),
                since: now - listed.age.as_secs_f64(),
                address: listed.address.map(|address| address.to_string()),
            }));
        }
        nodes.sort_by(|one, two| (&one.name, &one.server).cmp(&(&two.name, &two.server)));
        CloudNodes { now, servers, nodes }
    }
}
