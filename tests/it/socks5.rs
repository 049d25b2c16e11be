//! The SOCKS5 listener, tried with raw bytes.

use std::net::{IpAddr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::addresses::own_address;
use crate::support::clients::{assert_echo, rest};
use crate::support::programs::{TestDir, TestServer, assert_edge_idle, edge};
use crate::support::{assert_eventually, targets};

fn server(place: &TestDir, more: &str) -> (TestServer, SocketAddr) {
    let server = TestServer::with(place, &format!("[server.socks5]\nlisten = \"127.0.0.1:0\"\n{more}"));
    let port = server.server.bound.clients.iter().find(|(name, _)| *name == "socks5").unwrap().1;
    (server, port)
}

/// Connects, sends a greeting with these methods, and returns the method that the server chose.
async fn greeted(port: SocketAddr, methods: &[u8]) -> (TcpStream, u8) {
    let mut client = TcpStream::connect(port).await.unwrap();
    client.set_nodelay(true).unwrap();
    let count = methods.len().try_into().unwrap();
    client.write_all(&[&[5, count], methods].concat()).await.unwrap();
    let [version, method] = reply(&mut client).await;
    assert_eq!(version, 5);
    (client, method)
}

/// Reads a message of `N` bytes.
async fn reply<const N: usize>(client: &mut TcpStream) -> [u8; N] {
    let mut reply = [0; N];
    assert_eventually("a reply", client.read_exact(&mut reply)).await.unwrap();
    reply
}

/// Returns a CONNECT request for a name.
pub(crate) fn by_name(name: &str, port: u16) -> Vec<u8> {
    let length = name.len().try_into().unwrap();
    [&[5, 1, 0, 3, length], name.as_bytes(), &port.to_be_bytes()].concat()
}

/// Returns a CONNECT request for an address.
fn by_address(at: SocketAddr) -> Vec<u8> {
    let address = match at {
        SocketAddr::V4(at) => [&[1][..], &at.ip().octets()].concat(),
        SocketAddr::V6(at) => [&[4][..], &at.ip().octets()].concat(),
    };
    [&[5, 1, 0], &address[..], &at.port().to_be_bytes()].concat()
}

/// Returns a message with a name and a password (RFC 1929).
fn login(name: &str, password: &str) -> Vec<u8> {
    let field = |text: &str| [&[text.len().try_into().unwrap()], text.as_bytes()].concat();
    [vec![1], field(name), field(password)].concat()
}

/// Sends a request without a password, and returns the connection and the reply code.
pub(crate) async fn request_session(port: SocketAddr, request: &[u8]) -> (TcpStream, u8) {
    let (mut client, method) = greeted(port, &[0]).await;
    assert_eq!(method, 0);
    client.write_all(request).await.unwrap();
    let [version, code, reserved, kind, address @ ..] = reply::<10>(&mut client).await;
    assert_eq!((version, reserved, kind, address), (5, 0, 1, [0; 6]));
    (client, code)
}

#[tokio::test]
async fn bytes_after_the_request_reach_the_target_however_the_request_is_split() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (server, port) = server(&place, "");
    let edge = edge(&place, &server, "node1").await;
    let sent = [&[5, 2, 0, 2][..], &by_name("Node1", echo.port()), b"early"].concat();
    // All at once, in two pieces cut at each place, and byte by byte.
    for cut in (0..sent.len()).map(Some).chain([None]) {
        let mut client = TcpStream::connect(port).await.unwrap();
        client.set_nodelay(true).unwrap();
        match cut {
            Some(cut) => {
                client.write_all(&sent[..cut]).await.unwrap();
                tokio::task::yield_now().await;
                client.write_all(&sent[cut..]).await.unwrap();
            }
            None => {
                for byte in &sent {
                    client.write_all(&[*byte]).await.unwrap();
                    tokio::task::yield_now().await;
                }
            }
        }
        let got = reply::<17>(&mut client).await;
        assert_eq!(&got, b"\x05\0\x05\0\0\x01\0\0\0\0\0\0early", "{cut:?}");
        assert_echo(&mut client, "hello").await;
    }
    server.assert_idle().await;
    assert_eq!(server.server.metrics.sessions.closed("socks5", "ok"), 1 + sent.len() as u64);
    assert_edge_idle(&edge).await;
}

#[tokio::test]
async fn addresses_of_nodes_are_targets_too() {
    let place = TestDir::new();
    let echo = targets::serve_at(&format!("{}:0", own_address()), targets::echo_one).await;
    let (server, port) =
        server(&place, &format!("[server.addresses.nodes]\n\"{}\" = \"node1\"\n", echo.ip()));
    let _edge = edge(&place, &server, "node1").await;
    let IpAddr::V4(ip) = echo.ip() else { unreachable!("own addresses are IPv4 here") };
    for ip in [IpAddr::V4(ip), IpAddr::V6(ip.to_ipv6_mapped())] {
        let (mut client, code) = request_session(port, &by_address(SocketAddr::new(ip, echo.port()))).await;
        assert_eq!(code, 0, "{ip}");
        assert_echo(&mut client, "hello").await;
    }
}

