//! Whose an address is: from what a client names (a node, its address, a pod's, a Service) to a node and the target as
//! that node's edge knows it.
//!
//! A fixed table of networks counts first, then what Kubernetes knows. Whether the node has an edge plays no part here:
//! a [`Location`] holds what is dialled where it has none.

pub mod cluster_state;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;

use crate::addresses::cluster_state::{ClusterState, ScopedAddress, ServiceBackend, service_name};
use crate::names::{Host, NodeName, Target};
use crate::policy::plain;

/// Which networks are behind which node, and what Kubernetes knows of nodes, pods and Services.
///
/// One lock holds the facts; it is taken for one look or one change, and no other one under it.
#[derive(Debug, Default)]
pub struct AddressBook {
    /// The longest prefix first.
    fixed: Vec<(IpNet, NodeName)>,
    /// Whether a cluster is to tell the facts.
    has_cluster: bool,
    facts: Mutex<ClusterState>,
}

/// Where a target is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// At a node, if an edge runs there.
    Node {
        /// The node.
        node: NodeName,
        /// The target as its edge knows it.
        target: Target,
        /// What is dialled if the node has no edge and the client may have it dialled; `None`: only an edge can reach
        /// it.
        direct: Option<Target>,
    },
    /// At no node that is known.
    Direct(Target),
}

/// Why a target is nowhere, although it is known what is meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    /// Several objects claim an address, so none is reached by it. Usual cause: two sites use the same private network.
    #[error("{ip} is claimed by both {one} and {other}")]
    Ambiguous {
        /// The address.
        ip: IpAddr,
        /// One of the objects, with its kind.
        one: String,
        /// Another one.
        other: String,
    },
    /// A port of the node itself is asked for by the node's name, and Kubernetes does not tell its address.
    #[error(
        "no address of node {0} is known, and of its loopback only the kubelet's ports are reached and those of \
         localhost-proxy-ports"
    )]
    NoAddress(NodeName),
    /// A name of a Service's form, and there is none. Usual cause: a slip of the pen.
    #[error("there is no Service {0}")]
    NoService(String),
    /// The Service has other ports.
    #[error("Service {service} has no TCP port {port}")]
    NoPort {
        /// As `namespace/name`.
        service: String,
        /// The port that was asked for.
        port: u16,
    },
    /// Usual cause: its pods are not ready, or its selector matches none.
    #[error("Service {0} has no ready endpoint{at_edges}", at_edges = if *.1 { " at an edge" } else { "" })]
    NoEndpoint(
        /// As `namespace/name`.
        String,
        /// Whether endpoints without a node are left out: `user_services` names the Service.
        bool,
    ),
}

impl AddressBook {
    /// An address in one of these networks is behind that node, whatever Kubernetes knows; of several networks that
    /// hold an address the narrowest counts. `has_cluster`: somebody takes in what a cluster knows.
    pub fn new(mut fixed: Vec<(IpNet, NodeName)>, has_cluster: bool) -> Self {
        fixed.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
        Self { fixed, has_cluster, facts: Mutex::default() }
    }

    /// Where a target is. `chance` is from 0 to 1 and chooses among a Service's ready endpoints.
    ///
    /// Any name but a Service's is taken for a node's, known or not.
    ///
    /// # Errors
    ///
    /// The target is known, and it is nowhere, or in two places.
    pub fn locate(&self, target: &Target, chance: f64) -> Result<Location, LocateError> {
        let (facts, port) = (self.facts(), target.port);
        let target = match &target.host {
            Host::Ip(ip) => Target { host: Host::Ip(plain(*ip)), port },
            Host::Name(_) => target.clone(),
        };
        if let Some(location) = self.fixed(&target) {
            return Ok(location);
        }
        match facts.backing(&target, chance, |ip| self.fixed_node(ip).is_some())? {
            None => {}
            Some(ServiceBackend::Outside(target)) => return Ok(Location::Direct(target)),
            Some(ServiceBackend::Endpoint { at, node }) => {
                let target = Target::from(at);
                if let Some(location) = self.fixed(&target) {
                    return Ok(location);
                }
                let known = node.map(|node| Location::known(node, target.clone()));
                return known.map_or_else(|| at_address(&facts, at.ip(), target), Ok);
            }
        }
        match &target.host {
            Host::Ip(ip) => at_address(&facts, *ip, target.clone()),
            // Services are not listed yet: such a name is no node's, and DNS may know it.
            Host::Name(name)
                if self.has_cluster && service_name(name).is_some_and(|(_, is_whole)| is_whole) =>
            {
                Ok(Location::Direct(target))
            }
            Host::Name(name) => Ok(self.at_name(&facts, name, &target)),
        }
    }

