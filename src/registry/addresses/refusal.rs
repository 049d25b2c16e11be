//! Why a node may not have an address, as far as Kubernetes knows.

use super::facts::{At, Facts};
use super::holders::{Claim, Claimant};

impl Facts {
    /// Whether all Nodes, pods and Services have been told.
    pub(super) fn are_listed(&self) -> bool {
        self.nodes.is_listed() && self.pods.is_listed() && self.services.is_listed()
    }

    /// Why a node may not have the address that is claimed for it.
    pub(super) fn refusal(&self, Claim { ip, node, by }: &Claim) -> Option<&'static str> {
        if self.services.is_claimed(At::Own(*ip)) {
            return Some("a Service's");
        }
        if *by >= Claimant::Kubernetes && self.pods.is_claimed(*ip) {
            return Some("a pod's");
        }
        let names = |at| self.nodes.claiming(at).map(|(name, _)| name);
        let is_another = |name: &&str| !node.as_str().eq_ignore_ascii_case(name);
        let mut nodes = names(At::Own(*ip)).chain(names(At::Outside(*ip)));
        match by {
            Claimant::Table | Claimant::TokenLine => None,
            // Its kubelet writes all of it. A load balancer may stand at the very addresses of nodes.
            Claimant::Kubernetes => names(At::Outside(*ip)).find(is_another).map(|_| ANOTHERS),
            Claimant::Edge if !nodes.clone().all(|name| is_another(&name)) => None,
            Claimant::Edge if self.services.is_claimed(At::Outside(*ip)) => Some(OUTSIDE),
            Claimant::Edge => nodes.next().map(|_| ANOTHERS),
        }
    }
}

const ANOTHERS: &str = "another Node's";

/// Why no edge has what leads to a Service from outside of the cluster.
const OUTSIDE: &str = "a Service's, from outside of the cluster";