#[tokio::test]
async fn each_refusal_has_its_code() {
    let place = TestDir::new();
    let (server, port) = server(&place, "rules = [{ nodes = [\"node1\", \"node9\"] }]\n");
    let _edge = edge(&place, &server, "node1").await;
    let closed = targets::closed_port().await;
    let bind = [5, 2, 0, 1, 127, 0, 0, 1, 0, 22];
    let unknown_kind = [5, 1, 0, 2, 0, 0];
    for (request, code, why) in [
        (by_name("node1", closed.port()), 5, "target refused"),
        (by_name("node9", 22), 4, "node not connected"),
        (by_name("node2", 22), 2, "no rule"),
        (by_name("", 22), 4, "no name"),
        (by_name("a b", 22), 4, "bad name"),
        (by_name("a:b", 22), 4, "bad name"),
        (by_name("node1\0", 22), 4, "NUL"),
        (by_name("node2\0.node1", 22), 4, "NUL in the middle"),
        (by_name("node1\r\nHost: node2", 22), 4, "line ends"),
        (by_name("[node1]", 22), 4, "brackets"),
        (by_name("node1:22", 22), 4, "a port in the name"),
        (by_name("node2@node1", 22), 4, "a user in the name"),
        (by_name("node1%2e", 22), 4, "an escape"),
        (by_name("NODE2.", 22), 2, "no rule, in another spelling"),
        (by_name("127.0.0.1", 22), 2, "this machine as a name"),
        (by_name("::ffff:127.0.0.1", 22), 4, "this machine as a name of IPv6"),
        (by_name("node1", 0), 4, "bad port"),
        (by_address("10.0.0.7:22".parse().unwrap()), 4, "address at no node"),
        (by_address("169.254.169.254:80".parse().unwrap()), 2, "forbidden target"),
        (by_address("[::ffff:169.254.169.254]:80".parse().unwrap()), 2, "forbidden target as IPv6"),
        (by_address("[::ffff:127.0.0.1]:80".parse().unwrap()), 2, "this machine as IPv6"),
        (by_address("0.0.0.0:80".parse().unwrap()), 2, "this machine without an address"),
        (bind.to_vec(), 7, "BIND"),
        (unknown_kind.to_vec(), 8, "kind of address"),
    ] {
        let (mut client, found) = request_session(port, &request).await;
        assert_eq!(found, code, "{why}");
        assert_eq!(rest(&mut client).await, b"", "{why}");
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn users_must_authenticate_and_rules_match_their_names() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let users = place.file("htpasswd", &format!("ann:{}\n", bcrypt::hash("right:\u{fc}", 4).unwrap()));
    let more = format!(
        "auth = \"basic\"\nusers = {users:?}\nrules = [{{ users = [\"ann\"], nodes = [\"node1\"] }}]\n"
    );
    let (server, port) = server(&place, &more);
    let _edge = edge(&place, &server, "node1").await;

    let (mut client, method) = greeted(port, &[0, 1]).await;
    assert_eq!((method, rest(&mut client).await), (0xff, vec![]), "no password was offered");
    assert_eq!(server.server.metrics.sessions.closed("socks5", "credentials_missing"), 1);

    for (name, password) in [("ann", "wrong"), ("bob", "right:\u{fc}"), ("", "")] {
        let (mut client, method) = greeted(port, &[0, 2]).await;
        assert_eq!(method, 2);
        client.write_all(&login(name, password)).await.unwrap();
        assert_eq!(rest(&mut client).await, [1, 1], "{name}");
    }

    let (mut client, _) = greeted(port, &[2]).await;
    client.write_all(&login("ann", "right:\u{fc}")).await.unwrap();
    assert_eq!(reply::<2>(&mut client).await, [1, 0]);
    client.write_all(&by_name("node1", echo.port())).await.unwrap();
    assert_eq!(reply::<10>(&mut client).await[1], 0);
    assert_echo(&mut client, "hello").await;

    let (mut client, _) = greeted(port, &[2]).await;
    client.write_all(&login("ann", "right:\u{fc}")).await.unwrap();
    assert_eq!(reply::<2>(&mut client).await, [1, 0]);
    client.write_all(&by_name("node2", 22)).await.unwrap();
    assert_eq!(reply::<10>(&mut client).await[1], 2);
}

#[tokio::test]
async fn without_authentication_any_user_name_and_password_are_accepted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (server, port) = server(&place, "");
    let _edge = edge(&place, &server, "node1").await;
    let (mut client, method) = greeted(port, &[2]).await;
    assert_eq!(method, 2);
    client.write_all(&login("any", "thing")).await.unwrap();
    assert_eq!(reply::<2>(&mut client).await, [1, 0]);
    client.write_all(&by_name("node1", echo.port())).await.unwrap();
    assert_eq!(reply::<10>(&mut client).await[1], 0);
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn other_protocols_and_broken_messages_end_the_connection() {
    let place = TestDir::new();
    let (server, port) = server(&place, "");
    for (sent, answer) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], &b""[..]),
        (b"\x04\x01\0\x16\x7f\0\0\x01user\0", b""),
        (b"SSH-2.0-client\r\n", b""),
        (b"\x05\x01\0\x04\x01\0\x01\x7f\0\0\x01\0\x16", b"\x05\0"),
        (b"\x05\x01\x02\x05\x01a\x01b", b"\x05\x02"),
        (b"\x05\0", b"\x05\xff"),
    ] {
        let mut client = TcpStream::connect(port).await.unwrap();
        client.write_all(sent).await.unwrap();
        assert_eq!(rest(&mut client).await, answer, "{sent:?}");
    }
    // A client may also leave in the middle of any message.
    let whole = [&[5, 1, 0][..], &by_name("node1", 22)].concat();
    for length in 0..whole.len() {
        let mut client = TcpStream::connect(port).await.unwrap();
        client.write_all(&whole[..length]).await.unwrap();
        client.shutdown().await.unwrap();
        rest(&mut client).await;
    }
    server.assert_idle().await;
}
