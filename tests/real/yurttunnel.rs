//! Features for YurtTunnel's users: ports from a ConfigMap, and node names that a single server writes.

mod led;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::SystemTime;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Service, ServicePort};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};
use tokio::sync::watch::Sender;
use tunnel_base::drain::{Drain, Drained};
use tunnel_kube::cluster::Cluster;
use tunnel_kube::reconcile::node_names::{NamesReconcilerParams, NodeNamesReconciler};

use crate::addresses::own_address;
use crate::held::HoldingProxy;
use crate::kubernetes::{Kubernetes, NAMESPACE};
use crate::parts::free_port;
use crate::process::TIMEOUT;
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

const SERVICE: &str = "x-tunnel-server-internal-svc";
const PORTS: &str = "yurt-tunnel-server-cfg";

#[test]
fn ports_of_the_configmap_are_redirected_without_aborted_sessions() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    grant_port_rights(&kubernetes);
    let own = own_address();
    let (at_node, go) = web(own, true);
    let (on_loopback, _) = web([127, 0, 0, 1].into(), false);
    node(&kubernetes, "node1", &json!({"openyurt.io/is-edge-worker": "true"}), own);
    service(&kubernetes, true);
    let (place, front) = (TestDir::new(), free_port());
    let mut cloud = server(&kubernetes, &place, front);
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_for_node("node1");
    cloud.wait_until_healthy();
    let ports = || managed_ports(&kubernetes);
    assert_eq!(ports(), BTreeMap::new());
    let name = |at: SocketAddr| format!("node1:{}", at.port());
    let mut slow = send_get(front, &name(at_node), "/slow");
    assert_eq!(reads(&mut slow, 2), "ab");

    let started = SystemTime::now();
    map(
        &kubernetes,
        &json!({"http-proxy-ports": format!("{}, x", at_node.port()), "https-proxy-ports": "9443"}),
    );
    wait_until("its port is redirected here", TIMEOUT, || ports() == [(at_node.port(), front)].into());
    let _ = writeln!(std::io::stderr(), "redirected here after {:?}", started.elapsed().unwrap_or_default());
    cloud.wait_for_condition("http-proxy-ports: \"x\": expected ports from 1 to 65535");
    cloud.wait_for_condition("https-proxy-ports have no target");
    for host in [name(at_node), at_node.to_string()] {
        assert_eq!(reads(&mut send_get(front, &host, "/"), 2), "ok", "{host}");
    }

    assert!(
        answer(front, &name(on_loopback)).starts_with("HTTP/1.1 502 "),
        "no program listens at its address"
    );
    map(
        &kubernetes,
        &json!({
            "dnat-ports-pair": format!("{}=10264", at_node.port()),
            "http-proxy-ports": "9052",
            "localhost-proxy-ports": on_loopback.port().to_string(),
        }),
    );
    wait_until("both ports are redirected here", TIMEOUT, || {
        ports() == [(at_node.port(), front), (9052, front)].into()
    });
    cloud.wait_until_healthy();
    assert_eq!(reads(&mut send_get(front, &name(on_loopback), "/"), 2), "ok");

    map(&kubernetes, &json!({"http-proxy-ports": format!("{},9053", cloud.grpc)}));
    wait_until("the server's own port is not redirected", TIMEOUT, || ports() == [(9053, front)].into());
    cloud.wait_for_condition(&format!(
        "http-proxy-ports: \"{}\": the servers listen on that port",
        cloud.grpc
    ));

    service(&kubernetes, false);
    map(&kubernetes, &json!({"http-proxy-ports": "9054"}));
    cloud.wait_for_condition("it has no annotation tunnel.cloud.io/ports: managed");
    assert_eq!(ports(), [(9053, front)].into());
    service(&kubernetes, true);
    kubernetes.delete::<ConfigMap>(PORTS);
    wait_until("no port is redirected without the ConfigMap", TIMEOUT, || ports().is_empty());
    cloud.wait_until_healthy();
    let base = kubernetes.object::<Service>(SERVICE).unwrap().spec.unwrap().ports.unwrap();
    assert_eq!(base.iter().map(|port| port.port).collect::<Vec<_>>(), [10250, 10255], "foreign ports remain");

    go.send(()).unwrap();
    assert_eq!(reads(&mut slow, 2), "cd", "the request was in progress all the time");
}

