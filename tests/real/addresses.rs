//! Addresses that Kubernetes reports: clients reach nodes, pods and Services by their Kubernetes names and addresses.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use crate::kubernetes::{Kubernetes, NAMESPACE};
use crate::process::TIMEOUT;
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

#[test]
fn nodes_pods_and_services_are_reached_by_their_kubernetes_names() {
    let Some(mut kubernetes) = Kubernetes::start() else { return };
    let (own, pod) = (own_address(), IpAddr::from([127, 5, 5, 5]));
    let (at_node, at_server) = (echo(own), echo(pod));
    kubernetes.apply::<ServiceAccount>(&object("v1", "ServiceAccount", "default", json!({})));
    let mut node = object("v1", "Node", "node1", json!({}));
    node["metadata"]["labels"] = json!({"superedge.io/node-edge": "enable"});
    kubernetes.apply_everywhere::<Node>(&node);
    let addresses = json!([{"type": "InternalIP", "address": own}, {"type": "Hostname", "address": "other"}]);
    kubernetes.set_node_status("node1", &json!({"addresses": addresses}));
    let spec = json!({"spec": {"nodeName": "node1", "containers": [{"name": "c", "image": "none"}]}});
    kubernetes.apply::<Pod>(&object("v1", "Pod", "web", spec));
    let running = json!({"phase": "Running", "podIP": pod, "podIPs": [{"ip": pod}]});
    kubernetes.set_pod_status("web", &running);
    let spec = json!({"spec": {"clusterIP": CLUSTER_IP, "ports": [{"name": "http", "port": 80}]}});
    kubernetes.apply::<Service>(&object("v1", "Service", "shop", spec));
    slice(&kubernetes, at_node, true);

    let place = TestDir::new();
    let (more, k) = ("[server.addresses]\nkubernetes = true\n", kubernetes.kubeconfig());
    let env = [("POD_NAMESPACE", NAMESPACE)];
    let mut cloud = ServerProcess::start_as(&place, more, &env, &[&format!("--kubeconfig={}", k.display())]);
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_for_node("node1");
    cloud.wait_until_healthy();
    let by_service = |name: &str| format!("{name}:80");
    let targets = [
        format!("node1:{}", at_node.port()),
        at_node.to_string(),
        at_server.to_string(),
        by_service(CLUSTER_IP),
        by_service(&format!("shop.{NAMESPACE}")),
        by_service(&format!("shop.{NAMESPACE}.svc")),
        by_service(&format!("shop.{NAMESPACE}.svc.cluster.local")),
    ];
    for target in &targets {
        assert_eq!(connect(&cloud, target), "200", "{target}");
    }
    let status = |target: &str| connect(&cloud, target);
    assert_eq!(status(&format!("shop.{NAMESPACE}:81")), "502");
    assert_eq!(status(&format!("none.{NAMESPACE}.svc:80")), "502");
    assert_eq!(status("10.255.255.1:80"), "421");

    kubernetes.stop();
    for target in &targets {
        assert_eq!(status(target), "200", "{target}: known addresses remain");
    }
    kubernetes.restart();
    slice(&kubernetes, at_node, false);
    let service = by_service(CLUSTER_IP);
    let becomes = |expected: &str| {
        wait_until(&format!("{service} answers {expected}"), 2 * TIMEOUT, || status(&service) == expected)
    };
    becomes("503");
    slice(&kubernetes, at_node, true);
    becomes("200");
    let by_hand = json!({"data": {"user_services": format!("shop.{NAMESPACE}    cloud\n")}});
    kubernetes.apply::<ConfigMap>(&object("v1", "ConfigMap", "tunnel-cache", by_hand));
    becomes("421");
    // The pod has finished: another pod may have its address now.
    kubernetes.set_pod_status("web", &json!({"phase": "Succeeded"}));
    let pod = at_server.to_string();
    wait_until("the finished pod has no address", TIMEOUT, || status(&pod) == "403");
    cloud.wait_until_healthy();
}

