//! The tasks around the registry: publishing, balance between pods, and invitations.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info_span, warn};

use crate::admin::readiness::Readiness;
use crate::base::drain::Drain;
use crate::base::logging;
use crate::config::server::Cloud;
use crate::config::server::invitations::Invitations;
use crate::config::server::registry::{EtcdSettings, PublishConfig, RegistrySettings};
use crate::etcd::EtcdAccess;
#[cfg(feature = "kubernetes")]
use crate::invitations::store::secret::SecretSharedState;
use crate::invitations::store::{EtcdSharedState, FileSharedState, SharedState};
use crate::invitations::{Enrolment, JoinRefusal};
use crate::link::grpc::enrol::{JoinParams, Petition, Wish};
use crate::net::resolver::Resolver;
use crate::net::tls::Identity;
use crate::proto::frame::{Code, Load, SessionError};
#[cfg(feature = "kubernetes")]
use crate::publish::configmap::{ConfigMap, ConfigMapParams, LivenessProbe};
use crate::publish::etcd::{Etcd, EtcdParams};
use crate::publish::record_policy::RecordPolicy;
use crate::publish::{Hosts, Publisher, Store};
use crate::registry::balance::{Balance, Weights};
use crate::registry::peers::{ANNOUNCE_EVERY, PeerLoad, Siblings};
use crate::server::config_files::ServerFiles;
#[cfg(feature = "kubernetes")]
use crate::server::kubernetes;
use crate::server::{ServerContext, ServerCore};

/// Publishes the nodes of this pod, if the settings name a place. `dns` resolves names, to find those that have another
/// owner; `port` is the gRPC port of all pods.
pub(crate) fn spawn_publisher(settings: &Cloud, dns: Resolver, core: &ServerCore, port: u16) {
    let pods = PeerLiveness { siblings: core.context.siblings.clone(), port };
    let Some(store) = store(settings, core, &pods) else { return };
    let readiness = core.readiness.clone();
    let publisher = Publisher {
        registry: core.context.registry.clone(),
        store,
        zone: core.zone.clone(),
        vet: vet(&settings.registry, dns, settings.pod_ip, (pods, core.no_pods.clone())),
        metrics: core.context.ground.metrics.clone(),
        report: Box::new(move |state| readiness.note(NAME, state)),
    };
    let drain = &core.stopping.publisher;
    drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
}

/// Other pods, and addresses that are theirs in DNS although no pod has them.
type Others = (PeerLiveness, watch::Receiver<BTreeSet<IpAddr>>);

/// Asks other pods for a sign of life.
#[derive(Debug, Clone)]
struct PeerLiveness {
    /// The links to other pods; `None` if this pod is alone.
    siblings: Option<Arc<Siblings>>,
    /// The gRPC port of all pods.
    port: u16,
}

impl PeerLiveness {
    /// Whether a pod answers at that address. Cancel safe.
    async fn answers(self, ip: IpAddr) -> bool {
        match self.siblings {
            Some(siblings) => siblings.answers(ip, self.port).await,
            None => false,
        }
    }
}

