//! The address book: resolves what a client names (a node, its address, a pod's, a Service) to a node and the target as
//! that node's edge knows it.
//!
//! A fixed table of networks takes precedence over Kubernetes. Whether the node has an edge does not matter here: a
//! [`Location`] also holds what is dialled if it has none.

pub mod cluster_state;
pub mod object_index;
pub mod owners;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use parking_lot::Mutex;

use crate::addresses::cluster_state::{ClusterState, ServiceBackend, service_name};
use crate::addresses::object_index::IndexKey;
use crate::addresses::owners::{AddressClaim, AddressOwners, ClaimSource};
use crate::policy::canonical_ip;
use tunnel_proto::names::{Host, NodeName, Target};

/// The networks of each node, and the nodes, pods and Services of Kubernetes.
///
/// One lock protects the facts. It is held for one lookup or one change, and no other lock is taken under it.
#[derive(Debug, Default)]
pub struct AddressBook {
    /// Fixed table, the longest prefix first.
    fixed: ArcSwap<Vec<(IpNet, NodeName)>>,
    /// Whether a cluster provides the facts.
    has_cluster: AtomicBool,
    facts: Mutex<ClusterState>,
}

/// The location of a target: how a server reaches it, as the address book knows.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// At a node, if an edge runs there.
    #[display("{target} at {node}")]
    Node {
        /// Name of the node.
        node: NodeName,
        /// Target as its edge knows it.
        target: Target,
        /// Address dialled if the node has no edge and the client may use it; `None` if only an edge can reach the
        /// target.
        direct: Option<Target>,
    },
    /// At no known node. If the host is an address, a node that is linked may still be named by it.
    Direct(Target),
}

/// Why a target that is known has no location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    /// Several objects claim an address, so none is reached by it. Usual cause: two sites use the same private network.
    #[error("{ip} is claimed by both {one} and {other}")]
    Ambiguous {
        /// Address.
        ip: IpAddr,
        /// One of the objects, with its kind.
        one: String,
        /// Another one of the objects.
        other: String,
    },
    /// A port of the node itself is requested by the node's name, and the node's address is not known.
    #[error(
        "no address of node {0} is known; its loopback is reached only at the kubelet's ports and those of \
         localhost-proxy-ports"
    )]
    NoAddress(NodeName),
    /// A name in the form of a Service's, but there is no such Service. Usual cause: a typo.
    #[error("there is no Service {0}")]
    NoService(String),
    /// The Service has other ports.
    #[error("Service {service} has no TCP port {port}")]
    NoPort {
        /// Service, as `namespace/name`.
        service: String,
        /// Requested port.
        port: u16,
    },
    /// No endpoint is ready. Usual cause: its pods are not ready, or its selector matches none.
    #[error("Service {0} has no ready endpoint{at_edges}", at_edges = if *.1 { " at an edge" } else { "" })]
    NoEndpoint(
        /// Service, as `namespace/name`.
        String,
        /// Whether endpoints without a node are left out, because `user_services` names the Service.
        bool,
    ),
}

impl AddressBook {
    /// Creates an address book. `fixed` assigns networks to nodes, whatever Kubernetes reports; the narrowest network
    /// of an address applies. `has_cluster` is true if a cluster provides facts.
    pub fn new(fixed: Vec<(IpNet, NodeName)>, has_cluster: bool) -> Self {
        let book = Self::default();
        book.replace(fixed, has_cluster);
        book
    }

    /// Replaces the fixed table. Without a cluster, its facts are dropped.
    pub fn replace(&self, mut fixed: Vec<(IpNet, NodeName)>, has_cluster: bool) {
        fixed.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
        self.fixed.store(Arc::new(fixed));
        self.has_cluster.store(has_cluster, Relaxed);
        if !has_cluster {
            *self.facts.lock() = ClusterState::default();
        }
    }

    /// Locates a target. `chance` is from 0 to 1 and chooses among a Service's ready endpoints.
    ///
    /// Any name except a Service's is taken as a node's name, known or not. The address of a node that is named by it
    /// is such a name, too, so that the node's loopback is reached. A Node is also found by a name among its addresses,
    /// if no other one has it: neither a Node, nor a node for which `is_linked` returns true.
    ///
    /// # Errors
    ///
    /// Fails if the target is known but has no location, or two.
    pub fn locate(
        &self,
        target: &Target,
        chance: f64,
        is_linked: impl Fn(&NodeName) -> bool,
    ) -> Result<Location, LocateError> {
        Ok(match (&target.host, self.find(target, chance, is_linked)?) {
            (Host::Ip(ip), Location::Node { node, direct, .. })
                if node.address() == Some(canonical_ip(*ip)) =>
            {
                Location::Node { target: node.target(target.port), node, direct }
            }
            (_, location) => location,
        })
    }

