//! The table as commands for nft, in its JSON. Pure.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use nftables::batch::Batch;
use nftables::expr::{
    BinaryOperation, Expression, Fib, FibFlag, FibResult, Meta, MetaKey, NamedExpression, Payload,
    PayloadField, Prefix,
};
use nftables::schema::{
    Chain, Element, FlushObject, NfCmd, NfListObject, Nftables, Rule, Set, SetFlag, SetType, SetTypeValue,
    Table,
};
use nftables::stmt::{Match, NAT, Operator, Statement};
use nftables::types::{NfChainPolicy, NfChainType, NfFamily, NfHook};

use super::Catch;

/// The addresses and ports of the sets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sets {
    /// Addresses of nodes.
    pub nodes: BTreeSet<IpAddr>,
    /// Ports of theirs.
    pub ports: BTreeSet<u16>,
}

impl Catch {
    /// The whole table with these sets, in place of whatever has its name.
    pub(super) fn whole(&self, sets: &Sets) -> Nftables<'static> {
        let mut batch = self.without();
        batch.add(self.table());
        for (name, of) in
            [(NODES4, SetType::Ipv4Addr), (NODES6, SetType::Ipv6Addr), (PORTS, SetType::InetService)]
        {
            batch.add(NfListObject::Set(Box::new(self.set(name, of))));
        }
        self.begin(&mut batch, OUTPUT, NfHook::Output);
        let led = [(NODES4, "ip", self.v4), (NODES6, "ip6", self.v6)];
        for (nodes, family, port) in led {
            port.into_iter().for_each(|port| batch.add(self.rule(OUTPUT, caught(family, nodes, port))));
        }
        if let Some((from, port)) = &self.forwarded {
            self.begin(&mut batch, PREROUTING, NfHook::Prerouting);
            for net in from {
                let (nodes, family) = if net.addr().is_ipv4() { (NODES4, "ip") } else { (NODES6, "ip6") };
                let whence = is(field(family, "saddr"), network(*net));
                let caught = [vec![whence], caught(family, nodes, *port)].concat();
                batch.add(self.rule(PREROUTING, caught));
            }
        }
        self.fill(&mut batch, sets);
        batch.to_nftables()
    }

    /// From one state of the sets to another in one transaction. The ports are renewed in any case.
    pub(super) fn change(&self, from: &Sets, to: &Sets) -> Nftables<'static> {
        let mut batch = Batch::new();
        for (name, left) in split(from.nodes.difference(&to.nodes)) {
            self.elements(name, left).into_iter().for_each(|left| batch.delete(left));
        }
        let joined = to.nodes.difference(&from.nodes).copied().collect();
        self.fill(&mut batch, &Sets { nodes: joined, ports: to.ports.clone() });
        batch.to_nftables()
    }

    /// Takes the table away, whether it is there or not.
    pub(super) fn gone(&self) -> Nftables<'static> {
        self.without().to_nftables()
    }

    fn without(&self) -> Batch<'static> {
        let mut batch = Batch::new();
        // To delete what is not there is an error, to add what is there is none.
        batch.add(self.table());
        batch.delete(self.table());
        batch
    }

    /// Adds to the nodes, and makes the ports these and no others, each for its whole time.
    fn fill(&self, batch: &mut Batch<'static>, sets: &Sets) {
        for (name, nodes) in split(sets.nodes.iter()) {
            self.elements(name, nodes).into_iter().for_each(|nodes| batch.add(nodes));
        }
        // An element that is added again keeps the time that it has left, so all are taken away first.
        let ports = Box::new(self.set(PORTS, SetType::InetService));
        batch.add_cmd(NfCmd::Flush(FlushObject::Set(ports)));
        let ports = sets.ports.iter().map(|port| Expression::Number(u32::from(*port)));
        self.elements(PORTS, ports.collect()).into_iter().for_each(|ports| batch.add(ports));
    }

    fn table(&self) -> NfListObject<'static> {
        NfListObject::Table(Table { family: NfFamily::INet, name: self.named(), handle: None })
    }

    fn set(&self, name: &'static str, of: SetType) -> Set<'static> {
        let timed = name == PORTS;
        Set {
            family: NfFamily::INet,
            table: self.named(),
            name: name.into(),
            set_type: SetTypeValue::Single(of),
            flags: timed.then(|| HashSet::from([SetFlag::Timeout])),
            timeout: timed.then_some(SECONDS),
            ..Set::default()
        }
    }

    /// No command at all for no elements: nft takes an empty list for a fault.
    fn elements(&self, name: &'static str, elem: Vec<Expression<'static>>) -> Option<NfListObject<'static>> {
        let element =
            Element { family: NfFamily::INet, table: self.named(), name: name.into(), elem: elem.into() };
        (!element.elem.is_empty()).then_some(NfListObject::Element(element))
    }

    /// A chain that first lets pass what is for this machine, and what is our own.
    fn begin(&self, batch: &mut Batch<'static>, name: &'static str, hook: NfHook) {
        batch.add(NfListObject::Chain(Chain {
            family: NfFamily::INet,
            table: self.named(),
            name: name.into(),
            _type: Some(NfChainType::NAT),
            hook: Some(hook),
            prio: Some(PRIORITY),
            policy: Some(NfChainPolicy::Accept),
            ..Chain::default()
        }));
        let fib = Fib { result: FibResult::Type, flags: HashSet::from([FibFlag::Daddr]) };
        let here = is(Expression::Named(NamedExpression::Fib(fib)), Expression::String("local".into()));
        let mark = Expression::Named(NamedExpression::Meta(Meta { key: MetaKey::Mark }));
        let masked = BinaryOperation::AND(mark, Expression::Number(self.mask));
        let ours =
            is(Expression::BinaryOperation(Box::new(masked)), Expression::Number(self.mark & self.mask));
        for passes in [here, ours] {
            batch.add(self.rule(name, vec![passes, Statement::Return(None)]));
        }
    }

    fn rule(&self, chain: &'static str, expr: Vec<Statement<'static>>) -> NfListObject<'static> {
        NfListObject::Rule(Rule {
            family: NfFamily::INet,
            table: self.named(),
            chain: chain.into(),
            expr: expr.into(),
            ..Rule::default()
        })
    }

    fn named(&self) -> Cow<'static, str> {
        self.table.clone().into()
    }
}

