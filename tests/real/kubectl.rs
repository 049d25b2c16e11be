//! kubectl through a real kube-apiserver to a real kubelet that is reachable only through the tunnel.

use std::io::Write;
use std::process::ChildStdin;
use std::time::{Duration, SystemTime};

use serde_json::json;

use crate::cluster::{Cluster, Way, WebhookAddress, node};
use crate::network::{OTHER_SERVER, SERVER, address};
use crate::parts::plain_peer;
use crate::process::{Running, TIMEOUT};
use crate::tunnel::{SERVER_NAME, TOKEN};
use crate::wait::wait_until;

#[test]
fn all_of_kubectl_works_with_the_egress_selector_over_tls_and_unix_socket() {
    let Some(mut cluster) = Cluster::start(Way::Egress) else { return };
    {
        let (_server, _edge) = (cluster.server(SERVER), cluster.edge(SERVER, ""));
        all_works(&cluster);
        cluster.webhook_answers(WebhookAddress::Service);
    }
    cluster.change(Way::Unix);
    let (_server, _edge) = (cluster.server(SERVER), cluster.edge(SERVER, ""));
    all_works(&cluster);
}

#[test]
fn all_of_kubectl_works_by_dns_names_if_apiserver_sends_server_names() {
    let Some(mut cluster) = Cluster::start(Way::Passthrough { verified: true }) else { return };
    let (_server, _edge) = (cluster.server(SERVER), cluster.edge(SERVER, ""));
    all_works(&cluster);
    cluster.webhook_answers(WebhookAddress::Url);
    cluster.change(Way::Passthrough { verified: false });
    assert!(cluster.sh("kubectl logs busy --tail=1").starts_with("line "));
    for line in ["exec busy -- true", "attach busy", "cp busy:/etc/passwd back", "port-forward pod/busy 8080"]
    {
        let output = cluster.network.try_sh(&format!("timeout 100 kubectl {line}"));
        assert!(
            !output.status.success() && output.stderr.contains("unrecognized name"),
            "{line}: {output:?}"
        );
    }
}

#[test]
fn all_of_kubectl_works_by_dns_names_if_the_server_terminates_tls() {
    let Some(mut cluster) = Cluster::start(Way::Terminate { verified: true }) else { return };
    let mut server = cluster.server(SERVER);
    let _edge = cluster.edge(SERVER, "");
    all_works(&cluster);
    the_certificate_may_change(&cluster, &mut server);
    // Now kube-apiserver names the node only in requests for logs: for all others the server must know where the pod
    // runs.
    drop(server);
    cluster.change(Way::Terminate { verified: false });
    let _server = cluster.server(SERVER);
    wait_until("a command reaches its pod", TIMEOUT, || {
        cluster.network.try_sh("kubectl logs busy --tail=1 && kubectl exec busy -- true").status.success()
    });
    all_works(&cluster);
    metrics_are_had_by_name_and_by_address(&cluster);
}

/// Requests metrics like metrics-server: at port 10250, by the node's name or by its address in Kubernetes.
fn metrics_are_had_by_name_and_by_address(cluster: &Cluster) {
    for host in ["node1".to_owned(), address(1)] {
        let line = format!(
            "curl -sfk -m 20 --cert kubelet-client.crt --key kubelet-client.key --connect-to {host}:10250:{SERVER}:10263 \
             https://{host}:10250/metrics/resource"
        );
        wait_until(&format!("metrics of {host} are available"), 3 * TIMEOUT, || {
            cluster.network.try_sh(&line).stdout.contains("# TYPE")
        });
    }
}

#[test]
fn kubectl_reaches_nodes_of_peers_survives_outages_and_reports_errors() {
    let Some(cluster) = Cluster::start(Way::Egress) else { return };
    let _servers = [cluster.server(SERVER), cluster.server(OTHER_SERVER)];
    let mut edge = cluster.edge(OTHER_SERVER, "[edge.session]\ndrain_timeout = \"0s\"\n");
    let kubectl = Kubectl { cluster: &cluster, pod: "busy", web_sockets: true };
    the_log_of_a_pod(&cluster);
    kubectl.exec();
    kubectl.cp();
    let mut talk = EchoCommand::start(&cluster);
    talk.survives_a_cut_line(&cluster);
    talk.wait_for_exit();

    edge.terminate();
    edge.wait_for_exit(TIMEOUT);
    assert_kubectl_reports(&cluster, "node node1 is not connected");
    let _edge = cluster.edge(OTHER_SERVER, "[edge.allow]\ntargets = [\"127.0.0.0/8:22\"]\n");
    assert_kubectl_reports(&cluster, "this edge may not dial");
}

