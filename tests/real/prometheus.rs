//! Prometheus in the cloud scrapes nodes that are reachable only through the tunnel.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::network::{ADMIN, Network, SERVER, address};
use crate::parts::{are_installed, cached_program, free_port};
use crate::process::{Running, TIMEOUT, run, run_command, send_request};
use crate::tunnel::{Pair, TestDir};
use crate::wait::wait_until;

#[test]
fn prometheus_scrapes_each_node_through_the_http_proxy_and_by_its_name() {
    if !are_installed(&["prometheus", "busybox"]) {
        return;
    }
    let Some(network) = Network::start(2) else { return };
    let _pages = [1, 2].map(|number| [page(&network, number), page_by_host(&network, number)]);
    let nodes = [1, 2].map(|number| format!("\"{}\" = \"node{number}\"\n", address(number))).concat();
    let tables = format!(
        "[server.http_proxy]\nlisten = \"{SERVER}:8080\"\nauth = \"none\"
[server.http]\nlisten_ip = \"{SERVER}\"\n[server.http.ports]\n\"9100\" = \"127.0.0.1:9100\"\n\"9200\" = \"host\"
[server.addresses.nodes]\n{nodes}"
    );
    let _server = network.server(SERVER, &tables);
    let _edges = [1, 2].map(|number| network.edge(number, SERVER, ""));
    let _prometheus = prometheus(
        &network,
        &[
            ("proxy", json!({"proxy_url": format!("http://{SERVER}:8080")})),
            ("name", json!({})),
            ("port-by-name", targets(&["node1:9200".to_owned(), "node2:9200".to_owned()])),
            // The routing of addresses to the server is not tested here: a Service or intercept rules do that.
            ("port-by-address", {
                let mut by_address = targets(&[1, 2].map(|number| format!("{}:9200", address(number))));
                by_address["proxy_url"] = format!("http://{SERVER}:9200").into();
                by_address
            }),
            ("discovered", {
                let url = format!("http://{SERVER}:{ADMIN}/sd/nodes?port=9100");
                let found = json!([{"url": url, "refresh_interval": "1s"}]);
                let node = json!([{"source_labels": ["__meta_tunnel_node"], "target_label": "node"}]);
                let proxy = format!("http://{SERVER}:8080");
                json!({"static_configs": [], "http_sd_configs": found, "relabel_configs": node, "proxy_url": proxy})
            }),
        ],
    );
    for job in ["proxy", "name", "discovered"] {
        for node in ["node1", "node2"] {
            wait_until(&format!("{node} is scraped by {job}"), 3 * TIMEOUT, || {
                page_labels(&network, job, &format!("{node}:9100")) == [node]
            });
        }
    }
    let up = query(&network, "up{job=\"discovered\",node=\"node2\"}");
    assert_eq!(up[0]["metric"]["instance"], "node2:9100", "{up:?}");
    for number in [1, 2] {
        let page = format!("node{number}-by-host");
        for (job, host) in [("port-by-name", format!("node{number}")), ("port-by-address", address(number))] {
            wait_until(&format!("{host} is scraped by {job}"), 3 * TIMEOUT, || {
                page_labels(&network, job, &format!("{host}:9200")) == [page.as_str()]
            });
        }
    }
}

pub(crate) fn targets(targets: &[String; 2]) -> Value {
    json!({"static_configs": [{"targets": targets}]})
}

/// Starts another page of the same node, which listens only at its address.
fn page_by_host(network: &Network, number: usize) -> Running {
    let name = format!("node{number}-by-host");
    let at = format!("{}:9200", address(number));
    let text = format!("page{{of=\"{name}\"}} 1\n");
    network.page(&network.edges[number - 1], (&name, &at), ("metrics", &text))
}

/// Returns the names in an instance's page, as Prometheus has stored them.
fn page_labels(network: &Network, job: &str, instance: &str) -> Vec<String> {
    let found = query(network, &format!("page{{job=\"{job}\",instance=\"{instance}\"}}"));
    found.iter().map(|series| series["metric"]["of"].as_str().unwrap().to_owned()).collect()
}

/// Returns Prometheus' result of a query, one value per series.
pub(crate) fn query(network: &Network, query: &str) -> Vec<Value> {
    let line =
        format!("curl -sf -m 5 -G --data-urlencode 'query={query}' http://127.0.0.1:9090/api/v1/query");
    let output: Value = serde_json::from_str(&network.try_sh(&line).stdout).unwrap_or_default();
    output["data"]["result"].as_array().cloned().unwrap_or_default()
}

/// Starts a page of metrics on a node, which contains the node's name.
fn page(network: &Network, number: usize) -> Running {
    let text = format!("page{{of=\"node{number}\"}} 1\n");
    let name = format!("node{number}");
    network.page(&network.edges[number - 1], (&name, "127.0.0.1:9100"), ("metrics", &text))
}

