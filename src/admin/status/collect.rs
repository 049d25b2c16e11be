//! Collects the [`StatusResponse`] of the process.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::system::uname;
use tokio::time::Instant;

use crate::admin::readiness::DNS_CONDITION;
use crate::admin::status::{
    DisconnectedStatus, LinkEndStatus, LinkStatus, PublisherStatus, ReportedError, SessionStatus,
    StatusResponse, Totals,
};
use crate::admin::{AdminContext, AdminProcess};
use crate::invitations::OpenedEnrolments;
use crate::registry::Finder;
use crate::registry::history::{NodeLinkError, UnlinkedNode, WhyUnlinked};
use crate::registry::links::NodeLinkRole;
use crate::registry::peers::PeerHandle;
use crate::registry::snapshot::RegistrySnapshot;
use crate::session_io::judged::SessionSubject;
use tunnel_link::link::Link;
use tunnel_link::table::session::view::SessionView;
use tunnel_proto::names::{NodeName, ServerDisplayName};

/// The parts of a server whose status is served.
#[derive(Debug, Clone)]
pub struct ServerStatusSource {
    /// The name that this server announces, or its process if another server announces the same name.
    pub name: Option<ServerDisplayName>,
    /// Knows the nodes that are linked here, the peers, and their nodes.
    pub finder: Arc<Finder>,
    /// Maximum number of links for which there is memory.
    pub max_links: usize,
    /// Kind of the record store, as a fixed word; `None` if nothing is published.
    pub publishes: Option<&'static str>,
    /// Enrolment by invitation, once it is enabled.
    pub enrolment: OpenedEnrolments,
    /// Port to which edges link.
    pub port: u16,
}

/// Converts times of this process to wall clock times. It is set once, so that a moment always has the same time.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    wall: SystemTime,
    at: Instant,
}

impl WallClock {
    /// Creates a clock from the current time.
    pub fn now() -> Self {
        Self { wall: SystemTime::now(), at: Instant::now() }
    }

    /// Returns the time of the start.
    pub(crate) fn start(&self) -> Instant {
        self.at
    }

    /// Returns seconds since 1970, in whole milliseconds.
    pub(crate) fn time(&self, at: Instant) -> f64 {
        self.since_epoch(at).as_millis() as f64 / 1000.0
    }

    /// Returns the time since 1970.
    pub(crate) fn since_epoch(&self, at: Instant) -> Duration {
        let wall = self.wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let after = at.checked_duration_since(self.at).map(|after| wall + after);
        after.unwrap_or_else(|| wall.saturating_sub(self.at.duration_since(at)))
    }
}

impl AdminContext {
    /// Returns the current status.
    pub fn status(&self) -> StatusResponse {
        let table = &self.table;
        let (count, sessions) = table.overview(MAX_SESSIONS);
        let mut status = StatusResponse {
            role: "edge".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            instance: format!("{:?}", table.instance()),
            host: uname().nodename().to_string_lossy().into_owned(),
            started_at: self.clock.time(self.clock.at),
            now: self.clock.time(Instant::now()),
            ready: self.readiness.check().is_ok(),
            conditions: self.readiness.conditions(),
            totals: Totals {
                sessions: count,
                sessions_relayed: table.relayed().0,
                bytes_to_target: self.metrics.bytes_to_target.get(),
                bytes_to_client: self.metrics.bytes_to_client.get(),
            },
            refusals: self.metrics.refusals.last_hour().into_iter().map(|(why, n)| (why.into(), n)).collect(),
            certificates: self.metrics.certificates.all(),
            sessions: sessions.into_iter().map(|one| self.session(one)).collect(),
            ..StatusResponse::default()
        };
        match &self.side {
            AdminProcess::Cloud(server) => self.add_server(server, &mut status),
            AdminProcess::Edge(uplinks) => {
                status.node = Some(uplinks.node().to_string());
                for link in uplinks.all().into_iter().rev() {
                    let server = link.ends().and_then(|ends| ends.server_name.as_ref());
                    let server = server.map_or_else(|| "server".to_owned(), ToString::to_string);
                    status.links.push(self.link(server.clone(), &link));
                    if let Some(interactive) = link.interactive() {
                        let link = self.link(server, &interactive);
                        status.links.push(LinkStatus { state: "interactive".into(), ..link });
                    }
                }
            }
        }
        status
    }