/// SuperEdge's installer put v0.9 onto edges. A cluster is moved to servers of this program before its edges are. It
/// has no flow control, so the test has no client that stops reading.
#[test]
fn logs_exec_and_cp_work_through_an_edge_of_v0_9() {
    let (Some(program), Some(cluster)) = (plain_peer(), Cluster::start(Way::Egress)) else { return };
    let _server = cluster.server(SERVER);
    let (network, place) = (&cluster.network, &cluster.network.place);
    let mut command = network.edges[0].command(program);
    command.args(["edge-0.9", "--node", "node1", "--token", TOKEN, "--name", SERVER_NAME]);
    command.arg("--cloud").arg(format!("{SERVER}:9000")).arg("--ca").arg(&place.files.ca);
    let _edge = Running::start("plain-node1", place.path(), &mut command);
    wait_until("the log of a pod is read", TIMEOUT, || {
        network.try_sh("kubectl logs busy --tail=1").status.success()
    });
    the_log_of_a_pod(&cluster);
    for web_sockets in [true, false] {
        let kubectl = Kubectl { cluster: &cluster, pod: "busy", web_sockets };
        kubectl.exec();
        kubectl.cp();
    }
}

/// Runs every kubectl command that uses a kubelet, over WebSockets and over SPDY.
fn all_works(cluster: &Cluster) {
    the_log_of_a_pod(cluster);
    the_node_itself(cluster);
    for web_sockets in [true, false] {
        let kubectl = Kubectl { cluster, pod: "busy", web_sockets };
        kubectl.exec();
        kubectl.exec_with_a_terminal();
        kubectl.attach();
        // For the tunnel it is another exec. `port_forward` forwards the copied file.
        if web_sockets {
            kubectl.cp();
        }
        kubectl.port_forward();
    }
}

/// kubectl commands for one pod.
pub(crate) struct Kubectl<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) pod: &'a str,
    pub(crate) web_sockets: bool,
}

