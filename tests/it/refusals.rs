//! Refusals that clients get: a status, and a reason phrase with the cause.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::names::Instance;

use crate::support::clients::{Answer, answer, assert_echo, head, rest, send_request};
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with};
use crate::support::{assert_eventually, pause_time, remote, spawn, targets, wait_until};

fn assert_refused(answer: &Answer, status: u16, phrase: &str) {
    assert_eq!((answer.status, answer.phrase.as_str()), (status, phrase), "{answer:?}");
    assert!(answer.head.to_ascii_lowercase().contains("connection: close"), "{answer:?}");
    assert!(answer.body.contains("\ntrace: ") && answer.body.contains("\nhint: "), "{answer:?}");
}

#[tokio::test]
async fn bad_requests_are_refused_with_the_reason() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let answer = server.request_connect("node1").await;
    assert_eq!(answer.status, 400, "{answer:?}");
    for target in ["node1:0", "node1:65536", "no_de!:22"] {
        let answer = server.request_connect(target).await;
        assert_eq!(answer.status, 400, "{target}: {answer:?}");
    }
    assert_refused(
        &server.request_connect("node1:99999").await,
        400,
        "bad target: \"99999\" is not a port; expected 1 to 65535",
    );
    assert_refused(&server.request_connect("10.1.2.3:22").await, 421, "no node is known for 10.1.2.3:22");
    let itself =
        "[::1]:22 is not allowed as a target: servers never dial loopback, link-local or metadata addresses";
    assert_refused(&server.request_connect("[::1]:22").await, 403, itself);
    let get = send_request(server.connect, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_refused(&get, 405, "only CONNECT is served on this port");
    assert!(get.head.to_ascii_lowercase().contains("allow: connect"), "{get:?}");
    let garbage = send_request(server.connect, "\u{16}\u{3}\u{1}\r\n\r\n").await;
    assert_eq!(garbage.status, 400, "{garbage:?}");
    assert_eq!(server.server.metrics.sessions.closed("connect", "node_not_named"), 1);
    assert_eq!(server.server.metrics.sessions.closed("connect", "method"), 1);
}

#[tokio::test]
async fn ssh_without_a_proxy_command_is_refused_in_its_own_protocol() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut ssh = TcpStream::connect(server.connect).await.unwrap();
    ssh.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").await.unwrap();
    let response = rest(&mut ssh).await;
    let begin = response.windows(4).position(|at| at == b"SSH-").unwrap();
    let (line, packet) = response[begin..].split_at(b"SSH-2.0-tunnel\r\n".len());
    assert_eq!(line, b"SSH-2.0-tunnel\r\n");
    let long = usize::try_from(u32::from_be_bytes(packet[..4].try_into().unwrap())).unwrap();
    assert_eq!((packet.len(), packet.len() % 8, packet[5]), (4 + long, 0, 1), "one whole SSH_MSG_DISCONNECT");
    assert!(String::from_utf8_lossy(packet).contains("ProxyCommand=\"nc -X connect -x HOST:PORT %h %p\""));
    assert_eq!(server.server.metrics.connections_rejected.counted("ssh_without_proxy_command"), 1);
}

