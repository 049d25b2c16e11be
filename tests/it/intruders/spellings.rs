//! Clients that name a target in ways that two parts of a server could read differently. The rules and the route read
//! each of them as the same node, or the request is refused.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel::edge::Edge;

use crate::https::repeats_heads;
use crate::support::programs::{TestDir, TestServer, edge, edge_with};
use crate::support::{assert_eventually, targets};

/// Targets of CONNECT, by the status of the response. `PORT` is the target's port, and `WRAP` the same plus 2^16. The
/// rules permit node1 only.
const TARGETS: &[(u16, &[&str])] = &[
    // The permitted node.
    (200, &["node1:PORT", "NODE1:PORT", "node1.:PORT", "node1:0PORT"]),
    // Another node.
    (403, &["node2:PORT", "NoDe2:PORT", "node2.:PORT", "node1.node2:PORT", "xn--node2:PORT"]),
    // Names that no node can have.
    (421, &["default:PORT", "-:PORT", "pod:PORT"]),
    // Dots and patterns.
    (400, &["node2..:PORT", ".node2:PORT", "*:PORT", "node*:PORT"]),
    // Escapes, and bytes that end a text elsewhere.
    (400, &["node2%2e:PORT", "%6eode2:PORT", "node%32:PORT", "node2%00:PORT", "node1%00node2:PORT"]),
    (
        400,
        &["node1\0node2:PORT", "node2\0:PORT", "node1\tnode2:PORT", "node1\rnode2:PORT", "node1 node2:PORT"],
    ),
    (400, &["node1\u{b}node2:PORT", "node1\u{7f}node2:PORT", "node1\\node2:PORT"]),
    // Letters that look alike or that other programs map to these.
    (
        400,
        &[
            "\u{ff4e}\u{ff4f}\u{ff44}\u{ff45}2:PORT",
            "nod\u{435}2:PORT",
            "node\u{ff12}:PORT",
            "node\u{b2}:PORT",
        ],
    ),
    (400, &["node2\u{200b}:PORT", "node2\u{3002}:PORT", "node2\u{ad}:PORT"]),
    // Parts of a URL.
    (
        400,
        &[
            "node1@node2:PORT",
            "node2@node1:PORT",
            "node1:PORT@node2:PORT",
            "http://node2:PORT",
            "http://node2:PORT/",
        ],
    ),
    (
        400,
        &[
            "//node2:PORT",
            "/node2:PORT",
            "node2:PORT/",
            "node1/node2:PORT",
            "node1?node2:PORT",
            "node1#node2:PORT",
        ],
    ),
    (400, &["node1;node2:PORT", "node1:PORT#@node2:PORT", "node1:PORT?node2:PORT"]),
    // Lists.
    (400, &["node1,node2:PORT", "node1:PORT,node2:PORT", "node1:PORT node2:PORT"]),
    // Brackets and zones.
    (400, &["[node2]:PORT", "[node1]:PORT", "[node1:PORT", "node1]:PORT", "[]:PORT", "::1:PORT"]),
    (400, &["[::1%node2]:PORT", "[fe80::1%25node2]:PORT", "node2%lo:PORT"]),
    // Ports.
    (
        400,
        &[
            "node1",
            "node1:",
            ":PORT",
            "node1:+PORT",
            "node1:-1",
            "node1: PORT",
            "node1:PORT:PORT",
            "node1:WRAP",
        ],
    ),
    (400, &["node1:65536", "node1:0", "node1:0x1", "node1:\u{661}", "node1:ssh"]),
];

