//! A node: containerd with an image, and kubelet.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::network::{Machine, address};
use crate::process::{PATIENCE, Running, run, run_command};
use crate::tunnel::TestDir;

/// `node1`.
#[derive(Debug)]
pub(crate) struct Node {
    // Fields drop in order: the processes before the groups that they are in.
    _programs: Running,
    _groups: Groups,
}

/// The control groups of its containers.
#[derive(Debug)]
struct Groups(String);

impl Node {
    pub(super) fn start(place: &TestDir, machine: &Machine, kubelet: &Path) -> Self {
        let (dir, sources) = (place.path(), Path::new(SOURCES));
        let image = dir.join("image.tar");
        let mut command = Command::new(sources.join("image.sh"));
        let said = run_command("image.sh", command.arg(&image), None, PATIENCE);
        assert!(said.status.success(), "{said:?}");

        let serving = dir.join("kubelet");
        let (cert, key) = (serving.with_extension("crt"), serving.with_extension("key"));
        place.authority.0.server(&["node1"]).unwrap().write(&cert, &key).unwrap();
        let config = dir.join("kubelet.json");
        std::fs::write(&config, kubelet_config(place, &cert, &key).to_string()).unwrap();
        std::fs::write(dir.join("containerd.toml"), containerd_config(dir)).unwrap();
        std::fs::create_dir(dir.join("cni")).unwrap();
        std::fs::write(dir.join("cni/pods.conflist"), cni_config(dir).to_string()).unwrap();

        // All of it ends with the first process of its namespace.
        let mut command = machine.command("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
        command.arg(sources.join("node.sh")).arg(dir).arg(image).arg(kubelet);
        command.arg("--config").arg(config).arg("--kubeconfig").arg(dir.join("node"));
        command.args(["--hostname-override", "node1", "--node-ip", &address(1)]);
        command
            .arg("--root-dir")
            .arg(dir.join("kubelet-root"))
            .arg("--cert-dir")
            .arg(dir.join("kubelet-certs"));
        Self { _programs: Running::start("kubelet", dir, &mut command), _groups: Groups(groups(dir)) }
    }
}

impl Drop for Groups {
    /// Waits until nothing is in them, so that nobody uses the node's files any more.
    fn drop(&mut self) {
        let find = format!("find /sys/fs/cgroup -depth -type d -path '*/{}*'", self.0);
        for _ in 0..200 {
            let left = run("sh", &["-c", &format!("{find} -exec rmdir {{}} + ; {find}")], None, PATIENCE);
            if left.stdout.is_empty() {
                return;
            }
        }
    }
}

/// A pod that says a line a second, and what it is told.
pub(super) fn busy() -> Value {
    let script = "i=0; while :; do i=$((i + 1)); echo line $i; read -t 1 word && echo heard $word; done";
    pod("busy", &json!({"command": ["sh", "-c", script], "stdin": true}))
}

/// A pod on `node1`, of one container that has this beside an image.
pub(crate) fn pod(name: &str, container: &Value) -> Value {
    let mut whole = json!({"name": "main", "image": IMAGE, "imagePullPolicy": "Never"});
    whole.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeName": "node1", "tolerations": [{"operator": "Exists"}],
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [whole],
        },
    })
}

fn kubelet_config(place: &TestDir, cert: &Path, key: &Path) -> Value {
    let dir = place.path();
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": "0.0.0.0", "port": 10250, "healthzPort": 0,
        "tlsCertFile": cert, "tlsPrivateKeyFile": key,
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": false},
            "x509": {"clientCAFile": place.files.ca},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": format!("unix://{}", dir.join("containerd.sock").display()),
        // It is no machine of its own: whatever belongs to the whole machine is left alone.
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{}", groups(dir)), "failCgroupV1": false, "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
        "failSwapOn": false, "makeIPTablesUtilChains": false, "localStorageCapacityIsolation": false,
        "imageGCHighThresholdPercent": 100, "resolvConf": "",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        "podLogsDir": dir.join("pod-logs"),
        // A log that is rotated while it is read loses lines, whoever carries it.
        "containerLogMaxSize": "1Gi",
    })
}

/// Beside whatever else this machine runs.
fn groups(dir: &Path) -> String {
    format!("tunnel-test{}", dir.file_name().unwrap().to_string_lossy().replace('.', "-"))
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

/// Each pod has a cable of its own to the node.
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