    fn add_server(&self, server: &ServerStatusSource, status: &mut StatusResponse) {
        status.role = "server".into();
        let links = usize::try_from(self.metrics.links.all()).unwrap_or_default();
        status.room = Some(server.max_links.saturating_sub(links));
        // Sessions of users' links count as sessions, like those that end here.
        let relayed = self.judged.relayed().into_iter().filter_map(|one| self.relayed_session(one));
        for session in relayed {
            status.totals.sessions += 1;
            status.totals.sessions_relayed -=
                usize::from(session.state == "relayed").min(status.totals.sessions_relayed);
            status.totals.bytes_to_target += session.sent_bytes;
            status.totals.bytes_to_client += session.received_bytes;
            if status.sessions.len() < MAX_SESSIONS {
                status.sessions.push(session);
            }
        }
        let RegistrySnapshot { linked, mut disconnected, drops } =
            server.finder.registry.overview(MAX_DISCONNECTED);
        let mut absent = self.absent(server);
        absent.retain(|absent| disconnected.iter().all(|known| known.node != absent.node));
        absent.truncate(MAX_DISCONNECTED.saturating_sub(disconnected.len()));
        disconnected.append(&mut absent);
        status.links = linked
            .into_iter()
            .map(|(node, role, linked, error)| {
                let mut link = self.link(node.to_string(), &linked.link);
                match role {
                    NodeLinkRole::Primary => {}
                    NodeLinkRole::Previous => link.state = "previous".into(),
                    NodeLinkRole::Interactive => link.state = "interactive".into(),
                    NodeLinkRole::Retiring => link.state = "retiring".into(),
                }
                link.address = Some(linked.from.to_string());
                link.error = error.map(|error| self.error(&error));
                link
            })
            .collect();
        status.disconnected =
            disconnected.into_iter().map(|unlinked| self.disconnected(server, unlinked)).collect();
        let drop = |(node, error): (NodeName, NodeLinkError)| LinkEndStatus {
            name: node.to_string(),
            time: self.clock.time(error.at),
            reason: error.why.to_string(),
        };
        status.drops = drops.into_iter().map(drop).collect();
        let known = server.finder.peers();
        let peers: Vec<_> = known.into_iter().flat_map(|peers| peers.all()).collect();
        let mut names = self.server_names(server, &peers).into_iter();
        status.name = names.next();
        status.peers = names
            .zip(&peers)
            .map(|(name, peer)| {
                let problems = peer.up().zip(known).and_then(|(link, known)| known.problems_at(&link));
                LinkStatus { problems, ..self.peer(name, peer) }
            })
            .collect();
        status.publisher = server.publishes.map(|store| PublisherStatus {
            store: store.into(),
            records: self.metrics.dns_records.get(),
            failures: self.metrics.dns_publish_failures.get(),
            error: self.readiness.trouble(DNS_CONDITION),
        });
    }

    fn peer(&self, name: String, server: &PeerHandle) -> LinkStatus {
        let error = server.last_error().map(|why| ReportedError { time: None, text: why.to_string() });
        match server.up() {
            Some(link) => LinkStatus { error, ..self.link(name, &link) },
            None => LinkStatus { name, state: "not_linked".into(), error, ..LinkStatus::default() },
        }
    }

    fn link(&self, name: String, link: &Link) -> LinkStatus {
        let ends = link.ends();
        let traffic = link.traffic();
        LinkStatus {
            name,
            state: if link.is_drained() { "draining" } else { "linked" }.into(),
            link: Some(link.id.0),
            address: ends.and_then(|ends| ends.remote).map(|at| at.to_string()),
            instance: link.instance.map(|process| format!("{process:?}")),
            version: ends.and_then(|ends| ends.version.as_deref()).map(str::to_owned),
            dialect: Some(link.generation().to_owned()),
            websocket: link.websocket().map(str::to_owned),
            since: Some(self.clock.time(link.created_at())),
            rtt_seconds: link.measured_round_trip().map(|trip| trip.as_secs_f64()),
            sessions: link.sessions(),
            sent_bytes: traffic.sent_bytes,
            received_bytes: traffic.received_bytes,
            error: None,
            problems: None,
        }
    }

    fn session(&self, view: SessionView) -> SessionStatus {
        let (target, client) = view.opened_for.unzip();
        // As in the Open frame: USER@ADDRESS, or the address. An address has no @.
        let (user, client) = match client.as_deref().map(|text| text.rsplit_once('@')) {
            Some(Some((user, address))) => (Some(user.to_owned()), Some(address.to_owned())),
            _ => (None, client),
        };
        SessionStatus {
            id: view.id.to_string(),
            node: view.node.to_string(),
            target: target.map(|target| target.to_string()),
            client,
            user,
            listener: view.listener.map(str::to_owned),
            state: view.phase.into(),
            link: view.link.map(|link| link.0),
            since: self.clock.time(view.started),
            resume_count: view.resumed,
            sent_bytes: view.sent_bytes,
            received_bytes: view.received_bytes,
        }
    }

    /// Returns the status of a session that this server relays for a user, or `None` if it has no path now.
    fn relayed_session(&self, subject: SessionSubject) -> Option<SessionStatus> {
        let id = subject.id?;
        let relayed = subject.relayed?;
        let traffic = self.table.relays.traffic(id);
        let state = if traffic.is_some() { "relayed" } else { "parked" };
        let (to_acceptor, to_opener) = traffic.unwrap_or_default();
        Some(SessionStatus {
            id: id.to_string(),
            node: subject.node?.to_string(),
            target: relayed.target.map(|target| target.to_string()),
            client: Some(relayed.client),
            user: subject.user.map(Into::into),
            listener: Some(relayed.listener.to_owned()),
            state: state.into(),
            link: None,
            since: self.clock.time(relayed.started),
            resume_count: relayed.resumed,
            sent_bytes: to_acceptor,
            received_bytes: to_opener,
        })
    }

    /// Returns the status of a node without a link here.
    pub(crate) fn disconnected(
        &self,
        server: &ServerStatusSource,
        unlinked: UnlinkedNode,
    ) -> DisconnectedStatus {
        let UnlinkedNode { node, at, error, why } = server.finder.last_loss(unlinked);
        let state = match why {
            _ if server.finder.knows(&node) => "moved",
            WhyUnlinked::Lost => "down",
            WhyUnlinked::Refused => "refused",
            WhyUnlinked::Absent => "absent",
        };
        DisconnectedStatus {
            name: node.to_string(),
            time: self.clock.time(at),
            state: state.into(),
            error: error.map(|error| self.error(&error)),
        }
    }

    fn error(&self, error: &NodeLinkError) -> ReportedError {
        ReportedError { time: Some(self.clock.time(error.at)), text: error.why.to_string() }
    }
}

/// Maximum number of sessions in the status.
const MAX_SESSIONS: usize = 1000;
/// Maximum number of disconnected nodes in the status.
const MAX_DISCONNECTED: usize = 100;
