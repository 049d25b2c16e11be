//! Edges of the manifests prove their node by the token of their pod, with the rights of the manifests, at a
//! kube-apiserver that signs nothing with the CA of its clients.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Cluster, PASSWORD, USER, deploy, mounted};
use crate::kubernetes::{NAMESPACE, PODS};
use crate::parts::{env_var, free_port, loopback, page};
use crate::process::{Running, TIMEOUT, run};
use crate::tunnel::{TestDir, tunnel};
use crate::wait::{wait_for, wait_until};

/// Returns a config file of the base, with files, ports and addresses replaced by those of a test.
fn shipped(file: &str, replaced: &[(&str, &str)]) -> String {
    let text = std::fs::read_to_string(deploy("kustomize/base/files").join(file)).unwrap();
    replaced.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from}: {text}");
        text.replace(from, to)
    })
}

fn node(name: &str, labels: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
}

/// A cluster with the base, and a server with its config.
struct Manifests {
    server: Option<Running>,
    cluster: Cluster,
    place: TestDir,
    grpc: u16,
    log: u16,
    connect: u16,
    proxy: u16,
}

impl Manifests {
    fn start() -> Option<Self> {
        let cluster = Cluster::with_base()?;
        let place = TestDir::serving(&["tunnel.cloud.io", "127.0.0.1"]);
        let [grpc, log, connect, proxy] = [(); 4].map(|()| free_port());
        let mut this = Self { server: None, cluster, place, grpc, log, connect, proxy };
        let edge = json!({"superedge.io/node-edge": "enable"});
        for (name, labels) in [("node1", &edge), ("node2", &edge), ("cp1", &json!({}))] {
            this.cluster.kubernetes.apply_everywhere::<Node>(&node(name, labels));
        }
        this.serve("cloud");
        Some(this)
    }

    /// Starts a server, instead of the one from before.
    fn serve(&mut self, name: &str) {
        self.server = None;
        let state = self.place.path().to_owned();
        let kubeconfig = self.cluster.kubernetes.kubeconfig_as(PODS);
        let ports = [self.grpc, self.log, self.connect, self.proxy];
        self.server = Some(self.server_at(name, ports, None, (&state, &kubeconfig)));
    }

    /// Starts a server at these ports, with its peer's port for links, a folder for its state, and a kubeconfig.
    fn server_at(
        &self,
        name: &str,
        [grpc, log, connect, proxy]: [u16; 4],
        peer: Option<u16>,
        (state, kubeconfig): (&Path, &Path),
    ) -> Running {
        let dir = self.place.path().join("server");
        let address = |port: u16| format!("\"127.0.0.1:{port}\"");
        let peers = peer.map_or_else(
            || "kubernetes_service = \"tunnel-cloud-pods\"".to_owned(),
            |port| format!("addresses = [{}]", address(port)),
        );
        let config = shipped(
            "cloud.toml",
            &[
                ("\"[::]:9000\"", &format!("{}\nadmin_listen = {}", address(grpc), address(log))),
                ("\"[::]:6000\"", &address(free_port())),
                ("\"[::]:8443\"", &address(connect)),
                ("allow_from = [", "allow_from = [\"127.0.0.0/8\", "),
                ("\"[::]:8000\"", &address(free_port())),
                ("\"[::]:8080\"", &address(proxy)),
                ("/etc/tunnel", &dir.to_string_lossy()),
                ("kubernetes_service = \"tunnel-cloud-pods\"", &peers),
            ],
        );
        mounted(&dir, &self.place, &config);
        std::fs::write(dir.join("token/token"), "default:shared\n").unwrap();
        let env = [
            ("POD_IP", "127.0.0.1"),
            ("POD_NAME", name),
            ("POD_NAMESPACE", NAMESPACE),
            ("STATE_DIRECTORY", state.to_str().unwrap()),
        ];
        let k = format!("--kubeconfig={}", kubeconfig.display());
        self.place.tunnel(("server", name), &config, &env, &[&k])
    }

    fn server(&mut self) -> &mut Running {
        self.server.as_mut().unwrap()
    }

