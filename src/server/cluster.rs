//! What a server follows in its Kubernetes cluster, as far as its config requires.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::sync::watch;

use crate::admin::readiness::Readiness;
use crate::kubernetes::{EdgeWatches, ServerPods};
use crate::parts::with_kubernetes;
use crate::server::config::ServerConfig;
use tunnel_base::addresses::AddressBook;
use tunnel_base::addresses::cluster_state::{KnownNodes, PodTokenReviewer};
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ConfigMapPorts;

/// What a server knows of its cluster. Without a cluster it is empty.
#[derive(Debug, Clone)]
pub(crate) struct KubernetesView {
    /// The pods of the servers.
    pub(crate) pods: Option<ServerPods>,
    /// The Nodes.
    pub(crate) nodes: Option<watch::Receiver<KnownNodes>>,
    /// Who judges the tokens of edges' pods.
    pub(crate) pod_tokens: Option<Arc<dyn PodTokenReviewer>>,
    /// Maps addresses to nodes, also without a cluster.
    pub(crate) addresses: Arc<AddressBook>,
    /// The ports of nodes that are redirected here, and which of them are ports of the node's loopback.
    pub(crate) ports: watch::Receiver<ConfigMapPorts>,
    /// Addresses in the DNS records of nodes that do not belong to any server.
    pub(crate) service_addresses: watch::Receiver<BTreeSet<IpAddr>>,
}

impl KubernetesView {
    /// Starts all watches, and the upkeep of objects and certificates. `grpc` is the port of all servers, `own` are the
    /// ports at which this server listens. Errors appear in `readiness`.
    pub(crate) fn follow(
        settings: &ServerConfig,
        grpc: u16,
        own: BTreeSet<u16>,
        readiness: &Readiness,
        drain: &Drain,
    ) -> Self {
        let of_addresses = settings.addresses.cluster.as_ref();
        let book = Arc::new(AddressBook::new(settings.addresses.nodes.clone(), of_addresses.is_some()));
        if let Some(cluster) = of_addresses {
            with_kubernetes!(api::server::follow_addresses(cluster, &book, readiness, drain), else ());
        }
        if let Some(csr) = &settings.csr {
            with_kubernetes!(api::server::csr::keep_server(csr, readiness, drain), else ());
        }
        // Without the table, a value that never changes stands in, so that its readers need no second case.
        let ports = settings.ports.as_ref().map_or_else(
            unchanging,
            |ports| with_kubernetes!(api::server::keep_ports(ports, own, readiness, drain), else unchanging()),
        );
        let service_addresses = settings.node_names.as_ref().map_or_else(unchanging, |names| {
            let pod = &settings.pod_name;
            with_kubernetes!(api::server::keep_node_names(names, pod, readiness, drain), else unchanging())
        });
        let (nodes, pod_tokens) = follow_nodes(settings, readiness, drain).unzip();
        Self {
            pods: follow_pods(settings, grpc, drain),
            nodes,
            pod_tokens: pod_tokens.flatten(),
            addresses: book,
            ports,
            service_addresses,
        }
    }
}

/// Returns an empty value that nothing changes.
fn unchanging<T: Default>() -> watch::Receiver<T> {
    watch::Sender::default().subscribe()
}

/// Watches the pods of the servers, if the config names their Service.
fn follow_pods(settings: &ServerConfig, grpc: u16, drain: &Drain) -> Option<ServerPods> {
    let cluster = settings.peers.cluster.as_ref()?;
    let service = settings.peers.kubernetes_service.clone()?;
    // The config check ensures that there is an address.
    let own = SocketAddr::new(settings.pod_ip?, grpc);
    with_kubernetes!(Some(api::server::follow_pods(cluster, service, own, drain)), else None)
}

/// Watches the Nodes, if the config uses anything that requires the permission to list them, and the pods of edges, if
/// it has their ServiceAccount.
fn follow_nodes(settings: &ServerConfig, readiness: &Readiness, drain: &Drain) -> Option<EdgeWatches> {
    let names = settings.node_names.as_ref();
    let certificates = settings.csr.as_ref().filter(|csr| csr.edge_ca.is_some());
    let cluster = settings.addresses.cluster.as_ref();
    let account = settings.service_account.as_ref();
    let cluster = cluster.or(certificates.map(|csr| &csr.cluster));
    let cluster = cluster.or(account.map(|account| &account.cluster));
    let cluster = cluster.or(names.map(|names| &names.cluster))?;
    let edges = names.map(|names| names.edges.clone());
    with_kubernetes!(Some(api::server::follow_nodes(cluster, edges, account, readiness, drain)), else None)
}