/// The holder of the Lease is cut off during a write, and that write arrives after one of its successor.
#[test]
fn node_names_are_written_only_by_the_holder_and_late_writes_are_refused() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    service(&kubernetes, true);
    let ip = kubernetes.object::<Service>(SERVICE).unwrap().spec.unwrap().cluster_ip.unwrap();
    let edge = json!({"openyurt.io/is-edge-worker": "true"});
    node(&kubernetes, "a1", &edge, [10, 0, 0, 1].into());
    node(&kubernetes, "edge-a1", &json!({}), [10, 0, 0, 2].into());
    let held = HoldingProxy::before(&kubernetes);
    let (first, second) = (Drain::new(), Drain::new());
    let begin = |drain: &Drain, name: &str, kubeconfig| {
        let cluster = Cluster { kubeconfig: Some(kubeconfig), namespace: Some(NAMESPACE.to_owned()) };
        let names = NodeNamesReconciler::new(params(cluster, name), Sender::default(), Box::new(|_| {}));
        kubernetes.run(async { drain.spawn(tracing::Span::none(), names.run(drain.clone())) });
    };
    begin(&first, "first", held.kubeconfig.clone());
    let is = |text: &str, term: &str| {
        wait_until(&format!("term {term} has written {text:?}"), 2 * TIMEOUT, || {
            written(&kubernetes) == Some((text.to_owned(), term.to_owned()))
        });
    };
    is(&format!("10.0.0.2\tedge-a1\n{ip}\ta1\n"), "1");
    node(&kubernetes, "edge-a1", &edge, [10, 0, 0, 2].into());
    is(&format!("{ip}\ta1\n{ip}\tedge-a1\n"), "1");
    kubernetes.delete_everywhere::<Node>("a1");
    is(&format!("{ip}\tedge-a1\n"), "1");

    // Manual changes are reverted, although no Node has changed.
    kubernetes.apply::<ConfigMap>(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "yurt-tunnel-nodes"},
        "data": {"tunnel-nodes": "192.0.2.1\tedge-a1\n192.0.2.1\tforeign\n"},
    }));
    is(&format!("{ip}\tedge-a1\n"), "1");

    held.hold();
    node(&kubernetes, "late", &json!({}), [10, 0, 0, 3].into());
    let late = held.write();
    assert_eq!(holder(&kubernetes).0, "first");
    begin(&second, "second", kubernetes.admin());
    let both = format!("10.0.0.3\tlate\n{ip}\tedge-a1\n");
    is(&both, "2");
    assert_eq!(holder(&kubernetes), ("second".to_owned(), 2));
    assert_eq!(late.release(), 409, "the write is for an outdated version");
    assert_eq!(written(&kubernetes).unwrap().1, "2");

    held.let_go();
    let drained = kubernetes.run(second.finish(TIMEOUT, std::future::pending()));
    assert_eq!(drained, Drained::Finished);
    is(&both, "3");
    assert_eq!(
        holder(&kubernetes),
        ("first".to_owned(), 3),
        "the Lease was released, so its end is not awaited"
    );

    // The ConfigMap has a higher term: the holder of the Lease is outdated, and acquires it again.
    let annotations = json!({"tunnel.cloud.io/lease-transitions": "99"});
    kubernetes.apply::<ConfigMap>(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "yurt-tunnel-nodes", "annotations": annotations},
    }));
    node(&kubernetes, "last", &edge, [10, 0, 0, 4].into());
    is(&format!("10.0.0.3\tlate\n{ip}\tedge-a1\n{ip}\tlast\n"), "100");
    let drained = kubernetes.run(first.finish(TIMEOUT, std::future::pending()));
    assert_eq!(drained, Drained::Finished);
}

fn params(cluster: Cluster, identity: &str) -> NamesReconcilerParams {
    NamesReconcilerParams {
        cluster,
        namespace: NAMESPACE.to_owned(),
        configmap: "yurt-tunnel-nodes".to_owned(),
        key: "tunnel-nodes".to_owned(),
        lease: "tunnel-node-names".to_owned(),
        identity: identity.to_owned(),
        edges: ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned()),
        names: Vec::new(),
        service: SERVICE.to_owned(),
        holders: None,
    }
}

/// Returns the text of the ConfigMap, and the term that wrote it.
fn written(kubernetes: &Kubernetes) -> Option<(String, String)> {
    let map = kubernetes.object::<ConfigMap>("yurt-tunnel-nodes")?;
    let term = map.metadata.annotations?.remove("tunnel.cloud.io/lease-transitions")?;
    Some((map.data?.remove("tunnel-nodes")?, term))
}

fn holder(kubernetes: &Kubernetes) -> (String, i32) {
    let spec = kubernetes.object::<Lease>("tunnel-node-names").unwrap().spec.unwrap();
    (spec.holder_identity.unwrap(), spec.lease_transitions.unwrap())
}

