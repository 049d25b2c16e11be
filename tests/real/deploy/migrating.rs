//! The commands of docs/how-to/from-yurttunnel.md, unchanged, and the way back.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{Cluster, deploy};
use crate::kubernetes::NAMESPACE;
use crate::process::{ProcessOutput, TIMEOUT, run_command};
use crate::wait::wait_until;

/// Returns the blocks of commands in that section of the page, in order.
fn blocks(part: &str) -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/from-yurttunnel.md");
    let text = std::fs::read_to_string(page).unwrap();
    let (_, from) = text.split_once(part).expect(part);
    let from = from.split("\n## ").next().unwrap();
    let mut blocks = Vec::new();
    for block in from.split("```sh\n").skip(1) {
        let lines = block.split("```").next().unwrap().lines();
        blocks.push(lines.map(str::trim_start).collect::<Vec<_>>().join("\n"));
    }
    blocks
}

/// A folder in which an operator follows the page.
struct OperatorFolder<'a> {
    cluster: &'a Cluster,
    dir: tempfile::TempDir,
}

impl<'a> OperatorFolder<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
        link(&deploy(""), "deploy");
        link(&cluster.kubectl, "kubectl");
        Self { cluster, dir }
    }

    fn try_sh(&self, block: &str) -> ProcessOutput {
        let block = format!("PATH=\"$PWD:$PATH\"\n{block}");
        let mut bash = Command::new("bash");
        bash.args(["-e", "-o", "pipefail", "-c", &block]).current_dir(self.dir.path());
        bash.env("KUBECONFIG", self.cluster.kubernetes.admin());
        run_command("bash", &mut bash, None, 3 * TIMEOUT)
    }

    /// Runs a block, and fails the test unless all of its commands succeed.
    fn does(&self, block: &str) {
        let output = self.try_sh(block);
        assert!(output.status.success(), "{block}: {output:?}");
    }

    fn object(&self, kind: &str, name: &str) -> Option<Value> {
        let output = self.try_sh(&format!("kubectl -n kube-system get {kind} {name} -o json"));
        output.status.success().then(|| serde_json::from_str(&output.stdout).unwrap())
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap()
    }
}

/// Creates the objects of YurtTunnel with `kubectl create`.
fn yurttunnel(desk: &OperatorFolder<'_>) {
    let workload = |kind: &str, name: &str, args: &[&str]| {
        let pod = json!({
            "metadata": {"labels": {"k8s-app": name}},
            "spec": {"containers": [{"name": name, "image": format!("openyurt/{name}:v1.3.4"), "args": args}]},
        });
        json!({
            "apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "kube-system"},
            "spec": {"selector": {"matchLabels": {"k8s-app": name}}, "template": pod},
        })
    };
    let service = |name: &str, spec: Value| {
        let mut service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "kube-system"}});
        service["spec"] = spec;
        service["spec"]["selector"] = json!({"k8s-app": "yurt-tunnel-server"});
        service
    };
    let port = |name: &str, port: u16, target: u16| json!({"name": name, "port": port, "targetPort": target});
    let objects = [
        workload("Deployment", "yurt-tunnel-server", &["--bind-address=0.0.0.0", "--server-count=1"]),
        workload("DaemonSet", "yurt-tunnel-agent", &["--node-name=$(NODE_NAME)"]),
        service(
            "x-tunnel-server-svc",
            json!({"type": "NodePort", "ports": [{"name": "http", "port": 10263, "targetPort": 10263, "nodePort": 31008},
                {"name": "tcp", "port": 10262, "targetPort": 10262, "nodePort": 31009}]}),
        ),
        service(
            "x-tunnel-server-internal-svc",
            json!({"ports": [port("http", 10255, 10264), port("https", 10250, 10263), port("dnat-9051", 9051, 10264)]}),
        ),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "yurt-tunnel-server-cfg", "namespace": "kube-system"},
            "data": {"http-proxy-ports": "9051"}}),
    ];
    for (n, object) in objects.iter().enumerate() {
        std::fs::write(desk.dir.path().join("object.json"), object.to_string()).unwrap();
        // Just after its start, kube-apiserver refuses some objects for a moment.
        wait_until(&format!("object {n} is created"), 3 * TIMEOUT, || {
            let output = desk.try_sh("kubectl create -f object.json");
            output.status.success() || output.stderr.contains("AlreadyExists")
        });
    }
}

