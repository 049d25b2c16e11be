//! Node names resolve: CoreDNS reads the names that a server publishes, from a hosts file and from etcd.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::apiserver;
use crate::certificates::Files;
use crate::parts::{are_installed, cached_program, free_port};
use crate::process::{Running, TIMEOUT, run};
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

/// The server's address in its environment.
const POD_IP: &str = "127.0.0.77";

#[test]
fn a_node_name_resolves_through_a_hosts_file_while_its_edge_is_linked() {
    let Some(coredns) = cached_program("coredns-1.15.0/coredns").filter(|_| are_installed(&["dig"])) else {
        return;
    };
    let place = TestDir::new();
    let hosts = place.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.9 other.nodes.test\n").unwrap();
    let dns = Dns::of_hosts(&place, &coredns, &hosts, true);
    dns.wait_for_answer("other.nodes.test", "127.0.0.9");
    let lines = format!("publish = \"hosts\"\nhosts_file = \"{}\"\n", hosts.display());
    assert_name_follows_link(&place, &dns, &lines);
    assert_eq!(std::fs::read_to_string(&hosts).unwrap(), "127.0.0.9 other.nodes.test\n");
}

#[test]
fn a_node_name_resolves_through_etcd_while_its_edge_is_linked() {
    let Some((etcd, dns, place)) = etcd_and_dns(false) else { return };
    let lines = format!(
        "publish = \"etcd\"\netcd.endpoints = [\"http://127.0.0.1:{}\", \"{}\"]\n",
        free_port(),
        etcd.url
    );
    assert_name_follows_link(&place, &dns, &lines);
    assert_eq!(dns.dig("node1.nodes.test"), "", "records are withdrawn before the exit");
}

#[test]
fn records_are_removed_with_the_lease_of_a_killed_server_and_not_before() {
    let Some((etcd, dns, place)) = etcd_and_dns(false) else { return };
    let mut cloud = cloud(&place, &format!("publish = \"etcd\"\netcd.endpoints = [\"{}\"]\n", etcd.url));
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    dns.wait_for_answer("node1.nodes.test", POD_IP);
    let still = || assert_eq!(dns.dig("node1.nodes.test"), POD_IP, "the lease is kept alive");
    // Longer than the TTL of the lease.
    let_time_pass(Duration::from_secs(20), still);
    cloud.process.kill();
    wait_until("the record is removed", Duration::from_secs(25), || dns.dig("node1.nodes.test").is_empty());
}

