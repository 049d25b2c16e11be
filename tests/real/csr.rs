//! Certificates that a real kube-controller-manager signs: servers request them, `tunnel approve` approves or denies
//! them.

mod kubelet;
mod signer;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use k8s_openapi::api::core::v1::{Node, Service};
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use serde_json::{Value, json};
use tunnel_kube::csr::profile::Profile;
use tunnel_net::pki::CertificateRequest;

use crate::kubernetes::{Kubernetes, NAMESPACE, PODS};
use crate::parts::{are_installed, free_port};
use crate::process::{ProcessOutput, TIMEOUT, run_command};
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::{wait_for, wait_until};
use kubelet::Kubelet;
use signer::Signer;

#[test]
fn server_certificates_are_issued_and_renewed_without_aborted_sessions() {
    if !are_installed(&["curl"]) {
        return;
    }
    let Some(mut signer) = Signer::start("90s") else { return };
    let place = TestDir::new();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "tunnel-cloud"},
        "spec": {"clusterIP": "10.96.0.99", "ports": [{"name": "grpc", "port": 9000}]},
    });
    signer.kubernetes.apply::<Service>(&service);
    let ca = &signer.kubernetes.place().files.ca.clone();
    let kubelet = Kubelet::start(signer.kubernetes.place(), "node1");
    let (dir, https) = (place.path().join("pki"), free_port());
    let (server, shown) = (dir.join("server.pem"), dir.join("proxy-client.pem"));
    let tables = format!(
        "[server.csr]\nprofiles = [\"server\", \"proxy-client\"]\ndir = {dir:?}\nservices = [\"tunnel-cloud\"]\n\
         [server.https]\ncert = {server:?}\nkey = {server:?}\nclient_ca = {:?}\nnames = [\"kube-apiserver\"]\n\
         target_cert = {shown:?}\ntarget_ca = {ca:?}\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{https}\" = \"{}\" }}\n",
        place.files.ca, kubelet.at,
    );
    let account = signer.kubernetes.kubeconfig_as(PODS);
    let k = format!("--kubeconfig={}", account.display());
    let grpc = crate::parts::loopback(free_port());
    let env = [("POD_NAMESPACE", NAMESPACE)];
    let mut cloud = ServerProcess::launch(&place, ("cloud", grpc), &tables, &env, &[&k]);
    // The request is not approved yet: the server waits, and continues automatically.
    cloud.process.wait_for_log("certificate requested");
    assert!(!cloud.process.log().contains("server started"));
    signer.approve();
    cloud.ready();
    let mut edge = Edge::start(&place, &grpc.to_string());
    cloud.wait_for_node("node1");

    let admission = |path: &str| {
        let mut curl = visitor(&place, ca, https);
        run_command(
            "curl",
            curl.arg(format!("https://tunnel-cloud.{NAMESPACE}.svc/{path}")),
            None,
            2 * TIMEOUT,
        )
    };
    let first = admission("who");
    assert_eq!(first.stdout.split(' ').next(), Some("tunnel-proxy-client"), "{first:?}");
    for mode in [&server, &shown] {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(mode).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let read = |file: &Path| std::fs::read_to_string(file).unwrap();
    let before = [read(&server), read(&shown)];
    let (over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let shown_to_kubelet = std::thread::scope(|scope| {
        let load = || {
            let mut shown = BTreeSet::new();
            while !over.load(Relaxed) {
                let ProcessOutput { status, stdout, stderr } = admission("who");
                assert!(status.success() && stdout.starts_with("tunnel-proxy-client "), "{stdout} {stderr}");
                shown.insert(stdout);
                done.fetch_add(1, Relaxed);
            }
            shown
        };
        let visitors = [scope.spawn(load), scope.spawn(load)];
        // One response lasts until both certificates have been renewed.
        let long = scope.spawn(|| admission("long"));
        wait_until("both certificates are renewed and in use", 6 * TIMEOUT, || {
            cloud.process.assert_running();
            let now = [read(&server), read(&shown)];
            let renewed = now.iter().zip(&before).all(|(now, before)| now != before);
            renewed && kubelet.certificates() >= 2
        });
        over.store(true, Relaxed);
        kubelet.finish();
        let long = long.join().unwrap();
        assert!(long.status.success() && long.stdout.ends_with("the end\n"), "{long:?}");
        visitors.map(|visitor| visitor.join().unwrap()).into_iter().flatten().collect::<BTreeSet<_>>()
    });
    assert!(
        shown_to_kubelet.len() >= 2,
        "the kubelet sees the old and the new certificate: {shown_to_kubelet:?}"
    );
    assert!(done.load(Relaxed) > 20);
    edge.process.assert_running();
    let ready = crate::process::send_request(cloud.log_port, "GET", "/readyz", "").unwrap();
    assert!(ready.contains(" 200 OK") && !ready.contains("certificate of the"), "{ready}");
}

/// Returns a curl command that requests `node1` through the server, with a client certificate that the listener
/// trusts.
fn visitor(place: &TestDir, ca: &Path, port: u16) -> Command {
    let (cert, key) = (place.path().join("visitor.crt"), place.path().join("visitor.key"));
    if !cert.exists() {
        place.authority.0.client("kube-apiserver").unwrap().write(&cert, &key).unwrap();
    }
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--fail-with-body", "-H", "Host: node1", "--connect-to"]);
    curl.arg(format!("::127.0.0.1:{port}")).arg("--cacert").arg(ca);
    curl.arg("--cert").arg(cert).arg("--key").arg(key);
    curl
}

/// The contents of a certificate request.
struct RequestSpec<'a> {
    profile: Profile,
    /// The common name, if it differs from that of the profile.
    common_name: Option<&'a str>,
    names: &'a [&'a str],
}

