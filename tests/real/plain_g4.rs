//! Plain peers of SuperEdge v0.4 to v0.9, as edges and as a server: programs that report neither a failed dial nor an
//! end.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::fleet::Line;
use crate::parts::{are_installed, free_port, loopback, plain_peer, skip};
use crate::process::{Running, TIMEOUT, run};
use crate::ssh::{goes_both_ways, helper};
use crate::sshd::Sshd;
use crate::tunnel::{Edge, PROGRAM, SERVER_NAME, ServerProcess, TOKEN, TestDir};

#[test]
fn ssh_and_scp_reach_an_edge_of_v0_9() {
    let (true, Some(program)) = (are_installed(SSH), plain_peer()) else { return };
    let (sshd, place) = (Sshd::start(), TestDir::new());
    let mut cloud = ServerProcess::start(&place);
    let _edge = older_edge(program, &place, "node1", cloud.grpc);
    cloud.wait_for_node("node1");
    sshd.works_through(&helper(PROGRAM, cloud.connect));
    goes_both_ways(&sshd, cloud.connect, 100_000_000);
    cloud.process.wait_for_answer(
        cloud.metrics,
        "/metrics",
        "tunnel_plain_links_open{dialect=\"superedge-0.9\"} 1\n",
    );
    cloud.process.wait_for_log("dialect=\"superedge-0.9\"");
}

#[test]
fn ssh_and_scp_reach_this_edge_from_a_server_of_v0_9() {
    let (true, Some(program)) = (are_installed(SSH), plain_peer()) else { return };
    let (sshd, place) = (Sshd::start(), TestDir::new());
    let mut cloud = OlderServer::start(program, &place);
    let _edge = Edge::start(&place, &cloud.grpc.to_string());
    cloud.process.wait_for_log("attached node1");
    sshd.works_through(&helper(PROGRAM, cloud.connect.port()));
    goes_both_ways(&sshd, cloud.connect.port(), 100_000_000);
}

/// The server of v0.9 makes its edge dial only for the client's first bytes.
#[test]
fn bytes_of_a_target_that_sends_first_arrive_through_an_edge_of_v0_9() {
    let Some(program) = plain_peer() else { return };
    let place = TestDir::new();
    let mut cloud = ServerProcess::start(&place);
    let _edge = older_edge(program, &place, "node1", cloud.grpc);
    cloud.wait_for_node("node1");
    let mut client =
        connected(loopback(cloud.connect), "node1", serve(|mut conn| conn.write_all(b"hello").unwrap()));
    let mut hello = [0; 5];
    client.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
}

#[test]
fn a_client_of_an_edge_of_v0_9_that_cannot_dial_is_reset_and_the_log_has_the_cause() {
    let Some(program) = plain_peer() else { return };
    let place = TestDir::new();
    let mut cloud = ServerProcess::start(&place);
    let _edge = older_edge(program, &place, "node1", cloud.grpc);
    cloud.wait_for_node("node1");
    let mut client = connected(loopback(cloud.connect), "node1", free_port());
    client.write_all(b"hello").unwrap();
    let reset = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(reset.kind(), ErrorKind::ConnectionReset);
    cloud.process.wait_for_log("the edge did not answer; SuperEdge v0.9 reports no dial errors");
}

#[test]
fn two_hundred_sessions_at_once_each_get_their_own_bytes() {
    let Some(program) = plain_peer() else { return };
    let place = TestDir::new();
    let mut cloud = ServerProcess::start(&place);
    let _edge = older_edge(program, &place, "node1", cloud.grpc);
    cloud.wait_for_node("node1");
    sessions_at_once(loopback(cloud.connect));

    let mut cloud = OlderServer::start(program, &place);
    let _edge = Edge::start(&place, &cloud.grpc.to_string());
    cloud.process.wait_for_log("attached node1");
    sessions_at_once(cloud.connect);
}

