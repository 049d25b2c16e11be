//! Starting kube-apiserver, its etcd and the certificate signer, and the config files of their clients.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::certificates::Files;
use crate::tunnel::TestDir;

/// Namespace of the tunnel's pods.
pub(crate) const NAMESPACE: &str = "edge-system";

/// User name of the tunnel's pods at kube-apiserver.
pub(crate) const PODS: &str = "system:serviceaccount:edge-system:tunnel-cloud";

/// Appends kube-apiserver's flags to a command, and writes a kubeconfig for each user `(file, user, groups)`. A
/// user's token is the name of its file.
pub(crate) fn apiserver(
    mut command: Command,
    place: &TestDir,
    etcd: &str,
    at: SocketAddr,
    users: &[(&str, &str, &str)],
) -> Command {
    let table = place.path().join("users.csv");
    let row = |(file, user, groups): &(&str, &str, &str)| format!("{file},{user},{file},\"{groups}\"\n");
    std::fs::write(&table, users.iter().map(row).collect::<String>()).unwrap();
    for (file, ..) in users {
        std::fs::write(place.path().join(file), kubeconfig(&place.files.ca, at, file)).unwrap();
    }
    let Files { ca, cert, key } = &place.files;
    command.arg("--tls-cert-file").arg(cert).arg("--tls-private-key-file").arg(key);
    command.arg("--service-account-key-file").arg(cert).arg("--service-account-signing-key-file").arg(key);
    command.arg("--client-ca-file").arg(ca).arg("--token-auth-file").arg(table);
    command.args(["--etcd-servers", etcd, "--secure-port", &at.port().to_string()]);
    command.args(["--bind-address", &at.ip().to_string()]);
    // It refuses a loopback address as its own, and no client needs to find it.
    command.args(["--advertise-address", "192.0.2.1", "--endpoint-reconciler-type", "none"]);
    command.args(["--service-account-issuer", "https://kubernetes.default.svc"]);
    command.args(["--service-cluster-ip-range", "10.96.0.0/24"]);
    command
}

/// Appends the flags of an etcd with a single member to a command.
pub(crate) fn etcd(mut command: Command, place: &Path, url: &str, peers: u16) -> Command {
    let peers = format!("http://127.0.0.1:{peers}");
    command.arg("--data-dir").arg(place.join("etcd"));
    command.args(["--listen-client-urls", url, "--advertise-client-urls", url]);
    command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    command.args(["--initial-cluster", &format!("default={peers}"), "--unsafe-no-fsync"]);
    command
}

/// Appends the flags of a kube-controller-manager that only signs certificates, each valid for `duration`, to a
/// command.
pub(crate) fn signer(command: Command, place: &TestDir, port: u16, duration: &str) -> Command {
    let (ca, key) = (&place.files.ca, place.path().join("ca.key"));
    std::fs::write(&key, place.authority.0.key()).unwrap();
    let mut command = manager(command, place, port, "certificatesigningrequest-signing-controller");
    command.arg(format!("--cluster-signing-duration={duration}"));
    command.arg("--cluster-signing-cert-file").arg(ca).arg("--cluster-signing-key-file").arg(key);
    command
}

/// Appends the flags of a kube-controller-manager with only these controllers to a command.
pub(crate) fn manager(mut command: Command, place: &TestDir, port: u16, controllers: &str) -> Command {
    command.arg("--kubeconfig").arg(place.path().join("admin")).arg("--cert-dir").arg(place.path());
    command.args(["--leader-elect=false", "--bind-address=127.0.0.1", &format!("--secure-port={port}")]);
    command.arg(format!("--controllers={controllers}"));
    command
}

/// Appends the arguments of `tunnel approve`, with the permissions of its own account, to a command.
pub(crate) fn approver(mut command: Command, place: &TestDir, health: u16) -> Command {
    let account = acts_as(place, "system:serviceaccount:tunnel-approver:tunnel-approver");
    command.arg("approve").arg(format!("--kubeconfig={}", account.display()));
    command.args([
        &format!("--service-account={NAMESPACE}:tunnel-cloud"),
        &format!("--health-listen=127.0.0.1:{health}"),
    ]);
    command
}

/// Writes the kubeconfig that pods of a service account use, and returns its path.
pub(crate) fn acts_as(place: &TestDir, account: &str) -> PathBuf {
    let mut admin: Value =
        serde_json::from_slice(&std::fs::read(place.path().join("admin")).unwrap()).unwrap();
    admin["users"][0]["user"]["as"] = account.into();
    let file = place.path().join(account.replace(':', "-"));
    std::fs::write(&file, admin.to_string()).unwrap();
    file
}

fn kubeconfig(ca: &Path, at: SocketAddr, token: &str) -> String {
    // JSON is valid YAML.
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("https://{at}"), "certificate-authority": ca}}],
        "users": [{"name": "c", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    })
    .to_string()
}
