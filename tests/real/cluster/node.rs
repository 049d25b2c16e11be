//! A node: containerd with an image, and kubelet.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::network::Network;
use crate::process::{Running, TIMEOUT, run, run_command};
use crate::tunnel::TestDir;

/// The settings of a node.
pub(crate) struct Settings<'a> {
    /// 1 for `node1`, and so on.
    pub(crate) number: usize,
    /// Its InternalIP.
    pub(crate) ip: &'a str,
    /// Whether its Node has the label of edges from the start.
    pub(crate) is_edge: bool,
    /// Whether its kubelet requests its certificate from the cluster, and has none before.
    pub(crate) requests_certificate: bool,
}

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    // Fields drop in order: the processes before their control groups.
    _programs: Running,
    _groups: ControlGroups,
}

/// The control groups of its containers.
#[derive(Debug)]
struct ControlGroups(String);

impl Node {
    pub(crate) fn start(network: &Network, kubelet: &Path, node: &Settings<'_>) -> Self {
        let (place, sources) = (&network.place, Path::new(SOURCES));
        let (name, dir) =
            (format!("node{}", node.number), &place.path().join(format!("node{}", node.number)));
        std::fs::create_dir_all(dir.join("cni")).unwrap();
        let image = dir.join("image.tar");
        let mut command = Command::new(sources.join("image.sh"));
        let output = run_command("image.sh", command.arg(&image), None, TIMEOUT);
        assert!(output.status.success(), "{output:?}");

        let config = dir.join("kubelet.json");
        let mut settings = kubelet_config(place, dir);
        if node.requests_certificate {
            settings["serverTLSBootstrap"] = true.into();
        } else {
            let (cert, key) = (dir.join("kubelet.crt"), dir.join("kubelet.key"));
            place.authority.0.server(&[&name]).unwrap().write(&cert, &key).unwrap();
            settings["tlsCertFile"] = json!(cert);
            settings["tlsPrivateKeyFile"] = json!(key);
        }
        std::fs::write(&config, settings.to_string()).unwrap();
        std::fs::write(dir.join("containerd.toml"), containerd_config(dir)).unwrap();
        std::fs::write(dir.join("cni/pods.conflist"), cni_config(dir).to_string()).unwrap();

        // All processes end with the first process of their namespace.
        let mut command = network.edges[node.number - 1].command("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
        command.arg(sources.join("node.sh")).arg(dir).arg(image).arg(kubelet);
        let log = format!("kubelet{}", node.number);
        command.arg("--config").arg(config).arg("--kubeconfig").arg(place.path().join(&log));
        command.args(["--hostname-override", &name, "--node-ip", node.ip]);
        if node.is_edge {
            command.args(["--node-labels", "superedge.io/node-edge=enable"]);
        }
        command
            .arg("--root-dir")
            .arg(dir.join("kubelet-root"))
            .arg("--cert-dir")
            .arg(dir.join("kubelet-certs"));
        Self {
            _programs: Running::start(&log, place.path(), &mut command),
            _groups: ControlGroups(groups(dir)),
        }
    }
}

impl Drop for ControlGroups {
    /// Waits until the groups are empty, so that no process uses the node's files.
    fn drop(&mut self) {
        let find = format!("find /sys/fs/cgroup -depth -type d -path '*/{}*'", self.0);
        for _ in 0..200 {
            let left = run("sh", &["-c", &format!("{find} -exec rmdir {{}} + ; {find}")], None, TIMEOUT);
            if left.stdout.is_empty() {
                return;
            }
        }
    }
}

/// Returns a pod that prints one line per second, and each line that it reads.
pub(crate) fn busy(number: usize) -> Value {
    let script = "i=0; while :; do i=$((i + 1)); echo line $i; read -t 1 word && echo heard $word; done";
    on(number, busy_name(number), &json!({"command": ["sh", "-c", script], "stdin": true}))
}

/// Returns the name of the busy pod of a node.
pub(crate) fn busy_name(number: usize) -> &'static str {
    ["busy", "busy-too", "busy-as-well"][number - 1]
}

/// Returns a pod on `node1` with one container, which has these fields in addition to an image.
pub(crate) fn pod(name: &str, container: &Value) -> Value {
    on(1, name, container)
}

fn on(number: usize, name: &str, container: &Value) -> Value {
    let mut whole = json!({"name": "main", "image": IMAGE, "imagePullPolicy": "Never"});
    whole.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeName": format!("node{number}"), "tolerations": [{"operator": "Exists"}],
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [whole],
        },
    })
}

/// Returns the kubelet's config: kube-apiserver authenticates and authorizes its clients.
fn kubelet_config(place: &TestDir, dir: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": "::", "port": 10250, "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": place.files.ca},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": format!("unix://{}", dir.join("containerd.sock").display()),
        // The node shares this machine: leave everything that belongs to the whole machine alone.
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{}", groups(dir)), "failCgroupV1": false, "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
        "failSwapOn": false, "makeIPTablesUtilChains": false, "localStorageCapacityIsolation": false,
        "imageGCHighThresholdPercent": 100, "resolvConf": "",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        "podLogsDir": dir.join("pod-logs"),
        // A log that is rotated while it is read loses lines, with or without the tunnel.
        "containerLogMaxSize": "1Gi",
    })
}

/// Returns the name of the node's control groups, which differs from all others on this machine.
fn groups(dir: &Path) -> String {
    format!("tunnel-test{}", dir.display()).replace(['/', '.'], "-")
}

fn containerd_config(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"version = 2
root = "{dir}/containerd"
state = "{dir}/containerd-state"
[grpc]
address = "{dir}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
# Who may not lower a process' chance to be killed starts no pause container otherwise.
restrict_oom_score_adj = true
sandbox_image = "{IMAGE}"
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{dir}/cni"
"#
    )
}

/// Returns the CNI config: each pod has its own point-to-point interface to the node.
fn cni_config(dir: &Path) -> Value {
    json!({
        "cniVersion": "0.4.0", "name": "pods",
        "plugins": [{
            "type": "ptp",
            "ipam": {
                "type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}], "dataDir": dir.join("cni-addresses"),
            },
        }],
    })
}

const IMAGE: &str = "localhost/busybox:1";
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real/cluster");
