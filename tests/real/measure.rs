//! Figures that are printed on request. The overhead of the tunnel for kubectl, compared with a kube-apiserver that
//! dials the kubelet directly, by `scripts/kubernetes.sh --measure`. The memory of links of users, by
//! `cargo test --release --test real -- --ignored --nocapture a_thousand_users`.

use std::io::Write;

use serde_json::json;
use tunnel::uplink::client::UserUplinks;
use tunnel_proto::names::Target;

use crate::cluster::{Cluster, Way, node};
use crate::network::{SERVER, address};
use crate::process::TIMEOUT;
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::users;
use crate::wait::wait_until;

#[test]
#[ignore = "not a test: started by scripts/kubernetes.sh --measure"]
fn kubectl() {
    let mut cluster = Cluster::start(Way::Direct).expect("all programs");
    write_the_log(&cluster);
    cluster.network.edges[0].sh("nft flush chain inet shut input");
    let direct = LatencyResults::take(&cluster, &format!("https://{}:10250", address(1)));
    cluster.network.edges[0].shut("wan");
    cluster.change(Way::Egress);
    let (_server, _edge) = (cluster.server(SERVER), cluster.edge(SERVER, ""));
    let egress = format!(
        "--proxy https://{SERVER}:8000 --proxytunnel --proxy-cacert ca.crt --proxy-cert egress-client.crt \
         --proxy-key egress-client.key https://node1:10250"
    );
    let tunnel = LatencyResults::take(&cluster, &egress);
    let rows = [
        row(
            "kubectl exec, a line there and back, p50, against kubelet directly",
            "us",
            tunnel.echo,
            direct.echo,
        ),
        row("kubectl exec of nothing, from start to end, p50", "ms", tunnel.whole, direct.whole),
        row(
            "kubectl logs of 100 MB, rate against curl to the kubelet directly",
            "MB/s",
            tunnel.logs,
            direct.curl,
        ),
        row("the same, against kubectl logs without the tunnel", "MB/s", tunnel.logs, direct.logs),
        row("curl of that log, rate against curl to the kubelet directly", "MB/s", tunnel.curl, direct.curl),
    ];
    let _ = write!(std::io::stderr(), "\n{}", rows.concat());
}

/// The memory of a server for each of a thousand people's links, and with a session on each.
#[test]
#[ignore = "takes three minutes"]
fn a_thousand_users() {
    let (place, user) = (TestDir::new(), |number: usize| format!("user{number}/laptop"));
    let more = users::tables(&place, (0..USERS).map(user), "rules = [{ nodes = [\"node1\"] }]");
    let mut server = ServerProcess::start_with(&place, &more, &[]);
    let _edge = Edge::start(&place, &format!("localhost:{}", server.grpc));
    server.wait_for_node("node1");
    let target: Target = format!("node1:{}", users::holding_target()).parse().unwrap();
    let memory = |what: &str, before: u64, most: f64| {
        // The allocator returns memory some seconds after it was freed.
        std::thread::sleep(2 * TIMEOUT / 3);
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        let each = kib.saturating_sub(before) as f64 / USERS as f64;
        let _ = writeln!(std::io::stderr(), "{what}: {kib} KiB, {each:.1} KiB more for each");
        assert!(each <= most, "{what}: {each:.1} KiB more for each, at most {most}");
        kib
    };
    let _ = tunnel_net::fd_limit::raise();
    let idle = memory("server without users", 0, f64::INFINITY);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let link = |number| UserUplinks::connect(users::link_config(&place, &user(number), server.grpc));
    let links: Vec<_> = (0..USERS).map(|number| runtime.block_on(link(number)).unwrap()).collect();
    let linked = memory("with a link of each of 1000 users", idle, LINK_KIB);
    let sessions: Vec<_> = links.iter().map(|links| runtime.block_on(links.open(&target)).unwrap()).collect();
    memory("with an idle session on each link", linked, SESSION_KIB);
    drop((sessions, links));
    drop(runtime);
    memory("afterwards", idle, LEFT_KIB);
}

/// The results of one way to the kubelet; each is a median.
struct LatencyResults {
    /// RTT of one line to a command that echoes it, in microseconds.
    echo: f64,
    /// Duration of a command that does nothing, in milliseconds.
    whole: f64,
    /// Rate of kubectl in MB/s.
    logs: f64,
    /// Rate of curl in MB/s.
    curl: f64,
}

impl LatencyResults {
    /// Measures kubectl through kube-apiserver, and curl with these arguments that reach the kubelet.
    fn take(cluster: &Cluster, kubelet: &str) -> Self {
        wait_until("a command runs", TIMEOUT, || {
            cluster.network.try_sh("kubectl exec busy -- true").status.success()
        });
        let median = |line: &str| {
            let output = cluster.sh(line);
            let mut all: Vec<f64> = output.lines().map(|number| number.parse().unwrap()).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let since = "micros() { now=$EPOCHREALTIME; echo $((${now/./} - ${1/./})); }";
        let echo = median(&format!(
            "{since}; coproc kubectl exec -i busy -- cat
            say() {{ echo $1 >&${{COPROC[1]}}; read -r -u ${{COPROC[0]}}; }}
            for n in {{1..50}}; do say warm; done
            for n in {{1..1000}}; do begun=$EPOCHREALTIME; say $n; micros $begun; done
            exec {{COPROC[1]}}>&-"
        ));
        let whole = median(&format!(
            "{since}; for n in {{1..20}}; do begun=$EPOCHREALTIME; kubectl exec busy -- true; micros $begun; done"
        )) / 1000.0;
        let micros = median(&format!(
            "{since}; for n in {{1..5}}; do begun=$EPOCHREALTIME
            [ $(kubectl logs talker | wc -c) = {LOG} ]; micros $begun; done"
        ));
        let curl = median(&format!(
            "for n in {{1..5}}; do curl -sSfk --cert kubelet-client.crt --key kubelet-client.key -o log \
            -w '%{{speed_download}}\\n' {kubelet}/containerLogs/default/talker/main; [ $(wc -c <log) = {LOG} ]; done"
        ));
        Self { echo, whole, logs: f64::from(LOG) / micros, curl: curl / 1e6 }
    }
}

/// Runs a pod that writes a log of 100 MB.
fn write_the_log(cluster: &Cluster) {
    let lines = "awk 'BEGIN { for (i = 0; i < 100000; i++) printf \"%08d %0990d\\n\", i, i }'";
    cluster.apply("talker", &node::pod("talker", &json!({"command": ["sh", "-c", lines]})));
    cluster.sh("kubectl wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=110s pod/talker");
}

/// Formats a row of the benchmarks' tables.
fn row(figure: &str, unit: &str, tunnel: f64, direct: f64) -> String {
    let ratio = tunnel / direct;
    format!("| {figure} | {tunnel:.0} {unit} | {direct:.0} {unit} |  | {ratio:.2} |  |  |  |\n")
}

/// Number of users, each with one link.
const USERS: usize = 1000;
/// Maximum of KiB that a server needs for an idle link of a user, also in a debug build with debug logs. A release
/// build needs less.
const LINK_KIB: f64 = 80.0;
/// Maximum of KiB more for an idle session that it relays.
const SESSION_KIB: f64 = 32.0;
/// Maximum of KiB for each link that a server keeps once all links have ended.
const LEFT_KIB: f64 = 20.0;
/// Size of the log in bytes.
const LOG: u32 = 100_000_000;
