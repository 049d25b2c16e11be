//! A compromised node that tries to attract the traffic of others, by what it writes into its objects or by its name.

use std::collections::HashMap;
use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::addresses::own_address;
use crate::support::apiserver::server_with;
use crate::support::clients::assert_echo;
use crate::support::programs::{TestDir, TestServer, edge};
use crate::support::{assert_eventually, targets};

/// The name of a webhook's Service, and of a node that tries to attract its traffic.
const WEBHOOK: &str = "policy.shop.svc";
const CLUSTER_IP: &str = "10.96.0.7";

fn node(name: &str, ips: &[&str]) -> Value {
    let addresses: Vec<_> = ips.iter().map(|ip| json!({"type": "InternalIP", "address": ip})).collect();
    json!({"metadata": {"name": name, "labels": {"superedge.io/node-edge": "enable"}}, "status": {"addresses": addresses}})
}

fn server(namespace: &str, name: &str, at: &str, ips: &[&str]) -> Value {
    let ips: Vec<_> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    json!({
        "metadata": {"namespace": namespace, "name": name}, "spec": {"nodeName": at},
        "status": {"phase": "Running", "podIPs": ips},
    })
}

/// Returns a cluster in which node1 has the webhook's endpoint. The node named like the webhook's Service claims
/// addresses of others.
fn cluster(echo: SocketAddr) -> HashMap<&'static str, Vec<Value>> {
    let own = echo.ip().to_string();
    let nodes = vec![
        node("node1", &["172.16.0.1", "172.16.0.2"]),
        node("node2", &["172.16.0.3"]),
        node(WEBHOOK, &["172.16.0.9", CLUSTER_IP, "172.16.0.1", "172.16.0.4", &own]),
    ];
    let servers = vec![
        server("shop", "web", "node1", &["172.16.0.4"]),
        server("evil", "pod", WEBHOOK, &["172.16.0.3", "172.16.0.2", CLUSTER_IP, &own]),
    ];
    let services = vec![json!({
        "metadata": {"namespace": "shop", "name": "policy"},
        "spec": {"clusterIPs": [CLUSTER_IP], "ports": [{"name": "https", "port": 443}]},
    })];
    let slices = vec![json!({
        "metadata": {
            "namespace": "shop", "name": "policy-1", "labels": {"kubernetes.io/service-name": "policy"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [own], "conditions": {"ready": true}, "nodeName": "node1"}],
        "ports": [{"name": "https", "port": echo.port()}],
    })];
    HashMap::from([("nodes", nodes), ("pods", servers), ("services", services), ("endpointslices", slices)])
}

/// Waits until the server has listed all objects.
async fn listed(server: &TestServer) {
    assert_eventually("all objects are listed", async {
        for (target, status) in [("none.shop.svc:443", 502), ("172.16.0.4:1", 421), ("172.16.0.1:1", 421)] {
            while server.request_connect(target).await.status != status {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn no_node_attracts_traffic_of_services_nodes_or_pods_by_its_claims() {
    let (place, echo) =
        (TestDir::new(), targets::serve_at(&format!("{}:0", own_address()), targets::echo_one).await);
    let table = format!("\"{}\" = \"node1\"\n", echo.ip());
    let server = server_with(&place, &table, cluster(echo)).await;
    let _node1 = edge(&place, &server, "node1").await;
    let _evil = edge(&place, &server, WEBHOOK).await;
    listed(&server).await;
    // The webhook's traffic reaches its endpoint at node1.
    for service in [WEBHOOK, "POLICY.Shop.svc.", "policy.shop.svc.cluster.local", CLUSTER_IP] {
        assert_echo(&mut server.open(&format!("{service}:443")).await, service).await;
    }
    // The fixed table has priority over the claims of Nodes and Kubernetes pods.
    assert_echo(&mut server.open(&echo.to_string()).await, "by the fixed table").await;
    // If two objects claim an address, neither gets it, and the refusal names both.
    for (ip, one, other) in [
        ("172.16.0.1", "node node1", "node policy.shop.svc"),
        ("172.16.0.2", "node node1", "pod evil/pod at policy.shop.svc"),
        ("172.16.0.3", "node node2", "pod evil/pod at policy.shop.svc"),
        ("172.16.0.4", "node policy.shop.svc", "pod shop/web at node1"),
    ] {
        let refused = server.request_connect(&format!("{ip}:443")).await;
        assert_eq!(refused.status, 421, "{refused:?}");
        let expected = format!("{ip} is claimed by both {one} and {other}");
        assert!(refused.body.starts_with(&expected), "{expected}: {refused:?}");
    }
}
