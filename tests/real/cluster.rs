//! A whole Kubernetes on separate machines: etcd and kube-apiserver in the cloud; containerd, kubelet and a running
//! pod at each edge. The test starts the tunnel between them.

pub(crate) mod node;
mod ways;
mod webhook;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::apiserver;
use crate::certificates::Files;
use crate::network::{BEHIND_NAT, Machine, Network, SERVER, address};
use crate::parts::{are_installed, cached_program};
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, clear_environment};
use crate::wait::wait_until;
use node::{Node, Settings};
pub(crate) use ways::{APISERVER, Way, kubelet_client, target_ca};
pub(crate) use webhook::WebhookAddress;

/// The cluster without the tunnel.
#[derive(Debug)]
pub(crate) struct Cluster {
    // Fields drop in order: users of a resource before the resource.
    nodes: Vec<Node>,
    _signer: Option<Running>,
    apiserver: Running,
    _etcd: Running,
    pub(crate) network: Network,
    way: Way,
    program: PathBuf,
}

impl Cluster {
    /// Starts a cluster with one node, and waits until its pod runs. kube-apiserver reaches the kubelet as `way`
    /// says. Returns `None` if a program is missing, or if the test does not run as root.
    pub(crate) fn start(way: Way) -> Option<Self> {
        let mut cluster = Self::without_nodes(way, 1)?;
        cluster.join(&Settings { number: 1, ip: &address(1), is_edge: true, requests_certificate: false })?;
        cluster.comes_up();
        Some(cluster)
    }

    /// Like [`Self::start`], but with two nodes; the second has only an IPv6 address. Their kubelets request
    /// certificates from the cluster, and have none until [`Self::approve_kubelets`].
    pub(crate) fn signed(way: Way) -> Option<Self> {
        let manager = cached_program("kubernetes-1.36.3/kube-controller-manager")?;
        let mut cluster = Self::without_nodes(way, 2)?;
        let ips = [address(1), cluster.network.add_v6(2)];
        for (number, ip) in (1..).zip(&ips) {
            cluster.join(&Settings { number, ip, is_edge: true, requests_certificate: true })?;
        }
        cluster.comes_up();
        let (place, cloud) = (&cluster.network.place, &cluster.network.cloud);
        let mut command = apiserver::signer(cloud.command(manager), place, 10257, "24h");
        let signer = Running::start("controller-manager", place.path(), &mut command);
        Some(Self { _signer: Some(signer), ..cluster })
    }

    /// Starts a cluster with three nodes, with kubeadm's flags: `node1` is behind a NAT, kube-apiserver reaches only
    /// the others. Also returns the machine of the NAT.
    pub(crate) fn with_nat() -> Option<(Self, Machine)> {
        let mut cluster = Self::without_nodes(Way::Direct, 3)?;
        let [behind, near @ ..] = &cluster.network.edges[..] else { panic!("three machines") };
        behind.sh("ip link delete wan");
        let nat = cluster.network.cloud.nat(behind);
        for node in near {
            node.sh("nft flush chain inet shut input");
        }
        for (number, ip) in (1..).zip([BEHIND_NAT, &address(2), &address(3)]) {
            cluster.join(&Settings { number, ip, is_edge: false, requests_certificate: false })?;
        }
        cluster.comes_up();
        Some((cluster, nat))
    }

    fn without_nodes(way: Way, machines: usize) -> Option<Self> {
        let etcd = cached_program("etcd-3.6.16/etcd")?;
        let (program, kubectl) = (
            cached_program("kubernetes-1.36.3/kube-apiserver")?,
            cached_program("kubernetes-1.36.3/kubectl")?,
        );
        if !are_installed(&["containerd", "ctr", "runc", "busybox", "script", "ptp", "socat"]) {
            return None;
        }
        let network = Network::start(machines)?;
        std::os::unix::fs::symlink(kubectl, network.place.path().join("kubectl")).unwrap();
        let etcd = start_etcd(&network, &etcd);
        let apiserver = start_apiserver(&network, &program, way);
        Some(Self { nodes: Vec::new(), _signer: None, apiserver, _etcd: etcd, network, way, program })
    }

    fn join(&mut self, node: &Settings<'_>) -> Option<()> {
        let kubelet = cached_program("kubernetes-1.36.3/kubelet")?;
        self.nodes.push(Node::start(&self.network, &kubelet, node));
        Some(())
    }

    /// Waits until a pod runs on each node.
    fn comes_up(&self) {
        self.is_ready();
        if self.way != Way::Shown {
            self.apply("kubelet-clients", &kubelet_clients());
        }
        for number in 1..=self.nodes.len() {
            self.apply(node::busy_name(number), &node::busy(number));
        }
        self.sh("kubectl wait --for=condition=Ready --timeout=110s pod --all");
    }

    /// Approves the certificates that the kubelets request, and waits until the kubelets serve them.
    pub(crate) fn approve_kubelets(&self) {
        let theirs = "kubectl get csr --no-headers | grep system:node:node | cut -d ' ' -f 1";
        wait_until("kubelets have their certificates", 3 * TIMEOUT, || {
            self.network.try_sh(&format!("kubectl certificate approve $({theirs})"));
            self.network.edges.iter().all(|node| {
                let mut curl = node.command("curl");
                curl.args(["-sk", "-m", "5", "https://127.0.0.1:10250/"]);
                run_command("curl", &mut curl, None, TIMEOUT).status.success()
            })
        });
    }