    fn find(
        &self,
        target: &Target,
        chance: f64,
        is_linked: impl Fn(&NodeName) -> bool,
    ) -> Result<Location, LocateError> {
        let facts = self.facts.lock();
        let port = target.port;
        let target = match &target.host {
            Host::Ip(ip) => Target { host: Host::Ip(canonical_ip(*ip)), port },
            Host::Name(_) => target.clone(),
        };
        // The config's table comes first: no object of the cluster can move an address that it assigns.
        if let Some(location) = self.fixed(&target) {
            return Ok(location);
        }
        // Services come before nodes, so that no Node gets a Service's traffic by reporting its address.
        match facts.backend(&target, chance, |ip| self.fixed_node(ip).is_some())? {
            None => {}
            Some(ServiceBackend::Outside(target)) => return Ok(Location::Direct(target)),
            Some(ServiceBackend::Endpoint { at, node }) => {
                let target = Target::from(at);
                // The table may assign the endpoint's address too, whatever node its EndpointSlice names.
                if let Some(location) = self.fixed(&target) {
                    return Ok(location);
                }
                let known = node.map(|node| Location::known(node, target.clone()));
                return known.map_or_else(|| at_address(&facts, at.ip(), target), Ok);
            }
        }
        match &target.host {
            Host::Ip(ip) => at_address(&facts, *ip, target.clone()),
            // While Services are not listed yet, such a name is not a node's, and DNS may know it.
            Host::Name(name)
                if self.has_cluster.load(Relaxed)
                    && service_name(name).is_some_and(|(_, is_whole)| is_whole) =>
            {
                Ok(Location::Direct(target))
            }
            Host::Name(name) => Ok(self.at_name(&facts, name, &target, is_linked)),
        }
    }

    /// Returns the node of a pod, including finished pods: the kubelet may still have their logs.
    pub fn node_of_pod(&self, namespace: &str, name: &str) -> Option<NodeName> {
        self.facts.lock().node_of_pod(namespace, name)
    }

    /// Returns the address of a node itself: its single address in the fixed table, otherwise its first InternalIP,
    /// otherwise its name if that is an address.
    pub fn address_of(&self, node: &NodeName) -> Option<IpAddr> {
        let fixed = self.fixed_address(node);
        fixed
            .or_else(|| self.facts.lock().address_of(&node.as_str().to_ascii_lowercase()))
            .or_else(|| node.address())
    }

    /// Returns the node of an address, and whether the address is the node's own. Other addresses are a pod's, or in a
    /// network of the fixed table.
    ///
    /// # Errors
    ///
    /// Fails if several nodes have the address.
    pub fn node_at(&self, ip: IpAddr) -> Result<Option<(NodeName, bool)>, LocateError> {
        let ip = canonical_ip(ip);
        if let Some((net, node)) = self.fixed.load().iter().find(|(net, _)| net.contains(&ip)) {
            return Ok(Some((node.clone(), is_single(net))));
        }
        let facts = self.facts.lock();
        let is_own = |node: &NodeName| {
            facts.nodes.claiming(IndexKey::Internal(ip)).any(|(name, _)| node.as_str() == name)
        };
        Ok(facts.node_at(ip)?.map(|node| (node.clone(), is_own(&node))))
    }

    /// Returns the pod network of a node that contains this address, or the address alone if Kubernetes reports none.
    pub fn pod_network(&self, node: &NodeName, ip: IpAddr) -> IpNet {
        let ip = canonical_ip(ip);
        self.facts.lock().pod_network(&node.as_str().to_ascii_lowercase(), ip).unwrap_or_else(|| ip.into())
    }

    /// Determines the owners of addresses, from single addresses of the fixed table, addresses of Nodes, and the claims
    /// in `more`. No node owns an address of a Service, or one for which `refuses` returns a reason. A Node's claim never
    /// wins a pod's address. A pod's addresses are only as trusted as its node, and override neither the fixed table nor
    /// a token line.
    ///
    /// Claims of Nodes apply once all Nodes, pods and Services are listed, because these can contradict them.
    pub fn owners(
        &self,
        more: impl IntoIterator<Item = AddressClaim>,
        refuses: impl Fn(IpAddr) -> Option<&'static str>,
    ) -> AddressOwners {
        let facts = self.facts.lock();
        let table = self.fixed.load();
        let single = table.iter().filter(|(net, _)| is_single(net));
        let fixed = single.map(|(net, node)| AddressClaim {
            ip: net.addr(),
            node: node.clone(),
            by: ClaimSource::Table,
        });
        let nodes = facts.are_listed().then(|| facts.nodes.all()).into_iter().flatten();
        let nodes = nodes.filter_map(|(name, node)| Some((name.parse().ok()?, &node.ips)));
        let nodes = nodes.flat_map(|(node, ips): (NodeName, _)| {
            ips.iter().map(move |ip| AddressClaim {
                ip: *ip,
                node: node.clone(),
                by: ClaimSource::Kubernetes,
            })
        });
        let claims = fixed.chain(nodes).chain(more);
        AddressOwners::of(claims, |claim| refuses(claim.ip).or_else(|| self.refused(&facts, claim)))
    }

