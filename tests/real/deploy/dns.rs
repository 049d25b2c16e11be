//! The CoreDNS of the manifests: the real program, with the config, the user and the capabilities of its container.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{CLUSTER_CA, Cluster, args, container, mounted, overlay};
use crate::kubernetes::{NAMESPACE, PODS};
use crate::network::Machine;
use crate::parts::{are_installed, cached_program, free_port, is_root};
use crate::process::{Running, TIMEOUT, run, run_command};
use crate::tunnel::{Edge, TOKEN, TestDir, tunnel};
use crate::wait::wait_until;

/// The server's own address, which is published for its nodes.
const HERE: &str = "127.0.0.77";

/// Updates a ConfigMap volume like kubelet: creates a new folder each time, and swaps the link to it atomically.
fn project(volume: &Path, turn: u32, hosts: &str) {
    let new = volume.join(format!("..{turn}"));
    std::fs::create_dir(&new).unwrap();
    std::fs::write(new.join("hosts"), hosts).unwrap();
    symlink(format!("..{turn}"), volume.join("..data_tmp")).unwrap();
    std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    if !volume.join("hosts").is_symlink() {
        symlink("..data/hosts", volume.join("hosts")).unwrap();
    }
}

/// Returns the capabilities of this container as arguments of setpriv.
fn rights(container: &Value) -> String {
    let list =
        |key: &str| container["securityContext"]["capabilities"][key].as_array().cloned().unwrap_or_default();
    assert_eq!(list("drop"), ["ALL"]);
    let more = list("add")
        .iter()
        .map(|name| format!(",+{}", name.as_str().unwrap().to_lowercase()))
        .collect::<String>();
    format!("-all{more}")
}

/// Creates the files below /etc that CoreDNS sees.
fn etc(place: &TestDir, corefile: &str) -> std::path::PathBuf {
    let etc = place.path().join("etc");
    for name in ["coredns", "edge"] {
        std::fs::create_dir_all(etc.join(name)).unwrap();
    }
    std::fs::write(etc.join("coredns/Corefile"), corefile).unwrap();
    std::fs::write(etc.join("resolv.conf"), "nameserver 127.0.0.9\n").unwrap();
    etc
}

/// Starts a server with the config of the component `node-names`, for kubelets at that port of their nodes. Only
/// addresses and paths differ, and the certificate for kubelets is there already.
fn server(cluster: &Cluster, place: &TestDir, kubelets: u16) -> Running {
    let dir = place.path().join("server");
    let (shown, shown_key) = (dir.join("certs/proxy-client.crt"), dir.join("certs/proxy-client.key"));
    let log_port = free_port();
    let config =
        cluster.object("configmap", "tunnel-cloud-conf")["data"]["mode.toml"].as_str().unwrap().to_owned();
    let config = config
        .replace("\"[::]:", &format!("\"{HERE}:"))
        .replace("allow_from = [", "allow_from = [\"127.0.0.0/8\", ")
        .replace("[server.links]", &format!("[server.links]\nadmin_listen = \"127.0.0.1:{log_port}\""))
        .replace("[server.https]", &format!("[server.https]\nlisten_ip = \"{HERE}\""))
        .replace("127.0.0.1:10250", &format!("127.0.0.1:{kubelets}"))
        .replace(CLUSTER_CA, cluster.kubernetes.place().files.ca.to_str().unwrap())
        .replace("profiles = [\"proxy-client\"]", "")
        .replace("target_cert = ", &format!("target_key = {shown_key:?}\ntarget_cert = "))
        .replace("/var/lib/tunnel/pki/proxy-client.pem", shown.to_str().unwrap())
        .replace("/etc/tunnel", dir.to_str().unwrap());
    mounted(&dir, place, &config);
    std::fs::copy(&place.files.ca, dir.join("certs/client-ca.crt")).unwrap();
    place.authority.0.client("tunnel-proxy-client").unwrap().write(&shown, &shown_key).unwrap();
    std::fs::write(dir.join("token/token"), format!("node1:{TOKEN}\n")).unwrap();
    let mut command = tunnel();
    command.args(["server", "--config"]).arg(dir.join("conf/mode.toml"));
    command.arg("--kubeconfig").arg(cluster.kubernetes.kubeconfig_as(PODS));
    command.envs([("POD_IP", HERE), ("POD_NAMESPACE", NAMESPACE), ("POD_NAME", "tunnel-cloud-0")]);
    let mut server = Running::start("server", place.path(), &mut command);
    server.wait_for_exact_answer(log_port, "/readyz", "ok\n");
    server
}