/// Starts a server whose port `front` maps to every port of every node.
fn server(kubernetes: &Kubernetes, place: &TestDir, front: u16) -> ServerProcess {
    let more = format!(
        "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{front}\" = \"host\" }}\n\
         [server.node_ports]\nnamespace = \"{NAMESPACE}\"\nservice = \"{SERVICE}\"\n\
         [server.addresses]\nkubernetes = true\n"
    );
    let k = format!("--kubeconfig={}", kubernetes.kubeconfig().display());
    ServerProcess::start_as(place, &more, &[("POD_NAMESPACE", NAMESPACE)], &[&k])
}

/// Returns the managed ports of the Service, and the target port of each.
fn managed_ports(kubernetes: &Kubernetes) -> BTreeMap<u16, u16> {
    let ports = kubernetes.object::<Service>(SERVICE).unwrap().spec.unwrap().ports.unwrap();
    let number = |port: &ServicePort| match port.target_port {
        Some(IntOrString::Int(target)) => (u16::try_from(port.port).unwrap(), u16::try_from(target).unwrap()),
        _ => panic!("{port:?}"),
    };
    ports.iter().filter(|port| port.name.as_ref().unwrap().starts_with("dnat-")).map(number).collect()
}

fn map(kubernetes: &Kubernetes, data: &Value) {
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PORTS}, "data": data});
    kubernetes.apply::<ConfigMap>(&map);
}

fn service(kubernetes: &Kubernetes, is_ours: bool) {
    let annotations = if is_ours { json!({"tunnel.cloud.io/ports": "managed"}) } else { json!({}) };
    let port = |name: &str, port: u16, target: u16| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": target});
    kubernetes.apply::<Service>(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE, "annotations": annotations},
        "spec": {"selector": {"app": "tunnel-cloud"}, "ports": [port("https", 10250, 10263), port("http", 10255, 10264)]},
    }));
}

fn node(kubernetes: &Kubernetes, name: &str, labels: &Value, ip: IpAddr) {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    kubernetes.apply_everywhere::<Node>(&node);
    kubernetes.set_node_status(name, &json!({"addresses": [{"type": "InternalIP", "address": ip}]}));
}

/// Grants the permissions that the documentation lists.
fn grant_port_rights(kubernetes: &Kubernetes) {
    let rbac = "rbac.authorization.k8s.io";
    let rule = |group: &str, kind: &str, name: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [kind], "resourceNames": [name], "verbs": verbs});
    let rules = [
        rule("", "configmaps", PORTS, &["get", "list", "watch"]),
        rule("", "services", SERVICE, &["get", "update"]),
    ];
    kubernetes.apply::<Role>(&json!({
        "apiVersion": format!("{rbac}/v1"), "kind": "Role", "metadata": {"name": "ports"}, "rules": rules,
    }));
    kubernetes.apply::<RoleBinding>(&json!({
        "apiVersion": format!("{rbac}/v1"), "kind": "RoleBinding", "metadata": {"name": "ports"},
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "ports"},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": "pod"}],
    }));
}

/// Starts a web server that answers `ok`, and to `/slow` `ab`, followed by `cd` once the sender is used.
fn web(ip: IpAddr, slowly: bool) -> (SocketAddr, std::sync::mpsc::Sender<()>) {
    let listener = TcpListener::bind((ip, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    let (go, released) = channel();
    thread::spawn(move || {
        let mut released: Option<Receiver<()>> = Some(released).filter(|_| slowly);
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let slow = head(&mut client).starts_with("GET /slow ");
            let (length, body) = if slow { (4, "ab") } else { (2, "ok") };
            write!(client, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
            if let Some(released) = released.take_if(|_| slow) {
                thread::spawn(move || released.recv().is_ok() && client.write_all(b"cd").is_ok());
            }
        }
    });
    (at, go)
}

/// Sends a request, and checks that it is answered with 200. The body is still unread.
fn send_get(front: u16, host: &str, path: &str) -> TcpStream {
    let mut client = TcpStream::connect(("127.0.0.1", front)).unwrap();
    client.set_read_timeout(Some(2 * TIMEOUT)).unwrap();
    write!(client, "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let answer = head(&mut client);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{host}: {answer}");
    client
}

/// Returns the head of any response.
fn answer(front: u16, host: &str) -> String {
    let mut client = TcpStream::connect(("127.0.0.1", front)).unwrap();
    client.set_read_timeout(Some(2 * TIMEOUT)).unwrap();
    write!(client, "GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    head(&mut client)
}

fn head(stream: &mut TcpStream) -> String {
    reads_until(stream, |read| read.ends_with(b"\r\n\r\n"))
}

fn reads(stream: &mut TcpStream, bytes: usize) -> String {
    reads_until(stream, |read| read.len() == bytes)
}

fn reads_until(stream: &mut TcpStream, ends: impl Fn(&[u8]) -> bool) -> String {
    let mut read = Vec::new();
    while !ends(&read) {
        let mut byte = [0];
        if stream.read(&mut byte).unwrap() == 0 {
            break;
        }
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}
