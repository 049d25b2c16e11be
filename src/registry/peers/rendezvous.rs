//! Rendezvous hashing: which servers are the location replicas of a node.
//!
//! Every server derives them from the node's name and the processes that it takes for members. No server has to be
//! asked for them, and a server that joins or leaves changes the replicas of few nodes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use tunnel_base::names::{Instance, NodeName};

/// The servers that may be location replicas, as known to this one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Members(Vec<Member>);

/// A server that may be a location replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) server: Instance,
    /// Changes each time that announcements to the server may have been lost.
    pub(crate) generation: u64,
    /// Whether every node is announced to the server, because it intercepts traffic to nodes' addresses.
    pub(crate) catches: bool,
}

impl Members {
    /// Returns these members; if a server occurs twice, its first entry is used.
    pub(crate) fn new(mut servers: Vec<Member>) -> Self {
        servers.sort_by_key(|member| member.server.to_bytes());
        servers.dedup_by_key(|member| member.server);
        Self(servers)
    }

    pub(crate) fn contains(&self, server: Instance) -> bool {
        self.0.iter().any(|member| member.server == server)
    }

    /// Returns the number of members other than this server.
    pub(crate) fn others(&self, own: Instance) -> usize {
        self.0.iter().filter(|member| member.server != own).count()
    }

    /// Returns the location replicas of the node: the [`LOCATION_REPLICAS`] servers with the highest weights for its
    /// name, or all servers if there are fewer.
    pub(crate) fn homes(&self, node: &NodeName) -> impl Iterator<Item = Member> + use<> {
        let name = name_hash(node);
        let mut highest: [Option<(u64, Member)>; LOCATION_REPLICAS] = [None; LOCATION_REPLICAS];
        for member in &self.0 {
            let mut next = Some((weight(name, member.server), *member));
            for ranked in &mut highest {
                if next.map(|(weight, _)| weight) > ranked.map(|(weight, _)| weight) {
                    std::mem::swap(ranked, &mut next);
                }
            }
        }
        highest.into_iter().flatten().map(|(_, member)| member)
    }

    /// Returns the servers to which the node's location is announced: its location replicas, and servers that
    /// intercept.
    pub(crate) fn announcement_targets(&self, node: &NodeName) -> Vec<Member> {
        let mut told: Vec<_> = self.intercepting().collect();
        told.extend(self.homes(node).filter(|home| !home.catches));
        told
    }

    /// Returns the servers that intercept.
    pub(crate) fn intercepting(&self) -> impl Iterator<Item = Member> {
        self.0.iter().filter(|member| member.catches).copied()
    }

    /// Returns true if the server is a location replica of the node. Usually only a few members are weighed until that
    /// is decided.
    pub(crate) fn is_home(&self, server: Instance, node: &NodeName) -> bool {
        let Ok(own) = self.0.binary_search_by_key(&server.to_bytes(), |member| member.server.to_bytes())
        else {
            return false;
        };
        let name = name_hash(node);
        let weight_of = |member: &Member| weight(name, member.server);
        let least = weight_of(&self.0[own]);
        // As in `homes`, the first of two members with the same weight ranks higher.
        let before = |(n, member): &(usize, &Member)| (weight_of(member), own) > (least, *n);
        self.0.iter().enumerate().filter(before).take(LOCATION_REPLICAS).count() < LOCATION_REPLICAS
    }
}

/// The servers that may be location replicas now.
#[derive(Debug)]
pub(crate) struct Membership {
    members: Arc<Members>,
    /// Time of the last change of the members.
    since: Instant,
    /// Known servers that have announced that they are stopping.
    pub(crate) stopping: HashSet<Instance>,
    /// Known servers that have announced that they intercept.
    catching: HashSet<Instance>,
    /// Number of lost links of each known server, whichever side made them; each may have lost announcements in flight.
    losses: HashMap<Instance, u64>,
}