const SERVICES: [&str; 2] = ["x-tunnel-server-svc", "x-tunnel-server-internal-svc"];

/// Returns the parts of the Services that clients see, and the selectors.
fn service_parts(desk: &OperatorFolder<'_>) -> Vec<(Value, Value, Value)> {
    let of = |name: &str| {
        let mut spec = desk.object("service", name).unwrap()["spec"].take();
        (spec["clusterIP"].take(), spec["ports"].take(), spec["selector"].take())
    };
    SERVICES.map(of).into()
}

#[test]
fn the_migration_page_works_from_yurttunnel_to_this_program_and_back() {
    let Some(cluster) = Cluster::new() else { return };
    let Some(_manager) = cluster.kubernetes.manager("namespace-controller,endpoints-controller") else {
        return;
    };
    let desk = OperatorFolder::new(&cluster);
    yurttunnel(&desk);
    let before = service_parts(&desk);

    let settings = blocks("## What becomes of the settings");
    desk.does(&settings[0]);
    assert!(desk.read("old.yaml").contains("--node-name=$(NODE_NAME)"));

    // The trial.
    desk.does("kubectl apply -k deploy/kustomize/base");
    let [approve, take_away, stop, apply, patch, back] = &blocks("## The cutover")[..] else {
        panic!("{:#?}", blocks("## The cutover"))
    };
    desk.does(approve);
    let approver = "kubectl -n tunnel-approver get deployment tunnel-approver";
    desk.does(approver);
    desk.does(take_away);
    assert!(SERVICES.iter().all(|name| desk.read("services-old.yaml").contains(name)));
    assert!(!desk.try_sh(&format!("kubectl get namespace {NAMESPACE}")).status.success());
    desk.does(stop);
    assert_eq!(desk.object("deployment", "yurt-tunnel-server").unwrap()["spec"]["replicas"], 0);
    desk.does(apply);
    // Objects that kubectl has not applied before keep their selectors, so these Services have no endpoints until
    // they are patched.
    let label = |name: &str| format!("app.kubernetes.io/{name}");
    let ours = json!({label("name"): "tunnel", label("instance"): "tunnel", label("component"): "server"});
    for name in SERVICES {
        if desk.object("service", name).unwrap()["spec"]["selector"] != ours {
            desk.does(&patch.replace("x-tunnel-server-svc", name));
        }
    }
    for ((ip, ports, selector), (was, ..)) in service_parts(&desk).iter().zip(&before) {
        assert_eq!((ip, selector), (was, &ours), "{ports}");
    }
    let port = |of: &Value, number: u16| {
        of.as_array().unwrap().iter().find(|port| port["port"] == number).unwrap()["nodePort"].clone()
    };
    assert_eq!(
        port(&service_parts(&desk)[0].1, 10262),
        port(&before[0].1, 10262),
        "edges use the same node port"
    );
    for name in ["deployment/tunnel-cloud", "daemonset/tunnel-edge"] {
        let (kind, name) = name.split_once('/').unwrap();
        assert!(desk.object(kind, name).is_some(), "{name}");
    }

    desk.does(back);
    assert_eq!(service_parts(&desk), before);
    assert_eq!(desk.object("deployment", "yurt-tunnel-server").unwrap()["spec"]["replicas"], 1);
    assert_eq!(desk.object("deployment", "tunnel-cloud"), None);
    assert!(!desk.try_sh(approver).status.success());
}