    /// Creates a pod of an account on a node. Returns its uid.
    fn pod(&self, name: &str, account: &str, node: &str) -> String {
        self.cluster.kubernetes.apply::<Pod>(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
                "containers": [{"name": "edge", "image": "tunnel"}]},
        }));
        self.cluster.object("pod", name)["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Returns a token of an account, bound to that pod.
    fn token(&self, account: &str, audience: &str, bound: Option<(&str, &str)>) -> String {
        let mut args = vec!["create", "token", account, "--duration=24h", "--audience", audience];
        if let Some((pod, uid)) = bound {
            args.extend(["--bound-object-kind=Pod", "--bound-object-name", pod, "--bound-object-uid", uid]);
        }
        let (is_well, token) = self.cluster.try_kubectl(&args);
        assert!(is_well, "{token}");
        token.trim().to_owned()
    }

    /// Starts the edge of a node with that token. Also returns the token's file.
    fn edge(&self, name: &str, node: &str, token: &str) -> (Running, PathBuf) {
        self.edge_of(&[self.grpc], name, node, token)
    }

    /// Like [`Self::edge`], but with the ports for links of some servers.
    fn edge_of(&self, servers: &[u16], name: &str, node: &str, token: &str) -> (Running, PathBuf) {
        let servers: Vec<_> = servers.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let file = self.place.path().join(format!("{name}.token"));
        std::fs::write(&file, token).unwrap();
        let config = shipped(
            "edge.toml",
            &[
                (
                    "[\"tunnel.example.org:9000\"]",
                    &format!("{servers:?}\nadmin_listen = \"127.0.0.1:{}\"", free_port()),
                ),
                ("/etc/tunnel/certs/ca.crt", &self.place.files.ca.to_string_lossy()),
                ("/var/run/secrets/tunnel/token", &file.to_string_lossy()),
            ],
        );
        (self.place.tunnel(("edge", name), &config, &[("NODE_NAME", node)], &[]), file)
    }

    fn wait_for_node(&mut self, node: &str) {
        let log = self.log;
        self.server().wait_for_answer(log, "/cloud/healthz", node);
    }

    /// Replaces the content of a file at once, as a kubelet does.
    fn renew(file: &Path, token: &str) {
        let new = file.with_extension("new");
        std::fs::write(&new, token).unwrap();
        std::fs::rename(new, file).unwrap();
    }
}

const AUDIENCE: &str = "tunnel.cloud.io";

#[test]
fn an_edge_of_the_manifests_links_by_the_token_of_its_pod_and_no_other_token_is_its() {
    let Some(mut manifests) = Manifests::start() else { return };
    manifests.server().wait_for_log("the token file has a default line");
    let log = manifests.log;
    manifests.server().wait_for_answer(log, "/readyz", "");
    let own = manifests.pod("edge-a", "tunnel-edge", "node1");
    let (edge, file) =
        manifests.edge("edge-a", "node1", &manifests.token("tunnel-edge", AUDIENCE, Some(("edge-a", &own))));
    manifests.wait_for_node("node1");

    let page = page();
    for (at, more) in [(manifests.connect, "-p"), (manifests.proxy, "-s")] {
        let args_of_user = |user: &[&str]| {
            let (through, url) = (format!("https://127.0.0.1:{at}"), format!("http://node1:{page}/"));
            let ca = manifests.place.files.ca.to_str().unwrap();
            let args =
                [&["-sSf", more, "-m", "20", "--proxy-cacert", ca, "-x", &through, &url], user].concat();
            run("curl", &args, None, TIMEOUT)
        };
        let (stranger, user) = (args_of_user(&[]), args_of_user(&["-U", &format!("{USER}:{PASSWORD}")]));
        assert!(stranger.stderr.contains("407"), "{stranger:?}");
        assert_eq!(user.stdout, "from the node", "{user:?}");
    }

    let at_cp = manifests.pod("edge-cp", "tunnel-edge", "cp1");
    let of_server = manifests.pod("cloud-a", "tunnel-cloud", "node2");
    for (name, token, expected) in [
        ("audience", manifests.token("tunnel-edge", "other", Some(("edge-a", &own))), "its audience"),
        ("unbound", manifests.token("tunnel-edge", AUDIENCE, None), "it is bound to no pod"),
        ("account", manifests.token("tunnel-cloud", AUDIENCE, Some(("cloud-a", &of_server))), "allows only"),
        (
            "stolen",
            manifests.token("tunnel-edge", AUDIENCE, Some(("edge-a", &own))),
            "its pod is on Node node1",
        ),
        (
            "cp1",
            manifests.token("tunnel-edge", AUDIENCE, Some(("edge-cp", &at_cp))),
            "Node cp1 has no edge label",
        ),
    ] {
        let (_edge, _) = manifests.edge(name, name, &token);
        manifests.server().wait_for_log(expected);
    }
    // A machine that is not a Node.
    let (_machine, _) = manifests.edge("machine1", "machine1", "shared");
    manifests.wait_for_node("machine1");

    let mut edge = edge;
    Manifests::renew(&file, &manifests.token("tunnel-edge", AUDIENCE, Some(("edge-a", &own))));
    edge.wait_for_log("changed, link replaced");
    manifests.cluster.kubernetes.apply_everywhere::<Node>(&node("node1", &json!({})));
    manifests.server().wait_for_log("edge label removed");
    manifests
        .cluster
        .kubernetes
        .apply_everywhere::<Node>(&node("node1", &json!({"superedge.io/node-edge": "enable"})));
    manifests.wait_for_node("node1");
    edge.assert_running();
}