#[tokio::test]
async fn a_missing_node_and_a_missing_target_have_different_reasons() {
    let (place, nothing) = (TestDir::new(), targets::closed_port().await);
    let server = TestServer::start(&place);
    assert_refused(&server.request_connect("node1:22").await, 502, "node node1 is not connected");
    let edge = edge(&place, &server, "node1").await;
    let refused = server.request_connect(&at("node1", nothing)).await;
    // The refusal also names the machine's other addresses, whichever those are.
    let expected_start = format!("node node1: {nothing} refused the connection, and so did ");
    let others = refused.phrase.strip_prefix(&expected_start);
    assert!(refused.status == 502 && others.is_some_and(|others| others.contains("[::1]:")), "{refused:?}");
    edge.shutdown(std::future::ready(())).await;
    wait_until("the node is disconnected", || server.link("node1").is_none()).await;
    assert_refused(
        &server.request_connect("node1:22").await,
        502,
        "node node1 is not connected, last seen 3 s ago",
    );
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_forbids_what_its_config_does_not_allow() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let more = format!("[edge.allow]\ntargets = [\"127.0.0.0/8:{}\"]", echo.port());
    let _edge = edge_with(&place, &server, "node1", &more).await;
    let answer = server.request_connect("node1:1").await;
    assert_refused(&answer, 403, "node node1: this edge may not dial node1:1");
    assert!(answer.body.contains("[edge.allow]"), "{answer:?}");
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn rules_and_allow_from_refuse_clients() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let rules = format!("rules = [{{ nodes = [\"edge-*\"], ports = [{}] }}]", echo.port());
    let server = TestServer::with(&place, &rules);
    let _edge = edge(&place, &server, "edge-1").await;
    assert_refused(
        &server.request_connect("edge-1:1").await,
        403,
        "no rule lets you reach port 1 of node edge-1",
    );
    let other = server.request_connect(&at("other", echo)).await;
    assert_refused(&other, 403, &format!("no rule lets you reach port {} of node other", echo.port()));
    assert_echo(&mut server.open(&at("edge-1", echo)).await, "hello").await;

    let fenced = TestServer::with(&place, "allow_from = [\"10.0.0.0/8\"]");
    assert_refused(
        &fenced.request_connect("edge-1:1").await,
        403,
        "your address 127.0.0.1 is not allowed here",
    );
}

#[tokio::test]
async fn credentials_are_requested_and_checked() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let hash = bcrypt::hash("right", 4).unwrap();
    let users = place.file("htpasswd", &format!("ops:{hash}\n"));
    let rules = "rules = [{ users = [\"ops\"] }]";
    let server =
        TestServer::with(&place, &format!("auth = \"basic\"\nusers = \"{}\"\n{rules}", users.display()));
    let _edge = edge(&place, &server, "node1").await;
    let request = |login: &str| {
        let login = STANDARD.encode(login);
        let target = at("node1", echo);
        format!("CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {login}\r\n\r\n")
    };
    let answer = server.request_connect(&at("node1", echo)).await;
    assert_refused(&answer, 407, "this proxy requires a user name and a password");
    assert!(answer.head.to_ascii_lowercase().contains("proxy-authenticate: basic realm="), "{answer:?}");
    assert!(answer.body.contains("only at a terminal"), "{answer:?}");
    for (wrong, user) in [("ops:wrong", "ops"), ("ops:", "ops"), ("nobody:right", "nobody")] {
        let phrase = format!("unknown user \"{user}\" or wrong password");
        let answer = send_request(server.connect, &request(wrong)).await;
        assert_refused(&answer, 407, &phrase);
        assert!(answer.head.to_ascii_lowercase().contains("proxy-authenticate: basic realm="), "{answer:?}");
    }
    let no_colon = send_request(server.connect, &request("ops")).await;
    assert_refused(&no_colon, 407, "Proxy-Authorization is not Basic with the base64 of user:password");
    for _ in 0..2 {
        let mut client = TcpStream::connect(server.connect).await.unwrap();
        client.write_all(request("ops:right").as_bytes()).await.unwrap();
        assert!(head(&mut client).await.starts_with("HTTP/1.1 200 "));
        assert_echo(&mut client, "hello").await;
    }
}

#[tokio::test]
async fn a_full_server_refuses_clients_until_a_session_ends() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.session]\nmax_sessions = 1");
    let _edge = edge(&place, &server, "node1").await;
    let mut first = server.open(&at("node1", echo)).await;
    assert_refused(
        &server.request_connect(&at("node1", echo)).await,
        503,
        "session limit reached: [server.session] max_sessions of this server",
    );
    first.shutdown().await.unwrap();
    rest(&mut first).await;
    drop(first);
    server.assert_idle().await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

