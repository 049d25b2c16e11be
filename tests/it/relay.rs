//! Several servers: a node at another server, nodes that move, servers that die, wrong DNS.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tunnel::config::Environment;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::frame::{ErrorCode, SessionFrame};
use tunnel_proto::hello::LinkCaller;
use tunnel_proto::names::{Instance, SessionId};

use crate::certificates::Authority;
use crate::support::clients::{assert_echo, rest};
use crate::support::line::Line;
use crate::support::programs::{NAME, TestDir, TestServer, assert_edge_idle, at, edge, start_edge};
use crate::support::servers::{self, Dns, DnsScript, KillableServer};
use crate::support::{Stopwatch, assert_eventually, pause_time, remote, targets, wait_until};
use crate::words::LogLines;

/// Opens a session as soon as possible, within a second.
async fn opens(server: &TestServer, target: &str) -> TcpStream {
    let started = Stopwatch::start();
    loop {
        let answer = try_open(server, target).await;
        match answer {
            Ok(socket) => return socket,
            Err(why) => assert!(started.elapsed() < Duration::from_secs(1), "{why}"),
        }
    }
}

async fn try_open(server: &TestServer, target: &str) -> Result<TcpStream, String> {
    let mut socket = TcpStream::connect(server.connect).await.unwrap();
    socket.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    let head = crate::support::clients::head(&mut socket).await;
    if head.starts_with("HTTP/1.1 200") { Ok(socket) } else { Err(head) }
}

#[tokio::test]
async fn a_node_is_reached_through_every_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 3);
    let edge = edge(&place, &servers[1], "node1").await;
    for server in &servers {
        let mut client = server.open(&at("node1", echo)).await;
        assert_echo(&mut client, "hello").await;
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"");
    }
    for server in &servers {
        server.assert_idle().await;
        wait_until("no session is relayed", || server.server.table.relayed() == (0, 0)).await;
    }
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn bulk_goes_through_another_server_unchanged() {
    let (place, source) = (TestDir::new(), targets::source(20 << 20).await);
    let servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[1], "node1").await;
    let mut client = servers[0].open(&at("node1", source)).await;
    assert!(rest(&mut client).await == targets::pattern(20 << 20));
}

#[tokio::test]
async fn a_missing_node_is_reported_with_the_queried_peers() {
    let place = TestDir::new();
    let all = servers::addresses(3);
    let lines: Vec<_> = all.iter().map(|at| servers::config(&place, *at, &servers::peers(&all))).collect();
    let (first, _second) = (TestServer::from_text(&lines[0]), TestServer::from_text(&lines[1]));
    let answer = first.request_connect("node1:22").await;
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(answer.body.contains("node node1 is not connected"), "{answer:?}");
    assert!(answer.body.contains("not at 1 peer"), "{answer:?}");
    let dead = format!("peer {} cannot be reached", all[2]);
    assert!(answer.body.contains(&dead), "{answer:?}");
}

#[tokio::test]
async fn a_server_without_peers_queries_no_other_server() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let answer = server.request_connect("node1:22").await;
    assert!(answer.body.starts_with("node node1 is not connected\n"), "{answer:?}");
}

#[tokio::test]
async fn a_session_follows_its_node_from_server_to_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 3);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let edge = start_edge(&place.edge("node1", line.at, ""));
    servers[1].wait_for_node("node1").await;
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "at the second server").await;
    for to in [0, 2, 1, 2] {
        line.route_to(servers[to].server.bound.grpc);
        line.reset();
        servers[to].wait_for_node("node1").await;
        let started = Stopwatch::start();
        assert_echo(&mut client, "somewhere else").await;
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
        assert!(servers[0].server.metrics.resumed.get() > 0 && edge.metrics.resumed.get() > 0);
        let mut other = opens(&servers[1], &at("node1", echo)).await;
        assert_echo(&mut other, "a new one").await;
    }
    drop(client);
    for server in &servers {
        server.assert_idle().await;
    }
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn bytes_survive_a_node_that_moves_while_they_flow() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 3);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    servers[1].wait_for_node("node1").await;
    let (mut from, mut to) = servers[0].open(&at("node1", echo)).await.into_split();
    let bytes = targets::pattern(12 << 20);
    let sent = bytes.clone();
    let sender = crate::support::spawn(async move {
        to.write_all(&sent).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut back = Vec::new();
    for to in [2, 0, 1] {
        let mut part = vec![0; 3 << 20];
        assert_eventually("the next part", from.read_exact(&mut part)).await.unwrap();
        back.extend_from_slice(&part);
        line.route_to(servers[to].server.bound.grpc);
        line.reset();
        servers[to].wait_for_node("node1").await;
    }
    assert_eventually("the rest", from.read_to_end(&mut back)).await.unwrap();
    assert!(back == bytes, "{} of {} bytes, or wrong ones", back.len(), bytes.len());
    sender.await.unwrap();
}

#[tokio::test]
async fn a_session_outlives_the_server_that_holds_the_link() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let text = |n: usize| servers::config(&place, all[n], &servers::peers(&all));
    let (front, last) = (TestServer::from_text(&text(0)), TestServer::from_text(&text(2)));
    let mut middle = KillableServer::start(text(1)).await;
    let line = Line::to(all[1]).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    middle.server.wait_for_node("node1").await;
    let mut client = front.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    line.route_to(all[2]);
    middle.kill();
    last.wait_for_node("node1").await;
    let started = Stopwatch::start();
    assert_echo(&mut client, "after").await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let mut other = opens(&front, &at("node1", echo)).await;
    assert_echo(&mut other, "a new one").await;
}

