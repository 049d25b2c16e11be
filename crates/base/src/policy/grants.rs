//! What users may reach by rules of a config, and by grants: rights that operators give at run time, until some time.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};

use crate::policy::{NodeGlob, Rules};
use crate::serde_forms::{ConfigPort, non_empty};
use tunnel_proto::names::{NodeName, UserName};

/// A right that a user has until some time. One with another field is of a newer version, and gives nothing here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// ID, by which it is revoked.
    pub id: String,
    /// The user who has it.
    pub user: UserName,
    /// Patterns of the nodes that she may reach.
    pub nodes: Vec<NodeGlob>,
    /// Ports of these nodes; absent if all.
    #[serde(default, deserialize_with = "non_empty::<_, ConfigPort<1>, _>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<ConfigPort<1>>>,
    /// Whether a pattern with '*' also covers nodes that a join key has admitted.
    pub with_join_keys: bool,
    /// End in seconds since 1970; 253402300799 if it has none.
    pub until: u64,
    /// Who gave it: a local user of a server, or an admin as `USER/DEVICE`. Then it ends with her rights.
    pub by: String,
}

/// What the config of a server lets grants give.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GrantBounds {
    /// Whether users may link only while they have a grant, because the config has no table of users.
    pub links_need_grant: bool,
    /// What grants can give at most; empty if everything.
    pub ceiling: Rules,
    /// Users who may send requests of operators over their links.
    pub admins: Vec<UserName>,
    /// Longest time for which admins may grant over their links.
    pub max_admin_grant: Duration,
}

/// The grants of all users. Finding those of a user takes as long for one user as for thousands.
#[derive(Debug, Default)]
pub struct UserGrants {
    by_user: HashMap<String, Vec<Arc<Grant>>>,
    /// The nodes that join keys have admitted; `None` if that is not known yet.
    joined_by_key: Option<HashSet<NodeName>>,
}

/// What users may reach. Times are seconds since 1970.
#[derive(Debug, Clone, Default)]
pub struct Rights {
    /// The rules of the config.
    pub rules: Rules,
    /// What it lets grants give.
    pub bounds: GrantBounds,
    /// The grants as last read; none for clients that are no users with links.
    pub grants: Arc<ArcSwap<UserGrants>>,
}

impl Grant {
    /// Returns the admin by whose rights it was given, unless an operator on a server's machine has given it.
    fn giver(&self) -> Option<&str> {
        giver(&self.by)
    }

    /// Returns true if rules give a user all that the grant gives.
    fn is_within(&self, rules: &Rules, user: &str, from: Option<IpAddr>) -> bool {
        self.nodes.iter().all(|nodes| match &self.ports {
            Some(ports) => ports.iter().all(|port| rules.cover(user, from, nodes, Some(*port))),
            None => rules.cover(user, from, nodes, None),
        })
    }
}

impl UserGrants {
    /// Sorts grants by their users.
    pub fn new(grants: impl Iterator<Item = Grant>, joined_by_key: Option<HashSet<NodeName>>) -> Self {
        let mut by_user: HashMap<_, Vec<_>> = HashMap::new();
        for grant in grants {
            by_user.entry(grant.user.to_string()).or_default().push(Arc::new(grant));
        }
        Self { by_user, joined_by_key }
    }

    /// Returns true if grants and join keys were read.
    pub fn is_read(&self) -> bool {
        self.joined_by_key.is_some()
    }

    /// Returns true if this grant is among them.
    pub fn contains(&self, grant: &Grant) -> bool {
        self.by_user.get(grant.user.as_str()).into_iter().flatten().any(|known| **known == *grant)
    }

    /// Returns true if no user has a grant.
    pub fn is_empty(&self) -> bool {
        self.by_user.is_empty()
    }
}

impl Rights {
    /// Returns true if the user may send requests of operators.
    pub fn is_admin(&self, user: &str) -> bool {
        self.bounds.admins.iter().any(|admin| admin.as_str() == user)
    }

