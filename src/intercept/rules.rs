//! The table as nft commands in JSON, as nft's language refuses names that are its keywords: recent versions refuse
//! "tunnel". Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::Serialize;
use serde_json::{Value, json};

use crate::intercept::InterceptRules;

/// The contents of the table's sets: connections to these addresses and ports are redirected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InterceptSets {
    /// Addresses of nodes.
    pub nodes: BTreeSet<IpAddr>,
    /// Ports of nodes.
    pub ports: BTreeSet<u16>,
}

impl InterceptRules {
    /// Returns commands that replace any table of this name by the whole table with these sets.
    pub(crate) fn replace_commands(&self, sets: &InterceptSets) -> Vec<Value> {
        let mut commands = self.delete_commands();
        commands.push(self.table("add"));
        let set = |set| self.command("add", "set", set);
        commands.extend([
            set(json!({ "name": NODES4, "type": "ipv4_addr" })),
            set(json!({ "name": NODES6, "type": "ipv6_addr" })),
            set(json!({ "name": PORTS, "type": "inet_service", "flags": ["timeout"], "timeout": PORT_TIMEOUT_SECONDS })),
        ]);
        commands.extend(self.chain(OUTPUT));
        for (is_v4, port) in [(true, Some(self.v4)), (false, self.v6)] {
            commands.extend(port.map(|port| self.rule(OUTPUT, &redirect(is_v4, port))));
        }
        if let Some((from, port)) = &self.forwarded {
            commands.extend(self.chain(PREROUTING));
            for net in from {
                let is_v4 = net.addr().is_ipv4();
                let prefix = json!({ "prefix": { "addr": net.network(), "len": net.prefix_len() } });
                let from = equal(&field(family(is_v4), "saddr"), &prefix);
                commands.push(self.rule(PREROUTING, &[&[from][..], &redirect(is_v4, *port)].concat()));
            }
        }
        commands.extend(self.fill(sets));
        commands
    }

    /// Returns commands that change the sets in one transaction. The ports are always renewed.
    pub(crate) fn update_commands(&self, from: &InterceptSets, to: &InterceptSets) -> Vec<Value> {
        let joined = to.nodes.difference(&from.nodes).copied().collect();
        let mut commands = self.nodes("delete", from.nodes.difference(&to.nodes));
        commands.extend(self.fill(&InterceptSets { nodes: joined, ports: to.ports.clone() }));
        commands
    }

    /// Returns commands that delete the table if it exists.
    pub(crate) fn delete_commands(&self) -> Vec<Value> {
        // Deleting a missing table is an error, adding an existing one is not: so add it first.
        vec![self.table("add"), self.table("delete")]
    }

    /// Returns commands that add nodes, and replace the ports, each with its full timeout.
    fn fill(&self, sets: &InterceptSets) -> Vec<Value> {
        let mut commands = self.nodes("add", &sets.nodes);
        // An element that is added again keeps its remaining timeout, so all are removed first.
        commands.push(self.command("flush", "set", json!({ "name": PORTS })));
        commands.extend(self.elements("add", PORTS, &sets.ports));
        commands
    }

    /// Returns commands that add addresses to the set of their family, or delete them there.
    fn nodes<'a>(&self, verb: &str, nodes: impl IntoIterator<Item = &'a IpAddr>) -> Vec<Value> {
        let (v4, v6): (Vec<&IpAddr>, Vec<&IpAddr>) = nodes.into_iter().partition(|ip| ip.is_ipv4());
        [(NODES4, v4), (NODES6, v6)]
            .iter()
            .filter_map(|(set, nodes)| self.elements(verb, set, nodes))
            .collect()
    }

    /// Returns `None` for an empty list, which nft rejects.
    fn elements(&self, verb: &str, set: &str, elements: impl IntoIterator<Item: Serialize>) -> Option<Value> {
        let elements: Vec<_> = elements.into_iter().map(|element| json!(element)).collect();
        (!elements.is_empty())
            .then(|| self.command(verb, "element", json!({ "name": set, "elem": elements })))
    }

    /// Returns commands that add a chain. It first accepts traffic to this machine, and the server's own traffic.
    fn chain(&self, name: &str) -> [Value; 3] {
        let chain =
            json!({ "name": name, "type": "nat", "hook": name, "prio": PRIORITY, "policy": "accept" });
        let here = equal(&json!({ "fib": { "result": "type", "flags": ["daddr"] } }), &json!("local"));
        let masked = json!({ "&": [{ "meta": { "key": "mark" } }, self.mask] });
        let ours = equal(&masked, &json!(self.mark & self.mask));
        let passes = |traffic| self.rule(name, &[traffic, json!({ "return": null })]);
        [self.command("add", "chain", chain), passes(here), passes(ours)]
    }

    fn rule(&self, chain: &str, statements: &[Value]) -> Value {
        self.command("add", "rule", json!({ "chain": chain, "expr": statements }))
    }

    pub(super) fn table(&self, verb: &str) -> Value {
        json!({ verb: { "table": { "family": "inet", "name": self.table } } })
    }

    /// Returns a command about an object of the table: its kind, and its properties.
    fn command(&self, verb: &str, kind: &str, mut object: Value) -> Value {
        object["family"] = json!("inet");
        object["table"] = json!(self.table);
        json!({ verb: { kind: object } })
    }
}

