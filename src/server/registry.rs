//! The tasks around the registry: publishing, and rebalancing between servers.

use std::net::IpAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tracing::info_span;

use crate::admin::readiness::DNS_CONDITION;
use crate::config::server::registry::{EtcdSettings, PublishTo};
use crate::etcd::{EtcdAccess, EtcdClient};
use crate::parts::with_kubernetes;
use crate::publish::Publisher;
use crate::publish::etcd::EtcdRecords;
use crate::publish::hosts::Hosts;
use crate::publish::record_filter::{NodeLister, RecordFilter};
use crate::registry::peers::Peers;
use crate::server::running::part::RunningPart;
use tunnel_base::stores::RecordStore;
use tunnel_net::tls::IdentityFiles;

impl RunningPart {
    /// Publishes the nodes of this server if that is configured.
    pub(crate) fn publish(&self) {
        let Self { server, settings, readiness, drain, .. } = self;
        server.publishes.store(Arc::new(settings.dns.publish.name()));
        let Some(store) = self.store() else { return };
        let readiness = readiness.clone();
        let publisher = Publisher {
            registry: server.registry.clone(),
            store,
            zone: server.clients.zone.load_full(),
            vet: self.record_filter(),
            metrics: server.link_context.metrics.clone(),
            report: Box::new(move |state| readiness.set_degraded(DNS_CONDITION, state)),
        };
        drain.spawn(info_span!("publisher"), publisher.run(drain.clone()));
    }

    /// Returns the store for records, or `None` if nothing is published.
    fn store(&self) -> Option<Box<dyn RecordStore>> {
        let Self { server: context, settings, .. } = self;
        let grpc = context.port;
        // The config check ensures that there is an address.
        let dns = &settings.dns;
        let server = settings.pod_ip?;
        match dns.publish {
            PublishTo::None => None,
            PublishTo::Hosts => Some(Box::new(Hosts::new(dns.hosts_file.clone()?.0, server))),
            PublishTo::Etcd => {
                let members =
                    EtcdClient::of(etcd_access(dns.etcd.clone()), context.part_files.load().resolver.clone());
                Some(Box::new(EtcdRecords::new(members, dns.etcd.prefix.clone(), server)))
            }
            PublishTo::ConfigMap => {
                let name = dns.configmap.0.clone();
                let peers = context.finder.peers().cloned();
                let lives = move |server| -> BoxFuture<'static, bool> {
                    Box::pin(answers(peers.clone(), server, grpc))
                };
                let cluster = settings.peers.cluster.as_ref()?;
                let pods = context.pods.load();
                with_kubernetes!(
                    Some(api::server::records(cluster, name, server, pods.as_deref(), lives)),
                    else None
                )
            }
        }
    }

    /// Returns the check whether a name has another owner. It resolves the name and compares the addresses with servers
    /// that are alive, and with those of no server, which nodes' records contain for other clients.
    fn record_filter(&self) -> RecordFilter {
        let Self { server, settings, .. } = self;
        let grpc = server.port;
        let own = settings.pod_ip;
        let no_servers = server.service_addresses.subscribe();
        let peers = server.finder.peers().cloned();
        let is_server = move |ip| -> BoxFuture<'static, bool> {
            let peers = peers.clone();
            let known = Some(ip) == own || no_servers.borrow().contains(&ip);
            Box::pin(async move { known || answers(peers, ip, grpc).await })
        };
        let nodes = settings.peers.cluster.clone().map(|cluster| -> Box<NodeLister> {
            Box::new(move || {
                let cluster = cluster.clone();
                Box::pin(async {
                    with_kubernetes!(api::server::nodes(cluster, None).await, else Ok(Default::default()))
                })
            })
        });
        RecordFilter::new(server.part_files.load().dns.clone(), is_server, nodes)
    }
}

/// Returns true if a server answers at that address, with gRPC port `grpc`. The publisher uses it to find
/// records of dead servers, and addresses in DNS that belong to servers. Cancel safe.
async fn answers(peers: Option<Arc<Peers>>, ip: IpAddr, grpc: u16) -> bool {
    match peers {
        Some(peers) => peers.answers(ip, grpc).await,
        None => false,
    }
}

/// Converts the config of an etcd.
pub(crate) fn etcd_access(etcd: EtcdSettings) -> EtcdAccess {
    EtcdAccess {
        members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
        ca: etcd.ca.map(|ca| ca.0),
        identity: etcd.cert.zip(etcd.key).map(|(cert, key)| IdentityFiles { cert: cert.0, key: key.0 }),
        login: etcd.user.zip(etcd.password_file.map(|file| file.0)),
    }
}
