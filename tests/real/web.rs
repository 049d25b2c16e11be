//! nginx on a node, which clients reach by the node's name: with TLS, without TLS, and through the proxies.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::certificates::Files;
use crate::parts::{are_installed, find, free_port, loopback};
use crate::process::{ProcessOutput, Running, TIMEOUT, run};
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

#[test]
fn nginx_responses_are_identical_through_the_tunnel() {
    let Some(site) = Site::start() else { return };
    for url in [site.https(), site.http()] {
        let one_connection = site.sh(&format!("curl {url}/who {url}/who {url}/who"));
        let kept: Vec<_> = one_connection.lines().map(|line| line.split_once(' ').unwrap()).collect();
        assert!(
            kept.iter().all(|of| of.0 == kept[0].0),
            "all requests use one connection to the target: {one_connection}"
        );
        assert_eq!(kept.iter().map(|of| of.1).collect::<Vec<_>>(), ["1", "2", "3"]);

        let output = site.sh(&format!("curl -D head -H 'TE: trailers' {url}/talk | cmp - talk; cat head"));
        let output = output.to_lowercase();
        assert!(output.contains("transfer-encoding: chunked\r\n"), "{output}");
        assert!(output.ends_with("\r\n\r\nx-sum: 42\r\n"), "the trailer follows the head: {output}");

        // nginx sends 100 before it reads a body, but not if it knows that the body is too long.
        let put = "curl -v -H 'Expect: 100-continue' -T talk";
        let output = site.sh(&format!("{put} {url}/files/talk 2>&1; cmp talk files/talk"));
        let statuses: Vec<_> = output.lines().filter(|line| line.starts_with("< HTTP/1.1 ")).collect();
        assert_eq!(statuses, ["< HTTP/1.1 100 Continue", "< HTTP/1.1 201 Created"], "{output}");
        site.sh("rm files/talk");
        let output = site.try_sh(&format!("{put} {url}/small/talk 2>&1")).stdout;
        let statuses: Vec<_> = output.lines().filter(|line| line.starts_with("< HTTP/1.1 ")).collect();
        assert_eq!(statuses, ["< HTTP/1.1 413 Request Entity Too Large"], "{output}");
    }
}

#[test]
fn long_transfers_in_both_directions_do_not_grow_the_memory_of_either_end() {
    let Some(site) = Site::start() else { return };
    let before = site.most_memory();
    // Each line is unique, so that lost, duplicated or reordered data is detected.
    let content = "seq 200000000 | head -c 268435456";
    for url in [site.https(), site.http()] {
        site.sh(&format!("{content} | curl -T - {url}/files/big; curl {url}/files/big | cmp - <({content})"));
        site.sh("rm files/big");
    }
    for (before, after) in before.into_iter().zip(site.most_memory()) {
        assert!(after < before + GROWTH, "from {before} to {after} KiB");
    }
}

#[test]
fn curl_uses_the_http_proxy_and_egress_with_a_certificate() {
    let Some(site) = Site::start() else { return };
    let http_proxy = format!("-x http://127.0.0.1:{}", site.proxy);
    let unproved =
        format!("-x https://localhost:{} --proxy-cacert {}", site.egress, site.place.files.ca.display());
    let egress = format!("{unproved} --proxy-cert client.crt --proxy-key client.key --proxytunnel");
    let (plain, tls) = (site.plain_target, site.tls_target);
    for (proxy, requests) in [
        // With absolute URLs, and inside CONNECT.
        (http_proxy.clone(), ["1", "2", "3"]),
        (format!("{http_proxy} --proxytunnel"), ["1", "2", "3"]),
        (egress, ["1", "2", "3"]),
    ] {
        for target in [format!("http://node1:{plain}"), format!("https://node1:{tls}")] {
            let line = format!("curl {proxy} {target}/who {target}/who {target}/who");
            let output = site.sh(&line);
            let kept: Vec<_> = output.lines().map(|line| line.split_once(' ').unwrap().1).collect();
            assert_eq!(kept, requests, "{line}: {output}");
            site.sh(&format!("curl {proxy} {target}/talk | cmp - talk"));
            site.sh(&format!("curl {proxy} -T talk {target}/files/talk; cmp talk files/talk; rm files/talk"));
        }
    }
    let output = site.try_sh(&format!("curl {unproved} --proxytunnel http://node1:{plain}/who"));
    assert!(!output.status.success() && output.stderr.contains("certificate required"), "{output:?}");
}

