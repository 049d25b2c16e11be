//! Real kubelets with certificates signed by the cluster, which let it authorize their clients. They are reached
//! through a port of the server that presents a certificate to them, and by their nodes' own addresses.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::certificates::Authority;
use crate::cluster::{Cluster, Way, kubelet_client, target_ca};
use crate::intercept::LISTENER;
use crate::kubectl::{EchoCommand, Kubectl, assert_kubectl_reports};
use crate::network::{OTHER_SERVER, SERVER, address};
use crate::parts::{are_installed, cached_program};
use crate::process::{Running, TIMEOUT};
use crate::prometheus::{prometheus, query, targets};
use crate::tunnel::TOKEN;
use crate::wait::wait_until;

#[test]
fn clients_reach_kubelets_with_the_certificate_issued_for_the_server() {
    let Some(cluster) = Cluster::signed(Way::Shown) else { return };
    let Some(metrics) = MetricsServer::built() else { return };
    let _approver = cluster.approver();
    let mut pod = cluster.server(SERVER);
    let _edges = [1, 2].map(|number| cluster.network.edge(number, SERVER, ""));
    // Others must approve the kubelets' requests, and a request for a log reports what is missing.
    let requests = cluster.sh("kubectl get csr --no-headers");
    for (requester, condition) in [("system:node:node", "Pending"), ("tunnel-cloud", "Approved,Issued")] {
        let lines: Vec<_> = requests.lines().filter(|line| line.contains(requester)).collect();
        assert!(lines.len() >= 2 && lines.iter().all(|line| line.ends_with(condition)), "{requests}");
    }
    assert_kubectl_reports(&cluster, "kubectl get csr");
    cluster.approve_kubelets();
    let metrics = metrics.by_name(&cluster);
    let kubectl = Kubectl { cluster: &cluster, pod: "busy", web_sockets: true };
    kubectl.exec();
    kubectl.exec_with_a_terminal();
    kubectl.attach();
    kubectl.cp();
    kubectl.port_forward();
    let other = Kubectl { cluster: &cluster, pod: "busy-too", web_sockets: false };
    other.exec();
    assert!(cluster.sh("kubectl logs busy-too --tail=1").starts_with("line "));
    certificate_is_presented_only_for_authorized_clients(&cluster);
    metrics.wait_for_both_nodes(&cluster);

    let (believed, theirs) = (target_ca(&cluster.network.place), cluster.network.place.files.ca.clone());
    std::fs::write(&believed, Authority::new().0.cert()).unwrap();
    pod.hang_up();
    // A log request could reuse an existing session.
    wait_until("the error contains a hint", TIMEOUT, || {
        cluster.network.try_sh("kubectl exec busy -- true").stderr.contains("target_ca of [server.https]")
    });
    pod.wait_for_log(
        "TLS with the target failed: its certificate was signed by a CA that this end does not trust",
    );
    std::fs::copy(&theirs, &believed).unwrap();
    pod.hang_up();
    is_reached(&cluster);
    drop(pod);
    let tables = Way::Shown.tables(&cluster.network.place);
    let unproved = tables.replace(&format!("target_ca = {believed:?}"), "target_insecure_skip_verify = true");
    assert_ne!(unproved, tables);
    let pod = cluster.server_with(SERVER, &unproved);
    pod.assert_logged("targets are not verified");
    is_reached(&cluster);
}

/// A kubelet answers 401 to a client without a certificate, and 403 to kube-apiserver's own, which has no permissions
/// there.
fn certificate_is_presented_only_for_authorized_clients(cluster: &Cluster) {
    let dir = cluster.network.place.path().display();
    let stranger = cluster.network.place.authority.0.client("somebody").unwrap();
    let place = cluster.network.place.path();
    stranger.write(&place.join("somebody.crt"), &place.join("somebody.key")).unwrap();
    let get_pods = |way: &str, identity: &str| {
        let shown = if identity.is_empty() {
            String::new()
        } else {
            format!("--cert {dir}/{identity}.crt --key {dir}/{identity}.key")
        };
        let line = format!("curl -sk -m 30 {way} {shown} -w ' %{{http_code}}' https://node1:10250/pods");
        cluster.network.try_sh(&line)
    };
    let through = format!("-p -x http://{SERVER}:22");
    for (way, identity, status) in [
        (through.as_str(), "", "401"),
        (&through, "kubelet-client", "403"),
        ("", "somebody", "403"),
        ("", "kubelet-client", "200"),
    ] {
        let output = get_pods(way, identity);
        assert!(output.stdout.ends_with(&format!(" {status}")), "{way} {identity}: {output:?}");
    }
    assert!(!get_pods("", "").status.success(), "clients without a certificate are refused there");
}

