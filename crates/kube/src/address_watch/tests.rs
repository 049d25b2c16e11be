use std::collections::HashMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::*;
use crate::address_watch::partial_objects::addresses;
use tunnel_base::addresses::cluster_state::{
    KubeEndpointSlice, KubeNode, KubePod, KubeService, ReadyEndpoint, ServicePort, ServiceSide,
};

fn read<K: PartialObject>(object: Value) -> Option<K::Facts> {
    serde_json::from_value::<K>(object).unwrap().facts()
}

fn ips(texts: &[&str]) -> Box<[IpAddr]> {
    addresses(texts.iter().copied())
}

fn port(name: &str, number: u16) -> ServicePort {
    ServicePort { name: name.into(), number }
}

#[test]
fn a_nodes_addresses_and_pod_networks_are_read() {
    let addresses = json!([
        {"type": "Hostname", "address": "edge1"}, {"type": "InternalIP", "address": "10.0.0.5"},
        {"type": "ExternalIP", "address": "192.0.2.5"}, {"type": "InternalIP", "address": "fd00::5"},
        {"type": "InternalDNS", "address": "Edge1.internal"}, {"type": "ExternalDNS", "address": "edge1.internal"},
        {"type": "Hostname", "address": "10.0.0.5"}, {"type": "InternalDNS", "address": "no name"},
    ]);
    let nets = ["10.244.1.0/24", "fd01::/64"];
    let spec = json!({"podCIDR": nets[0], "podCIDRs": nets});
    let nets = nets.map(|net| net.parse().unwrap()).into();
    let node = json!({"metadata": {"name": "edge1"}, "spec": spec, "status": {"addresses": addresses}});
    assert_eq!(
        read::<PartialNode>(node),
        Some(KubeNode {
            ips: ips(&["10.0.0.5", "fd00::5"]),
            outside: ips(&["192.0.2.5"]),
            names: ["edge1.internal".into()].into(),
            pods: nets
        })
    );
    assert_eq!(read::<PartialNode>(json!({"metadata": {"name": "new"}})), Some(KubeNode::default()));
}

#[test]
fn only_the_first_eight_internal_addresses_of_a_node_are_read() {
    let address = |n| json!({"type": "InternalIP", "address": format!("10.0.0.{n}")});
    let addresses: Vec<_> = (1..=200).map(address).collect();
    let node = json!({"metadata": {"name": "edge1"}, "status": {"addresses": addresses}});
    let first: Vec<_> = (1..=8).map(|n| IpAddr::from([10, 0, 0, n])).collect();
    assert_eq!(Vec::from(read::<PartialNode>(node).unwrap().ips), first);
}

#[test]
fn a_pod_has_addresses_while_it_runs_outside_the_host_network() {
    let pod = |phase: &str, host: bool| {
        read::<PartialPod>(json!({
            "metadata": {"name": "p", "namespace": "n", "managedFields": [{"fieldsV1": {"f:spec": {}}}]},
            "spec": {"nodeName": "edge1", "hostNetwork": host, "containers": [{"name": "c"}]},
            "status": {"phase": phase, "podIP": "10.244.0.7", "podIPs": [{"ip": "10.244.0.7"}, {"ip": "fd01::7"}]},
        }))
    };
    let kept = |texts| Some(KubePod { node: "edge1".parse().unwrap(), ips: ips(texts) });
    assert_eq!(pod("Running", false), kept(&["10.244.0.7", "fd01::7"]));
    assert_eq!(pod("Pending", false), kept(&["10.244.0.7", "fd01::7"]));
    for (phase, host) in [("Running", true), ("Succeeded", false), ("Failed", false)] {
        assert_eq!(pod(phase, host), kept(&[]), "{phase}");
    }
    assert_eq!(
        read::<PartialPod>(json!({"metadata": {"name": "p"}, "spec": {}})),
        None,
        "the pod has no node yet"
    );
}

