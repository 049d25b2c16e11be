//! SOCKS5 of a user's proxy, tried with raw bytes.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::proxy::proxy_to;
use crate::support::clients::{assert_echo, rest};
use crate::support::programs::assert_edge_idle;
use crate::support::{assert_eventually, targets};

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
    let echo = targets::echo().await;
    let ((server, edges, _place), proxy) = proxy_to(&["node1"]).await;
    let sent = [&[5, 2, 0, 2][..], &by_name("Node1", echo.port()), b"early"].concat();
    // All at once, in two pieces cut at each place, and byte by byte.
    for cut in (0..sent.len()).map(Some).chain([None]) {
        let mut client = TcpStream::connect(proxy.socks5).await.unwrap();
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
    assert_eq!(server.server.metrics.sessions.closed("clients", "ok"), 1 + sent.len() as u64);
    assert_edge_idle(&edges[0]).await;
}

#[tokio::test]
async fn each_refusal_has_its_code() {
    let ((server, _edges, _place), proxy) = proxy_to(&["node1"]).await;
    let closed = targets::closed_port().await;
    let bind = [5, 2, 0, 1, 127, 0, 0, 1, 0, 22];
    let unknown_kind = [5, 1, 0, 2, 0, 0];
    for (request, code, why) in [
        (by_name("node1", closed.port()), 5, "target refused"),
        (by_name("node9", 22), 4, "node not connected"),
        (by_name("other1", 22), 2, "no rule"),
        (by_name("", 22), 4, "no name"),
        (by_name("a b", 22), 4, "bad name"),
        (by_name("a:b", 22), 4, "bad name"),
        (by_name("node1\0", 22), 4, "NUL"),
        (by_name("other1\0.node1", 22), 4, "NUL in the middle"),
        (by_name("node1\r\nHost: other1", 22), 4, "line ends"),
        (by_name("[node1]", 22), 4, "brackets"),
        (by_name("node1:22", 22), 4, "a port in the name"),
        (by_name("other1@node1", 22), 4, "a user in the name"),
        (by_name("node1%2e", 22), 4, "an escape"),
        (by_name("OTHER1.", 22), 2, "no rule, in another spelling"),
        (by_name("127.0.0.1", 22), 2, "this machine as a name"),
        (by_name("::ffff:127.0.0.1", 22), 4, "this machine as a name of IPv6"),
        (by_name("node1", 0), 4, "bad port"),
        (by_address("10.0.0.7:22".parse().unwrap()), 2, "no rule for an address"),
        (by_address("169.254.169.254:80".parse().unwrap()), 2, "forbidden target"),
        (by_address("[::ffff:169.254.169.254]:80".parse().unwrap()), 2, "forbidden target as IPv6"),
        (by_address("[::ffff:127.0.0.1]:80".parse().unwrap()), 2, "this machine as IPv6"),
        (by_address("0.0.0.0:80".parse().unwrap()), 2, "this machine without an address"),
        (bind.to_vec(), 7, "BIND"),
        (unknown_kind.to_vec(), 8, "kind of address"),
    ] {
        let (mut client, found) = request_session(proxy.socks5, &request).await;
        assert_eq!(found, code, "{why}");
        assert_eq!(rest(&mut client).await, b"", "{why}");
    }
    server.assert_idle().await;
}

#[tokio::test]
async fn a_client_that_offers_only_passwords_is_refused() {
    let (_cloud, proxy) = proxy_to(&[]).await;
    let (mut client, method) = greeted(proxy.socks5, &[1, 2]).await;
    assert_eq!((method, rest(&mut client).await), (0xff, vec![]));
}

#[tokio::test]
async fn other_protocols_and_broken_messages_end_the_connection() {
    let ((server, _edges, _place), proxy) = proxy_to(&[]).await;
    for (sent, answer) in [
        (
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &b"HTTP/1.1 400 this port serves SOCKS5: use socks5h://HOST:PORT as the proxy\r\n\
               connection: close\r\ncontent-length: 0\r\n\r\n"[..],
        ),
        (b"\x04\x01\0\x16\x7f\0\0\x01user\0", b""),
        (b"SSH-2.0-client\r\n", b""),
        (b"\x05\x01\0\x04\x01\0\x01\x7f\0\0\x01\0\x16", b"\x05\0"),
        (b"\x05\x01\x02\x05\x01a\x01b", b"\x05\xff"),
        (b"\x05\0", b"\x05\xff"),
    ] {
        let mut client = TcpStream::connect(proxy.socks5).await.unwrap();
        client.write_all(sent).await.unwrap();
        assert_eq!(rest(&mut client).await, answer, "{sent:?}");
    }
    // A client may also leave in the middle of any message.
    let whole = [&[5, 1, 0][..], &by_name("node1", 22)].concat();
    for length in 0..whole.len() {
        let mut client = TcpStream::connect(proxy.socks5).await.unwrap();
        client.write_all(&whole[..length]).await.unwrap();
        client.shutdown().await.unwrap();
        rest(&mut client).await;
    }
    server.assert_idle().await;
}
