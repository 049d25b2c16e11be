//! Kubernetes objects that determine where a target is, and which of them owns an address that several claim.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::addresses::LocateError;
use crate::addresses::object_index::{IndexKey, IndexKeys, ObjectIndex};
use crate::addresses::owners::{AddressClaim, ClaimSource};
use crate::policy::tokens::TokenError;
use tunnel_proto::names::{Host, NodeName, Target};

/// The objects of each kind: nodes by name, all others as `namespace/name`.
#[derive(Debug, Default)]
pub struct ClusterState {
    /// All nodes.
    pub nodes: ObjectIndex<KubeNode>,
    /// Pods that are assigned to a node.
    pub pods: ObjectIndex<KubePod>,
    /// All Services.
    pub services: ObjectIndex<KubeService>,
    /// EndpointSlices of Services.
    pub slices: ObjectIndex<KubeEndpointSlice>,
    /// Sides of Services, as configured in `user_services`.
    pub sides: HashMap<String, ServiceSide>,
}

/// Names of all Nodes, each with whether it has an edge label; `None` until they are known.
pub type KnownNodes = Option<BTreeMap<String, bool>>;

/// Pods of edges by name; `None` until they are known.
pub type KnownEdgePods = Option<BTreeMap<String, EdgePod>>;

/// A pod in which an edge runs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct EdgePod {
    /// Distinguishes it from earlier and later pods of its name.
    pub uid: String,
    /// The Node that it was assigned to.
    pub node: Option<String>,
    /// When its deletion takes effect, in seconds since 1970, if that was requested.
    pub deleted: Option<u64>,
}

/// What the ServiceAccount token of an edge's pod has proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodProof {
    /// The node on which the pod runs.
    pub node: NodeName,
    /// The pod's name.
    pub pod: String,
    /// Distinguishes it from other pods of that name.
    pub uid: String,
    /// When the token ends, in seconds since 1970.
    pub ends: u64,
}

/// Judges the ServiceAccount tokens of edges' pods.
pub trait PodTokenReviewer: Debug + Send + Sync {
    /// Returns what a token from this address proves.
    ///
    /// # Errors
    ///
    /// Returns [`TokenError::PodToken`] if it proves nothing, [`TokenError::PodTokenUnchecked`] if that is not known now.
    fn review<'a>(&'a self, token: &'a str, from: IpAddr) -> BoxFuture<'a, Result<PodProof, TokenError>>;

    /// Checks whether a proof is still valid.
    ///
    /// # Errors
    ///
    /// Returns the reason why it is not.
    fn recheck(&self, proof: &PodProof) -> Result<(), TokenError>;

    /// Returns a receiver of the known pods, whose changes may end a proof.
    fn pods(&self) -> watch::Receiver<KnownEdgePods>;

    /// Returns the question to peers while kube-apiserver is away: what do they know of the cluster?
    fn question(&self) -> Option<Vec<u8>>;

    /// Takes a peer's question or a part of its answer. Returns the part that answers, or the question for the next one.
    fn on_peer(&self, said: &[u8]) -> Option<Vec<u8>>;
}

/// Endpoints of a Service; `None` until they are known.
pub type ServiceEndpoints = Option<Endpoints>;

/// Addresses of the endpoints of a Service. Each address is in one of the two sets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Endpoints that receive traffic from clients.
    pub ready: BTreeSet<IpAddr>,
    /// Endpoints that are starting, stopping, failing or on an unreachable machine.
    pub unready: BTreeSet<IpAddr>,
}

/// The facts about a Kubernetes Node that the address book keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeNode {
    /// InternalIPs in the Node's order, at most 8: its own kubelet writes them.
    pub ips: Box<[IpAddr]>,
    /// ExternalIPs, at most 8. The node is not found by them, but no edge of another node may claim them.
    pub outside: Box<[IpAddr]>,
    /// Names among its addresses, in lower case and without its own, at most 8. kube-apiserver may use any of them.
    pub names: Box<[Arc<str>]>,
    /// Networks of the node's pods.
    pub pods: Box<[IpNet]>,
}

/// The facts about a Kubernetes pod that the address book keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubePod {
    /// Node on which it runs or ran.
    pub node: NodeName,
    /// The pod's own addresses: none if it has finished, or if it uses the network of its node.
    pub ips: Box<[IpAddr]>,
}

