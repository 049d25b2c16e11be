//! A whole Kubernetes on two machines, of which only the edge's can dial the other: etcd, CoreDNS and kube-apiserver in the
//! cloud, containerd, kubelet and a running pod at the edge. Between them is what the test starts.

mod machine;
pub(crate) mod node;
mod ways;

use std::path::Path;
use std::process::{ChildStdin, Command};

use serde_json::Value;

use crate::apiserver;
use crate::parts::{have, kept, root};
use crate::process::{PATIENCE, Running, Said, run_command};
use crate::tunnel::{PROGRAM, TestDir};
use crate::wait::wait_until;
use machine::Machine;
use node::Node;
pub(crate) use ways::Way;

/// An address of the cloud's, where its first pod of the tunnel is.
pub(crate) const POD: &str = "10.77.0.1";

/// Another one, for a second pod.
pub(crate) const OTHER_POD: &str = "10.77.0.2";

/// All of it but the tunnel.
#[derive(Debug)]
pub(crate) struct Cluster {
    // Fields drop in order: who uses a thing before the thing.
    _node: Node,
    _apiserver: Running,
    _dns: Running,
    _etcd: Running,
    pub(crate) edge: Machine,
    pub(crate) cloud: Machine,
    pub(crate) place: TestDir,
}

impl Cluster {
    /// Starts it with this way to the kubelet, up to a pod that runs. None if a program is missing, or who runs the test is
    /// not root.
    pub(crate) fn start(way: Way) -> Option<Self> {
        let (coredns, etcd) = (kept("coredns-1.15.0/coredns")?, kept("etcd-3.6.16/etcd")?);
        let (apiserver, kubelet) =
            (kept("kubernetes-1.36.3/kube-apiserver")?, kept("kubernetes-1.36.3/kubelet")?);
        let kubectl = kept("kubernetes-1.36.3/kubectl")?;
        if !have(&[
            "containerd",
            "ctr",
            "runc",
            "busybox",
            "nft",
            "ip",
            "nsenter",
            "curl",
            "script",
            "socat",
            "ptp",
        ]) || !root()
        {
            return None;
        }
        let place = TestDir::serving(&[POD, OTHER_POD]);
        std::os::unix::fs::symlink(kubectl, place.path().join("kubectl")).unwrap();
        let (cloud, edge) = machines(&place);
        let etcd = start_etcd(&place, &cloud, &etcd);
        let dns = start_dns(&place, &cloud, &coredns);
        let apiserver = start_apiserver(&place, &cloud, &apiserver, way);
        let node = Node::start(&place, &edge, &kubelet);
        let cluster = Self { _node: node, _apiserver: apiserver, _dns: dns, _etcd: etcd, edge, cloud, place };
        wait_until("apiserver is ready", 3 * PATIENCE, || {
            cluster.tries("kubectl get --raw /readyz").status.success()
        });
        cluster.apply("busy", &node::busy());
        cluster.sh("kubectl wait --for=condition=Ready --timeout=60s pod/busy");
        Some(cluster)
    }

    /// Runs a line of bash in the cloud, with kubectl at hand, whatever comes of it.
    pub(crate) fn tries(&self, line: &str) -> Said {
        run_command(line, &mut self.bash(line), None, 6 * PATIENCE)
    }

    /// As [`Self::tries`], beside the test; its log is `name.log`.
    pub(crate) fn runs(&self, name: &str, line: &str) -> (Running, ChildStdin) {
        Running::start_fed(name, self.place.path(), &mut self.bash(line))
    }

