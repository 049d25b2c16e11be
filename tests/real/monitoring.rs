//! A real Prometheus accepts the dashboard and the alerts of `deploy/monitoring/`, and their metrics exist.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::parts::{are_installed, free_port};
use crate::process::{Running, TIMEOUT, run};
use crate::tunnel::{Pair, TestDir, tunnel};
use crate::wait::wait_until;

#[test]
fn each_alert_fires_when_it_should_and_not_in_a_rolling_restart() {
    if !are_installed(&["promtool"]) {
        return;
    }
    for (task, file) in [("check", "alerts.yaml"), ("test", "alerts_test.yaml")] {
        let file = folder().join(file);
        let output = run("promtool", &[task, "rules", file.to_str().unwrap()], None, TIMEOUT);
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn each_expression_of_the_dashboard_has_a_result() {
    if !are_installed(&["prometheus", "curl"]) {
        return;
    }
    let mut pair = Pair::start();
    let port = prometheus_port(&pair.place, pair.cloud.metrics);
    let _prometheus = port.1;
    let lasting = cause_refusals(&mut pair);
    for expression in expressions() {
        assert_metrics_exist(&expression);
        let rare = RARE.iter().any(|name| expression.contains(name));
        wait_until(&format!("a result of {expression}"), TIMEOUT, || {
            let output = query(port.0, &expression);
            assert_eq!(output["status"], "success", "{expression}: {output}");
            rare || output["data"]["result"].as_array().is_some_and(|series| !series.is_empty())
        });
    }
    drop(lasting);
}

/// Incremented only after an error that does not occur in this test.
const RARE: [&str; 5] = [
    "tunnel_sessions_truncated_total",
    "tunnel_sessions_reset_total",
    "tunnel_frames_dropped_total",
    "tunnel_backup_links_total",
    "tunnel_link_dial_failures_total",
];

/// Returns all expressions, with the variables substituted like in Grafana.
fn expressions() -> Vec<String> {
    let text = std::fs::read_to_string(folder().join("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let filled = |target: &Value| {
        let expression = target["expr"].as_str().unwrap().replace("$__rate_interval", "60s");
        expression.replace("$instance", ".*").replace("$node", ".*")
    };
    let all: Vec<_> = targets.map(filled).collect();
    assert!(all.len() > 25 && all.iter().all(|expression| !expression.contains('$')), "{all:?}");
    all
}

/// Fails the test if a name is not one of this program's metrics.
fn assert_metrics_exist(expression: &str) {
    let source = concat!(
        include_str!("../../crates/base/src/metrics.rs"),
        include_str!("../../crates/base/src/metrics/nodes.rs")
    );
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names: BTreeSet<_> = words.filter(|word| word.starts_with("tunnel_")).collect();
    for name in names {
        let mut stem = name;
        for end in ["_bucket", "_total", "_seconds", "_bytes"] {
            stem = stem.strip_suffix(end).unwrap_or(stem);
        }
        assert!(OTHERS.contains(&name) || source.contains(&format!("\"{stem}\"")), "{name} in {expression}");
    }
}

/// Metrics with names that are defined elsewhere.
const OTHERS: [&str; 2] = ["tunnel_cloud_nodes", "tunnel_tokio_tasks"];

/// Causes one of each event that is counted: a refused edge, a disconnected edge, an invalid client, and an ended
/// session. The returned processes keep producing events.
fn cause_refusals(pair: &mut Pair) -> Vec<Running> {
    let cloud = format!("127.0.0.1:{}", pair.cloud.grpc);
    let wrong = pair.place.edge_config("node2", &cloud, free_port()).replace("token = \"", "token = \"not-");
    let mut refused = pair.place.tunnel_as(tunnel(), ("edge", "wrong"), &wrong, &[], &[]);
    refused.wait_for_log("invalid token");
    let leaving = pair.place.edge_config("node3", &cloud, free_port());
    let mut leaving = pair.place.tunnel_as(tunnel(), ("edge", "leaving"), &leaving, &[], &[]);
    pair.cloud.wait_for_node("node3");
    leaving.terminate();
    leaving.wait_for_exit(TIMEOUT);
    let mut client = TcpStream::connect(("127.0.0.1", pair.cloud.connect)).unwrap();
    client.write_all(b"SSH-2.0-client\r\n\r\n").unwrap();
    client.read_to_end(&mut Vec::new()).unwrap();
    let proxy = format!("http://127.0.0.1:{}", pair.cloud.connect);
    let page = format!("http://node1:{}/", crate::parts::page());
    let output = run("curl", &["-sfp", "-x", &proxy, &page], None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    vec![refused]
}

/// Starts a Prometheus that scrapes the server each second, and returns its port.
fn prometheus_port(place: &TestDir, server: u16) -> (u16, Running) {
    let (port, dir) = (free_port(), place.path());
    let job = |name: &str, path: &str| {
        let targets = json!([{"targets": [format!("127.0.0.1:{server}")]}]);
        json!({"job_name": name, "metrics_path": path, "static_configs": targets})
    };
    let jobs = [job("tunnel-cloud", "/metrics"), job("tunnel-nodes", "/metrics/nodes")];
    let config = json!({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs});
    std::fs::write(dir.join("prometheus.yml"), config.to_string()).unwrap();
    let mut command = std::process::Command::new("prometheus");
    command.arg("--config.file").arg(dir.join("prometheus.yml")).arg("--storage.tsdb.path");
    command.arg(dir.join("tsdb")).arg(format!("--web.listen-address=127.0.0.1:{port}"));
    (port, Running::start("prometheus", dir, &mut command))
}

pub(crate) fn query(port: u16, expression: &str) -> Value {
    let (query, at) = (format!("query={expression}"), format!("http://127.0.0.1:{port}/api/v1/query"));
    let output = run("curl", &["-s", "-m", "5", "-G", "--data-urlencode", &query, &at], None, TIMEOUT);
    serde_json::from_str(&output.stdout).unwrap_or_else(|_| json!({"status": "success"}))
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/monitoring")
}