/// The facts about a Kubernetes Service that the address book keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeService {
    /// ClusterIPs, that of the first family first; none if the Service is headless.
    pub ips: Box<[IpAddr]>,
    /// ExternalIPs and load balancer addresses. The Service is not found by them, but no edge may claim them.
    pub outside: Box<[IpAddr]>,
    /// TCP ports.
    pub ports: Box<[ServicePort]>,
    /// Target of an ExternalName Service.
    pub external: Option<Host>,
}

/// The facts about a Kubernetes EndpointSlice that the address book keeps: ready endpoints of one Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeEndpointSlice {
    /// Service, as `namespace/name`.
    pub service: Arc<str>,
    /// TCP ports of each endpoint.
    pub ports: Box<[ServicePort]>,
    /// Endpoints that are ready.
    pub ready: Box<[ReadyEndpoint]>,
}

/// A port of a Service or of its endpoints, matched by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Name, which may be empty.
    pub name: Box<str>,
    /// Port number.
    pub number: u16,
}

/// An endpoint of a Service that is ready for connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyEndpoint {
    /// Address of the endpoint.
    pub ip: IpAddr,
    /// Node of the endpoint, if it has one.
    pub node: Option<NodeName>,
}

/// The side of the tunnel on which a Service's endpoints are, as operators configured it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceSide {
    /// At edges: endpoints without a node are ignored.
    Edge,
    /// In the cloud: dialled unchanged.
    Cloud,
}

/// The target that is dialled for a connection to a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServiceBackend {
    /// One of its endpoints, with its node if it has one.
    Endpoint { at: SocketAddr, node: Option<NodeName> },
    /// A target that is dialled instead of an endpoint.
    Outside(Target),
}

impl ClusterState {
    /// Returns the backend of the Service that a target means, or `None` if it means no Service. `is_fixed` returns
    /// true for addresses that the fixed table assigns to a node.
    pub(crate) fn backend(
        &self,
        target: &Target,
        chance: f64,
        is_fixed: impl Fn(IpAddr) -> bool,
    ) -> Result<Option<ServiceBackend>, LocateError> {
        let named = match &target.host {
            Host::Ip(ip) => self.service_at(*ip)?.map(|name| (name, Some(*ip))),
            Host::Name(name) => self.named(name)?.map(|name| (name, None)),
        };
        let Some((name, requested_ip)) = named else { return Ok(None) };
        let Some(service) = self.services.get(&name) else { return Ok(None) };
        if let Some(external) = &service.external {
            return Ok(Some(ServiceBackend::Outside(Target { host: external.clone(), port: target.port })));
        }
        let side = self.sides.get(&name).copied();
        if side == Some(ServiceSide::Cloud) {
            return Ok(Some(ServiceBackend::Outside(target.clone())));
        }
        // A ClusterIP reaches endpoints of its own family only, as in the cluster. A name has that of the first
        // ClusterIP.
        let family = requested_ip.as_ref().or(service.ips.first()).map(IpAddr::is_ipv4);
        // This server would dial an endpoint without a node itself, so a Service at edges must not use one.
        let at_edge = |at: &SocketAddr, node: Option<&NodeName>| {
            side.is_none()
                || node.is_some()
                || is_fixed(at.ip())
                || matches!(self.node_at(at.ip()), Ok(Some(_)))
        };
        let endpoints = self.endpoints(&name, service, target.port)?;
        let endpoints = endpoints
            .filter(|(at, _)| family.is_none_or(|v4| at.is_ipv4() == v4))
            .filter(|(at, node)| at_edge(at, *node));
        let chosen = choose(endpoints, chance).ok_or(LocateError::NoEndpoint(name, side.is_some()));
        chosen.map(|(at, node)| Some(ServiceBackend::Endpoint { at, node: node.cloned() }))
    }

    pub(crate) fn node_of_pod(&self, namespace: &str, name: &str) -> Option<NodeName> {
        self.pods.get(&format!("{namespace}/{name}")).map(|pod| pod.node.clone())
    }

    /// Returns the pod network of a node that contains this address.
    pub(crate) fn pod_network(&self, node: &str, ip: IpAddr) -> Option<IpNet> {
        self.nodes.get(node)?.pods.iter().find(|net| net.contains(&ip)).copied()
    }

