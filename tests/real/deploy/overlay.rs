//! The overlay for YurtTunnel's users: its names, ports and namespace.

use serde_json::Value;
use tunnel::config::Environment;
use tunnel::edge::config::EdgeConfig;
use tunnel::server::config::ServerConfig;

use super::{Cluster, container, deploy};
use crate::process::TIMEOUT;
use crate::wait::wait_until;

/// The user of its pods at kube-apiserver.
const ACCOUNT: &str = "system:serviceaccount:kube-system:tunnel-cloud";

/// Runs kubectl in its namespace.
fn try_kubectl(cluster: &Cluster, args: &[&str]) -> (bool, String) {
    cluster.try_kubectl(&[&["-n", "kube-system"], args].concat())
}

fn object(cluster: &Cluster, kind: &str, name: &str) -> Value {
    let (is_well, text) = try_kubectl(cluster, &["get", kind, name, "-o", "json"]);
    assert!(is_well, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_yurttunnel_overlay_has_its_services_its_ports_and_a_role() {
    let Some(cluster) = Cluster::new() else { return };
    let (folder, mut output) = (deploy("kustomize/yurttunnel"), String::new());
    wait_until("all objects are accepted", 3 * TIMEOUT, || {
        let (is_well, text) = try_kubectl(&cluster, &["apply", "-k", folder.to_str().unwrap()]);
        output = text;
        is_well
    });
    for absent in ["tunnel-coredns", "service/tunnel-cloud ", "tunnel-cloud-edges"] {
        assert!(!output.contains(absent), "{absent}: {output}");
    }
    let ports = |service: &str| {
        let service = object(&cluster, "service", service);
        let ports = service["spec"]["ports"].as_array().unwrap().clone();
        ports.iter().map(|port| (port["port"].clone(), port["targetPort"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(ports("x-tunnel-server-svc"), [(10262.into(), "grpc".into())]);
    let internal = [(10250.into(), 10263.into()), (10255.into(), 10264.into())];
    assert_eq!(ports("x-tunnel-server-internal-svc"), internal);
    let service = object(&cluster, "service", "x-tunnel-server-internal-svc");
    assert_eq!(service["metadata"]["annotations"]["tunnel.cloud.io/ports"], "managed");
    // Its pods may not create it. A second `apply` keeps the data that they have written.
    let data = r#"{"data":{"tunnel-nodes":"10.0.0.1\tnode1\n"}}"#;
    assert!(try_kubectl(&cluster, &["patch", "configmap", "yurt-tunnel-nodes", "-p", data]).0);
    assert!(try_kubectl(&cluster, &["apply", "-k", folder.to_str().unwrap()]).0);
    let names = object(&cluster, "configmap", "yurt-tunnel-nodes");
    assert_eq!(names["data"]["tunnel-nodes"], "10.0.0.1\tnode1\n");
    let cloud = object(&cluster, "deployment", "tunnel-cloud");
    let ports = container(&cloud)["ports"].as_array().unwrap();
    let open: Vec<_> = ports.iter().map(|port| port["containerPort"].as_u64().unwrap()).collect();
    assert_eq!(open, [10262, 10263, 10264, 10265]);
    its_settings_load(&cluster);
    its_role_is_what_it_takes(&cluster);
}

fn its_settings_load(cluster: &Cluster) {
    let env = Environment {
        kubernetes_service_host: Some("10.96.0.1".to_owned()),
        pod_ip: Some("10.0.0.1".to_owned()),
        node_name: Some("edge1".to_owned()),
        ..Environment::default()
    };
    let config =
        |name: &str| object(cluster, "configmap", name)["data"]["mode.toml"].as_str().unwrap().to_owned();
    let (_, warnings) = ServerConfig::read(&config("tunnel-cloud-conf"), &env).unwrap();
    assert_eq!(warnings, []);
    let (_, warnings) = EdgeConfig::read(&config("tunnel-edge-conf"), &env).unwrap();
    assert_eq!(warnings, []);
}

fn its_role_is_what_it_takes(cluster: &Cluster) {
    let may =
        |verb: &str, what: &str| try_kubectl(cluster, &["auth", "can-i", verb, what, "--as", ACCOUNT]).0;
    for (verb, what) in [
        ("watch", "configmaps/yurt-tunnel-server-cfg"),
        ("watch", "configmaps/tunnel-cache"),
        ("update", "configmaps/yurt-tunnel-nodes"),
        ("update", "services/x-tunnel-server-internal-svc"),
        ("create", "leases.coordination.k8s.io"),
        ("update", "leases.coordination.k8s.io/tunnel-node-names"),
        ("list", "nodes"),
    ] {
        assert!(may(verb, what), "{verb} {what}");
    }
    for (verb, what) in [
        ("create", "configmaps"),
        ("list", "configmaps"),
        ("get", "configmaps/tunnel-cache"),
        ("update", "configmaps/yurt-tunnel-server-cfg"),
        ("update", "services/x-tunnel-server-svc"),
        ("update", "leases.coordination.k8s.io/tunnel-dns-controller"),
        ("get", "secrets"),
    ] {
        assert!(!may(verb, what), "{verb} {what}");
    }
}
