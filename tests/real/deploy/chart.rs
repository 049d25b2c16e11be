//! The Helm chart: without values it renders the same objects as the kustomize base, and with values what they set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Deserializer, Value, json};

use super::{CLUSTER_CA, Cluster, container, deploy, mounted};
use crate::kubernetes::NAMESPACE;
use crate::parts::cached_program;
use crate::process::{TIMEOUT, run, run_command};
use crate::tunnel::{PROGRAM, TOKEN, TestDir};

/// Runs helm on the chart, with or without a cluster.
fn helm(program: &Path, cluster: Option<&Cluster>, place: &TestDir, task: &str, more: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args([task, "tunnel"]).arg(deploy("helm/tunnel")).args(["-n", NAMESPACE]).args(more);
    // Keep helm's files out of the user's home directory.
    command.envs(["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"].map(|name| (name, place.path())));
    if let Some(cluster) = cluster {
        command.arg("--kubeconfig").arg(cluster.kubernetes.admin());
    }
    let output = run_command("helm", &mut command, None, 3 * TIMEOUT);
    assert!(output.status.success(), "{task}: {output:?}");
    output.stdout
}

/// Returns the objects of the default namespace of the manifests, by kind and name.
fn objects(cluster: &Cluster, from: &str, manifests: &Path) -> BTreeMap<String, Value> {
    objects_of(cluster, NAMESPACE, from, manifests)
}

/// Like [`objects`], but for any namespace.
pub(crate) fn objects_of(
    cluster: &Cluster,
    namespace: &str,
    from: &str,
    manifests: &Path,
) -> BTreeMap<String, Value> {
    let args =
        ["-n", namespace, "create", "--dry-run=client", "-o", "json", from, manifests.to_str().unwrap()];
    let (is_well, text) = cluster.try_kubectl(&args);
    assert!(is_well, "{text}");
    let found: Vec<Value> = Deserializer::from_str(&text).into_iter().map(Result::unwrap).collect();
    let lists = |one: Value| match one["items"].as_array() {
        Some(items) => items.clone(),
        None => vec![one],
    };
    let name = |one: &Value| format!("{} {}", one["kind"], one["metadata"]["name"]).replace('"', "");
    found.into_iter().flat_map(lists).map(|one| (name(&one), one)).collect()
}

/// Fails the test if the program finds errors in the configs of server and edge that a chart with these values
/// contains.
fn checked(cluster: &Cluster, place: &TestDir, chart: &BTreeMap<String, Value>) {
    for (mode, name) in [("cloud", "site-cloud-conf"), ("edge", "site-edge-conf")] {
        let text = chart[&format!("ConfigMap {name}")]["data"]["mode.toml"].as_str().unwrap();
        let dir = place.path().join(mode);
        let cluster_ca = cluster.kubernetes.place().files.ca.display().to_string();
        let text = text.replace("/etc/tunnel", dir.to_str().unwrap()).replace(CLUSTER_CA, &cluster_ca);
        mounted(&dir, place, &text);
        let tokens = if mode == "cloud" { format!("node1:{TOKEN}") } else { TOKEN.to_owned() };
        std::fs::write(dir.join("token/token"), tokens).unwrap();
        let (config, k) = (dir.join("conf/mode.toml"), cluster.kubernetes.admin());
        let mut command = Command::new(PROGRAM);
        command.args(["config", "check"]).arg(&config);
        command.env("NODE_NAME", "node1").env("POD_IP", "10.9.9.9");
        command.arg(format!("--kubeconfig={}", k.display()));
        let output = run_command("tunnel", &mut command, None, TIMEOUT);
        assert!(output.status.success() && !output.stderr.contains("ERROR"), "{text}\n{output:?}");
    }
}