impl<'a> RequestSpec<'a> {
    fn of(profile: Profile, names: &'a [&'a str]) -> Self {
        Self { profile, common_name: None, names }
    }

    /// Creates the request with that kubeconfig, and returns its name.
    fn submit(&self, kubernetes: &Kubernetes, kubeconfig: &Path) -> String {
        let profile = self.profile;
        let common_name = self.common_name.unwrap_or(profile.common_name());
        let request = CertificateRequest::new(common_name, profile.organization(), self.names).unwrap();
        let csr = CertificateSigningRequest {
            metadata: ObjectMeta { generate_name: Some("test-".to_owned()), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                request: ByteString(request.pem().as_bytes().to_vec()),
                signer_name: profile.signer().to_owned(),
                usages: Some(profile.usages().map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        };
        let api = Api::all(kubernetes.client(kubeconfig));
        let made: CertificateSigningRequest =
            kubernetes.run(api.create(&PostParams::default(), &csr)).unwrap();
        made.metadata.name.unwrap()
    }
}

/// Returns the condition of a request, its message, and whether a certificate has been issued.
fn outcome(kubernetes: &Kubernetes, name: &str) -> Option<(String, String, bool)> {
    let api: Api<CertificateSigningRequest> = Api::all(kubernetes.client(&kubernetes.admin()));
    let status = kubernetes.run(api.get(name)).unwrap().status.unwrap_or_default();
    let condition = status.conditions.and_then(|mut all| all.pop())?;
    Some((condition.type_, condition.message.unwrap_or_default(), status.certificate.is_some()))
}

#[test]
fn only_the_owner_gets_a_certificate_and_foreign_requests_stay_untouched() {
    let Some(mut signer) = Signer::start("1h") else { return };
    signer.kubernetes.apply_everywhere::<Node>(
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}}),
    );
    signer
        .kubernetes
        .set_node_status("node1", &json!({"addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]}));
    let port = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "tunnel-cloud"},
        "spec": {"type": "NodePort", "clusterIP": "10.96.0.99", "ports": [{"name": "grpc", "port": 9000}]},
    });
    signer.kubernetes.apply::<Service>(&port);
    let plane = json!({"node-role.kubernetes.io/control-plane": ""});
    for (name, ip, labels) in [("cloud1", "10.0.0.99", plane), ("cloud2", "10.0.0.8", json!({}))] {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
        signer.kubernetes.apply_everywhere::<Node>(&node);
        let addresses = json!([{"type": "InternalIP", "address": ip}, {"type": "Hostname", "address": name}]);
        signer.kubernetes.set_node_status(name, &json!({"addresses": addresses}));
    }
    let kubernetes = &signer.kubernetes;
    let (node, admin) = (kubernetes.place().path().join("node1"), kubernetes.admin());
    let (pods, other) = (
        kubernetes.kubeconfig_as(PODS),
        kubernetes.kubeconfig_as("system:serviceaccount:edge-system:default"),
    );
    signer::permit_requests(kubernetes, "system:serviceaccount:edge-system:default");
    let foreign = [
        (
            RequestSpec {
                common_name: Some("system:node:node1"),
                ..RequestSpec::of(Profile::Server, &["node1"])
            },
            &node,
        ),
        (RequestSpec { common_name: Some("somebody"), ..RequestSpec::of(Profile::ProxyClient, &[]) }, &admin),
    ];
    let foreign = foreign.map(|(wish, kubeconfig)| wish.submit(kubernetes, kubeconfig));
    let denied = [
        (RequestSpec::of(Profile::ProxyClient, &[]), &node, "only system:serviceaccount"),
        (RequestSpec::of(Profile::Server, &["tunnel-cloud"]), &node, "only system:serviceaccount"),
        (RequestSpec::of(Profile::Server, &["tunnel-cloud"]), &other, "only system:serviceaccount"),
        (
            RequestSpec::of(Profile::Server, &["tunnel-cloud", "kubernetes.default.svc"]),
            &pods,
            "kube-apiserver",
        ),
        (RequestSpec::of(Profile::Server, &["10.96.0.1"]), &pods, "kube-apiserver"),
        (RequestSpec::of(Profile::Server, &["tunnel-cloud", "10.0.0.99"]), &pods, "no known Service"),
        (RequestSpec::of(Profile::Server, &["metrics-server.kube-system.svc"]), &pods, "no known Service"),
        (RequestSpec::of(Profile::ProxyClient, &[]), &admin, "only system:serviceaccount"),
        (RequestSpec::of(Profile::Edge, &["node1"]), &pods, "only a node may request this certificate"),
        (RequestSpec::of(Profile::Edge, &["node2"]), &node, "expected exactly \"node1\""),
        (RequestSpec::of(Profile::Edge, &["node1", "10.0.0.8"]), &node, "no address of Node node1"),
    ]
    .map(|(wish, kubeconfig, why)| (wish.submit(kubernetes, kubeconfig), why));
    let approved = [
        (
            RequestSpec::of(
                Profile::Server,
                &["tunnel-cloud.edge-system.svc", "10.96.0.99", "10.0.0.8", "cloud2"],
            ),
            &pods,
        ),
        (RequestSpec::of(Profile::ProxyClient, &[]), &pods),
        (RequestSpec::of(Profile::Edge, &["node1", "10.0.0.7"]), &node),
    ]
    .map(|(wish, kubeconfig)| wish.submit(kubernetes, kubeconfig));
    signer.approve();
    let kubernetes = &signer.kubernetes;
    for (name, why) in &denied {
        let (kind, message, signed) = wait_for("a decision", 2 * TIMEOUT, || outcome(kubernetes, name));
        assert!(kind == "Denied" && message.contains(why) && !signed, "{kind}: {message}");
    }
    for name in &approved {
        wait_until("the certificate is issued", 2 * TIMEOUT, || {
            outcome(kubernetes, name).is_some_and(|(kind, _, signed)| kind == "Approved" && signed)
        });
    }
    // All of these were created after the foreign ones, and requests are decided in order.
    for name in &foreign {
        assert_eq!(outcome(kubernetes, name), None, "{name}");
    }
}