    fn bash(&self, line: &str) -> Command {
        let mut command = self.cloud.command("bash");
        command.args(["-o", "pipefail", "-c", line]).current_dir(self.place.path());
        command.env("KUBECONFIG", self.place.path().join("admin")).env("HOME", self.place.path());
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.place.path().display()));
        command
    }

    /// As [`Self::tries`], where it must succeed; what it prints.
    pub(crate) fn sh(&self, line: &str) -> String {
        let said = self.tries(line);
        assert!(said.status.success(), "{line}: {said:?}");
        said.stdout
    }

    /// Creates an object, or changes it.
    pub(crate) fn apply(&self, name: &str, object: &Value) {
        let file = self.place.path().join(format!("{name}.json"));
        std::fs::write(&file, object.to_string()).unwrap();
        self.sh(&format!("kubectl apply -f {}", file.display()));
    }

    /// Starts `tunnel --m=cloud` at an address of the cloud's, with these tables beside the usual, and waits for it.
    pub(crate) fn pod(&self, ip: &str, tables: &str) -> Running {
        let config = self.place.cloud_config(format!("{ip}:9000").parse().unwrap(), ADMIN);
        let config = config.replace("127.0.0.1", ip) + tables;
        self.tunnel(&self.cloud, ("cloud", &format!("pod-{ip}")), &config, ip)
    }

    /// Starts `tunnel --m=edge` towards that pod, with these tables beside the usual, and waits until it is linked.
    pub(crate) fn edge(&self, pod: &str, tables: &str) -> Running {
        let config = self.place.edge_config("node1", &format!("{pod}:9000"), ADMIN) + tables;
        self.tunnel(&self.edge, ("edge", "edge"), &config, "127.0.0.1")
    }

    fn tunnel(&self, machine: &Machine, names: (&str, &str), config: &str, ip: &str) -> Running {
        let command = machine.command(PROGRAM);
        let mut running = self.place.tunnel_as(command, names, config, &[("POD_IP", ip)], &[]);
        wait_until(&format!("{} is ready", names.1), PATIENCE, || {
            running.lives();
            let mut curl = machine.command("curl");
            curl.args(["-sf", "-m", "2", &format!("http://{ip}:{ADMIN}/readyz")]);
            run_command("curl", &mut curl, None, PATIENCE).status.success()
        });
        running
    }
}

/// The cloud, with its resolver; and the edge, to which nobody can open a connection.
fn machines(place: &TestDir) -> (Machine, Machine) {
    let (cloud, edge) = (Machine::new(), Machine::new());
    cloud.cable(("edge", "10.77.1.1/24"), &edge, ("wan", &format!("{}/24", node::ADDRESS)));
    cloud.sh(&format!("ip addr add {POD} dev lo; ip addr add {OTHER_POD} dev lo"));
    edge.sh("ip route add default via 10.77.1.1");
    edge.shut("wan");
    let resolver = place.path().join("resolv.conf");
    std::fs::write(&resolver, "nameserver 127.0.0.1\n").unwrap();
    cloud.sh(&format!("mount --bind {} /etc/resolv.conf", resolver.display()));
    (cloud, edge)
}

fn start_etcd(place: &TestDir, cloud: &Machine, program: &Path) -> Running {
    let mut command = apiserver::etcd(cloud.command(program), place.path(), ETCD, 2380);
    let mut etcd = Running::start("etcd", place.path(), &mut command);
    etcd.says("ready to serve client requests");
    etcd
}

/// CoreDNS that answers from the file `hosts`.
fn start_dns(place: &TestDir, cloud: &Machine, program: &Path) -> Running {
    let (hosts, corefile) = (place.path().join("hosts"), place.path().join("Corefile"));
    std::fs::write(&hosts, "").unwrap();
    let text = format!(
        ". {{\n bind 127.0.0.1\n hosts {} {{\n ttl 1\n reload 300ms\n no_reverse\n }}\n}}\n",
        hosts.display()
    );
    std::fs::write(&corefile, text).unwrap();
    let mut dns = Running::start("coredns", place.path(), cloud.command(program).arg("-conf").arg(corefile));
    dns.says("CoreDNS-");
    dns
}

fn start_apiserver(place: &TestDir, cloud: &Machine, program: &Path, way: Way) -> Running {
    let users = [("admin", "admin", "system:masters"), ("node", "system:node:node1", "system:nodes")];
    let at = format!("{POD}:6443").parse().unwrap();
    let mut command = apiserver::apiserver(cloud.command(program), place, ETCD, at, &users);
    command.args(["--authorization-mode", "Node,RBAC"]);
    // Nobody here makes tokens for pods.
    command.args(["--disable-admission-plugins", "ServiceAccount"]);
    let client = place.path().join("kubelet-client");
    let (cert, key) = (client.with_extension("crt"), client.with_extension("key"));
    place.authority.0.client("kube-apiserver").unwrap().write(&cert, &key).unwrap();
    command.arg("--kubelet-client-certificate").arg(cert).arg("--kubelet-client-key").arg(key);
    command.args(way.apiserver_flags(place));
    Running::start("apiserver", place.path(), &mut command)
}

/// Where each program of ours has its admin port.
const ADMIN: u16 = 51010;
const ETCD: &str = "http://127.0.0.1:2379";
