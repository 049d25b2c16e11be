//! The objects of Kubernetes that show where a target is: nodes, pods and Services.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::NotLocated;
use super::table::{Claims, FactTable};
use crate::names::{Host, NodeName, Target};

/// Objects of each kind: nodes by name, all others as `namespace/name`.
#[derive(Debug, Default)]
pub struct Facts {
    /// All nodes.
    pub nodes: FactTable<NodeFacts>,
    /// Pods that have a node.
    pub pods: FactTable<PodFacts>,
    /// All Services.
    pub services: FactTable<ServiceFacts>,
    /// Slices of Services' endpoints.
    pub slices: FactTable<SliceFacts>,
    /// What somebody has written of Services by hand, in `user_services`.
    pub sides: HashMap<String, ServiceSide>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its InternalIPs, in its order, 8 at most: its own kubelet writes them.
    pub ips: Box<[IpAddr]>,
    /// Its ExternalIPs, 8 at most: it is not found by them, and nobody else may have them on an edge's word.
    pub outside: Box<[IpAddr]>,
    /// The networks of its pods.
    pub pods: Box<[IpNet]>,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// Where it runs, or ran.
    pub node: NodeName,
    /// Its own addresses: none if it has finished, and if it has those of its node.
    pub ips: Box<[IpAddr]>,
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceFacts {
    /// Its ClusterIPs, the one of its first family first; none if it is headless.
    pub ips: Box<[IpAddr]>,
    /// Its externalIPs and those of its load balancer: it is not found by them, and no edge may have them on its own word.
    pub outside: Box<[IpAddr]>,
    /// Its TCP ports.
    pub ports: Box<[ServicePort]>,
    /// What it is only another name for.
    pub external: Option<Host>,
}

/// Endpoints of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceFacts {
    /// The Service, as `namespace/name`.
    pub service: Arc<str>,
    /// The TCP ports of each endpoint.
    pub ports: Box<[ServicePort]>,
    /// Those that are ready.
    pub ready: Box<[ReadyEndpoint]>,
}

/// A port of a Service, or of its endpoints: the same name in both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// May be empty.
    pub name: Box<str>,
    /// Its number there.
    pub number: u16,
}

/// A ready endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyEndpoint {
    /// Its address.
    pub ip: IpAddr,
    /// Where it is, if at a node.
    pub node: Option<NodeName>,
}

/// Where a Service is, as somebody has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceSide {
    /// At edges: endpoints at no node do not count.
    Edge,
    /// In the cloud: dialled as it stands.
    Cloud,
}

/// An address of a Node or a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    /// One by which it is found.
    Own(IpAddr),
    /// One from outside of the cluster.
    Outside(IpAddr),
}

/// What stands behind a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Backing {
    /// One of its endpoints.
    Endpoint { at: SocketAddr, node: Option<NodeName> },
    /// No endpoint: this is dialled in its place.
    Outside(Target),
}

impl Facts {
    /// What stands behind the Service that a target means; `None`: it means none. `is_fixed` is true of addresses that
    /// the fixed table puts behind a node.
    pub(super) fn backing(
        &self,
        target: &Target,
        chance: f64,
        is_fixed: impl Fn(IpAddr) -> bool,
    ) -> Result<Option<Backing>, NotLocated> {
        let named = match &target.host {
            Host::Ip(ip) => self.service_at(*ip)?.map(|name| (name, Some(*ip))),
            Host::Name(name) => self.named(name)?.map(|name| (name, None)),
        };
        let Some((name, asked)) = named else { return Ok(None) };
        let Some(service) = self.services.get(&name) else { return Ok(None) };
        if let Some(external) = &service.external {
            return Ok(Some(Backing::Outside(Target { host: external.clone(), port: target.port })));
        }
        let side = self.sides.get(&name).copied();
        if side == Some(ServiceSide::Cloud) {
            return Ok(Some(Backing::Outside(target.clone())));
        }
        let family = asked.as_ref().or(service.ips.first()).map(IpAddr::is_ipv4);
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
        let chosen = choose(endpoints, chance).ok_or(NotLocated::NoEndpoint(name, side.is_some()));
        chosen.map(|(at, node)| Some(Backing::Endpoint { at, node: node.cloned() }))
    }

    pub(super) fn node_of_pod(&self, namespace: &str, name: &str) -> Option<NodeName> {
        self.pods.get(&format!("{namespace}/{name}")).map(|pod| pod.node.clone())
    }

