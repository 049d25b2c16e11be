//! What edges may reach through this server. It is judged for each request, and again after each change of rights.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::task::coop::consume_budget;

use crate::acceptor::LISTENER;
use crate::server::ServerContext;
use crate::server::config_files::LivePolicies;
use crate::server::link_events::{MAX_SEARCHES, target_at_node};
use crate::session_io::REVOKED;
use crate::session_io::rights::RightsChange;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::drain::Drain;
use tunnel_link::link::Link;
use tunnel_link::relay::RelayedEdgeSession;
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionKey};
use tunnel_proto::names::{NodeName, SessionId, Target};

/// What an edge reaches through this server: another node or, by its own name, a target in the cloud.
#[derive(Debug, Clone)]
pub(crate) struct RequestFromEdge {
    pub(super) session: SessionId,
    pub(super) from: Arc<Link>,
    pub(super) node: NodeName,
    pub(super) target: Target,
}

impl RequestFromEdge {
    pub(crate) fn of(request: &RelayRequest) -> Self {
        let from = request.from().clone();
        let SessionKey { id: session, node, .. } = request.key().clone();
        Self { session, from, node, target: request.target().clone() }
    }

    /// Returns an error if the edge may not reach this now. With [`ErrorCode::NodeNotConnected`] that is not known.
    pub(super) async fn judge(&self, shared: &Arc<ServerContext>) -> Result<(), SessionError> {
        if self.from.peer.node() != Some(&self.node) {
            return self.judge_node(&shared.policies, &RightsChange::default());
        }
        // A session to the cloud that a peer has dialled. This server judges it as if it dialled.
        if target_at_node(&self.target, &self.node, self.session, shared).is_some() {
            return Ok(());
        }
        let is_final = !shared.clients.addresses.is_loading();
        let checked = shared.acceptor.dialer.check(&self.target, CHECK_TIMEOUT).await;
        checked.map_err(|why| match SessionError::from(why) {
            why @ SessionError { code: ErrorCode::NotAllowed, .. } if is_final => why,
            SessionError { reason, .. } => SessionError::new(ErrorCode::NodeNotConnected, reason),
        })
    }

    pub(super) fn judge_node(
        &self,
        policies: &LivePolicies,
        change: &RightsChange,
    ) -> Result<(), SessionError> {
        if change.load(&policies.nodes).iter().any(|glob| glob.matches(&self.node)) {
            return Ok(());
        }
        // The address at which this server was reached: an operator may have several servers with different rules.
        let own = self.from.ends().and_then(|ends| ends.local);
        let own = own.map_or_else(|| "their server".to_owned(), |at| format!("server {at}"));
        let node = &self.node;
        let why = format!("edges may not reach node {node}: not in server.edge_access.nodes of {own}");
        Err(SessionError::new(ErrorCode::NodeNotAllowed, why))
    }

    /// Returns an access log entry, and the address of the edge.
    pub(super) fn log_entry(&self) -> (AccessLogEntry, IpAddr) {
        let at = self.from.ends().and_then(|ends| ends.remote);
        let at = at.map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        let mut entry = AccessLogEntry::start(LISTENER, at.to_string());
        entry.id = Some(self.session);
        entry.user = self.from.peer.node().map(ToString::to_string);
        entry.node = Some(self.node.clone());
        entry.target = Some(self.target.clone());
        (entry, at)
    }

    pub(super) fn log_revoked(&self, why: &SessionError) {
        self.log_entry().0.end(REVOKED, &why.reason);
    }
}

/// Judges the sessions that this server relays for edges after each change of rights, and resets those that are no
/// longer allowed. Returns when draining starts.
pub(crate) async fn judge_relays(shared: Arc<ServerContext>, drain: Drain) {
    let mut changes = shared.clients.judged.changes();
    let judging = async {
        while changes.changed().await.is_ok() {
            let relayed = stream::iter(shared.link_context.table.relays.of_edges());
            relayed.for_each_concurrent(MAX_SEARCHES, |session| judge_relay(session, &shared)).await;
        }
    };
    drain.run_until(judging).await;
}

async fn judge_relay(session: RelayedEdgeSession, shared: &Arc<ServerContext>) {
    let RelayedEdgeSession { key, from, target } = session;
    let access = RequestFromEdge { session: key.id, from, node: key.node, target };
    match access.judge(shared).await {
        Err(why) if why.code != ErrorCode::NodeNotConnected => {
            shared.link_context.table.relays.reset(key.id, &why);
            access.log_revoked(&why);
        }
        Ok(()) | Err(_) => {}
    }
    consume_budget().await;
}

/// Time to resolve the name of a target that a peer has dialled.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