#[test]
fn clients_reach_kubelets_by_address_through_intercepted_connections() {
    if !are_installed(&["prometheus", "openssl"]) {
        return;
    }
    let Some(cluster) = Cluster::signed(Way::Intercepted) else { return };
    let Some(metrics) = MetricsServer::built() else { return };
    cluster.approve_kubelets();
    let (network, ips) = (&cluster.network, [address(1), "fd77:2::2".to_owned()]);
    let mut pod = cluster.server(SERVER);
    let mut other = cluster.server(OTHER_SERVER);
    // A node without an edge, like those of the cloud, is dialled directly; a node at the edge is not reachable.
    network.edges[1].sh("nft flush chain inet shut input");
    cluster.sh("kubectl exec busy-too -- true");
    network.edges[1].shut("wan");
    let lost = network.try_sh("timeout 3 kubectl exec busy -- true; timeout 3 kubectl exec busy-too -- true");
    assert_eq!(lost.status.code(), Some(124), "{lost:?}");
    let _edges = [network.edge_of(1, &[OTHER_SERVER, SERVER], ""), network.edge(2, SERVER, "")];
    for ip in &ips {
        is_intercepted(&cluster, ip, true);
    }
    assert!(!pod.log().contains(LISTENER), "{}", pod.log());
    let metrics = metrics.by_address(&cluster);
    let scraped = [format!("{}:10250", ips[0]), format!("[{}]:10250", ips[1])];
    let mut job = targets(&scraped);
    let ca = network.place.files.ca.display().to_string();
    let more = json!({"scheme": "https", "metrics_path": "/metrics/resource", "tls_config": {"ca_file": ca},
        "authorization": {"credentials": "admin"}, "scrape_interval": "5s", "scrape_timeout": "5s"});
    job.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let _prometheus = prometheus(network, &[("kubelets", job)]);

    for (pod, web_sockets) in [("busy", true), ("busy-too", false)] {
        let kubectl = Kubectl { cluster: &cluster, pod, web_sockets };
        kubectl.exec();
        kubectl.attach();
        kubectl.cp();
        kubectl.port_forward();
        assert!(cluster.sh(&format!("kubectl logs {pod} --tail=1")).starts_with("line "));
    }
    each_kubelet_proves_its_node_to_the_client(&cluster, &ips);
    for ip in &ips {
        a_client_without_server_name_runs_a_command(&cluster, ip);
    }
    for instance in &scraped {
        wait_until(&format!("{instance} is scraped"), 3 * TIMEOUT, || {
            let up = query(network, &format!("up{{instance=\"{instance}\"}}"));
            up.iter().any(|series| series["value"][1] == "1")
        });
    }
    metrics.wait_for_both_nodes(&cluster);
    for node in ["node1", "node2"] {
        let of = |line: &&str| line.contains(LISTENER) && line.contains(&format!("node={node} "));
        assert!(pod.log().lines().any(|line| of(&line)), "{node}: {}", pod.log());
    }

    a_claim_of_another_nodes_address_is_rejected(&cluster, &mut pod);
    let mut talk = EchoCommand::start(&cluster);
    talk.survives_a_cut_line(&cluster);
    other.kill();
    talk.assert_echo("orphaned");
    talk.wait_for_exit();
}

/// An address of two Nodes belongs to neither, until a more trusted source assigns it.
fn a_claim_of_another_nodes_address_is_rejected(cluster: &Cluster, pod: &mut Running) {
    let (ip, place) = (address(1), &cluster.network.place);
    cluster.apply("thief", &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "thief"}}));
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": ip}]}});
    cluster.sh(&format!("kubectl patch node thief --subresource=status --type=merge -p '{status}'"));
    is_intercepted(cluster, &ip, false);
    pod.wait_for_log_of(&ip, "address claim rejected");
    std::fs::write(place.path().join("token"), format!("default:{TOKEN}\nnode1:{TOKEN} ip={ip}\n")).unwrap();
    pod.hang_up();
    is_intercepted(cluster, &ip, true);
    is_reached(cluster);
}

fn is_intercepted(cluster: &Cluster, ip: &str, intercepted: bool) {
    let set = if ip.contains(':') { "nodes6" } else { "nodes4" };
    wait_until(&format!("{ip} is intercepted: {intercepted}"), TIMEOUT, || {
        let output = cluster.network.try_sh(&format!("nft list set inet tunnel {set}"));
        output.status.success() && output.stdout.contains(ip) == intercepted
    });
}

