//! The nodes of all servers, as JSON.

use serde::{Deserialize, Serialize};

use crate::admin::status::DisconnectedStatus;

/// The response to `GET /nodes` of a server. Times are seconds since 1970, by the clock of that server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodesResponse {
    /// Time of this response.
    pub now: f64,
    /// This server, then its peers.
    pub servers: Vec<ListedServer>,
    /// The nodes, sorted by name. A node with links to several servers is listed once, with its newest link.
    pub nodes: Vec<NodeStatus>,
    /// The nodes that this server or a peer has lost within a day, and joined nodes that no server has had since its
    /// start, within its first day; without nodes that a server has. The latest first.
    #[serde(default)]
    pub down: Vec<DisconnectedStatus>,
}

/// A server in the list of nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedServer {
    /// Name of the server, as in its status.
    pub name: String,
    /// Number of its nodes in the list.
    pub nodes: usize,
    /// Whether the list has all nodes of the server:
    ///
    /// - `complete`: all nodes
    /// - `truncated`: the first ones; the list of all servers is limited
    /// - `does_not_tell`: the server did not answer: it cannot be reached, is busy, or its version does not know the request
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
    /// When it joined, in seconds since 1970, within about an hour; absent if that was before servers noted it, or not by invitation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_at: Option<u64>,
    /// When servers have last noted it as linked, within about an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<u64>,
    /// Address from which it is linked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Latest RTT, once measured. Servers of earlier versions do not tell it, nor the next four.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_seconds: Option<f64>,
    /// Number of current sessions, including relayed ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u64>,
    /// Version of the edge's program, as it reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Bytes sent to the node since it was linked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_bytes: Option<u64>,
    /// Bytes received from the node since it was linked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_bytes: Option<u64>,
    /// Why it is linked through a WebSocket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub websocket: Option<String>,
}

impl NodesResponse {
    /// Counts the nodes of each server.
    pub(crate) fn count(&mut self) {
        for server in &mut self.servers {
            server.nodes = self.nodes.iter().filter(|node| node.server == server.name).count();
        }
    }
}