/// The store for records; `None` if nothing is published. `pods` finds which of those with records are alive.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has pods"))]
fn store(settings: &Cloud, core: &ServerCore, pods: &PeerLiveness) -> Option<Store> {
    // The settings were checked to have an address.
    let (registry, pod) = (&settings.registry, settings.pod_ip?);
    Some(match registry.publish.clone() {
        PublishConfig::None => return None,
        PublishConfig::Hosts(file) => Store::Hosts(Hosts::new(file, pod)),
        PublishConfig::Etcd(etcd) => {
            let params = EtcdParams { prefix: etcd.prefix.clone(), access: etcd_access(etcd), address: pod };
            Store::Etcd(Box::new(Etcd::new(params, core.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        PublishConfig::ConfigMap(name) => {
            let cluster = kubernetes::reached(registry.cluster.as_ref()?);
            let endpoints = core.pods.endpoints.clone();
            let pods = pods.clone();
            let lives = LivenessProbe::new(move |pod| Box::pin(pods.clone().answers(pod)));
            let map = ConfigMapParams { cluster, name, pod, endpoints, lives };
            Store::ConfigMap(Box::new(ConfigMap::new(map)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the files.
        PublishConfig::ConfigMap(_) => return None,
    })
}

/// Decides whether a name has another owner: asks `resolver` for its addresses, and `pods` whether one is a pod's, or one
/// of `no_pods`, to which names of nodes lead for other clients of DNS.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has Nodes"))]
fn vet(
    registry: &RegistrySettings,
    resolver: Resolver,
    own: Option<IpAddr>,
    (pods, no_pods): Others,
) -> RecordPolicy {
    #[cfg_attr(not(feature = "kubernetes"), expect(unused_mut, reason = "only a cluster has Nodes"))]
    let mut vet = RecordPolicy::new(resolver, move |ip| {
        let (pods, known) = (pods.clone(), Some(ip) == own || no_pods.borrow().contains(&ip));
        Box::pin(async move { known || pods.answers(ip).await })
    });
    #[cfg(feature = "kubernetes")]
    if let Some(cluster) = registry.cluster.as_ref().map(kubernetes::reached) {
        vet.set_nodes(move || {
            let cluster = cluster.clone();
            Box::pin(async move { cluster.nodes(None).await.map_err(|cause| cause.to_string()) })
        });
    }
    vet
}

/// The publisher's name in `/readyz`.
const NAME: &str = "publisher";

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
pub(crate) fn spawn_balance(shared: &ServerContext, settings: &Cloud) {
    let (moves, catches) = (settings.registry.rebalance, settings.intercept.is_some());
    let Some(siblings) = shared.siblings.clone() else { return };
    let (shared, drain) = (shared.clone(), shared.ground.drain.clone());
    drain.clone().spawn(info_span!("balance"), async move {
        let (mut balance, mut told) = (Balance::default(), None::<Instant>);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = false;
        loop {
            tokio::select! {
                () = drain.draining() => return,
                () = shared.stopping.cancelled(), if !stopping => (stopping, told) = (true, None),
                _ = ticks.tick() => {}
            }
            let (nodes, asked) = shared.registry.held();
            if told.is_none_or(|told| told.elapsed() >= ANNOUNCE_EVERY) {
                told = Some(Instant::now());
                // Who has no nodes has nothing to compare; who catches is to hear of the others' at once.
                let hold = !stopping && (moves && nodes > 0 || catches);
                let load = Load { nodes: nodes as u64, stopping, catches: catches && !stopping };
                siblings.announce_load(load, hold);
            }
            if moves && !stopping {
                let asked = even_out(&mut balance, nodes.saturating_sub(asked), &siblings, &shared);
                shared.ground.metrics.moved.inc_by(asked as u64);
            }
        }
    });
}

/// Asks as many edges as it is time for. How many.
fn even_out(balance: &mut Balance, here: usize, siblings: &Siblings, shared: &ServerContext) -> usize {
    let loads = siblings.loads();
    let nodes: Option<Vec<u64>> = loads.as_ref().map(|loads| loads.iter().map(|load| load.nodes).collect());
    let weights = nodes.as_deref().map(|others| Weights { here, others });
    let most = balance.step(weights, Instant::now());
    let (Some(weights), Some(loads)) = (weights.filter(|_| most > 0), loads) else { return 0 };
    let mean = weights.mean();
    let asked = shared.registry.ask_to_move(most, || elsewhere(&loads, mean, rand::random()));
    balance.asked(asked);
    asked
}

/// The address of a pod that has fewer nodes than the mean, the likelier the more it lacks; `chance` is from 0 to 1. None
/// if no such pod's address is known.
fn elsewhere(loads: &[PeerLoad], mean: f64, chance: f64) -> Option<SocketAddr> {
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
const TICK: Duration = Duration::from_secs(1);

// Nodes that join by invitation, as `[mode.cloud.invitations]` has it.

/// Opens the store, and follows it; `None`: nobody joins by invitation.
pub(crate) fn start(
    settings: &Cloud,
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
            SharedState::Secret(Box::new(SecretSharedState::new(kubernetes::reached(&cluster), name)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the settings.
        Invitations::Secret(..) => return None,
    };
    drain.spawn(info_span!("authority"), authority.clone().watch(drain.clone()));
    let enrolment = Enrolment::new(cell, authority);
    let readiness = readiness.clone();
    let report = move |state| readiness.note(ENROL_NAME, state);
    drain.spawn(info_span!("invitations"), enrolment.clone().follow(report, drain.clone()));
    Some(enrolment)
}

/// Judges what somebody asks who is no node yet.
pub(crate) async fn judge(petition: Petition, shared: ServerContext) {
    let refused = &shared.ground.metrics.calls_refused;
    let Some(enrolment) = &shared.enrolment else {
        refused.count("no_invitations");
        return petition.refuse(SessionError::new(Code::NotHere, "nobody joins this cloud by invitation"));
    };
    if shared.stopping.is_cancelled() {
        refused.count("stopping");
        return petition.refuse(SessionError::new(Code::Busy, "this pod is stopping"));
    }
    let from = petition.from.ip();
    if let Wish::Join(JoinParams { secret, node, token }) = &petition.wish
        && let Err(why) = enrolment.join(from, secret, node, token).await
    {
        refused.count("invitation");
        if shared.ground.metrics.refusals.may_log("invitation", from) {
            warn!(%from, node = logging::printable(node), "not joined: {why}");
        }
        let code = if matches!(why, JoinRefusal::Later(_)) { Code::Busy } else { Code::NotAllowed };
        return petition.refuse(SessionError::new(code, why));
    }
    petition.grant(enrolment.certificates());
}

/// Below the prefix.
const ETCD_KEY: &str = "enrolled";

/// Its name in `/readyz`.
const ENROL_NAME: &str = "invitations";
