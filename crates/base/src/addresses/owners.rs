//! Owners of addresses, given claims from sources with different trust. Pure.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;

use crate::policy::canonical_ip;
use tunnel_proto::names::NodeName;

/// A claim that an address belongs to a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AddressClaim {
    /// Claimed address.
    pub ip: IpAddr,
    /// Node that would own the address.
    pub node: NodeName,
    /// Source of the claim.
    pub by: ClaimSource,
}

/// The source of a claim; the most trusted first.
#[derive(derive_more::Display, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimSource {
    /// The fixed table.
    #[display("[server.addresses]")]
    Table,
    /// The node's line in the token file.
    #[display("the token file")]
    TokenLine,
    /// The Node in Kubernetes, whose addresses its own kubelet writes.
    #[display("Kubernetes")]
    Kubernetes,
}

/// The addresses with exactly one owner, and the rejected claims to others.
#[derive(Debug, Default)]
pub struct AddressOwners {
    /// Owner of each address.
    pub nodes: HashMap<IpAddr, NodeName>,
    /// Rejected claims.
    pub rejected: Vec<RejectedClaim>,
}

/// A claim that was refused, or disputed by another claim of the same trust, and the reason; it is logged.
///
/// A claim that only loses to a more trusted source is not reported.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RejectedClaim {
    /// The claim.
    pub claim: AddressClaim,
    /// Reason for the rejection.
    pub why: ClaimRejectReason,
}

/// The reason why a [`RejectedClaim`] does not apply.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ClaimRejectReason {
    /// A node may not have the address: the end of a sentence.
    #[error("it is {0}")]
    NotANodeAddress(&'static str),
    /// A source of the same trust claims the address for another node.
    #[error("also claimed for {0}")]
    Disputed(NodeName),
}

impl AddressOwners {
    /// Determines the owner of each address: the most trusted claim wins. If its source claims an address for several
    /// nodes, no claim applies, not even less trusted ones. `refuses` returns why a node may not have a claimed
    /// address.
    pub fn of(
        claims: impl IntoIterator<Item = AddressClaim>,
        refuses: impl Fn(&AddressClaim) -> Option<&'static str>,
    ) -> Self {
        let mut strongest: HashMap<IpAddr, (ClaimSource, Vec<NodeName>)> = HashMap::new();
        let mut owners = Self::default();
        for claim in claims {
            let claim = AddressClaim { ip: canonical_ip(claim.ip), ..claim };
            // Before claims are compared, because a refused claim must not dispute a valid one.
            if let Some(why) = refuses(&claim) {
                owners.rejected.push(RejectedClaim { claim, why: ClaimRejectReason::NotANodeAddress(why) });
                continue;
            }
            let AddressClaim { ip, node, by } = claim;
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
                owners.nodes.insert(ip, first);
                continue;
            }
            // The same pairs each time, whatever the order of the claims: a dispute is logged again if its text
            // differs.
            nodes.sort_by(|a, b| a.as_str().cmp(b.as_str()));
            // Pairs each node with the next one, and the last with the first.
            let others = nodes.iter().cycle().skip(1).cloned();
            owners.rejected.extend(nodes.iter().zip(others).map(|(node, other)| RejectedClaim {
                claim: AddressClaim { ip, node: node.clone(), by },
                why: ClaimRejectReason::Disputed(other),
            }));
        }
        owners
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANKS: [ClaimSource; 3] = [ClaimSource::Table, ClaimSource::TokenLine, ClaimSource::Kubernetes];

    fn claim(last: u8, node: &str, by: ClaimSource) -> AddressClaim {
        AddressClaim { ip: [10, 0, 0, last].into(), node: node.parse().unwrap(), by }
    }

    fn owner(claims: &[AddressClaim]) -> Option<String> {
        let owners = AddressOwners::of(claims.iter().cloned(), |_| None);
        owners.nodes.get(&IpAddr::from([10, 0, 0, 7])).map(ToString::to_string)
    }

    #[test]
    fn a_claim_of_lower_rank_never_overrides_a_higher_one() {
        for (place, strong) in RANKS.iter().enumerate() {
            for weak in &RANKS[place + 1..] {
                let claims = [claim(7, "mine", *strong), claim(7, "theirs", *weak)];
                assert_eq!(owner(&claims).as_deref(), Some("mine"), "{strong} {weak}");
                assert_eq!(owner(&[claims[1].clone(), claims[0].clone()]).as_deref(), Some("mine"));
            }
        }
    }

    #[test]
    fn claims_of_equal_rank_are_void_and_each_names_the_other_node() {
        for by in RANKS {
            let mut claims = vec![claim(7, "a", by), claim(7, "b", by), claim(7, "A", by)];
            // A less trusted claim does not win because of their dispute.
            let last = ClaimSource::Kubernetes;
            claims.extend((by != last).then(|| claim(7, "third", last)));
            assert_eq!(owner(&claims), None);
            let rejected = AddressOwners::of(claims, |_| None).rejected;
            let reasons: Vec<_> = rejected
                .iter()
                .map(|rejected| format!("{}: {}", rejected.claim.node, rejected.why))
                .collect();
            assert_eq!(reasons, ["a: also claimed for b", "b: also claimed for a"]);
        }
    }

    #[test]
    fn a_rejected_address_is_also_rejected_in_ipv4_mapped_form() {
        let refuses = |claim: &AddressClaim| (claim.ip == IpAddr::from([10, 0, 0, 7])).then_some("a pod's");
        let dressed =
            AddressClaim { ip: "::ffff:10.0.0.7".parse().unwrap(), ..claim(7, "a", ClaimSource::Table) };
        let owners = AddressOwners::of([dressed, claim(8, "a", ClaimSource::Kubernetes)], refuses);
        assert_eq!(owners.nodes.len(), 1);
        assert_eq!(owners.rejected[0].why.to_string(), "it is a pod's");
    }

    proptest! {
        #[test]
        fn the_order_of_claims_does_not_matter(
            claims in proptest::collection::vec((0_u8..4, 0_usize..4, 0_usize..3), 0..20),
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
