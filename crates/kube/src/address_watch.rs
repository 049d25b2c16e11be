//! Keeps an address book up to date with Kubernetes.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1 as whole;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, ObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::{Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
use serde::{Deserialize, Deserializer};
use tokio::time::Instant;
use tracing::warn;

use crate::cluster::{Cluster, ClusterError};
use crate::members::SERVICE_LABEL;
use crate::partial::{NodeStatus, part_of};
use crate::watcher::{ObjectWatcher, WatchHandler};
use tunnel_base::addresses::AddressBook;
use tunnel_base::addresses::cluster_state::{
    ClusterState, EndpointSliceInfo, IndexKeys, NodeInfo, ObjectIndex, PodInfo, ReadyEndpoint, ServiceInfo,
    ServicePort, ServiceSide,
};
use tunnel_base::drain::Drain;

/// A watch of Nodes, pods, Services, their endpoints, and the Services that operators list by hand. The last known
/// state applies while kube-apiserver does not answer.
pub struct AddressWatch {
    cluster: Cluster,
    book: Arc<AddressBook>,
    report: Report,
    disputes: Disputes,
}

/// A callback for the state of each kind of object: complete, or why not.
type Report = Arc<dyn Fn(&'static str, Result<(), String>) + Send + Sync>;

impl AddressWatch {
    /// Creates a watch; sends no request. Calls `report` with the state of each kind now and whenever it changes; it
    /// must not block.
    pub fn new(
        cluster: Cluster,
        book: Arc<AddressBook>,
        report: impl Fn(&'static str, Result<(), String>) + Send + Sync + 'static,
    ) -> Self {
        for what in [NODES, PODS, SERVICES, ENDPOINTS, CACHE_WORDS] {
            report(what, Err("not known yet".to_owned()));
        }
        Self { cluster, book, report: Arc::new(report), disputes: Disputes::default() }
    }

    /// Runs the watches until draining starts.
    pub async fn follow(self, drain: Drain) {
        let all = async {
            tokio::join!(
                self.kind::<PartialNode>(NODES, Api::all),
                self.kind::<PartialPod>(PODS, Api::all),
                self.kind::<PartialService>(SERVICES, Api::all),
                self.kind::<PartialEndpointSlice>(ENDPOINTS, Api::all),
                self.follow_manual_services(),
            );
        };
        tokio::select! {
            () = all => {}
            () = drain.draining() => {}
        }
    }

    async fn kind<K>(&self, what: &'static str, api: fn(Client) -> Api<K>)
    where
        K: PartialObject + Resource<DynamicType = ()>,
    {
        let taker = KindHandler::<K> { watch: self, what, listed: false, kind: PhantomData };
        let followed = ObjectWatcher { cluster: &self.cluster, what, which: watcher::Config::default() };
        match followed.run(|client, _| api(client), taker).await {}
    }

    async fn follow_manual_services(&self) {
        let which = watcher::Config::default().fields(&format!("metadata.name={CACHE}"));
        let followed = ObjectWatcher { cluster: &self.cluster, what: CACHE_WORDS, which };
        match followed.run(Api::namespaced, ManualServices { watch: self, found: false, listed: false }).await {}
    }
}

/// The handler of objects of one kind.
struct KindHandler<'a, K> {
    watch: &'a AddressWatch,
    what: &'static str,
    listed: bool,
    kind: PhantomData<fn(K)>,
}

impl<K: PartialObject> KindHandler<'_, K> {
    fn report(&self, state: Result<(), String>) {
        (self.watch.report)(self.what, state);
    }
}

impl<K: PartialObject + Resource<DynamicType = ()>> WatchHandler<K> for KindHandler<'_, K> {
    fn on_event(&mut self, event: Event<K>) -> bool {
        match event {
            Event::Init => {
                self.listed = false;
                self.watch.book.change(|facts| K::table(facts).start());
            }
            Event::InitApply(object) | Event::Apply(object) => {
                let (name, kept) = (name(&object), object.facts());
                let claimed = self.watch.book.change(|facts| match kept {
                    Some(kept) => K::table(facts).put(&name, kept),
                    None => {
                        K::table(facts).remove(&name);
                        Vec::new()
                    }
                });
                // During a list, replaced objects are still in the table and may be deleted by now.
                if self.listed {
                    self.watch.disputes.log_disputed(&self.watch.book, claimed);
                }
            }
            Event::Delete(object) => self.watch.book.change(|facts| K::table(facts).remove(&name(&object))),
            Event::InitDone => {
                self.listed = true;
                let claimed = self.watch.book.change(|facts| {
                    K::table(facts).finish();
                    K::table(facts).addresses()
                });
                self.watch.disputes.log_disputed(&self.watch.book, claimed);
                self.report(Ok(()));
            }
        }
        self.listed
    }

    fn on_watch_failed(&mut self, cause: &ClusterError) {
        self.report(Err(cause.to_string()));
    }
}