impl Membership {
    /// Returns the membership of a server without peers.
    pub(crate) fn of_one(own: Instance) -> Self {
        let members = Arc::new(Members::new(vec![Member { server: own, generation: 0, catches: false }]));
        let [stopping, catching] = [HashSet::new(), HashSet::new()];
        Self { members, since: Instant::now(), stopping, catching, losses: HashMap::new() }
    }

    /// Updates the members from the servers known now. Returns the old and new members if they differ.
    pub(crate) fn update(&mut self, mut servers: Vec<Member>) -> Option<[Arc<Members>; 2]> {
        let known: HashSet<_> = servers.iter().map(|member| member.server).collect();
        self.stopping.retain(|server| known.contains(server));
        self.catching.retain(|server| known.contains(server));
        self.losses.retain(|server, _| known.contains(server));
        servers.retain(|member| !self.stopping.contains(&member.server));
        servers.iter_mut().for_each(|member| member.catches = self.catching.contains(&member.server));
        let new = Arc::new(Members::new(servers));
        if *self.members == *new {
            return None;
        }
        self.since = Instant::now();
        Some([std::mem::replace(&mut self.members, new.clone()), new])
    }

    /// Returns the members, at their last update.
    pub(crate) fn members(&self) -> Arc<Members> {
        self.members.clone()
    }

    /// Returns how long the members have not changed.
    pub(crate) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the number of times that announcements to that server may have been lost.
    pub(crate) fn generation(&self, server: Instance) -> u64 {
        self.losses.get(&server).copied().unwrap_or(0)
    }

    /// Records that a server is stopping. Returns true if it is a member, and this is new.
    pub(crate) fn set_stopping(&mut self, server: Instance) -> bool {
        self.members.contains(server) && self.stopping.insert(server)
    }

    /// Records whether a server intercepts. Returns true if that is new.
    pub(crate) fn set_intercepting(&mut self, server: Instance, catches: bool) -> bool {
        if catches { self.catching.insert(server) } else { self.catching.remove(&server) }
    }

    /// Records that a link to a member was lost.
    pub(crate) fn note_lost(&mut self, server: Instance) {
        if self.members.contains(server) {
            *self.losses.entry(server).or_default() += 1;
        }
    }
}

/// A change of the members, and its effect on nodes.
#[derive(Debug)]
pub(crate) struct MembershipChange<'a> {
    old: &'a Members,
    new: &'a Members,
    /// The members in only one of the two sets, removed and added; `None` if there are so many that each node is
    /// checked.
    gone_and_come: Option<[Vec<Member>; 2]>,
}

impl<'a> MembershipChange<'a> {
    pub(crate) fn new(old: &'a Members, new: &'a Members) -> Self {
        let only = |one: &Members, other: &Members| -> Vec<_> {
            one.0.iter().filter(|member| !other.0.contains(member)).copied().collect()
        };
        let [gone, come] = [only(old, new), only(new, old)];
        let few = gone.len() + come.len() <= FEW;
        Self { old, new, gone_and_come: few.then_some([gone, come]) }
    }

    /// Returns the servers to which the node's location must be announced and was not before.
    pub(crate) fn newly_told(&self, node: &NodeName) -> Vec<Member> {
        // A server replaces a removed replica, or is new itself; otherwise nothing has changed.
        if let Some([gone, come]) = &self.gone_and_come
            && !gone.iter().any(|member| self.old.is_home(member.server, node))
            && !come.iter().any(|member| member.catches || self.new.is_home(member.server, node))
        {
            return Vec::new();
        }
        let (before, mut told) = (self.old.announcement_targets(node), self.new.announcement_targets(node));
        told.retain(|told| !before.contains(told));
        told
    }
}

/// Returns FNV-1a of the name in lower case; servers of all builds must agree on it.
fn name_hash(node: &NodeName) -> u64 {
    let bytes = node.as_str().bytes().map(|byte| u64::from(byte.to_ascii_lowercase()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte).wrapping_mul(0x100_0000_01b3))
}