/// Creates or changes the Service's one endpoint, which is ready or not.
fn slice(kubernetes: &Kubernetes, at: SocketAddr, ready: bool) {
    let endpoint = json!({"addresses": [at.ip()], "conditions": {"ready": ready}, "nodeName": "node1"});
    let mut slice = object(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        "shop-1",
        json!({"addressType": "IPv4", "endpoints": [endpoint], "ports": [{"name": "http", "port": at.port()}]}),
    );
    slice["metadata"]["labels"] = json!({"kubernetes.io/service-name": "shop"});
    kubernetes.apply::<EndpointSlice>(&slice);
}

fn object(version: &str, kind: &str, name: &str, more: Value) -> Value {
    let mut object = more;
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    object["metadata"] = json!({"name": name});
    object
}

/// Returns the status of a CONNECT request. If it is 200, checks first that the sent data comes back.
fn connect(cloud: &ServerProcess, target: impl AsRef<str> + Debug) -> String {
    let target = target.as_ref();
    let mut client = TcpStream::connect(("127.0.0.1", cloud.connect)).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(client, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let status = head.split(' ').nth(1).unwrap().to_owned();
    if status == "200" {
        client.write_all(b"there and back").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut back = String::new();
        client.read_to_string(&mut back).unwrap();
        assert_eq!(back, "there and back");
    }
    status
}

fn echo(at: IpAddr) -> SocketAddr {
    let listener = TcpListener::bind((at, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut back) = client.map(|client| (client.try_clone().unwrap(), client)).unwrap();
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut client, &mut back);
                let _ = back.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    at
}

/// Returns an address of this machine that may be an endpoint's: Kubernetes refuses loopback addresses.
pub(crate) fn own_address() -> IpAddr {
    let all = if_addrs::get_if_addrs().unwrap();
    let fit = |ip: &IpAddr| matches!(ip, IpAddr::V4(v4) if !v4.is_loopback() && !v4.is_link_local());
    all.iter().map(if_addrs::Interface::ip).find(fit).expect("an interface other than loopback")
}

const CLUSTER_IP: &str = "10.96.0.77";

/// Not run in CI: `cargo test --test real -- --ignored --nocapture memory_of`.
#[test]
#[ignore = "makes 10,000 pods, which takes minutes"]
fn the_memory_of_a_server_that_watches_ten_thousand_pods_is_bounded() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    kubernetes.apply::<ServiceAccount>(&object("v1", "ServiceAccount", "default", json!({})));
    kubernetes.run(kubernetes.fill(PODS, NODES, SERVICES));
    let memory = |more: &str| {
        let (place, k) = (TestDir::new(), kubernetes.kubeconfig());
        let mut cloud = ServerProcess::start_as(
            &place,
            more,
            &[("POD_NAMESPACE", NAMESPACE)],
            &[&format!("--kubeconfig={}", k.display())],
        );
        wait_until("all objects are known", 10 * TIMEOUT, || {
            cloud.process.assert_running();
            crate::process::send_request(cloud.log_port, "GET", "/readyz", "")
                .is_some_and(|answer| answer.ends_with("\r\n\r\nok\n"))
        });
        if !more.is_empty() {
            let last = format!("10.128.{}.{}:80", (PODS - 1) / 256, (PODS - 1) % 256);
            assert_eq!(connect(&cloud, &last), "502", "its node is known, and has no edge");
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", cloud.process.id())).unwrap();
        ["VmRSS:", "VmHWM:"].map(|line| {
            let line = status.lines().find(|l| l.starts_with(line)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        })
    };
    let (without, with) = (memory(""), memory("[server.addresses]\nkubernetes = true\n"));
    let more = [with[0] - without[0], with[1] - without[1]];
    let _ = writeln!(
        std::io::stderr(),
        "KiB resident, now and at most: {without:?} without, {with:?} with {PODS} pods, {NODES} nodes, {SERVICES} Services: {more:?} more"
    );
    assert!(more.iter().all(|kib| *kib < 20 * 1024), "{more:?} KiB");
}

const PODS: usize = 10_000;
const NODES: usize = 1_000;
const SERVICES: usize = 1_000;
