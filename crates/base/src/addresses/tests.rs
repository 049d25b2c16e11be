use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::str::FromStr as _;

use proptest::prelude::*;

use crate::addresses::cluster_state::{
    KubeEndpointSlice, KubeNode, KubePod, KubeService, ReadyEndpoint, ServicePort, ServiceSide,
};

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ips(texts: &[&str]) -> Box<[IpAddr]> {
    texts.iter().map(|text| ip(text)).collect()
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn machine(ips: Box<[IpAddr]>) -> KubeNode {
    KubeNode { ips, pods: [IpNet::from_str("10.244.1.0/24").unwrap()].into(), ..KubeNode::default() }
}

fn port(name: &str, number: u16) -> ServicePort {
    ServicePort { name: name.into(), number }
}

fn pod(at: &str, addresses: &[&str]) -> KubePod {
    KubePod { node: node(at), ips: ips(addresses) }
}

fn service(addresses: &[&str], ports: &[ServicePort]) -> KubeService {
    KubeService { ips: ips(addresses), outside: Box::default(), ports: ports.into(), external: None }
}

fn slice(service: &str, ports: &[ServicePort], ready: &[(&str, Option<&str>)]) -> KubeEndpointSlice {
    let endpoint = |(at, on): &(&str, Option<&str>)| ReadyEndpoint { ip: ip(at), node: on.map(node) };
    KubeEndpointSlice {
        service: service.into(),
        ports: ports.into(),
        ready: ready.iter().map(endpoint).collect(),
    }
}

/// A cluster with an edge and its camera, a pod there, a pod in the node's own network, and a finished pod.
fn book() -> AddressBook {
    let nets = [("10.0.7.0/24", "edge1"), ("10.0.7.9/32", "edge2")];
    let book = AddressBook::new(nets.map(|(net, at)| (net.parse().unwrap(), node(at))).into(), true);
    book.change(|facts| {
        facts.nodes.put("edge1", machine(ips(&["192.168.1.5", "fd00::5"])));
        facts.nodes.put("master", machine(ips(&["172.16.0.1"])));
        facts.nodes.put("bare", machine(ips(&[])));
        facts.pods.put("shop/web", pod("edge1", &["10.244.1.7", "fd01::7"]));
        facts.pods.put("kube-system/proxy", pod("edge1", &[]));
        facts.pods.put("shop/job", pod("edge2", &[]));
    });
    book
}

/// Formats the location of `text`: `target at node, else what is dialled directly`, or an error.
fn locate(book: &AddressBook, text: &str, chance: f64) -> String {
    match book.locate(&text.parse().unwrap(), chance, |node| node.as_str() == "linked.test") {
        Ok(Location::Node { node, target, direct: Some(direct) }) if direct == target => {
            format!("{target} at {node}, else so")
        }
        Ok(Location::Node { node, target, direct: Some(direct) }) => {
            format!("{target} at {node}, else {direct}")
        }
        Ok(Location::Node { node, target, direct: None }) => format!("{target} at {node}"),
        Ok(Location::Direct(target)) => format!("{target} directly"),
        Err(why) => why.to_string(),
    }
}

fn expect(book: &AddressBook, expected: &[(&str, &str)]) {
    for (target, found) in expected {
        assert_eq!(locate(book, target, 0.0), *found, "{target}");
    }
}

#[test]
fn a_node_is_located_by_name_or_address_and_a_pod_by_address() {
    expect(
        &book(),
        &[
            ("edge1:22", "edge1:22 at edge1, else 192.168.1.5:22"),
            ("bare:22", "bare:22 at bare, else so"),
            ("stranger:22", "stranger:22 at stranger, else so"),
            ("192.168.1.5:10250", "192.168.1.5:10250 at edge1, else so"),
            ("[fd00::5]:22", "[fd00::5]:22 at edge1, else so"),
            ("[::ffff:192.168.1.5]:22", "192.168.1.5:22 at edge1, else so"),
            ("10.244.1.7:80", "10.244.1.7:80 at edge1, else so"),
            ("[fd01::7]:80", "[fd01::7]:80 at edge1, else so"),
            ("10.244.1.8:80", "10.244.1.8:80 directly"),
        ],
    );
}

#[test]
fn a_node_is_located_by_a_name_among_its_addresses_that_no_other_node_has() {
    let book = book();
    book.change(|facts| {
        let names = ["edge-7.novalocal", "two.test", "edge1", "linked.test", "web.shop"];
        let with = |names: &[&str], at: &str| KubeNode {
            names: names.iter().map(|name| (*name).into()).collect(),
            ..machine(ips(&[at]))
        };
        facts.nodes.put("mi-0abc", with(&names, "192.168.7.7"));
        facts.nodes.put("mi-0def", with(&["two.test"], "192.168.7.8"));
        facts.services.put("shop/web", service(&["10.96.0.7"], &[port("", 80)]));
    });
    expect(
        &book,
        &[
            ("edge-7.novalocal:10250", "mi-0abc:10250 at mi-0abc, else 192.168.7.7:10250"),
            ("EDGE-7.novalocal.:22", "mi-0abc:22 at mi-0abc, else 192.168.7.7:22"),
            ("two.test:22", "two.test:22 at two.test, else so"),
            ("edge1:22", "edge1:22 at edge1, else 192.168.1.5:22"),
            ("linked.test:22", "linked.test:22 at linked.test, else so"),
            ("web.shop:80", "Service shop/web has no ready endpoint"),
        ],
    );
    book.change(|facts| facts.nodes.remove("mi-0def"));
    expect(&book, &[("two.test:22", "mi-0abc:22 at mi-0abc, else 192.168.7.7:22")]);
    book.change(|facts| facts.nodes.put("edge-7.novalocal", machine(ips(&["192.168.7.9"]))));
    expect(&book, &[("edge-7.novalocal:22", "edge-7.novalocal:22 at edge-7.novalocal, else 192.168.7.9:22")]);
}

#[test]
fn fixed_networks_override_kubernetes_and_the_narrowest_one_wins() {
    let book = book();
    book.change(|facts| facts.pods.put("shop/other", pod("edge3", &["10.0.7.1"])));
    expect(
        &book,
        &[
            ("10.0.7.1:80", "10.0.7.1:80 at edge1"),
            ("10.0.7.9:80", "10.0.7.9:80 at edge2"),
            ("[::ffff:10.0.7.9]:80", "10.0.7.9:80 at edge2"),
            ("10.0.8.1:80", "10.0.8.1:80 directly"),
        ],
    );
}

#[test]
fn a_pods_node_is_found_by_the_pods_name_whatever_its_addresses() {
    let book = book();
    let of = |namespace, name| book.node_of_pod(namespace, name).map(|node| node.to_string());
    assert_eq!(of("shop", "web").as_deref(), Some("edge1"));
    assert_eq!(of("kube-system", "proxy").as_deref(), Some("edge1"), "it has its node's addresses");
    assert_eq!(of("shop", "job").as_deref(), Some("edge2"), "its logs are still available");
    assert_eq!(of("default", "web"), None);
}

#[test]
fn pod_network_is_the_nodes_pod_range_or_the_single_address() {
    let of = |at: &str| book().pod_network(&node("Edge1"), ip(at)).to_string();
    assert_eq!((of("10.244.1.7"), of("::ffff:10.244.1.7")), ("10.244.1.0/24".into(), "10.244.1.0/24".into()));
    assert_eq!((of("10.0.0.1"), of("fd01::7")), ("10.0.0.1/32".into(), "fd01::7/128".into()));
}

#[test]
fn an_address_claimed_at_two_nodes_is_an_error_that_names_both() {
    let book = book();
    book.change(|facts| facts.pods.put("shop/twin", pod("edge1", &["10.244.1.7"])));
    expect(&book, &[("10.244.1.7:80", "10.244.1.7:80 at edge1, else so")]);
    book.change(|facts| facts.pods.put("shop/web2", pod("edge2", &["10.244.1.7"])));
    let both = "10.244.1.7 is claimed by both pod shop/twin at edge1 and pod shop/web2 at edge2";
    expect(&book, &[("10.244.1.7:80", both)]);
    book.change(|facts| facts.nodes.put("edge3", machine(ips(&["192.168.1.5"]))));
    let both = "192.168.1.5 is claimed by both node edge1 and node edge3";
    expect(&book, &[("192.168.1.5:80", both)]);
    book.change(|facts| facts.nodes.remove("edge3"));
    expect(&book, &[("192.168.1.5:80", "192.168.1.5:80 at edge1, else so")]);
}

fn with_service() -> AddressBook {
    let book = book();
    book.change(|facts| {
        let ports = [port("web", 80), port("admin", 81)];
        facts.services.put("shop/web", service(&["10.96.0.7", "fd96::7"], &ports));
        let (one, two) = ([port("web", 8080), port("admin", 9090)], [port("web", 8081)]);
        facts.slices.put("shop/web-a", slice("shop/web", &one, &[("10.244.1.7", Some("edge1"))]));
        let ready =
            [("10.244.2.7", Some("edge2")), ("172.16.0.1", None), ("10.0.7.9", None), ("192.0.2.1", None)];
        facts.slices.put("shop/web-b", slice("shop/web", &two, &ready));
        facts.slices.put("shop/web-6", slice("shop/web", &one, &[("fd01::7", Some("edge1"))]));
    });
    book
}

#[test]
fn a_service_is_located_by_each_of_its_names_and_addresses() {
    let book = with_service();
    let found = "10.244.1.7:8080 at edge1, else so";
    for name in
        ["web.shop", "web.shop.svc", "web.shop.svc.cluster.local", "WEB.Shop.svc.example.org.", "10.96.0.7"]
    {
        assert_eq!(locate(&book, &format!("{name}:80"), 0.0), found, "{name}");
    }
    expect(
        &book,
        &[
            ("web.shop:81", "10.244.1.7:9090 at edge1, else so"),
            ("[fd96::7]:80", "[fd01::7]:8080 at edge1, else so"),
            ("web.shop:82", "Service shop/web has no TCP port 82"),
            ("other.shop:80", "other.shop:80 at other.shop, else so"),
            ("web.shop.example:80", "web.shop.example:80 at web.shop.example, else so"),
            ("other.shop.svc:80", "other.shop.svc:80 directly"),
        ],
    );
    book.change(|facts| {
        facts.services.start();
        facts.services.finish();
    });
    expect(&book, &[("other.shop.svc:80", "there is no Service shop/other")]);
}

#[test]
fn each_ready_endpoint_of_all_slices_can_be_chosen() {
    let book = with_service();
    let found: Vec<_> = (0..5).map(|n| locate(&book, "web.shop:80", (f64::from(n) + 0.5) / 5.0)).collect();
    let expected = [
        "10.244.1.7:8080 at edge1, else so",
        "10.244.2.7:8081 at edge2, else so",
        "172.16.0.1:8081 at master, else so",
        "10.0.7.9:8081 at edge2",
        "192.0.2.1:8081 directly",
    ];
    assert_eq!(found, expected);
    assert_eq!(locate(&book, "web.shop:80", 1.0), expected[4], "chance may be whole");
}

#[test]
fn a_service_assigned_to_edge_or_cloud_uses_only_that_side() {
    let book = with_service();
    book.change(|facts| facts.sides.insert("shop/web".to_owned(), ServiceSide::Edge));
    let found: BTreeSet<_> = (0..40).map(|n| locate(&book, "web.shop:80", f64::from(n) / 40.0)).collect();
    assert_eq!(found.len(), 4);
    assert!(!found.contains("192.0.2.1:8081 directly"), "{found:?}");
    book.change(|facts| {
        facts.slices.put("shop/web-a", slice("shop/web", &[port("web", 80)], &[]));
        facts.slices.put("shop/web-b", slice("shop/web", &[port("web", 80)], &[("192.0.2.1", None)]));
    });
    expect(&book, &[("web.shop:80", "Service shop/web has no ready endpoint at an edge")]);
    book.change(|facts| facts.sides.insert("shop/web".to_owned(), ServiceSide::Cloud));
    expect(
        &book,
        &[
            ("web.shop:80", "web.shop:80 directly"),
            ("10.96.0.7:80", "10.96.0.7:80 directly"),
            ("web.shop:82", "web.shop:82 directly"),
        ],
    );
}

#[test]
fn a_service_may_be_headless_or_external_or_without_endpoints() {
    let book = book();
    book.change(|facts| {
        facts.services.put("shop/db", service(&[], &[port("sql", 3306)]));
        facts
            .slices
            .put("shop/db-a", slice("shop/db", &[port("sql", 13306)], &[("10.244.1.9", Some("edge1"))]));
        let external = KubeService { external: Some("example.org".parse().unwrap()), ..service(&[], &[]) };
        facts.services.put("shop/out", external);
        facts.services.put("shop/idle", service(&["10.96.0.9"], &[port("", 80)]));
    });
    expect(
        &book,
        &[
            ("db.shop:13306", "10.244.1.9:13306 at edge1, else so"),
            ("out.shop.svc:443", "example.org:443 directly"),
            ("idle.shop:80", "Service shop/idle has no ready endpoint"),
            ("10.96.0.9:80", "Service shop/idle has no ready endpoint"),
        ],
    );
    book.change(|facts| facts.nodes.put("idle.shop", machine(ips(&[]))));
    expect(&book, &[("idle.shop:80", "idle.shop:80 at idle.shop, else so")]);
}

#[test]
fn a_restarted_list_removes_nothing_until_it_is_complete() {
    let book = book();
    let there = |target| locate(&book, target, 0.0) != format!("{target} directly");
    book.change(|facts| facts.pods.start());
    book.change(|facts| facts.pods.put("shop/new", pod("edge2", &["10.244.2.1"])));
    assert!(there("10.244.1.7:80") && there("10.244.2.1:80"));
    // The list broke off and starts again.
    book.change(|facts| facts.pods.start());
    book.change(|facts| facts.pods.put("shop/moved", pod("edge2", &["10.244.2.2"])));
    assert!(!book.change(|facts| facts.pods.is_listed()));
    book.change(|facts| facts.pods.finish());
    assert!(book.change(|facts| facts.pods.is_listed()));
    assert!(!there("10.244.1.7:80") && !there("10.244.2.1:80") && there("10.244.2.2:80"));
    assert_eq!(book.node_of_pod("shop", "web"), None);
    book.change(|facts| facts.pods.put("shop/moved", pod("edge2", &["10.244.2.3"])));
    assert!(!there("10.244.2.2:80") && there("10.244.2.3:80"));
}

/// Completes all lists of the book.
fn list(book: &AddressBook) {
    book.change(|facts| {
        facts.nodes.finish();
        facts.pods.finish();
        facts.services.finish();
    });
}

fn claim(at: &str, of: &str, by: ClaimSource) -> AddressClaim {
    AddressClaim { ip: ip(at), node: node(of), by }
}

/// Returns the owner of an address, otherwise why a claim to it was rejected.
fn owner(owners: &AddressOwners, at: &str) -> String {
    let of = owners.nodes.get(&ip(at)).map(ToString::to_string);
    let rejected = || {
        owners
            .rejected
            .iter()
            .find(|rejected| rejected.claim.ip == ip(at))
            .map(|rejected| rejected.why.to_string())
    };
    of.or_else(rejected).unwrap_or_else(|| "no claim".to_owned())
}

#[test]
fn a_pods_address_does_not_override_the_fixed_table_or_a_token_line() {
    let book = book();
    let patched = ["10.0.7.9", "10.0.8.1", "192.168.1.5", "10.0.8.2"];
    book.change(|facts| facts.pods.put("shop/evil", pod("master", &patched)));
    list(&book);
    let token = claim("10.0.8.1", "edge1", ClaimSource::TokenLine);
    let weak = claim("10.0.8.2", "edge1", ClaimSource::Kubernetes);
    let owners = book.owners([token, weak], |_| None);
    assert_eq!(owner(&owners, "10.0.7.9"), "edge2");
    assert_eq!(owner(&owners, "10.0.8.1"), "edge1");
    assert_eq!(owner(&owners, "192.168.1.5"), "it is a pod's");
    assert_eq!(owner(&owners, "10.0.8.2"), "it is a pod's");
    book.change(|facts| facts.services.put("shop/web", service(&["10.0.7.9"], &[])));
    assert_eq!(owner(&book.owners([], |_| None), "10.0.7.9"), "it is a Service's");
}

#[test]
fn a_node_cannot_claim_an_external_address_of_another_node() {
    let book = book();
    book.change(|facts| {
        let outside = ips(&["198.51.100.5"]);
        facts.nodes.put("edge1", KubeNode { outside, ..machine(ips(&["192.168.1.5"])) });
        let outside = ips(&["198.51.100.7", "192.168.1.5"]);
        facts.services.put("shop/web", KubeService { outside, ..service(&["10.96.0.7"], &[]) });
    });
    list(&book);
    let of = |at, node, by| owner(&book.owners([claim(at, node, by)], |_| None), at);
    assert_eq!(of("198.51.100.7", "edge2", ClaimSource::TokenLine), "edge2");
    assert_eq!(of("198.51.100.5", "edge2", ClaimSource::Kubernetes), "it is another Node's");
    assert_eq!(of("198.51.100.5", "Edge1", ClaimSource::Kubernetes), "Edge1", "the address is its own");
    book.change(|facts| facts.nodes.put("stolen", machine(ips(&["198.51.100.5", "198.51.100.7"]))));
    let of = |at| owner(&book.owners([], |_| None), at);
    assert_eq!(of("198.51.100.5"), "it is another Node's");
    assert_eq!(of("198.51.100.7"), "stolen", "a load balancer may share nodes' addresses");
    book.change(|facts| facts.nodes.remove("stolen"));
    let owners = book.owners([], |_| None);
    assert_eq!(owner(&owners, "192.168.1.5"), "edge1", "a load balancer shares it");
    assert!(owners.rejected.is_empty());
    // External addresses locate nothing.
    expect(
        &book,
        &[("198.51.100.5:80", "198.51.100.5:80 directly"), ("198.51.100.7:80", "198.51.100.7:80 directly")],
    );
}

#[test]
fn claims_of_nodes_wait_until_all_kubernetes_lists_are_complete() {
    let book = book();
    let more = [claim("10.0.8.1", "edge2", ClaimSource::TokenLine)];
    let of = |at| owner(&book.owners(more.clone(), |_| None), at);
    let kinds: [fn(&mut ClusterState); 3] =
        [|facts| facts.services.finish(), |facts| facts.nodes.finish(), |facts| facts.pods.finish()];
    for finish in kinds {
        let found = ["10.0.7.9", "10.0.8.1", "192.168.1.5"].map(of);
        assert_eq!(found, ["edge2", "edge2", "no claim"]);
        book.change(finish);
    }
    assert_eq!(["10.0.7.9", "10.0.8.1", "192.168.1.5"].map(of), ["edge2", "edge2", "edge1"]);
    // A list that starts again removes nothing.
    book.change(|facts| facts.nodes.start());
    assert_eq!(of("192.168.1.5"), "edge1");
}

#[test]
fn without_a_cluster_the_table_and_token_lines_apply() {
    let book = AddressBook::new(vec![("10.0.7.9/32".parse().unwrap(), node("edge2"))], false);
    let owners = book.owners([claim("10.0.8.1", "edge1", ClaimSource::TokenLine)], |_| None);
    assert_eq!(["10.0.7.9", "10.0.8.1"].map(|at| owner(&owners, at)), ["edge2", "edge1"]);
}

#[test]
fn a_node_cannot_take_the_name_of_a_service() {
    let book = with_service();
    book.change(|facts| {
        for name in ["web.shop.svc", "web.shop.svc.cluster.local", "policy.shop.svc", "web.shop"] {
            facts.nodes.put(name, machine(ips(&["192.168.6.6"])));
        }
    });
    let service = "10.244.1.7:8080 at edge1, else so";
    expect(
        &book,
        &[
            ("web.shop.svc:80", service),
            ("Web.Shop.SVC:80", service),
            ("web.shop.svc.cluster.local:80", service),
            // While Services are still being listed, DNS resolves the name.
            ("policy.shop.svc:443", "policy.shop.svc:443 directly"),
            ("none.shop.svc.cluster.local:443", "none.shop.svc.cluster.local:443 directly"),
        ],
    );
    // Two labels are an ordinary name of a Node.
    assert!(locate(&book, "web.shop:80", 0.0).starts_with("web.shop:80 at web.shop"));
    list(&book);
    expect(&book, &[("policy.shop.svc:443", "there is no Service shop/policy")]);
    let alone = AddressBook::new(Vec::new(), false);
    expect(&alone, &[("policy.shop.svc:443", "policy.shop.svc:443 at policy.shop.svc, else so")]);
}

#[test]
fn a_node_cannot_take_an_address_of_another_object() {
    let book = with_service();
    book.change(|facts| {
        let outside = ips(&["198.51.100.1"]);
        facts.nodes.put("master", KubeNode { outside, ..machine(ips(&["172.16.0.1"])) });
        facts.services.put(
            "shop/public",
            KubeService { outside: ips(&["198.51.100.7", "192.168.1.5"]), ..service(&["10.96.0.8"], &[]) },
        );
        facts.services.put("shop/idle", service(&["10.96.0.9"], &[port("", 80)]));
        // What the kubelet of one compromised node can write.
        facts.nodes.put("evil", machine(ips(&["10.96.0.9", "172.16.0.1", "198.51.100.1", "10.0.7.1"])));
        facts.pods.put("evil/pod", pod("evil", &["10.96.0.7", "198.51.100.7", "198.51.100.1", "10.0.7.9"]));
    });
    expect(
        &book,
        &[
            // A ClusterIP stays the Service's.
            ("10.96.0.9:80", "Service shop/idle has no ready endpoint"),
            ("10.96.0.7:80", "10.244.1.7:8080 at edge1, else so"),
            // An address claimed by two objects belongs to neither.
            ("172.16.0.1:22", "172.16.0.1 is claimed by both node evil and node master"),
            ("198.51.100.1:22", "198.51.100.1 is claimed by both node evil and node master"),
            (
                "198.51.100.7:22",
                "198.51.100.7 is claimed by both pod evil/pod at evil and Service shop/public",
            ),
            // The fixed table wins.
            ("10.0.7.1:22", "10.0.7.1:22 at edge1"),
            ("10.0.7.9:22", "10.0.7.9:22 at edge2"),
            // A load balancer may share the address of a node.
            ("192.168.1.5:22", "192.168.1.5:22 at edge1, else so"),
            // A server dials none of these for a node without an edge.
            ("evil:22", "evil:22 at evil, else so"),
            ("master:22", "master:22 at master, else so"),
        ],
    );
    let node_at = |at| book.node_at(ip(at)).map(|found| found.map(|(node, _)| node.to_string()));
    assert_eq!(node_at("10.96.0.9"), Ok(None));
    assert!(node_at("172.16.0.1").is_err());
}

#[test]
fn a_service_address_claimed_by_two_services_is_ambiguous() {
    let book = with_service();
    book.change(|facts| facts.services.put("evil/web", service(&["10.96.0.7"], &[port("web", 80)])));
    let both = "10.96.0.7 is claimed by both Service evil/web and Service shop/web";
    expect(&book, &[("10.96.0.7:80", both), ("web.shop:80", "10.244.1.7:8080 at edge1, else so")]);
}

#[test]
fn the_fixed_table_overrides_claims_of_nodes() {
    let book = book();
    book.change(|facts| {
        facts.nodes.put("edge2", machine(ips(&["172.16.0.9"])));
        facts.nodes.put("evil", machine(ips(&["10.0.7.20", "10.0.8.1"])));
        facts.services.put("shop/db", service(&["10.96.0.7"], &[port("", 80)]));
        facts.slices.put("shop/db-a", slice("shop/db", &[port("", 80)], &[("10.0.7.9", Some("evil"))]));
    });
    let address_of = |name| book.address_of(&node(name)).map(|ip| ip.to_string());
    assert_eq!(address_of("edge2").as_deref(), Some("10.0.7.9"));
    assert_eq!(address_of("edge1").as_deref(), Some("192.168.1.5"), "the table has only a network for it");
    expect(
        &book,
        &[
            ("10.0.7.20:22", "10.0.7.20:22 at edge1"),
            ("edge2:22", "edge2:22 at edge2, else so"),
            ("evil:22", "evil:22 at evil, else so"),
            ("db.shop:80", "10.0.7.9:80 at edge2"),
        ],
    );
    list(&book);
    let claims = [
        claim("10.0.7.30", "evil", ClaimSource::Kubernetes),
        claim("10.0.7.40", "evil", ClaimSource::TokenLine),
        claim("10.0.7.50", "edge1", ClaimSource::Kubernetes),
    ];
    let owners = book.owners(claims, |_| None);
    let found = ["10.0.7.20", "10.0.7.30", "10.0.7.40", "10.0.7.50", "10.0.8.1"].map(|at| owner(&owners, at));
    let behind = "it is assigned to another node by [server.addresses]";
    assert_eq!(found, [behind, behind, "evil", "edge1", "evil"]);
}

/// An event about pods.
#[derive(Debug, Clone)]
enum PodEvent {
    Begin,
    Finish,
    Put(u8, u8, Vec<u8>),
    Remove(u8),
}

fn pod_event() -> impl Strategy<Value = PodEvent> {
    prop_oneof![
        1 => Just(PodEvent::Begin),
        1 => Just(PodEvent::Finish),
        6 => (0..5_u8, 0..3_u8, proptest::collection::vec(0..5_u8, 0..3)).prop_map(|(pod, at, ips)| PodEvent::Put(pod, at, ips)),
        2 => (0..5_u8).prop_map(PodEvent::Remove),
    ]
}

/// A slow model of the pods: the known ones, and those in the current list.
#[derive(Debug, Default)]
struct Model {
    pods: BTreeMap<u8, (u8, Vec<u8>)>,
    named: BTreeSet<u8>,
}

impl Model {
    fn apply(&mut self, event: &PodEvent) {
        match event {
            PodEvent::Begin => self.named.clear(),
            PodEvent::Finish => {
                let named = std::mem::take(&mut self.named);
                self.pods.retain(|pod, _| named.contains(pod));
                self.named = named;
            }
            PodEvent::Put(pod, at, ips) => {
                self.pods.insert(*pod, (*at, ips.clone()));
                self.named.insert(*pod);
            }
            PodEvent::Remove(pod) => {
                self.pods.remove(pod);
                self.named.remove(pod);
            }
        }
    }

    fn nodes_of(&self, address: u8) -> BTreeSet<u8> {
        self.pods.values().filter(|(_, ips)| ips.contains(&address)).map(|(at, _)| *at).collect()
    }
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 244, 0, last])
}