    /// The network of a node's pods that holds this address.
    pub(super) fn pod_network(&self, node: &str, ip: IpAddr) -> Option<IpNet> {
        self.nodes.get(node)?.pods.iter().find(|net| net.contains(&ip)).copied()
    }

    /// The first address of a node.
    pub(super) fn address_of(&self, node: &str) -> Option<IpAddr> {
        self.nodes.get(node)?.ips.first().copied()
    }

    /// The Service that a name means.
    fn named(&self, name: &str) -> Result<Option<String>, NotLocated> {
        let Some((service, is_whole)) = service_name(name) else { return Ok(None) };
        // A Node's name may have two labels. None has a whole name of a Service, or that Node would get the Service's traffic.
        if !is_whole && self.nodes.get(name).is_some() {
            return Ok(None);
        }
        let known = self.services.get(&service).is_some();
        if is_whole && !known && self.services.is_listed() {
            return Err(NotLocated::NoService(service));
        }
        Ok(known.then_some(service))
    }

    /// The ready endpoints for a port of a Service, of all of its slices. A headless one is only a name for them: its
    /// ports are theirs.
    fn endpoints<'f>(
        &'f self,
        name: &str,
        service: &'f ServiceFacts,
        port: u16,
    ) -> Result<impl Iterator<Item = (SocketAddr, Option<&'f NodeName>)> + Clone, NotLocated> {
        let headless = service.ips.is_empty();
        let own = service.ports.iter().find(|own| own.number == port);
        if !headless && own.is_none() {
            return Err(NotLocated::NoPort { service: name.to_owned(), port });
        }
        let number = move |slice: &SliceFacts| match own.filter(|_| !headless) {
            Some(own) => slice.ports.iter().find(|port| port.name == own.name).map(|port| port.number),
            None => Some(port),
        };
        let slices = self.slices.claiming(name.into());
        let slices = slices.filter_map(move |(_, slice)| Some((slice, number(slice)?)));
        Ok(slices.flat_map(|(slice, number)| {
            slice.ready.iter().map(move |one| (SocketAddr::new(one.ip, number), one.node.as_ref()))
        }))
    }
}

/// `namespace/name` of the Service that has this name, `svc.ns`, or with `.svc` and a domain after it; and whether it has
/// that, which is no other object's name.
pub(super) fn service_name(name: &str) -> Option<(String, bool)> {
    let mut labels = name.split('.');
    let (service, namespace) = (labels.next()?, labels.next()?);
    let is_whole = match labels.next() {
        None => false,
        Some("svc") => true,
        Some(_) => return None,
    };
    Some((format!("{namespace}/{service}"), is_whole))
}

/// One of them, each as likely as any other.
fn choose<T>(mut all: impl Iterator<Item = T> + Clone, chance: f64) -> Option<T> {
    let count = all.clone().count();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a place among some thousands"
    )]
    let place = (chance * count as f64) as usize;
    all.nth(place.min(count.checked_sub(1)?))
}

impl At {
    fn ip(self) -> IpAddr {
        match self {
            Self::Own(ip) | Self::Outside(ip) => ip,
        }
    }
}

impl Claims for NodeFacts {
    type Claim = At;

    fn address(claim: &At) -> Option<IpAddr> {
        Some(claim.ip())
    }

    fn claims(&self) -> impl Iterator<Item = At> {
        at(&self.ips, &self.outside)
    }
}

impl Claims for PodFacts {
    type Claim = IpAddr;

    fn address(claim: &IpAddr) -> Option<IpAddr> {
        Some(*claim)
    }

    fn claims(&self) -> impl Iterator<Item = IpAddr> {
        self.ips.iter().copied()
    }
}

impl Claims for ServiceFacts {
    type Claim = At;

    fn address(claim: &At) -> Option<IpAddr> {
        Some(claim.ip())
    }

    fn claims(&self) -> impl Iterator<Item = At> {
        at(&self.ips, &self.outside)
    }
}

fn at(own: &[IpAddr], outside: &[IpAddr]) -> impl Iterator<Item = At> {
    own.iter().copied().map(At::Own).chain(outside.iter().copied().map(At::Outside))
}

impl Claims for SliceFacts {
    type Claim = Arc<str>;

    fn address(_: &Arc<str>) -> Option<IpAddr> {
        None
    }

    fn claims(&self) -> impl Iterator<Item = Arc<str>> {
        std::iter::once(self.service.clone())
    }
}
