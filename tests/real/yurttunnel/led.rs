//! Node names that a real CoreDNS serves from the ConfigMap of the servers: the name of an edge resolves to its
//! server.

use k8s_openapi::api::core::v1::{ConfigMap, Node, Service};
use serde_json::json;

use super::{SERVICE, node, service};
use crate::fleet::Line;
use crate::kubernetes::{Kubernetes, NAMESPACE};
use crate::parts::{are_installed, cached_program, free_port, loopback};
use crate::process::TIMEOUT;
use crate::publish::Dns;
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

#[test]
fn the_name_of_an_edge_resolves_to_its_server_and_moves_with_it() {
    let Some(coredns) = cached_program("coredns-1.15.0/coredns").filter(|_| are_installed(&["dig"])) else {
        return;
    };
    let Some(kubernetes) = Kubernetes::start() else { return };
    let edge = json!({"openyurt.io/is-edge-worker": "true"});
    service(&kubernetes, true);
    node(&kubernetes, "node1", &edge, [10, 0, 0, 1].into());
    node(&kubernetes, "unlinked", &edge, [10, 0, 0, 2].into());
    node(&kubernetes, "cloud-node1", &json!({}), [10, 0, 0, 3].into());
    let (place, hosts) = (TestDir::new(), tempfile::tempdir().unwrap());
    let servers = [("cloud-a", "127.0.0.2"), ("cloud-b", "127.0.0.3")].map(|(name, ip)| {
        let tables = format!(
            "[server.dns]\npublish = \"configmap\"\n\
             [server.node_names]\nnamespace = \"{NAMESPACE}\"\nservice = \"{SERVICE}\"\nresolve_to = \"server\"\n"
        );
        let (at, env) = (loopback(free_port()), [("POD_IP", ip), ("POD_NAMESPACE", NAMESPACE)]);
        let k = format!("--kubeconfig={}", kubernetes.admin().display());
        let mut server = ServerProcess::launch(&place, (name, at), &tables, &env, &[&k]);
        server.ready();
        (server, at)
    });
    let line = Line::to(servers[0].1);
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", line.port));

    let file = hosts.path().join("tunnel-nodes");
    std::fs::write(&file, "").unwrap();
    let dns = Dns::of_hosts(&place, &coredns, &file, true);
    // Updates the file like kubelet does for a mounted ConfigMap.
    let mounts = || {
        let map = kubernetes.object::<ConfigMap>("yurt-tunnel-nodes");
        let text = map.and_then(|map| map.data?.remove("tunnel-nodes")).unwrap_or_default();
        if std::fs::read_to_string(&file).unwrap() != text {
            let new = hosts.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(new, &file).unwrap();
        }
    };
    let leads = |name: &str, to: &str| {
        wait_until(&format!("{name} resolves to {to:?}"), 2 * TIMEOUT, || {
            mounts();
            dns.dig(name) == to
        });
    };
    let ip = kubernetes.object::<Service>(SERVICE).unwrap().spec.unwrap().cluster_ip.unwrap();
    leads("node1", "127.0.0.2");
    leads("unlinked", &ip);
    leads("cloud-node1", "10.0.0.3");
    // Only exact names of Nodes resolve: no suffix of a name, no subdomain and no other name.
    for unknown in ["ode1", "de1", "x.node1", "cloud", "localhost"] {
        leads(unknown, "");
    }

    line.lead_to(servers[1].1);
    line.reset();
    leads("node1", "127.0.0.3");
    leads("cloud-node1", "10.0.0.3");
    kubernetes.delete_everywhere::<Node>("node1");
    leads("node1", "");
}