    /// Returns the first address of a node.
    pub(crate) fn address_of(&self, node: &str) -> Option<IpAddr> {
        self.nodes.get(node)?.ips.first().copied()
    }

    /// Returns the only Node that has a name among its addresses, unless a Node has that name itself.
    pub(crate) fn node_with_name(&self, name: &str) -> Option<NodeName> {
        let mut nodes = self.nodes.claiming(IndexKey::Name(name.into()));
        let (node, _) = nodes.next().filter(|_| self.nodes.get(name).is_none())?;
        if nodes.next().is_none() { node.parse().ok() } else { None }
    }

    /// Returns the Service that a name means.
    fn named(&self, name: &str) -> Result<Option<String>, LocateError> {
        let Some((service, is_whole)) = service_name(name) else { return Ok(None) };
        // A Node's name may have two labels. A full Service name is never a Node's, or that Node would get the
        // Service's traffic.
        if !is_whole && self.nodes.get(name).is_some() {
            return Ok(None);
        }
        let known = self.services.get(&service).is_some();
        if is_whole && !known && self.services.is_listed() {
            return Err(LocateError::NoService(service));
        }
        Ok(known.then_some(service))
    }

    /// Returns the ready endpoints for a port of a Service, from all of its slices. A headless Service only names its
    /// endpoints, so its ports are theirs.
    fn endpoints<'f>(
        &'f self,
        name: &str,
        service: &'f KubeService,
        port: u16,
    ) -> Result<impl Iterator<Item = (SocketAddr, Option<&'f NodeName>)> + Clone, LocateError> {
        let headless = service.ips.is_empty();
        let own = service.ports.iter().find(|own| own.number == port);
        if !headless && own.is_none() {
            return Err(LocateError::NoPort { service: name.to_owned(), port });
        }
        // A slice has the numbers of the pods' ports, which the Service's port finds by its name.
        let number = move |slice: &KubeEndpointSlice| match own.filter(|_| !headless) {
            Some(own) => slice.ports.iter().find(|port| port.name == own.name).map(|port| port.number),
            None => Some(port),
        };
        let slices = self.slices.claiming(IndexKey::Service(name.into()));
        let slices = slices.filter_map(move |(_, slice)| Some((slice, number(slice)?)));
        Ok(slices.flat_map(|(slice, number)| {
            slice.ready.iter().map(move |one| (SocketAddr::new(one.ip, number), one.node.as_ref()))
        }))
    }

    /// Returns true if all Nodes, pods and Services are listed.
    pub(crate) fn are_listed(&self) -> bool {
        self.nodes.is_listed() && self.pods.is_listed() && self.services.is_listed()
    }

    /// Returns why a node may not have the claimed address, if so.
    pub(crate) fn refusal(&self, AddressClaim { ip, node, by }: &AddressClaim) -> Option<&'static str> {
        if self.services.is_claimed(IndexKey::Internal(*ip)) {
            return Some("a Service's");
        }
        // Its kubelet writes all addresses of a Node.
        if *by < ClaimSource::Kubernetes {
            return None;
        }
        if self.pods.is_claimed(IndexKey::Internal(*ip)) {
            return Some("a pod's");
        }
        // A load balancer may share the addresses of nodes.
        let mut outside = self.nodes.claiming(IndexKey::External(*ip));
        outside.any(|(name, _)| !node.as_str().eq_ignore_ascii_case(name)).then_some("another Node's")
    }

    /// Returns the node that has this address, or that runs the pod with this address.
    ///
    /// A kubelet writes the addresses of its Node and of that Node's pods. So an address that another object claims too
    /// belongs to neither. A ClusterIP is allocated by kube-apiserver and belongs to the Service alone.
    pub fn node_at(&self, ip: IpAddr) -> Result<Option<NodeName>, LocateError> {
        if self.services.is_claimed(IndexKey::Internal(ip)) {
            return Ok(None);
        }
        let Some(first) = self.kubelet_claimants(ip).next() else { return Ok(None) };
        let others = self.nodes_with(IndexKey::External(ip)).chain(self.kubelet_claimants(ip));
        // A load balancer may share the address of a Node, but not of a pod.
        let is_pod = matches!(first, Object::Pod { .. });
        let services = self.services_with(IndexKey::External(ip)).filter(|_| is_pod);
        match others.chain(services).find(|other| other.node() != first.node()) {
            Some(other) => Err(LocateError::ambiguous(ip, &first, &other)),
            None => Ok(first.node().cloned()),
        }
    }

    /// Returns the Service with this ClusterIP, as `namespace/name`.
    pub fn service_at(&self, ip: IpAddr) -> Result<Option<String>, LocateError> {
        let mut all = self.services_with(IndexKey::Internal(ip));
        match (all.next(), all.next()) {
            (Some(one), Some(other)) => Err(LocateError::ambiguous(ip, &one, &other)),
            (Some(Object::Service(name)), None) => Ok(Some(name)),
            _ => Ok(None),
        }
    }

    /// Returns the objects that claim an address written by a kubelet.
    pub(crate) fn kubelet_claimants(&self, ip: IpAddr) -> impl Iterator<Item = Object> {
        let pods = self.pods.claiming(IndexKey::Internal(ip));
        let pods = pods.map(|(name, pod)| Object::Pod { name: name.to_owned(), node: pod.node.clone() });
        self.nodes_with(IndexKey::Internal(ip)).chain(pods)
    }

    fn nodes_with(&self, at: IndexKey) -> impl Iterator<Item = Object> {
        self.nodes.claiming(at).filter_map(|(name, _)| Some(Object::Node(name.parse().ok()?)))
    }

    fn services_with(&self, at: IndexKey) -> impl Iterator<Item = Object> {
        self.services.claiming(at).map(|(name, _)| Object::Service(name.to_owned()))
    }
}

