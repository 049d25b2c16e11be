//! The contents of `deploy`, used by the programs that they are made for.

mod chart;
mod closed;
mod dns;
mod installed;
mod migrating;
mod overlay;
mod pod_tokens;
mod rights;
mod units;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::kubernetes::{Kubernetes, NAMESPACE, PODS};
use crate::parts::{are_installed, cached_program, free_port, is_root, loopback};
use crate::process::{Running, TIMEOUT, run, run_command};
use crate::tunnel::{Edge, PROGRAM, TOKEN, TestDir, tunnel};
use crate::wait::wait_until;

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

/// Writes the overlay in a component's comment next to a copy of the base, with the base's config of servers. Returns
/// its folder.
fn overlay(place: &Path, component: &str) -> PathBuf {
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(deploy("kustomize")).arg(place);
    assert!(run_command("cp", &mut copy, None, TIMEOUT).status.success());
    let (folders, site) = (place.join("kustomize"), place.join("kustomize/site"));
    let file = folders.join("components").join(component).join("kustomization.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let overlay: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("#   ")).collect();
    std::fs::create_dir(&site).unwrap();
    let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n";
    std::fs::write(site.join("kustomization.yaml"), format!("{head}{}\n", overlay.join("\n"))).unwrap();
    std::fs::copy(folders.join("base/files/cloud.toml"), site.join("cloud.toml")).unwrap();
    site
}

/// A kube-apiserver, and kubectl.
struct Cluster {
    kubernetes: Kubernetes,
    kubectl: PathBuf,
}

impl Cluster {
    /// Starts a cluster with an empty namespace.
    fn new() -> Option<Self> {
        let (kubectl, kubernetes) = (cached_program("kubernetes-1.36.3/kubectl")?, Kubernetes::start()?);
        Some(Self { kubernetes, kubectl })
    }

    /// Starts a cluster and applies the whole kustomize base.
    fn with_base() -> Option<Self> {
        Self::with(&deploy("kustomize/base"))
    }

    /// Starts a cluster and applies a folder that has the base.
    fn with(folder: &Path) -> Option<Self> {
        let cluster = Self::new()?;
        let mut output = String::new();
        wait_until("all objects are accepted", 3 * TIMEOUT, || {
            let (is_well, text) = cluster.try_kubectl_anywhere(&["apply", "-k", folder.to_str().unwrap()]);
            output = text;
            is_well
        });
        for object in ["deployment.apps/tunnel-cloud", "daemonset.apps/tunnel-edge", "service/tunnel-coredns"]
        {
            assert!(output.contains(object), "{object}: {output}");
        }
        // The test has created the namespace before, by other means.
        let warned = |line: &&str| line.starts_with("Warning") && !line.contains("namespaces/edge-system");
        assert_eq!(output.lines().find(warned), None);
        Some(cluster)
    }

    /// Starts a server that publishes to the ConfigMap with the permissions of the manifests' account. Also returns
    /// its address for edges.
    fn publisher(&self, place: &TestDir) -> (Running, SocketAddr) {
        let (grpc, log_port) = (loopback(free_port()), free_port());
        let config = format!(
            "{}[server.connect]\nlisten = \"127.0.0.1:0\"\n[server.dns]\npublish = \"configmap\"\n\
             [server.peers]\nkubernetes_service = \"tunnel-cloud-pods\"\n[server.addresses]\nkubernetes = true\n",
            place.cloud_config(grpc, log_port)
        );
        let file = place.config("cloud", &config);
        let kubeconfig = self.kubernetes.kubeconfig_as(PODS);
        let mut command = tunnel();
        command.args([
            "server",
            &format!("--config={}", file.display()),
            &format!("--kubeconfig={}", kubeconfig.display()),
        ]);
        command.envs([("POD_IP", "127.0.0.1"), ("POD_NAMESPACE", NAMESPACE), ("POD_NAME", "tunnel-cloud-0")]);
        let mut pod = Running::start("cloud", place.path(), &mut command);
        pod.wait_for_exact_answer(log_port, "/readyz", "ok\n");
        (pod, grpc)
    }

    /// Runs the command in the document that prints the NodePort for ssh.
    fn port_for_ssh(&self) -> String {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/helm.md");
        let page = std::fs::read_to_string(page).unwrap();
        let command = page.split("kubectl -n edge-system get svc").nth(1).unwrap();
        let command = command.split_once("print $2}'").unwrap().0;
        let line = format!(
            "{} --kubeconfig {} -n edge-system get svc{command}print $2}}'",
            self.kubectl.display(),
            self.kubernetes.admin().display()
        );
        run("sh", &["-c", &line], None, TIMEOUT).stdout.trim().to_owned()
    }

    /// Checks that the Service and the NetworkPolicy open the ports for clients in 203.0.113.0/24.
    fn is_open_to_clients(&self) {
        let service = self.object("service", "tunnel-cloud");
        let ports = service["spec"]["ports"].as_array().unwrap();
        let names: Vec<_> = ports.iter().map(|port| &port["name"]).collect();
        assert_eq!(names, ["grpc", "connect", "egress", "http-proxy"], "metrics stay inside");
        assert_eq!(service["spec"]["externalTrafficPolicy"], "Local");
        let policy = self.object("networkpolicy", "tunnel-cloud");
        let rule = &policy["spec"]["ingress"][1];
        assert_eq!(rule["from"][1]["ipBlock"]["cidr"], "203.0.113.0/24");
        assert_eq!(rule["ports"][0]["port"], "connect");
    }

    /// Runs kubectl. Returns whether it succeeded, and its output.
    fn try_kubectl(&self, args: &[&str]) -> (bool, String) {
        self.try_kubectl_anywhere(&[&["-n", NAMESPACE], args].concat())
    }

    /// Like [`Self::try_kubectl`], but for objects that name their namespaces: kubectl refuses those outside of `-n`.
    fn try_kubectl_anywhere(&self, args: &[&str]) -> (bool, String) {
        let admin = self.kubernetes.admin();
        let mut command = Command::new(&self.kubectl);
        command.arg("--kubeconfig").arg(admin).args(args);
        let output = run_command("kubectl", &mut command, None, TIMEOUT);
        (output.status.success(), output.stdout + &output.stderr)
    }

    /// Returns true if kube-apiserver permits that request; `user_flags` is kubectl's flags for the user. A subresource
    /// follows a colon: `nodes:proxy`.
    fn lets(&self, user_flags: &[&str], verb: &str, what: &str) -> bool {
        let (what, part) = what.split_once(':').unwrap_or((what, ""));
        let part = format!("--subresource={part}");
        self.try_kubectl(&[&["auth", "can-i", verb, what, &part], user_flags].concat()).0
    }

    fn object(&self, kind: &str, name: &str) -> Value {
        let (is_well, text) = self.try_kubectl(&["get", kind, name, "-o", "json"]);
        assert!(is_well, "{text}");
        serde_json::from_str(&text).unwrap()
    }
}

/// Returns the only container of a workload.
fn container(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]["containers"][0]
}

