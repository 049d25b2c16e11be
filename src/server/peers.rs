//! Sets up links to peers, and reports on them.

use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::server::peers::PeerConfig;
use crate::kubernetes::ServerPods;
use crate::paths::PathProvider as _;
use crate::paths::node_not_found::UnqueriedReason;
use crate::registry::peers::Peers;
use crate::registry::peers::addresses::PeerAddressSource;
use crate::registry::peers::peer_dialer::TlsPeerDialer;
use crate::registry::{Finder, Registry};
use crate::server::ServerContext;
use crate::server::config_files::{LoadedServerFiles, REMEDY};
use tunnel_base::drain::Drain;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link_reader::LinkReader;
use tunnel_net::pool::BufferPool;
use tunnel_proto::names::Host;

/// Starts to follow and link to the peers, as configured. Also returns the links made to them, which the caller runs.
/// Returns `None` if this server cannot link to peers. `pods` has peers in addition to the configured ones.
pub(crate) fn start(
    settings: &PeerConfig,
    files: &LoadedServerFiles,
    pods: Option<&ServerPods>,
    registry: &Arc<Registry>,
    pool: &BufferPool,
    link_context: &LinkContext,
) -> Option<(Arc<Peers>, mpsc::Receiver<LinkReader>)> {
    let tls = files.peers.clone()?;
    let drain = &link_context.drain;
    let service = settings.dns_name.as_ref().and_then(|service| match &service.host {
        Host::Name(name) => Some((name.to_string(), service.port)),
        Host::Ip(_) => None,
    });
    let cluster = pods.map(|pods| pods.peers.clone());
    let named = PeerAddressSource { list: settings.addresses.clone(), service, cluster };
    let addresses = named.follow(Arc::new(files.resolver.clone()), drain);
    let (dialer, dialled_links) = TlsPeerDialer::new(tls, pool.clone(), link_context.clone());
    let own = link_context.table.instance();
    Some((Peers::new(addresses, registry.clone(), dialer, own, drain.clone()), dialled_links))
}

/// Reports on peers that do not answer or cannot be asked.
pub(crate) fn spawn_reports(shared: &ServerContext) {
    let readiness = &shared.readiness;
    let drain = &shared.drains.links;
    if let Some(peers) = shared.finder.peers() {
        report(peers.clone(), readiness.clone(), drain);
    }
    if let Some(pods) = shared.cluster.pods.clone() {
        report_unqueried(shared.finder.clone(), pods, readiness.clone(), drain);
    }
}

/// Reports in `/readyz` which listed peers do not answer, and why. This does not make the server unready.
fn report(peers: Arc<Peers>, readiness: Readiness, drain: &Drain) {
    let draining = drain.clone();
    drain.spawn(info_span!("report"), async move {
        let mut changes = peers.changes();
        changes.mark_changed();
        while let Some(Ok(())) = draining.run_until(changes.changed()).await {
            readiness.set_degraded("peers", peers.check());
        }
    });
}

/// Reports servers in the cluster that cannot be asked for a node: in `/readyz`, and in the error of a node that is not
/// found.
fn report_unqueried(finder: Arc<Finder>, pods: ServerPods, readiness: Readiness, drain: &Drain) {
    let ServerPods { endpoints, peers: mut listed, mut unwatched } = pods;
    let draining = drain.clone();
    drain.spawn(info_span!("report"), async move {
        loop {
            let (why, text) = match &*unwatched.borrow_and_update() {
                // Those that are known can be asked.
                Some(cause) => {
                    (endpoints.borrow().is_none().then_some(UnqueriedReason::Unlisted), Err(cause.clone()))
                }
                None if finder.is_alone() && !listed.borrow_and_update().is_empty() => (
                    Some(UnqueriedReason::Unlinked),
                    Err(format!("cannot link to the other servers; {REMEDY}")),
                ),
                None => (None, Ok(())),
            };
            finder.set_unqueried_reason(why);
            readiness.set_degraded("peer_discovery", text);
            let changed = tokio::select! {
                () = draining.draining() => return,
                changed = listed.changed() => changed,
                changed = unwatched.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    });
}