    /// Gives the tunnel's pods the permissions of `deploy`, and starts `tunnel approve`, which approves their
    /// requests.
    pub(crate) fn approver(&self) -> Running {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize");
        for part in ["base", "csr"] {
            self.sh(&format!("kubectl apply -k {}", deploy.join(part).display()));
        }
        let (place, cloud) = (&self.network.place, &self.network.cloud);
        let mut command = apiserver::approver(clear_environment(cloud.command(PROGRAM)), place, APPROVER);
        let mut approver = Running::start("approver", place.path(), &mut command);
        wait_until("the approver is ready", TIMEOUT, || {
            approver.assert_running();
            self.network.try_sh(&format!("curl -sf http://127.0.0.1:{APPROVER}/readyz")).stdout == "ok\n"
        });
        approver
    }

    /// Switches to another way to the kubelet; the tunnel's servers must be restarted.
    pub(crate) fn change(&mut self, way: Way) {
        self.apiserver.kill();
        self.apiserver = start_apiserver(&self.network, &self.program, way);
        self.way = way;
        self.is_ready();
    }

    fn is_ready(&self) {
        wait_until("kube-apiserver is ready", 6 * TIMEOUT, || {
            self.network.try_sh("kubectl get --raw /readyz").status.success()
        });
        // It reports readiness before the first objects exist.
        self.sh("kubectl wait --for=create --timeout=110s namespace/default");
    }

    /// Runs a line of bash in the cloud, where kubectl is installed, and returns its output.
    pub(crate) fn sh(&self, line: &str) -> String {
        self.network.sh(line)
    }

    /// Creates an object, or changes it.
    pub(crate) fn apply(&self, name: &str, object: &Value) {
        let file = self.network.place.path().join(format!("{name}.json"));
        std::fs::write(&file, object.to_string()).unwrap();
        let line = format!("kubectl apply -f {}", file.display());
        // Just after its start, kube-apiserver refuses some objects: it does not know their kind or namespace yet.
        wait_until(&line, 3 * TIMEOUT, || {
            let output = self.network.try_sh(&line);
            if !output.status.success() {
                let _ = writeln!(std::io::stderr(), "{line}: {output:?}");
            }
            output.status.success()
        });
    }

    /// Starts a server of the tunnel; kube-apiserver uses the one at [`SERVER`].
    pub(crate) fn server(&self, ip: &str) -> Running {
        let tables = if ip == SERVER { self.way.tables(&self.network.place) } else { String::new() };
        self.server_with(ip, &tables)
    }

    /// Like [`Self::server`], but with these tables instead of those of its way.
    pub(crate) fn server_with(&self, ip: &str, tables: &str) -> Running {
        let place = &self.network.place;
        let account = match self.way {
            Way::Shown => apiserver::acts_as(place, apiserver::PODS),
            _ => place.path().join("admin"),
        };
        let kubeconfig = format!("--kubeconfig={}", account.display());
        let args: &[&str] = if self.way.queries_apiserver() { &[&kubeconfig] } else { &[] };
        self.network.server_with(ip, tables, args)
    }

    /// Replaces the certificate that the tunnel's server presents to kube-apiserver by one for this name. Sends
    /// SIGHUP so that the server reloads it.
    pub(crate) fn certify(&self, name: &str, pod: &mut Running) {
        ways::shown(&self.network.place, name);
        pod.hang_up();
    }

    /// Starts the edge of `node1`, which dials that server, with these tables in addition to the usual ones.
    pub(crate) fn edge(&self, pod: &str, tables: &str) -> Running {
        self.network.edge(1, pod, &(self.way.edge_tables(&self.network.place) + tables))
    }
}

fn start_etcd(network: &Network, program: &Path) -> Running {
    let dir = network.place.path();
    let mut etcd =
        Running::start("etcd", dir, &mut apiserver::etcd(network.cloud.command(program), dir, ETCD, 2380));
    etcd.wait_for_log("ready to serve client requests");
    etcd
}

fn start_apiserver(network: &Network, program: &Path, way: Way) -> Running {
    let place = &network.place;
    let users = [
        ("admin", "admin", "system:masters"),
        ("kubelet1", "system:node:node1", "system:nodes"),
        ("kubelet2", "system:node:node2", "system:nodes"),
        ("kubelet3", "system:node:node3", "system:nodes"),
    ];
    let at = format!("{SERVER}:6443").parse().unwrap();
    let mut command = apiserver::apiserver(network.cloud.command(program), place, ETCD, at, &users);
    command.args(["--authorization-mode", "Node,RBAC"]);
    // No controller here creates tokens for pods.
    command.args(["--disable-admission-plugins", "ServiceAccount"]);
    let Files { cert, key, .. } = kubelet_client(place);
    place.authority.0.client(APISERVER).unwrap().write(&cert, &key).unwrap();
    command.arg("--kubelet-client-certificate").arg(cert).arg("--kubelet-client-key").arg(key);
    command.args(way.apiserver_flags(place));
    Running::start("apiserver", place.path(), &mut command)
}

/// Returns the binding that lets kube-apiserver use kubelets, as kubeadm creates it.
fn kubelet_clients() -> Value {
    let rbac = "rbac.authorization.k8s.io";
    json!({
        "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "kubelet-clients"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": APISERVER}],
    })
}

/// Port where `tunnel approve` serves its health.
const APPROVER: u16 = 9012;
const ETCD: &str = "http://127.0.0.1:2379";