fn sessions_at_once(proxy: SocketAddr) {
    let target = echo();
    let open = move |_| std::thread::spawn(move || connected(proxy, "node1", target));
    let opening: Vec<_> = (0..200).map(open).collect();
    let mut clients: Vec<_> = opening.into_iter().map(|client| client.join().unwrap()).collect();
    for round in 0..3 {
        for (number, client) in clients.iter_mut().enumerate() {
            client.write_all(format!("{round} {number:06}\n").as_bytes()).unwrap();
        }
        for (number, client) in clients.iter_mut().enumerate() {
            assert_eq!(line(client), format!("{round} {number:06}\n"));
        }
    }
}

#[test]
fn curl_keeps_its_connections_through_peers_of_v0_9() {
    let (true, Some(program)) = (are_installed(&["curl"]), plain_peer()) else { return };
    let place = TestDir::new();
    let proxy = free_port();
    let more = format!(
        "[server.http_proxy]\nlisten = \"127.0.0.1:{proxy}\"\nauth = \"none\"\n\
         [server.edge_access]\ntargets = [\"127.0.0.0/8:*\"]\n"
    );
    let mut cloud = ServerProcess::start_with(&place, &more, &[]);
    let at_edge = free_port();
    let _edge =
        older_edge_with(program, &place, "node1", cloud.grpc, &["--proxy", &format!("127.0.0.1:{at_edge}")]);
    cloud.wait_for_node("node1");
    let page = pages();
    for way in ["", "-p"] {
        assert_eq!(
            curl(proxy, way, &format!("http://node1:{page}/")),
            "1 page 0 ",
            "through the server {way}"
        );
        assert_eq!(
            curl(at_edge, way, &format!("http://127.0.0.1:{page}/")),
            "1 page 0 ",
            "through the edge {way}"
        );
    }

    let Some(ip) = own_address() else { return };
    let mut cloud = OlderServer::start(program, &place);
    let own = free_port();
    let config = place.edge_config("node1", &cloud.grpc.to_string(), free_port());
    let config = format!("{config}[edge.http_proxy]\nlisten = \"127.0.0.1:{own}\"\n");
    let _edge = place.tunnel(("edge", "edge-of-older"), &config, &[], &[]);
    cloud.process.wait_for_log("attached node1");
    for way in ["", "-p"] {
        assert_eq!(curl(own, way, &format!("http://{ip}:{page}/")), "1 page 0 ", "through this edge {way}");
        // The server of v0.9 knows the node by its name, and only CONNECT.
        let through = curl(cloud.proxy.port(), "-p", &format!("http://node1:{page}/"));
        assert_eq!(through, "1 page 0 ", "through its server");
    }
}

/// Instead of kubectl and kube-apiserver: what they do with the egress port, a request for a log over TLS to the proxy.
#[test]
fn a_log_is_read_over_the_egress_port_through_an_edge_of_v0_9() {
    let (true, Some(program)) = (are_installed(&["curl"]), plain_peer()) else { return };
    let place = TestDir::new();
    let egress = free_port();
    let mut cloud = ServerProcess::start_with(&place, &egress_table(&place, egress), &[]);
    let _edge = older_edge(program, &place, "node1", cloud.grpc);
    cloud.wait_for_node("node1");
    let kubelet = serve(|mut conn| {
        let _ = conn.read(&mut [0; 4096]).unwrap();
        conn.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        for number in 0..1000 {
            conn.write_all(format!("b\r\nline {number:05}\n\r\n").as_bytes()).unwrap();
        }
        conn.write_all(b"0\r\n\r\n").unwrap();
        // Kept open, as a kubelet does.
        let _ = conn.read(&mut [0; 1]);
    });
    let output = curl_through_egress(
        &place,
        egress,
        &format!("http://node1:{kubelet}/containerLogs/default/pod/container"),
    );
    assert!(output.starts_with("line 00000\n") && output.ends_with("line 00999\n"), "{output}");
    assert_eq!(output.lines().count(), 1000);
}