/// Checks that port 10250 at that address leads to the kubelet of node1, for kube-apiserver's certificate only.
fn leads_to_the_kubelet(place: &TestDir, address: &str, kubelets: u16) {
    let files = &place.files;
    let mut kubelet = Command::new("openssl");
    kubelet.args(["s_server", "-www", "-Verify", "1", "-accept", &format!("127.0.0.1:{kubelets}")]);
    kubelet.arg("-cert").arg(&files.cert).arg("-key").arg(&files.key).arg("-CAfile").arg(&files.ca);
    let mut kubelet = Running::start("kubelet", place.path(), &mut kubelet);
    kubelet.wait_for_log("ACCEPT");
    let (cert, key) = (place.path().join("kubelet-client.crt"), place.path().join("kubelet-client.key"));
    place.authority.0.client("kube-apiserver-kubelet-client").unwrap().write(&cert, &key).unwrap();
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let to = format!("node1:10250:{address}");
    let curl_args = ["-sSk", "-m", "20", "--resolve", &to, "https://node1:10250/"];
    let output = run("curl", &[&curl_args[..], &["--cert", &cert, "--key", &key]].concat(), None, TIMEOUT);
    assert!(output.stdout.contains("tunnel-proxy-client"), "{output:?}\n{}", kubelet.log());
    let output = run("curl", &curl_args, None, TIMEOUT);
    assert!(!output.stdout.contains("tunnel-proxy-client"), "{output:?}");
}

/// kube-apiserver's way by DNS, with the component `node-names`: from a node's name to its kubelet.
#[test]
fn the_shipped_coredns_resolves_published_nodes_and_their_kubelets_are_reached() {
    if !is_root() || !are_installed(&["unshare", "nsenter", "setpriv", "setcap", "curl", "dig", "openssl"]) {
        return;
    }
    let Some(program) = cached_program("coredns-1.15.0/coredns") else { return };
    let site = tempfile::tempdir().unwrap();
    let Some(cluster) = Cluster::with(&overlay(site.path(), "node-names")) else { return };
    let deployment = cluster.object("deployment", "tunnel-coredns");
    let (shipped, place) = (container(&deployment), TestDir::new());
    assert_eq!(shipped["image"], "coredns/coredns:1.15.0", "the version that this test uses");
    let corefile =
        cluster.object("configmap", "tunnel-coredns")["data"]["Corefile"].as_str().unwrap().to_owned();
    let etc = etc(&place, &corefile);
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // As in the image: without permission for ports below 1024, it cannot even be started.
    let in_image = place.path().join("coredns");
    std::fs::copy(&program, &in_image).unwrap();
    let machine = Machine::new();
    machine.sh(&format!("setcap cap_net_bind_service=+ep {}", in_image.display()));
    machine.sh(&format!("mount --bind {} /etc", etc.display()));

    // A server in place of the machine's own DNS.
    let upstream = place.path().join("upstream");
    std::fs::write(&upstream, ".:53 {\n bind 127.0.0.9\n hosts {\n 192.0.2.5 elsewhere.test\n }\n}\n")
        .unwrap();
    let mut elsewhere =
        Running::start("upstream", place.path(), machine.command(&program).arg("-conf").arg(&upstream));
    elsewhere.wait_for_log("CoreDNS-1.15.0");
    let user = deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"].to_string();
    let mut command = machine.command("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs", "--inh-caps=-all"]);
    command.args(["--bounding-set", &rights(shipped)]).arg(&in_image).args(args(&deployment));
    let mut coredns = Running::start("coredns", place.path(), &mut command);
    for probe in ["readinessProbe", "livenessProbe"] {
        let get = &shipped[probe]["httpGet"];
        let url = format!("http://127.0.0.1:{}{}", get["port"], get["path"].as_str().unwrap());
        wait_until(probe, TIMEOUT, || {
            coredns.assert_running();
            let output =
                run_command("curl", machine.command("curl").args(["-sf", "-m", "5", &url]), None, TIMEOUT);
            output.status.success()
        });
    }
    let port = shipped["ports"][0]["containerPort"].to_string();
    let dig = |name: &str, over: &str| {
        let mut dig = machine.command("dig");
        dig.args(["@127.0.0.1", "-p", &port, "+short", "+time=2", "+tries=1", over, name, "A"]);
        run_command("dig", &mut dig, None, TIMEOUT).stdout.trim().to_owned()
    };
    let leads = |name: &str, to: &str| {
        for over in ["+notcp", "+tcp"] {
            wait_until(&format!("{name} resolves to {to:?}, {over}"), TIMEOUT, || dig(name, over) == to);
        }
    };
    leads("elsewhere.test", "192.0.2.5");

    let kubelets = free_port();
    let _server = server(&cluster, &place, kubelets);
    let mut edge = Edge::start(&place, &format!("{HERE}:9000"));
    let published = |turn: u32, is_there: bool| {
        wait_until("the ConfigMap is up to date", 3 * TIMEOUT, || {
            cluster.kubernetes.hosts("tunnel-nodes").is_some_and(|hosts| hosts.contains("node1") == is_there)
        });
        project(&etc.join("edge"), turn, &cluster.kubernetes.hosts("tunnel-nodes").unwrap());
    };
    published(1, true);
    leads("node1", HERE);
    leads_to_the_kubelet(&place, &dig("node1", "+notcp"), kubelets);
    leads("elsewhere.test", "192.0.2.5");
    edge.process.terminate();
    edge.process.wait_for_exit(TIMEOUT);
    published(2, false);
    leads("node1", "");
}
