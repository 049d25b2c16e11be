//! What a server gets from Kubernetes: its peers, the Nodes, addresses, and its own certificates.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::sync::watch;

use crate::admin::readiness::Readiness;
use crate::config::server::addresses::AddressSettings;
#[cfg(feature = "kubernetes")]
use crate::config::server::csr::ServerNames;
use crate::config::server::kubernetes::ClusterSettings;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::address_watch::AddressWatch;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::cluster::Cluster;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::csr::Profile;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::csr::names::NameLookup;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::csr::renewer::{CertificateNames, CertificateRenewer};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::members::{EndpointWatch, KnownEndpoints, NodeWatch};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::reconcile::node_names::{NodeNameParams, NodeNames};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::reconcile::ports::{PortParams, PortWatch};
use crate::server::Server;
use crate::server::authenticated_links::ClusterNodes;
use crate::server::config::ServerConfig;
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ProxyPorts;
use tunnel_net::tls::verify::EdgeCerts;

/// The pods of the servers as reported by Kubernetes; all absent if that is not used.
#[derive(Debug, Default)]
pub(crate) struct ServerPods {
    /// All pods.
    #[cfg(feature = "kubernetes")]
    pub(crate) endpoints: Option<watch::Receiver<KnownEndpoints>>,
    /// The gRPC addresses of the peers.
    pub(crate) peers: Option<watch::Receiver<Vec<SocketAddr>>>,
}

/// Watches the pods of the servers, if the config names a Service. `port` is their common gRPC port.
#[cfg(feature = "kubernetes")]
pub(crate) fn follow(
    cluster: Option<&ClusterSettings>,
    pod: Option<IpAddr>,
    port: u16,
    drain: &Drain,
) -> ServerPods {
    // The config check ensures that there is an address.
    let (Some(cluster), Some(pod)) = (cluster, pod) else { return ServerPods::default() };
    let Some(service) = cluster.service.clone() else { return ServerPods::default() };
    let followed = EndpointWatch::new(cluster_access(cluster), service, SocketAddr::new(pod, port));
    let pods = ServerPods { endpoints: Some(followed.endpoints()), peers: Some(followed.peers()) };
    drain.spawn(tracing::info_span!("server_pods"), followed.follow(drain.clone()));
    pods
}

/// Does nothing: a build without Kubernetes has no cluster in its config.
#[cfg(not(feature = "kubernetes"))]
pub(crate) fn follow(_: Option<&ClusterSettings>, _: Option<IpAddr>, _: u16, _: &Drain) -> ServerPods {
    ServerPods::default()
}

/// Returns the address book, kept up to date with the cluster if one is configured. Problems with the cluster appear in
/// `readiness`.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "there is no cluster then"))]
pub(crate) fn watch_addresses(
    settings: &AddressSettings,
    readiness: &Readiness,
    drain: &Drain,
) -> Arc<AddressBook> {
    let book = Arc::new(AddressBook::new(settings.fixed.clone(), settings.cluster.is_some()));
    #[cfg(feature = "kubernetes")]
    if let Some(cluster) = &settings.cluster {
        let readiness = readiness.clone();
        let report = move |what, state| readiness.set_degraded(what, state);
        let followed = AddressWatch::new(cluster_access(cluster), book.clone(), report);
        drain.spawn(tracing::info_span!("addresses"), followed.follow(drain.clone()));
    }
    book
}

/// Returns the ports of nodes that are redirected here, kept up to date with a ConfigMap if one is configured. Its
/// errors appear in `readiness`. `own` are the addresses at which this server listens.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "there is no ConfigMap then"))]
pub(crate) fn watch_ports(
    settings: &ServerConfig,
    own: &[SocketAddr],
    readiness: &Readiness,
    drain: &Drain,
) -> watch::Receiver<ProxyPorts> {
    #[cfg(feature = "kubernetes")]
    if let Some(ports) = &settings.ports {
        let metrics = settings.server.metrics_listen.map(|listen| listen.at.port());
        let params = PortParams {
            cluster: cluster_access(&ports.cluster),
            namespace: ports.namespace.clone(),
            configmap: ports.configmap.clone(),
            service: ports.service.clone(),
            own: own.iter().map(SocketAddr::port).chain(metrics).collect(),
            http: ports.http,
            https: ports.https,
        };
        let readiness = readiness.clone();
        let followed = PortWatch::new(params, move |state| readiness.set_degraded("node_ports", state));
        let known = followed.ports();
        drain.spawn(tracing::info_span!("ports"), followed.follow(drain.clone()));
        return known;
    }
    watch::Sender::new(ProxyPorts::default()).subscribe()
}

