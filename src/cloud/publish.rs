//! From the settings of publishing to the store that serves them.

use std::net::IpAddr;
use std::sync::Arc;

use tracing::info_span;

use super::core::Core;
#[cfg(feature = "kubernetes")]
use super::kubernetes;
use crate::config::cloud::{Cloud, Publish, RegistrySettings};
use crate::net::resolver::Resolver;
use crate::net::tls::Identity;
#[cfg(feature = "kubernetes")]
use crate::registry::{ConfigMap, ConfigMapParams, Lives};
use crate::registry::{Etcd, EtcdParams, Hosts, Publisher, Siblings, Store, Vet};

/// Publishes our nodes, if the settings say where. `dns` tells whether a name is somebody else's already; pods take links
/// at `port`.
pub(super) fn spawn(settings: &Cloud, dns: Resolver, core: &Core, port: u16) {
    let asked = (core.context.siblings.clone(), port);
    let Some(store) = store(settings, core, asked.clone()) else { return };
    let readiness = core.readiness.clone();
    let publisher = Publisher {
        registry: core.context.registry.clone(),
        store,
        zone: core.zone.clone(),
        vet: vet(&settings.registry, dns, settings.pod_ip, asked),
        metrics: core.context.ground.metrics.clone(),
        tell: Box::new(move |state| readiness.note(NAME, state)),
    };
    let drain = &core.stopping.publisher;
    drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
}

/// Where records go; none if nothing is published. `siblings` ask pods, which take links at `port`, for a sign of life.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has pods"))]
fn store(settings: &Cloud, core: &Core, (siblings, port): (Option<Arc<Siblings>>, u16)) -> Option<Store> {
    // That there is an address was checked with the settings.
    let (registry, pod) = (&settings.registry, settings.pod_ip?);
    Some(match registry.publish.clone() {
        Publish::None => return None,
        Publish::Hosts(file) => Store::Hosts(Hosts::new(file, pod)),
        Publish::Etcd(etcd) => {
            let etcd = EtcdParams {
                members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
                prefix: etcd.prefix,
                ca: etcd.ca,
                identity: etcd.identity.map(|(cert, key)| Identity { cert, key }),
                login: etcd.login,
                address: pod,
            };
            Store::Etcd(Box::new(Etcd::new(etcd, core.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        Publish::ConfigMap(name) => {
            let cluster = kubernetes::reached(registry.cluster.as_ref()?);
            let endpoints = core.pods.endpoints.clone();
            let lives = Lives::new(move |pod| {
                let siblings = siblings.clone();
                Box::pin(async move {
                    match siblings {
                        Some(siblings) => siblings.answers(pod, port).await,
                        None => false,
                    }
                })
            });
            let map = ConfigMapParams { cluster, name, pod, endpoints, lives };
            Store::ConfigMap(Box::new(ConfigMap::new(map)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // A fault, noted with the files.
        Publish::ConfigMap(_) => return None,
    })
}

/// Who is asked whether a name is somebody else's already: `resolver`; and over a link, which pods take at `port`, whether
/// one of its addresses is a pod's.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "only a cluster has Nodes"))]
fn vet(
    registry: &RegistrySettings,
    resolver: Resolver,
    pod: Option<IpAddr>,
    (siblings, port): (Option<Arc<Siblings>>, u16),
) -> Vet {
    #[cfg_attr(not(feature = "kubernetes"), expect(unused_mut, reason = "only a cluster has Nodes"))]
    let mut vet = Vet::new(resolver, move |ip| {
        let siblings = siblings.clone();
        Box::pin(async move {
            match siblings {
                _ if Some(ip) == pod => true,
                Some(siblings) => siblings.answers(ip, port).await,
                None => false,
            }
        })
    });
    #[cfg(feature = "kubernetes")]
    if let Some(cluster) = registry.cluster.as_ref().map(kubernetes::reached) {
        vet.set_nodes(move || {
            let cluster = cluster.clone();
            Box::pin(async move { cluster.nodes().await.map_err(|cause| cause.to_string()) })
        });
    }
    vet
}

/// Its name in `/readyz`.
const NAME: &str = "publisher";
