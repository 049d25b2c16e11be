//! Writes the address of every node of a cluster into a ConfigMap from which DNS answers. Names of edges resolve to the
//! servers, all others to the nodes themselves.
//!
//! One server writes the ConfigMap: the holder of a `Lease`. A write carries the number of its term and replaces
//! exactly the version that was read. A delayed write is therefore rejected, because its successor starts with a write
//! of its own. A holder that finds a higher number stops.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1 as whole;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Error, Resource, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};
use crate::partial::{NodeStatus, part_of};
use crate::reconcile::lease::{LeaderLease, LeaderTerm};
use crate::watcher::{ObjectWatcher, WatchHandler};
use tunnel_base::drain::Drain;
use tunnel_base::names::NodeName;
use tunnel_base::policy::Glob;
use tunnel_base::policy::zone::is_reserved;

/// The sources and the target of the node names.
#[derive(Debug, Clone)]
pub struct NodeNameParams {
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
    pub names: Vec<Glob>,
    /// Service of the servers, in the server's namespace.
    pub service: String,
    /// ConfigMap in the server's namespace in which servers publish their nodes. An edge's name resolves to its server,
    /// or to the Service if it is connected to none. `None` always resolves to the Service.
    pub holders: Option<String>,
}

/// Reconciles the ConfigMap while this server holds the Lease.
pub struct NodeNamesReconciler {
    params: NodeNameParams,
    report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
    nodes: Mutex<NodeStore>,
    /// Addresses of the Service; they are not a server's own.
    service: watch::Sender<BTreeSet<IpAddr>>,
    /// Nodes already logged as having no name, and why.
    left_out: Mutex<BTreeMap<String, &'static str>>,
    /// Notified when Nodes have changed.
    nodes_changed: Notify,
}

impl NodeNamesReconciler {
    /// Creates the reconciler; sends no request. Calls `report` with whether the ConfigMap is up to date as far as this
    /// server knows, and if not, why.
    pub fn new(params: NodeNameParams, report: impl Fn(Result<(), String>) + Send + Sync + 'static) -> Self {
        let service = watch::Sender::new(BTreeSet::new());
        let (nodes, left_out) = (Mutex::default(), Mutex::default());
        Self { params, report: Box::new(report), nodes, service, left_out, nodes_changed: Notify::new() }
    }

    /// Returns a receiver of the Service's addresses, to which names of nodes resolve although no server has them.
    /// Empty until they are known.
    pub fn service(&self) -> watch::Receiver<BTreeSet<IpAddr>> {
        self.service.subscribe()
    }

