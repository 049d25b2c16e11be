//! Discovery of servers through the endpoints of a Kubernetes Service, and of the cluster's Nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;
use tracing::debug;

use crate::cluster::{Cluster, ClusterError};
use crate::watcher::{ObjectWatcher, WatchHandler};
use tunnel_base::addresses::cluster_state::{Endpoints, KnownEndpoints};
use tunnel_base::drain::Drain;

/// A watch of the endpoints of a Service. The last known endpoints apply while kube-apiserver does not answer.
#[derive(Debug)]
pub struct EndpointWatch {
    cluster: Cluster,
    service: String,
    /// Address of this server, with the port on which all servers accept links.
    own: SocketAddr,
    endpoints: watch::Sender<KnownEndpoints>,
    peers: watch::Sender<Vec<SocketAddr>>,
    unlisted: watch::Sender<Option<String>>,
}

/// The EndpointSlices of a Service; each holds some of its endpoints.
#[derive(Debug, Default)]
struct Slices {
    known: BTreeMap<String, Endpoints>,
    /// Slices received so far of a list in progress.
    listed: Option<BTreeMap<String, Endpoints>>,
}

impl EndpointWatch {
    /// Creates a watch; sends no request. `own` is this server's address, with the port on which all servers accept
    /// links.
    pub fn new(cluster: Cluster, service: String, own: SocketAddr) -> Self {
        let (endpoints, peers) = (watch::Sender::new(None), watch::Sender::new(Vec::new()));
        Self { cluster, service, own, endpoints, peers, unlisted: watch::Sender::new(None) }
    }

    /// Returns a receiver of the endpoints of all servers, including this one.
    pub fn endpoints(&self) -> watch::Receiver<KnownEndpoints> {
        self.endpoints.subscribe()
    }

    /// Returns a receiver of the addresses at which peers accept links, sorted; empty until they are known. Unready
    /// peers are included, because they may have nodes and sessions.
    pub fn peers(&self) -> watch::Receiver<Vec<SocketAddr>> {
        self.peers.subscribe()
    }

    /// Returns a receiver of the reason why the endpoints are not known; `None` once they are, and before the first
    /// answer.
    pub fn unlisted(&self) -> watch::Receiver<Option<String>> {
        self.unlisted.subscribe()
    }

    /// Runs the watch until draining starts.
    pub async fn follow(self, drain: Drain) {
        let of = format!("{SERVICE_LABEL}={}", self.service);
        let what = format!("the endpoints of Service {}", self.service);
        let followed = ObjectWatcher {
            cluster: &self.cluster,
            what: &what,
            which: watcher::Config::default().labels(&of),
        };
        tokio::select! {
            never = followed.run(Api::namespaced, (&self, Slices::default())) => match never {},
            () = drain.draining() => {}
        }
    }

    fn set(&self, endpoints: Endpoints) {
        let own = self.own.ip();
        let all: BTreeSet<_> = endpoints.ready.union(&endpoints.unready).collect();
        let others = all.into_iter().filter(|ip| **ip != own).map(|ip| SocketAddr::new(*ip, self.own.port()));
        let others: Vec<_> = others.collect();
        self.peers.send_if_modified(|old| {
            let news = *old != others;
            if news {
                debug!(service = self.service, peers = ?others, "peers changed");
                *old = others;
            }
            news
        });
        self.endpoints.send_if_modified(|old| {
            let news = old.as_ref() != Some(&endpoints);
            *old = Some(endpoints);
            news
        });
        self.unlisted.send_if_modified(|why| why.take().is_some());
    }
}

impl WatchHandler<EndpointSlice> for (&EndpointWatch, Slices) {
    fn on_event(&mut self, event: Event<EndpointSlice>) -> bool {
        let (watch, slices) = self;
        let endpoints = slices.take(event);
        endpoints.map(|endpoints| watch.set(endpoints)).is_some()
    }

    fn on_watch_failed(&mut self, cause: &ClusterError) {
        let (watch, _) = self;
        if watch.endpoints.borrow().is_none() {
            let why = format!("the endpoints of Service {} are not known: {cause}", watch.service);
            watch.unlisted.send_replace(Some(why));
        }
    }
}

impl Slices {
    /// Applies an event. Returns all endpoints, or `None` while a list is in progress.
    fn take(&mut self, event: Event<EndpointSlice>) -> Option<Endpoints> {
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(slice) => {
                let (name, endpoints) = endpoints(slice);
                self.listed.get_or_insert_default().insert(name, endpoints);
            }
            Event::InitDone => self.known = self.listed.take().unwrap_or_default(),
            Event::Apply(slice) => {
                let (name, endpoints) = endpoints(slice);
                self.known.insert(name, endpoints);
            }
            Event::Delete(slice) => {
                self.known.remove(&endpoints(slice).0);
            }
        }
        if self.listed.is_some() {
            return None;
        }
        let mut all = Endpoints::default();
        for slice in self.known.values() {
            all.ready.extend(&slice.ready);
            all.unready.extend(&slice.unready);
        }
        // An endpoint that moves between slices may be in both for a moment.
        all.unready.retain(|pod| !all.ready.contains(pod));
        Some(all)
    }
}