/// Sends a request, ends the client's direction, and returns the status of the response, and the whole response.
async fn answer(port: SocketAddr, request: &str) -> (u16, String) {
    let mut client = TcpStream::connect(port).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    let _ = client.shutdown().await;
    let mut answer = Vec::new();
    // How the connection ends does not matter.
    let _ = assert_eventually("the end of the connection", client.read_to_end(&mut answer)).await;
    let answer = String::from_utf8(answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap_or_else(|| panic!("{request:?}: {answer:?}"));
    (status.parse().unwrap(), answer)
}

#[tokio::test]
async fn no_spelling_of_a_target_reaches_another_node_than_the_rules_checked() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::with(&place, "rules = [{ nodes = [\"node1\"] }]");
    let (one, two) = (edge(&place, &server, "node1").await, edge(&place, &server, "node2").await);
    let (port, wrap) = (echo.port().to_string(), (u32::from(echo.port()) + 65_536).to_string());
    let mut wrong = Vec::new();
    for (expected, text) in
        TARGETS.iter().flat_map(|(status, all)| all.iter().map(move |text| (status, text)))
    {
        let target = text.replace("PORT", &port).replace("WRAP", &wrap);
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: node1:{port}\r\n\r\nhello");
        let (status, response) = answer(server.connect, &request).await;
        if status != *expected || status == 200 && !response.ends_with("\r\n\r\nhello") {
            wrong.push((text, response));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    server.assert_idle().await;
    let counted = |edge: &Edge| edge.metrics.sessions.closed("acceptor", "ok");
    assert_eq!((counted(&one), counted(&two)), (TARGETS[0].1.len() as u64, 0));
}

/// Heads of requests to a port for HTTP whose clients may name the node by a header, and the status of the response.
/// The rules permit node-a only.
const BY_HOST: &[(&str, u16)] = &[
    ("GET / HTTP/1.1\r\nHost: node-a\r\n", 200),
    ("GET / HTTP/1.1\r\nHost: node-b\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: NODE-B.\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: node-a, node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a@node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-b%2e\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nHost: node-b\r\n", 400),
    ("GET http://node-a/ HTTP/1.1\r\nHost: node-b\r\n", 200),
    ("GET http://node-b/ HTTP/1.1\r\nHost: node-a\r\n", 403),
    ("GET http://node-a@node-b/ HTTP/1.1\r\nHost: node-a\r\n", 403),
    ("GET //node-b/ HTTP/1.1\r\nHost: node-a\r\n", 200),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host: node-b\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: node-b\r\nX-Tunnel-Proxy-Host: node-a\r\n", 200),
    ("GET http://node-a/ HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host: node-b\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nx-TUNNEL-proxy-HOST: node-b\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host: node-a\r\nX-Tunnel-Proxy-Host: node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host: node-a, node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host : node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host:\r\n node-b\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Host: node-a@node-b\r\n", 400),
    // For the target these are headers like others.
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX_Tunnel_Proxy_Host: node-b\r\n", 200),
    // That removes no header that is for the server.
    (
        "GET / HTTP/1.1\r\nHost: node-a\r\nConnection: X-Tunnel-Proxy-Host\r\nX-Tunnel-Proxy-Host: node-b\r\n",
        403,
    ),
    ("GET / HTTP/1.1\r\nHost: node-b\r\nConnection: Host\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: node-a\r\nX-Tunnel-Proxy-Dest: node-b:PORT\r\n", 403),
];

/// The same for the HTTP proxy. The rules permit the target's port of node-a only.
const BY_URL: &[(&str, u16)] = &[
    ("GET http://node-a:PORT/ HTTP/1.1\r\nHost: node-b:PORT\r\n", 200),
    ("GET http://node-b:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-a:1/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://NODE-B.:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-a:PORT@node-b:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-b:PORT/@node-a:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-b:PORT#@node-a:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-b:PORT?@node-a:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("GET http://node-b:PORT\\@node-a:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 400),
    ("GET http://node-a:PORT\\@node-b:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 400),
    ("GET http://node-b%2e:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 400),
    // Without a URL, Host names the node.
    ("GET / HTTP/1.1\r\nHost: node-b:PORT\r\n", 403),
    ("GET //node-b:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 200),
    ("GET ftp://node-b:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\n", 400),
    ("GET http://node-a:PORT/ HTTP/1.1\r\nHost: node-a:PORT\r\nX-Tunnel-Proxy-Host: node-b\r\n", 200),
    ("CONNECT node-b:PORT HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
    ("CONNECT node-a:1 HTTP/1.1\r\nHost: node-a:PORT\r\n", 403),
];

/// The same for a port by `"host"`, where `OWN` is the address of node-a. The rules permit the target's port of node-a
/// only.
const BY_TARGET: &[(&str, u16)] = &[
    ("GET / HTTP/1.1\r\nHost: OWN:PORT\r\n", 200),
    ("GET / HTTP/1.1\r\nHost: OWN:1\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Dest: OWN:1\r\n", 403),
    ("GET / HTTP/1.1\r\nHost: OWN:1\r\nX-Tunnel-Proxy-Dest: OWN:PORT\r\n", 200),
    ("GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Dest: node-b:PORT\r\n", 421),
    (
        "GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Host: node-b\r\nX-Tunnel-Proxy-Dest: OWN:PORT\r\n",
        403,
    ),
    (
        "GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Host: node-a\r\nX-Tunnel-Proxy-Dest: OWN:1\r\n",
        403,
    ),
    (
        "GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Dest: OWN:PORT\r\nX-Tunnel-Proxy-Dest: OWN:1\r\n",
        400,
    ),
    ("GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX-Tunnel-Proxy-Dest: OWN:PORT, OWN:1\r\n", 400),
    (
        "GET / HTTP/1.1\r\nHost: OWN:PORT\r\nConnection: X-Tunnel-Proxy-Dest\r\nX-Tunnel-Proxy-Dest: OWN:1\r\n",
        403,
    ),
    ("GET / HTTP/1.1\r\nHost: OWN:PORT\r\nX_Tunnel_Proxy_Dest: OWN:1\r\n", 200),
];

/// Sends these requests to a server with two nodes. Only node-a may be reached.
async fn assert_rules_applied(listener: &str, tables: &str, requests: &[(&str, u16)], site: SocketAddr) {
    let place = TestDir::new();
    let server = TestServer::with(&place, tables);
    let everywhere = "[edge.allow]\ntargets = [\"0.0.0.0/0:*\", \"[::/0]:*\"]";
    let (_one, two) = (
        edge_with(&place, &server, "node-a", everywhere).await,
        edge_with(&place, &server, "node-b", everywhere).await,
    );
    let mut wrong = Vec::new();
    for (text, expected) in requests {
        let text = text.replace("PORT", &site.port().to_string()).replace("OWN", &site.ip().to_string());
        let (status, response) =
            answer(server.port(listener), &format!("{text}Connection: close\r\n\r\n")).await;
        if status != *expected || status == 200 && !response.contains("\r\n\r\nGET /") {
            wrong.push((text, response));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(two.table.is_empty());
    assert_eq!(two.metrics.sessions.closed("acceptor", "ok"), 0);
}

#[tokio::test]
async fn rules_check_the_node_of_a_request_from_its_header_or_its_url() {
    let site = repeats_heads().await;
    let http = format!(
        "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{site}\" }}\n\
         allow_from = [\"127.0.0.0/8\"]\nrules = [{{ nodes = [\"node-a\"] }}]\n"
    );
    assert_rules_applied("http", &http, BY_HOST, site).await;
    let rules = format!("rules = [{{ nodes = [\"node-a\"], ports = [{}] }}]\n", site.port());
    let proxy = format!("[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n{rules}");
    assert_rules_applied("http_proxy", &proxy, BY_URL, site).await;
}

#[tokio::test]
async fn rules_check_the_target_named_by_a_header() {
    let site = repeats_heads().await;
    let http = format!(
        "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"host\" }}\n\
         allow_from = [\"127.0.0.0/8\"]\nrules = [{{ nodes = [\"node-a\"], ports = [{}] }}]\n\
         [server.addresses.nodes]\n\"{}\" = \"node-a\"\n",
        site.port(),
        site.ip()
    );
    assert_rules_applied("http", &http, BY_TARGET, site).await;
}