    /// Returns the grant by which a user at `from`, or without it at some address, may reach this port of this node: of several the one that ends last.
    /// Without a port it is one for the node, and each of its bounds permits some port there.
    pub fn find(
        &self,
        user: &str,
        from: impl Into<Option<IpAddr>>,
        node: &NodeName,
        port: Option<u16>,
        now: u64,
    ) -> Option<Arc<Grant>> {
        // Users' links lead to nodes only.
        if *node == NodeName::direct() {
            return None;
        }
        let from = from.into();
        let grants = self.grants.load();
        // Before the join keys are read, any node may be one of theirs.
        let is_no_key = grants.joined_by_key.as_ref().is_some_and(|nodes| !nodes.contains(node));
        let covers = |grant: &Grant| {
            let by_pattern = is_no_key || grant.with_join_keys;
            grant.nodes.iter().any(|glob| (by_pattern || !glob.0.contains('*')) && glob.matches(node))
        };
        let allow = |rules: &Rules, user: &str| rules.allow(Some(user), from, node, port);
        let gives = |grant: &Grant| {
            let has = |ports: &Vec<_>| port.is_none_or(|port| ports.contains(&ConfigPort(port)));
            grant.ports.as_ref().is_none_or(has)
                && allow(&self.bounds.ceiling, user)
                && grant.giver().is_none_or(|giver| !self.rules.is_empty() && allow(&self.rules, giver))
        };
        let found = self.live(&grants, user, now).filter(|grant| covers(grant) && gives(grant));
        found.max_by_key(|grant| grant.until).cloned()
    }

    /// Returns true if the ceiling, and for a grant of an admin her rules, permit all that it gives: at an address of
    /// hers, or without one at some address.
    pub fn permit(&self, grant: &Grant, from: Option<IpAddr>) -> bool {
        grant.is_within(&self.bounds.ceiling, grant.user.as_str(), from)
            && grant.giver().is_none_or(|giver| self.may_give(giver, grant, from))
    }

    /// Returns true if the rules give an admin at an address of hers all that a grant gives.
    pub fn may_give(&self, admin: &str, grant: &Grant, from: Option<IpAddr>) -> bool {
        !self.rules.is_empty() && grant.is_within(&self.rules, admin, from)
    }

    /// Returns the grants of a user at `from` that are permitted as a whole.
    pub fn permitted(&self, user: &str, from: IpAddr, now: u64) -> Vec<Arc<Grant>> {
        let grants = self.grants.load();
        self.live(&grants, user, now).filter(|grant| self.permit(grant, Some(from))).cloned().collect()
    }

    /// Returns the end of the last grant of a user; `None` if she has none.
    pub fn last_end(&self, user: &str, now: u64) -> Option<u64> {
        self.live(&self.grants.load(), user, now).map(|grant| grant.until).max()
    }

    /// Returns why a grant no longer gives what it gave.
    pub fn why_ended(&self, grant: &Grant, now: u64) -> String {
        let id = &grant.id;
        let grants = self.grants.load();
        let mut known = grants.by_user.get(grant.user.as_str()).into_iter().flatten();
        match known.any(|known| known.id == *id) {
            _ if grant.until <= now => format!("grant {id} has expired"),
            false => format!("grant {id} was revoked"),
            true => format!(
                "grant {id} no longer covers this: ceiling, a join key, or its giver's rights forbid it"
            ),
        }
    }

    /// Returns the grants of a user that have not ended, and whose givers may still give any.
    fn live<'a>(&self, grants: &'a UserGrants, user: &str, now: u64) -> impl Iterator<Item = &'a Arc<Grant>> {
        let is_live = move |grant: &&Arc<Grant>| {
            now < grant.until && grant.giver().is_none_or(|giver| self.is_admin(giver))
        };
        grants.by_user.get(user).into_iter().flatten().filter(is_live)
    }
}

/// Returns the user of who gave a grant, [`Grant::by`], if that was an admin over her link.
pub fn giver(by: &str) -> Option<&str> {
    by.split_once('/').map(|(user, _)| user)
}

