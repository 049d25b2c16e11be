//! The HTTP proxy: CONNECT and plain requests on one port.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::clients::{self, ESTABLISHED, assert_echo, head};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, at, edge};
use crate::support::{assert_eventually, targets};

fn server(place: &TestDir, more: &str) -> (TestServer, SocketAddr) {
    let server = TestServer::with(place, &format!("[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n{more}"));
    let port = server.server.bound.clients.iter().find(|(name, _)| *name == "http_proxy").unwrap().1;
    (server, port)
}

/// Starts a web server that responds to each request with its name and the request's head, and keeps its connections
/// open.
pub(crate) async fn site(name: &'static str) -> SocketAddr {
    targets::serve(move |mut socket| async move {
        loop {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let Ok(byte) = socket.read_u8().await else { return };
                request.push(byte);
            }
            let body = format!("{name}\n{}", String::from_utf8_lossy(&request));
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            if socket.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    })
    .await
}

/// Returns the body of the next response on a connection that is kept open.
pub(crate) async fn body(client: &mut TcpStream) -> String {
    let head = head(client).await.to_lowercase();
    assert!(head.starts_with("http/1.1 200 ok\r\n") && !head.contains("connection: close"), "{head}");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    assert_eventually("a body", client.read_exact(&mut body)).await.unwrap();
    String::from_utf8(body).unwrap()
}

#[tokio::test]
async fn each_plain_request_of_one_connection_goes_to_its_own_url() {
    let place = TestDir::new();
    let (server, port) = server(&place, "");
    let edges = [edge(&place, &server, "node1").await, edge(&place, &server, "node2").await];
    let sites = [("node1", site("first").await), ("node2", site("second").await)];
    let mut client = TcpStream::connect(port).await.unwrap();
    for (node, site) in [sites[0], sites[1], sites[1], sites[0]] {
        let target = at(node, site);
        // A different Host is ignored if the request has an absolute URL.
        let request = format!(
            "GET http://{target}/metrics?a=b HTTP/1.1\r\nHost: elsewhere:1\r\nProxy-Authorization: Basic eDp5\r\n\
             Proxy-Connection: keep-alive\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await.unwrap();
        let response = body(&mut client).await;
        let name = if node == "node1" { "first" } else { "second" };
        let expected = format!("{name}\nGET /metrics?a=b HTTP/1.1\r\nHost: {target}\r\n\r\n");
        assert_eq!(response.to_lowercase(), expected.to_lowercase());
    }
    // SuperEdge uses the Host if the request has no absolute URL.
    let target = at("node1", sites[0].1);
    client.write_all(format!("GET / HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes()).await.unwrap();
    assert!(body(&mut client).await.starts_with("first\n"));
    drop(client);
    server.assert_idle().await;
    for edge in &edges {
        assert_edge_idle(edge).await;
    }
}

#[tokio::test]
async fn connect_is_served_at_the_same_port_even_if_split_into_pieces() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (server, port) = server(&place, "");
    let _edge = edge(&place, &server, "node1").await;
    let request = format!("CONNECT {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nearly", at("node1", echo));
    for first in [1, 7, 8, request.len()] {
        let mut client = TcpStream::connect(port).await.unwrap();
        client.set_nodelay(true).unwrap();
        client.write_all(&request.as_bytes()[..first]).await.unwrap();
        tokio::task::yield_now().await;
        client.write_all(&request.as_bytes()[first..]).await.unwrap();
        assert_eq!(head(&mut client).await, ESTABLISHED, "{first}");
        let mut buffered = [0; 5];
        assert_eventually("the early bytes", client.read_exact(&mut buffered)).await.unwrap();
        assert_eq!(&buffered, b"early");
        assert_echo(&mut client, "hello").await;
    }
    server.assert_idle().await;
    assert_eq!(server.server.metrics.sessions.closed("http_proxy", "ok"), 4);
}

#[tokio::test]
async fn a_request_for_no_node_is_refused_with_the_reason() {
    let place = TestDir::new();
    let (_server, port) = server(&place, "");
    for (request, response) in [
        ("GET http://10.0.0.7:80/ HTTP/1.1\r\n\r\n", "421 no node is known for 10.0.0.7:80"),
        ("GET http://127.0.0.1:80/ HTTP/1.1\r\n\r\n", "403 127.0.0.1:80 is not allowed as a target"),
        ("GET https://node1/ HTTP/1.1\r\n\r\n", "400 bad request: only http://"),
        ("GET http://node9/ HTTP/1.1\r\n\r\n", "502 node node9 is not connected"),
        ("GET / HTTP/1.1\r\nHost:\r\n\r\n", "400 "),
        ("nonsense\r\n\r\n", "400 "),
        ("CONNECT node9:22 HTTP/1.1\r\n\r\n", "502 node node9 is not connected"),
    ] {
        let mut client = TcpStream::connect(port).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let answer = head(&mut client).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {response}")), "{request}: {answer}");
    }
    // A client that disconnects without sending anything is not a request.
    clients::reset(TcpStream::connect(port).await.unwrap());
}
