//! TCP ports, each for one target behind a node.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::inside::inside;
use crate::support::clients::{assert_echo, assert_reset, reset, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, edge, edge_with};
use crate::support::{assert_eventually, remote, servers, targets, wait_until};
use crate::words::LogLines;

/// Returns config lines with one TCP port for that target. `more` is added after the target.
fn port(to: &str, more: &str) -> String {
    format!("[server.tcp]\n\"127.0.0.1:0\" = {{ target = \"{to}\"{more} }}\n")
}

/// The warning about a port that could lead to more than one node.
const SEVERAL: &str = "several nodes connected, port uses the longest connected one";

/// Returns the bytes received before the connection is closed, in good order or not.
async fn until_closed(mut socket: TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = assert_eventually("the end", socket.read_to_end(&mut all)).await;
    all
}

#[tokio::test]
async fn a_port_reaches_its_target_in_both_directions_and_half_closed() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, &port(&format!("node2/{echo}"), ""));
    let (one, two) = (edge(&place, &server, "node1").await, edge(&place, &server, "node2").await);
    let mut client = server.client("tcp").await;
    // Sent before the session is open.
    assert_echo(&mut client, "first").await;
    assert_eq!((one.table.len(), two.table.len()), (0, 1));
    client.write_all(b"last").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"last");
    server.assert_idle().await;
    assert_edge_idle(&two).await;
    assert_eq!(server.server.metrics.sessions.closed("tcp", "ok"), 1);
    assert_eq!(server.server.metrics.sessions.closed("connect", "ok"), 0);
}

#[tokio::test]
async fn each_port_of_a_range_reaches_the_target_port_at_the_same_distance() {
    let place = TestDir::new();
    // Other tests take no port of this range at these two addresses.
    let ranges = std::iter::repeat_with(|| [(); 3].map(|()| servers::addresses(2)));
    let is_range =
        |all: &[Vec<SocketAddr>; 3]| all.windows(2).all(|two| two[1][0].port() == two[0][0].port() + 1);
    let [range, ..] = ranges.into_iter().find(is_range).unwrap();
    let (listen, targets) = (range[0], range[1]);
    let target = |offset: u16| SocketAddr::new(targets.ip(), targets.port() + offset);
    let first = targets::serve_at(&target(0).to_string(), targets::echo_one).await;
    let greet = async |mut socket: TcpStream| socket.write_all(b"third").await.unwrap();
    let third = targets::serve_at(&target(2).to_string(), greet).await;
    let last = listen.port() + 2;
    assert_eq!((first, third), (target(0), target(2)));
    let lines = format!("[edge.allow]\ntargets = [\"{}:*\"]", targets.ip());
    let server =
        TestServer::with(&place, &format!("[server.tcp]\n\"{listen}-{last}\" = \"node1/{first}\"\n"));
    let _edge = edge_with(&place, &server, "node1", &lines).await;
    assert_echo(&mut TcpStream::connect(listen).await.unwrap(), "first").await;
    let port = |offset: u16| SocketAddr::new(listen.ip(), listen.port() + offset);
    assert_eq!(until_closed(TcpStream::connect(port(2)).await.unwrap()).await, b"third");
    assert_reset(&mut TcpStream::connect(port(1)).await.unwrap()).await;
    assert!(TcpStream::connect(port(3)).await.is_err());
}

#[tokio::test]
async fn a_target_may_send_first_and_its_reset_reaches_the_client() {
    let (place, source) = (TestDir::new(), targets::source(70_000).await);
    let server = TestServer::with(&place, &port(&format!("node1/{source}"), ""));
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.client("tcp").await;
    assert_eq!(rest(&mut client).await, targets::pattern(70_000));
    reset(client);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
    assert_eq!(server.server.metrics.sessions.closed("tcp", "client_io_error"), 1);
}

#[tokio::test]
async fn without_a_node_name_the_longest_linked_node_serves_the_port() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, &format!("[server.tcp]\n\"127.0.0.1:0\" = \"{echo}\"\n"));
    assert_reset(&mut server.client("tcp").await).await;
    assert_eq!(server.server.metrics.sessions.closed("tcp", "node_not_connected"), 1);
    let two = edge(&place, &server, "node2").await;
    let (lines, _guard) = LogLines::start();
    assert_echo(&mut server.client("tcp").await, "to the only one").await;
    assert_eq!(lines.count(SEVERAL), 0);
    server.assert_idle().await;
    let one = edge(&place, &server, "node1").await;
    let mut client = server.client("tcp").await;
    assert_echo(&mut client, "to the older").await;
    assert_eq!(lines.count(SEVERAL), 1);
    assert_eq!((one.table.len(), two.table.len()), (0, 1));
    two.shutdown(async {}).await;
    assert_reset(&mut client).await;
    wait_until("the node is disconnected", || server.link("node2").is_none()).await;
    assert_echo(&mut server.client("tcp").await, "to the other").await;
}

#[tokio::test]
async fn a_node_at_another_server_is_reached_by_its_name_and_as_the_only_one() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let text = |at: SocketAddr, to: String| {
        format!("{}{}", servers::config(&place, at, &servers::peers(&all)), port(&to, ""))
    };
    let named = TestServer::from_text(&text(all[0], format!("node1/{echo}")));
    let any = TestServer::from_text(&text(all[1], echo.to_string()));
    // The node is linked to one of them, so the other has to search for it.
    for (has, other) in [(&any, &named), (&named, &any)] {
        let edge = edge(&place, has, "node1").await;
        let mut client = loop {
            let mut client = other.client("tcp").await;
            // An announcement of the node may be in flight.
            client.write_all(b"x").await.unwrap();
            if assert_eventually("an answer", client.read_u8()).await.is_ok() {
                break client;
            }
        };
        assert_echo(&mut client, "through two servers").await;
        drop(client);
        edge.shutdown(async {}).await;
    }
}

