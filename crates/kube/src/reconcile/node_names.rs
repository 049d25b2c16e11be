//! Writes the address of every node of a cluster into a ConfigMap from which DNS answers. Names of edges resolve to the
//! servers, all others to the nodes themselves.
//!
//! One server writes the ConfigMap: the holder of a `Lease`. A write carries the number of its term and replaces
//! exactly the version that was read. A delayed write is therefore rejected, because its successor starts with a write
//! of its own. A holder that finds a higher number stops.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::ListParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT, StateReport, write};
use crate::partial::PartialNode;
use crate::reconcile::hosts_text::{KubeNodeState, RenderedHosts, holders, text};
use crate::reconcile::lease::LeaderLease;
use crate::watcher::{Event, ObjectWatcher, WatchedObjects, publish};
use tunnel_base::drain::Drain;
use tunnel_base::policy::NodeGlob;
use tunnel_base::silence::unless_silent;

/// The sources and the target of the node names.
#[derive(Debug, Clone)]
pub struct NamesReconcilerParams {
    /// Cluster with all the objects.
    pub cluster: Cluster,
    /// Namespace of ConfigMap and Lease.
    pub namespace: String,
    /// Name of the ConfigMap.
    pub configmap: String,
    /// Key in the ConfigMap.
    pub key: String,
    /// Name of the Lease.
    pub lease: String,
    /// Unique identity of this process.
    pub identity: String,
    /// Label and value of Nodes that are edges.
    pub edges: (String, String),
    /// Patterns of allowed names with dots. Other Nodes with dots in their names are not written.
    pub names: Vec<NodeGlob>,
    /// Service of the servers, in the server's namespace.
    pub service: String,
    /// ConfigMap in the server's namespace in which servers publish their nodes. An edge's name resolves to its server,
    /// or to the Service if it is connected to none. `None` always resolves to the Service.
    pub holders: Option<String>,
}

/// Reconciles the ConfigMap while this server holds the Lease.
#[derive(derive_more::Debug)]
#[debug("NodeNamesReconciler({params:?})")]
pub struct NodeNamesReconciler {
    params: NamesReconcilerParams,
    report: StateReport,
    nodes: Mutex<WatchedObjects<KubeNodeState>>,
    /// Addresses of the Service, to which names of nodes resolve although no server has them. Empty until they are known.
    service: watch::Sender<BTreeSet<IpAddr>>,
    /// Nodes already logged as having no name, and why.
    left_out: Mutex<BTreeMap<String, &'static str>>,
    /// Notified when Nodes have changed.
    nodes_changed: Notify,
}

impl NodeNamesReconciler {
    /// Creates the reconciler; sends no request. Sends the Service's addresses to `service`: names of nodes resolve to
    /// them although no server has them. Calls `report` with whether the ConfigMap is up to date as far as this server
    /// knows, and if not, why.
    pub fn new(
        params: NamesReconcilerParams,
        service: watch::Sender<BTreeSet<IpAddr>>,
        report: StateReport,
    ) -> Self {
        let nodes = Mutex::default();
        let left_out = Mutex::default();
        Self { params, report, nodes, service, left_out, nodes_changed: Notify::new() }
    }

    /// Runs until draining starts.
    pub async fn run(self, drain: Drain) {
        let NamesReconcilerParams { cluster, namespace, lease, identity, .. } = self.params.clone();
        let mut lease = LeaderLease::new(cluster, namespace, lease, identity);
        tokio::select! {
            () = self.follow_service() => {}
            () = async {
                loop {
                    let Some(term) = self.acquire_term(&mut lease, &drain).await else { return };
                    info!(term, "acquired Lease, writing node names");
                    tokio::select! {
                        () = lease.keep(term) => warn!("Lease lost, no longer writing node names"),
                        why = self.term(term) => warn!(reason = why, "no longer writing node names"),
                        () = drain.draining() => {}
                    }
                    if drain.is_draining() {
                        return lease.release(term).await;
                    }
                    // The new holder has written or will write; the state of this term is outdated.
                    sleep(ACQUIRE_RETRY_DELAY).await;
                }
            } => {}
        }
    }