/// Returns the server's weight for that name: both mixed like in SplitMix64.
fn weight(name: u64, server: Instance) -> u64 {
    let [high, low] = [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&server.to_bytes()[at..at + 8]);
        u64::from_be_bytes(half)
    });
    let mixed = name ^ high ^ low.rotate_left(32);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Maximum number of member changes that are checked one by one for each node.
const FEW: usize = 4;
/// Number of location replicas of a node: with three, two may fail at once and the location is still known.
const LOCATION_REPLICAS: usize = 3;

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn members(servers: impl Iterator<Item = u128>) -> Members {
        let random = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        Members::new(
            servers
                .map(|n| Member { server: Instance::from_bits(random(n)), generation: 0, catches: false })
                .collect(),
        )
    }

    fn node(n: usize) -> NodeName {
        format!("node-{n}").parse().unwrap()
    }

    #[test]
    fn a_node_has_three_homes_whatever_the_case_of_its_name_and_few_servers_are_all_homes() {
        let (few, many) = (members(0..3), members(0..100));
        for n in 0..100 {
            assert_eq!(few.homes(&node(n)).count(), 3);
            let homes: Vec<_> = many.homes(&node(n)).map(|home| home.server).collect();
            assert_eq!(homes.len(), 3);
            assert!(
                many.0
                    .iter()
                    .all(|member| many.is_home(member.server, &node(n)) == homes.contains(&member.server))
            );
            assert!(homes[0] != homes[1] && homes[1] != homes[2] && homes[0] != homes[2]);
            assert!(many.homes(&format!("NODE-{n}").parse().unwrap()).map(|home| home.server).eq(homes));
        }
        assert_eq!(members(0..1).homes(&node(1)).count(), 1);
    }

    #[test]
    fn each_server_is_a_home_of_as_many_nodes_and_one_that_goes_changes_only_its_own() {
        let (all, fewer) = (members(0..20), members(0..19));
        let mut kept: HashMap<_, usize> = HashMap::new();
        let gone = members(19..20).0[0].server;
        for n in 0..20_000 {
            let before: Vec<_> = all.homes(&node(n)).map(|home| home.server).collect();
            let after: Vec<_> = fewer.homes(&node(n)).map(|home| home.server).collect();
            assert!(before.iter().all(|home| *home == gone || after.contains(home)), "{n}");
            before.into_iter().for_each(|home| *kept.entry(home).or_default() += 1);
        }
        assert!(kept.len() == 20 && kept.values().all(|n| (2_500..3_500).contains(n)), "{kept:?}");
    }

    #[test]
    fn who_is_newly_told_when_members_change_is_found_without_looking_at_all() {
        let servers = |of: std::ops::Range<u128>| members(of).0;
        let catching = |n: usize| {
            let mut all = servers(0..30);
            all[n].catches = true;
            Members::new(all)
        };
        let lost = |n: usize| {
            let mut all = servers(0..30);
            all[n].generation += 1;
            Members::new(all)
        };
        let all = members(0..30);
        for (old, new) in [
            (&all, &members(0..31)),
            (&all, &members(0..28)),
            (&all, &members(1..32)),
            (&all, &catching(3)),
            (&catching(3), &all),
            (&all, &lost(4)),
            (&members(0..2), &members(0..3)),
            (&members(0..1), &all),
        ] {
            let change = MembershipChange::new(old, new);
            let mut seen = 0;
            for n in 0..500 {
                let before = old.announcement_targets(&node(n));
                let wanted: Vec<_> = new
                    .announcement_targets(&node(n))
                    .into_iter()
                    .filter(|told| !before.contains(told))
                    .collect();
                seen += wanted.len();
                assert_eq!(change.newly_told(&node(n)), wanted, "{n}");
            }
            assert!(seen > 0);
        }
    }

    #[test]
    fn the_weights_are_what_the_protocol_says() {
        let server = Instance::from_bits(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
        let name = name_hash(&"A".parse().unwrap());
        assert_eq!(name, 0xaf63_dc4c_8601_ec8c);
        assert_eq!(weight(name, server), 0x5089_3235_db27_5820);
    }
}
