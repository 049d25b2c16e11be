//! What a process tells of itself, as JSON.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::admin::{Admin, ProcessView};
use crate::invitations::Enrolment;
use crate::registry::Registry;
use crate::registry::history::{LastError, LinkRole, Overview};
use crate::registry::peers::{PeerHandle, Peers};
use crate::route::Uplinks;
use tunnel_link::sender::LinkSender;
use tunnel_link::session::SessionView;
use tunnel_link::table::SessionTable;

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
    pub gone: Vec<DisconnectedStatus>,
    /// The other pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<LinkStatus>,
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
    pub rtt: Option<f64>,
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
pub struct DisconnectedStatus {
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

// Looks at the process for its [`Status`].

/// What a pod is looked at by.
#[derive(Debug, Clone)]
pub struct ServerView {
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// The other pods; `None` if this pod is alone.
    pub peers: Option<Arc<Peers>>,
    /// Where records are published, as a fixed word; `None`: nowhere.
    pub publishes: Option<&'static str>,
    /// Who joins by invitation; `None`: nobody.
    pub enrolment: Option<Arc<Enrolment>>,
    /// The port that edges link to.
    pub port: u16,
}

/// What an edge is looked at by.
#[derive(Debug, Clone)]
pub struct EdgeView {
    /// The links to the cloud.
    pub uplinks: Arc<Uplinks>,
    /// The sessions.
    pub table: Arc<SessionTable>,
}

/// Makes times of this process times of the world. It is set once, so that the same moment always has the same time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall: SystemTime,
    at: Instant,
}

impl Clock {
    /// A clock that is right now.
    pub fn now() -> Self {
        Self { wall: SystemTime::now(), at: Instant::now() }
    }

    /// Seconds since 1970, in whole milliseconds.
    fn time(&self, at: Instant) -> f64 {
        seconds(self.since_epoch(at))
    }

    /// The time since 1970.
    pub(crate) fn since_epoch(&self, at: Instant) -> Duration {
        let wall = self.wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let after = at.checked_duration_since(self.at).map(|after| wall + after);
        after.unwrap_or_else(|| wall.saturating_sub(self.at.duration_since(at)))
    }
}

impl Admin {
    /// What there is to see now.
    pub fn status(&self) -> Status {
        let (ready, notes) = match self.readiness.check() {
            Ok(notes) => (true, notes),
            Err(notes) => (false, notes),
        };
        let table = match &self.side {
            ProcessView::Cloud(server) => &server.table,
            ProcessView::Edge(edge) => &edge.table,
        };
        let mut status = Status {
            mode: "edge".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            process: format!("{:?}", table.instance()),
            node: None,
            started: self.clock.time(self.clock.at),
            now: self.clock.time(Instant::now()),
            ready,
            notes: notes.lines().map(str::to_owned).collect(),
            totals: Totals {
                sessions: table.len(),
                passing: table.relayed().0,
                up_bytes: self.metrics.bytes_up.get(),
                down_bytes: self.metrics.bytes_down.get(),
            },
            links: Vec::new(),
            gone: Vec::new(),
            peers: Vec::new(),
            publisher: None,
            sessions: table.overview(MAX_SESSIONS).into_iter().map(|one| self.session(one)).collect(),
        };
        match &self.side {
            ProcessView::Cloud(server) => self.show_server(server, &mut status),
            ProcessView::Edge(EdgeView { uplinks, .. }) => {
                status.node = Some(uplinks.node().to_string());
                for link in uplinks.all().into_iter().rev() {
                    status.links.push(self.link("cloud".into(), &link));
                    let beside = link.interactive().map(|beside| self.link("cloud".into(), &beside));
                    let interactive = |beside| LinkStatus { state: "interactive".into(), ..beside };
                    status.links.extend(beside.map(interactive));
                }
            }
        }
        status
    }

    fn show_server(&self, server: &ServerView, status: &mut Status) {
        status.mode = "cloud".into();
        let Overview { linked, gone } = server.registry.overview(MAX_GONE);
        status.links = linked
            .into_iter()
            .map(|(node, standing, linked, error)| {
                let mut link = self.link(node.to_string(), &linked.sender);
                match standing {
                    LinkRole::Primary => {}
                    LinkRole::Previous => link.state = "older".into(),
                    LinkRole::Interactive => link.state = "interactive".into(),
                    LinkRole::Retiring => link.state = "leaving".into(),
                }
                link.address = Some(linked.from.to_string());
                link.error = error.map(|error| self.error(&error));
                link
            })
            .collect();
        status.gone = gone
            .into_iter()
            .map(|(node, at, error)| DisconnectedStatus {
                name: node.to_string(),
                at: self.clock.time(at),
                error: error.map(|error| self.error(&error)),
            })
            .collect();
        let peers = server.peers.iter().flat_map(|peers| peers.all());
        status.peers = peers.map(|peer| self.peer(&peer)).collect();
        status.publisher = server.publishes.map(|store| PublisherStatus {
            store: store.into(),
            records: self.metrics.published.get(),
            failures: self.metrics.publish_failures.get(),
            error: self.readiness.trouble("publisher"),
        });
    }

    fn peer(&self, server: &PeerHandle) -> LinkStatus {
        let error = server.last_error().map(|why| ErrorStatus { at: None, text: why.to_string() });
        match server.up() {
            Some(link) => LinkStatus { error, ..self.link(server.to_string(), &link) },
            None => LinkStatus { error, ..LinkStatus::away(server.to_string()) },
        }
    }

    fn link(&self, name: String, link: &LinkSender) -> LinkStatus {
        let (ends, traffic) = (link.ends(), link.traffic());
        LinkStatus {
            state: if link.is_drained() { "draining" } else { "linked" }.into(),
            link: Some(link.id.0),
            address: ends.and_then(|ends| ends.remote).map(|at| at.to_string()),
            process: link.instance.map(|process| format!("{process:?}")),
            version: ends.and_then(|ends| ends.version.as_deref()).map(str::to_owned),
            dialect: Some(link.dialect.to_string()),
            since: Some(self.clock.time(link.created_at())),
            rtt: link.measured_round_trip().map(|trip| trip.as_secs_f64()),
            sessions: link.sessions(),
            sent_bytes: traffic.sent_bytes,
            received_bytes: traffic.received_bytes,
            ..LinkStatus::away(name)
        }
    }

    fn session(&self, view: SessionView) -> SessionStatus {
        let (target, client) = view.opened_for.unzip();
        SessionStatus {
            id: view.id.to_string(),
            node: view.node.to_string(),
            target: target.map(|target| target.to_string()),
            client,
            state: view.phase.into(),
            link: view.link.map(|link| link.0),
            since: self.clock.time(view.started),
            resumed: view.resumed,
            sent_bytes: view.sent_bytes,
            received_bytes: view.received_bytes,
        }
    }

    fn error(&self, error: &LastError) -> ErrorStatus {
        ErrorStatus { at: Some(self.clock.time(error.at)), text: error.why.to_string() }
    }
}

impl LinkStatus {
    /// Of what has no link.
    fn away(name: String) -> Self {
        Self {
            name,
            state: "away".into(),
            link: None,
            address: None,
            process: None,
            version: None,
            dialect: None,
            since: None,
            rtt: None,
            sessions: 0,
            sent_bytes: 0,
            received_bytes: 0,
            error: None,
        }
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_millis() as f64 / 1000.0
}

/// Sessions that are told one by one.
const MAX_SESSIONS: usize = 1000;
/// Nodes that are told though they have gone.
const MAX_GONE: usize = 100;