/// Parses `service.namespace`, optionally followed by `.svc` and a domain, and returns `namespace/name`. Also returns
/// whether it has `.svc`, in which case no other object can have the name.
pub(crate) fn service_name(name: &str) -> Option<(String, bool)> {
    let mut labels = name.split('.');
    let service = labels.next()?;
    let namespace = labels.next()?;
    let is_whole = match labels.next() {
        None => false,
        Some("svc") => true,
        Some(_) => return None,
    };
    Some((format!("{namespace}/{service}"), is_whole))
}

/// Chooses one item, all with the same probability.
fn choose<T>(mut all: impl Iterator<Item = T> + Clone, chance: f64) -> Option<T> {
    let count = all.clone().count();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index among some thousands"
    )]
    let place = (chance * count as f64) as usize;
    all.nth(place.min(count.checked_sub(1)?))
}

impl IndexKeys for KubeNode {
    fn keys(&self) -> impl Iterator<Item = IndexKey> {
        address_keys(&self.ips, &self.outside).chain(self.names.iter().cloned().map(IndexKey::Name))
    }
}

impl IndexKeys for KubePod {
    fn keys(&self) -> impl Iterator<Item = IndexKey> {
        address_keys(&self.ips, &[])
    }
}

impl IndexKeys for KubeService {
    fn keys(&self) -> impl Iterator<Item = IndexKey> {
        address_keys(&self.ips, &self.outside)
    }
}

impl IndexKeys for KubeEndpointSlice {
    fn keys(&self) -> impl Iterator<Item = IndexKey> {
        std::iter::once(IndexKey::Service(self.service.clone()))
    }
}

fn address_keys(own: &[IpAddr], outside: &[IpAddr]) -> impl Iterator<Item = IndexKey> {
    let own = own.iter().copied().map(IndexKey::Internal);
    own.chain(outside.iter().copied().map(IndexKey::External))
}

/// A Kubernetes object that claims an address, to find and name the owners of a disputed one.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    #[display("node {_0}")]
    Node(NodeName),
    #[display("pod {name} at {node}")]
    Pod {
        /// Pod, as `namespace/name`.
        name: String,
        node: NodeName,
    },
    /// Service, as `namespace/name`.
    #[display("Service {_0}")]
    Service(String),
}

impl Object {
    /// Returns the node that the address would resolve to.
    pub(crate) fn node(&self) -> Option<&NodeName> {
        if let Self::Node(node) | Self::Pod { node, .. } = self { Some(node) } else { None }
    }
}

impl LocateError {
    fn ambiguous(ip: IpAddr, one: &Object, other: &Object) -> Self {
        Self::Ambiguous { ip, one: one.to_string(), other: other.to_string() }
    }
}
