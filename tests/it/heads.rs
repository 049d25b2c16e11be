//! Long heads of requests and responses, heads that cannot be parsed, and interim responses.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::assert_eventually;
use crate::support::clients::{assert_echo, head, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, edge};
use crate::support::targets;

/// Starts a server with a port for that target of every node.
fn server(place: &TestDir, target: SocketAddr) -> TestServer {
    let ports = format!("ports = {{ \"0\" = \"{target}\" }}");
    TestServer::with(place, &format!("[server.http]\nlisten_ip = \"127.0.0.1\"\n{ports}\n"))
}

/// Starts a target that responds to each request with this head and body.
async fn responding_target(head: String, body: &'static str) -> SocketAddr {
    targets::serve(move |mut socket| {
        let answer = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        async move {
            let mut request = Vec::new();
            while let Ok(byte) = socket.read_u8().await {
                request.push(byte);
                if request.ends_with(b"\r\n\r\n") {
                    request.clear();
                    if socket.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            }
        }
    })
    .await
}

/// Starts a target that responds with the number of bytes and of lines in each request's head.
async fn head_counting_target() -> SocketAddr {
    targets::serve(|mut socket| async move {
        let mut request = Vec::new();
        while let Ok(byte) = socket.read_u8().await {
            request.push(byte);
            if request.ends_with(b"\r\n\r\n") {
                let lines = request.iter().filter(|byte| **byte == b'\n').count() - 2;
                let body = format!("{} {lines}", request.len());
                request.clear();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                if socket.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    })
    .await
}

/// Reads a response's body on a connection that may stay open.
async fn body(client: &mut TcpStream) -> (String, String) {
    let head = head(client).await;
    let lower = head.to_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    assert_eventually("a body", client.read_exact(&mut body)).await.unwrap();
    (head, String::from_utf8(body).unwrap())
}

fn fields(count: usize) -> String {
    (0..count).map(|n| format!("x-{n}: y\r\n")).collect()
}

#[tokio::test]
async fn a_request_with_many_fields_or_a_long_head_arrives_whole() {
    let (place, target) = (TestDir::new(), head_counting_target().await);
    let server = server(&place, target);
    let edge = edge(&place, &server, "node1").await;
    let mut client = server.client("http").await;
    let request = |more: &str| format!("GET / HTTP/1.1\r\nHost: node1\r\n{more}\r\n");
    // The long ones come after others on one connection, and each is the last one on its connection.
    for (more, is_last) in [
        (fields(1000), false),
        (String::new(), false),
        (format!("x: {}\r\n", "y".repeat(200 << 10)), true),
        (fields(4000), true),
        (format!("x: {}\r\n", "y".repeat((1 << 20) - 100)), true),
        // An exec of a long command, which is in the URL.
        ("?".to_owned() + &"command=y&".repeat(6500), true),
    ] {
        let request = match more.strip_prefix('?') {
            Some(query) => request("").replacen("/ ", &format!("/exec?{query} "), 1),
            None => request(&more),
        };
        client.write_all(request.as_bytes()).await.unwrap();
        let (head, body) = body(&mut client).await;
        let lines = request.lines().count() - 2;
        assert_eq!(body, format!("{} {lines}", request.len()), "{head}");
        assert_eq!(head.to_lowercase().contains("connection: close"), is_last, "{head}");
        if is_last {
            assert_eq!(rest(&mut client).await, b"");
            client = server.client("http").await;
        }
    }
    drop(client);
    server.assert_idle().await;
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn a_request_head_that_is_too_long_or_invalid_is_refused_with_an_explanation() {
    let (place, target) = (TestDir::new(), head_counting_target().await);
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let too_long = "the request's head is too long: at most 1024 KiB and 4096 header fields are accepted";
    for (request, status, text) in [
        (format!("GET / HTTP/1.1\r\nHost: node1\r\n{}\r\n", fields(4100)), 431, too_long),
        (format!("GET / HTTP/1.1\r\nHost: node1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20)), 431, too_long),
        (
            format!("GET /?{} HTTP/1.1\r\nHost: node1\r\n\r\n", "y".repeat(72_000)),
            414,
            "the request's URL is too long: at most 65534 bytes are accepted",
        ),
        ("nonsense\r\n\r\n".to_owned(), 400, "bad request: no valid HTTP request"),
    ] {
        let mut client = server.client("http").await;
        // The server may respond before it has read everything.
        let _ = client.write_all(request.as_bytes()).await;
        let answer = String::from_utf8(rest(&mut client).await).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} {}", &text[..34])), "{answer}");
        assert!(answer.contains(&format!("\r\n\r\n{text}")) && answer.contains("\nhint: "), "{answer}");
    }
    assert_eq!(server.server.metrics.sessions.closed("http", "head_too_long"), 2);
    assert_eq!(server.server.metrics.sessions.closed("http", "url_too_long"), 1);
    server.assert_idle().await;
}

#[tokio::test]
async fn a_response_with_many_fields_or_a_long_head_arrives_whole() {
    let place = TestDir::new();
    for (more, is_long) in
        [(fields(1000), false), (fields(4000), true), (format!("x: {}\r\n", "y".repeat(200 << 10)), true)]
    {
        let target = responding_target(format!("HTTP/1.1 200 OK\r\n{more}"), "the body").await;
        let server = server(&place, target);
        let edge = edge(&place, &server, "node1").await;
        let mut client = server.client("http").await;
        for _ in 0..2 {
            client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await.unwrap();
            let (head, body) = body(&mut client).await;
            assert!(head.starts_with(&format!("HTTP/1.1 200 OK\r\n{more}")), "{}", head.len());
            assert_eq!(body, "the body");
        }
        let sessions = server.server.metrics.sessions.closed("http", "ok");
        assert_eq!(sessions > 0, is_long, "the session of a long head is not reused");
        drop(client);
        server.assert_idle().await;
        assert_edge_idle(&edge).await;
    }
}

#[tokio::test]
async fn a_response_with_a_head_that_is_too_long_is_refused_with_an_explanation() {
    let place = TestDir::new();
    let target = responding_target(format!("HTTP/1.1 200 OK\r\n{}", fields(4100)), "").await;
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.client("http").await;
    client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await.unwrap();
    let (head, body) = body(&mut client).await;
    assert!(
        head.starts_with("HTTP/1.1 502 invalid response from the target: its head is too long"),
        "{head}"
    );
    assert!(body.contains("at most 1024 KiB and 4096 header fields are accepted"), "{body}");
    server.assert_idle().await;
}

/// Slow clients with long heads must not take the memory of all others.
#[tokio::test]
async fn one_source_cannot_take_all_permits_for_long_heads() {
    let (place, target) = (TestDir::new(), head_counting_target().await);
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let half = format!("GET / HTTP/1.1\r\nHost: node1\r\nx: {}", "y".repeat(100 << 10));
    let mut held = Vec::new();
    loop {
        let mut client = server.client("http").await;
        client.write_all(half.as_bytes()).await.unwrap();
        let answered = tokio::time::timeout(std::time::Duration::from_millis(300), client.readable()).await;
        if answered.is_ok() {
            let answer = String::from_utf8(rest(&mut client).await).unwrap();
            assert!(
                answer.starts_with("HTTP/1.1 503 too many requests and responses with long heads"),
                "{answer}"
            );
            break;
        }
        held.push(client);
        assert!(held.len() < 1000, "every long head is admitted");
    }
    // Usual heads are served all the same.
    let mut client = server.client("http").await;
    client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await.unwrap();
    assert!(body(&mut client).await.0.starts_with("HTTP/1.1 200 "));
    // A complete head releases its permit.
    let mut first = held.remove(0);
    first.write_all(b"\r\n\r\n").await.unwrap();
    assert!(body(&mut first).await.0.starts_with("HTTP/1.1 200 "));
    assert_eq!(rest(&mut first).await, b"");
    let mut again = server.client("http").await;
    again.write_all(format!("{half}\r\n\r\n").as_bytes()).await.unwrap();
    assert!(body(&mut again).await.0.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn interim_responses_arrive_before_the_final_one() {
    let place = TestDir::new();
    let interim = "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: x\r\nX: y\r\nContent-Length: 4\r\n\r\n";
    let target = responding_target(format!("{interim}HTTP/1.1 200 OK\r\n"), "the body").await;
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.client("http").await;
    for _ in 0..2 {
        client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await.unwrap();
        assert_eq!(head(&mut client).await, "HTTP/1.1 102 Processing\r\n\r\n");
        let hints = head(&mut client).await;
        assert_eq!(
            hints, "HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n",
            "without the connection's own fields"
        );
        let (head, body) = body(&mut client).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && body == "the body", "{head}");
    }
    // HTTP/1.0 has none.
    let mut old = server.client("http").await;
    old.write_all(b"GET / HTTP/1.0\r\nHost: node1\r\n\r\n").await.unwrap();
    let answer = String::from_utf8(rest(&mut old).await).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") || answer.starts_with("HTTP/1.0 200 OK\r\n"),
        "{answer}"
    );
}

#[tokio::test]
async fn early_hints_arrive_before_a_slow_response() {
    let place = TestDir::new();
    let (go, going) = tokio::sync::watch::channel(false);
    let target = targets::serve(move |mut socket| {
        let mut going = going.clone();
        async move {
            let mut request = [0; 1024];
            let _ = socket.read(&mut request).await;
            let _ = socket.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n").await;
            let _ = going.wait_for(|go| *go).await;
            let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        }
    })
    .await;
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.client("http").await;
    client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await.unwrap();
    assert!(head(&mut client).await.starts_with("HTTP/1.1 103 "));
    go.send_replace(true);
    assert!(head(&mut client).await.starts_with("HTTP/1.1 200 "));
}

/// After an upgrade the connection carries raw bytes, whatever the length of the head was.
#[tokio::test]
async fn an_upgrade_request_with_a_long_head_switches_protocols() {
    let place = TestDir::new();
    let target = targets::serve(|mut socket| async move {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let Ok(byte) = socket.read_u8().await else { return };
            request.push(byte);
        }
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
        let _ = socket.write_all(answer.as_bytes()).await;
        targets::echo_one(socket).await;
    })
    .await;
    let server = server(&place, target);
    let _edge = edge(&place, &server, "node1").await;
    let mut client = server.client("http").await;
    let long = "y".repeat(100 << 10);
    let request = format!(
        "GET /exec HTTP/1.1\r\nHost: node1\r\nConnection: Upgrade\r\nUpgrade: echo\r\nx: {long}\r\n\r\n"
    );
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(head(&mut client).await.starts_with("HTTP/1.1 101 "));
    assert_echo(&mut client, "raw bytes").await;
}
