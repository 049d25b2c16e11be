//! A whole Kubernetes on two machines: etcd and kube-apiserver in the cloud, containerd, kubelet and a running pod at
//! the edge. Between them is what the test starts.

pub(crate) mod node;
mod ways;
mod webhook;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::apiserver;
use crate::certificates::Files;
use crate::network::{Network, POD};
use crate::parts::{have, kept};
use crate::process::{PATIENCE, Running};
use crate::wait::wait_until;
use node::Node;
pub(crate) use ways::Way;
use ways::{APISERVER, kubelet_client};
pub(crate) use webhook::Hook;

/// All of it but the tunnel.
#[derive(Debug)]
pub(crate) struct Cluster {
    // Fields drop in order: who uses a thing before the thing.
    _node: Node,
    apiserver: Running,
    _etcd: Running,
    pub(crate) network: Network,
    way: Way,
    program: PathBuf,
}

impl Cluster {
    /// Starts it with this way to the kubelet, up to a pod that runs. None if a program is missing, or who runs the
    /// test is not root.
    pub(crate) fn start(way: Way) -> Option<Self> {
        let etcd = kept("etcd-3.6.16/etcd")?;
        let (program, kubelet) =
            (kept("kubernetes-1.36.3/kube-apiserver")?, kept("kubernetes-1.36.3/kubelet")?);
        let kubectl = kept("kubernetes-1.36.3/kubectl")?;
        if !have(&["containerd", "ctr", "runc", "busybox", "script", "ptp", "socat"]) {
            return None;
        }
        let network = Network::start(1)?;
        std::os::unix::fs::symlink(kubectl, network.place.path().join("kubectl")).unwrap();
        let etcd = start_etcd(&network, &etcd);
        let apiserver = start_apiserver(&network, &program, way);
        let node = Node::start(&network.place, &network.edges[0], &kubelet);
        let cluster = Self { _node: node, apiserver, _etcd: etcd, network, way, program };
        cluster.is_ready();
        cluster.apply("busy", &node::busy());
        cluster.sh("kubectl wait --for=condition=Ready --timeout=110s pod/busy");
        Some(cluster)
    }

    /// Goes over to another way to the kubelet; pods of the tunnel have to be started anew.
    pub(crate) fn change(&mut self, way: Way) {
        self.apiserver.kill();
        self.apiserver = start_apiserver(&self.network, &self.program, way);
        self.way = way;
        self.is_ready();
    }

    fn is_ready(&self) {
        wait_until("apiserver is ready", 6 * PATIENCE, || {
            self.network.tries("kubectl get --raw /readyz").status.success()
        });
        // It says so before the first objects are there.
        self.sh("kubectl wait --for=create --timeout=110s namespace/default");
    }

    /// Runs a line of bash in the cloud, where kubectl is at hand; what it prints.
    pub(crate) fn sh(&self, line: &str) -> String {
        self.network.sh(line)
    }

    /// Creates an object, or changes it.
    pub(crate) fn apply(&self, name: &str, object: &Value) {
        let file = self.network.place.path().join(format!("{name}.json"));
        std::fs::write(&file, object.to_string()).unwrap();
        let line = format!("kubectl apply -f {}", file.display());
        // Just after its start apiserver refuses some for a moment: it does not know their kinds or their namespace yet.
        wait_until(&line, 3 * PATIENCE, || {
            let said = self.network.tries(&line);
            if !said.status.success() {
                let _ = writeln!(std::io::stderr(), "{line}: {said:?}");
            }
            said.status.success()
        });
    }

    /// Starts a pod of the tunnel; kube-apiserver comes to the one at [`POD`].
    pub(crate) fn pod(&self, ip: &str) -> Running {
        let tables = if ip == POD { self.way.tables(&self.network.place) } else { String::new() };
        let kubeconfig = format!("--k={}", self.network.place.path().join("admin").display());
        let args: &[&str] = if self.way.asks() { &[&kubeconfig] } else { &[] };
        self.network.pod_with(ip, &tables, args)
    }

    /// Puts a certificate for this name in the place of the one that the pod of the tunnel shows kube-apiserver, which
    /// reads it soon.
    pub(crate) fn certify(&self, name: &str, pod: &mut Running) {
        ways::shown(&self.network.place, name);
        pod.hang_up();
    }

    /// Starts the edge of `node1` towards that pod, with these tables beside the usual.
    pub(crate) fn edge(&self, pod: &str, tables: &str) -> Running {
        self.network.edge(1, pod, &(self.way.edge_tables(&self.network.place) + tables))
    }
}

fn start_etcd(network: &Network, program: &Path) -> Running {
    let dir = network.place.path();
    let mut etcd =
        Running::start("etcd", dir, &mut apiserver::etcd(network.cloud.command(program), dir, ETCD, 2380));
    etcd.says("ready to serve client requests");
    etcd
}

fn start_apiserver(network: &Network, program: &Path, way: Way) -> Running {
    let place = &network.place;
    let users = [("admin", "admin", "system:masters"), ("node", "system:node:node1", "system:nodes")];
    let at = format!("{POD}:6443").parse().unwrap();
    let mut command = apiserver::apiserver(network.cloud.command(program), place, ETCD, at, &users);
    command.args(["--authorization-mode", "Node,RBAC"]);
    // Nobody here makes tokens for pods.
    command.args(["--disable-admission-plugins", "ServiceAccount"]);
    let Files { cert, key, .. } = kubelet_client(place);
    place.authority.0.client(APISERVER).unwrap().write(&cert, &key).unwrap();
    command.arg("--kubelet-client-certificate").arg(cert).arg("--kubelet-client-key").arg(key);
    command.args(way.apiserver_flags(place));
    Running::start("apiserver", place.path(), &mut command)
}

const ETCD: &str = "http://127.0.0.1:2379";