#[test]
fn a_deleted_pod_or_node_ends_its_links_and_known_pods_link_without_kube_apiserver() {
    let Some(mut manifests) = Manifests::start() else { return };
    let one = manifests.pod("edge-a", "tunnel-edge", "node1");
    let two = manifests.pod("edge-b", "tunnel-edge", "node2");
    let token = |manifests: &Manifests, pod: &str, uid: &str| {
        manifests.token("tunnel-edge", AUDIENCE, Some((pod, uid)))
    };
    let (mut edge, _) = manifests.edge("edge-a", "node1", &token(&manifests, "edge-a", &one));
    manifests.wait_for_node("node1");
    // Reviewed by nobody so far.
    let another = token(&manifests, "edge-a", &one);
    let first = token(&manifests, "edge-b", &two);

    let file = manifests.place.path().join("known-pods.json");
    wait_until("pods, Nodes and keys are in the file", TIMEOUT, || {
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        ["edge-b", "node2", "kid"].iter().all(|what| known.contains(what))
    });

    manifests.cluster.kubernetes.stop();
    manifests.server().wait_for_log("watch failed");
    edge.terminate();
    edge.wait_for_exit(TIMEOUT);
    let (mut edge, _) = manifests.edge("edge-a-again", "node1", &another);
    edge.wait_for_log_of("server=", "linked");
    manifests.server().wait_for_log("pod admitted by the published keys");
    let (mut second, _) = manifests.edge("edge-b", "node2", &first);
    second.wait_for_log_of("server=", "linked");

    // A server that starts meanwhile knows the pods that the one before it knew, and no other.
    manifests.serve("cloud-again");
    for node in ["node1", "node2"] {
        manifests.wait_for_node(node);
    }
    let known = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, known.replace("edge-b", "edge-c")).unwrap();
    manifests.serve("cloud-with-other-pods");
    manifests.wait_for_node("node1");
    manifests.server().wait_for_log("only pods that were known before may link until it is back");
    assert!(!manifests.server().log().contains("node is linked node=node2"));
    manifests.cluster.kubernetes.restart();
    for node in ["node1", "node2"] {
        manifests.wait_for_node(node);
    }

    // No kubelet confirms that it has ended.
    let deleted = Instant::now();
    assert!(manifests.cluster.try_kubectl(&["delete", "pod", "edge-a", "--grace-period=0", "--force"]).0);
    manifests.server().wait_for_log("links ended: token revoked, pod or Node deleted");
    assert!(deleted.elapsed() < Duration::from_secs(10), "{:?}", deleted.elapsed());
    wait_until("its token is refused", TIMEOUT, || {
        manifests.server.as_ref().unwrap().log().contains("the ServiceAccount token is refused: ")
    });
    let deleted = Instant::now();
    manifests.cluster.kubernetes.delete_everywhere::<Node>("node2");
    wait_until("the links of node2 have ended", TIMEOUT, || {
        manifests
            .server
            .as_ref()
            .unwrap()
            .log()
            .matches("links ended: token revoked, pod or Node deleted")
            .count()
            == 2
    });
    assert!(deleted.elapsed() < Duration::from_secs(10), "{:?}", deleted.elapsed());
    manifests.server().wait_for_log("Node node2, which does not exist in the cluster");

    wait_until("deleted objects have left the file", TIMEOUT, || {
        std::fs::read_to_string(&file)
            .is_ok_and(|known| !known.contains("edge-a") && !known.contains("\"node2\":true"))
    });
    manifests.cluster.kubernetes.stop();
    manifests.serve("cloud-after-deletions");
    let (_again, _) = manifests.edge("edge-a-deleted", "node1", &another);
    manifests.server().wait_for_log("only pods that were known before may link until it is back");
    edge.assert_running();
    second.assert_running();
}