    /// The node of a pod, also of one that has finished, whose logs its kubelet may still have.
    pub fn node_of_pod(&self, namespace: &str, name: &str) -> Option<NodeName> {
        self.facts().node_of_pod(namespace, name)
    }

    /// The address at which a node itself is reached: a single address of it in the fixed table, otherwise the first of its
    /// InternalIPs.
    pub fn address_of(&self, node: &NodeName) -> Option<IpAddr> {
        self.fixed_address(node).or_else(|| self.facts().address_of(&node.as_str().to_ascii_lowercase()))
    }

    /// The node that has this address itself, or behind which it is: a pod's, or one in a network of the fixed table;
    /// and whether it is the node's own.
    ///
    /// # Errors
    ///
    /// Several nodes have it.
    pub fn node_at(&self, ip: IpAddr) -> Result<Option<(NodeName, bool)>, LocateError> {
        let ip = plain(ip);
        if let Some((net, node)) = self.fixed.iter().find(|(net, _)| net.contains(&ip)) {
            return Ok(Some((node.clone(), is_single(net))));
        }
        let facts = self.facts();
        let is_own = |node: &NodeName| {
            facts.nodes.claiming(ScopedAddress::Internal(ip)).any(|(name, _)| node.as_str() == name)
        };
        Ok(facts.node_at(ip)?.map(|node| (node.clone(), is_own(&node))))
    }

    /// The network of a node's pods that holds this address; the address alone if Kubernetes names none.
    pub fn pod_network(&self, node: &NodeName, ip: IpAddr) -> IpNet {
        let ip = plain(ip);
        self.facts().pod_network(&node.as_str().to_ascii_lowercase(), ip).unwrap_or_else(|| ip.into())
    }

    /// Whose an address itself is: single addresses of the fixed table, those of Nodes, and what `more` say. No node has an
    /// address of a Service, nor one that `refuses` gives a reason for, and none has a pod's because Kubernetes or an edge
    /// says so: a pod's addresses are its node's word, which takes nothing from the fixed table or a token line.
    ///
    /// Kubernetes and edges are heard once all Nodes, pods and Services are listed, so that whoever is believed more has
    /// spoken. Where no cluster is asked nobody can contradict an edge, which is heard if `trust_edges` says so.
    pub fn holders(
        &self,
        more: impl IntoIterator<Item = AddressClaim>,
        trust_edges: bool,
        refuses: impl Fn(IpAddr) -> Option<&'static str>,
    ) -> AddressOwners {
        let facts = self.facts();
        let single = self.fixed.iter().filter(|(net, _)| net.prefix_len() == net.max_prefix_len());
        let fixed = single.map(|(net, node)| AddressClaim {
            ip: net.addr(),
            node: node.clone(),
            by: ClaimSource::Table,
        });
        let nodes = facts.nodes.all().filter_map(|(name, node)| Some((name.parse().ok()?, &node.ips)));
        let nodes = nodes.flat_map(|(node, ips): (NodeName, _)| {
            ips.iter().map(move |ip| AddressClaim {
                ip: *ip,
                node: node.clone(),
                by: ClaimSource::Kubernetes,
            })
        });
        let heard = if self.has_cluster { facts.are_listed() } else { trust_edges };
        let claims =
            fixed.chain(nodes).chain(more).filter(|claim| heard || claim.by < ClaimSource::Kubernetes);
        AddressOwners::of(claims, |claim| refuses(claim.ip).or_else(|| self.refused(&facts, claim)))
    }

