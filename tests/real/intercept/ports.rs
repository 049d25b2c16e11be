//! Ports that are listed in a ConfigMap.

use std::io::Write as _;
use std::time::SystemTime;

use crate::apiserver;

use super::*;

#[test]
fn changed_ports_of_a_configmap_are_intercepted_without_aborted_sessions() {
    let (Some(etcd), Some(program)) =
        (cached_program("etcd-3.6.16/etcd"), cached_program("kubernetes-1.36.3/kube-apiserver"))
    else {
        return;
    };
    let Some(kubectl) = cached_program("kubernetes-1.36.3/kubectl") else { return };
    let Some(world) = World::start(1) else { return };
    let (host, dir) = (&world.host, world.place.path());
    let url = "http://127.0.0.1:2379";
    let mut etcd = Running::start("etcd", dir, &mut apiserver::etcd(host.command(etcd), dir, url, 2380));
    etcd.wait_for_log("ready to serve client requests");
    let (at, users) = ("10.79.1.1:6443".parse().unwrap(), [("admin", "admin", "system:masters")]);
    let mut command = apiserver::apiserver(host.command(program), &world.place, url, at, &users);
    let _apiserver = Running::start("apiserver", dir, &mut command);
    let kubeconfig = dir.join("admin");
    let kubectl = |line: &str| {
        let mut command = host.command(&kubectl);
        command.arg("--kubeconfig").arg(&kubeconfig).args(line.split(' '));
        run_command("kubectl", &mut command, None, 3 * TIMEOUT)
    };
    wait_until("kube-apiserver responds", 6 * TIMEOUT, || {
        kubectl("get configmaps -n kube-system").status.success()
    });
    let names = |ports: &str| {
        let output = kubectl(&format!(
            "patch configmap yurt-tunnel-server-cfg -n kube-system -p {{\"data\":{{\"http-proxy-ports\":\"{ports}\"}}}}"
        ));
        assert!(output.status.success(), "{output:?}");
        SystemTime::now()
    };
    // kube-apiserver creates that namespace itself, some time after it starts to respond.
    wait_until("the ConfigMap is created", 6 * TIMEOUT, || {
        kubectl("create configmap yurt-tunnel-server-cfg -n kube-system --from-literal=http-proxy-ports=")
            .status
            .success()
    });

    let node = &world.nodes[0];
    let servers = [9400, 9500].map(|port| {
        let mut socat = node.command("socat");
        socat.args([&format!("TCP-LISTEN:{port},pf=ip6,ipv6only=0,fork,reuseaddr"), "EXEC:cat"]);
        Running::start(&format!("echo-{port}"), dir, &mut socat)
    });
    let config = world.config(0, &format!("[server.node_ports]\n{}", world.fixed()));
    let k = format!("--kubeconfig={}", kubeconfig.display());
    let env = [("POD_NAMESPACE", "default")];
    let mut server = world.place.tunnel_as(
        host.command(PROGRAM),
        ("server", "pod"),
        &config,
        &env,
        &["--verbosity=4", &k],
    );
    let _edge = world.edge(1, "");
    let ip = &addresses(1)[0];
    world.is_intercepted(ip, true);
    let listed = |port: u16| host.sh("nft -j list set inet tunnel ports").contains(&port.to_string());
    let reaches = |port: u16| world.echoes_at(&format!("{ip}:{port}"));
    // A busy machine may need longer for one attempt than its client waits.
    let is_reached = |port: u16| wait_until(&format!("{port} is reached"), TIMEOUT, || reaches(port));
    assert!(!reaches(9400), "the node accepts no connections");
    let session = |port: u16| {
        let mut client = host.command("socat");
        client.args(["-", &format!("TCP:{ip}:{port}")]);
        Running::start_with_stdin(&format!("client-{port}"), dir, &mut client)
    };

    let edited = names("9400");
    wait_until("the port is intercepted", TIMEOUT, || listed(9400));
    report("intercepted", edited);
    is_reached(9400);
    let (mut client, mut stdin) = session(9400);
    stdin.write_all(b"before\n").unwrap();
    client.wait_for_log("before");

    let edited = names("9500");
    wait_until("the new port is intercepted, and the old one is not", TIMEOUT, || {
        listed(9500) && !listed(9400)
    });
    report("the next one intercepted", edited);
    is_reached(9500);
    assert!(!reaches(9400));
    stdin.write_all(b"after\n").unwrap();
    client.wait_for_log("after");
    // From now on the node accepts connections: they reach it if they are not intercepted.
    node.sh("nft delete table inet shut");
    let (mut direct, mut to_direct) = session(9400);
    to_direct.write_all(b"direct\n").unwrap();
    direct.wait_for_log("direct");
    let clients = node.sh("ss -tnH state established sport = :9400");
    assert!(clients.contains("10.79.1.1]"), "not the host itself: {clients}");
    drop(servers);
    server.assert_running();
}

/// Prints how long it took, which depends on the machine.
fn report(what: &str, since: SystemTime) {
    let _ = writeln!(std::io::stderr(), "{what} after {:?}", since.elapsed().unwrap_or_default());
}