/// Returns a slice's name and endpoints. An unknown readiness means ready, as Kubernetes specifies.
fn endpoints(slice: EndpointSlice) -> (String, Endpoints) {
    let ready = |endpoint: &Endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    };
    let mut all = Endpoints::default();
    for endpoint in slice.endpoints {
        let set = if ready(&endpoint) { &mut all.ready } else { &mut all.unready };
        set.extend(endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()));
    }
    (slice.metadata.name.unwrap_or_default(), all)
}

/// The label of a slice that names its Service.
pub(crate) const SERVICE_LABEL: &str = "kubernetes.io/service-name";

// The Nodes of a cluster, and whether each is an edge.

/// Names of all Nodes, each with whether it has an edge label; `None` until they are known.
pub type KnownNodes = Option<BTreeMap<String, bool>>;

/// A watch of names and labels of Nodes. The last known ones apply while kube-apiserver does not answer.
#[derive(Debug)]
pub struct NodeWatch {
    cluster: Cluster,
    labels: Vec<(String, String)>,
    known: watch::Sender<KnownNodes>,
}

impl NodeWatch {
    /// Creates a watch; sends no request. `own` is the edge label from the config, with its value.
    pub fn new(cluster: Cluster, own: Option<(String, String)>) -> Self {
        Self { cluster, labels: edge_labels(own), known: watch::Sender::new(None) }
    }

    /// Returns a receiver of the known Nodes.
    pub fn known(&self) -> watch::Receiver<KnownNodes> {
        self.known.subscribe()
    }

    /// Runs the watch until draining starts.
    pub async fn follow(self, drain: Drain) {
        let followed = ObjectWatcher {
            cluster: &self.cluster,
            what: "names and labels of Nodes",
            which: watcher::Config::default(),
        };
        let taker =
            NodeSet { known: &self.known, labels: &self.labels, listed: BTreeMap::new(), listing: false };
        tokio::select! {
            never = followed.run(|client, _| Api::all(client), taker) => match never {},
            () = drain.draining() => {}
        }
    }
}

/// The metadata of a Node.
type NodeMeta = PartialObjectMeta<Node>;

/// A handler of the Node watch that publishes which Nodes exist and which of them are edges.
struct NodeSet<'a> {
    /// The published Nodes, and whether each is an edge.
    known: &'a watch::Sender<KnownNodes>,
    /// Labels with values that mark edges.
    labels: &'a [(String, String)],
    /// Nodes received so far of a list in progress.
    listed: BTreeMap<String, bool>,
    listing: bool,
}

impl WatchHandler<NodeMeta> for NodeSet<'_> {
    fn on_event(&mut self, event: Event<NodeMeta>) -> bool {
        match event {
            Event::Init => (self.listed, self.listing) = (BTreeMap::new(), true),
            Event::InitApply(node) => {
                self.listed.insert(node.name_any(), is_edge(&node, self.labels));
            }
            Event::InitDone => {
                self.listing = false;
                let listed = std::mem::take(&mut self.listed);
                self.known.send_if_modified(|known| {
                    let news = known.as_ref() != Some(&listed);
                    *known = Some(listed);
                    news
                });
            }
            Event::Apply(node) => {
                let is_edge = is_edge(&node, self.labels);
                self.change(|known| known.insert(node.name_any(), is_edge) != Some(is_edge));
            }
            Event::Delete(node) => self.change(|known| known.remove(&node.name_any()).is_some()),
        }
        !self.listing
    }
}

impl NodeSet<'_> {
    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, bool>) -> bool) {
        self.known.send_if_modified(|known| change(known.get_or_insert_default()));
    }
}

/// Returns true if the Node has one of these labels.
fn is_edge(node: &NodeMeta, labels: &[(String, String)]) -> bool {
    labels.iter().any(|(label, value)| node.labels().get(label) == Some(value))
}

