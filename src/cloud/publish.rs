//! From the settings of publishing to the store that serves them.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Context as _;

#[cfg(feature = "kubernetes")]
use super::kubernetes;
use super::kubernetes::Pods;
use crate::config::cloud::registry::{Publish, Registry};
use crate::net::resolver::Resolver;
use crate::net::tls::Identity;
#[cfg(feature = "kubernetes")]
use crate::registry::publish::configmap::{self, ConfigMap, Lives};
use crate::registry::publish::etcd::{Etcd, Settings};
use crate::registry::publish::hosts::Hosts;
use crate::registry::publish::{Store, Vet};
use crate::registry::siblings::Siblings;

/// Where records go; none if nothing is published. `siblings` ask pods, which take links at `port`, for a sign of life.
pub(super) fn store(
    registry: Registry,
    pod: Option<IpAddr>,
    pods: &Pods,
    (siblings, port): (Option<Arc<Siblings>>, u16),
) -> anyhow::Result<Option<Store>> {
    // That there is an address was checked with the settings.
    let Some(pod) = pod else { return Ok(None) };
    Ok(match registry.publish {
        Publish::None => None,
        Publish::Hosts(file) => Some(Store::Hosts(Hosts::new(file, pod))),
        Publish::Etcd(etcd) => {
            let resolver = Resolver::system().context("mode.cloud.registry.etcd")?;
            let settings = Settings {
                members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
                prefix: etcd.prefix,
                ca: etcd.ca,
                identity: etcd.identity.map(|(cert, key)| Identity { cert, key }),
                login: etcd.login,
                address: pod,
            };
            Some(Store::Etcd(Box::new(Etcd::new(settings, resolver))))
        }
        #[cfg(feature = "kubernetes")]
        Publish::ConfigMap(name) => {
            let cluster =
                registry.cluster.as_ref().context("mode.cloud.registry.publish: no cluster is known")?;
            let cluster = kubernetes::reached(cluster);
            let endpoints = pods.endpoints.clone();
            let lives = Lives::new(move |pod| {
                let siblings = siblings.clone();
                Box::pin(async move {
                    match siblings {
                        Some(siblings) => siblings.answers(pod, port).await,
                        None => false,
                    }
                })
            });
            let settings = configmap::Settings { cluster, name, pod, endpoints, lives };
            Some(Store::ConfigMap(Box::new(ConfigMap::new(settings))))
        }
        #[cfg(not(feature = "kubernetes"))]
        Publish::ConfigMap(_) => {
            let _ = (pods, siblings, port);
            anyhow::bail!("mode.cloud.registry.publish: this program is built without Kubernetes")
        }
    })
}

/// Who is asked whether a name is somebody else's already: `servers`, else the system's; and over a link, which pods take
/// at `port`, whether one of its addresses is a pod's.
pub(super) fn vet(
    registry: &Registry,
    system: &Resolver,
    pod: Option<IpAddr>,
    (siblings, port): (Option<Arc<Siblings>>, u16),
) -> anyhow::Result<Vet> {
    let resolver = match registry.siblings.dns.as_slice() {
        [] => system.clone(),
        servers => Resolver::of_servers(servers).context("mode.cloud.registry.dns")?,
    };
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
    Ok(vet)
}

/// Its name in `/readyz`.
pub(super) const NAME: &str = "publisher";