#[tokio::test]
async fn an_edge_that_moves_in_order_is_not_called_unresponsive() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let line = Line::to(servers[0].server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    servers[0].wait_for_node("node1").await;
    let old = servers[0].link("node1").unwrap();
    line.route_to(servers[1].server.bound.grpc);
    old.link.drain();
    servers[1].wait_for_node("node1").await;
    wait_until("the previous link has ended", || old.link.is_closed()).await;
    // Longer than the first server waits for the answer of that link.
    pause_time();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(lines.count("unresponsive"), 0, "{}", lines.text());
}

#[tokio::test]
async fn an_unresponsive_link_is_closed_once_its_node_is_elsewhere() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let silent = Line::to(servers[0].server.bound.grpc).await;
    let _old = start_edge(&place.edge("node1", silent.at, ""));
    servers[0].wait_for_node("node1").await;
    silent.become_unresponsive();
    // The same node links to the other server, while the first considers it linked.
    let _new = edge(&place, &servers[1], "node1").await;
    let started = Stopwatch::start();
    wait_until("the first server has no link", || servers[0].link("node1").is_none()).await;
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn a_session_leaves_an_unresponsive_server_once_its_node_moves() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    // The first server reaches the second over a separate path.
    let between = Line::to(all[1]).await;
    let text =
        |n: usize, list: &[std::net::SocketAddr]| servers::config(&place, all[n], &servers::peers(list));
    let first = TestServer::from_text(&text(0, &[between.at, all[2]]));
    let second = TestServer::from_text(&text(1, &[all[1]]));
    let third = TestServer::from_text(&text(2, &all));
    let line = Line::to(all[1]).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    second.wait_for_node("node1").await;
    let mut client = first.open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    between.become_unresponsive();
    line.route_to(all[2]);
    line.reset();
    third.wait_for_node("node1").await;
    let started = Stopwatch::start();
    assert_echo(&mut client, "after").await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
}

#[tokio::test]
async fn dns_alone_finds_the_server_that_has_the_node() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let dns = Dns::start(DnsScript::NoSuchName).await;
    let lines = format!("[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"", dns.at);
    let servers: Vec<_> =
        all.iter().map(|at| TestServer::from_text(&servers::config(&place, *at, &lines))).collect();
    let _edge = edge(&place, &servers[1], "node1").await;
    let answer = servers[0].request_connect("node1:22").await;
    assert!(answer.body.contains("not in DNS"), "{answer:?}");
    dns.set_script(DnsScript::At([127, 0, 0, 3].into()));
    // The failed search is remembered for a second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn wrong_or_missing_dns_delays_no_session_while_peers_answer() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    for script in [
        DnsScript::Nothing,
        DnsScript::NoSuchName,
        DnsScript::At([127, 0, 0, 4].into()),
        DnsScript::At([127, 0, 0, 99].into()),
    ] {
        let all = servers::addresses(3);
        let dns = Dns::start(script).await;
        let lines = format!(
            "[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"\n{}",
            dns.at,
            servers::peers(&all)
        );
        let mut servers: Vec<_> = Vec::new();
        // The server that is asked starts last, so that the others are up when it dials them.
        for at in all.iter().rev() {
            servers.insert(0, TestServer::from_text(&servers::config(&place, *at, &lines)));
        }
        wait_until("the peers answer", || servers[0].server.metrics.links.all() >= 2).await;
        let _edge = edge(&place, &servers[1], "node1").await;
        let started = Stopwatch::start();
        let mut client = servers[0].open(&at("node1", echo)).await;
        assert_echo(&mut client, "hello").await;
        assert!(started.elapsed() < Duration::from_millis(900), "{script:?}: {:?}", started.elapsed());
        let _second = edge(&place, &servers[1], "node2").await;
        let started = Stopwatch::start();
        let mut client = servers[0].open(&at("node2", echo)).await;
        assert_echo(&mut client, "hello").await;
        assert!(started.elapsed() < Duration::from_millis(900), "{script:?}: {:?}", started.elapsed());
    }
}