fn apply_to_book(book: &AddressBook, event: &PodEvent) {
    book.change(|facts| match event {
        PodEvent::Begin => facts.pods.start(),
        PodEvent::Finish => facts.pods.finish(),
        PodEvent::Put(pod, at, ips) => {
            let ips = ips.iter().map(|ip| address(*ip)).collect();
            facts.pods.put(&format!("n/{pod}"), KubePod { node: node(&format!("edge{at}")), ips });
        }
        PodEvent::Remove(pod) => facts.pods.remove(&format!("n/{pod}")),
    });
}

proptest! {
    #[test]
    fn pods_are_located_as_by_a_simple_model(all in proptest::collection::vec(pod_event(), 0..60)) {
        let (book, mut model) = (AddressBook::default(), Model::default());
        for event in all {
            apply_to_book(&book, &event);
            model.apply(&event);
            for last in 0..5 {
                let target = Target { host: Host::Ip(address(last)), port: 80 };
                let found = book.locate(&target, 0.5, |_| false);
                let nodes = model.nodes_of(last);
                let expected = nodes.first().map(|at| node(&format!("edge{at}")));
                match (nodes.len(), found) {
                    (0, Ok(Location::Direct(_))) => {}
                    (1, Ok(Location::Node { node, .. })) => prop_assert_eq!(Some(node), expected),
                    (2.., Err(LocateError::Ambiguous { .. })) => {}
                    (nodes, found) => prop_assert!(false, "{} at {} nodes: {:?}", last, nodes, found),
                }
            }
            for pod in 0..5 {
                let expected = model.pods.get(&pod).map(|(at, _)| node(&format!("edge{at}")));
                prop_assert_eq!(book.node_of_pod("n", &pod.to_string()), expected);
            }
        }
    }

    #[test]
    fn a_service_is_located_at_exactly_its_ready_endpoints(
        slices in proptest::collection::vec(proptest::collection::vec((0..40_u8, proptest::option::of(0..3_u8)), 0..4), 0..4),
    ) {
        let book = AddressBook::default();
        let mut all = BTreeSet::new();
        book.change(|facts| {
            facts.services.put("n/s", service(&["10.96.0.1"], &[port("p", 80)]));
            for (i, endpoints) in slices.iter().enumerate() {
                let number = 8000 + u16::try_from(i).unwrap();
                let ready = endpoints.iter().map(|(ip, at)| {
                    all.insert((SocketAddr::new(address(*ip), number), at.map(|at| node(&format!("edge{at}")).to_string())));
                    ReadyEndpoint { ip: address(*ip), node: at.map(|at| node(&format!("edge{at}"))) }
                });
                let slice = KubeEndpointSlice { service: "n/s".into(), ports: [port("p", number)].into(), ready: ready.collect() };
                facts.slices.put(&format!("n/s-{i}"), slice);
            }
        });
        let target: Target = "s.n.svc:80".parse().unwrap();
        let found: BTreeSet<_> = (0..160).filter_map(|n| match book.locate(&target, f64::from(n) / 160.0, |_| false) {
            Ok(Location::Node { node, target, .. }) => Some((target.to_string().parse().unwrap(), Some(node.to_string()))),
            Ok(Location::Direct(target)) => Some((target.to_string().parse().unwrap(), None)),
            Err(_) => None,
        }).collect();
        prop_assert_eq!(found, all);
    }
}