    /// Returns true until everything in the cluster that locates targets has been listed.
    pub fn is_loading(&self) -> bool {
        let facts = self.facts.lock();
        self.has_cluster.load(Relaxed) && !(facts.are_listed() && facts.slices.is_listed())
    }

    /// Changes the facts.
    pub fn change<T>(&self, change: impl FnOnce(&mut ClusterState) -> T) -> T {
        change(&mut self.facts.lock())
    }

    /// Describes who disputes an address and which claim wins. Returns `None` if there is no dispute.
    pub fn dispute(&self, ip: IpAddr) -> Option<String> {
        let fixed = self.fixed_node(ip);
        let facts = self.facts.lock();
        let service = facts.service_at(ip).ok().flatten();
        let claim =
            facts.kubelet_claimants(ip).find(|claim| fixed.is_none() || claim.node() != fixed.as_ref());
        match (fixed, service, claim) {
            (Some(node), _, Some(claim)) => Some(format!(
                "{claim} claims {ip}, which [server.addresses] assigns to node {node}; the config wins"
            )),
            (None, Some(service), Some(claim)) => {
                Some(format!("{claim} claims {ip}, the ClusterIP of Service {service}; the Service keeps it"))
            }
            (Some(_), ..) => None,
            (None, ..) => match facts.node_at(ip) {
                Err(why @ LocateError::Ambiguous { .. }) => Some(format!("{why}; none is reached by it")),
                _ => None,
            },
        }
    }

    /// Returns why a node may not have the claimed address, if so. The address is a Service's, or a Node claims one of a
    /// pod, or one that the fixed table assigns to another node.
    fn refused(&self, facts: &ClusterState, claim: &AddressClaim) -> Option<&'static str> {
        let elsewhere = self.fixed_node(claim.ip).is_some_and(|node| node != claim.node);
        (claim.by == ClaimSource::Kubernetes && elsewhere)
            .then_some(ELSEWHERE)
            .or_else(|| facts.refusal(claim))
    }

    /// A target at the node itself keeps the node's name, so that its edge dials the machine itself, loopback first.
    fn at_name(
        &self,
        facts: &ClusterState,
        name: &str,
        target: &Target,
        is_linked: impl Fn(&NodeName) -> bool,
    ) -> Location {
        let Ok(named) = name.parse() else { return Location::Direct(target.clone()) };
        // Its kubelet writes these names, so they must not take the sessions of a machine outside of the cluster.
        let node = facts.node_with_name(name).filter(|_| !is_linked(&named)).unwrap_or(named);
        let host = self.direct_address(facts, &node).map_or_else(|| target.host.clone(), Host::Ip);
        let direct = Some(Target { host, port: target.port });
        Location::Node { target: node.target(target.port), node, direct }
    }

    /// Returns the address dialled for a node without an edge: its first InternalIP, unless the fixed table says
    /// otherwise or another object claims it.
    fn direct_address(&self, facts: &ClusterState, node: &NodeName) -> Option<IpAddr> {
        let ip = facts.address_of(node.as_str())?;
        let is_its = match self.fixed_node(ip) {
            Some(of) => of == *node,
            None => {
                self.fixed_address(node).is_none()
                    && facts.node_at(ip).is_ok_and(|at| at.as_ref() == Some(node))
            }
        };
        is_its.then_some(ip)
    }

    /// Returns the node's single address in the fixed table.
    fn fixed_address(&self, node: &NodeName) -> Option<IpAddr> {
        let table = self.fixed.load();
        table.iter().find(|(net, of)| of == node && is_single(net)).map(|(net, _)| net.addr())
    }

    fn fixed(&self, target: &Target) -> Option<Location> {
        let Host::Ip(ip) = target.host else { return None };
        let node = self.fixed_node(ip)?;
        Some(Location::Node { node, target: target.clone(), direct: None })
    }

    fn fixed_node(&self, ip: IpAddr) -> Option<NodeName> {
        self.fixed.load().iter().find(|(net, _)| net.contains(&ip)).map(|(_, node)| node.clone())
    }
}

impl Location {
    /// A location at a node that Kubernetes reports, where the target is dialled unchanged.
    fn known(node: NodeName, target: Target) -> Self {
        Self::Node { node, target: target.clone(), direct: Some(target) }
    }
}

fn is_single(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

fn at_address(facts: &ClusterState, ip: IpAddr, target: Target) -> Result<Location, LocateError> {
    Ok(facts.node_at(ip)?.map_or(Location::Direct(target.clone()), |node| Location::known(node, target)))
}

/// Why a claim by Kubernetes or an edge does not apply to an address.
const ELSEWHERE: &str = "assigned to another node by [server.addresses]";

#[cfg(test)]
mod tests;
