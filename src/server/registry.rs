//! The tasks around the registry: publishing, balance between pods, and invitations.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info_span, warn};

use crate::admin::readiness::Readiness;
use crate::config::server::ServerConfig;
use crate::config::server::invitations::Invitations;
use crate::config::server::registry::{EtcdSettings, PublishConfig, RegistrySettings};
use crate::etcd::EtcdAccess;
#[cfg(feature = "kubernetes")]
use crate::invitations::store::secret::SecretSharedState;
use crate::invitations::store::{EtcdSharedState, FileSharedState, SharedState};
use crate::invitations::{Enrolment, JoinRefusal};
#[cfg(feature = "kubernetes")]
use crate::publish::configmap::{ConfigMap, ConfigMapParams, LivenessProbe};
use crate::publish::etcd::{EtcdParams, EtcdRecords};
use crate::publish::record_policy::RecordPolicy;
use crate::publish::{Hosts, Publisher, RecordStore};
use crate::registry::balance::{Balance, NodeCounts};
use crate::registry::peers::{ANNOUNCE_INTERVAL, PeerLoad, Peers};
use crate::server::config_files::ServerFiles;
#[cfg(feature = "kubernetes")]
use crate::server::kubernetes;
use crate::server::{ServerContext, ServerCore};
use tunnel_base::drain::Drain;
use tunnel_base::logging;
use tunnel_link::grpc::enrol::{EnrolMethod, EnrolRequest, JoinParams};
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::Identity;
use tunnel_proto::frame::{ErrorCode, Load, SessionError};

/// Publishes the nodes of this pod, if the settings name a place. `dns` resolves names, to find those that have another
/// owner; `port` is the gRPC port of all pods.
pub(crate) fn spawn_publisher(settings: &ServerConfig, dns: Resolver, core: &ServerCore, port: u16) {
    let servers = PeerLiveness { peers: core.context.peers.clone(), port };
    let Some(store) = store(settings, core, &servers) else { return };
    let readiness = core.readiness.clone();
    let publisher = Publisher {
        registry: core.context.registry.clone(),
        store,
        zone: core.zone.clone(),
        vet: record_policy(
            &settings.registry,
            dns,
            settings.pod_ip,
            (servers, core.service_addresses.clone()),
        ),
        metrics: core.context.link_context.metrics.clone(),
        report: Box::new(move |state| readiness.set_degraded(PUBLISHER_CONDITION, state)),
    };
    let drain = &core.shutdown.publisher;
    drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
}

/// Other pods, and addresses that are theirs in DNS although no pod has them.
type PeerAddresses = (PeerLiveness, watch::Receiver<BTreeSet<IpAddr>>);

/// Asks other pods for a sign of life.
#[derive(Debug, Clone)]
struct PeerLiveness {
    /// The links to other pods; `None` if this pod is alone.
    peers: Option<Arc<Peers>>,
    /// The gRPC port of all pods.
    port: u16,
}

impl PeerLiveness {
    /// Whether a pod answers at that address. Cancel safe.
    async fn answers(self, ip: IpAddr) -> bool {
        match self.peers {
            Some(peers) => peers.answers(ip, self.port).await,
            None => false,
        }
    }
}