    /// Runs until draining starts.
    pub async fn run(self, drain: Drain) {
        let NodeNameParams { cluster, namespace, lease, identity, .. } = self.params.clone();
        let mut lease = LeaderLease::new(cluster, namespace, lease, identity);
        tokio::select! {
            () = self.follow_service() => {}
            () = async {
                loop {
                    let Some(term) = self.acquire_term(&mut lease, &drain).await else { return };
                    info!(term = term.number, "acquired Lease, writing node names");
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
    async fn acquire_term(&self, lease: &mut LeaderLease, drain: &Drain) -> Option<LeaderTerm> {
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
        tokio::select! {
            term = acquired => Some(term),
            () = drain.draining() => None,
        }
    }

    /// Writes until another holder has written. Returns the reason for stopping.
    async fn term(&self, term: LeaderTerm) -> String {
        loop {
            *self.nodes() = NodeStore::default();
            let (cluster, which) = (&self.params.cluster, watcher::Config::default());
            let followed = ObjectWatcher { cluster, what: "Nodes (for node names)", which };
            let whole = Instant::now() + RELIST_INTERVAL;
            tokio::select! {
                never = followed.run(|client, _| Api::<NamedNode>::all(client), self) => match never {},
                why = self.keep(term) => return why,
                // All Nodes are listed again.
                () = sleep_until(whole) => {}
            }
        }
    }

    async fn keep(&self, term: LeaderTerm) -> String {
        let look_again = if self.params.holders.is_some() { HOLDERS_CHECK_INTERVAL } else { CHECK_INTERVAL };
        let (mut first, mut next) = (true, Instant::now());
        loop {
            tokio::select! {
                () = self.nodes_changed.notified() => sleep(DEBOUNCE).await,
                () = sleep(look_again) => {}
            }
            sleep_until(next).await;
            let Some(nodes) = self.nodes().whole() else { continue };
            let passed = timeout(REQUEST_TIMEOUT, self.reconcile(term, &nodes, first)).await;
            match passed.unwrap_or(Err(Stopped::Failed(ClusterError::Silent))) {
                Ok(written) => {
                    first = false;
                    if written {
                        next = Instant::now() + MIN_WRITE_INTERVAL;
                    }
                    (self.report)(Ok(()));
                }
                Err(Stopped::Fenced(why)) => return why,
                Err(Stopped::Failed(cause)) => (self.report)(Err(cause.to_string())),
            }
        }
    }

    /// Looks up the addresses of the Service periodically, even without holding the Lease.
    async fn follow_service(&self) {
        loop {
            let looked = timeout(REQUEST_TIMEOUT, async {
                let (client, home) = self.params.cluster.connect().await?;
                self.look_up(&client, &home).await
            });
            // The holder of the Lease reports the error.
            let _ = looked.await;
            sleep(CHECK_INTERVAL).await;
        }
    }

    fn nodes(&self) -> MutexGuard<'_, NodeStore> {
        self.nodes.lock()
    }
}

impl WatchHandler<NamedNode> for &NodeNamesReconciler {
    fn on_event(&mut self, event: Event<NamedNode>) -> bool {
        let (nodes_changed, followed) = {
            let mut nodes = self.nodes();
            (nodes.take(event, &self.params.edges), nodes.are_followed())
        };
        if nodes_changed {
            self.nodes_changed.notify_one();
        }
        followed
    }
}

impl std::fmt::Debug for NodeNamesReconciler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeNames").field("params", &self.params).finish_non_exhaustive()
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

// The text from which DNS answers: one line per name and address.

/// The hosts file to write into the ConfigMap, and the nodes that it leaves out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RenderedHosts {
    /// Lines `<address>\t<name>`, sorted.
    pub(crate) lines: String,
    /// Nodes without a line, and why.
    pub(crate) left_out: BTreeMap<String, &'static str>,
}

/// Renders the text for these Nodes, with at most `most` bytes. An edge's name resolves to its servers, or to the
/// Service if there are none; any other name to the node's own addresses.
///
/// Nodes with dots in their names are included only if a pattern of `dotted` matches. If the text would be too long,
/// the Nodes with the most bytes are left out.
pub(crate) fn text(
    nodes: &BTreeMap<String, NodeState>,
    dotted: &[Glob],
    service: &BTreeSet<IpAddr>,
    holders: &BTreeMap<String, BTreeSet<IpAddr>>,
    most: usize,
) -> RenderedHosts {
    let (mut text, mut all) = (RenderedHosts::default(), Vec::new());
    for (name, node) in nodes {
        if is_reserved(name) {
            text.left_out.insert(name.clone(), "reserved name; rename the node");
            continue;
        }
        // Anyone who can add a Node chooses its name, which may be that of any host on the Internet.
        let is_given = |node: &NodeName| dotted.iter().any(|pattern| pattern.matches(node));
        if name.contains('.') && !name.parse().is_ok_and(|node| is_given(&node)) {
            text.left_out.insert(
                name.clone(),
                "name with dots; add it to server.node_names.names, or rename the node",
            );
            continue;
        }
        let at = match node.is_edge {
            true => holders.get(name).unwrap_or(service),
            false => &node.ips,
        };
        let lines: Vec<_> = at.iter().map(|ip| format!("{ip}\t{name}\n")).collect();
        all.push((lines.iter().map(String::len).sum::<usize>(), name, lines));
    }
    all.sort_unstable();
    let (mut lines, mut bytes) = (BTreeSet::new(), 0_usize);
    for (needed, name, own) in all {
        if bytes.saturating_add(needed) > most {
            text.left_out.insert(name.clone(), "the ConfigMap is full (limit 1 MiB)");
            continue;
        }
        bytes += needed;
        lines.extend(own);
    }
    text.lines = lines.into_iter().collect();
    text
}

/// Parses lines `<address> <name>` as servers write them. Returns the servers of each node.
pub(crate) fn holders(text: &str) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut holders = BTreeMap::<_, BTreeSet<_>>::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(Ok(ip)), Some(name), None) = (words.next().map(str::parse), words.next(), words.next()) {
            holders.entry(name.to_owned()).or_default().insert(ip);
        }
    }
    holders
}

// The parts of Nodes that their names in DNS depend on; other fields are skipped.

