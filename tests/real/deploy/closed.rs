//! The restrictions of the manifests: nodes where servers may run, and clients that may connect to them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::chart::objects_of;
use super::{Cluster, container, deploy, overlay};
use crate::parts::{free_port, loopback};
use crate::process::{TIMEOUT, run};
use crate::tunnel::{PROGRAM, TestDir};

/// A label that no kubelet can set on its own Node: NodeRestriction denies the prefix
/// `node-restriction.kubernetes.io/`.
const SERVERS: &str = "node-restriction.kubernetes.io/tunnel-server";

/// All folders that operators apply.
const FOLDERS: [&str; 6] = [".", "base", "approver", "csr", "yurttunnel", "yurttunnel/csr"];

/// Returns the objects of a folder.
fn objects(cluster: &Cluster, folder: &str) -> BTreeMap<String, Value> {
    objects_of(cluster, "-k", &deploy("kustomize").join(folder))
}

#[test]
fn servers_run_only_on_nodes_with_a_label_that_no_kubelet_can_set() {
    let Some(cluster) = Cluster::new() else { return };
    for folder in FOLDERS {
        let all = objects(&cluster, folder);
        let workloads: Vec<_> = all.iter().filter(|(name, _)| name.starts_with("Deployment ")).collect();
        assert!(!workloads.is_empty(), "{folder}");
        for (name, workload) in workloads {
            let selector = &workload["spec"]["template"]["spec"]["nodeSelector"];
            assert_eq!(selector[SERVERS], "true", "{folder}: {name}");
        }
    }
}

#[test]
fn doctor_names_the_node_label_that_servers_need() {
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    let config = place.cloud_config(loopback(free_port()), free_port());
    let tables = "[server.connect]\nlisten = \"127.0.0.1:0\"\n[server.addresses]\nkubernetes = true\n";
    let file = place.config("cloud", &format!("{config}{tables}"));
    let (c, k) = (
        format!("--config={}", file.display()),
        format!("--kubeconfig={}", cluster.kubernetes.admin().display()),
    );
    let label_finding = || {
        let output = run(PROGRAM, &["doctor", "server", &c, &k, "-o=json"], None, TIMEOUT);
        let found: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        found.into_iter().find(|one| one["check"] == "nodes").unwrap()
    };
    let found = label_finding();
    let line = format!("kubectl label node NODE {SERVERS}=true");
    assert!(found["status"] == "warning" && found["hint"].as_str().unwrap().contains(&line), "{found}");
    let labels = json!({SERVERS: "true"});
    cluster.kubernetes.apply_everywhere::<Node>(
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cloud1", "labels": labels}}),
    );
    assert_eq!(label_finding()["status"], "ok");
}

#[test]
fn clients_outside_reach_ssh_only_with_the_component_and_only_from_named_networks() {
    let place = tempfile::tempdir().unwrap();
    let site = overlay(place.path(), "clients");
    let Some(cluster) = Cluster::with_base() else { return };
    assert_eq!(cluster.port_for_ssh(), "", "closed by default");
    assert!(cluster.try_kubectl(&["apply", "-k", site.to_str().unwrap()]).0);
    let port = cluster.port_for_ssh();
    assert!(port.parse::<u16>().is_ok_and(|port| port >= 30000), "{port}");
    cluster.is_open_to_clients();
}

#[test]
fn the_port_without_tls_is_opened_by_one_component() {
    let place = TestDir::new();
    let site = overlay(place.path(), "plain-connect");
    let Some(cluster) = Cluster::with_base() else { return };
    let is_open = || {
        let service = cluster.object("service", "tunnel-cloud");
        let policy = cluster.object("networkpolicy", "tunnel-cloud");
        let has = |ports: &Value, key: &str| ports.as_array().unwrap().iter().any(|port| port[key] == "ssh");
        [has(&service["spec"]["ports"], "name"), has(&policy["spec"]["ingress"][1]["ports"], "port")]
    };
    assert_eq!(is_open(), [false, false], "closed by default");
    assert!(cluster.try_kubectl(&["apply", "-k", site.to_str().unwrap()]).0);
    assert_eq!(is_open(), [true, true]);
    let config = cluster.object("configmap", "tunnel-cloud-conf")["data"]["mode.toml"].to_string();
    assert!(config.contains("plain_listen"), "{config}");
}

/// A component's config replaces that of the base, and must not lose what the base has.
#[test]
fn the_configs_of_components_are_that_of_the_base_and_more() {
    let read = |file: &str| -> toml::Table {
        toml::from_str(&std::fs::read_to_string(deploy("kustomize").join(file)).unwrap()).unwrap()
    };
    let mut plain = read("components/plain-connect/cloud.toml");
    let port = plain["server"]["connect"].as_table_mut().unwrap().remove("plain_listen").unwrap();
    assert_eq!((port.as_str(), plain), (Some("[::]:22"), read("base/files/cloud.toml")));
    let (base, mut more) = (read("base/files/cloud.toml"), read("components/node-names/cloud.toml"));
    let servers = more["server"].as_table_mut().unwrap();
    let https = servers.remove("https").unwrap();
    assert_eq!(https["ports"]["10250"].as_str(), Some("127.0.0.1:10250"));
    assert_eq!(servers.remove("csr").unwrap()["profiles"].as_array().unwrap().len(), 1);
    assert_eq!(more, base);
}

#[test]
fn ports_without_credentials_are_open_to_labelled_namespaces_only() {
    let Some(cluster) = Cluster::new() else { return };
    for folder in FOLDERS {
        let all = objects(&cluster, folder);
        for (name, workload) in all.iter().filter(|(name, _)| name.starts_with("Deployment ")) {
            let app = workload["metadata"]["name"].as_str().unwrap();
            let policy = &all[&format!("NetworkPolicy {app}")]["spec"];
            assert_eq!(policy["podSelector"], workload["spec"]["selector"], "{folder}: {name}");
            assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]), "{folder}: {name}");
            // No pod may reach any port of any address.
            for rule in policy["egress"].as_array().unwrap() {
                assert!(rule["ports"].is_array() || rule["to"].is_array(), "{folder}: {name}: {rule}");
            }
        }
    }
    let [client, metrics] = ["client", "metrics"].map(
        |kind| json!([{"namespaceSelector": {"matchLabels": {format!("tunnel.cloud.io/{kind}"): "true"}}}]),
    );
    for (folder, open, closed) in [
        (
            "base",
            json!([{"port": "grpc"}, {"port": "egress"}]),
            json!([{"port": "connect"}, {"port": "http-proxy"}]),
        ),
        ("yurttunnel", json!([{"port": "grpc"}, {"port": "https"}]), json!([{"port": "http"}])),
    ] {
        let all = objects(&cluster, folder);
        let rules = &all["NetworkPolicy tunnel-cloud"]["spec"]["ingress"];
        let expected = json!([
            {"ports": open},
            {"ports": closed, "from": client},
            {"ports": [{"port": "tunnel-metrics"}], "from": metrics},
        ]);
        assert_eq!(rules, &expected, "{folder}");
        let named: Vec<&Value> =
            rules.as_array().unwrap().iter().flat_map(|rule| rule["ports"].as_array().unwrap()).collect();
        let ports = container(&all["Deployment tunnel-cloud"])["ports"].as_array().unwrap();
        for port in ports {
            assert!(named.iter().any(|rule| rule["port"] == port["name"]), "{folder}: {port}");
        }
        for (name, object) in &all {
            assert!(!object.to_string().contains("default:"), "{folder}: {name} has a default token");
        }
    }
}