    /// Why a node may not have the address that is claimed for it: it is a Service's, or a pod's that a strong claim does
    /// not come before, or in a network that the fixed table puts behind another node.
    pub fn refusal(&self, claim: &AddressClaim) -> Option<&'static str> {
        self.refused(&self.facts(), claim)
    }

    /// Takes in what has changed.
    pub fn change<T>(&self, change: impl FnOnce(&mut ClusterState) -> T) -> T {
        change(&mut self.facts())
    }

    /// Describes who disputes an address and which claim wins. Returns `None` if there is no dispute.
    pub fn dispute(&self, ip: IpAddr) -> Option<String> {
        let (fixed, facts) = (self.fixed_node(ip), self.facts());
        let service = facts.service_at(ip).ok().flatten();
        let claim = facts.by_kubelets(ip).find(|claim| fixed.is_none() || claim.node() != fixed);
        match (fixed, service, claim) {
            (Some(node), _, Some(claim)) => Some(format!(
                "{claim} claims {ip}, which [mode.cloud.addresses] assigns to node {node}; the config wins"
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

    fn refused(&self, facts: &ClusterState, claim: &AddressClaim) -> Option<&'static str> {
        let is_weak = claim.by >= ClaimSource::Kubernetes;
        let elsewhere = self.fixed_node(claim.ip).is_some_and(|node| *node != claim.node);
        (is_weak && elsewhere).then_some(ELSEWHERE).or_else(|| facts.refusal(claim))
    }

    /// A node's own target has the node's name, so that its edge dials the machine itself, loopback first.
    fn at_name(&self, facts: &ClusterState, name: &str, target: &Target) -> Location {
        let Ok(node) = name.parse() else { return Location::Direct(target.clone()) };
        let host = self.direct_address(facts, &node).map_or_else(|| target.host.clone(), Host::Ip);
        let direct = Some(Target { host, port: target.port });
        Location::Node { node, target: target.clone(), direct }
    }

    /// What is dialled for a node that has no edge: its first InternalIP, unless the fixed table has another word or another
    /// object claims it.
    fn direct_address(&self, facts: &ClusterState, node: &NodeName) -> Option<IpAddr> {
        let ip = facts.address_of(node.as_str())?;
        let is_its = match self.fixed_node(ip) {
            Some(of) => of == node,
            None => {
                self.fixed_address(node).is_none()
                    && facts.node_at(ip).is_ok_and(|at| at.as_ref() == Some(node))
            }
        };
        is_its.then_some(ip)
    }

    /// The address that the fixed table has alone for a node, without a network.
    fn fixed_address(&self, node: &NodeName) -> Option<IpAddr> {
        self.fixed.iter().find(|(net, of)| of == node && is_single(net)).map(|(net, _)| net.addr())
    }

    fn fixed(&self, target: &Target) -> Option<Location> {
        let Host::Ip(ip) = target.host else { return None };
        let node = self.fixed_node(ip)?.clone();
        Some(Location::Node { node, target: target.clone(), direct: None })
    }

    fn fixed_node(&self, ip: IpAddr) -> Option<&NodeName> {
        self.fixed.iter().find(|(net, _)| net.contains(&ip)).map(|(_, node)| node)
    }

    fn facts(&self) -> MutexGuard<'_, ClusterState> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Location {
    /// At a node that Kubernetes names, where the target is dialled as it stands.
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

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { node, target, .. } => write!(f, "{target} at {node}"),
            Self::Direct(target) => write!(f, "{target}"),
        }
    }
}

/// Why no claim of Kubernetes or of an edge takes an address.
const ELSEWHERE: &str = "behind another node by [mode.cloud.addresses]";

// Which node an address itself belongs to, as far as several say so of whom some are believed more. Pure.

/// Somebody says that an address is a node's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressClaim {
    /// The address.
    pub ip: IpAddr,
    /// The node.
    pub node: NodeName,
    /// Who says it.
    pub by: ClaimSource,
}

/// Who says whose an address is; who is believed most comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimSource {
    /// The fixed table.
    Table,
    /// The node's line in the token file.
    TokenLine,
    /// The Node in Kubernetes, whose addresses its own kubelet writes.
    Kubernetes,
    /// The node's edge itself.
    Edge,
}

/// The addresses that have exactly one node, and what stands in the way of the others.
#[derive(Debug, Default)]
pub struct AddressOwners {
    /// The node of each address.
    pub nodes: HashMap<IpAddr, NodeName>,
    /// Claims that count for nothing.
    pub void: Vec<RejectedClaim>,
}

/// A claim that counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RejectedClaim {
    /// The address.
    pub ip: IpAddr,
    /// The node that should have it.
    pub node: NodeName,
    /// Who says so.
    pub by: ClaimSource,
    /// Why it counts for nothing.
    pub why: RejectReason,
}

/// Why a claim counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RejectReason {
    /// The address is none that a node may have: a sentence's end.
    NotANodeAddress(&'static str),
    /// Somebody who is believed as much says the same of another node.
    Disputed(NodeName),
}