/// Returns statements that redirect traffic to the nodes and ports of the sets to a local port.
fn redirect(is_v4: bool, port: u16) -> [Value; 3] {
    let nodes = if is_v4 { NODES4 } else { NODES6 };
    [
        equal(&field(family(is_v4), "daddr"), &json!(format!("@{nodes}"))),
        equal(&field("tcp", "dport"), &json!(format!("@{PORTS}"))),
        json!({ "redirect": { "port": port } }),
    ]
}

fn equal(left: &Value, right: &Value) -> Value {
    json!({ "match": { "op": "==", "left": left, "right": right } })
}

fn field(protocol: &str, field: &str) -> Value {
    json!({ "payload": { "protocol": protocol, "field": field } })
}

pub(super) fn family(is_v4: bool) -> &'static str {
    if is_v4 { "ip" } else { "ip6" }
}

/// Before the chains of kube-proxy, and of YurtTunnel's iptables rules: both are at -100.
const PRIORITY: i32 = -110;

/// Timeout of a port in its set, in seconds, unless it is renewed.
const PORT_TIMEOUT_SECONDS: u32 = 30;

const OUTPUT: &str = "output";
const PREROUTING: &str = "prerouting";

/// Names of the sets, which identify a table of this program.
pub(crate) const NODES4: &str = "nodes4";
pub(crate) const NODES6: &str = "nodes6";
pub(crate) const PORTS: &str = "ports";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn catch() -> InterceptRules {
        InterceptRules {
            table: "tunnel".to_owned(),
            mark: 0x40,
            mask: 0xf0,
            v4: 7001,
            v6: Some(7002),
            forwarded: None,
        }
    }

    fn sets(nodes: &[&str], ports: &[u16]) -> InterceptSets {
        let nodes = nodes.iter().map(|ip| ip.parse().unwrap()).collect();
        InterceptSets { nodes, ports: ports.iter().copied().collect() }
    }

    /// Returns the commands, each as its verb, its object's kind, and the object.
    fn commands(all: &[Value]) -> Vec<(String, String, Value)> {
        let first = |value: Value| match value {
            Value::Object(of) => of.into_iter().next().unwrap(),
            other => panic!("{other}"),
        };
        let each = all.iter().map(|command| {
            let (verb, object) = first(command.clone());
            let (kind, object) = first(object);
            assert_eq!(
                (&object["family"], &object.get("table").unwrap_or(&object["name"])),
                (&json!("inet"), &&json!("tunnel"))
            );
            (verb, kind, object)
        });
        each.collect()
    }

    fn rules<'a>(all: &'a [(String, String, Value)], chain: &str) -> Vec<&'a Value> {
        let rules =
            all.iter().filter(|(verb, kind, of)| verb == "add" && kind == "rule" && of["chain"] == chain);
        rules.map(|(.., rule)| &rule["expr"]).collect()
    }

    /// Applies commands to the kernel's sets. Panics if the kernel would refuse one.
    fn applied(all: &[Value], held: &mut BTreeMap<String, BTreeSet<String>>) {
        for (verb, kind, of) in commands(all) {
            let name = of["name"].as_str().unwrap_or_default().to_owned();
            match (verb.as_str(), kind.as_str()) {
                ("flush", "set") => held.get_mut(&name).unwrap().clear(),
                ("delete", "table") => held.clear(),
                ("add", "set") => drop(held.insert(name, BTreeSet::new())),
                ("add" | "delete", "element") => {
                    let set = held.get_mut(&name).unwrap();
                    let elements = of["elem"].as_array().unwrap();
                    assert!(!elements.is_empty(), "nft rejects empty lists");
                    for element in elements {
                        let element = element.to_string();
                        // Deleting a missing element fails the whole transaction.
                        assert!(if verb == "add" { set.insert(element) } else { set.remove(&element) });
                    }
                }
                _ => {}
            }
        }
    }

    #[test]
    fn local_and_marked_packets_are_accepted_before_all_other_rules() {
        let forwarded = Some((vec!["10.9.0.0/16".parse().unwrap(), "fd09::/64".parse().unwrap()], 7003));
        let all =
            commands(&InterceptRules { forwarded, ..catch() }.replace_commands(&InterceptSets::default()));
        let local = json!([
            { "match": { "op": "==", "left": { "fib": { "result": "type", "flags": ["daddr"] } }, "right": "local" } },
            { "return": null }
        ]);
        let ours = json!([
            { "match": { "op": "==", "left": { "&": [{ "meta": { "key": "mark" } }, 0xf0] }, "right": 0x40 } },
            { "return": null }
        ]);
        for (chain, hook) in [("output", "output"), ("prerouting", "prerouting")] {
            let rules = rules(&all, chain);
            assert_eq!((rules[0], rules[1]), (&local, &ours), "{chain}");
            assert_eq!(rules.len(), 4, "{chain}: plus one for each family or network");
            let (.., made) = all.iter().find(|(_, kind, of)| kind == "chain" && of["name"] == chain).unwrap();
            assert_eq!(
                (&made["type"], &made["hook"], &made["prio"]),
                (&json!("nat"), &json!(hook), &json!(-110))
            );
        }
        let redirect = |port: u16| json!({ "redirect": { "port": port } });
        assert_eq!(rules(&all, "output")[2][2], redirect(7001));
        assert_eq!(rules(&all, "output")[3][2], redirect(7002));
        let from = |rule: usize| &rules(&all, "prerouting")[rule][0]["match"]["right"]["prefix"];
        assert_eq!(from(2), &json!({ "addr": "10.9.0.0", "len": 16 }));
        assert_eq!(from(3), &json!({ "addr": "fd09::", "len": 64 }));
    }

    #[test]
    fn only_families_with_a_listener_are_intercepted_and_no_forwarded_traffic() {
        let all =
            commands(&InterceptRules { v6: None, ..catch() }.replace_commands(&InterceptSets::default()));
        assert_eq!((rules(&all, "output").len(), rules(&all, "prerouting").len()), (3, 0));
        assert!(!all.iter().any(|(_, kind, of)| kind == "chain" && of["name"] == "prerouting"));
    }

    #[test]
    fn the_whole_table_replaces_any_table_of_its_name() {
        let all = commands(&catch().replace_commands(&sets(&["10.0.0.7", "fd00::7"], &[10250])));
        let begin: Vec<_> =
            all.iter().take(3).map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(begin, [("add", "table"), ("delete", "table"), ("add", "table")]);
        let deletion = commands(&catch().delete_commands());
        assert_eq!(deletion[..], all[..2]);
    }

    #[test]
    fn unchanged_ports_are_renewed_with_their_full_timeout() {
        let same = sets(&["10.0.0.7"], &[10250]);
        let all = commands(&catch().update_commands(&same, &same));
        let verbs: Vec<_> = all.iter().map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(verbs, [("flush", "set"), ("add", "element")]);
        assert_eq!(all[1].2["elem"], json!([10250]));
        let whole = commands(&catch().replace_commands(&same));
        let (.., ports) = whole.iter().find(|(_, kind, of)| kind == "set" && of["name"] == "ports").unwrap();
        assert_eq!((&ports["flags"], &ports["timeout"]), (&json!(["timeout"]), &json!(30)));
    }

    fn any_sets() -> impl Strategy<Value = InterceptSets> {
        let v4 = (0_u8..6).prop_map(|last| IpAddr::from([10, 0, 0, last]));
        let v6 = (0_u16..6).prop_map(|last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]));
        let nodes = proptest::collection::btree_set(prop_oneof![v4, v6], 0..8);
        (nodes, proptest::collection::btree_set(1_u16..6, 0..4))
            .prop_map(|(nodes, ports)| InterceptSets { nodes, ports })
    }

    proptest! {
        #[test]
        fn any_change_of_sets_yields_the_same_state_as_the_whole_table(
            steps in proptest::collection::vec(any_sets(), 1..6),
        ) {
            let (mut held, mut direct) = (BTreeMap::new(), BTreeMap::new());
            applied(&catch().replace_commands(&InterceptSets::default()), &mut held);
            let mut from = InterceptSets::default();
            for to in &steps {
                applied(&catch().update_commands(&from, to), &mut held);
                from = to.clone();
            }
            applied(&catch().replace_commands(&from), &mut direct);
            prop_assert_eq!(held, direct);
        }
    }
}