#[test]
fn a_server_logs_in_to_etcd_again_and_reports_an_etcd_that_fails() {
    let Some((mut etcd, _dns, place)) = etcd_and_dns(false) else { return };
    if !are_installed(&["curl"]) {
        return;
    }
    for (path, body) in [
        ("role/add", r#"{"name":"root"}"#),
        ("user/add", r#"{"name":"root","password":"r00t"}"#),
        ("user/grant", r#"{"user":"root","role":"root"}"#),
        ("enable", "{}"),
    ] {
        let output =
            run("curl", &["-sSf", "-d", body, &format!("{}/v3/auth/{path}", etcd.url)], None, TIMEOUT);
        assert!(output.status.success(), "{path}: {output:?}");
    }
    let password = place.path().join("password");
    std::fs::write(&password, "r00t\n").unwrap();
    let lines = format!(
        "publish = \"etcd\"\netcd.endpoints = [\"{}\"]\netcd.user = \"root\"\netcd.password_file = \"{}\"\n",
        etcd.url,
        password.display()
    );
    let mut cloud = cloud(&place, &lines);
    let mut edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_until_published(1);
    edge.process.terminate();
    edge.process.wait_for_exit(TIMEOUT);
    cloud.wait_until_published(0);
    cloud.process.wait_for_log("etcd member failed");
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    cloud.wait_until_published(1);
    etcd.process.kill();
    cloud.wait_for_condition("dns: etcd at");
    cloud.wait_for_node("node1");
    etcd.restart(&place);
    cloud.wait_until_healthy();
    cloud.wait_until_published(1);
    // The token has expired again.
    let_time_pass(Duration::from_secs(3), || {});
    cloud.process.terminate();
    cloud.process.wait_for_exit(TIMEOUT);
    cloud.process.assert_logged("records withdrawn");
}

#[test]
fn a_server_publishes_to_an_etcd_with_mutual_tls() {
    let Some((etcd, dns, place)) = etcd_and_dns(true) else { return };
    let Files { ca, cert, key } = &place.files;
    let lines = format!(
        "publish = \"etcd\"\netcd.endpoints = [\"{}\"]\netcd.ca = \"{}\"\netcd.cert = \"{}\"\netcd.key = \"{}\"\n",
        etcd.url,
        ca.display(),
        cert.display(),
        key.display()
    );
    let cloud = cloud(&place, &lines);
    let _edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
    dns.wait_for_answer("node1.nodes.test", POD_IP);
}

/// Checks that a node's name resolves while its edge is linked to a server with this config, which stops in the end.
fn assert_name_follows_link(place: &TestDir, dns: &Dns, registry: &str) {
    let mut cloud = cloud(place, registry);
    let mut edge = Edge::start(place, &format!("127.0.0.1:{}", cloud.grpc));
    dns.wait_for_answer("node1.nodes.test", POD_IP);
    edge.process.terminate();
    edge.process.wait_for_exit(TIMEOUT);
    dns.wait_for_answer("node1.nodes.test", "");
    let _edge = Edge::start(place, &format!("127.0.0.1:{}", cloud.grpc));
    dns.wait_for_answer("node1.nodes.test", POD_IP);
    cloud.process.terminate();
    assert!(cloud.process.wait_for_exit(TIMEOUT).success());
}

/// Waits while nothing else indicates the time.
fn let_time_pass(time: Duration, meanwhile: impl Fn()) {
    let started = std::time::SystemTime::now();
    wait_until("time passes", time * 2, || {
        meanwhile();
        started.elapsed().unwrap() > time
    });
}

fn cloud(place: &TestDir, registry: &str) -> ServerProcess {
    let registry = format!("[server.dns]\nzone = \"nodes.test\"\n{registry}");
    ServerProcess::start_with(place, &registry, &[("POD_IP", POD_IP)])
}

/// CoreDNS on a separate port.
pub(crate) struct Dns {
    process: Running,
    pub(crate) port: u16,
}

impl Dns {
    pub(crate) fn start(place: &TestDir, program: &Path, corefile: &str) -> Self {
        let (port, file) = (free_port(), place.path().join("Corefile"));
        std::fs::write(&file, corefile).unwrap();
        let mut command = Command::new(program);
        command.arg("-conf").arg(file).env("PORT", port.to_string());
        let mut process = Running::start("coredns", place.path(), &mut command);
        process.wait_for_log(&format!(":{port}"));
        Self { process, port }
    }

    /// Starts one that reads a hosts file, either after each change or only once.
    pub(crate) fn of_hosts(place: &TestDir, program: &Path, hosts: &Path, again: bool) -> Self {
        let reload = if again { "300ms" } else { "0" };
        let corefile = format!(
            ".:{{$PORT}} {{\n bind 127.0.0.1\n hosts {} {{\n ttl 1\n reload {reload}\n no_reverse\n }}\n}}\n",
            hosts.display()
        );
        Self::start(place, program, &corefile)
    }

    /// Returns the address of a name, or an empty text if there is none.
    pub(crate) fn dig(&self, name: &str) -> String {
        let args = format!("@127.0.0.1 -p {} +short +time=1 +tries=1 {name} A", self.port);
        let output = run("dig", &args.split(' ').collect::<Vec<_>>(), None, TIMEOUT);
        assert!(output.status.success(), "{} {output:?}", self.process.log());
        output.stdout.trim().to_owned()
    }

    pub(crate) fn wait_for_answer(&self, name: &str, address: &str) {
        wait_until(&format!("{name} resolves to {address:?}"), TIMEOUT, || self.dig(name) == address);
    }
}

pub(crate) struct Etcd {
    pub(crate) process: Running,
    program: std::path::PathBuf,
    pub(crate) url: String,
    peers: u16,
}

impl Etcd {
    pub(crate) fn start(place: &TestDir, program: &Path, tls: bool) -> Self {
        let scheme = if tls { "https" } else { "http" };
        let (url, peers) = (format!("{scheme}://127.0.0.1:{}", free_port()), free_port());
        let process = Self::run(place, program, &url, peers);
        Self { process, program: program.to_owned(), url, peers }
    }

    pub(crate) fn restart(&mut self, place: &TestDir) {
        self.process = Self::run(place, &self.program, &self.url, self.peers);
    }

    fn run(place: &TestDir, program: &Path, url: &str, peers: u16) -> Running {
        let mut command = apiserver::etcd(Command::new(program), place.path(), url, peers);
        // Short enough that a token has expired when the next record is written.
        command.args(["--auth-token-ttl", "1"]);
        if url.starts_with("https") {
            let Files { ca, cert, key } = &place.files;
            command.arg("--cert-file").arg(cert).arg("--key-file").arg(key);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(ca);
        }
        let mut process = Running::start("etcd", place.path(), &mut command);
        process.wait_for_log("ready to serve client requests");
        process
    }
}

pub(crate) fn etcd_and_dns(tls: bool) -> Option<(Etcd, Dns, TestDir)> {
    let (etcd, coredns) = (cached_program("etcd-3.6.16/etcd")?, cached_program("coredns-1.15.0/coredns")?);
    if !are_installed(&["dig"]) {
        return None;
    }
    let place = TestDir::new();
    let etcd = Etcd::start(&place, &etcd, tls);
    let url = &etcd.url;
    let Files { ca, cert, key } = &place.files;
    let files = format!("tls {} {} {}", cert.display(), key.display(), ca.display());
    let files = if tls { files } else { String::new() };
    let corefile = format!(
        "nodes.test:{{$PORT}} {{\n bind 127.0.0.1\n etcd {{\n path /skydns\n endpoint {url}\n {files}\n }}\n}}\n"
    );
    let dns = Dns::start(&place, &coredns, &corefile);
    Some((etcd, dns, place))
}