/// The end of a grant that has none: the last second of the year 9999.
pub const FOR_EVER: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::policy::{Rule, network};

    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn ports(of: &[u16]) -> Option<Vec<ConfigPort<1>>> {
        Some(of.iter().copied().map(ConfigPort).collect()).filter(|ports: &Vec<_>| !ports.is_empty())
    }

    fn grant(user: &str, nodes: &[&str], of: &[u16], until: u64, by: &str) -> Grant {
        Grant {
            id: String::new(),
            user: user.parse().unwrap(),
            nodes: nodes.iter().map(|glob| glob.parse().unwrap()).collect(),
            ports: ports(of),
            with_join_keys: false,
            until,
            by: by.to_owned(),
        }
    }

    fn rule(users: &[&str], nodes: &[&str], of: &[u16]) -> Rule {
        let users = Some(users.iter().map(|user| (*user).to_owned()).collect());
        let nodes = Some(nodes.iter().map(|glob| glob.parse().unwrap()).collect());
        Rule { users: users.filter(|users: &Vec<_>| !users.is_empty()), from: None, nodes, ports: ports(of) }
    }

    const FROM: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// Rights by rules, a ceiling, admins, and grants with their numbers as IDs.
    fn rights(rules: Vec<Rule>, ceiling: Vec<Rule>, admins: &[&str], grants: &[Grant]) -> Rights {
        let admins = admins.iter().map(|admin| admin.parse().unwrap()).collect();
        let bounds = GrantBounds { ceiling: Rules(ceiling), admins, ..GrantBounds::default() };
        let numbered =
            grants.iter().enumerate().map(|(n, grant)| Grant { id: n.to_string(), ..grant.clone() });
        let by_key = Some(HashSet::from([node("shop-key"), node("a"), node("ab")]));
        let grants = Arc::new(ArcSwap::from_pointee(UserGrants::new(numbered, by_key)));
        Rights { rules: Rules(rules), bounds, grants }
    }

    fn find(rights: &Rights, user: &str, name: &str, port: u16, now: u64) -> Option<String> {
        let found = rights.find(user, FROM, &node(name), Some(port), now).map(|grant| grant.id.clone());
        let sees = rights.find(user, FROM, &node(name), None, now);
        assert!(found.is_none() || sees.is_some(), "who reaches a port of a node sees the node");
        found
    }

    #[test]
    fn a_grant_gives_its_user_its_nodes_and_ports_until_it_ends() {
        let grants = [
            grant("alice", &["shop-*"], &[22], 100, "uid=0"),
            grant("alice", &["shop-1"], &[], 50, "uid=0"),
            grant("bob", &["*"], &[], FOR_EVER, "uid=0"),
        ];
        let given = rights(Vec::new(), Vec::new(), &[], &grants);
        assert_eq!(find(&given, "alice", "Shop-1", 22, 10).unwrap(), "0", "the one that ends last");
        assert_eq!(find(&given, "alice", "shop-1", 23, 49).unwrap(), "1");
        for (user, name, port, now) in [
            ("alice", "shop-1", 23, 50),
            ("alice", "shop-2", 23, 10),
            ("alice", "web-1", 22, 10),
            ("alice", "shop-1", 22, 100),
            ("Alice", "shop-1", 22, 10),
            ("carol", "shop-1", 22, 10),
        ] {
            assert_eq!(find(&given, user, name, port, now), None, "{user} {name} {port} {now}");
        }
        assert!(given.find("bob", FROM, &NodeName::direct(), Some(22), 1).is_none(), "links lead to nodes");
        let ends = ["alice", "bob", "carol"].map(|user| given.last_end(user, 60));
        assert_eq!(ends, [Some(100), Some(FOR_EVER), None]);
        assert!(given.find("alice", FROM, &node("web-1"), None, 60).is_none());
        let numbered = |id: &str| Grant { id: id.to_owned(), ..grants[0].clone() };
        let why = [("0", 100), ("9", 99), ("0", 99)].map(|(id, now)| given.why_ended(&numbered(id), now));
        assert!(why[0].contains("expired") && why[1].contains("was revoked") && why[2].contains("no longer"));
    }

    #[test]
    fn a_grant_without_a_part_or_with_an_unknown_one_is_none() {
        let text = serde_json::to_string(&grant("alice", &["shop-*"], &[22], 9, "uid=0")).unwrap();
        assert!(serde_json::from_str::<Grant>(&text).is_ok());
        for (part, other) in [
            ("\"ports\":[22]", "\"ports\":[]"),
            ("\"until\":9,", ""),
            ("\"by\"", "\"only\":1,\"by\""),
            ("\"nodes\":[\"shop-*\"],", ""),
        ] {
            assert!(text.contains(part), "{text}");
            assert!(serde_json::from_str::<Grant>(&text.replace(part, other)).is_err(), "{other}");
        }
    }

    #[test]
    fn a_pattern_covers_nodes_of_join_keys_only_if_it_says_so_and_a_name_does() {
        let grants = [
            grant("pattern", &["shop-*"], &[], 9, "uid=0"),
            grant("name", &["SHOP-key"], &[], 9, "uid=0"),
            Grant { with_join_keys: true, ..grant("keys", &["shop-*"], &[], 9, "uid=0") },
        ];
        let given = rights(Vec::new(), Vec::new(), &[], &grants);
        let reach = |name| ["pattern", "name", "keys"].map(|user| find(&given, user, name, 1, 1).is_some());
        assert_eq!(reach("Shop-Key"), [false, true, true]);
        assert_eq!(reach("shop-own"), [true, false, true]);
        // Before the keys are known, every node may be one of theirs.
        given.grants.store(Arc::new(UserGrants::new(grants.iter().cloned(), None)));
        assert_eq!(reach("shop-own"), [false, false, true]);
    }

    #[test]
    fn a_ceiling_bounds_all_grants_and_the_rules_of_an_admin_hers() {
        let all = [
            grant("alice", &["*"], &[], 9, "uid=0"),
            grant("bob", &["*"], &[], 9, "ann/laptop"),
            grant("carol", &["*"], &[], 9, "alice/laptop"),
        ];
        let rules = || vec![rule(&["ann"], &["shop-*"], &[22, 80])];
        let ceiling = || vec![rule(&[], &["*-1"], &[22])];
        let given = rights(rules(), ceiling(), &["ann", "alice"], &all);
        let reach = |given: &Rights, name, port| {
            ["alice", "bob", "carol"].map(|user| find(given, user, name, port, 1).is_some())
        };
        assert_eq!(reach(&given, "shop-1", 22), [true, true, false], "alice has rights by a grant only");
        assert_eq!(reach(&given, "web-1", 22), [true, false, false]);
        assert_eq!(reach(&given, "shop-1", 80), [false; 3]);
        assert_eq!(reach(&given, "shop-2", 22), [false; 3]);
        assert!(given.permitted("alice", FROM, 1).is_empty(), "not as a whole");
        let without = rights(rules(), Vec::new(), &[], &all);
        assert_eq!(reach(&without, "shop-1", 22), [true, false, false], "who is no admin gives nothing");
        assert_eq!((without.last_end("bob", 1), without.permitted("alice", FROM, 1).len()), (None, 1));
        let open = rights(Vec::new(), Vec::new(), &["ann"], &all);
        assert_eq!(reach(&open, "shop-1", 22), [true, false, false], "no rule gives her nothing");
        assert!(!open.permit(&all[1], Some(FROM)));

        for (one, permitted) in [
            (grant("bob", &["shop-*-1"], &[22], 9, "ann/laptop"), true),
            (grant("bob", &["shop-*-1", "web-1"], &[22], 9, "ann/laptop"), false),
            (grant("bob", &["shop-*"], &[22], 9, "ann/laptop"), false),
            (grant("bob", &["shop-1"], &[22, 80], 9, "ann/laptop"), false),
            (grant("bob", &["shop-1"], &[], 9, "ann/laptop"), false),
            (grant("bob", &["web-1"], &[22], 9, "uid=0"), true),
        ] {
            assert_eq!(given.permit(&one, Some(FROM)), permitted, "{one:?}");
        }
        let near =
            Rule { from: Some([network("10.0.0.0/8").unwrap()].into_iter().collect()), ..rules().remove(0) };
        let given = rights(vec![near], Vec::new(), &["ann"], &[]);
        let one = grant("bob", &["shop-1"], &[22], 9, "ann/laptop");
        assert!(!given.permit(&one, Some(FROM)) && given.permit(&one, "10.0.0.1".parse().ok()));
    }

    #[test]
    #[ignore = "not a test: prints what a lookup costs"]
    fn lookups_among_two_thousand_grants_and_as_many_rules() {
        let users: Vec<_> = (0..2000).map(|n| format!("user{n}")).collect();
        let of = |users: &[String]| -> Vec<_> {
            users.iter().map(|user| grant(user, &["shop-*", "web-*"], &[22], FOR_EVER, "uid=0")).collect()
        };
        let rules = users.iter().map(|user| rule(&[user], &["shop-*", "web-*"], &[22])).collect();
        let one = vec!["user1999".to_owned(); 2000];
        for (what, given) in [
            ("a rule of each user", rights(rules, Vec::new(), &[], &[])),
            (
                "a grant of each user",
                rights(vec![rule(&["nobody"], &["none"], &[1])], Vec::new(), &[], &of(&users)),
            ),
            (
                "all grants of one user",
                rights(vec![rule(&["nobody"], &["none"], &[1])], Vec::new(), &[], &of(&one)),
            ),
        ] {
            let began = tokio::time::Instant::now();
            for _ in 0..1000 {
                let by_rule = given.rules.allow(Some("user1999"), Some(FROM), &node("web-7"), 22);
                assert!(by_rule || find(&given, "user1999", "web-7", 22, 1).is_some());
            }
            println!("{what}: {:?}", began.elapsed() / 1000);
        }
    }

    /// Any grant of two users over a few nodes and ports.
    fn any_grant() -> impl Strategy<Value = Grant> {
        let by = prop_oneof![Just("uid=0"), Just("ann/x"), Just("alice/x")];
        let nodes = prop::collection::vec("[ab*]{1,2}", 1..3);
        ("(alice|bob)", nodes, prop::collection::vec(1_u16..4, 0..3), 0_u64..6, by, any::<bool>()).prop_map(
            |(user, nodes, ports, until, by, with_join_keys)| {
                let nodes: Vec<_> = nodes.iter().map(String::as_str).collect();
                Grant { with_join_keys, ..grant(&user, &nodes, &ports, until, by) }
            },
        )
    }

    proptest! {
        /// Whatever is granted: nothing is given that some grant does not say, or that a bound forbids, and what a
        /// request for a grant was allowed to say is given to its user.
        #[test]
        fn grants_give_exactly_what_they_say_within_their_bounds(
            grants in prop::collection::vec(any_grant(), 0..6), name in "[ab]{1,2}", port in 1_u16..4, now in 0_u64..6,
            ceiling in prop::option::of(("[ab*]{1,2}", prop::collection::vec(1_u16..4, 0..3))), hers in "[ab*]{1,2}",
        ) {
            let ceiling: Vec<_> = ceiling.iter().map(|(glob, ports)| rule(&[], &[glob], ports)).collect();
            let rules = vec![rule(&["ann"], &[&hers], &[1, 2])];
            let given = rights(rules, ceiling.clone(), &["ann"], &grants);
            let matches = |glob: &str| glob.parse::<NodeGlob>().unwrap().matches(&node(&name));
            let covers = |one: &Grant| one.nodes.iter().any(|glob| {
                let text = glob.to_string();
                matches(&text) && (!text.contains('*') || one.with_join_keys || !["a", "ab"].contains(&&*name))
            });
            let has = |ports: &Option<Vec<ConfigPort<1>>>| ports.as_ref().is_none_or(|all| all.contains(&ConfigPort(port)));
            let bounded = ceiling.iter().all(|rule| {
                has(&rule.ports) && rule.nodes.iter().flatten().any(|glob| matches(&glob.to_string()))
            });
            for user in ["alice", "bob"] {
                let gives = |one: &&Grant| {
                    let giver = match one.by.as_str() {
                        "uid=0" => true,
                        "ann/x" => matches(&hers) && port < 3,
                        _ => false,
                    };
                    one.user.as_str() == user && now < one.until && covers(one) && has(&one.ports) && bounded && giver
                };
                let expected = grants.iter().filter(gives).map(|one| one.until).max();
                let found = given.find(user, FROM, &node(&name), Some(port), now);
                prop_assert_eq!(found.as_ref().map(|one| one.until), expected);
                prop_assert!(expected.is_none() || given.find(user, FROM, &node(&name), None, now).is_some());
                let permitted = given.permitted(user, FROM, now);
                for one in grants.iter().filter(|one| one.user.as_str() == user && now < one.until) {
                    let is_permitted = given.permit(one, Some(FROM)) && one.giver() != Some("alice");
                    prop_assert_eq!(is_permitted, permitted.iter().any(|it| **it == Grant { id: it.id.clone(), ..one.clone() }));
                    if is_permitted && covers(one) && has(&one.ports) {
                        prop_assert!(found.is_some(), "{:?} was allowed", one);
                    }
                }
            }
        }
    }
}