    /// Waits for a term. Returns `None` if draining has started.
    async fn acquire_term(&self, lease: &mut LeaderLease, drain: &Drain) -> Option<i32> {
        let acquired = async {
            // The Lease may have been deleted and recreated with a number lower than the one last written.
            let least = loop {
                match self.written_term().await {
                    Ok(number) => break number.saturating_add(1),
                    Err(cause) => (self.report)(Err(cause.to_string())),
                }
                sleep(ACQUIRE_RETRY_DELAY).await;
            };
            lease.acquire(least, &self.report).await
        };
        drain.run_until(acquired).await
    }

    /// Writes until another holder has written. Returns the reason for stopping.
    async fn term(&self, term: i32) -> String {
        loop {
            *self.nodes.lock() = WatchedObjects::default();
            let cluster = &self.params.cluster;
            let which = ListParams::default();
            let followed = ObjectWatcher { cluster, what: "Nodes (for node names)", which };
            let on_event = |event| self.on_event(event);
            let whole = Instant::now() + RELIST_INTERVAL;
            tokio::select! {
                never = followed.run(|client, _| Api::all(client), on_event, drop) => match never {},
                why = self.keep(term) => return why,
                // All Nodes are listed again.
                () = sleep_until(whole) => {}
            }
        }
    }

    fn on_event(&self, event: Event<PartialNode>) {
        if self.nodes.lock().take(event, |node| KubeNodeState::of(node, &self.params.edges)) {
            self.nodes_changed.notify_one();
        }
    }

    async fn keep(&self, term: i32) -> String {
        let look_again = if self.params.holders.is_some() { HOLDERS_CHECK_INTERVAL } else { CHECK_INTERVAL };
        let mut first = true;
        let mut next = Instant::now();
        loop {
            tokio::select! {
                () = self.nodes_changed.notified() => sleep(DEBOUNCE).await,
                () = sleep(look_again) => {}
            }
            sleep_until(next).await;
            // Read after the pauses, so that the write contains all changes until now.
            let Some(nodes) = self.nodes.lock().known().cloned() else { continue };
            let passed = unless_silent(REQUEST_TIMEOUT, self.reconcile(term, &nodes, first)).await;
            match passed.unwrap_or(Err(ClusterError::Silent)) {
                Ok(Ok(written)) => {
                    first = false;
                    if written {
                        next = Instant::now() + MIN_WRITE_INTERVAL;
                    }
                    (self.report)(Ok(()));
                }
                Ok(Err(why)) => return why,
                Err(cause) => (self.report)(Err(cause.to_string())),
            }
        }
    }