impl AddressOwners {
    /// Of several claims to an address the strongest counts, and of two of the same strength none, whatever the weaker ones
    /// say. `refuses` says of a claim why the node may not have the address.
    pub fn of(
        claims: impl IntoIterator<Item = AddressClaim>,
        refuses: impl Fn(&AddressClaim) -> Option<&'static str>,
    ) -> Self {
        let mut strongest: HashMap<IpAddr, (ClaimSource, Vec<NodeName>)> = HashMap::new();
        let mut holders = Self::default();
        for claim in claims {
            let claim = AddressClaim { ip: plain(claim.ip), ..claim };
            let refused = refuses(&claim);
            let AddressClaim { ip, node, by } = claim;
            if let Some(why) = refused {
                holders.void.push(RejectedClaim { ip, node, by, why: RejectReason::NotANodeAddress(why) });
                continue;
            }
            match strongest.entry(ip) {
                Entry::Vacant(entry) => {
                    entry.insert((by, vec![node]));
                }
                Entry::Occupied(mut entry) => {
                    let (before, nodes) = entry.get_mut();
                    if by < *before {
                        (*before, *nodes) = (by, vec![node]);
                    } else if by == *before && !nodes.contains(&node) {
                        nodes.push(node);
                    }
                }
            }
        }
        for (ip, (by, mut nodes)) in strongest {
            let Some(first) = nodes.first().cloned() else { continue };
            if nodes.len() == 1 {
                holders.nodes.insert(ip, first);
                continue;
            }
            nodes.sort_by(|a, b| a.as_str().cmp(b.as_str()));
            // A ring, so that each has another one.
            let others = nodes.iter().cycle().skip(1).cloned();
            let voids = nodes.iter().zip(others);
            holders.void.extend(voids.map(|(node, other)| RejectedClaim {
                ip,
                node: node.clone(),
                by,
                why: RejectReason::Disputed(other),
            }));
        }
        holders
    }
}

impl std::fmt::Display for ClaimSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Table => "[mode.cloud.addresses]",
            Self::TokenLine => "the token file",
            Self::Kubernetes => "Kubernetes",
            Self::Edge => "its edge",
        })
    }
}

impl std::fmt::Display for RejectReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotANodeAddress(why) => write!(f, "it is {why}"),
            Self::Disputed(other) => write!(f, "the same is said of {other}"),
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod holders_tests {
    use proptest::prelude::*;

    use super::*;

    const RANKS: [ClaimSource; 4] =
        [ClaimSource::Table, ClaimSource::TokenLine, ClaimSource::Kubernetes, ClaimSource::Edge];

    fn claim(last: u8, node: &str, by: ClaimSource) -> AddressClaim {
        AddressClaim { ip: [10, 0, 0, last].into(), node: node.parse().unwrap(), by }
    }

    fn holder(claims: &[AddressClaim]) -> Option<String> {
        let holders = AddressOwners::of(claims.iter().cloned(), |_| None);
        holders.nodes.get(&IpAddr::from([10, 0, 0, 7])).map(ToString::to_string)
    }

    #[test]
    fn a_weaker_claim_never_disturbs_a_stronger_one() {
        for (place, strong) in RANKS.iter().enumerate() {
            for weak in &RANKS[place + 1..] {
                let claims = [claim(7, "mine", *strong), claim(7, "theirs", *weak)];
                assert_eq!(holder(&claims).as_deref(), Some("mine"), "{strong} {weak}");
                assert_eq!(holder(&[claims[1].clone(), claims[0].clone()]).as_deref(), Some("mine"));
            }
        }
    }

    #[test]
    fn equal_claims_cancel_each_other_and_each_is_told_of_the_other() {
        for by in RANKS {
            let mut claims = vec![claim(7, "a", by), claim(7, "b", by), claim(7, "A", by)];
            // Nor does a weaker one win by their dispute.
            claims.extend((by != ClaimSource::Edge).then(|| claim(7, "third", ClaimSource::Edge)));
            assert_eq!(holder(&claims), None);
            let void = AddressOwners::of(claims, |_| None).void;
            let told: Vec<_> = void.iter().map(|void| format!("{}: {}", void.node, void.why)).collect();
            assert_eq!(told, ["a: the same is said of b", "b: the same is said of a"]);
        }
    }

    #[test]
    fn who_may_have_no_node_is_refused_in_any_dress() {
        let refuses = |claim: &AddressClaim| (claim.ip == IpAddr::from([10, 0, 0, 7])).then_some("a pod's");
        let dressed =
            AddressClaim { ip: "::ffff:10.0.0.7".parse().unwrap(), ..claim(7, "a", ClaimSource::Table) };
        let holders = AddressOwners::of([dressed, claim(8, "a", ClaimSource::Edge)], refuses);
        assert_eq!(holders.nodes.len(), 1);
        assert_eq!(holders.void[0].why.to_string(), "it is a pod's");
    }

    proptest! {
        #[test]
        fn the_order_of_claims_plays_no_part(
            claims in proptest::collection::vec((0_u8..4, 0_usize..4, 0_usize..4), 0..20),
            turn in 0_usize..20,
        ) {
            let mut claims: Vec<_> =
                claims.into_iter().map(|(ip, node, by)| claim(ip, ["a", "b", "c", "d"][node], RANKS[by])).collect();
            let one = AddressOwners::of(claims.clone(), |_| None).nodes;
            let len = claims.len().max(1);
            claims.rotate_left(turn % len);
            claims.reverse();
            prop_assert_eq!(AddressOwners::of(claims, |_| None).nodes, one);
        }
    }
}
