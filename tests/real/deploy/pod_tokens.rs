//! Edges of the manifests prove their node by the token of their pod, with the rights of the manifests, at a
//! kube-apiserver that signs nothing with the CA of its clients.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Cluster, PASSWORD, USER, deploy, mounted};
use crate::kubernetes::{NAMESPACE, PODS};
use crate::parts::{free_port, page};
use crate::process::{Running, TIMEOUT, run};
use crate::tunnel::TestDir;
use crate::wait::wait_until;

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
        let dir = self.place.path().join("server");
        let address = |port: u16| format!("\"127.0.0.1:{port}\"");
        let config = shipped(
            "cloud.toml",
            &[
                ("\"[::]:9000\"", &format!("{}\nadmin_listen = {}", address(self.grpc), address(self.log))),
                ("\"[::]:6000\"", &address(free_port())),
                ("\"[::]:8443\"", &address(self.connect)),
                ("allow_from = [", "allow_from = [\"127.0.0.0/8\", "),
                ("\"[::]:8000\"", &address(free_port())),
                ("\"[::]:8080\"", &address(self.proxy)),
                ("/etc/tunnel", &dir.to_string_lossy()),
            ],
        );
        mounted(&dir, &self.place, &config);
        std::fs::write(dir.join("token/token"), "default:shared\n").unwrap();
        let env = [
            ("POD_IP", "127.0.0.1"),
            ("POD_NAME", "tunnel-cloud-0"),
            ("POD_NAMESPACE", NAMESPACE),
            ("STATE_DIRECTORY", self.place.path().to_str().unwrap()),
        ];
        let k = format!("--kubeconfig={}", self.cluster.kubernetes.kubeconfig_as(PODS).display());
        self.server = Some(self.place.tunnel(("server", name), &config, &env, &[&k]));
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
        let file = self.place.path().join(format!("{name}.token"));
        std::fs::write(&file, token).unwrap();
        let config = shipped(
            "edge.toml",
            &[
                (
                    "[\"tunnel.example.org:9000\"]",
                    &format!("[\"127.0.0.1:{}\"]\nadmin_listen = \"127.0.0.1:{}\"", self.grpc, free_port()),
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