/// The Nodes, and those received so far of a list in progress.
#[derive(Debug, Default)]
pub(crate) struct NodeStore {
    known: BTreeMap<String, NodeState>,
    listing: Option<BTreeMap<String, NodeState>>,
    listed: bool,
}

/// The facts about a Node that decide on its line in the hosts file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeState {
    /// Whether the node is only reachable through the tunnel.
    pub(crate) is_edge: bool,
    /// InternalIPs of the Node, or its ExternalIPs if it has none; at most 8.
    pub(crate) ips: BTreeSet<IpAddr>,
}

/// The fields of a Node that the hosts file needs; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct NamedNode {
    metadata: ObjectMeta,
    #[serde(default)]
    status: NodeStatus,
}

part_of!(NamedNode, whole::Node);

impl NamedNode {
    /// Returns the state of this Node. The argument is label and value of edges.
    pub(crate) fn seen(&self, (label, value): &(String, String)) -> NodeState {
        let labels = self.metadata.labels.as_ref();
        let is_edge = labels.and_then(|all| all.get(label)).is_some_and(|found| found == value);
        let internal: BTreeSet<IpAddr> = self.status.ips("InternalIP");
        NodeState { is_edge, ips: if internal.is_empty() { self.status.ips("ExternalIP") } else { internal } }
    }
}

impl NodeStore {
    /// Returns all Nodes, or `None` until they are listed.
    pub(crate) fn whole(&self) -> Option<BTreeMap<String, NodeState>> {
        self.listed.then(|| self.known.clone())
    }

    /// Returns true if all Nodes are known and no list is in progress, which could still fail.
    pub(crate) fn are_followed(&self) -> bool {
        self.listed && self.listing.is_none()
    }

    /// Applies an event. Returns true if it changed the known Nodes.
    pub(crate) fn take(&mut self, event: Event<NamedNode>, edges: &(String, String)) -> bool {
        match event {
            Event::Init => {
                self.listing = Some(BTreeMap::new());
                false
            }
            Event::InitApply(node) => {
                let (name, seen) = (node.name_any(), node.seen(edges));
                self.listing.get_or_insert_default().insert(name, seen);
                false
            }
            Event::InitDone => {
                self.known = self.listing.take().unwrap_or_default();
                self.listed = true;
                true
            }
            Event::Apply(node) => {
                let (name, seen) = (node.name_any(), node.seen(edges));
                // A Node's heartbeat changes it every few seconds.
                self.known.insert(name, seen.clone()) != Some(seen)
            }
            Event::Delete(node) => self.known.remove(&node.name_any()).is_some(),
        }
    }
}

// One pass over the text to write, and the write.

/// The reason why a pass did not complete.
pub(crate) enum Stopped {
    /// Another holder has written.
    Fenced(String),
    /// An error after which the pass is retried.
    Failed(ClusterError),
}

impl<E: Into<ClusterError>> From<E> for Stopped {
    fn from(cause: E) -> Self {
        Self::Failed(cause.into())
    }
}

impl NodeNamesReconciler {
    /// Reconciles the ConfigMap. Returns true if it was written. With `first` it is written even if it is up to date,
    /// so that it carries this term's number and no write of an earlier term can succeed.
    pub(crate) async fn reconcile(
        &self,
        term: LeaderTerm,
        nodes: &BTreeMap<String, NodeState>,
        first: bool,
    ) -> Result<bool, Stopped> {
        let NodeNameParams { cluster, namespace, configmap, key, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let service = self.look_up(&client, &home).await?;
        let holders = self.holders(&client, &home).await?;
        if service.is_empty() && nodes.values().any(|node| node.is_edge) {
            let why = format!("Service {home}/{} for edge names does not exist", self.params.service);
            return Err(ClusterError::Failed(why).into());
        }
        let RenderedHosts { lines: text, left_out } =
            text(nodes, &self.params.names, &service, &holders, MAX_BYTES);
        self.log_unnamed(left_out);
        let api = Api::<ConfigMap>::namespaced(client, namespace);
        let found = api.get_opt(configmap).await?;
        let number = found.as_ref().and_then(number);
        if let Some(higher) = number.filter(|number| *number > term.number) {
            return Err(Stopped::Fenced(format!("term {higher} is newer than ours, {}", term.number)));
        }
        let is_true = found.as_ref().and_then(|map| map.data.as_ref()?.get(key)) == Some(&text);
        if is_true && !(first && number != Some(term.number)) {
            return Ok(false);
        }
        let (there, mut object) = (found.is_some(), found.unwrap_or_default());
        object.metadata.name = Some(configmap.clone());
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(TERM.to_owned(), term.number.to_string());
        let lines = text.lines().count();
        object.data.get_or_insert_default().insert(key.clone(), text);
        let params = PostParams::default();
        let written = if there {
            api.replace(configmap, &params, &object).await
        } else {
            api.create(&params, &object).await
        };
        match written {
            Ok(_) => {
                info!(lines, term = term.number, "node names written");
                Ok(true)
            }
            Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {
                Err(Stopped::Fenced(format!("another writer has changed it: {}", status.message)))
            }
            Err(cause) => Err(cause.into()),
        }
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
        self.service.send_if_modified(|old| {
            let is_changed = *old != ips;
            old.clone_from(&ips);
            is_changed
        });
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
        let NodeNameParams { cluster, namespace, configmap, .. } = &self.params;
        let lookup = timeout(REQUEST_TIMEOUT, async {
            let (client, _) = cluster.connect().await?;
            let found = Api::<ConfigMap>::namespaced(client, namespace).get_opt(configmap).await?;
            Ok(found.as_ref().and_then(number).unwrap_or_default())
        });
        lookup.await.unwrap_or(Err(ClusterError::Silent))
    }
}

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

#[cfg(test)]
mod lines_tests {
    use proptest::prelude::*;