fn node(name: &str, labels: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
}

#[test]
fn the_certificate_of_an_edge_is_valid_while_its_node_exists() {
    let Some(mut signer) = Signer::start("1h") else { return };
    let named = |name: &str| node(name, &json!({"superedge.io/node-edge": "enable"}));
    signer.kubernetes.apply_everywhere::<Node>(&named("node1"));
    signer.approve();
    let (kubernetes, place) = (&signer.kubernetes, TestDir::new());
    let tables = format!("[server.csr]\nedge_ca = {:?}\n", kubernetes.place().files.ca);
    let k = format!("--kubeconfig={}", kubernetes.kubeconfig_as(PODS).display());
    let mut cloud = ServerProcess::start_as(&place, &tables, &[("POD_NAMESPACE", NAMESPACE)], &[&k]);
    let file = place.path().join("agent.pem");
    let kubeconfig_flag = format!("--kubeconfig={}", kubernetes.place().path().join("node1").display());
    let at = format!("127.0.0.1:{}", cloud.grpc);
    let start = |node: &str, token: &str, log: &str| {
        let config = place.edge_config(node, &at, free_port());
        let config = format!(
            "{}[edge.csr]\nenabled = true\nfile = {file:?}\n",
            config.replace(crate::tunnel::TOKEN, token)
        );
        place.tunnel(("edge", log), &config, &[], &[&kubeconfig_flag])
    };
    // Without a certificate, the edge uses its token.
    let mut edge = start("node1", crate::tunnel::TOKEN, "edge-token");
    cloud.wait_for_node("node1");
    edge.wait_for_log("certificate issued");
    edge.terminate();
    edge.wait_for_exit(TIMEOUT);
    // Another process uses only the certificate.
    let mut edge = start("node1", "wrong", "edge-certificate");
    edge.wait_for_log_of("server=", "linked");
    cloud.wait_for_node("node1");
    // The certificate does not authenticate another node.
    let mut other = start("node2", "wrong", "edge-other");
    other.wait_for_log("invalid token");
    other.kill();

    let nodes: Api<Node> = Api::all(kubernetes.client(&kubernetes.admin()));
    kubernetes.run(nodes.delete("node1", &kube::api::DeleteParams::default())).unwrap();
    cloud.process.wait_for_log("Node deleted or edge label removed");
    cloud.process.wait_for_log("which does not exist in the cluster");
    kubernetes.apply_everywhere::<Node>(&named("node1"));
    cloud.wait_for_node("node1");
    edge.assert_running();

    // kube-apiserver is unreachable: the server keeps the Nodes that it knows.
    signer.kubernetes.stop();
    edge.terminate();
    edge.wait_for_exit(TIMEOUT);
    let mut edge = start("node1", "wrong", "edge-away");
    edge.wait_for_log_of("server=", "linked");
    // A server that starts in the meantime knows no Nodes, so it accepts only tokens.
    cloud.process.terminate();
    cloud.process.wait_for_exit(TIMEOUT);
    let (env, at) = ([("POD_NAMESPACE", NAMESPACE)], crate::parts::loopback(cloud.grpc));
    let mut cloud = ServerProcess::launch(&place, ("cloud-renewed", at), &tables, &env, &[&k]);
    cloud.process.wait_for_log("client certificate cannot be checked: Node list not loaded yet");
    let _by_token = Edge::start_as(&place, "node2", &at.to_string());
    cloud.wait_for_node("node2");
    assert!(!cloud.process.log().contains("node is linked node=node1"));
    signer.kubernetes.restart();
    cloud.wait_for_node("node1");
    edge.assert_running();
}