/// The store for records; `None` if nothing is published. `servers` finds which of those with records are alive.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has pods"))]
fn store(settings: &ServerConfig, core: &ServerCore, servers: &PeerLiveness) -> Option<RecordStore> {
    // The settings were checked to have an address.
    let (registry, server) = (&settings.registry, settings.pod_ip?);
    Some(match registry.publish.clone() {
        PublishConfig::None => return None,
        PublishConfig::Hosts(file) => RecordStore::Hosts(Hosts::new(file, server)),
        PublishConfig::Etcd(etcd) => {
            let params =
                EtcdParams { prefix: etcd.prefix.clone(), access: etcd_access(etcd), address: server };
            RecordStore::Etcd(Box::new(EtcdRecords::new(params, core.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        PublishConfig::ConfigMap(name) => {
            let cluster = kubernetes::cluster_access(registry.cluster.as_ref()?);
            let endpoints = core.servers.endpoints.clone();
            let servers = servers.clone();
            let lives = LivenessProbe::new(move |server| Box::pin(servers.clone().answers(server)));
            let map = ConfigMapParams { cluster, name, server, endpoints, lives };
            RecordStore::ConfigMap(Box::new(ConfigMap::new(map)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the files.
        PublishConfig::ConfigMap(_) => return None,
    })
}

/// Decides whether a name has another owner: asks `resolver` for its addresses, and `servers` whether one is a pod's, or one
/// of `no_pods`, to which names of nodes lead for other clients of DNS.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has Nodes"))]
fn record_policy(
    registry: &RegistrySettings,
    resolver: Resolver,
    own: Option<IpAddr>,
    (servers, no_servers): PeerAddresses,
) -> RecordPolicy {
    #[cfg_attr(not(feature = "kubernetes"), expect(unused_mut, reason = "only a cluster has Nodes"))]
    let mut vet = RecordPolicy::new(resolver, move |ip| {
        let (servers, known) = (servers.clone(), Some(ip) == own || no_servers.borrow().contains(&ip));
        Box::pin(async move { known || servers.answers(ip).await })
    });
    #[cfg(feature = "kubernetes")]
    if let Some(cluster) = registry.cluster.as_ref().map(kubernetes::cluster_access) {
        vet.set_nodes(move || {
            let cluster = cluster.clone();
            Box::pin(async move { cluster.nodes(None).await.map_err(|cause| cause.to_string()) })
        });
    }
    vet
}

/// The publisher's name in `/readyz`.
const PUBLISHER_CONDITION: &str = "publisher";

// How a pod reaches an etcd.

/// How to reach an etcd.
pub(crate) fn etcd_access(etcd: EtcdSettings) -> EtcdAccess {
    EtcdAccess {
        members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
        ca: etcd.ca,
        identity: etcd.identity.map(|(cert, key)| Identity { cert, key }),
        login: etcd.login,
    }
}

// Tells the other pods how many nodes this one has, and whether it is to be told of theirs, and asks edges to link there if
// it has too many.

/// Runs until the pod's links end.
pub(crate) fn spawn_balance(shared: &ServerContext, settings: &ServerConfig) {
    let (moves, catches) = (settings.registry.rebalance, settings.intercept.is_some());
    let Some(peers) = shared.peers.clone() else { return };
    let (shared, drain) = (shared.clone(), shared.link_context.drain.clone());
    drain.clone().spawn(info_span!("balance"), async move {
        let (mut balance, mut told) = (Balance::default(), None::<Instant>);
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = false;
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = shared.stopping.cancelled(), if !stopping => (stopping, told) = (true, None),
                _ = ticks.tick() => {}
            }
            let (nodes, asked) = shared.registry.node_counts();
            if told.is_none_or(|told| told.elapsed() >= ANNOUNCE_INTERVAL) {
                told = Some(Instant::now());
                // Who has no nodes has nothing to compare; who catches is to hear of the others' at once.
                let hold = !stopping && (moves && nodes > 0 || catches);
                let load = Load { nodes: nodes as u64, stopping, intercepts: catches && !stopping };
                peers.broadcast_load(load, hold);
            }
            if moves && !stopping {
                let asked = rebalance(&mut balance, nodes.saturating_sub(asked), &peers, &shared);
                shared.link_context.metrics.edges_rebalanced.inc_by(asked as u64);
            }
        }
    });
}

/// Asks as many edges as it is time for. How many.
fn rebalance(balance: &mut Balance, here: usize, peers: &Peers, shared: &ServerContext) -> usize {
    let loads = peers.loads();
    let nodes: Option<Vec<u64>> = loads.as_ref().map(|loads| loads.iter().map(|load| load.nodes).collect());
    let weights = nodes.as_deref().map(|others| NodeCounts { here, others });
    let most = balance.next_batch(weights, Instant::now());
    let (Some(weights), Some(loads)) = (weights.filter(|_| most > 0), loads) else { return 0 };
    let mean = weights.mean();
    let asked = shared.registry.drain_some(most, || pick_server(&loads, mean, rand::random()));
    balance.asked(asked);
    asked
}

/// The address of a pod that has fewer nodes than the mean, the likelier the more it lacks; `chance` is from 0 to 1. None
/// if no such pod's address is known.
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

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

// Nodes that join by invitation, as `[mode.cloud.invitations]` has it.

/// Opens the store, and follows it; `None`: nobody joins by invitation.
pub(crate) fn start(
    settings: &ServerConfig,
    files: &ServerFiles,
    readiness: &Readiness,
    drain: &Drain,
) -> Option<Arc<Enrolment>> {
    let (store, authority) = (settings.invitations.clone()?, files.authority.clone()?);
    let cell = match store {
        Invitations::File(file) => SharedState::File(FileSharedState::new(file)),
        Invitations::Etcd(etcd) => {
            let key = format!("{}/{ETCD_KEY}", etcd.prefix);
            SharedState::Etcd(Box::new(EtcdSharedState::new(etcd_access(etcd), &key, files.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        Invitations::Secret(cluster, name) => {
            SharedState::Secret(Box::new(SecretSharedState::new(kubernetes::cluster_access(&cluster), name)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the settings.
        Invitations::Secret(..) => return None,
    };
    drain.spawn(info_span!("authority"), authority.clone().watch(drain.clone()));
    let enrolment = Enrolment::new(cell, authority);
    let readiness = readiness.clone();
    let report = move |state| readiness.set_degraded(INVITATIONS_CONDITION, state);
    drain.spawn(info_span!("invitations"), enrolment.clone().follow(report, drain.clone()));
    Some(enrolment)
}

/// Judges what somebody asks who is no node yet.
pub(crate) async fn judge(petition: EnrolRequest, shared: ServerContext) {
    let refused = &shared.link_context.metrics.calls_refused;
    let Some(enrolment) = &shared.enrolment else {
        refused.count("no_invitations");
        return petition
            .refuse(SessionError::new(ErrorCode::NodeNotConnected, "nobody joins this cloud by invitation"));
    };
    if shared.stopping.is_cancelled() {
        refused.count("stopping");
        return petition.refuse(SessionError::new(ErrorCode::Overloaded, "this pod is stopping"));
    }
    let from = petition.from.ip();
    if let EnrolMethod::Join(JoinParams { secret, node, token }) = &petition.wish
        && let Err(why) = enrolment.join(from, secret, node, token).await
    {
        refused.count("invitation");
        if shared.link_context.metrics.refusals.may_log("invitation", from) {
            warn!(%from, node = logging::printable(node), "not joined: {why}");
        }
        let code =
            if matches!(why, JoinRefusal::Later(_)) { ErrorCode::Overloaded } else { ErrorCode::NotAllowed };
        return petition.refuse(SessionError::new(code, why));
    }
    petition.accept(enrolment.certificates());
}

/// Below the prefix.
const ETCD_KEY: &str = "enrolled";

/// Its name in `/readyz`.
const INVITATIONS_CONDITION: &str = "invitations";