#[tokio::test]
async fn a_node_that_speaks_plain_is_reached_through_another_server() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let mut edge = remote::link(&place, &servers[1], "node1", None).await;
    let accept = async {
        let open = edge.next_session_message().await;
        assert_eq!((open.r#type.as_str(), open.addr.as_str()), ("connecting", "127.0.0.1:22"));
        edge.send_plain("connected", &open.topic, "").await;
        open.topic
    };
    let (mut client, topic) = tokio::join!(servers[0].open("node1:22"), accept);
    client.write_all(b"hello").await.unwrap();
    assert_eq!(edge.next_session_message().await, edge.plain("tcp-forward", &topic, "hello".into()));
    edge.send_plain("tcp-forward", &topic, "world").await;
    edge.send_plain("closed", &topic, "EOF").await;
    assert_eq!(rest(&mut client).await, b"world");
    client.shutdown().await.unwrap();
    for server in &servers {
        server.assert_idle().await;
    }
    let refuse = async {
        let open = edge.next_session_message().await;
        edge.send_plain("connect-failed", &open.topic, "dial tcp: connection refused").await;
    };
    let (answer, ()) = tokio::join!(servers[0].request_connect("node1:22"), refuse);
    assert_eq!((answer.status, answer.phrase.as_str()), (502, "node node1: dial tcp: connection refused"));
}

#[tokio::test]
async fn a_session_with_a_plain_node_outlives_the_link_between_the_servers() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let between = Line::to(all[1]).await;
    let first = TestServer::from_text(&servers::config(&place, all[0], &servers::peers(&[between.at])));
    let second = TestServer::from_text(&servers::config(&place, all[1], &servers::peers(&[all[1]])));
    let mut edge = remote::link(&place, &second, "node1", None).await;
    let accept = async {
        let open = edge.next_session_message().await;
        edge.send_plain("connected", &open.topic, "").await;
        open.topic
    };
    let (mut client, topic) = tokio::join!(first.open("node1:22"), accept);
    between.reset();
    client.write_all(b"hello").await.unwrap();
    assert_eq!(edge.next_session_message().await, edge.plain("tcp-forward", &topic, "hello".into()));
    edge.send_plain("tcp-forward", &topic, "world").await;
    let mut back = [0; 5];
    assert_eventually("the answer", client.read_exact(&mut back)).await.unwrap();
    assert_eq!(&back, b"world");
}

fn own(place: &TestDir) -> Option<IdentityFiles> {
    Some(IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() })
}

fn resume(instance: Option<Instance>) -> SessionFrame {
    let target = "127.0.0.1:22".parse().unwrap();
    SessionFrame::Resume { received: 0, limit: 1000, epoch: 2, instance, opener: None, target, place: None }
}

#[tokio::test]
async fn a_session_from_a_peer_is_never_relayed_to_another_peer() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[1], "node1").await;
    // The first server knows where the node is.
    drop(servers[0].open(&at("node1", targets::echo().await)).await);
    let headers = LinkCaller::peer_request(Instance::from_bits(77));
    let mut link = remote::link_as_peer(&place, servers[0].server.bound.grpc, own(&place), headers, "node1")
        .await
        .unwrap();
    let id = SessionId::random();
    let open = SessionFrame::Open {
        target: "127.0.0.1:22".parse().unwrap(),
        limit: 1000,
        epoch: 1,
        client: "x".into(),
        opener: None,
        resume_timeout: None,
        boot: None,
    };
    link.send_session(id, open).await;
    let (answered, frame) = link.next_session_frame().await;
    assert_eq!(answered, id);
    let SessionFrame::Refused { epoch: 1, refusal } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::NodeNotConnected);
    let instance = Some(Instance::from_bits(78));
    link.send_session(id, resume(instance)).await;
    let (_, frame) = link.next_session_frame().await;
    let SessionFrame::Reset { epoch: 2, refusal } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::NodeNotConnected);
}

#[tokio::test]
async fn a_session_is_resumed_only_with_the_process_that_holds_it() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[1], "node1").await;
    let headers = LinkCaller::peer_request(Instance::from_bits(77));
    let mut link = remote::link_as_peer(&place, servers[1].server.bound.grpc, own(&place), headers, "node1")
        .await
        .unwrap();
    let instance = Some(Instance::from_bits(78));
    link.send_session(SessionId::random(), resume(instance)).await;
    let (_, frame) = link.next_session_frame().await;
    let SessionFrame::Reset { epoch: 2, refusal } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::UnknownSession);
}