/// The handler of the ConfigMap in which operators list Services.
struct ManualServices<'a> {
    watch: &'a AddressWatch,
    /// Whether the list in progress contains the ConfigMap.
    found: bool,
    listed: bool,
}

impl WatchHandler<PartialTunnelCache> for ManualServices<'_> {
    fn on_event(&mut self, event: Event<PartialTunnelCache>) -> bool {
        let sides = match event {
            Event::Init => {
                (self.found, self.listed) = (false, false);
                None
            }
            Event::InitApply(cache) | Event::Apply(cache) => {
                self.found = true;
                Some(cache.sides())
            }
            Event::Delete(_) => Some(Default::default()),
            Event::InitDone => {
                self.listed = true;
                (self.watch.report)(CACHE_WORDS, Ok(()));
                (!self.found).then(Default::default)
            }
        };
        if let Some(sides) = sides {
            self.watch.book.change(|facts| facts.sides = sides);
        }
        self.listed
    }

    fn on_watch_failed(&mut self, cause: &ClusterError) {
        (self.watch.report)(CACHE_WORDS, Err(cause.to_string()));
    }
}

impl fmt::Debug for AddressWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressWatch").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// Returns the key in the tables: `namespace/name`, or just the name for a Node.
fn name<K: PartialObject + Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// The ConfigMap in which SuperEdge keeps its routes; it is in the server's namespace.
const CACHE: &str = "tunnel-cache";

// Names of the kinds in the log and in `/readyz`.
const NODES: &str = "nodes";
const PODS: &str = "pods";
const SERVICES: &str = "Services";
const ENDPOINTS: &str = "endpoints of Services";
const CACHE_WORDS: &str = "Services in ConfigMap tunnel-cache";

// Partial types of Kubernetes objects. Other fields are skipped and never held in memory as values.

/// An object of which facts are kept.
pub(crate) trait PartialObject:
    Resource + Clone + for<'de> Deserialize<'de> + Debug + Send + 'static
{
    /// The facts that are kept.
    type Facts: IndexKeys;

    /// Returns the table of these facts.
    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<Self::Facts>;

    /// Returns the facts of this object, or `None` if it is ignored.
    fn facts(self) -> Option<Self::Facts>;
}

part_of!(PartialNode, whole::Node);
part_of!(PartialPod, whole::Pod);

/// The metadata that is read. Of all labels only the one that names a slice's Service is kept.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    #[serde(default)]
    labels: Labels,
}

/// The only label that is read: in an EndpointSlice it names the Service.
#[derive(Deserialize, Default)]
struct Labels {
    #[serde(rename = "kubernetes.io/service-name")]
    service: Option<String>,
}

fn meta<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    let Meta { name, namespace, resource_version, labels } = Meta::deserialize(from)?;
    let labels = labels.service.map(|service| BTreeMap::from([(SERVICE_LABEL.to_owned(), service)]));
    Ok(ObjectMeta { name, namespace, resource_version, labels, ..ObjectMeta::default() })
}

/// The fields of a Node that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialNode {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: NodeSpec,
    #[serde(default)]
    status: NodeStatus,
}

/// The part of a Node's spec that is read: the networks of its pods.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct NodeSpec {
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

impl PartialObject for PartialNode {
    type Facts = NodeInfo;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<NodeInfo> {
        &mut facts.nodes
    }

    fn facts(self) -> Option<NodeInfo> {
        Some(NodeInfo {
            ips: self.status.ips("InternalIP"),
            outside: self.status.ips("ExternalIP"),
            pods: self.spec.pod_cidrs.iter().filter_map(|net| net.parse().ok()).collect(),
        })
    }
}

/// The fields of a pod that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialPod {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

/// The part of a pod's spec that is read: its node, and whether it uses the node's network.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: bool,
}

/// The part of a pod's status that is read: its phase and its addresses.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

/// An address of a pod.
#[derive(Debug, Clone, Deserialize)]
struct PodIp {
    ip: String,
}

impl PartialObject for PartialPod {
    type Facts = PodInfo;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<PodInfo> {
        &mut facts.pods
    }

    fn facts(self) -> Option<PodInfo> {
        let node = self.spec.node_name?.parse().ok()?;
        let over = matches!(self.status.phase.as_str(), "Succeeded" | "Failed");
        let own = self.status.pod_ips.iter().filter(|_| !over && !self.spec.host_network);
        Some(PodInfo { node, ips: addresses(own.map(|own| own.ip.as_str())) })
    }
}

fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Box<[IpAddr]> {
    texts.filter_map(|text| text.parse().ok()).collect()
}

// Services, their endpoints, and the Services that operators list by hand.

part_of!(PartialService, whole::Service);
part_of!(PartialEndpointSlice, EndpointSlice);
part_of!(PartialTunnelCache, whole::ConfigMap);

/// The fields of a Service that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialService {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceSpec,
    #[serde(default)]
    status: ServiceStatus,
}

/// The part of a Service's spec that is read: its type, addresses and ports.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceSpec {
    #[serde(rename = "type")]
    kind: String,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    external_ips: Vec<String>,
    external_name: Option<String>,
    ports: Vec<PortSpec>,
}

/// The part of a Service's status that is read: the addresses of its load balancer.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceStatus {
    load_balancer: LoadBalancer,
}

/// The load balancer in a Service's status.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct LoadBalancer {
    ingress: Vec<Ingress>,
}

/// An ingress point of a load balancer.
#[derive(Debug, Clone, Deserialize)]
struct Ingress {
    /// An ingress may have only a host name.
    ip: Option<String>,
}

/// A port of a Service or of an EndpointSlice.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct PortSpec {
    name: Option<String>,
    /// In a slice this may be any number, because Kubernetes does not check it. One invalid object must not hide all
    /// others.
    port: Option<i64>,
    protocol: Option<String>,
}

impl PartialObject for PartialService {
    type Facts = ServiceInfo;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<ServiceInfo> {
        &mut facts.services
    }

    fn facts(self) -> Option<ServiceInfo> {
        let ServiceSpec { kind, cluster_ips, external_ips, external_name, ports } = self.spec;
        let external = match (kind.as_str(), external_name) {
            ("ExternalName", name) => Some(name?.parse().ok()?),
            _ => None,
        };
        // A headless Service has "None" there.
        let ips = addresses(cluster_ips.iter().map(String::as_str));
        let balanced = self.status.load_balancer.ingress.iter().filter_map(|ingress| ingress.ip.as_deref());
        let outside = addresses(external_ips.iter().map(String::as_str).chain(balanced));
        Some(ServiceInfo { ips, outside, ports: tcp(ports), external })
    }
}

/// The fields of an EndpointSlice that the address book uses; read instead of the whole object.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PartialEndpointSlice {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    address_type: String,
    // Both may be null.
    endpoints: Option<Vec<SliceEndpoint>>,
    ports: Option<Vec<PortSpec>>,
}

/// An endpoint in an EndpointSlice: its addresses, whether it is ready, and its node.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceEndpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    node_name: Option<String>,
}

/// The condition of an endpoint that is read.
#[derive(Debug, Clone, Deserialize, Default)]
struct Conditions {
    ready: Option<bool>,
}

impl PartialObject for PartialEndpointSlice {
    type Facts = EndpointSliceInfo;

    fn table(facts: &mut ClusterState) -> &mut ObjectIndex<EndpointSliceInfo> {
        &mut facts.slices
    }

    fn facts(self) -> Option<EndpointSliceInfo> {
        // Kubernetes does not check what these names are, and a name that parses as 127.0.0.1 would be the edge itself.
        if self.address_type == "FQDN" {
            return None;
        }
        let service = self.metadata.labels.as_ref()?.get(SERVICE_LABEL)?;
        let service = format!("{}/{service}", self.metadata.namespace.as_deref()?).into();
        // An unknown readiness means ready, as Kubernetes specifies. The first of several addresses represents the
        // endpoint.
        let ready = self.endpoints.into_iter().flatten().filter(|one| one.conditions.ready.unwrap_or(true));
        let ready = ready.filter_map(|one| {
            let node = one.node_name.and_then(|name| name.parse().ok());
            Some(ReadyEndpoint { ip: one.addresses.first()?.parse().ok()?, node })
        });
        Some(EndpointSliceInfo {
            service,
            ports: tcp(self.ports.unwrap_or_default()),
            ready: ready.collect(),
        })
    }
}

/// The part of SuperEdge's ConfigMap `tunnel-cache` that operators write: the Services that they list.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PartialTunnelCache {
    #[serde(deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    data: CacheData,
}

/// The key of ConfigMap `tunnel-cache` that is read: one Service per line, with its side.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
struct CacheData {
    user_services: String,
}