/// Returns the edge labels of the manifests, SuperEdge's and OpenYurt's, and the label from the config.
fn edge_labels(own: Option<(String, String)>) -> Vec<(String, String)> {
    let known = [("superedge.io/node-edge", "enable"), ("openyurt.io/is-edge-worker", "true")];
    known.map(|(label, value)| (label.to_owned(), value.to_owned())).into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::discovery::v1::EndpointConditions;

    use super::*;

    fn slice(name: &str, endpoints: &[(&str, Option<bool>)]) -> EndpointSlice {
        let endpoint = |(address, ready): &(&str, Option<bool>)| Endpoint {
            addresses: vec![(*address).to_owned()],
            conditions: Some(EndpointConditions { ready: *ready, ..EndpointConditions::default() }),
            ..Endpoint::default()
        };
        let mut slice =
            EndpointSlice { endpoints: endpoints.iter().map(endpoint).collect(), ..EndpointSlice::default() };
        slice.metadata.name = Some(name.to_owned());
        slice
    }

    fn pods(ready: &[&str], unready: &[&str]) -> Endpoints {
        let set = |all: &[&str]| all.iter().map(|address| address.parse().unwrap()).collect();
        Endpoints { ready: set(ready), unready: set(unready) }
    }

    #[test]
    fn endpoints_come_from_all_slices_once_their_list_is_complete() {
        let mut slices = Slices::default();
        assert_eq!(slices.take(Event::Init), None);
        let one = slice("one", &[("10.0.0.1", Some(true)), ("10.0.0.2", Some(false)), ("10.0.0.3", None)]);
        assert_eq!(slices.take(Event::InitApply(one)), None);
        let two = slice("two", &[("fd00::1", Some(true)), ("pod.example.org", Some(true))]);
        assert_eq!(slices.take(Event::InitApply(two)), None);
        assert_eq!(
            slices.take(Event::InitDone),
            Some(pods(&["10.0.0.1", "10.0.0.3", "fd00::1"], &["10.0.0.2"]))
        );
        let moving = slice("two", &[("fd00::1", Some(true)), ("10.0.0.2", Some(true))]);
        assert_eq!(
            slices.take(Event::Apply(moving)),
            Some(pods(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"], &[])),
            "an endpoint may be in two slices for a moment"
        );
        let two = slice("two", &[("fd00::1", Some(true))]);
        assert!(slices.take(Event::Apply(two)).is_some());
        let less = slice("one", &[("10.0.0.3", Some(true))]);
        assert_eq!(slices.take(Event::Apply(less)), Some(pods(&["10.0.0.3", "fd00::1"], &[])));
        assert_eq!(slices.take(Event::Delete(slice("two", &[]))), Some(pods(&["10.0.0.3"], &[])));
        assert_eq!(slices.take(Event::Init), None, "known endpoints remain until the new list is complete");
        assert_eq!(slices.take(Event::InitDone), Some(pods(&[], &[])));
    }

    #[test]
    fn peers_are_the_other_endpoints_at_our_port() {
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let watch = EndpointWatch::new(cluster, "tunnel".to_owned(), "10.0.0.2:9000".parse().unwrap());
        let (mut peers, endpoints) = (watch.peers(), watch.endpoints());
        watch.set(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"]));
        let others: Vec<SocketAddr> =
            vec!["10.0.0.1:9000".parse().unwrap(), "[fd00::1]:9000".parse().unwrap()];
        assert_eq!(*peers.borrow_and_update(), others);
        assert_eq!(*endpoints.borrow(), Some(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"])));
        watch.set(pods(&["fd00::1"], &["10.0.0.1", "10.0.0.2"]));
        assert!(!peers.has_changed().unwrap(), "unready peers may still have nodes");
    }
}

#[cfg(test)]
mod nodes_tests {
    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> NodeMeta {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(serde_json::json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    #[test]
    fn nodes_are_known_once_their_list_is_complete_and_follow_each_change() {
        let known = watch::Sender::new(None);
        let mut seen = known.subscribe();
        let labels = edge_labels(None);
        let mut names = NodeSet { known: &known, labels: &labels, listed: BTreeMap::new(), listing: false };
        let is = |expected: &[(&str, bool)]| {
            let expected = expected.iter().map(|(name, is_edge)| ((*name).to_owned(), *is_edge)).collect();
            assert_eq!(*known.borrow(), Some(expected));
        };
        let superedge = [("superedge.io/node-edge", "enable")];
        for event in [Event::Init, Event::InitApply(node("a", &superedge)), Event::InitApply(node("b", &[]))]
        {
            assert!(!names.on_event(event) && known.borrow().is_none());
        }
        assert!(names.on_event(Event::InitDone));
        is(&[("a", true), ("b", false)]);
        seen.mark_unchanged();
        names.on_event(Event::Apply(node("a", &superedge)));
        assert!(!seen.has_changed().unwrap(), "a status update changes nothing");
        names.on_event(Event::Delete(node("b", &[])));
        names.on_event(Event::Apply(node("c", &[])));
        is(&[("a", true), ("c", false)]);
        seen.mark_unchanged();
        names.on_event(Event::Apply(node("a", &[])));
        assert!(seen.has_changed().unwrap(), "the label was removed");
        is(&[("a", false), ("c", false)]);
        names.on_event(Event::Init);
        is(&[("a", false), ("c", false)]);
        names.on_event(Event::InitDone);
        is(&[]);
    }

    #[test]
    fn edges_are_recognised_by_the_known_labels_and_the_configured_one() {
        let own = ("example.org/edge".to_owned(), "yes".to_owned());
        for (label, value, is_one, with_own) in [
            ("superedge.io/node-edge", "enable", true, true),
            ("superedge.io/node-edge", "disable", false, false),
            ("openyurt.io/is-edge-worker", "true", true, true),
            ("openyurt.io/is-edge-worker", "false", false, false),
            ("example.org/edge", "yes", false, true),
            ("node-role.kubernetes.io/control-plane", "", false, false),
        ] {
            let node = node("a", &[(label, value)]);
            assert_eq!(is_edge(&node, &edge_labels(None)), is_one, "{label}={value}");
            assert_eq!(is_edge(&node, &edge_labels(Some(own.clone()))), with_own, "{label}={value}");
        }
    }
}