#[tokio::test]
async fn a_peer_must_present_the_clouds_certificate() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let grpc = servers[0].server.bound.grpc;
    let headers = || LinkCaller::peer_request(Instance::from_bits(77));
    let link = async |shows, headers: HeaderMap| {
        remote::link_as_peer(&place, grpc, shows, headers, "node1").await.map(drop)
    };
    let refused = link(None, headers()).await.unwrap_err();
    assert!(refused.message().contains("certificate"), "{refused:?}");

    let dir = tempfile::tempdir().unwrap();
    let stranger = Authority::new().write(dir.path(), &[NAME]);
    let stranger = IdentityFiles { cert: stranger.cert, key: stranger.key };
    link(Some(stranger), headers()).await.expect_err("a certificate of another CA");
    let edge = place.authority.write(dir.path(), &["edge.test"]);
    let edge = IdentityFiles { cert: edge.cert, key: edge.key };
    link(Some(edge), headers()).await.expect_err("a certificate of the CA for another name");

    let mut with_token = headers();
    let token = HeaderValue::from_static("Bearer {\"nodename\":\"node1\",\"token\":\"0123456789abcdef\"}");
    with_token.insert("authorization", token);
    let refused = link(own(&place), with_token).await.unwrap_err();
    assert!(refused.message().contains("role"), "{refused:?}");

    link(own(&place), headers()).await.expect("the cloud's own certificate is accepted");
}

#[tokio::test]
async fn peers_without_a_ca_file_are_an_error_at_start() {
    let place = TestDir::new();
    let all = servers::addresses(1);
    let text = servers::config(&place, all[0], &servers::peers(&all)).replace("ca.crt", "nowhere.crt");
    let (settings, _) = ServerConfig::read(&text, &Environment::default()).unwrap();
    let error = format!("{:#}", Server::start(settings, None).unwrap_err());
    assert!(error.contains("server.peers.addresses") && error.contains("nowhere.crt"), "{error}");
    assert!(error.contains("a cert from one CA"), "expected a hint: {error}");
}

#[tokio::test]
async fn a_service_without_a_ca_file_is_an_error_but_not_in_superedges_tables() {
    let place = TestDir::new();
    let env = Environment {
        pod_ip: Some("127.0.0.1".into()),
        kubeconfig: Some(place.path().join("kubeconfig")),
        ..tunnel::config::Environment::default()
    };
    let start = |text: &str| {
        let (settings, _) = ServerConfig::read(text, &env).unwrap();
        Server::start(settings, None)
    };
    let ours = place.cloud("[server.peers]\nkubernetes_service = \"pods\"").replace("ca.crt", "nowhere.crt");
    let error = format!("{:#}", start(&ours).unwrap_err());
    assert!(error.contains("server.peers.kubernetes_service") && error.contains("nowhere.crt"), "{error}");
    assert!(error.contains("a cert from one CA"), "expected a hint: {error}");
    let dir = place.path().display();
    let superedge = format!(
        r#"
[mode.cloud.stream.server]
grpc_port = 0
log_port = 0
key = "{dir}/cloud.key"
cert = "{dir}/cloud.crt"
tokenfile = "{dir}/token"
[mode.cloud.stream.register]
service = "pods"
[mode.cloud.ssh]
port = 0
"#
    );
    start(&superedge).unwrap();
}

#[tokio::test]
async fn three_hundred_sessions_follow_their_node_at_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(3);
    let text = |n: usize| servers::config(&place, all[n], &servers::peers(&all));
    let (front, last) = (TestServer::from_text(&text(0)), TestServer::from_text(&text(2)));
    let mut middle = KillableServer::start(text(1)).await;
    let line = Line::to(all[1]).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    middle.server.wait_for_node("node1").await;
    let mut clients = Vec::new();
    for _ in 0..300 {
        clients.push(front.open(&at("node1", echo)).await);
    }
    line.route_to(all[2]);
    middle.kill();
    last.wait_for_node("node1").await;
    let started = Stopwatch::start();
    for client in &mut clients {
        assert_echo(client, "after").await;
    }
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(front.server.table.len(), 300);
    drop(clients);
    front.assert_idle().await;
    last.assert_idle().await;
    wait_until("no session is relayed", || last.server.table.relayed() == (0, 0)).await;
}

#[tokio::test]
async fn clients_wait_while_a_node_changes_servers() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 3);
    let line = Line::to(servers[1].server.bound.grpc).await;
    let _edge = start_edge(&place.edge("node1", line.at, ""));
    servers[1].wait_for_node("node1").await;
    assert_echo(&mut servers[0].open(&at("node1", echo)).await, "before").await;
    for to in [2, 1, 0] {
        line.route_to(servers[to].server.bound.grpc);
        line.reset();
        let target = at("node1", echo);
        let [one, two, three] =
            [&servers[0], &servers[1], &servers[2]].map(|server| try_open(server, &target));
        for opened in <[_; 3]>::from(tokio::join!(one, two, three)) {
            assert_echo(&mut opened.unwrap(), "on its way").await;
        }
    }
}
