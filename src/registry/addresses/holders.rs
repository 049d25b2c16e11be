//! Which node an address itself belongs to, as far as several say so of whom some are believed more. Pure.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;

use crate::names::NodeName;
use crate::policy::plain;

/// Somebody says that an address is a node's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The address.
    pub ip: IpAddr,
    /// The node.
    pub node: NodeName,
    /// Who says it.
    pub by: Claimant,
}

/// Who says whose an address is; who is believed most comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Claimant {
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
pub struct Holders {
    /// The node of each address.
    pub nodes: HashMap<IpAddr, NodeName>,
    /// Claims that count for nothing.
    pub void: Vec<Void>,
}

/// A claim that counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Void {
    /// The address.
    pub ip: IpAddr,
    /// The node that should have it.
    pub node: NodeName,
    /// Who says so.
    pub by: Claimant,
    /// Why it counts for nothing.
    pub why: Why,
}

/// Why a claim counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Why {
    /// The address is none that a node may have: a sentence's end.
    NotANodes(&'static str),
    /// Somebody who is believed as much says the same of another node.
    Disputed(NodeName),
}

impl Holders {
    /// Of several claims to an address the strongest counts, and of two of the same strength none, whatever the weaker ones
    /// say. `refuses` says of a claim why the node may not have the address.
    pub fn of(
        claims: impl IntoIterator<Item = Claim>,
        refuses: impl Fn(&Claim) -> Option<&'static str>,
    ) -> Self {
        let mut strongest: HashMap<IpAddr, (Claimant, Vec<NodeName>)> = HashMap::new();
        let mut holders = Self::default();
        for claim in claims {
            let claim = Claim { ip: plain(claim.ip), ..claim };
            let refused = refuses(&claim);
            let Claim { ip, node, by } = claim;
            if let Some(why) = refused {
                holders.void.push(Void { ip, node, by, why: Why::NotANodes(why) });
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
            holders.void.extend(voids.map(|(node, other)| Void {
                ip,
                node: node.clone(),
                by,
                why: Why::Disputed(other),
            }));
        }
        holders
    }
}

impl std::fmt::Display for Claimant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Table => "[mode.cloud.addresses]",
            Self::TokenLine => "the token file",
            Self::Kubernetes => "Kubernetes",
            Self::Edge => "its edge",
        })
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotANodes(why) => write!(f, "it is {why}"),
            Self::Disputed(other) => write!(f, "the same is said of {other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RANKS: [Claimant; 4] = [Claimant::Table, Claimant::TokenLine, Claimant::Kubernetes, Claimant::Edge];

    fn claim(last: u8, node: &str, by: Claimant) -> Claim {
        Claim { ip: [10, 0, 0, last].into(), node: node.parse().unwrap(), by }
    }

    fn holder(claims: &[Claim]) -> Option<String> {
        let holders = Holders::of(claims.iter().cloned(), |_| None);
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
            claims.extend((by != Claimant::Edge).then(|| claim(7, "third", Claimant::Edge)));
            assert_eq!(holder(&claims), None);
            let void = Holders::of(claims, |_| None).void;
            let told: Vec<_> = void.iter().map(|void| format!("{}: {}", void.node, void.why)).collect();
            assert_eq!(told, ["a: the same is said of b", "b: the same is said of a"]);
        }
    }

    #[test]
    fn who_may_have_no_node_is_refused_in_any_dress() {
        let refuses = |claim: &Claim| (claim.ip == IpAddr::from([10, 0, 0, 7])).then_some("a pod's");
        let dressed = Claim { ip: "::ffff:10.0.0.7".parse().unwrap(), ..claim(7, "a", Claimant::Table) };
        let holders = Holders::of([dressed, claim(8, "a", Claimant::Edge)], refuses);
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
            let one = Holders::of(claims.clone(), |_| None).nodes;
            let len = claims.len().max(1);
            claims.rotate_left(turn % len);
            claims.reverse();
            prop_assert_eq!(Holders::of(claims, |_| None).nodes, one);
        }
    }
}