impl PartialTunnelCache {
    /// Returns the side of each Service, keyed by `namespace/name`. Invalid lines are ignored.
    pub(crate) fn sides(&self) -> HashMap<String, ServiceSide> {
        let lines = self.data.user_services.lines();
        let sides = lines.filter_map(|line| {
            let mut words = line.split_whitespace();
            let (service, namespace) = words.next()?.split_once('.')?;
            let side = match words.next()? {
                "edge" => ServiceSide::Edge,
                "cloud" => ServiceSide::Cloud,
                _ => return None,
            };
            Some((format!("{namespace}/{service}"), side))
        });
        sides.collect()
    }
}

fn tcp(ports: Vec<PortSpec>) -> Box<[ServicePort]> {
    let tcp = ports.into_iter().filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    tcp.filter_map(|port| {
        let number = u16::try_from(port.port?).ok().filter(|number| *number > 0)?;
        Some(ServicePort { name: port.name.unwrap_or_default().into(), number })
    })
    .collect()
}

// Logs addresses that a Node or pod claims although another object owns or claims them.

/// A rate limit for log lines about disputed addresses: a kubelet may change its claims as often as it likes.
#[derive(Debug, Default)]
pub(crate) struct Disputes(Mutex<Window>);

/// The current window of the rate limit in [`Disputes`].
#[derive(Debug, Default)]
struct Window {
    started: Option<Instant>,
    lines: u32,
}

impl Disputes {
    /// Logs which of these addresses are disputed, and by which objects.
    pub(crate) fn log_disputed(&self, book: &AddressBook, ips: impl IntoIterator<Item = IpAddr>) {
        for line in ips.into_iter().filter_map(|ip| book.dispute(ip)).filter_map(|why| self.line(why)) {
            warn!(dispute = line, "address claimed by several objects");
        }
    }

    /// Returns the text to log for a dispute, or `None` if the limit of this window is reached.
    fn line(&self, why: String) -> Option<String> {
        let mut window = self.0.lock();
        if window.started.is_none_or(|started| started.elapsed() >= WINDOW) {
            *window = Window { started: Some(Instant::now()), lines: 0 };
        }
        window.lines = window.lines.saturating_add(1);
        match window.lines {
            ..=MAX_LINES => Some(why),
            LAST_LINE => Some(MORE.to_owned()),
            _ => None,
        }
    }
}

/// Maximum number of disputes logged per window.
const MAX_LINES: u32 = 20;

const LAST_LINE: u32 = MAX_LINES + 1;

const MORE: &str = "more addresses are disputed; errors of clients that request one name the claimants";

const WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;

#[cfg(test)]
mod disputes_tests {
    use tunnel_base::addresses::cluster_state::{NodeInfo, PodInfo, ServiceInfo};

    use super::*;

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Returns a book in which the config assigns 10.0.0.1 to node1, 10.0.0.2 is a Service's and 10.0.0.3 is node2's.
    /// Node evil claims all of them.
    fn book() -> AddressBook {
        let book = AddressBook::new(vec![(ip(1).into(), "node1".parse().unwrap())], true);
        let node = |ips: &[u8]| NodeInfo {
            ips: ips.iter().copied().map(ip).collect(),
            outside: Box::default(),
            pods: Box::default(),
        };
        book.change(|facts| {
            facts.nodes.put("node1", node(&[1]));
            facts.nodes.put("node2", node(&[3]));
            facts.nodes.put("evil", node(&[2, 3, 4]));
            let pod = PodInfo { node: "evil".parse().unwrap(), ips: [ip(1), ip(4)].into() };
            facts.pods.put("shop/pod", pod);
            let none = ServiceInfo {
                ips: [ip(2)].into(),
                outside: Box::default(),
                ports: Box::default(),
                external: None,
            };
            facts.services.put("shop/web", none);
        });
        book
    }

    #[test]
    fn a_dispute_line_names_both_claimants_of_an_address() {
        let book = book();
        let lines: Vec<_> = (1..=5).filter_map(|last| book.dispute(ip(last))).collect();
        let expected = [
            "pod shop/pod at evil claims 10.0.0.1, which [server.addresses] assigns to node node1; the config wins",
            "node evil claims 10.0.0.2, the ClusterIP of Service shop/web; the Service keeps it",
            "10.0.0.3 is claimed by both node evil and node node2; none is reached by it",
        ];
        assert_eq!(lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn dispute_lines_are_rate_limited() {
        let disputes = Disputes::default();
        let logged = || (0..1000).filter_map(|_| disputes.line("a dispute".to_owned())).count();
        assert_eq!((logged(), logged()), (21, 0));
        tokio::time::advance(WINDOW).await;
        assert_eq!(logged(), 21);
    }
}
