//! Starts publishing as set in `[mode.cloud.registry]`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::info_span;

use super::core::Core;
use super::etcd::etcd_access;
#[cfg(feature = "kubernetes")]
use super::kubernetes;
use crate::config::cloud::{Cloud, Publish, RegistrySettings};
use crate::net::resolver::Resolver;
#[cfg(feature = "kubernetes")]
use crate::registry::{ConfigMap, ConfigMapParams, Lives};
use crate::registry::{Etcd, EtcdParams, Hosts, Publisher, Siblings, Store, Vet};

/// Publishes the nodes of this pod, if the settings name a place. `dns` resolves names, to find those that have another
/// owner; `port` is the gRPC port of all pods.
pub(super) fn spawn(settings: &Cloud, dns: Resolver, core: &Core, port: u16) {
    let pods = OtherPods { siblings: core.context.siblings.clone(), port };
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
type Others = (OtherPods, watch::Receiver<BTreeSet<IpAddr>>);

/// Asks other pods for a sign of life.
#[derive(Debug, Clone)]
struct OtherPods {
    /// The links to other pods; `None` if this pod is alone.
    siblings: Option<Arc<Siblings>>,
    /// The gRPC port of all pods.
    port: u16,
}

impl OtherPods {
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
fn store(settings: &Cloud, core: &Core, pods: &OtherPods) -> Option<Store> {
    // The settings were checked to have an address.
    let (registry, pod) = (&settings.registry, settings.pod_ip?);
    Some(match registry.publish.clone() {
        Publish::None => return None,
        Publish::Hosts(file) => Store::Hosts(Hosts::new(file, pod)),
        Publish::Etcd(etcd) => {
            let params = EtcdParams { prefix: etcd.prefix.clone(), access: etcd_access(etcd), address: pod };
            Store::Etcd(Box::new(Etcd::new(params, core.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        Publish::ConfigMap(name) => {
            let cluster = kubernetes::reached(registry.cluster.as_ref()?);
            let endpoints = core.pods.endpoints.clone();
            let pods = pods.clone();
            let lives = Lives::new(move |pod| Box::pin(pods.clone().answers(pod)));
            let map = ConfigMapParams { cluster, name, pod, endpoints, lives };
            Store::ConfigMap(Box::new(ConfigMap::new(map)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the files.
        Publish::ConfigMap(_) => return None,
    })
}

/// Decides whether a name has another owner: asks `resolver` for its addresses, and `pods` whether one is a pod's, or one
/// of `no_pods`, to which names of nodes lead for other clients of DNS.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has Nodes"))]
fn vet(registry: &RegistrySettings, resolver: Resolver, own: Option<IpAddr>, (pods, no_pods): Others) -> Vet {
    #[cfg_attr(not(feature = "kubernetes"), expect(unused_mut, reason = "only a cluster has Nodes"))]
    let mut vet = Vet::new(resolver, move |ip| {
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
