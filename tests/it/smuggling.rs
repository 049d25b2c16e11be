//! Requests that two parsers could read differently, as bytes on real ports. Each gets a 400, or the target gets
//! exactly one unambiguous request.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust, server_name};

use crate::support::programs::{TestDir, TestServer, edge_with};
use crate::support::{assert_eventually, targets};

/// The expected result of a request.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// A 400, and no complete request reaches the target.
    ToNothing,
    /// The target gets this head and body and nothing more. `HOST` is replaced by its name.
    As(&'static str),
}

use Expected::{As, ToNothing};

/// Requests. `HOST` is replaced by the target's name.
const REQUESTS: &[(&str, Expected)] = &[
    // Two lengths. RFC 9112 6.3: Transfer-Encoding overrides the length, the length is not forwarded, and the
    // connection ends.
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: HOST\r\n\r\n",
        As("POST / HTTP/1.1\r\nhost: HOST\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    ),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\nContent-Length: 44\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: HOST\r\n\r\n",
        As("POST / HTTP/1.1\r\nhost: HOST\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    ),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3, 4\r\n\r\nabcd", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: +3\r\n\r\nabc", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: -1\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0x3\r\n\r\nabc", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3 4\r\n\r\nabcd", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length : 3\r\n\r\nabc", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3, 3\r\n\r\nabc", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 18446744073709551619\r\n\r\nabc", ToNothing),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        As("POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 3\r\n\r\nabc"),
    ),
    // Transfer codings.
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", ToNothing),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
        ToNothing,
    ),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: \u{b}chunked\r\n\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", ToNothing),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        ToNothing,
    ),
    ("POST / HTTP/1.0\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", ToNothing),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ToNothing,
    ),
    // Chunks.
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", ToNothing),
    ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n", ToNothing),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000001\r\na\r\n0\r\n\r\n",
        ToNothing,
    ),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n1;a\nb\r\na\r\n0\r\n\r\n",
        ToNothing,
    ),
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n1;a=\"\r\nGET /x HTTP/1.1\r\n\"\r\na\r\n0\r\n\r\n",
        ToNothing,
    ),
    // Lines.
    ("GET / HTTP/1.1\r\nHost: HOST\r\nX: b\r\n folded\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: HOST\r\n\tX: b\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\n Host: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: HOST\r\nX: b\rGET /x HTTP/1.1\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: HOST\r\nX: b\0c\r\n\r\n", ToNothing),
    ("GET  / HTTP/1.1\r\nHost: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\nHost: HOST\nX: b\n\n", As("GET / HTTP/1.1\r\nhost: HOST\r\nx: b\r\n\r\n")),
    // Hosts.
    (
        "GET http://HOST/x?y HTTP/1.1\r\nHost: elsewhere:1\r\n\r\n",
        As("GET /x?y HTTP/1.1\r\nhost: HOST\r\n\r\n"),
    ),
    ("GET / HTTP/1.1\r\nHost: HOST\r\nHost: elsewhere\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: elsewhere\r\nHost: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: HOST/a\r\n\r\n", ToNothing),
    ("GET / HTTP/1.1\r\nHost: me@HOST\r\n\r\n", ToNothing),
    // Versions.
    ("GET /\r\nHost: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/0.9\r\nHost: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/1.2\r\nHost: HOST\r\n\r\n", ToNothing),
    ("GET / HTTP/2.0\r\nHost: HOST\r\n\r\n", ToNothing),
    // A client that does not wait for the 100 has sent its body, which is no request.
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nExpect: 100-continue\r\nContent-Length: 36\r\n\r\nGET /x HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
        As(
            "POST / HTTP/1.1\r\nhost: HOST\r\nexpect: 100-continue\r\ncontent-length: 36\r\n\r\nGET /x HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
        ),
    ),
    // An upgrade with a body is not an upgrade.
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nConnection: Upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabc",
        As("POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 3\r\n\r\nabc"),
    ),
    // An upgrade to HTTP/2 loses the settings that it needs, and the next request is one of its own.
    (
        "GET / HTTP/1.1\r\nHost: HOST\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
        As("GET / HTTP/1.1\r\nhost: HOST\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"),
    ),
    // A Connection header cannot remove the headers that delimit a request.
    (
        "POST / HTTP/1.1\r\nHost: HOST\r\nConnection: Content-Length, Host\r\nContent-Length: 3\r\n\r\nabc",
        As("POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 3\r\n\r\nabc"),
    ),
];