/// TLS is between client and kubelet: the certificate contains the name of the requested node.
fn each_kubelet_proves_its_node_to_the_client(cluster: &Cluster, ips: &[String; 2]) {
    let get_pods = |node: &str, ip: &str| {
        let at = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
        let to = format!("--connect-to {node}:10250:{at}:10250");
        cluster.network.try_sh(&format!("curl -sS -m 30 --cacert ca.crt {to} https://{node}:10250/pods"))
    };
    for (node, ip) in ["node1", "node2"].into_iter().zip(ips) {
        assert_eq!(get_pods(node, ip).stdout, "Unauthorized", "{node}");
    }
    let mistaken = get_pods("node1", &ips[1]);
    assert!(mistaken.stderr.contains("subject name"), "{mistaken:?}");
}

/// Runs a command as a client that sends neither a server name nor a Host header.
fn a_client_without_server_name_runs_a_command(cluster: &Cluster, ip: &str) {
    let at = if ip.contains(':') { format!("[{ip}]:10250") } else { format!("{ip}:10250") };
    let pod = if ip.contains(':') { "busy-too" } else { "busy" };
    let line = format!(
        "openssl s_client -quiet -noservername -connect {at} -CAfile ca.crt -verify_return_error \
         -cert kubelet-client.crt -key kubelet-client.key | tr -cd '\\n -~'"
    );
    let (mut client, mut stdin) = cluster.network.spawn_sh("raw", &line);
    let head = format!(
        "GET /exec/default/{pod}/main?command=echo&command=untouched&output=1 HTTP/1.0\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
    );
    stdin.write_all(head.as_bytes()).unwrap();
    assert!(client.wait_for_exit(TIMEOUT).success());
    client.assert_logged("untouched");
}

/// Waits until a command runs on the first node.
fn is_reached(cluster: &Cluster) {
    wait_until("a command runs", TIMEOUT, || {
        cluster.network.try_sh("kubectl exec busy -- true").status.success()
    });
}

/// A metrics-server, running or not.
struct MetricsServer<P>(P);

impl MetricsServer<PathBuf> {
    /// Returns `None` if it is not installed.
    fn built() -> Option<Self> {
        cached_program("metrics-server-0.9.0/metrics-server").map(Self)
    }

    /// Starts it to query kubelets by name, with a certificate; it does not verify theirs.
    fn by_name(&self, cluster: &Cluster) -> MetricsServer<Running> {
        let shown = kubelet_client(&cluster.network.place);
        self.start(
            cluster,
            &[
                "--kubelet-preferred-address-types=Hostname",
                "--kubelet-insecure-tls",
                &format!("--kubelet-client-certificate={}", shown.cert.display()),
                &format!("--kubelet-client-key={}", shown.key.display()),
            ],
        )
    }

    /// Starts it to query kubelets by address, with a token; their certificates must contain their addresses.
    fn by_address(&self, cluster: &Cluster) -> MetricsServer<Running> {
        let ca = cluster.network.place.files.ca.display();
        let authority = format!("--kubelet-certificate-authority={ca}");
        self.start(cluster, &["--kubelet-preferred-address-types=InternalIP", &authority])
    }

    fn start(&self, cluster: &Cluster, more: &[&str]) -> MetricsServer<Running> {
        let place = &cluster.network.place;
        let admin = place.path().join("admin");
        let mut command = cluster.network.cloud.command(&self.0);
        for flag in ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"] {
            command.arg(flag).arg(&admin);
        }
        command.args(["--secure-port=4443", "--bind-address=127.0.0.1", "--metric-resolution=10s"]);
        command
            .args(["--kubelet-request-timeout=9s", "--v=2"])
            .arg("--cert-dir")
            .arg(place.path().join("metrics"));
        MetricsServer(Running::start("metrics-server", place.path(), command.args(more)))
    }
}

impl MetricsServer<Running> {
    /// Waits until it reports the usage of both nodes.
    fn wait_for_both_nodes(mut self, cluster: &Cluster) {
        let line = "curl -sk -m 20 -H 'Authorization: Bearer admin' https://127.0.0.1:4443/apis/metrics.k8s.io/v1beta1/nodes";
        wait_until("metrics-server knows both nodes", 4 * TIMEOUT, || {
            self.0.assert_running();
            let output: Value =
                serde_json::from_str(&cluster.network.try_sh(line).stdout).unwrap_or_default();
            let items = output["items"].as_array().cloned().unwrap_or_default();
            let names = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap());
            names.collect::<BTreeSet<_>>() == ["node1", "node2"].into()
        });
    }
}
