//! The status of a process, as JSON.

pub mod collect;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::admin::readiness::ReadinessCondition;

/// The response to `GET /status`. Times are seconds since 1970, all by the same clock; durations are seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusResponse {
    /// `server` or `edge`.
    pub role: String,
    /// Version of this program.
    pub version: String,
    /// Id of this process, with the same digits as in the log.
    pub instance: String,
    /// Name of the machine.
    #[serde(default)]
    pub host: String,
    /// Name of the server, on a server, as its peers show it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Name of the node, on an edge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Time of the start.
    pub started_at: f64,
    /// Time of this response.
    pub now: f64,
    /// Whether `/readyz` responds with 200.
    pub ready: bool,
    /// What `/readyz` checks, by name.
    pub conditions: Vec<ReadinessCondition>,
    /// Number of further edges for which a server has memory. Beyond it, it refuses them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<usize>,
    /// Totals of all sessions.
    pub totals: Totals,
    /// Links: on a server to nodes, sorted by name; on an edge to servers, newest first.
    pub links: Vec<LinkStatus>,
    /// Nodes without a link to this server: disconnected or, if never linked, refused. The most recent first; at most
    /// 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disconnected: Vec<DisconnectedStatus>,
    /// The last ends of links of nodes, the latest last; at most 200, and 10 of one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drops: Vec<LinkEndStatus>,
    /// Peers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<LinkStatus>,
    /// Publication in DNS, if configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publisher: Option<PublisherStatus>,
    /// Refusals in the last hour by reason, a fixed word.
    #[serde(default)]
    pub refusals: BTreeMap<String, u64>,
    /// Expiry time of the certificates that the config names, by key.
    #[serde(default)]
    pub certificates: BTreeMap<String, u64>,
    /// Sessions with an end here; at most 1000.
    pub sessions: Vec<SessionStatus>,
}

/// The session and byte counts of a process, as part of its status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of sessions with an end here or at a user's program, without requests of operators.
    pub sessions: usize,
    /// Number of other relayed sessions.
    pub sessions_relayed: usize,
    /// Bytes from clients to targets since the start.
    pub bytes_to_target: u64,
    /// Bytes from targets to clients since the start.
    pub bytes_to_client: u64,
}

/// A link, or a peer without a link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Node or server at the remote end; on an edge `server` if the server announces no name.
    pub name: String,
    /// State of the link:
    ///
    /// - `linked`: in use
    /// - `previous`: previous link of a process that has a newer one
    /// - `interactive`: link next to a busy one, for interactive sessions
    /// - `retiring`: the node is found elsewhere
    /// - `opener`: the node is found elsewhere, and its edge opens sessions here
    /// - `draining`: the server stops, and the edge links elsewhere
    /// - `not_linked`: a peer without a link
    pub state: String,
    /// Number of the link, as in the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u64>,
    /// Remote address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Id of the remote process, with the same digits as in the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Name and version that the remote program reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `extended`, or `plain` or `superedge-0.9` for a program of SuperEdge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// Why the link is inside of a WebSocket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub websocket: Option<String>,
    /// Time of its creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<f64>,
    /// Latest RTT, once measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_seconds: Option<f64>,
    /// Number of current sessions, including relayed ones.
    pub sessions: usize,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ReportedError>,
    /// Problems that a peer reports, in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problems: Option<String>,
}

/// An error in the status, such as the last one of a link, with its time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedError {
    /// Time of the error, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// Text of the error.
    pub text: String,
}

/// A recently disconnected or refused node in the status of a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DisconnectedStatus {
    /// Name of the node.
    pub name: String,
    /// Time of the disconnection, or of the last refusal.
    pub time: f64,
    /// Where the node is:
    ///
    /// - `down`: it was linked here or at a peer, and no server is known to have it
    /// - `moved`: a peer has it
    /// - `refused`: it was never linked here
    /// - `absent`: it has joined, and was not linked since the start of this server, which is its time
    #[serde(default)]
    pub state: String,
    /// Reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ReportedError>,
    /// When it joined, in seconds since 1970, within about an hour; absent if that was before servers noted it, like the next one also in a
    /// status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_at: Option<u64>,
    /// When servers have last noted it as linked, within about an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<u64>,
}

/// The end of a link of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkEndStatus {
    /// Name of the node.
    pub name: String,
    /// Time of the end.
    pub time: f64,
    /// Reason.
    pub reason: String,
}

/// The state of the publication in DNS.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublisherStatus {
    /// Store of the records: `hosts`, `etcd` or `configmap`.
    pub store: String,
    /// Number of this server's records in the store.
    pub records: i64,
    /// Number of failed writes since the start.
    pub failures: u64,
    /// Error of the last attempt, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One session in the status of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Id of the session, with the same digits as in the log.
    pub id: String,
    /// Node of the target.
    pub node: String,
    /// Requested target; only where the session was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Address of the client; only where the session was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Authenticated user; only where the session was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Listener that accepted the client; only where the session was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listener: Option<String>,
    /// `opening`, `open`, `parked` (its link has closed), `resuming` or `closing`; `relayed` if it ends at a user's
    /// program.
    pub state: String,
    /// Link that carries the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u64>,
    /// Time of its start here.
    pub since: f64,
    /// Number of times it was resumed on another link.
    pub resume_count: u32,
    /// Bytes sent from here to its other end.
    pub sent_bytes: u64,
    /// Bytes received from its other end.
    pub received_bytes: u64,
}