/// Maintains the names of nodes for DNS if that is configured; errors appear in `readiness`. Returns the addresses in
/// these records that do not belong to any server.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "there are no Nodes then"))]
pub(crate) fn run_node_names(
    settings: &ServerConfig,
    readiness: &Readiness,
    drain: &Drain,
) -> watch::Receiver<BTreeSet<IpAddr>> {
    #[cfg(feature = "kubernetes")]
    if let Some(names) = &settings.node_names {
        let params = NodeNameParams {
            cluster: cluster_access(&names.cluster),
            namespace: names.namespace.clone(),
            configmap: names.configmap.clone(),
            key: names.key.clone(),
            lease: names.lease.clone(),
            me: format!("{}_{:016x}", settings.pod_name, rand::random::<u64>()),
            edges: names.edges.clone(),
            names: names.names.clone(),
            service: names.service.clone(),
            holders: names.holders.clone(),
        };
        let readiness = readiness.clone();
        let kept = NodeNames::new(params, move |state| readiness.set_degraded("node_names", state));
        let service = kept.service();
        drain.spawn(tracing::info_span!("node names"), kept.run(drain.clone()));
        return service;
    }
    watch::Sender::default().subscribe()
}

/// Converts the config of a cluster.
#[cfg(feature = "kubernetes")]
pub(crate) fn cluster_access(cluster: &ClusterSettings) -> Cluster {
    let ClusterSettings { kubeconfig, namespace, .. } = cluster.clone();
    Cluster { kubeconfig, namespace }
}

/// Returns the CAs of certificates that edges may present; `None` if they may present none.
#[cfg(feature = "kubernetes")]
pub(crate) fn edge_cas(settings: &ServerConfig) -> Option<EdgeCerts> {
    Some(EdgeCerts { ca: settings.csr.as_ref()?.edge_ca.clone()? })
}

/// Returns `None`: a build without Kubernetes has no cluster in its config.
#[cfg(not(feature = "kubernetes"))]
pub(crate) fn edge_cas(_: &ServerConfig) -> Option<EdgeCerts> {
    None
}

/// Watches the Nodes of the cluster, if the config uses anything that requires the permission to list Nodes.
#[cfg_attr(not(feature = "kubernetes"), expect(unused_variables, reason = "there is no cluster then"))]
pub(crate) fn follow_nodes(settings: &ServerConfig, drain: &Drain) -> Option<ClusterNodes> {
    #[cfg(feature = "kubernetes")]
    {
        let names = settings.node_names.as_ref();
        let certificates = settings.csr.as_ref().filter(|csr| csr.edge_ca.is_some());
        let cluster = settings.addresses.cluster.as_ref();
        let cluster = cluster.or(certificates.map(|csr| &csr.cluster)).or(names.map(|names| &names.cluster));
        let followed = NodeWatch::new(cluster_access(cluster?), names.map(|names| names.edges.clone()));
        let nodes = followed.known();
        drain.spawn(tracing::info_span!("nodes"), followed.follow(drain.clone()));
        Some(nodes)
    }
    #[cfg(not(feature = "kubernetes"))]
    None
}

// Keeps the certificates of `[server.csr]` issued.

/// The certificates of a server that signers issue; by default none.
#[derive(Debug, Default)]
#[must_use = "they are renewed by `Server::keep`"]
pub struct IssuedCertificates {
    #[cfg(feature = "kubernetes")]
    keepers: Vec<CertificateRenewer>,
}

#[cfg(feature = "kubernetes")]
impl IssuedCertificates {
    /// Waits until there is a certificate of each kind that the config requires; a server that presents them cannot
    /// start earlier. Retries forever and logs the reasons. Cancel safe.
    pub async fn wait_ready(settings: &ServerConfig) -> Self {
        let mut keepers = renewers(settings);
        futures_util::future::join_all(keepers.iter_mut().map(CertificateRenewer::first)).await;
        Self { keepers }
    }
}

#[cfg(not(feature = "kubernetes"))]
impl IssuedCertificates {
    /// Requests nothing: a build without Kubernetes has no cluster in its config.
    pub async fn wait_ready(_: &ServerConfig) -> Self {
        Self::default()
    }
}

impl Server {
    /// Renews the certificates until the server stops; `/readyz` reports what prevents it.
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(unused_variables, clippy::needless_pass_by_value, reason = "there are none then")
    )]
    pub fn keep(&self, issued: IssuedCertificates) {
        #[cfg(feature = "kubernetes")]
        for keeper in issued.keepers {
            let (links, readiness) = (self.stopping.links.clone(), self.readiness.clone());
            let condition = keeper.profile().condition();
            let report = move |state| readiness.set_degraded(condition, state);
            links.spawn(tracing::info_span!("csr"), keeper.keep(report, links.clone()));
        }
    }
}

#[cfg(feature = "kubernetes")]
fn renewers(settings: &ServerConfig) -> Vec<CertificateRenewer> {
    let Some(csr) = &settings.csr else { return Vec::new() };
    let server = csr.server.clone().map(|ServerNames { services, names }| {
        (Profile::Server, CertificateNames::Of(NameLookup { services, names }))
    });
    let proxy_client =
        csr.proxy_client.then(|| (Profile::ProxyClient, CertificateNames::Fixed(Default::default())));
    let keeper = |(profile, names): (Profile, CertificateNames)| {
        CertificateRenewer::new(
            cluster_access(&csr.cluster),
            profile,
            profile.file(&csr.dir),
            names,
            csr.lifetime,
        )
    };
    server.into_iter().chain(proxy_client).map(keeper).collect()
}