/// Returns a copy of a kubeconfig whose kube-apiserver does not exist.
fn without_apiserver(kubeconfig: &Path) -> PathBuf {
    let mut text: Value = serde_json::from_slice(&std::fs::read(kubeconfig).unwrap()).unwrap();
    text["clusters"][0]["cluster"]["server"] = format!("https://127.0.0.1:{}", free_port()).into();
    let file = kubeconfig.with_extension("nowhere");
    std::fs::write(&file, text.to_string()).unwrap();
    file
}

/// Two servers that are peers, each with a folder for its state. The second one uses another kubeconfig if there is one.
struct TwoServers {
    servers: [Running; 2],
    /// Their ports for links, admin, CONNECT and the proxy.
    ports: [[u16; 4]; 2],
}

impl TwoServers {
    fn start(manifests: &mut Manifests, second: Option<&Path>) -> Self {
        manifests.server = None;
        let ports = [(); 2].map(|()| [(); 4].map(|()| free_port()));
        let own = manifests.cluster.kubernetes.kubeconfig_as(PODS);
        let servers = [0, 1].map(|n| {
            let name = format!("cloud-{n}");
            let state = manifests.place.path().join(format!("state-{n}"));
            std::fs::create_dir(&state).unwrap();
            let kubeconfig = second.filter(|_| n == 1).unwrap_or(&own);
            manifests.server_at(&name, ports[n], Some(ports[1 - n][0]), (&state, kubeconfig))
        });
        Self { servers, ports }
    }
}

#[test]
fn a_server_without_kube_apiserver_admits_and_ends_the_pods_that_its_peer_follows() {
    let Some(mut manifests) = Manifests::start() else { return };
    let token = |manifests: &Manifests, pod: &str, uid: &str| {
        manifests.token("tunnel-edge", AUDIENCE, Some((pod, uid)))
    };
    let [one, gone] =
        [("edge-a", "node1"), ("edge-b", "node2")].map(|(pod, node)| manifests.pod(pod, "tunnel-edge", node));
    let [known, new] = [("edge-a", &one), ("edge-b", &gone)].map(|(pod, uid)| token(&manifests, pod, uid));
    let delete = |manifests: &Manifests, pod: &str| {
        assert!(manifests.cluster.try_kubectl(&["delete", "pod", pod, "--grace-period=0", "--force"]).0);
    };
    delete(&manifests, "edge-b");
    let nowhere = without_apiserver(&manifests.cluster.kubernetes.kubeconfig_as(PODS));
    let TwoServers { servers: [mut first, mut second], ports: [[peer, ..], [links, log, ..]] } =
        TwoServers::start(&mut manifests, Some(&nowhere));
    // The peer has admitted the pod.
    let (mut edge, _) = manifests.edge_of(&[peer], "edge-a", "node1", &known);
    edge.wait_for_log_of("server=", "linked");
    edge.kill();
    let (mut edge, _) = manifests.edge_of(&[links], "edge-a-again", "node1", &known);
    edge.wait_for_log_of("server=", "linked");
    second.wait_for_log("pod admitted by the published keys");
    let (_new, _) = manifests.edge_of(&[links], "edge-b", "node2", &new);
    second.wait_for_log("only pods that were known before may link until it is back");
    second.wait_for_answer(log, "/cloud/healthz", "node1");

    let deleted = Instant::now();
    delete(&manifests, "edge-a");
    second.wait_for_log("links ended: token revoked, pod or Node deleted");
    assert!(deleted.elapsed() < Duration::from_secs(25), "{:?}", deleted.elapsed());
    first.assert_running();
    edge.assert_running();
}

/// Sends a line over a session to an echo at the node. Returns the time until it is back.
fn echo(session: &mut TcpStream) -> Duration {
    let sent = Instant::now();
    session.write_all(b"still here").unwrap();
    session.read_exact(&mut [0; 10]).unwrap();
    sent.elapsed()
}

/// Returns the port of an echo for one client.
fn echo_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut reader = client.try_clone().unwrap();
        let _ = std::io::copy(&mut reader, &mut client);
    });
    port
}

