//! What a process tells of itself, as JSON.

use serde::{Deserialize, Serialize};

/// The answer to `GET /status`. Times are seconds since 1970, each by one and the same clock; durations are seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// `cloud` or `edge`.
    pub mode: String,
    /// The version of this program.
    pub version: String,
    /// This start of the program, by the digits that logs show.
    pub process: String,
    /// The node, at an edge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// When it started.
    pub started: f64,
    /// The time of this answer.
    pub now: f64,
    /// Whether `/readyz` answers 200.
    pub ready: bool,
    /// The lines of `/readyz`: why it is not ready, and what troubles it.
    pub notes: Vec<String>,
    /// All sessions together.
    pub totals: Totals,
    /// At a pod its links to nodes, by name; at an edge its links to the cloud, the newest first.
    pub links: Vec<LinkStatus>,
    /// Nodes that were linked to this pod and are not any more, the last to go first; at most 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<GoneStatus>,
    /// The other pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub siblings: Vec<LinkStatus>,
    /// What is published for DNS, if anything is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publisher: Option<PublisherStatus>,
    /// Sessions with an end here; at most 1000.
    pub sessions: Vec<SessionStatus>,
}

/// Numbers of a whole process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Sessions with an end here.
    pub sessions: usize,
    /// Sessions that only pass through.
    pub passing: usize,
    /// Bytes from clients towards targets, since the start.
    pub up_bytes: u64,
    /// Bytes from targets towards clients, since the start.
    pub down_bytes: u64,
}

/// One link, or another pod that has none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The node at its other end, or the other pod; at an edge, `cloud`.
    pub name: String,
    /// `linked`; `older` beside a newer one of the same process; `interactive` beside a busy one; `leaving`, where the node
    /// is found elsewhere; `draining`, where the edge was asked to link elsewhere; `away`, of another pod without a link.
    pub state: String,
    /// Its number, by which logs call it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u64>,
    /// The address of its other end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The process at its other end, by the digits that logs show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The program at its other end, as that calls itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `plain`, or `extended/` and the version that both ends have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// When it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<f64>,
    /// The latest round trip, once one was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip: Option<f64>,
    /// Sessions that run on it now, those that only pass among them.
    pub sessions: usize,
    /// Bytes that it has carried away from here.
    pub sent_bytes: u64,
    /// Bytes that it has brought.
    pub received_bytes: u64,
    /// What last went wrong there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorStatus>,
}

/// What went wrong, and when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorStatus {
    /// When, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
    /// What, as a sentence.
    pub text: String,
}

/// A node that is not linked here any more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GoneStatus {
    /// Which.
    pub name: String,
    /// When it went.
    pub at: f64,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorStatus>,
}

/// What is published for DNS.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublisherStatus {
    /// Where: `hosts`, `etcd` or `configmap`.
    pub store: String,
    /// Records of this pod that stand there.
    pub records: i64,
    /// Times that they could not be written, since the start.
    pub failures: u64,
    /// Why they could not, if the last try failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The digits of its id that logs show.
    pub id: String,
    /// The node that it leads to.
    pub node: String,
    /// What was asked for; only where it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// For whom; only where it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// `opening`, `open`, `parked` (its link is gone), `resuming` or `ending`.
    pub state: String,
    /// The link that it runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u64>,
    /// When it began here.
    pub since: f64,
    /// How often it was resumed on another link.
    pub resumed: u32,
    /// Bytes from here to its other end.
    pub sent_bytes: u64,
    /// Bytes from its other end to here.
    pub received_bytes: u64,
}
