//! What a server adds to the admin API: its nodes, peers and invitations.

pub(crate) mod grants;
pub(crate) mod invitations;
pub(crate) mod linked;
pub(crate) mod names;
pub(crate) mod nodes;

use std::convert::identity;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;
use http::{Method, StatusCode};
use tokio::time::Instant;

use crate::admin::nodes::NodesResponse;
use crate::admin::readiness::DNS_CONDITION;
use crate::admin::requester::{AdminRequest, AdminRequester};
use crate::admin::responses::{
    AdminResponse, AdminResponseFuture, json, method_not_allowed, not_found, plain_text,
};
use crate::admin::server::invitations::{invite, leave, list, revoke};
use crate::admin::server::nodes::scrape_targets;
use crate::admin::status::collect::MAX_SESSIONS;
use crate::admin::status::{
    DisconnectedStatus, LinkEndStatus, LinkStatus, PublisherStatus, ReportedError, SessionStatus,
    StatusResponse,
};
use crate::admin::{AdminContext, AdminProcess, NODE_METRICS, NODE_TARGETS, POST_ONLY, READ_ONLY, metrics};
use crate::enrolment::OpenedEnrolments;
use crate::registry::history::{NodeLinkError, UnlinkedNode, WhyUnlinked};
use crate::registry::links::NodeLinkRole;
use crate::registry::peers::PeerHandle;
use crate::registry::snapshot::RegistrySnapshot;
use crate::registry::{Finder, LinkedNode};
use crate::session_io::judged::SessionSubject;
use tunnel_base::policy::grants::Rights;
use tunnel_link::link::Link;
use tunnel_link::table::SessionTable;
use tunnel_proto::frame::{SessionCategory, SessionKey};
use tunnel_proto::names::{NodeName, ServerDisplayName};

/// The parts of a server that its admin API serves.
#[derive(derive_more::Debug, Clone)]
pub struct ServerAdmin {
    /// The name that this server announces, or its process if another server announces the same name.
    pub name: Option<ServerDisplayName>,
    /// Knows the nodes that are linked here, the peers, and their nodes.
    pub finder: Arc<Finder>,
    /// Maximum number of links for which there is memory.
    pub max_links: usize,
    /// Kind of the record store, as a fixed word; `None` if nothing is published.
    pub publishes: Arc<ArcSwap<Option<&'static str>>>,
    /// Enrolment by invitation, once it is enabled.
    pub enrolment: OpenedEnrolments,
    /// Returns what users may reach now.
    #[debug(skip)]
    pub rights: Arc<dyn Fn() -> Rights + Send + Sync>,
    /// Port to which edges link.
    pub port: u16,
}

impl AdminProcess for ServerAdmin {
    fn add_status(&self, admin: &AdminContext, status: &mut StatusResponse) {
        status.role = "server".into();
        let links = usize::try_from(admin.metrics.links.all()).unwrap_or_default();
        status.room = Some(self.max_links.saturating_sub(links));
        // Sessions of users' links count as sessions, like those that end here.
        let relayed = admin.judged.relayed().into_iter().filter_map(|one| admin.relayed_session(one));
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
            self.finder.registry.overview(MAX_DISCONNECTED);
        let mut absent = admin.absent(self);
        absent.retain(|absent| disconnected.iter().all(|known| known.node != absent.node));
        absent.truncate(MAX_DISCONNECTED.saturating_sub(disconnected.len()));
        disconnected.append(&mut absent);
        status.links = linked
            .into_iter()
            .map(|(node, role, linked, error)| {
                let mut link = admin.link(node.to_string(), &linked.link);
                match role {
                    NodeLinkRole::Primary => {}
                    NodeLinkRole::Previous => link.state = "previous".into(),
                    NodeLinkRole::Interactive => link.state = "interactive".into(),
                    NodeLinkRole::Retiring => link.state = "retiring".into(),
                    NodeLinkRole::Opener => link.state = "opener".into(),
                }
                link.address = Some(linked.from.to_string());
                link.error = error.map(|error| admin.error(&error));
                link
            })
            .collect();
        status.disconnected =
            disconnected.into_iter().map(|unlinked| admin.disconnected(self, unlinked)).collect();
        let drop = |(node, error): (NodeName, NodeLinkError)| LinkEndStatus {
            name: node.to_string(),
            time: admin.clock.time(error.at),
            reason: error.why.to_string(),
        };
        status.drops = drops.into_iter().map(drop).collect();
        let known = self.finder.peers();
        let peers: Vec<_> = known.into_iter().flat_map(|peers| peers.all()).collect();
        let mut names = admin.server_names(self, &peers).into_iter();
        status.name = names.next();
        status.peers = names
            .zip(&peers)
            .map(|(name, peer)| {
                let problems = peer.up().zip(known).and_then(|(link, known)| known.problems_at(&link));
                LinkStatus { problems, ..admin.peer(name, peer) }
            })
            .collect();
        status.publisher = self.publishes.load().map(|store| PublisherStatus {
            store: store.into(),
            records: admin.metrics.dns_records.get(),
            failures: admin.metrics.dns_publish_failures.get(),
            error: admin.readiness.trouble(DNS_CONDITION),
        });
    }

    fn links(&self) -> Vec<Arc<Link>> {
        let nodes = self.finder.registry.overview(0).linked.into_iter();
        let nodes = nodes.map(|(_, _, linked, _)| linked.link);
        nodes.chain(self.finder.peers().into_iter().flat_map(|peers| peers.links())).collect()
    }