/// `TUNNEL_TEST_OUTAGE` is the time in seconds that kube-apiserver is away.
#[test]
fn in_an_outage_links_and_sessions_stay_a_pod_restarts_and_a_new_one_waits() {
    let Some(mut manifests) = Manifests::start() else { return };
    let outage = env_var("TUNNEL_TEST_OUTAGE").map_or(15, |seconds| seconds.parse().unwrap());
    let outage = Duration::from_secs(outage);
    let say = |what: &str, time: Duration| drop(writeln!(std::io::stderr(), "{what}: {time:?}"));
    manifests
        .cluster
        .kubernetes
        .apply_everywhere::<Node>(&node("node3", &json!({"superedge.io/node-edge": "enable"})));
    let TwoServers { servers: [mut first, mut second], ports } = TwoServers::start(&mut manifests, None);
    let both = [ports[0][0], ports[1][0]];
    let pod = |pod: &str, node: &str| {
        let uid = manifests.pod(pod, "tunnel-edge", node);
        manifests.token("tunnel-edge", AUDIENCE, Some((pod, &uid)))
    };
    let start = |name: &str, node: &str| {
        let token = pod(name, node);
        let (mut edge, _) = manifests.edge_of(&both[..1], name, node, &token);
        edge.wait_for_log_of("server=", "linked");
        (edge, token)
    };
    let (mut steady, _) = start("edge-a", "node1");
    let (mut restarts, token) = start("edge-b", "node2");
    // Its pod is deleted before the outage, so the servers know it no more than one that is new.
    let unknown = pod("edge-c", "node3");
    assert!(manifests.cluster.try_kubectl(&["delete", "pod", "edge-c", "--grace-period=0", "--force"]).0);
    for n in [0, 1] {
        let file = manifests.place.path().join(format!("state-{n}/known-pods.json"));
        wait_until("the pods and keys are known", TIMEOUT, || {
            let known = std::fs::read_to_string(&file).unwrap_or_default();
            known.contains("edge-b") && known.contains("kid") && !known.contains("edge-c")
        });
    }

    // A session over CONNECT at the second server, which the first one relays.
    let [password, local] = [manifests.place.path().join("password"), PathBuf::from(free_port().to_string())];
    std::fs::write(&password, PASSWORD).unwrap();
    let mut command = tunnel();
    command.args(["connect", &format!("--server=https://127.0.0.1:{}", ports[1][2]), "--user", USER]);
    command.arg("--password-file").arg(&password).arg("--ca").arg(&manifests.place.files.ca);
    command.arg("--listen").arg(&local).arg(format!("node1:{}", echo_port()));
    let mut connect = Running::start("connect", manifests.place.path(), &mut command);
    let local: u16 = local.to_str().unwrap().parse().unwrap();
    let mut session = wait_for("the session", TIMEOUT, || TcpStream::connect(loopback(local)).ok());
    session.set_read_timeout(Some(TIMEOUT)).unwrap();
    echo(&mut session);

    manifests.cluster.kubernetes.stop();
    let away = Instant::now();
    for server in [&mut first, &mut second] {
        server.wait_for_log("watch failed");
    }
    // The pod comes back at the second server, as the first one is not in its list any more.
    restarts.terminate();
    restarts.wait_for_exit(TIMEOUT);
    let returns = Instant::now();
    let (mut restarted, _) = manifests.edge_of(&both[1..], "edge-b-again", "node2", &token);
    restarted.wait_for_log_of("server=", "linked");
    say("a pod is back at the other server after", returns.elapsed());
    second.wait_for_log("pod admitted by the published keys");
    let (_new, _) = manifests.edge_of(&both[..1], "edge-c-again", "node3", &unknown);
    first.wait_for_log("only pods that were known before may link until it is back");
    let mut slowest = Duration::ZERO;
    for second in 1..=outage.as_secs() {
        wait_until("a second passes", outage, || away.elapsed() >= Duration::from_secs(second));
        slowest = slowest.max(echo(&mut session));
    }
    say("slowest echo of the open session", slowest);
    for edge in [&mut steady, &mut restarted] {
        edge.assert_running();
        let links =
            edge.log().lines().filter(|line| line.contains("linked") && line.contains("server=")).count();
        assert_eq!(links, 1, "no link has ended");
    }

    manifests.cluster.kubernetes.restart();
    say("kube-apiserver was away for", away.elapsed());
    let back = Instant::now();
    let uid = manifests.pod("edge-c", "tunnel-edge", "node3");
    let known = manifests.token("tunnel-edge", AUDIENCE, Some(("edge-c", &uid)));
    say("its pod and token are there after", back.elapsed());
    Manifests::renew(&manifests.place.path().join("edge-c-again.token"), &known);
    first.wait_for_answer(ports[0][1], "/cloud/healthz", "node3");
    say("a new pod is admitted after", back.elapsed());
    for (server, [_, log, ..]) in [(&mut first, ports[0]), (&mut second, ports[1])] {
        server.wait_for_answer(log, "/readyz", "");
    }
    say("both servers follow it after", back.elapsed());
    echo(&mut session);
    for running in [&mut steady, &mut restarted, &mut connect] {
        running.assert_running();
    }
}
