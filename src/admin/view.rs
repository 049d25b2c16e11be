//! Looks at the process for its [`Status`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::status::{ErrorStatus, GoneStatus, LinkStatus, PublisherStatus, SessionStatus, Status, Totals};
use super::{Admin, Program};
use crate::enrol::Enrolment;
use crate::protocol::{LinkSender, SessionTable, SessionView};
use crate::registry::{LastError, Overview, Registry, SiblingPod, Siblings, Standing, Uplinks};

/// What a pod is looked at by.
#[derive(Debug, Clone)]
pub struct PodView {
    /// The nodes that are linked here.
    pub registry: Arc<Registry>,
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// The other pods; `None` if this pod is alone.
    pub siblings: Option<Arc<Siblings>>,
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
    pub(super) fn since_epoch(&self, at: Instant) -> Duration {
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
            Program::Cloud(pod) => &pod.table,
            Program::Edge(edge) => &edge.table,
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
                passing: table.passing().0,
                up_bytes: self.metrics.bytes_up.get(),
                down_bytes: self.metrics.bytes_down.get(),
            },
            links: Vec::new(),
            gone: Vec::new(),
            siblings: Vec::new(),
            publisher: None,
            sessions: table.overview(MOST_SESSIONS).into_iter().map(|one| self.session(one)).collect(),
        };
        match &self.side {
            Program::Cloud(pod) => self.show_pod(pod, &mut status),
            Program::Edge(EdgeView { uplinks, .. }) => {
                status.node = Some(uplinks.node().to_string());
                for link in uplinks.all().into_iter().rev() {
                    status.links.push(self.link("cloud".into(), &link));
                    let beside = link.beside().map(|beside| self.link("cloud".into(), &beside));
                    let interactive = |beside| LinkStatus { state: "interactive".into(), ..beside };
                    status.links.extend(beside.map(interactive));
                }
            }
        }
        status
    }

    fn show_pod(&self, pod: &PodView, status: &mut Status) {
        status.mode = "cloud".into();
        let Overview { linked, gone } = pod.registry.overview(MOST_GONE);
        status.links = linked
            .into_iter()
            .map(|(node, standing, linked, error)| {
                let mut link = self.link(node.to_string(), &linked.sender);
                match standing {
                    Standing::Current => {}
                    Standing::Older => link.state = "older".into(),
                    Standing::Interactive => link.state = "interactive".into(),
                    Standing::Leaving => link.state = "leaving".into(),
                }
                link.address = Some(linked.from.to_string());
                link.error = error.map(|error| self.error(&error));
                link
            })
            .collect();
        status.gone = gone
            .into_iter()
            .map(|(node, at, error)| GoneStatus {
                name: node.to_string(),
                at: self.clock.time(at),
                error: error.map(|error| self.error(&error)),
            })
            .collect();
        let siblings = pod.siblings.iter().flat_map(|siblings| siblings.all());
        status.siblings = siblings.map(|sibling| self.sibling(&sibling)).collect();
        status.publisher = pod.publishes.map(|store| PublisherStatus {
            store: store.into(),
            records: self.metrics.published.get(),
            failures: self.metrics.publish_failures.get(),
            error: self.readiness.trouble("publisher"),
        });
    }

    fn sibling(&self, pod: &SiblingPod) -> LinkStatus {
        let error = pod.trouble().map(|why| ErrorStatus { at: None, text: why.to_string() });
        match pod.up() {
            Some(link) => LinkStatus { error, ..self.link(pod.to_string(), &link) },
            None => LinkStatus { error, ..LinkStatus::away(pod.to_string()) },
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
            since: Some(self.clock.time(link.made())),
            round_trip: link.measured_round_trip().map(|trip| trip.as_secs_f64()),
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
            since: self.clock.time(view.begun),
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
            round_trip: None,
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
const MOST_SESSIONS: usize = 1000;
/// Nodes that are told though they have gone.
const MOST_GONE: usize = 100;