/// Starts a Prometheus that scrapes both nodes each second, with each of these jobs.
pub(crate) fn prometheus(network: &Network, jobs: &[(&str, Value)]) -> Running {
    let dir = network.place.path();
    let job = |(name, more): &(&str, Value)| {
        let mut job =
            json!({"job_name": name, "static_configs": [{"targets": ["node1:9100", "node2:9100"]}]});
        job.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        job
    };
    let config = json!({
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": jobs.iter().map(job).collect::<Vec<_>>(),
    });
    std::fs::write(dir.join("prometheus.yml"), config.to_string()).unwrap();
    let mut command = network.cloud.command("prometheus");
    command
        .arg("--config.file")
        .arg(dir.join("prometheus.yml"))
        .arg("--storage.tsdb.path")
        .arg(dir.join("tsdb"));
    Running::start("prometheus", dir, command.arg("--web.listen-address=127.0.0.1:9090"))
}

/// Returns the scrape configs that the operator makes of the chart's ServiceMonitor, for one server. The server's target
/// has a label `node`, as with `attachMetadata` or the jobs of Prometheus' own chart.
fn scraped_as_by_the_operator(helm: &Path, place: &TestDir, port: u16) -> Vec<Value> {
    let mut command = Command::new(helm);
    command.args([
        "template",
        "t",
        "--show-only",
        "templates/monitoring.yaml",
        "--set",
        "cloud.serviceMonitor.enabled=true,image.repository=tunnel,edge.server=tunnel.example.org:9000",
    ]);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/helm/tunnel"));
    command.envs(["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"].map(|name| (name, place.path())));
    let output = run_command("helm", &mut command, None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    let monitor: Value = serde_saphyr::from_str(&output.stdout).unwrap();
    let endpoints = monitor["spec"]["endpoints"].as_array().unwrap().iter().enumerate();
    let job = |(number, endpoint): (usize, &Value)| {
        let static_configs =
            json!([{"targets": [format!("127.0.0.1:{port}")], "labels": {"node": "machine"}}]);
        let relabel = |rule: &Value| json!({"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]});
        let mut rules: Vec<_> =
            endpoint["relabelings"].as_array().into_iter().flatten().map(relabel).collect();
        // All endpoints of a monitor have one job.
        rules.push(json!({"target_label": "job", "replacement": "tunnel-cloud-pods"}));
        json!({
            "job_name": format!("serviceMonitor/{number}"),
            "metrics_path": endpoint["path"],
            "honor_labels": endpoint["honorLabels"].as_bool().unwrap_or_default(),
            "static_configs": static_configs,
            "relabel_configs": rules,
        })
    };
    endpoints.map(job).collect()
}

#[test]
fn the_charts_service_monitor_keeps_each_path_and_the_alert_names_the_lost_node() {
    if !are_installed(&["prometheus", "curl"]) {
        return;
    }
    let Some(helm) = cached_program("helm-4.3.1/helm") else { return };
    let mut pair = Pair::start();
    let dir = pair.place.path().to_owned();
    let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/helm/tunnel/files/alerts.yaml");
    let alerts = std::fs::read_to_string(alerts).unwrap().replace("for: 5m", "for: 1s");
    std::fs::write(dir.join("alerts.yaml"), alerts).unwrap();
    let config = json!({
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": scraped_as_by_the_operator(&helm, &pair.place, pair.cloud.metrics),
    });
    std::fs::write(dir.join("prometheus.yml"), config.to_string()).unwrap();
    let port = free_port();
    let mut command = Command::new("prometheus");
    command
        .arg("--config.file")
        .arg(dir.join("prometheus.yml"))
        .arg("--storage.tsdb.path")
        .arg(dir.join("tsdb"));
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let _prometheus = Running::start("prometheus", &dir, &mut command);
    let has = |expression: &str, labels: &[(&str, &str)]| {
        let output = crate::monitoring::query(port, expression);
        let series = output["data"]["result"].as_array().cloned().unwrap_or_default();
        series.iter().any(|one| labels.iter().all(|(name, value)| one["metric"][*name] == *value))
    };
    for path in ["/metrics", "/metrics/nodes"] {
        wait_until(&format!("up of {path}"), TIMEOUT, || has("up == 1", &[("metrics_path", path)]));
    }
    wait_until("the node's own name", TIMEOUT, || has("tunnel_node_up == 1", &[("node", "node1")]));
    assert!(!has("{exported_node!=\"\"}", &[]), "no label of ours is renamed");
    pair.edge.process.terminate();
    let firing = "ALERTS{alertname=\"TunnelNodeDown\",alertstate=\"firing\"}";
    wait_until("the alert", 3 * TIMEOUT, || has(firing, &[("node", "node1")]));
}

#[test]
fn promtool_accepts_the_metrics_of_a_server_and_an_edge() {
    if !are_installed(&["promtool"]) {
        return;
    }
    let pair = Pair::start();
    for port in [pair.cloud.metrics, pair.cloud.log_port] {
        let page = send_request(port, "GET", "/metrics", "").unwrap();
        let (head, text) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{head}");
        let file = pair.place.path().join("metrics.txt");
        std::fs::write(&file, text).unwrap();
        let output = run("promtool", &["check", "metrics"], Some(&file), TIMEOUT);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
