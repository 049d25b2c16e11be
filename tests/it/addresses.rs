//! Targets that clients name by an address: a table maps addresses to nodes. The server dials an address without a node
//! itself, if that is allowed.

use std::net::{IpAddr, SocketAddr};

use crate::https::{by_host, get_by_host};
use crate::support::clients::assert_echo;
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with};
use crate::support::targets;
use crate::support::wait_until;

/// Returns an address of this machine that is allowed as a target, and on which tests may listen.
pub(crate) fn own_address() -> IpAddr {
    let all = if_addrs::get_if_addrs().unwrap();
    let fit = |ip: &IpAddr| matches!(ip, IpAddr::V4(v4) if !v4.is_loopback() && !v4.is_link_local());
    all.iter().map(if_addrs::Interface::ip).find(fit).expect("an interface other than loopback")
}

/// Starts an echo target at that address.
pub(crate) async fn echo() -> SocketAddr {
    targets::serve_at(&format!("{}:0", own_address()), targets::echo_one).await
}

#[tokio::test]
async fn an_address_in_the_table_resolves_to_its_node_which_must_allow_it() {
    let (place, echo) = (TestDir::new(), echo().await);
    let table =
        format!("[server.addresses.nodes]\n\"{}\" = \"node1\"\n\"10.77.0.0/16\" = \"node1\"\n", echo.ip());
    let server = TestServer::with(&place, &table);
    let _edge = edge(&place, &server, "node1").await;
    assert_echo(&mut server.open(&echo.to_string()).await, "by its own address").await;
    assert_echo(
        &mut server.open(&format!("[::ffff:{}]:{}", echo.ip(), echo.port())).await,
        "as an IPv4-mapped IPv6 address",
    )
    .await;
    let refused = server.request_connect("10.77.0.1:80").await;
    assert_eq!(refused.status, 403, "{refused:?}");
    let expected =
        "node node1: this edge may not dial 10.77.0.1:80; add \"10.77.0.1/32:*\" to [edge.allow] targets";
    assert!(refused.body.starts_with(expected), "{refused:?}");
    assert_eq!(server.request_connect("10.78.0.1:80").await.status, 421);
    server.assert_idle().await;
}

#[tokio::test]
async fn an_edge_that_lists_its_servers_network_reaches_it() {
    let (place, echo) = (TestDir::new(), echo().await);
    let server =
        TestServer::with(&place, &format!("[server.addresses.nodes]\n\"{}\" = \"node1\"\n", echo.ip()));
    let more = format!("[edge.allow]\ntargets = [\"{}:*\"]", echo.ip());
    let _edge = edge_with(&place, &server, "node1", &more).await;
    assert_echo(&mut server.open(&echo.to_string()).await, "hello").await;
}

#[tokio::test]
async fn a_listed_address_without_a_node_is_dialled_and_counted_as_a_session() {
    let (place, echo) = (TestDir::new(), echo().await);
    let direct = format!("[server.direct]\ntargets = [\"{}/32:{}\"]\n", echo.ip(), echo.port());
    let server = TestServer::with(&place, &direct);
    let mut open = server.open(&echo.to_string()).await;
    assert_echo(&mut open, "without an edge").await;
    let sessions = &server.server.metrics.sessions;
    assert_eq!(sessions.now("connect"), 1);
    drop(open);
    wait_until("the session has ended", || sessions.now("connect") == 0).await;
    // Another port of the same machine, and another machine.
    let other = targets::serve_at(&format!("{}:0", echo.ip()), targets::echo_one).await;
    assert_eq!(server.request_connect(&other.to_string()).await.status, 421);
    let refused = server.request_connect(&format!("192.0.2.77:{}", echo.port())).await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.body.contains("[server.direct]"), "{refused:?}");
    let nothing = server.request_connect(&at("node1", echo)).await;
    assert_eq!(nothing.status, 502, "a name is first taken for a node: {nothing:?}");
    assert!(nothing.phrase.starts_with("node node1 is not connected; cannot resolve node1:"), "{nothing:?}");
}

#[tokio::test]
async fn the_server_never_dials_itself_or_metadata_addresses_in_any_spelling() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "[server.direct]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]\n");
    let port = echo.port();
    for host in [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "0.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[ff02::1]",
        "[fd00:ec2::254]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.1",
        "2852039166",
        "0",
        "0x0",
    ] {
        let refused = server.request_connect(&format!("{host}:{port}")).await;
        assert_eq!(refused.status, 403, "{host}: {refused:?}");
    }
    // A name that resolves to a forbidden address. Only the echo target listens on loopback, and it gets no connection.
    for host in ["localhost", "LOCALHOST.", "foo.localhost"] {
        let refused = server.request_connect(&format!("{host}:{port}")).await;
        assert_eq!(refused.status, 403, "{host}: {refused:?}");
        assert!(refused.phrase.contains("is not allowed as a target"), "{host}: {refused:?}");
    }
    assert_eq!(server.server.metrics.sessions.closed("connect", "ok"), 0);
}

/// Services of a node for itself, such as a proxy with the node's credentials, listen at such addresses. The edge may
/// dial all of them.
#[tokio::test]
async fn no_header_reaches_local_services_of_a_node_in_any_spelling() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = by_host(&place, "allow_from = [\"127.0.0.0/8\"]");
    let allow = "[edge.allow]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]";
    let _edge = edge_with(&place, &server, "node-a", allow).await;
    for host in [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "169.254.2.1",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "224.0.0.1",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.2.1]",
        "[::127.0.0.1]",
        "[64:ff9b::a9fe:201]",
        "[2002:a9fe:201::]",
    ] {
        for node in ["X-Tunnel-Proxy-Host: node-a\r\n", ""] {
            let dest = format!("{node}X-Tunnel-Proxy-Dest: {host}:{}\r\n", echo.port());
            let refused = get_by_host(&server, "node-a:10250", &dest).await;
            // Without a node's name in a header, the request names no node.
            let expected =
                if node.is_empty() { "421 " } else { "403 addresses local to a node are not reachable" };
            assert!(refused.starts_with(&format!("HTTP/1.1 {expected}")), "{host}: {refused}");
        }
    }
    for host in ["localhost", "2130706433", "0x7f000001", "127.1"] {
        let dest = format!("X-Tunnel-Proxy-Host: node-a\r\nX-Tunnel-Proxy-Dest: {host}:{}\r\n", echo.port());
        let refused = get_by_host(&server, "node-a:10250", &dest).await;
        assert!(refused.starts_with("HTTP/1.1 400 "), "{host}: {refused}");
    }
    assert_eq!(server.server.metrics.sessions.closed("http", "ok"), 0);
}