    use super::*;

    fn ips(all: &[&str]) -> BTreeSet<IpAddr> {
        all.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn nodes(all: &[(&str, bool, &[&str])]) -> BTreeMap<String, NodeState> {
        let seen = |(name, is_edge, at): &(&str, bool, &[&str])| {
            ((*name).to_owned(), NodeState { is_edge: *is_edge, ips: ips(at) })
        };
        all.iter().map(seen).collect()
    }

    #[test]
    fn edges_resolve_to_the_service_and_other_nodes_to_themselves() {
        let nodes = nodes(&[
            ("a1", true, &["10.0.0.1"]),
            ("edge-a1", false, &["10.0.0.2", "fd00::2"]),
            ("new", false, &[]),
        ]);
        let both = ips(&["10.96.0.20", "fd00:96::20"]);
        let rendered = text(&nodes, &[], &both, &BTreeMap::new(), usize::MAX).lines;
        assert_eq!(rendered, "10.0.0.2\tedge-a1\n10.96.0.20\ta1\nfd00:96::20\ta1\nfd00::2\tedge-a1\n");
    }

    #[test]
    fn edges_resolve_to_their_servers_if_these_are_known() {
        let nodes =
            nodes(&[("a1", true, &["10.0.0.1"]), ("a2", true, &["10.0.0.2"]), ("c", false, &["10.0.0.3"])]);
        let known = holders(
            "# by hand\n10.1.0.1    a1\n10.1.0.2 a1\nnone a2\n10.1.0.1 a2 more\n10.1.0.1 c\n\n10.1.0.3 edge-a2\n",
        );
        let rendered = text(&nodes, &[], &ips(&["10.96.0.20"]), &known, usize::MAX).lines;
        assert_eq!(rendered, "10.0.0.3\tc\n10.1.0.1\ta1\n10.1.0.2\ta1\n10.96.0.20\ta2\n");
    }

    #[test]
    fn a_node_beyond_the_size_limit_is_left_out_and_the_others_remain() {
        let many: Vec<_> = (1..=8).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let nodes = nodes(&[("big", false, &many), ("c", false, &["10.0.1.1"]), ("d", false, &["10.0.1.2"])]);
        let of = |most| text(&nodes, &[], &BTreeSet::new(), &BTreeMap::new(), most);
        let full = "the ConfigMap is full (limit 1 MiB)";
        let rendered = of(30);
        assert_eq!(rendered.lines, "10.0.1.1\tc\n10.0.1.2\td\n");
        assert_eq!(rendered.left_out, BTreeMap::from([("big".to_owned(), full)]));
        assert_eq!(of(21).left_out.len(), 2);
        assert!(of(22 + 8 * 13).left_out.is_empty());
    }

    #[test]
    fn nodes_with_reserved_names_are_left_out() {
        let reserved = [
            "kubernetes.default.svc.cluster.local",
            "a.svc",
            "a.svc.other",
            "localhost",
            "a.localhost",
            "a.cluster.local",
        ];
        let all: Vec<_> = reserved.iter().map(|name| (*name, false, &["10.0.0.1"][..])).collect();
        let rendered = text(&nodes(&all), &[], &BTreeSet::new(), &BTreeMap::new(), usize::MAX);
        assert_eq!((rendered.lines.as_str(), rendered.left_out.len()), ("", reserved.len()));
    }

    #[test]
    fn a_name_with_dots_is_written_only_if_the_config_allows_it() {
        let nodes =
            nodes(&[("registry.example.com", false, &["10.0.0.1"]), ("n.example.org", true, &["10.0.0.2"])]);
        let of = |dotted: &[Glob]| text(&nodes, dotted, &ips(&["10.96.0.20"]), &BTreeMap::new(), usize::MAX);
        assert_eq!((of(&[]).lines.as_str(), of(&[]).left_out.len()), ("", 2));
        let rendered = of(&["*.example.org".parse().unwrap()]);
        assert_eq!(rendered.lines, "10.96.0.20\tn.example.org\n");
        assert!(rendered.left_out["registry.example.com"].contains("node_names.names"));
    }

    proptest! {
        #[test]
        fn each_line_has_the_nodes_own_address_or_the_services(
            all in proptest::collection::btree_map("[a-c]{1,3}", (any::<bool>(), any::<[u8; 4]>()), 0..20),
        ) {
            let nodes: BTreeMap<_, _> = all.iter().map(|(name, (is_edge, ip))| {
                (name.clone(), NodeState { is_edge: *is_edge, ips: [IpAddr::from(*ip)].into() })
            }).collect();
            let service: IpAddr = "10.96.0.20".parse().unwrap();
            let rendered = text(&nodes, &[], &[service].into(), &BTreeMap::new(), usize::MAX).lines;
            prop_assert_eq!(rendered.lines().count(), nodes.len());
            for line in rendered.lines() {
                let (ip, name) = line.split_once('\t').unwrap();
                let (is_edge, own) = all[name];
                prop_assert_eq!(ip.parse(), Ok(if is_edge { service } else { own.into() }));
            }
            let mut sorted: Vec<_> = rendered.lines().collect();
            sorted.sort_unstable();
            prop_assert_eq!(rendered.lines().collect::<Vec<_>>(), sorted);
        }
    }
}

#[cfg(test)]
mod node_tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_edge_has_the_label_and_external_addresses_are_used_only_without_internal() {
        let edges = ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned());
        let seen = |labels: serde_json::Value, addresses: &[(&str, &str)]| {
            let addresses: Vec<_> =
                addresses.iter().map(|(kind, address)| json!({"type": kind, "address": address})).collect();
            let node =
                json!({"metadata": {"name": "n", "labels": labels}, "status": {"addresses": addresses}});
            let seen = serde_json::from_value::<NamedNode>(node).unwrap().seen(&edges);
            (seen.is_edge, seen.ips.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let all = [
            ("Hostname", "n"),
            ("ExternalIP", "192.0.2.1"),
            ("InternalIP", "10.0.0.1"),
            ("InternalIP", "fd00::1"),
        ];
        let edge = json!({"openyurt.io/is-edge-worker": "true"});
        assert_eq!(seen(edge, &all), (true, vec!["10.0.0.1".to_owned(), "fd00::1".to_owned()]));
        let cloud = json!({"openyurt.io/is-edge-worker": "false"});
        assert_eq!(seen(cloud, &all[..2]), (false, vec!["192.0.2.1".to_owned()]));
        assert_eq!(seen(json!({}), &[]), (false, vec![]));
    }

    #[test]
    fn nodes_are_followed_only_while_their_list_is_complete() {
        let (mut nodes, edges) = (NodeStore::default(), (String::new(), String::new()));
        let events =
            [(Event::Init, false), (Event::InitDone, true), (Event::Init, false), (Event::InitDone, true)];
        for (event, followed) in events {
            nodes.take(event, &edges);
            assert_eq!(nodes.are_followed(), followed);
        }
    }

    #[test]
    fn only_the_first_eight_addresses_of_a_node_are_used() {
        let address = |n| json!({"type": "InternalIP", "address": format!("10.0.0.{n}")});
        let addresses: Vec<_> = (1..=200).map(address).collect();
        let node = json!({"metadata": {"name": "n"}, "status": {"addresses": addresses}});
        let node = serde_json::from_value::<NamedNode>(node).unwrap();
        let first: Vec<_> = (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect();
        assert_eq!(Vec::from_iter(node.seen(&(String::new(), String::new())).ips), first);
    }
}
