//! A whole Kubernetes for experiments, started by `scripts/kubernetes.sh`.

use crate::cluster::{Cluster, Way};
use crate::network::SERVER;
use crate::parts::env_var;
use crate::process::TIMEOUT;
use crate::wait::wait_until;

/// Runs until the end of its input, or runs each of [`LINES`] once.
#[test]
#[ignore = "not a test: started by scripts/kubernetes.sh"]
fn kubernetes() {
    let way = match env_var("TUNNEL_PLAY_WAY").as_deref() {
        Some("unix") => Way::Unix,
        Some("names") => Way::Passthrough { verified: true },
        _ => Way::Egress,
    };
    let cluster = Cluster::start(way).expect("all programs");
    let (_server, _edge) = (cluster.server(SERVER), cluster.edge(SERVER, ""));
    let dir = cluster.network.place.path().display();
    if env_var("TUNNEL_PLAY_CHECK").is_some() {
        for (line, expected) in LINES {
            // A kubelet has its first metrics some seconds after its start.
            wait_until(&format!("{line} prints {expected:?}"), 3 * TIMEOUT, || {
                cluster.sh(line).contains(expected)
            });
            eprintln!("{line}: ok");
        }
        return;
    }
    let lines: String = LINES.iter().map(|(line, _)| format!("  {dir}/cloud {line}\n")).collect();
    eprintln!(
        "
kube-apiserver, etcd and CoreDNS run in the cloud, kubelet and a pod at the edge; only the tunnel reaches the edge.
Logs and configs are in {dir}. Try:

{lines}  {dir}/cloud kubectl logs -f busy
  {dir}/cloud kubectl exec -it busy -- sh
  {dir}/cloud bash                  # a shell in the cloud, where kubectl works and node1's network is out of reach

Ctrl-C ends all of it."
    );
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Commands to try, with a part of their output.
const LINES: [(&str, &str); 5] = [
    ("kubectl get node,pod -o wide", "node/node1"),
    ("kubectl logs busy --tail=3", "line "),
    ("kubectl exec busy -- hostname", "busy\n"),
    ("kubectl cp busy:/etc/passwd passwd", ""),
    ("kubectl get --raw /api/v1/nodes/node1/proxy/metrics/resource", "node_cpu_usage_seconds_total"),
];
