//! Kubernetes: servers share a ConfigMap, and find each other by the endpoints of their Service.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap as Object;
use serde_json::json;

use tunnel_base::drain::{Drain, Drained};
use tunnel_base::stores::RecordStore as _;
use tunnel_kube::cluster::Cluster;
use tunnel_kube::configmap::{ConfigMapParams, ConfigMapRecords};
use tunnel_kube::endpoint_watch::EndpointWatch;

use crate::kubernetes::{Kubernetes, NAMESPACE, SERVICE};
use crate::parts::free_port;
use crate::process::{TIMEOUT, run, send_request};
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

/// Lines that users and other programs have written.
const FOREIGN: &str = "# by hand\n127.0.0.1 localhost\n192.0.2.7    old-style\n\
    #CustomStart\n10.0.0.1    ours?\n10.0.0.9    theirs\n#CustomEnd\n10.0.0.1 node-of-another-form\nno end";

#[test]
fn concurrent_writes_of_many_nodes_lose_no_line_and_keep_foreign_ones() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    kubernetes.apply::<Object>(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "nodes", "labels": {"a": "b"}},
        "data": {"hosts": FOREIGN, "other": "kept"},
    }));
    let ours = |server: u8, node: usize| format!("10.0.0.{server}    node-{node}-of-pod-{server}");
    let race = |server: u8| {
        let mut map = server_at(&kubernetes, IpAddr::from([10, 0, 0, server]), "nodes");
        async move {
            let mut nodes = BTreeSet::new();
            // Nodes connect and disconnect: 10 more in each turn, then the odd ones leave.
            for turn in 0..NODES / 10 {
                nodes.extend((turn * 10..turn * 10 + 10).map(|node| format!("node-{node}-of-pod-{server}")));
                map.write(&nodes).await.unwrap();
            }
            for turn in 0..NODES / 10 {
                for node in (turn * 10..turn * 10 + 10).filter(|node| node % 2 == 1) {
                    nodes.remove(&format!("node-{node}-of-pod-{server}"));
                }
                map.write(&nodes).await.unwrap();
            }
            map
        }
    };
    let (mut one, _two) = kubernetes.run(async { tokio::join!(race(1), race(2)) });
    assert!(kubernetes.conflicts() > 10, "the servers' writes conflict");

    let text = kubernetes.hosts("nodes").unwrap();
    assert!(text.ends_with(FOREIGN), "{text}");
    let mut lines: Vec<_> = text.strip_suffix(FOREIGN).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    let mut expected: Vec<_> =
        (1..=2).flat_map(|server| (0..NODES).step_by(2).map(move |node| ours(server, node))).collect();
    expected.sort();
    assert_eq!(lines, expected);

    kubernetes.run(one.withdraw()).unwrap();
    let text = kubernetes.hosts("nodes").unwrap();
    let left: Vec<_> = (0..NODES).step_by(2).map(|node| ours(2, node)).collect();
    assert_eq!(text.strip_suffix(FOREIGN).unwrap().lines().count(), left.len());
    assert!(left.iter().all(|line| text.contains(line)));
}

#[test]
fn lines_of_a_killed_server_are_removed_with_its_endpoint() {
    let Some(mut kubernetes) = Kubernetes::start() else { return };
    let (one, two) = (TestDir::new(), TestDir::new());
    let server = |place: &TestDir, ip: &str| {
        let tables = format!(
            "[server.dns]\npublish = \"configmap\"\nconfigmap = \"tunnel-nodes\"\n\
             [server.peers]\nkubernetes_service = \"{SERVICE}\"\n"
        );
        let kubeconfig = kubernetes.kubeconfig();
        let k = format!("--kubeconfig={}", kubeconfig.display());
        ServerProcess::start_as(place, &tables, &[("POD_IP", ip), ("POD_NAMESPACE", NAMESPACE)], &[&k])
    };
    let (mut first, mut second) = (server(&one, "10.0.0.1"), server(&two, "10.0.0.2"));
    kubernetes.endpoints("tunnel-cloud-x", &[("10.0.0.1", true), ("10.0.0.2", true)]);
    let _edges = (
        Edge::start(&one, &format!("127.0.0.1:{}", first.grpc)),
        Edge::start(&two, &format!("127.0.0.1:{}", second.grpc)),
    );
    first.wait_until_published(1);
    second.wait_until_published(1);
    let lines = |kubernetes: &Kubernetes| -> BTreeSet<String> {
        kubernetes.hosts("tunnel-nodes").unwrap().lines().map(str::to_owned).collect()
    };
    let set = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(lines(&kubernetes), set(&["10.0.0.1    node1", "10.0.0.2    node1"]));

    first.process.kill();
    kubernetes.endpoints("tunnel-cloud-x", &[("10.0.0.1", false), ("10.0.0.2", true)]);
    kubernetes.stop();
    second.wait_for_condition("dns: ConfigMap tunnel-nodes: kube-apiserver");
    second.wait_for_node("node1");
    kubernetes.restart();
    // The unreachable server is reported while it is listed.
    wait_until("the publisher reports no problem", TIMEOUT, || {
        second.process.assert_running();
        send_request(second.log_port, "GET", "/readyz", "")
            .is_some_and(|answer| answer.contains(" 200 ") && !answer.contains("dns:"))
    });
    wait_until("the killed server's line is removed", Duration::from_secs(60), || {
        second.process.assert_running();
        lines(&kubernetes) == set(&["10.0.0.2    node1"])
    });
    second.process.terminate();
    assert!(second.process.wait_for_exit(TIMEOUT).success());
    assert_eq!(lines(&kubernetes), set(&[]), "lines are withdrawn before the exit");
}