/// Second request: a listener that keeps the connection after a request forwards this one as well.
const LAST: &str = "GET /last HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n";

/// A target that responds to each request and records the bytes of each of its connections.
#[derive(Clone, Default)]
struct Target(Arc<Mutex<Vec<Vec<u8>>>>);

impl Target {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, mut socket: S) {
        let number = {
            let mut all = self.0.lock().unwrap();
            all.push(Vec::new());
            all.len() - 1
        };
        let mut answered = 0;
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = socket.read(&mut piece).await {
            let requests = {
                let mut all = self.0.lock().unwrap();
                all[number].extend_from_slice(&piece[..n]);
                split(&all[number]).0.len()
            };
            for _ in answered..requests {
                let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            }
            let _ = socket.flush().await;
            answered = requests;
        }
    }

    /// Returns the complete requests received so far, and forgets them. The rest of a connection must not be a request.
    fn take(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.0.lock().unwrap());
        let mut requests = Vec::new();
        for bytes in all {
            let (whole, _cut) = split(&bytes);
            requests.extend(whole);
        }
        requests
    }
}

/// Splits these bytes into complete requests, as a strict parser sees them, and the rest.
///
/// # Panics
///
/// If one of the requests is ambiguous.
fn split(mut bytes: &[u8]) -> (Vec<String>, &[u8]) {
    let mut requests = Vec::new();
    while let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let body = &bytes[end + 4..];
        let Some(length) = body_length(head, body) else { break };
        let (whole, rest) = bytes.split_at(end + 4 + length);
        requests.push(std::str::from_utf8(whole).unwrap().to_owned());
        bytes = rest;
    }
    (requests, bytes)
}

/// Returns the length of the body, or `None` if it is incomplete.
fn body_length(head: &str, body: &[u8]) -> Option<usize> {
    let mut lines = head.split("\r\n");
    let words: Vec<_> = lines.next().unwrap().split(' ').collect();
    assert!(matches!(words[..], [_, path, "HTTP/1.1"] if path.starts_with('/')), "{head:?}");
    assert!(!head.replace("\r\n", "").contains(['\r', '\n', '\0']), "{head:?}");
    let fields: Vec<_> =
        lines.map(|line| line.split_once(": ").unwrap_or_else(|| panic!("{head:?}"))).collect();
    assert!(
        fields.iter().all(|(name, _)| !name.is_empty() && !name.contains(char::is_whitespace)),
        "{head:?}"
    );
    let of = |name: &str| -> Vec<_> {
        fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| *value).collect()
    };
    assert_eq!(of("host").len(), 1, "{head:?}");
    let length = match (&of("content-length")[..], &of("transfer-encoding")[..]) {
        ([], []) => 0,
        ([length], []) => length.parse().unwrap(),
        ([], ["chunked"]) => body.windows(5).position(|five| five == b"0\r\n\r\n")? + 5,
        both => panic!("{both:?} in {head:?}"),
    };
    (body.len() >= length).then_some(length)
}

