//! The tasks around the registry: publishing, and rebalancing between servers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::info_span;

use crate::admin::readiness::DNS_CONDITION;
use crate::config::server::registry::{EtcdSettings, PublishTo};
use crate::etcd::{EtcdAccess, EtcdEndpoints};
use crate::parts::with_kubernetes;
use crate::publish::etcd::EtcdRecords;
use crate::publish::hosts::Hosts;
use crate::publish::record_policy::RecordPolicy;
use crate::publish::{Publisher, RecordStore};
use crate::registry::balance::{Balance, NodeCounts};
use crate::registry::peers::{ANNOUNCE_INTERVAL, PeerLoad, Peers};
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use crate::server::config_files::ServerFiles;
use tunnel_net::tls::Identity;
use tunnel_proto::frame::Load;

/// Publishes the nodes of this server if that is configured. `grpc` is the port of all servers.
pub(crate) fn spawn_publisher(
    settings: &ServerConfig,
    files: &ServerFiles,
    shared: &ServerContext,
    grpc: u16,
) {
    let servers = PeerLiveness { peers: shared.peers.clone(), port: grpc };
    let Some(store) = store(settings, files, shared, &servers) else { return };
    let readiness = shared.readiness.clone();
    let publisher = Publisher {
        registry: shared.registry.clone(),
        store,
        zone: shared.zone.clone(),
        vet: record_policy(settings, files, shared, servers),
        metrics: shared.link_context.metrics.clone(),
        report: Box::new(move |state| readiness.set_degraded(DNS_CONDITION, state)),
    };
    let drain = &shared.drains.publisher;
    drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
}

/// The publisher's check whether a server answers at an address. It decides which records are of dead servers, and
/// which addresses in DNS belong to servers.
#[derive(Debug, Clone)]
struct PeerLiveness {
    /// The links to peers; `None` if this server has none.
    peers: Option<Arc<Peers>>,
    /// The gRPC port of all servers.
    port: u16,
}

impl PeerLiveness {
    /// Returns true if a server answers at that address. Cancel safe.
    async fn answers(self, ip: IpAddr) -> bool {
        match self.peers {
            Some(peers) => peers.answers(ip, self.port).await,
            None => false,
        }
    }
}

/// Returns the store for records, or `None` if nothing is published. `servers` checks which servers with records are
/// alive.
fn store(
    settings: &ServerConfig,
    files: &ServerFiles,
    shared: &ServerContext,
    servers: &PeerLiveness,
) -> Option<Box<dyn RecordStore>> {
    // The config check ensures that there is an address.
    let (dns, server) = (&settings.dns, settings.pod_ip?);
    match dns.publish {
        PublishTo::None => None,
        PublishTo::Hosts => Some(Box::new(Hosts::new(dns.hosts_file.clone()?, server))),
        PublishTo::Etcd => {
            let members = EtcdEndpoints::of(etcd_access(dns.etcd.clone()), files.resolver.clone());
            Some(Box::new(EtcdRecords::new(members, dns.etcd.prefix.clone(), server)))
        }
        PublishTo::ConfigMap => {
            let name = dns.configmap.clone();
            let servers = servers.clone();
            let lives =
                move |server| -> BoxFuture<'static, bool> { Box::pin(servers.clone().answers(server)) };
            let (cluster, pods) = (settings.peers.cluster.as_ref()?, shared.cluster.pods.as_ref());
            with_kubernetes!(Some(api::cluster::records(cluster, name, server, pods, lives)), else None)
        }
    }
}

/// Returns the check whether a name has another owner. It resolves the name and compares the addresses with servers
/// that are alive, and with those of no server, which nodes' records contain for other clients.
fn record_policy(
    settings: &ServerConfig,
    files: &ServerFiles,
    shared: &ServerContext,
    servers: PeerLiveness,
) -> RecordPolicy {
    let (own, no_servers) = (settings.pod_ip, shared.cluster.service_addresses.clone());
    let mut vet = RecordPolicy::new(files.dns.clone(), move |ip| {
        let (servers, known) = (servers.clone(), Some(ip) == own || no_servers.borrow().contains(&ip));
        Box::pin(async move { known || servers.answers(ip).await })
    });
    if let Some(cluster) = settings.peers.cluster.clone() {
        vet.set_nodes(move || {
            let cluster = cluster.clone();
            Box::pin(async {
                with_kubernetes!(api::cluster::nodes(cluster, None).await, else Ok(Default::default()))
            })
        });
    }
    vet
}

// Access to etcd.

/// Converts the config of an etcd.
pub(crate) fn etcd_access(etcd: EtcdSettings) -> EtcdAccess {
    EtcdAccess {
        members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
        ca: etcd.ca,
        identity: etcd.cert.zip(etcd.key).map(|(cert, key)| Identity { cert, key }),
        login: etcd.user.zip(etcd.password_file),
    }
}

// Reports this server's number of nodes to its peers. Asks edges to link to peers if it has too many.

/// Spawns the task, which runs until the server's links end.
pub(crate) fn spawn_balance(shared: &Arc<ServerContext>, settings: &ServerConfig) {
    let moves = settings.peers.rebalance;
    let Some(peers) = shared.peers.clone() else { return };
    let (shared, drain) = (shared.clone(), shared.link_context.drain.clone());
    drain.clone().spawn(info_span!("balance"), async move {
        let (mut balance, mut last_report) = (Balance::default(), None::<Instant>);
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = false;
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = shared.stopping.cancelled(), if !stopping => (stopping, last_report) = (true, None),
                _ = ticks.tick() => {}
            }
            let (nodes, moved) = shared.registry.node_counts();
            if last_report.is_none_or(|last_report| last_report.elapsed() >= ANNOUNCE_INTERVAL) {
                last_report = Some(Instant::now());
                peers.broadcast_load(Load { nodes: nodes as u64, stopping });
            }
            if moves && !stopping {
                let moved = rebalance(&mut balance, nodes.saturating_sub(moved), &peers, &shared);
                shared.link_context.metrics.edges_rebalanced.inc_by(moved as u64);
            }
        }
    });
}

/// Asks as many edges as are due. Returns how many were asked.
fn rebalance(balance: &mut Balance, here: usize, peers: &Peers, shared: &ServerContext) -> usize {
    let loads = peers.loads();
    let nodes: Option<Vec<u64>> = loads.as_ref().map(|loads| loads.iter().map(|load| load.nodes).collect());
    let weights = nodes.as_deref().map(|others| NodeCounts { here, others });
    let most = balance.next_batch(weights, Instant::now());
    let (Some(weights), Some(loads)) = (weights.filter(|_| most > 0), loads) else { return 0 };
    let mean = weights.mean();
    let moved = shared.registry.drain_some(most, || pick_server(&loads, mean, rand::random()));
    balance.record_requested(moved);
    moved
}

/// Returns the address of a server with fewer nodes than the mean, chosen in proportion to what it lacks. `chance` is
/// from 0 to 1. Returns `None` if no such server's address is known.
fn pick_server(loads: &[PeerLoad], mean: f64, chance: f64) -> Option<SocketAddr> {
    #[expect(clippy::cast_precision_loss, reason = "counts of nodes")]
    let lacks = loads.iter().filter_map(|load| Some((load.at?, (mean - load.nodes as f64).max(0.0))));
    let mut left = chance * lacks.clone().map(|(_, lack)| lack).sum::<f64>();
    lacks
        .filter(|(_, lack)| *lack > 0.0)
        .find(|(_, lack)| {
            left -= lack;
            left <= 0.0
        })
        .map(|(at, _)| at)
}

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(1);