/// Traffic to one of those nodes, at one of the ports, led to a port of this machine.
fn caught(family: &'static str, nodes: &str, port: u16) -> Vec<Statement<'static>> {
    let to = NAT { addr: None, family: None, port: Some(Expression::Number(port.into())), flags: None };
    vec![
        is(field(family, "daddr"), Expression::String(format!("@{nodes}").into())),
        is(field("tcp", "dport"), Expression::String(format!("@{PORTS}").into())),
        Statement::Redirect(Some(to)),
    ]
}

fn is(left: Expression<'static>, right: Expression<'static>) -> Statement<'static> {
    Statement::Match(Match { left, right, op: Operator::EQ })
}

fn field(protocol: &'static str, field: &'static str) -> Expression<'static> {
    let field = PayloadField { protocol: protocol.into(), field: field.into() };
    Expression::Named(NamedExpression::Payload(Payload::PayloadField(field)))
}

fn network(net: IpNet) -> Expression<'static> {
    let addr = Box::new(Expression::String(net.network().to_string().into()));
    Expression::Named(NamedExpression::Prefix(Prefix { addr, len: net.prefix_len().into() }))
}

/// The addresses of each of the two sets, with its name.
fn split<'a>(nodes: impl Iterator<Item = &'a IpAddr>) -> [(&'static str, Vec<Expression<'static>>); 2] {
    let (v4, v6): (Vec<&IpAddr>, Vec<&IpAddr>) = nodes.partition(|ip| ip.is_ipv4());
    [(NODES4, v4), (NODES6, v6)].map(|(name, nodes)| {
        (name, nodes.into_iter().map(|ip| Expression::String(ip.to_string().into())).collect())
    })
}

/// Before kube-proxy's chains, and those that YurtTunnel makes by iptables: both are at -100.
const PRIORITY: i32 = -110;

/// How long a port stays in its set unless it is renewed.
const SECONDS: u32 = 30;

const OUTPUT: &str = "output";
const PREROUTING: &str = "prerouting";