#[test]
fn a_services_addresses_and_tcp_ports_are_read() {
    let service =
        |spec| read::<PartialService>(json!({"metadata": {"name": "s", "namespace": "n"}, "spec": spec}));
    let ports = json!([{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "tcp", "port": 53, "protocol": "TCP"}, {"port": 80}]);
    let whole =
        service(json!({"type": "ClusterIP", "clusterIPs": ["10.96.0.10", "fd96::a"], "ports": ports}));
    let ports = [port("tcp", 53), port("", 80)].into();
    let ips_of_it = ips(&["10.96.0.10", "fd96::a"]);
    assert_eq!(whole, Some(KubeService { ips: ips_of_it, outside: ips(&[]), ports, external: None }));
    let outside = json!({
        "metadata": {"name": "s", "namespace": "n"},
        "spec": {"type": "LoadBalancer", "externalIPs": ["198.51.100.7"]},
        "status": {"loadBalancer": {"ingress": [{"hostname": "lb.example.org"}, {"ip": "fd05::7"}]}},
    });
    assert_eq!(read::<PartialService>(outside).unwrap().outside, ips(&["198.51.100.7", "fd05::7"]));
    let headless =
        service(json!({"type": "ClusterIP", "clusterIP": "None", "clusterIPs": ["None"]})).unwrap();
    assert!(headless.ips.is_empty() && headless.external.is_none());
    let external = service(json!({"type": "ExternalName", "externalName": "example.org"})).unwrap();
    assert_eq!(external.external, Some("example.org".parse().unwrap()));
}

#[test]
fn only_ready_endpoints_of_a_slice_are_read() {
    let endpoints = json!([
        {"addresses": ["10.0.0.1"], "nodeName": "edge1", "conditions": {"ready": true}},
        {"addresses": ["10.0.0.2"], "nodeName": "edge2", "conditions": {"ready": false}},
        {"addresses": ["10.0.0.3", "10.0.0.4"]},
    ]);
    let meta =
        json!({"name": "s-1", "namespace": "n", "labels": {"kubernetes.io/service-name": "s", "other": "x"}});
    let kept = read::<PartialEndpointSlice>(
        json!({"metadata": meta, "endpoints": endpoints, "ports": [{"name": "", "port": 8080}]}),
    );
    let one = ReadyEndpoint { ip: "10.0.0.1".parse().unwrap(), node: Some("edge1".parse().unwrap()) };
    let three = ReadyEndpoint { ip: "10.0.0.3".parse().unwrap(), node: None };
    let ports = [port("", 8080)].into();
    assert_eq!(kept, Some(KubeEndpointSlice { service: "n/s".into(), ports, ready: [one, three].into() }));
    let empty =
        read::<PartialEndpointSlice>(json!({"metadata": meta, "endpoints": null, "ports": null})).unwrap();
    assert!(empty.ready.is_empty() && empty.ports.is_empty());
    assert_eq!(
        read::<PartialEndpointSlice>(json!({"metadata": {"name": "s-1", "namespace": "n"}, "endpoints": []})),
        None
    );
}

#[test]
fn user_services_are_read_line_by_line() {
    let text = "web.shop    edge\n\ndb.shop\tcloud and more\noneword\nx.y nowhere\nplain edge\n";
    let cache: ConfigMap = serde_json::from_value(
        json!({"metadata": {"name": "c"}, "data": {"user_services": text, "services": "a.b edge"}}),
    )
    .unwrap();
    let expected = [("shop/web".to_owned(), ServiceSide::Edge), ("shop/db".to_owned(), ServiceSide::Cloud)];
    assert_eq!(sides(&cache), HashMap::from(expected));
    assert!(sides(&ConfigMap::default()).is_empty());
}

#[test]
fn an_invalid_port_is_skipped_and_the_rest_of_the_slice_is_read() {
    let meta = json!({"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}});
    let ports = json!([{"port": 70000}, {"port": -1}, {"port": 0}, {"name": "http", "port": 80}]);
    let slice = json!({"metadata": meta, "endpoints": [{"addresses": ["10.0.0.7"]}], "ports": ports});
    let facts = read::<PartialEndpointSlice>(slice).unwrap();
    let numbers: Vec<_> = facts.ports.iter().map(|port| port.number).collect();
    assert_eq!((numbers, facts.ready.len()), (vec![80], 1));
}

#[test]
fn a_slice_of_type_fqdn_is_ignored() {
    let meta = json!({"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}});
    let of_type = |kind: &str| {
        let endpoints = json!([{"addresses": ["127.0.0.1"], "nodeName": "node1"}]);
        read::<PartialEndpointSlice>(
            json!({"metadata": meta, "addressType": kind, "endpoints": endpoints, "ports": []}),
        )
    };
    assert!(of_type("IPv4").is_some());
    assert!(of_type("FQDN").is_none());
}