#[test]
fn http_2_clients_are_refused_by_http_1_listeners() {
    if !are_installed(&["h2load"]) {
        return;
    }
    let Some(mut site) = Site::start() else { return };
    let speaks = "HTTP/2 client rejected";
    let offers = "it speaks TLS, but not the required protocol over it (ALPN)";
    let port = |port: u16| format!("127.0.0.1:{port}");
    for (url, front, statuses) in [
        (format!("http://{}", port(site.cloud.connect)), "connect", speaks),
        (format!("http://{}", port(site.proxy)), "proxy", speaks),
        (format!("http://{}", port(site.http)), "http", speaks),
        (format!("https://{}", port(site.egress)), "egress", offers),
        (format!("https://{}", port(site.https)), "https", offers),
    ] {
        let before = site.cloud.process.log().matches(statuses).count();
        let output = run("h2load", &["--npn-list=h2", "-n", "1", "-c", "1", &url], None, TIMEOUT);
        assert!(output.stdout.contains("0 succeeded, 1 failed"), "{front}: {output:?}");
        wait_until(&format!("{front} logs why"), TIMEOUT, || {
            site.cloud.process.assert_running();
            site.cloud.process.log().matches(statuses).count() > before
        });
    }
}

#[test]
fn an_edge_behind_a_proxy_that_limits_a_request_names_that_as_the_cause() {
    if !are_installed(&["nginx"]) {
        return;
    }
    let place = TestDir::new();
    let (cloud, front) = (ServerProcess::start(&place), free_port());
    // Its default limit is 1 MiB.
    let servers = format!(
        "server {{ listen 127.0.0.1:{front} ssl http2; location / {{ grpc_pass grpcs://127.0.0.1:{}; }} }}",
        cloud.grpc
    );
    let _nginx = nginx_with(&place, &servers, front);
    let mut edge = Edge::start(&place, &format!("127.0.0.1:{front}"));
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("node1:{}", target.local_addr().unwrap().port());
    std::thread::spawn(move || target.accept().unwrap().0.write_all(&vec![b'x'; BYTES]).unwrap());
    let mut client = TcpStream::connect(loopback(cloud.connect)).unwrap();
    write!(client, "CONNECT {at} HTTP/1.1\r\n\r\n").unwrap();
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    assert!(
        received.starts_with(b"HTTP/1.1 200 ") && received.len() > BYTES,
        "all bytes arrive nevertheless"
    );
    let line = edge.process.wait_for_log("links are closed after similar numbers of bytes");
    assert!(line.contains("WARN") && line.contains("client_max_body_size 0"), "{line}");
}

/// More than goes over three links.
const BYTES: usize = 6_000_000;

/// A node with nginx, and a server with each kind of port that reaches it.
struct Site {
    // Fields drop in order: processes before the files they use.
    edge: Edge,
    cloud: ServerProcess,
    _nginx: Running,
    place: TestDir,
    plain_target: u16,
    tls_target: u16,
    https: u16,
    http: u16,
    proxy: u16,
    egress: u16,
}