/// Returns the table of an egress port that accepts the server's own certificate.
fn egress_table(place: &TestDir, port: u16) -> String {
    let files = &place.files;
    format!(
        "[server.egress]\nlisten = \"127.0.0.1:{port}\"\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\nnames = [\"*\"]\n",
        files.cert, files.key, files.ca
    )
}

fn curl_through_egress(place: &TestDir, port: u16, url: &str) -> String {
    let files = &place.files;
    let mut args: Vec<String> = ["-sS", "-m", "30", "-p"].map(String::from).into();
    let files = [("--proxy-cacert", &files.ca), ("--proxy-cert", &files.cert), ("--proxy-key", &files.key)];
    for (flag, file) in files {
        args.extend([flag.to_owned(), file.display().to_string()]);
    }
    args.extend(["-x".into(), format!("https://127.0.0.1:{port}"), url.into()]);
    let output = run("curl", &args, None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// These edges know fewer categories of sessions, and do not answer to others.
#[test]
fn clients_of_every_port_reach_edges_of_v0_4_and_v0_7() {
    let (true, Some(program)) = (are_installed(&["curl", "openssl"]), plain_peer()) else { return };
    let place = TestDir::new();
    let [tcp, http, https, egress, tls] = [(); 5].map(|()| free_port());
    let mut openssl = Command::new("openssl");
    openssl.args(["s_server", "-quiet", "-www", "-accept", &loopback(tls).to_string()]);
    openssl.arg("-cert").arg(&place.files.cert).arg("-key").arg(&place.files.key);
    let mut target = Running::start("openssl", place.path(), &mut openssl);
    crate::wait::wait_until("openssl listens", TIMEOUT, || {
        target.assert_running();
        TcpStream::connect(loopback(tls)).is_ok()
    });
    let echo = echo();
    let page = pages();
    let more = format!(
        "[server.tcp]\n\"127.0.0.1:{tcp}\" = \"node1/127.0.0.1:{echo}\"\n\
         [server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{http}\" = \"127.0.0.1:{page}\" }}\n\
         [server.https]\nmode = \"passthrough\"\nlisten_ip = \"127.0.0.1\"\n\
         ports = {{ \"{https}\" = \"127.0.0.1:{tls}\" }}\n{}",
        egress_table(&place, egress)
    );
    let mut cloud = ServerProcess::start_with(&place, &more, &[]);
    for kind in ["edge-0.4", "edge-0.7"] {
        let _edge = plain_edge(program, kind, &place, ("node1", &loopback(cloud.grpc).to_string()), &[]);
        cloud.wait_for_node("node1");
        let over_connect = connected(loopback(cloud.connect), "node1", echo);
        for mut client in [over_connect, TcpStream::connect(loopback(tcp)).unwrap()] {
            client.set_read_timeout(Some(TIMEOUT)).unwrap();
            client.write_all(b"there and back\n").unwrap();
            assert_eq!(line(&mut client), "there and back\n", "{kind}");
        }
        for (scheme, port) in [("http", http), ("https", https)] {
            let at = format!("node1:{port}:127.0.0.1");
            let url = format!("{scheme}://node1:{port}/");
            let args =
                ["-sS", "-m", "30", "-k", "--resolve", &at, "-w", "%{http_code}", "-o", "/dev/null", &url];
            let output = run("curl", &args, None, TIMEOUT);
            assert_eq!(output.stdout, "200", "{kind}: {output:?}");
        }
        assert_eq!(curl_through_egress(&place, egress, &format!("http://node1:{page}/")), "page ", "{kind}");
    }
}

#[test]
fn after_a_cut_link_the_sessions_have_ended_and_new_ones_work() {
    let Some(program) = plain_peer() else { return };
    let place = TestDir::new();
    let target = echo();
    let mut cloud = ServerProcess::start(&place);
    let cut = Line::to(loopback(cloud.grpc));
    let _edge = older_edge(program, &place, "node1", cut.port);
    cloud.wait_for_node("node1");
    cut_and_again(loopback(cloud.connect), target, &cut);
    cloud.process.assert_running();
    cloud.process.wait_for_answer(
        cloud.metrics,
        "/metrics",
        "tunnel_plain_links_open{dialect=\"superedge-0.9\"} 1\n",
    );

    let mut cloud = OlderServer::start(program, &place);
    let cut = Line::to(cloud.grpc);
    let mut edge = Edge::start(&place, &format!("127.0.0.1:{}", cut.port));
    cloud.process.wait_for_log("attached node1");
    let mut client = connected(cloud.connect, "node1", target);
    client.write_all(b"before\n").unwrap();
    assert_eq!(line(&mut client), "before\n");
    cut.reset();
    cloud.process.wait_for_log("detached node1");
    edge.process.assert_running();
    again(cloud.connect, target);
}

fn cut_and_again(proxy: SocketAddr, target: u16, cut: &Line) {
    let mut client = connected(proxy, "node1", target);
    client.write_all(b"before\n").unwrap();
    assert_eq!(line(&mut client), "before\n");
    cut.reset();
    assert_eq!(client.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    again(proxy, target);
}

/// Opens sessions until one works: the edge links again after a second.
fn again(proxy: SocketAddr, target: u16) {
    crate::wait::wait_until("a session works again", TIMEOUT, || {
        let Some(mut client) = connect(proxy, "node1", target) else { return false };
        client.write_all(b"after\n").is_ok() && read_line(&mut client).as_deref() == Some("after\n")
    });
}

#[test]
fn five_edges_of_each_kind_work_with_two_servers() {
    let Some(program) = plain_peer() else { return };
    let place = TestDir::new();
    let port = free_port();
    let at = [2, 3].map(|last| SocketAddr::from(([127, 0, 0, last], port)));
    let peers = format!("[server.peers]\naddresses = [\"{}\", \"{}\"]\n", at[0], at[1]);
    let mut servers = [0, 1].map(|n: usize| {
        let ip = at[n].ip().to_string();
        ServerProcess::launch(&place, (&format!("server{n}"), at[n]), &peers, &[("POD_IP", &ip)], &[])
    });
    servers.iter_mut().for_each(ServerProcess::ready);
    let mut edges = Vec::new();
    let mut nodes = Vec::new();
    for n in 0..5 {
        let server = at[n % 2].to_string();
        let place = &place;
        for kind in ["edge-0.9", "edge"] {
            let node = format!("{kind}-{n}").replace('.', "-");
            edges.push(plain_edge(program, kind, place, (&node, &server), &[]));
            nodes.push((node, n % 2));
        }
        let node = format!("ours-{n}");
        edges.push(Edge::start_as(place, &node, &server).process);
        nodes.push((node, n % 2));
    }
    for (node, server) in &nodes {
        servers[*server].wait_for_node(node);
    }
    let target = echo();
    for server in &servers {
        for (node, _) in &nodes {
            let mut client = connected(loopback(server.connect), node, target);
            client.write_all(format!("{node}\n").as_bytes()).unwrap();
            assert_eq!(line(&mut client), format!("{node}\n"));
        }
    }
    for (server, links) in servers.iter_mut().zip([3, 2]) {
        for dialect in ["superedge-0.9", "plain"] {
            let shown = format!("tunnel_plain_links_open{{dialect=\"{dialect}\"}} {links}\n");
            server.process.wait_for_answer(server.metrics, "/metrics", &shown);
        }
    }
}

/// A server of v0.9 that is listening.
#[derive(Debug)]
struct OlderServer {
    process: Running,
    grpc: SocketAddr,
    connect: SocketAddr,
    proxy: SocketAddr,
}

impl OlderServer {
    fn start(program: &Path, place: &TestDir) -> Self {
        let mut command = Command::new(program);
        command.args(["cloud-0.9", "--token", TOKEN, "--cert"]).arg(&place.files.cert);
        let mut process =
            Running::start("older-cloud", place.path(), command.arg("--key").arg(&place.files.key));
        let line = process.wait_for_log("listening ");
        let addresses: Vec<_> = line.split(' ').skip(1).map(|text| text.parse().unwrap()).collect();
        let [grpc, connect, _egress, proxy] = addresses[..] else { panic!("{line}") };
        Self { process, grpc, connect, proxy }
    }
}

fn older_edge(program: &Path, place: &TestDir, node: &str, cloud: u16) -> Running {
    older_edge_with(program, place, node, cloud, &[])
}

fn older_edge_with(program: &Path, place: &TestDir, node: &str, cloud: u16, more: &[&str]) -> Running {
    plain_edge(program, "edge-0.9", place, (node, &format!("127.0.0.1:{cloud}")), more)
}

fn plain_edge(
    program: &Path,
    kind: &str,
    place: &TestDir,
    (node, cloud): (&str, &str),
    more: &[&str],
) -> Running {
    let mut command = Command::new(program);
    command.args([kind, "--node", node, "--token", TOKEN, "--name", SERVER_NAME, "--cloud", cloud]);
    command.arg("--ca").arg(&place.files.ca).args(more);
    Running::start(&format!("plain-{node}"), place.path(), &mut command)
}

/// Returns an address of this machine other than loopback, which edges do not request.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Sends nothing: only the route is looked up.
    let found = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr());
    if found.is_err() {
        skip("this machine has loopback only");
    }
    found.ok().map(|at| at.ip())
}

/// Returns a session to a port of a node.
fn connected(proxy: SocketAddr, node: &str, port: u16) -> TcpStream {
    connect(proxy, node, port).unwrap_or_else(|| panic!("no session to {node}:{port} through {proxy}"))
}

fn connect(proxy: SocketAddr, node: &str, port: u16) -> Option<TcpStream> {
    let mut client = TcpStream::connect(proxy).ok()?;
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(client, "CONNECT {node}:{port} HTTP/1.1\r\nHost: {node}\r\n\r\n").ok()?;
    let response = read_line(&mut client)?;
    read_line(&mut client).filter(|end| end == "\r\n" && response.contains(" 200 "))?;
    Some(client)
}

fn line(client: &mut TcpStream) -> String {
    read_line(client).expect("a line")
}

/// Reads no more than a line: the next bytes belong to the session.
fn read_line(client: &mut TcpStream) -> Option<String> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while !line.ends_with(b"\n") {
        client.read_exact(&mut byte).ok()?;
        line.push(byte[0]);
    }
    String::from_utf8(line).ok()
}