#[test]
fn the_chart_renders_the_objects_of_the_base_and_applies_its_values() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    let rendered = |name: &str, more: &[&str]| -> PathBuf {
        let file = place.path().join(name);
        std::fs::write(&file, helm(&program, None, &place, "template", more)).unwrap();
        file
    };
    let mut base = objects(&cluster, "-k", &deploy("kustomize/base"));
    assert!(
        base.remove(&format!("Namespace {NAMESPACE}")).is_some(),
        "helm creates it with --create-namespace"
    );
    let mut chart = objects(&cluster, "-f", &rendered("chart.yaml", &[]));
    assert_eq!(chart.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
    for (name, expected) in base {
        let made = chart.remove(&name).unwrap();
        assert!(made == expected, "{name}: the chart has\n{made:#}\nand the base\n{expected:#}");
    }

    helm(&program, Some(&cluster), &place, "install", &[]);
    assert_eq!(cluster.object("deployment", "tunnel-cloud")["spec"]["replicas"], 2);
    helm(&program, Some(&cluster), &place, "upgrade", &["--reuse-values", "--set", "cloud.replicas=3"]);
    assert_eq!(cluster.object("deployment", "tunnel-cloud")["spec"]["replicas"], 3);
    assert_eq!(cluster.object("hpa", "tunnel-cloud")["spec"]["minReplicas"], 3);
    assert_eq!(cluster.port_for_ssh(), "", "closed by default");
    let networks = ["cloud.clientsService=NodePort", "cloud.clientNetworks={203.0.113.0/24}"];
    let networks = networks.map(|set| ["--set", set]).concat();
    helm(&program, Some(&cluster), &place, "upgrade", &[&["--reuse-values"], networks.as_slice()].concat());
    assert_ne!(cluster.port_for_ssh(), "");
    cluster.is_open_to_clients();

    let values = json!({
        "name": "site", "image": {"repository": "registry.example.org/tunnel", "tag": "9"},
        "publisher": "etcd", "dns": "etcd.endpoints = [\"http://10.0.0.5:2379\"]\nzone = \"nodes.example.org\"",
        "cloud": {"hostNetwork": true, "sshPort": 2222, "maxReplicas": 0, "certSecret": "a", "tokenSecret": "b", "usersSecret": "d",
            "resources": {"limits": {"memory": "1Gi"}}, "moreConfig": "[server.session]\nresume_timeout = \"50s\"\n"},
        "edge": {"hostNetwork": false, "certSecret": "c", "kubeconfig": "/k3s/kubelet.kubeconfig", "kubeletPki": "/k3s", "targets": ["10.244.0.0/16:*"],
            "moreConfig": "[edge.http_proxy]\nlisten = \"127.0.0.1:3128\"\n"},
        "coredns": {"enabled": false},
    });
    let file = place.path().join("values.json");
    std::fs::write(&file, values.to_string()).unwrap();
    let chart = objects(&cluster, "-f", &rendered("site.yaml", &["-f", file.to_str().unwrap()]));
    assert!(chart.keys().all(|name| name.contains(" site-")), "{:?}", chart.keys());
    for kind in ["HorizontalPodAutoscaler site-cloud", "Deployment site-coredns"] {
        assert!(!chart.contains_key(kind), "{kind}");
    }
    let (cloud, edge) = (&chart["Deployment site-cloud"], &chart["DaemonSet site-edge"]);
    for workload in [cloud, edge] {
        assert_eq!(container(workload)["image"], "registry.example.org/tunnel:9");
    }
    let pod = |workload: &Value| workload["spec"]["template"]["spec"].clone();
    assert_eq!(pod(cloud)["hostNetwork"], true);
    assert_eq!(pod(cloud)["volumes"][1]["secret"]["secretName"], "a");
    assert_eq!(pod(cloud)["volumes"][2]["secret"]["secretName"], "b");
    assert_eq!(pod(cloud)["volumes"][3]["secret"]["secretName"], "d");
    assert_eq!(container(cloud)["resources"]["limits"]["memory"], "1Gi");
    let service = &chart["Service site-cloud"]["spec"]["ports"];
    assert!(service.as_array().unwrap().iter().any(|port| port["name"] == "ssh"), "{service}");
    let config = chart["ConfigMap site-cloud-conf"]["data"]["mode.toml"].to_string();
    assert!(config.contains(r#"plain_listen = \"[::]:2222\""#), "{config}");
    assert_eq!(pod(edge)["hostNetwork"], Value::Null);
    assert_eq!(container(edge)["readinessProbe"]["httpGet"], json!({"path": "/readyz", "port": 6000}));
    assert_eq!(pod(edge)["volumes"][2]["hostPath"]["path"], "/k3s/kubelet.kubeconfig");
    assert_eq!(pod(edge)["volumes"][3]["hostPath"]["path"], "/k3s");
    checked(&cluster, &place, &chart);

    let other = r#"edge.nodeSelector={"superedge.io/node-edge": null, "zone": "a"}"#;
    for (option, value, error) in [
        ("--set", "cloud.hostNetwork=true,cloud.sshPort=22", "set cloud.sshPort"),
        ("--set", "cloud.replica=3", "additional properties 'replica' not allowed"),
        ("--set-json", other, "edge.nodeSelector: add superedge.io/node-edge: enable"),
    ] {
        let chart = deploy("helm/tunnel").display().to_string();
        let args = ["template", "tunnel", &chart, option, value];
        let output = run(program.to_str().unwrap(), &args, None, TIMEOUT);
        assert!(!output.status.success() && output.stderr.contains(error), "{output:?}");
    }
}

#[test]
fn the_chart_names_the_node_label_that_servers_need() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    let line = "kubectl label node NODE node-restriction.kubernetes.io/tunnel-server=true";
    let notes = helm(&program, Some(&cluster), &place, "install", &[]);
    assert!(notes.contains(line), "{notes}");
    let labels = json!({"node-restriction.kubernetes.io/tunnel-server": "true"});
    cluster.kubernetes.apply_everywhere::<Node>(
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cloud1", "labels": labels}}),
    );
    let notes = helm(&program, Some(&cluster), &place, "upgrade", &[]);
    assert!(!notes.contains(line) && notes.contains("tunnel.cloud.io/client=true"), "{notes}");
}
