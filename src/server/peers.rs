//! Sets up links to peers, and reports on them.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::{field, info_span};

use crate::admin::readiness::Readiness;
use crate::config::server::peers::PeerConfig;
use crate::kubernetes::ServerPods;
use crate::parts::with_kubernetes;
use crate::paths::PathProvider as _;
use crate::paths::node_not_found::UnqueriedReason;
use crate::registry::Finder;
use crate::registry::dns_search::NodeDnsLookup;
use crate::registry::peers::Peers;
use crate::registry::peers::addresses::PeerAddressSource;
use crate::registry::peers::peer_dialer::TlsPeerDialer;
use crate::server::config::ServerConfig;
use crate::server::config_files::REMEDY;
use crate::server::edge_links::EdgeAuthenticator;
use crate::server::link_events::run_link;
use crate::server::running::part::RunningPart;
use crate::server::{ServerContext, load};
use tunnel_base::drain::Drain;
use tunnel_base::policy::zone::NodeZone;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link_reader::LinkReader;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::peer::PeerTls;
use tunnel_proto::names::Host;

/// Follows and links to the peers, as configured, asks them and DNS for nodes, and reports on them.
pub(crate) fn start(part: &RunningPart) {
    let RunningPart { server, settings, readiness, drain } = part;
    let files = server.part_files.load();
    let PeerConfig { addresses, dns_name, .. } = &settings.peers;
    let finder = &server.finder;
    let zone = Arc::new(zone(settings, server.edge_links.clone()));
    server.clients.zone.store(zone.clone());
    server.named_servers.store(Arc::new(settings.peers.named_servers()));
    let pods = follow_pods(settings, server.port, drain);
    server.pods.store(pods.clone().map(Arc::new));
    finder.set_unqueried_reason(None);
    if let Some(tls) = &files.peers {
        let service = dns_name.as_ref().and_then(|service| match &service.host {
            Host::Name(name) => Some((name.to_string(), service.port)),
            Host::Ip(_) => None,
        });
        let cluster = pods.as_ref().map(|pods| pods.peers.clone());
        let named = PeerAddressSource { list: addresses.clone(), service, cluster };
        named.follow(Arc::new(files.resolver.clone()), server.peer_addresses.clone(), drain);
        server.peer_tls.get_or_init(|| tls.clone()).replace(tls);
        let peers = finder.first_peers().cloned().unwrap_or_else(|| link(tls, server));
        let dns = NodeDnsLookup::new(Arc::new(files.dns.clone()), zone, server.service_addresses.subscribe());
        finder.ask(&peers, dns, server.port);
        report(peers.clone(), readiness.clone(), drain);
        load::spawn_balance(peers, part);
    } else {
        // Sessions keep the links that they have.
        server.peer_addresses.send_replace(Vec::new());
        finder.ask_no_one();
    }
    if let Some(pods) = pods {
        report_unqueried(finder.clone(), pods, readiness.clone(), drain);
    }
}

/// Links to the peers at the addresses that the config names, always the same ones, and runs these links.
fn link(tls: &ReloadedValue<PeerTls>, server: &Arc<ServerContext>) -> Arc<Peers> {
    let LinkContext { table, drain, .. } = &server.link_context;
    let pool = server.clients.pool.clone();
    let (dialer, made) = TlsPeerDialer::new(tls.clone(), pool, server.link_context.clone());
    drain.spawn(info_span!("peers"), run_dialled_links(made, server.clone()));
    server.watcher.watch("peer tls", tls);
    let addresses = server.peer_addresses.subscribe();
    Peers::new(addresses, server.registry.clone(), dialer, table.instance(), drain.clone())
}

/// Drives the links that this server has dialled to peers.
async fn run_dialled_links(mut made: mpsc::Receiver<LinkReader>, shared: Arc<ServerContext>) {
    let links = shared.link_context.drain.clone();
    while let Some(Some(mut reader)) = links.run_until(made.recv()).await {
        let span = info_span!("link", peer = reader.link.instance.map(field::debug));
        let shared = shared.clone();
        links.spawn(span, async move {
            run_link(&mut reader, &shared).await;
            shared.finder.peer_link_ended(&reader.link);
        });
    }
}

fn zone(settings: &ServerConfig, edge_links: Arc<EdgeAuthenticator>) -> NodeZone {
    let patterns = settings.dns.publish_names.clone();
    NodeZone::new(settings.dns.zone.clone(), patterns, move |node: &_| edge_links.has_node(node))
}

/// Watches the pods of the servers, if the config names their Service.
fn follow_pods(settings: &ServerConfig, grpc: u16, drain: &Drain) -> Option<ServerPods> {
    let cluster = settings.peers.cluster.as_ref()?;
    let service = settings.peers.kubernetes_service.clone()?;
    // The config check ensures that there is an address.
    let own = SocketAddr::new(settings.pod_ip?, grpc);
    with_kubernetes!(Some(api::server::follow_pods(cluster, service, own, drain)), else None)
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