/// Serves each connection to a port in its own thread. The threads end with the test.
fn serve(handle: impl Fn(TcpStream) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for conn in listener.incoming() {
            let handle = handle.clone();
            std::thread::spawn(move || handle(conn.unwrap()));
        }
    });
    port
}

fn echo() -> u16 {
    serve(|mut conn| {
        let mut piece = [0; 4096];
        while let Ok(read @ 1..) = conn.read(&mut piece) {
            let _ = conn.write_all(&piece[..read]);
        }
    })
}

/// Answers each request at a new port with `page `, and keeps the connection.
pub(crate) fn pages() -> u16 {
    serve(|mut conn| {
        let mut request = [0; 4096];
        while let Ok(1..) = conn.read(&mut request) {
            let _ = conn.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\npage ");
        }
    })
}

/// Gets a URL twice. Returns the second page, and the number of new connections for each.
fn curl(proxy: u16, way: &str, url: &str) -> String {
    let through = format!("http://127.0.0.1:{proxy}");
    let mut args = vec!["-sS", "-m", "30", "-x", &through, "-w", "%{num_connects} "];
    args.extend(Some(way).filter(|way| !way.is_empty()));
    args.extend([url, "-o", "/dev/null", url]);
    let output = run("curl", &args, None, TIMEOUT + Duration::from_secs(15));
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

const SSH: &[&str] = &["sshd", "ssh", "scp", "ssh-keygen", "nc.openbsd"];