impl Kubectl<'_> {
    fn sh(&self, line: &str) -> String {
        let way = self.web_sockets;
        self.cluster.sh(&format!(
            "export KUBECTL_REMOTE_COMMAND_WEBSOCKETS={way} KUBECTL_PORT_FORWARD_WEBSOCKETS={way} pod={}; {line}",
            self.pod
        ))
    }

    pub(crate) fn exec(&self) {
        let output =
            self.sh("kubectl exec $pod -- sh -c 'echo out; echo err >&2; exit 7' 2>err; echo $?; cat err");
        assert!(output.starts_with("out\n7\nerr\n"), "{output}");
        // EOF arrives, after all data before it.
        let output = self.sh("head -c 20000000 /dev/urandom >typed; sha256sum <typed
            kubectl exec -i $pod -- sha256sum <typed; kubectl exec -i $pod -- cat <typed >back; cmp typed back");
        assert_equal_hashes(&output, 2);
    }

    pub(crate) fn exec_with_a_terminal(&self) {
        let output = self.sh(
            // The terminal size arrives with a delay.
            "script -qec 'stty rows 33 cols 77; kubectl exec -it $pod -- sh -c \"until stty size | grep \\\"33 77\\\"; do sleep 0.1; done\"' /dev/null </dev/null",
        );
        assert!(output.contains("33 77"), "{output}");
    }

    pub(crate) fn attach(&self) {
        // Only clients that are already attached receive output.
        self.sh("rm -f input heard; mkfifo input; exec 9<>input
            kubectl attach -i $pod <input >heard & trap 'kill $!; wait' EXIT
            until grep -q line heard; do kill -0 $! || exit; sleep 0.05; done
            echo hello >&9
            until grep -q 'heard hello' heard; do kill -0 $! || exit; sleep 0.05; done");
    }

    /// On a busy machine a kubelet sometimes ends such a copy early without an error (kubernetes#60140): kubectl then
    /// fetches the rest.
    pub(crate) fn cp(&self) {
        let output = self.sh("head -c 50000000 /dev/urandom >given; sha256sum <given
            kubectl cp given $pod:/tmp/given && kubectl exec $pod -- sha256sum /tmp/given || exit
            rm -f back; kubectl cp --retries=5 $pod:/tmp/given back >&2 || { stat -c '%s bytes came' back >&2; exit 1; }
            sha256sum <back");
        assert_equal_hashes(&output, 3);
    }

    /// One connection stalls while another continues. Each has its own kubectl: all connections of one kubectl share
    /// a stream without flow control, where an unread connection blocks the others, with or without the tunnel.
    pub(crate) fn port_forward(&self) {
        let output = self.sh("kubectl exec $pod -- sh -c 'pidof httpd >&2 || httpd -p 127.0.0.1:8080 -h /tmp'
            rm -f forwarding-*
            for port in 8081 8082; do
              kubectl port-forward pod/$pod $port:8080 >forwarding-$port & kubectls+=($!)
            done
            trap 'kill ${kubectls[*]}; wait' EXIT
            for n in 0 1; do
              until grep -q Forwarding forwarding-808$((n + 1)); do kill -0 ${kubectls[n]} || exit; sleep 0.05; done
            done
            exec 8<>/dev/tcp/127.0.0.1/8081; printf 'GET /given HTTP/1.0\\r\\n\\r\\n' >&8
            sha256sum <given
            for _ in 1 2; do curl -sSf -m 100 http://127.0.0.1:8082/given | sha256sum; done
            LC_ALL=C sed '1,/^.$/d' <&8 | sha256sum");
        assert_equal_hashes(&output, 4);
    }
}

/// Follows 100 MB of a log while it is written.
fn the_log_of_a_pod(cluster: &Cluster) {
    assert!(cluster.sh("kubectl logs busy --tail=2").starts_with("line "));
    let lines = "awk 'BEGIN { for (i = 0; i < 100000; i++) printf \"%08d %0990d\\n\", i, i }'";
    let script = format!("until [ -e /tmp/begin ]; do sleep 0.1; done; {lines}");
    cluster.apply("talker", &node::pod("talker", &json!({"command": ["sh", "-c", script]})));
    let output = cluster.sh(&format!(
        "kubectl wait --for=condition=Ready --timeout=110s pod/talker >&2; {lines} | sha256sum
        kubectl logs -f talker | sha256sum & follow=$!
        kubectl exec talker -- touch /tmp/begin; wait $follow; kubectl delete pod talker >&2",
    ));
    assert_equal_hashes(&output, 2);
}

/// New connections get the certificate that is on the disk, and existing ones continue. kube-apiserver refuses a
/// certificate without the node's name, and the server logs that.
fn the_certificate_may_change(cluster: &Cluster, server: &mut Running) {
    let (mut follows, _input) = cluster.network.spawn_sh("follow", "kubectl logs -f busy --tail=1");
    follows.wait_for_log("line ");
    cluster.certify("other", server);
    wait_until("kube-apiserver sees the new certificate", TIMEOUT, || {
        let output = cluster.network.try_sh("kubectl exec busy -- true").stderr;
        output.contains("certificate is valid for other, not node1")
    });
    server.wait_for_log("certificate lacks the name");
    cluster.certify("node1", server);
    wait_until("kube-apiserver sees a certificate for the node", TIMEOUT, || {
        cluster.network.try_sh("kubectl exec busy -- true").status.success()
    });
    let lines = follows.log().lines().count();
    wait_until("the log continues", TIMEOUT, || follows.log().lines().count() > lines + 1);
    follows.assert_running();
}

/// Fetches the kubelet's metrics through kube-apiserver's proxy, which needs the node's name to resolve.
fn the_node_itself(cluster: &Cluster) {
    wait_until("the node's name resolves", TIMEOUT, || {
        cluster.network.try_sh("getent ahostsv4 node1").status.success()
    });
    for page in ["metrics", "metrics/resource"] {
        let output = cluster.sh(&format!("kubectl get --raw /api/v1/nodes/node1/proxy/{page}"));
        assert!(output.contains("# HELP"), "{page}: {output}");
    }
}

/// Fails the test unless there are `lines` lines with the same hash.
fn assert_equal_hashes(output: &str, lines: usize) {
    let hashes: Vec<_> = output.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert!(hashes.len() == lines && hashes.iter().all(|hash| *hash == hashes[0]), "{output}");
}

/// A command that repeats its input, and must not lose any of it.
pub(crate) struct EchoCommand {
    kubectl: Running,
    input: ChildStdin,
    sent: String,
}

impl EchoCommand {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let (kubectl, input) = cluster.network.spawn_sh("exec", "kubectl exec -i busy -- cat");
        let mut new = Self { kubectl, input, sent: String::new() };
        new.assert_echo("before");
        new
    }

    fn send_line(&mut self, word: &str) {
        self.sent += &format!("{word}\n");
        self.input.write_all(format!("{word}\n").as_bytes()).unwrap();
    }

    /// Sends a word, and waits until the command repeats it.
    pub(crate) fn assert_echo(&mut self, word: &str) {
        self.send_line(word);
        self.kubectl.wait_for_log(word);
    }

    /// Blocks the connection between edge and cloud for 20 s, and checks that the command continues.
    pub(crate) fn survives_a_cut_line(&mut self, cluster: &Cluster) {
        cluster.network.edges[0].sh("nft add rule inet shut output tcp dport 9000 drop");
        self.send_line("meanwhile");
        let started = SystemTime::now();
        wait_until("20 s have passed", 2 * TIMEOUT, || started.elapsed().unwrap() > Duration::from_secs(20));
        self.kubectl.assert_running();
        cluster.network.edges[0].sh("nft flush chain inet shut output");
        self.kubectl.wait_for_log("meanwhile");
        self.assert_echo("after");
    }

    /// Ends the input, and checks that the command succeeds.
    pub(crate) fn wait_for_exit(self) {
        let Self { mut kubectl, input, sent } = self;
        drop(input);
        assert!(kubectl.wait_for_exit(TIMEOUT).success());
        assert_eq!(kubectl.log(), sent);
    }
}

/// Waits until kubectl reports `why` if the node is not reachable.
pub(crate) fn assert_kubectl_reports(cluster: &Cluster, why: &str) {
    for line in ["kubectl logs busy", "kubectl exec busy -- true"] {
        // Servers announce nodes to each other with a short delay.
        wait_until(&format!("{line} reports {why:?}"), TIMEOUT, || {
            let output = cluster.network.try_sh(line);
            let is_reported = !output.status.success() && output.stderr.contains(why);
            if !is_reported {
                let _ = writeln!(std::io::stderr(), "{line}: {output:?}");
            }
            is_reported
        });
    }
}