    /// Looks up the addresses of the Service periodically, even without holding the Lease.
    async fn follow_service(&self) {
        loop {
            let looked = unless_silent(REQUEST_TIMEOUT, async {
                let (client, home) = self.params.cluster.connect().await?;
                self.look_up(&client, &home).await
            });
            // The holder of the Lease reports the error.
            let _ = looked.await;
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Reconciles the ConfigMap. Returns true if it was written. The inner error is that another holder has written. With
    /// `first` it is written even if it is up to date, so that it carries this term's number and no write of an earlier
    /// term can succeed.
    pub(crate) async fn reconcile(
        &self,
        term: i32,
        nodes: &BTreeMap<String, KubeNodeState>,
        first: bool,
    ) -> Result<Result<bool, String>, ClusterError> {
        let NamesReconcilerParams { cluster, namespace, configmap, key, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let service = self.look_up(&client, &home).await?;
        let holders = self.holders(&client, &home).await?;
        // Without the Service the text would lose the names of edges. An error keeps those in the ConfigMap.
        if service.is_empty() && nodes.values().any(|node| node.is_edge) {
            let why = format!("Service {home}/{} for edge names does not exist", self.params.service);
            return Err(ClusterError::Failed(why));
        }
        let RenderedHosts { lines: text, left_out } =
            text(nodes, &self.params.names, &service, &holders, MAX_BYTES);
        self.log_unnamed(left_out);
        let api = Api::<ConfigMap>::namespaced(client, namespace);
        let found = api.get_opt(configmap).await?;
        let number = found.as_ref().and_then(number);
        // A holder that has slept through the end of its Lease does not know that. The number of a later term stops it.
        if let Some(higher) = number.filter(|number| *number > term) {
            return Ok(Err(format!("term {higher} is newer than ours, {term}")));
        }
        let is_true = found.as_ref().and_then(|map| map.data.as_ref()?.get(key)) == Some(&text);
        if is_true && !(first && number != Some(term)) {
            return Ok(Ok(false));
        }
        let there = found.is_some();
        // The object keeps the version that was read, so that kube-apiserver refuses this write after one of another
        // writer.
        let mut object = found.unwrap_or_default();
        object.metadata.name = Some(configmap.clone());
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(TERM.to_owned(), term.to_string());
        let lines = text.lines().count();
        object.data.get_or_insert_default().insert(key.clone(), text);
        if !write(&api, configmap, &object, there).await? {
            return Ok(Err(format!("another writer has changed ConfigMap {configmap}")));
        }
        info!(lines, term, "node names written");
        Ok(Ok(true))
    }

    /// Logs which Nodes have no name, each once until it has one.
    fn log_unnamed(&self, left_out: BTreeMap<String, &'static str>) {
        let mut logged = self.left_out.lock();
        for (node, why) in left_out.iter().filter(|(node, why)| logged.get(*node) != Some(*why)) {
            warn!(%node, reason = why, "node has no name in DNS");
        }
        *logged = left_out;
    }

    pub(crate) async fn look_up(
        &self,
        client: &Client,
        home: &str,
    ) -> Result<BTreeSet<IpAddr>, ClusterError> {
        let found = Api::<Service>::namespaced(client.clone(), home).get_opt(&self.params.service).await?;
        let ips = found.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let ips: BTreeSet<IpAddr> = ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        publish(&self.service, ips.clone());
        Ok(ips)
    }

    /// Returns the servers of edges, by the edges' names.
    async fn holders(
        &self,
        client: &Client,
        home: &str,
    ) -> Result<BTreeMap<String, BTreeSet<IpAddr>>, ClusterError> {
        let Some(name) = &self.params.holders else { return Ok(BTreeMap::new()) };
        let found = Api::<ConfigMap>::namespaced(client.clone(), home).get_opt(name).await?;
        let text = found.and_then(|map| map.data?.remove(HOSTS_KEY)).unwrap_or_default();
        Ok(holders(&text))
    }

    /// Returns the number of the term that has written last, or 0 if none has.
    pub(crate) async fn written_term(&self) -> Result<i32, ClusterError> {
        let NamesReconcilerParams { cluster, namespace, configmap, .. } = &self.params;
        let lookup = unless_silent(REQUEST_TIMEOUT, async {
            let (client, _) = cluster.connect().await?;
            let found = Api::<ConfigMap>::namespaced(client, namespace).get_opt(configmap).await?;
            Ok(found.as_ref().and_then(number).unwrap_or_default())
        });
        lookup.await.unwrap_or(Err(ClusterError::Silent))
    }
}

/// Debounce time of changes: each write sends the whole text.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Minimum time between two writes of a term. A kubelet may change its own Node as often as it likes.
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(5);

/// Time between two checks without changes of Nodes: the Service or the text itself may have changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Time between two checks if edges' names resolve to their servers.
const HOLDERS_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Time between two complete lists of all Nodes.
const RELIST_INTERVAL: Duration = Duration::from_secs(30 * 60);

/// Delay before another attempt to acquire a term.
const ACQUIRE_RETRY_DELAY: Duration = Duration::from_secs(2);

fn number(map: &ConfigMap) -> Option<i32> {
    map.metadata.annotations.as_ref()?.get(TERM)?.parse().ok()
}

/// The annotation with the number of the term that has written.
const TERM: &str = "tunnel.cloud.io/lease-transitions";

/// The key in which servers publish their nodes.
const HOSTS_KEY: &str = "hosts";

/// The size limit of a ConfigMap in Kubernetes, less space for its other parts.
const MAX_BYTES: usize = 1_000_000;

#[cfg(test)]
mod tests;