/// SuperEdge's servers need neither a CA for each other, nor the right to list endpoints.
#[test]
fn a_server_with_superedges_config_reports_why_it_cannot_query_its_peers() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    let place = TestDir::new();
    let start = |name: &str, kubeconfig: &Path| {
        let [grpc, connect, log_port] = [(); 3].map(|()| free_port());
        let files = &place.files;
        let config = format!(
            "[mode.cloud.stream.server]\ngrpcport = {grpc}\nlogport = {log_port}\ncert = \"{}\"\nkey = \"{}\"\n\
             tokenfile = \"{}\"\n[mode.cloud.stream.dns]\nservice = \"{SERVICE}\"\n[mode.cloud.ssh]\nport = {connect}\n",
            files.cert.display(),
            files.key.display(),
            place.path().join("token").display(),
        );
        let k = format!("--kubeconfig={}", kubeconfig.display());
        let env = [("POD_IP", "10.0.0.1"), ("POD_NAMESPACE", NAMESPACE)];
        let process = place.tunnel(("server", name), &config, &env, &[&k]);
        ServerProcess { process, grpc, connect, metrics: 0, log_port }
    };
    let refused = |cloud: &ServerProcess| {
        let args = format!("-X connect -x 127.0.0.1:{} node1 22", cloud.connect);
        run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT).stderr
    };
    let mut server = start("cloud", &kubernetes.kubeconfig());
    server.wait_until_healthy();
    kubernetes.endpoints("tunnel-cloud-x", &[("10.0.0.1", true), ("10.0.0.2", true)]);
    server.wait_for_condition(
        "peer_discovery: cannot link to the other servers; give all servers a cert from one CA",
    );
    let refusal = refused(&server);
    assert!(refusal.contains("node node1 is not connected; this server did not ask the others, because it cannot link to them (peer_ca)"), "{refusal}");
    kubernetes.endpoints("tunnel-cloud-x", &[("10.0.0.1", true)]);
    server.wait_until_healthy();

    let mut stranger = start("stranger", &kubernetes.kubeconfig_as("stranger"));
    stranger.wait_for_condition("peer_discovery: the endpoints of Service tunnel-cloud are not known: ");
    let refusal = refused(&stranger);
    assert!(refusal.contains("because Kubernetes does not list them"), "{refusal}");
}

#[test]
fn peers_are_found_by_the_endpoints_of_their_service() {
    let Some(mut kubernetes) = Kubernetes::start() else { return };
    kubernetes.endpoints("one", &[("10.0.0.1", true), ("10.0.0.2", true), ("10.0.0.3", false)]);
    let own = "10.0.0.1:9000".parse().unwrap();
    let watch = EndpointWatch::new(cluster(&kubernetes), SERVICE.to_owned(), own);
    let peers = watch.peers.subscribe();
    let endpoints = watch.endpoints.subscribe();
    let drain = Drain::new();
    kubernetes.run(async { drain.spawn(tracing::Span::none(), watch.follow(drain.clone())) });
    let are = |others: &[&str]| {
        let others: Vec<SocketAddr> = others.iter().map(|at| at.parse().unwrap()).collect();
        wait_until(&format!("peers are {others:?}"), TIMEOUT, || *peers.borrow() == others);
    };
    are(&["10.0.0.2:9000", "10.0.0.3:9000"]);
    let found = endpoints.borrow().clone().unwrap();
    assert!(found.ready.contains(&own.ip()) && found.unready.contains(&"10.0.0.3".parse().unwrap()));
    kubernetes.endpoints("two", &[("10.0.0.4", true)]);
    are(&["10.0.0.2:9000", "10.0.0.3:9000", "10.0.0.4:9000"]);
    kubernetes.endpoints("one", &[("10.0.0.1", true), ("10.0.0.3", true)]);
    are(&["10.0.0.3:9000", "10.0.0.4:9000"]);
    kubernetes.stop();
    kubernetes.restart();
    assert_eq!(peers.borrow().len(), 2, "the last known peers remain while kube-apiserver is unreachable");
    kubernetes.delete_slice("two");
    are(&["10.0.0.3:9000"]);
    let drained = kubernetes.run(drain.finish(TIMEOUT, std::future::pending()));
    assert_eq!(drained, Drained::Finished);
}

fn server_at(kubernetes: &Kubernetes, server: IpAddr, name: &str) -> ConfigMapRecords {
    ConfigMapRecords::new(ConfigMapParams {
        cluster: cluster(kubernetes),
        name: name.to_owned(),
        server,
        endpoints: None,
        liveness: Box::new(|_| Box::pin(std::future::ready(false))),
    })
}

fn cluster(kubernetes: &Kubernetes) -> Cluster {
    Cluster { kubeconfig: Some(kubernetes.kubeconfig()), namespace: Some(NAMESPACE.to_owned()) }
}

/// Number of nodes of each server.
const NODES: usize = 400;