    fn end_parked(&self, admin: &AdminContext, one: &SessionSubject, why: &str) {
        end_parked(&self.finder, &admin.table, one, why);
    }

    fn answer<'a>(&'a self, admin: &'a AdminContext, request: AdminRequest<'a>) -> AdminResponseFuture<'a> {
        Box::pin(self.answer_of_server(admin, request))
    }
}

impl ServerAdmin {
    async fn answer_of_server(&self, admin: &AdminContext, request: AdminRequest<'_>) -> AdminResponse {
        let AdminRequest { http, requester } = &request;
        let get = *http.method() == Method::GET;
        let post = *http.method() == Method::POST;
        match http.uri().path() {
            "/nodes" => json(&self.visible_nodes(admin, requester).await),
            NODE_METRICS => metrics(http, |form| admin.node_metrics(self, form)),
            NODE_TARGETS => {
                let port = http.uri().query().and_then(|query| query.strip_prefix("port=")?.parse().ok());
                match port {
                    Some(port) => json(&scrape_targets(&admin.nodes(self).await, port)),
                    None => plain_text(StatusCode::BAD_REQUEST, NO_PORT),
                }
            }
            path @ ("/whoami" | "/leave") => match requester {
                AdminRequester::Linked(user) if path == "/leave" => {
                    leave(self.enrolment.get(), user).await.unwrap_or_else(identity)
                }
                AdminRequester::Linked(user) => json(&user.whoami(admin.clock.time(Instant::now()))),
                _ => not_found(),
            },
            "/cloud/healthz" if !get => method_not_allowed("GET", READ_ONLY),
            "/cloud/healthz" => plain_text(StatusCode::OK, go_list(&self.finder.registry.nodes())),
            // An invitation is the right to join, so only the socket and admins' links offer them, whatever a port's
            // client proves.
            "/grants" if get => grants::list(self),
            "/machines" if get => {
                let all = self.enrolment.get().map(|store| store.listed()).unwrap_or_default();
                json(&all.into_iter().filter(|one| one.joined).collect::<Vec<_>>())
            }
            "/invitations" | "/revocations" | "/grants" | "/grants/revoke"
                if matches!(requester, AdminRequester::Address(..)) =>
            {
                not_found()
            }
            "/invitations" if get => list(self.enrolment.get()).await.unwrap_or_else(identity),
            "/invitations" | "/revocations" | "/grants" | "/grants/revoke" if !post => {
                method_not_allowed("POST", POST_ONLY)
            }
            "/grants" => grants::give(self, request).await.unwrap_or_else(identity),
            "/grants/revoke" => grants::revoke(self, request).await.unwrap_or_else(identity),
            "/invitations" => invite(self, request).await.unwrap_or_else(identity),
            "/revocations" => revoke(self, request).await.unwrap_or_else(identity),
            _ => not_found(),
        }
    }

    /// Returns the nodes that the requester may see.
    async fn visible_nodes(&self, admin: &AdminContext, requester: &AdminRequester) -> NodesResponse {
        let all = admin.nodes(self).await;
        match requester {
            AdminRequester::Linked(user) if !user.is_admin() => user.visible(all),
            _ => all,
        }
    }
}

/// Ends a session that has no path and was ended here, where it may resume: at the peers, and at its node.
pub(crate) fn end_parked(finder: &Finder, table: &SessionTable, one: &SessionSubject, why: &str) {
    let SessionSubject { id: Some(id), node: Some(node), relayed: Some(relayed), .. } = one else { return };
    if table.relays.traffic(*id).is_none() {
        finder.peers().into_iter().flat_map(|peers| peers.links()).for_each(|link| link.send_ended(*id, why));
        if let Some(LinkedNode { link, .. }) = finder.registry.link_of(node)
            && link.abilities.resumes
        {
            let key = SessionKey { id: *id, category: SessionCategory::Ssh, node: node.clone() };
            link.send_revoked(&key, relayed.device.clone(), why);
        }
    }
}

impl AdminContext {
    fn peer(&self, name: String, server: &PeerHandle) -> LinkStatus {
        let error = server.last_error().map(|why| ReportedError { time: None, text: why.to_string() });
        match server.up() {
            Some(link) => LinkStatus { error, ..self.link(name, &link) },
            None => LinkStatus { name, state: "not_linked".into(), error, ..LinkStatus::default() },
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
            listener: Some("clients".to_owned()),
            state: state.into(),
            link: None,
            since: self.clock.time(relayed.started),
            resume_count: relayed.resumed.load(Relaxed),
            sent_bytes: to_acceptor,
            received_bytes: to_opener,
        })
    }

    /// Returns the status of a node without a link here.
    pub(crate) fn disconnected(&self, server: &ServerAdmin, unlinked: UnlinkedNode) -> DisconnectedStatus {
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
            joined_at: None,
            last_seen: None,
        }
    }

    fn error(&self, error: &NodeLinkError) -> ReportedError {
        ReportedError { time: Some(self.clock.time(error.at)), text: error.why.to_string() }
    }
}

/// Formats a list of nodes as Go prints a slice, which SuperEdge's watchers parse.
fn go_list(nodes: &[NodeName]) -> String {
    let names: Vec<_> = nodes.iter().map(NodeName::as_str).collect();
    format!("[{}]\n", names.join(" "))
}

/// The response if the port of the targets is missing or wrong.
const NO_PORT: &str = "expected the port of the nodes' exporters, for example /sd/nodes?port=9100\n";
/// Maximum number of disconnected nodes in the status.
const MAX_DISCONNECTED: usize = 100;
