//! The SOCKS5 listener with curl, ssh and kubectl.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::kubernetes::Kubernetes;
use crate::parts::{are_installed, cached_program, free_port, loopback};
use crate::plain_g4::pages;
use crate::process::{TIMEOUT, run, run_command};
use crate::sshd::Sshd;
use crate::tunnel::{Edge, ServerProcess, TestDir};

/// Starts a server with a SOCKS5 port, and an edge `node1`.
fn start(place: &TestDir, more: &str) -> (ServerProcess, Edge, u16) {
    let port = free_port();
    let mut cloud = ServerProcess::start_with(
        place,
        &format!("[server.socks5]\nlisten = \"127.0.0.1:{port}\"\n{more}"),
        &[],
    );
    let edge = Edge::start(place, &loopback(cloud.grpc).to_string());
    cloud.wait_for_node("node1");
    (cloud, edge, port)
}

#[test]
fn curl_and_ssh_reach_a_node_by_its_name() {
    if !are_installed(&["sshd", "ssh", "ssh-keygen", "nc.openbsd", "curl", "htpasswd"]) {
        return;
    }
    let (place, sshd) = (TestDir::new(), Sshd::start());
    let (cloud, _edge, port) = start(&place, "");
    sshd.works_through(&format!("nc.openbsd -X 5 -x {} %h %p", loopback(port)));

    let users = place.path().join("users");
    run("htpasswd", &["-cbB", users.to_str().unwrap(), "ann", "right"], None, TIMEOUT);
    drop(cloud);
    let (_cloud, _edge, port) =
        start(&place, &format!("auth = \"basic\"\nusers = {users:?}\nrules = [{{ users = [\"ann\"] }}]\n"));
    let url = format!("http://node1:{}/", pages());
    let curl = |login: &str| {
        let proxy = format!("127.0.0.1:{port}");
        let args = ["-sS", "-m", "30", "--socks5-hostname", &proxy, "--proxy-user", login, &url];
        run("curl", &args, None, TIMEOUT)
    };
    assert_eq!(curl("ann:right").stdout, "page ");
    let wrong = curl("ann:wrong");
    assert!(!wrong.status.success() && wrong.stderr.contains("rejected by the SOCKS5 server"), "{wrong:?}");
}

#[test]
fn kubectl_works_with_a_socks5_proxy() {
    let (Some(kubectl), Some(kubernetes)) =
        (cached_program("kubernetes-1.36.3/kubectl"), Kubernetes::start())
    else {
        return;
    };
    let place = TestDir::new();
    let (_cloud, _edge, port) = start(&place, "");
    let mut file: Value = serde_json::from_slice(&std::fs::read(kubernetes.admin()).unwrap()).unwrap();
    let cluster = &mut file["clusters"][0]["cluster"];
    let at: SocketAddr =
        cluster["server"].as_str().unwrap().strip_prefix("https://").unwrap().parse().unwrap();
    cluster["server"] = format!("https://node1:{}", at.port()).into();
    cluster["tls-server-name"] = at.ip().to_string().into();
    cluster["proxy-url"] = format!("socks5://127.0.0.1:{port}").into();
    let config = place.path().join("kubeconfig");
    std::fs::write(&config, file.to_string()).unwrap();
    for args in [&["get", "namespaces", "-o", "name"][..], &["get", "--raw", "/readyz"]] {
        let mut command = Command::new(&kubectl);
        let output =
            run_command("kubectl", command.arg("--kubeconfig").arg(&config).args(args), None, TIMEOUT);
        assert!(output.stdout.contains("namespace/default") || output.stdout == "ok", "{output:?}");
    }
}