fn args(workload: &Value) -> Vec<String> {
    let args = container(workload)["args"].as_array().unwrap();
    args.iter().map(|arg| arg.as_str().unwrap().to_owned()).collect()
}

/// Writes the files that a pod of these manifests finds below /etc/tunnel.
fn mounted(dir: &Path, place: &TestDir, config: &str) {
    for name in ["conf", "certs", "token", "auth"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    std::fs::write(dir.join("conf/mode.toml"), config).unwrap();
    let files =
        [("ca.crt", &place.files.ca), ("cloud.crt", &place.files.cert), ("cloud.key", &place.files.key)];
    let egress = [("egress.crt", &place.files.cert), ("egress.key", &place.files.key)];
    for (name, from) in files.into_iter().chain(egress) {
        std::fs::copy(from, dir.join("certs").join(name)).unwrap();
    }
    let users = format!("{USER}:{}\n", bcrypt::hash(PASSWORD, 4).unwrap());
    std::fs::write(dir.join("auth/htpasswd"), users).unwrap();
}

/// Path of the CA that signs Kubernetes' client certificates, in a pod.
const CLUSTER_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// The user that may use CONNECT and the proxy.
const USER: &str = "ops";
const PASSWORD: &str = "right";

/// Runs the manifests' arguments, environment and files: a server and an edge in a separate network, a client in the
/// networks that they allow, and the probes.
#[test]
fn kube_apiserver_accepts_the_manifests_and_their_workloads_serve() {
    if !is_root() || !are_installed(&["unshare", "curl", "busybox", "ip"]) {
        return;
    }
    let Some(cluster) = Cluster::with_base() else { return };
    let (cloud, edge) =
        (cluster.object("deployment", "tunnel-cloud"), cluster.object("daemonset", "tunnel-edge"));
    let config =
        |name: &str| cluster.object("configmap", name)["data"]["mode.toml"].as_str().unwrap().to_owned();
    let place = TestDir::serving(&["tunnel.cloud.io", "10.9.9.9", "127.0.0.1"]);
    let (for_cloud, for_edge) = (place.path().join("cloud"), place.path().join("edge"));
    mounted(&for_cloud, &place, &config("tunnel-cloud-conf"));
    std::fs::write(for_cloud.join("token/token"), format!("node1:{TOKEN}\n")).unwrap();
    // Change the address, as operators must, and use a token, as on a machine without Kubernetes. The tests of
    // `pod_tokens` start an edge with the token of its pod.
    let edge_config = config("tunnel-edge-conf").replace("tunnel.example.org:9000", "127.0.0.1:9000");
    let edge_config = edge_config.replace("/var/run/secrets/tunnel/token", "/etc/tunnel/token/token");
    mounted(&for_edge, &place, &edge_config);
    std::fs::write(for_edge.join("token/token"), TOKEN).unwrap();
    std::fs::write(place.path().join("page"), "from the node\n").unwrap();
    std::fs::create_dir_all("/etc/tunnel").unwrap();

    let login = format!("{USER}:{PASSWORD}");
    let probe = |workload: &Value, name: &str| {
        container(workload)[name]["httpGet"]["path"].as_str().unwrap().to_owned()
    };
    let start = |dir: &Path, workload: &Value| {
        format!(
            "unshare -m sh -c 'mount --bind {} /etc/tunnel && exec {PROGRAM} {}' & pids=\"$pids $!\"",
            dir.display(),
            args(workload).join(" ")
        )
    };
    let curl = format!("curl -sf --interface 10.9.9.9 --proxy-cacert {}", place.files.ca.display());
    let until =
        |what: &str| format!("n=0; until {what}; do n=$((n+1)); [ $n -lt 300 ] || exit 9; sleep 0.1; done");
    let script = [
        "set -e; pids=; trap 'kill $pids' EXIT; ip link set lo up; ip addr add 10.9.9.9/32 dev lo".to_owned(),
        format!("busybox httpd -f -p 127.0.0.1:9100 -h {} & pids=$!", place.path().display()),
        "export POD_IP=10.9.9.9 POD_NAME=tunnel-cloud-0 POD_NAMESPACE=edge-system KUBERNETES_SERVICE_HOST=192.0.2.1".to_owned(),
        start(&for_cloud, &cloud),
        until(&format!("curl -sf http://10.9.9.9:6000{}", probe(&cloud, "readinessProbe"))),
        format!("curl -sf http://10.9.9.9:6000{}", probe(&cloud, "livenessProbe")),
        "export NODE_NAME=node1 NODE_IP=10.9.9.9".to_owned(),
        start(&for_edge, &edge),
        until("curl -sf http://127.0.0.1:9010/cloud/healthz | grep -q node1"),
        format!("{curl} -U {login} -p -x https://10.9.9.9:8443 http://node1:9100/page"),
        format!("{curl} -U {login} -x https://10.9.9.9:8080 http://node1:9100/page"),
        format!("! {curl} -p -x https://10.9.9.9:8443 http://node1:9100/page"),
        format!("! {curl} -x https://10.9.9.9:8080 http://node1:9100/page"),
        format!("! {curl} -U {login} -x http://10.9.9.9:8080 http://node1:9100/page"),
        format!("! {} -U {login} -p -x https://127.0.0.1:8443 http://node1:9100/page", curl.replace("--interface 10.9.9.9", "")),
        "! busybox nc -w 1 10.9.9.9 22 < /dev/null".to_owned(),
    ];
    let output = run("unshare", &["-n", "sh", "-c", &script.join("\n")], None, 3 * TIMEOUT);
    assert!(output.status.success() && output.stdout.matches("from the node").count() == 2, "{output:?}");
    let grace = cloud["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > 30, "a server drains for 25 s, and edges need time for their last frames");
}

/// A server that runs with the role shows that it suffices, and kube-apiserver denies everything else.
#[test]
fn a_server_with_the_manifests_role_publishes_and_may_do_nothing_else() {
    let Some(cluster) = Cluster::with_base() else { return };
    let may = |verb: &str, what: &str| cluster.lets(&["--as", PODS], verb, what);
    for (verb, what) in [
        ("get", "configmaps/tunnel-nodes"),
        ("update", "configmaps/tunnel-nodes"),
        ("create", "configmaps"),
        ("list", "nodes"),
        ("watch", "endpointslices.discovery.k8s.io"),
        ("create", "tokenreviews.authentication.k8s.io"),
        ("watch", "pods"),
    ] {
        assert!(may(verb, what), "{verb} {what}");
    }
    for (verb, what) in [
        ("get", "secrets"),
        ("list", "secrets"),
        ("update", "configmaps/other"),
        ("delete", "configmaps/tunnel-nodes"),
        ("create", "pods"),
        ("create", "pods:exec"),
        ("get", "nodes:proxy"),
        ("create", "serviceaccounts:token"),
        ("update", "endpointslices.discovery.k8s.io"),
    ] {
        assert!(!may(verb, what), "{verb} {what}");
    }
    let place = TestDir::new();
    let (mut pod, grpc) = cluster.publisher(&place);
    let _edge = Edge::start(&place, &grpc.to_string());
    wait_until("the node is published", 3 * TIMEOUT, || {
        pod.assert_running();
        cluster.kubernetes.hosts("tunnel-nodes").is_some_and(|hosts| hosts.contains("node1"))
    });
}