/// The names of the sets, by which a table of ours is known.
pub(super) const NODES4: &str = "nodes4";
pub(super) const NODES6: &str = "nodes6";
pub(super) const PORTS: &str = "ports";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn catch() -> Catch {
        Catch {
            table: "tunnel".to_owned(),
            mark: 0x40,
            mask: 0xf0,
            v4: Some(7001),
            v6: Some(7002),
            forwarded: None,
        }
    }

    fn sets(nodes: &[&str], ports: &[u16]) -> Sets {
        let nodes = nodes.iter().map(|ip| ip.parse().unwrap()).collect();
        Sets { nodes, ports: ports.iter().copied().collect() }
    }

    /// The commands, each as its verb, its object's kind, and the object.
    fn commands(all: &Nftables<'_>) -> Vec<(String, String, Value)> {
        let Value::Object(mut whole) = serde_json::to_value(all).unwrap() else { panic!("an object") };
        let Some(Value::Array(commands)) = whole.remove("nftables") else { panic!("a list") };
        let first = |value: Value| match value {
            Value::Object(of) => of.into_iter().next().unwrap(),
            other => panic!("{other}"),
        };
        let each = commands.into_iter().map(|command| {
            let (verb, object) = first(command);
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

    /// What the kernel's sets hold behind these commands, and an error where it would refuse one.
    fn applied(all: &Nftables<'_>, held: &mut BTreeMap<String, BTreeSet<String>>) {
        for (verb, kind, of) in commands(all) {
            let name = of["name"].as_str().unwrap_or_default().to_owned();
            match (verb.as_str(), kind.as_str()) {
                ("flush", "set") => held.get_mut(&name).unwrap().clear(),
                ("delete", "table") => held.clear(),
                ("add", "set") => drop(held.insert(name, BTreeSet::new())),
                ("add" | "delete", "element") => {
                    let set = held.get_mut(&name).unwrap();
                    let elements = of["elem"].as_array().unwrap();
                    assert!(!elements.is_empty(), "nft takes no empty list");
                    for element in elements {
                        let element = element.to_string();
                        // To delete what is not there fails the whole transaction.
                        assert!(if verb == "add" { set.insert(element) } else { set.remove(&element) });
                    }
                }
                _ => {}
            }
        }
    }

    #[test]
    fn what_is_for_this_machine_or_our_own_is_let_pass_before_all_else() {
        let forwarded = Some((vec!["10.9.0.0/16".parse().unwrap(), "fd09::/64".parse().unwrap()], 7003));
        let all = commands(&Catch { forwarded, ..catch() }.whole(&Sets::default()));
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
            assert_eq!(rules.len(), 4, "{chain}: and one for each family, or network");
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
    fn only_families_with_a_listener_are_caught_and_nothing_forwarded_unless_asked() {
        let all = commands(&Catch { v6: None, ..catch() }.whole(&Sets::default()));
        assert_eq!((rules(&all, "output").len(), rules(&all, "prerouting").len()), (3, 0));
        assert!(!all.iter().any(|(_, kind, of)| kind == "chain" && of["name"] == "prerouting"));
    }

    #[test]
    fn the_whole_table_takes_the_place_of_any_of_its_name() {
        let all = commands(&catch().whole(&sets(&["10.0.0.7", "fd00::7"], &[10250])));
        let begin: Vec<_> =
            all.iter().take(3).map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(begin, [("add", "table"), ("delete", "table"), ("add", "table")]);
        let gone = commands(&catch().gone());
        assert_eq!(gone[..], all[..2]);
    }

    #[test]
    fn ports_are_renewed_for_their_whole_time_even_where_nothing_changes() {
        let same = sets(&["10.0.0.7"], &[10250]);
        let all = commands(&catch().change(&same, &same));
        let verbs: Vec<_> = all.iter().map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(verbs, [("flush", "set"), ("add", "element")]);
        assert_eq!(all[1].2["elem"], json!([10250]));
        let whole = commands(&catch().whole(&same));
        let (.., ports) = whole.iter().find(|(_, kind, of)| kind == "set" && of["name"] == "ports").unwrap();
        assert_eq!((&ports["flags"], &ports["timeout"]), (&json!(["timeout"]), &json!(30)));
    }

    fn any_sets() -> impl Strategy<Value = Sets> {
        let v4 = (0_u8..6).prop_map(|last| IpAddr::from([10, 0, 0, last]));
        let v6 = (0_u16..6).prop_map(|last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]));
        let nodes = proptest::collection::btree_set(prop_oneof![v4, v6], 0..8);
        (nodes, proptest::collection::btree_set(1_u16..6, 0..4))
            .prop_map(|(nodes, ports)| Sets { nodes, ports })
    }

    proptest! {
        #[test]
        fn from_any_state_to_any_other_the_kernel_refuses_nothing_and_has_that_one(
            steps in proptest::collection::vec(any_sets(), 1..6),
        ) {
            let (mut held, mut direct) = (BTreeMap::new(), BTreeMap::new());
            applied(&catch().whole(&Sets::default()), &mut held);
            let mut from = Sets::default();
            for to in &steps {
                applied(&catch().change(&from, to), &mut held);
                from = to.clone();
            }
            applied(&catch().whole(&from), &mut direct);
            prop_assert_eq!(held, direct);
        }
    }
}