/// A listener of a server, with its protocol.
enum Listener {
    Plain(&'static str),
    Tls(&'static str),
}

impl Listener {
    /// Sends this, and reads to the end.
    async fn exchange_bytes(&self, server: &TestServer, text: &str) -> String {
        match self {
            Self::Plain(front) => exchange(server.client(front).await, text).await,
            Self::Tls(front) => {
                let settings = TlsClientConfig { trust: Trust::NoVerify, identity: None, alpn: Vec::new() };
                let connector = TlsConnector::from(settings.load().unwrap().load());
                let name = server_name("127.0.0.1").unwrap();
                exchange(connector.connect(name, server.client(front).await).await.unwrap(), text).await
            }
        }
    }
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S, text: &str) -> String {
    socket.write_all(text.as_bytes()).await.unwrap();
    socket.flush().await.unwrap();
    let mut response = Vec::new();
    // How the connection ends does not matter.
    let _ = assert_eventually("the end of the connection", socket.read_to_end(&mut response)).await;
    String::from_utf8(response).unwrap()
}

/// Sends each of the requests to a listener of this server, and checks what the target gets.
async fn none_is_read_in_two_ways(server: &TestServer, front: Listener, target: &Target, host: &str) {
    for (request, comes) in REQUESTS {
        let text = format!("{request}{LAST}").replace("HOST", host);
        let response = front.exchange_bytes(server, &text).await;
        server.assert_idle().await;
        let mut got = target.take();
        if got.last().is_some_and(|last| last.starts_with("GET /last ")) {
            got.pop();
        }
        match comes {
            ToNothing => {
                assert!(response.starts_with("HTTP/1.1 400 "), "{request:?}: {response}");
                assert_eq!(got, [""; 0], "{request:?}");
            }
            As(expected) => {
                let response = response.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&response);
                assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{request:?}: {response}");
                let expected = expected.replace("HOST", host).to_lowercase();
                let got: Vec<_> = got.iter().map(|got| got.to_lowercase()).collect();
                assert_eq!(got, [expected], "{request:?}");
            }
        }
    }
}

#[tokio::test]
async fn the_http_proxy_forwards_no_ambiguous_request() {
    let (place, target) = (TestDir::new(), Target::default());
    let serving = target.clone();
    let at = targets::serve(move |socket: TcpStream| serving.clone().serve(socket)).await;
    let server = TestServer::with(&place, "[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n");
    let _edge = edge_with(&place, &server, "node-a", "").await;
    none_is_read_in_two_ways(
        &server,
        Listener::Plain("http_proxy"),
        &target,
        &format!("node-a:{}", at.port()),
    )
    .await;
}

#[tokio::test]
async fn ports_by_host_forward_no_ambiguous_request() {
    let (place, target) = (TestDir::new(), Target::default());
    let serving = target.clone();
    let at = targets::serve(move |socket: TcpStream| serving.clone().serve(socket)).await;
    let more = format!("[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{at}\" }}\n");
    let server = TestServer::with(&place, &more);
    let _edge = edge_with(&place, &server, "node-a", "").await;
    none_is_read_in_two_ways(&server, Listener::Plain("http"), &target, "node-a").await;
}

#[tokio::test]
async fn https_ports_forward_no_ambiguous_request() {
    let (place, target) = (TestDir::new(), Target::default());
    let at = behind_tls(&place, target.clone()).await;
    let dir = place.path().display();
    let files = format!("cert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n");
    let more = format!("[server.https]\n{files}listen_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{at}\" }}\n");
    let server = TestServer::with(&place, &more);
    let _edge = edge_with(&place, &server, "node-a", &format!("[edge.target_tls]\n{files}")).await;
    none_is_read_in_two_ways(&server, Listener::Tls("https"), &target, "node-a").await;
}

async fn behind_tls(place: &TestDir, target: Target) -> SocketAddr {
    let identity = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let clients = ClientAuth::Anonymous;
    let server = TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: Vec::new() };
    let acceptor = server.load().unwrap().load().acceptor();
    targets::serve(move |socket| {
        let (acceptor, target) = (acceptor.clone(), target.clone());
        async move {
            let Ok(socket) = acceptor.accept(socket).await else { return };
            target.serve(socket).await;
        }
    })
    .await
}