#[tokio::test]
async fn a_stopping_server_refuses_clients_that_are_already_connected() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let session = server.open(&at("node1", echo)).await;
    let mut late = TcpStream::connect(server.connect).await.unwrap();
    late.write_all(b"CONNECT ").await.unwrap();
    // Connections are accepted in order: once a later one has its response, the earlier one is accepted as well.
    server.request_connect("nowhere:1").await;
    let stopped = spawn(server.server.shutdown(std::future::pending()));
    wait_until_closed(server.connect).await;
    late.write_all(b"node1:22 HTTP/1.1\r\n\r\n").await.unwrap();
    assert_refused(&answer(late).await, 503, "this server is stopping");
    drop(session);
    assert_eventually("the end of the server", stopped).await.unwrap();
}

async fn wait_until_closed(at: std::net::SocketAddr) {
    let closed = async { while TcpStream::connect(at).await.is_ok() {} };
    assert_eventually("a closed port", closed).await;
}

#[tokio::test]
async fn an_edge_that_does_not_answer_in_time_is_a_504() {
    let place = TestDir::new();
    let server = TestServer::with(&place, "[server.session]\nopen_timeout = \"200ms\"");
    let mut silent = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    assert_refused(&server.request_connect("node1:22").await, 504, "node node1 did not answer within 200ms");
    let (id, open) = silent.next_session_frame().await;
    assert!(matches!(open, SessionFrame::Open { .. }), "{open:?}");
    let (again, reset) = silent.next_session_frame().await;
    assert!(again == id && matches!(reset, SessionFrame::Reset { .. }), "{reset:?}");
    let (_, SessionFrame::Resume { epoch, .. }) = silent.next_session_frame().await else {
        panic!("a Resume after the Reset")
    };
    silent
        .send_session(
            id,
            SessionFrame::Reset { epoch, refusal: SessionError::new(ErrorCode::UnknownSession, "") },
        )
        .await;
    server.assert_idle().await;
}

#[tokio::test]
async fn each_reason_of_an_edge_has_its_status() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut edge = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    for (code, status) in
        [(ErrorCode::TargetTimeout, 504), (ErrorCode::TargetUnreachable, 502), (ErrorCode::Overloaded, 503)]
    {
        let answer = async {
            let (id, SessionFrame::Open { epoch, .. }) = edge.next_session_frame().await else {
                panic!("an Open first")
            };
            edge.send_session(
                id,
                SessionFrame::Refused { epoch, refusal: SessionError::new(code, "as it is") },
            )
            .await;
        };
        let (response, ()) = tokio::join!(server.request_connect("node1:22"), answer);
        assert_refused(&response, status, "node node1: as it is");
    }
}

#[tokio::test]
async fn a_long_head_is_refused() {
    let server = TestServer::start(&TestDir::new());
    let long = format!("CONNECT node1:22 HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(65 * 1024));
    let answer = send_request(server.connect, &long).await;
    assert_eq!(answer.status, 431, "{answer:?}");
    let expected =
        "the request's head is too long: at most 32 KiB and 1024 header fields are accepted\ntrace: ";
    assert!(answer.body.starts_with(expected) && answer.body.contains("\nhint: send fewer"), "{answer:?}");
    wait_until("it is counted", || {
        server.server.metrics.connections_rejected.counted("header_too_large") == 1
    })
    .await;
}

#[tokio::test]
async fn a_slow_head_times_out_after_ten_seconds() {
    let server = TestServer::start(&TestDir::new());
    pause_time();
    let started = Instant::now();
    let mut silent = TcpStream::connect(server.connect).await.unwrap();
    let (mut slow, mut drip) = TcpStream::connect(server.connect).await.unwrap().into_split();
    spawn(async move {
        while drip.write_all(b"C").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    for read in [silent.read_u8().await, slow.read_u8().await] {
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
        assert_eq!(started.elapsed().as_secs(), 10);
    }
    let slow_heads = || server.server.metrics.connections_rejected.counted("header_timeout");
    wait_until("both are counted", || slow_heads() == 2).await;
}