#[tokio::test]
async fn a_late_server_learns_of_several_nodes_that_are_linked_elsewhere() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let all = servers::addresses(2);
    let config = |at: SocketAddr| servers::config(&place, at, &servers::peers(&all));
    let first = TestServer::from_text(&config(all[0]));
    let _edges = (edge(&place, &first, "node1").await, edge(&place, &first, "node2").await);
    let (lines, _guard) = LogLines::start();
    let late = TestServer::from_text(&format!("{}{}", config(all[1]), port(&echo.to_string(), "")));
    let warned = || lines.count(SEVERAL);
    while warned() == 0 {
        let mut client = late.client("tcp").await;
        // The server may be linking to the other one just now.
        let _ = client.write_all(b"x").await;
        let _ = assert_eventually("an answer or an end", client.read_u8()).await;
    }
    assert_echo(&mut late.client("tcp").await, "to one of them").await;
    assert_eq!(warned(), 1);
}

#[tokio::test]
async fn a_client_without_a_session_is_reset_and_counted_with_the_cause() {
    let (place, nothing) = (TestDir::new(), targets::closed_port().await);
    let to = format!("node1/{nothing}");
    for (lines, to, cause) in [
        (String::new(), to.as_str(), "target_refused"),
        (String::new(), "node1/192.0.2.1:22", "not_allowed"),
        (String::new(), "node1/169.254.169.254:80", "not_allowed"),
        (String::new(), "elsewhere/127.0.0.1:22", "node_not_connected"),
        ("rules = [{ nodes = [\"node2\"] }]".into(), &to, "forbidden"),
        ("[server.session]\nmax_per_client = 1\nmax_sessions = 1".into(), &to, "overloaded"),
    ] {
        let server = TestServer::with(&place, &format!("{lines}\n{}", port(to, "")));
        let _edge = edge(&place, &server, "node1").await;
        let held = match cause {
            "overloaded" => Some(server.open(&format!("node1:{}", targets::echo().await.port())).await),
            _ => None,
        };
        assert_reset(&mut server.client("tcp").await).await;
        assert_eq!(server.server.metrics.sessions.closed("tcp", cause), 1, "{cause}");
        drop(held);
        server.assert_idle().await;
    }
}

#[tokio::test]
async fn only_clients_in_networks_of_allow_from_are_accepted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let lines = port(&format!("node1/{echo}"), ", allow_from = [\"192.0.2.0/24\"]");
    let server = TestServer::with(&place, &lines);
    let _edge = edge(&place, &server, "node1").await;
    assert_eq!(until_closed(server.client("tcp").await).await, b"");
    assert_eq!(server.server.metrics.sessions.closed("tcp", "forbidden"), 1);
    assert_eq!(server.open(&format!("node1:{}", echo.port())).await.peer_addr().unwrap(), server.connect);
}

#[tokio::test]
async fn a_proxy_header_gives_a_target_the_clients_address() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let more = ", send_proxy = true, proxy_protocol = [\"127.0.0.1\"]";
    let server = TestServer::with(&place, &port(&format!("node1/{echo}"), more));
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.client("tcp").await;
    let at = client.peer_addr().unwrap();
    client.write_all(b"PROXY TCP4 192.0.2.7 10.0.0.1 1234 443\r\nhello").await.unwrap();
    client.shutdown().await.unwrap();
    let received = rest(&mut client).await;
    let (header, payload) = received.split_at(28);
    assert_eq!(payload, b"hello");
    let header = ppp::v2::Header::try_from(header).unwrap();
    let want = ppp::v2::IPv4::new([192, 0, 2, 7], [127, 0, 0, 1], 1234, at.port());
    assert_eq!(header.addresses, want.into());
}

#[tokio::test]
async fn a_plain_edge_gets_the_request_of_superedges_cloud() {
    let place = TestDir::new();
    let server = TestServer::with(&place, &port("node1/127.0.0.1:6443", ""));
    let mut edge = remote::link(&place, &server, "node1", None).await;
    let mut client = server.client("tcp").await;
    let open = edge.next_session_message().await;
    let fields = (open.category.as_str(), open.r#type.as_str(), open.addr.as_str());
    assert_eq!(fields, ("ssh", "connecting", "127.0.0.1:6443"));
    edge.send_plain("connected", &open.topic, "").await;
    edge.send_plain("tcp-forward", &open.topic, "hello").await;
    edge.send_plain("closed", &open.topic, "EOF").await;
    assert_eq!(rest(&mut client).await, b"hello");
}

#[tokio::test]
async fn a_port_of_the_server_is_no_target_for_edges() {
    let place = TestDir::new();
    let lines = "[server.edge_access]\ntargets = [\"127.0.0.1:*\"]\n";
    let server = TestServer::with(&place, &format!("{lines}{}", port("node1/127.0.0.1:22", "")));
    let requester = edge(&place, &server, "asker").await;
    let refused = inside(&requester, "asker", &server.port("tcp").to_string()).await.unwrap_err();
    let echo = targets::echo().await;
    assert!(inside(&requester, "asker", &echo.to_string()).await.is_ok(), "{refused}");
}