impl Site {
    /// Starts it. Returns `None` if a program is missing.
    fn start() -> Option<Self> {
        if !are_installed(&["nginx", "curl"]) {
            return None;
        }
        let place = TestDir::serving(&["node1", "localhost", "127.0.0.1"]);
        let [plain_target, tls_target, https, http, proxy, egress] = [(); 6].map(|()| free_port());
        let nginx = nginx(&place, plain_target, tls_target);
        let (client_cert, client_key) = (place.path().join("client.crt"), place.path().join("client.key"));
        place.authority.0.client("curl").unwrap().write(&client_cert, &client_key).unwrap();
        let Files { ca, cert, key } = &place.files;
        let proved = format!("cert = {cert:?}\nkey = {key:?}\nclient_ca = {ca:?}\nnames = [\"curl\"]\n");
        let tables = format!(
            "[server.https]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{https}\" = \"127.0.0.1:{tls_target}\" }}\n{proved}
[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{http}\" = \"127.0.0.1:{plain_target}\" }}
[server.http_proxy]\nlisten = \"127.0.0.1:{proxy}\"
[server.egress]\nlisten = \"127.0.0.1:{egress}\"\n{proved}"
        );
        let mut cloud = ServerProcess::start_with(&place, &tables, &[]);
        let edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
        cloud.wait_for_node("node1");
        Some(Self { edge, cloud, _nginx: nginx, place, plain_target, tls_target, https, http, proxy, egress })
    }

    /// Returns the URL of nginx with TLS.
    fn https(&self) -> String {
        format!("https://node1:{}", self.https)
    }

    /// Returns the URL of nginx without TLS.
    fn http(&self) -> String {
        format!("http://node1:{}", self.http)
    }

    /// Runs a line of bash with a curl that resolves the node's name for both ports, and presents its certificate.
    fn try_sh(&self, line: &str) -> ProcessOutput {
        let Self { https, http, .. } = self;
        let curl = format!(
            "curl() {{ command curl -sS --fail-with-body --cacert ca.crt --cert client.crt --key client.key \
             --resolve node1:{https}:127.0.0.1 --resolve node1:{http}:127.0.0.1 \"$@\"; }}"
        );
        let dir = self.place.path().display();
        run("bash", &["-ec", &format!("cd {dir}; {curl}; {line}")], None, TRANSFERS)
    }

    /// Like [`Self::try_sh`], but fails the test unless the line succeeds. Returns what it prints.
    fn sh(&self, line: &str) -> String {
        let output = self.try_sh(line);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    }

    /// Returns the peak memory of server and edge so far, in KiB.
    fn most_memory(&self) -> [u64; 2] {
        [&self.cloud.process, &self.edge.process].map(|process| {
            let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        })
    }
}

/// Starts nginx with a page that contains its connection's number, a chunked page with a trailer, and files that
/// accept PUT.
fn nginx(place: &TestDir, plain: u16, tls: u16) -> Running {
    let dir = place.path();
    let lines: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
    std::fs::write(dir.join("talk"), lines).unwrap();
    std::fs::create_dir(dir.join("files")).unwrap();
    let servers = format!(
        r#"
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{tls} ssl;
        root {at};
        client_max_body_size 0;
        location = /who {{ return 200 "$connection $connection_requests\n"; }}
        location = /talk {{ ssi on; ssi_types *; add_header Trailer X-Sum; add_trailer X-Sum 42; }}
        location /files/ {{ dav_methods PUT; }}
        location /small/ {{ dav_methods PUT; client_max_body_size 9; }}
    }}"#,
        at = dir.display()
    );
    nginx_with(place, &servers, tls)
}

/// Starts nginx with these servers, and waits until it listens at a port.
pub(crate) fn nginx_with(place: &TestDir, servers: &str, port: u16) -> Running {
    let dir = place.path();
    let (at, Files { cert, key, .. }) = (dir.display(), &place.files);
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {at}/temp-{what};\n"))
        .concat();
    let config = format!(
        r#"daemon off;
master_process off;
pid {at}/nginx.pid;
error_log stderr;
events {{}}
http {{
    {temporary}
    access_log off;
    default_type text/plain;
    ssl_certificate {cert};
    ssl_certificate_key {key};
    {servers}
}}
"#,
        cert = cert.display(),
        key = key.display(),
    );
    let file = dir.join("nginx.conf");
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(find("nginx").unwrap());
    command.args(["-e", "stderr", "-c"]).arg(file).arg("-p").arg(dir);
    let mut running = Running::start("nginx", dir, &mut command);
    wait_until("nginx listens", TIMEOUT, || {
        running.assert_running();
        TcpStream::connect(loopback(port)).is_ok()
    });
    running
}

/// Maximum growth of a process in KiB, however much data it transfers.
const GROWTH: u64 = 32 * 1024;

/// Timeout for the longest transfers.
const TRANSFERS: Duration = Duration::from_secs(600);
