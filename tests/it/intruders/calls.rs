//! Callers of the port for links without the right to be that node or server, and floods of HTTP/2 before any proof.

use std::time::Duration;

use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tonic::Code;
use tunnel_proto::hello::{EdgeHello, LinkCaller};
use tunnel_proto::names::Instance;

use crate::enrol::cloud;
use crate::support::clients::assert_echo;
use crate::support::programs::{TOKEN, TestDir, TestServer, at, edge};
use crate::support::raw::{DATA, END_HEADERS, HEADERS, MAX_WINDOW, PING, RawHttp2, SETTINGS};
use crate::support::{assert_eventually, pause_time, remote, targets, wait_until};

/// Returns the metadata of an edge's call with this JSON.
fn claims(json: &str) -> HeaderMap {
    let mut headers = EdgeHello::edge_request(&"node1".parse().unwrap(), "", Instance::random());
    headers.insert("authorization", HeaderValue::from_str(&format!("Bearer {json}")).unwrap());
    headers
}

#[tokio::test]
async fn no_spelling_of_a_name_or_token_authenticates_a_caller_as_another_node() {
    let place = TestDir::new();
    place.file("token", &format!("node1:{TOKEN}\nnode2:fedcba9876543210\nnode3:\ndefault:0000\n"));
    let server = TestServer::start(&place);
    // A wrong token is answered after a second, and five for a node within a minute.
    pause_time();
    let claim = |node: &str, token: &str| format!(r#"{{"nodename":"{node}","token":"{token}"}}"#);
    let mut wrong = Vec::new();
    for (json, expected) in [
        (claim("node2", TOKEN), Code::Unauthenticated),
        (claim("NODE2", TOKEN), Code::Unauthenticated),
        (claim("node1", ""), Code::Unauthenticated),
        (claim("node1", "fedcba9876543210"), Code::Unauthenticated),
        (claim("node1", "0123456789ABCDEF"), Code::Unauthenticated),
        (claim("node1", "0123456789abcde"), Code::Unauthenticated),
        (claim("node1", "0123456789abcdef0"), Code::Unauthenticated),
        (claim("node1", r"0123456789abcdef\u0000"), Code::Unauthenticated),
        // The default token is for nodes without a line, and a line without a token blocks its node.
        (claim("node1", "0000"), Code::Unauthenticated),
        (claim("Node3", "0000"), Code::Unauthenticated),
        (claim("node3", ""), Code::Unauthenticated),
        (claim("default", "0000"), Code::Unknown),
        (claim("-", "0000"), Code::Unknown),
        (claim("pod", "0000"), Code::Unknown),
        (claim("", "0000"), Code::Unknown),
        (claim("127.0.0.1", "0000"), Code::Unknown),
        (claim(r"node4\r\nnode1", "0000"), Code::Unknown),
        (claim(r"node4\u0000", "0000"), Code::Unknown),
        (claim("node4:0000", "0000"), Code::Unknown),
        (claim(&"n".repeat(254), "0000"), Code::Unknown),
        // The last of two members counts, for the name and for the proof.
        (format!(r#"{{"nodename":"node1","token":"{TOKEN}","nodename":"node2"}}"#), Code::Unauthenticated),
        (claim("node1", &"0".repeat(14_000)), Code::Unauthenticated),
        (format!("{}{}", "[".repeat(7000), "]".repeat(7000)), Code::Unknown),
        (r#"{"nodename":["node1"],"token":7}"#.to_owned(), Code::Unknown),
        ("{".to_owned(), Code::Unknown),
    ] {
        tokio::time::advance(Duration::from_secs(13)).await;
        let called = remote::dial(&place, server.server.bound.grpc, claims(&json), "node1").await;
        let code = called.err().map(|status| status.code());
        if code != Some(expected) {
            wrong.push((json.chars().take(80).collect::<String>(), code));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(server.server.registry.nodes().is_empty());
    // Its own name in another case, with its own token.
    remote::dial(&place, server.server.bound.grpc, claims(&claim("NODE1", TOKEN)), "node1").await.unwrap();
    server.wait_for_node("node1").await;
}

#[tokio::test]
async fn after_five_wrong_tokens_for_a_node_the_right_one_gets_the_same_answer_after_the_same_time() {
    let place = TestDir::new();
    place.file("token", &format!("node1:{TOKEN}\nnode2:{TOKEN}\n"));
    let server = TestServer::start(&place);
    pause_time();
    let guess = async |node: &str, token: &str| {
        let headers = claims(&format!(r#"{{"nodename":"{node}","token":"{token}"}}"#));
        let started = Instant::now();
        let called = remote::dial(&place, server.server.bound.grpc, headers, node).await;
        (called.err().map(|status| (status.code(), status.message().to_owned())), started.elapsed().as_secs())
    };
    for _ in 0..20 {
        assert!(matches!(guess("node2", "its old one").await, (Some((Code::Unauthenticated, _)), 1)));
    }
    for n in 0..5 {
        assert!(matches!(guess("node1", &format!("000{n}")).await, (Some((Code::Unauthenticated, _)), 1)));
    }
    let wrong = guess("NODE1", "0000").await;
    assert!(matches!(&wrong, (Some((Code::Unavailable, why)), 1) if why.contains("too many wrong tokens")));
    assert_eq!(guess("node1", TOKEN).await, wrong);
    // More at once than may wait for an answer: the others are closed, the right one as well.
    let tokens = ["0000", "1", "2", "3", "4", TOKEN, "5", TOKEN];
    let all = join_all(tokens.map(|token| guess("node1", token))).await;
    assert!(all.iter().all(|(why, _)| why.as_ref().is_some_and(|(code, _)| *code == Code::Unavailable)));
    assert_eq!(guess("node2", TOKEN).await.0, None, "another node of this address links");
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(guess("node1", TOKEN).await.0, None);
}

#[tokio::test]
async fn a_client_certificate_authenticates_neither_an_edge_nor_a_server() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let grpc = server.server.bound.grpc;
    let client = place.client("system:kube-apiserver");
    let instance = Instance::random();
    for headers in [LinkCaller::peer_request(instance), remote::headers("node1", Some(instance))] {
        for shows in [Some(client.clone()), None] {
            let is_edge = headers.contains_key("authorization");
            let called = remote::link_as_peer(&place, grpc, shows.clone(), headers.clone(), "node1").await;
            // An edge that shows nothing has its token.
            assert_eq!(called.is_ok(), is_edge && shows.is_none(), "{headers:?}, {shows:?}");
        }
    }
    assert_eq!(server.server.metrics.links_rejected.counted("tls"), 2);
}

/// What a client sends endlessly over HTTP/2. Settings, pings and priorities cost little, and end with the time for the
/// call of a link.
#[derive(Debug, Clone, Copy)]
enum Flood {
    /// Calls that are reset at once.
    Resets,
    /// A head that never ends, in long pieces.
    Continuations,
    /// The same in empty pieces.
    EmptyContinuations,
    Settings,
    Pings,
    Priorities,
    /// Empty pieces of a call's body.
    EmptyData,
    /// Heads of a few bytes that become long: each refers to one long field again and again.
    Compressed,
}

impl Flood {
    /// Sends what has to come first.
    async fn begin(self, to: &mut RawHttp2) {
        match self {
            Self::Continuations | Self::EmptyContinuations => drop(to.frame(HEADERS, 0, 1, &[]).await),
            Self::EmptyData => drop(to.call(&HeaderMap::new()).await),
            _ => {}
        }
    }

    /// Sends it once more. Returns false once the connection has ended.
    async fn goes_on(self, to: &mut RawHttp2, number: u32) -> bool {
        let stream = 2 * number + 1;
        match self {
            Self::Resets => {
                let stream = to.call(&HeaderMap::new()).await;
                to.frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]).await
            }
            Self::Continuations => to.frame(CONTINUATION, 0, 1, &[0; 16_384]).await,
            Self::EmptyContinuations => to.frame(CONTINUATION, 0, 1, &[]).await,
            Self::Settings => to.frame(SETTINGS, 0, 0, &[]).await,
            Self::Pings => to.frame(PING, 0, 0, &[0; 8]).await,
            Self::Priorities => to.frame(PRIORITY, 0, stream, &[0, 0, 0, 0, 1]).await,
            Self::EmptyData => to.frame(DATA, 0, 1, &[]).await,
            Self::Compressed => {
                // A literal that enters the table, of a name of one byte and a value of 4000; then its index.
                let mut block = vec![0x40, 1, b'x', 0x7f, 0xa1, 0x1e];
                block.extend([b'y'; 4000]);
                block.extend([0xbe; 12_000]);
                to.frame(HEADERS, END_HEADERS, stream, &block).await
            }
        }
    }
}

#[tokio::test]
async fn http_2_floods_before_authentication_end_only_their_own_connection() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut floods = Vec::new();
    for flood in [
        Flood::Resets,
        Flood::Continuations,
        Flood::EmptyContinuations,
        Flood::Settings,
        Flood::Pings,
        Flood::Priorities,
        Flood::EmptyData,
        Flood::Compressed,
    ] {
        let mut raw = RawHttp2::connect(&place, server.server.bound.grpc, "node1", MAX_WINDOW).await;
        flood.begin(&mut raw).await;
        let mut sent = 0;
        while sent < MANY && flood.goes_on(&mut raw, sent).await {
            sent += 1;
        }
        floods.push((flood, raw));
    }
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    pause_time();
    for (flood, raw) in &mut floods {
        let ended = async { while raw.next().await.is_some() {} };
        assert_eventually(&format!("the end of {flood:?}"), ended).await;
    }
    assert_eq!(server.server.metrics.links_rejected.counted("call_timeout"), 2, "the others end at once");
    wait_until("only the edge is left", || server.server.metrics.links.all() == 1).await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
}

const MANY: u32 = 2000;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;

/// Waits for the response to a call. Other frames of the connection are ignored.
async fn response(raw: &mut RawHttp2, stream: u32) {
    let next = async {
        loop {
            let frame = raw.next().await.expect("the connection is open");
            if frame.kind == HEADERS && frame.stream == stream {
                return;
            }
        }
    };
    assert_eventually("a response", next).await;
}

#[tokio::test]
async fn of_an_enrolment_call_one_kibibyte_and_one_at_a_time_is_stored_and_nothing_without_invitations() {
    // The head of a message of that many bytes, and the first byte.
    let begun = |bytes: u32| [&[0], &bytes.to_be_bytes()[..], &[10]].concat();
    let (place, none) = (TestDir::new(), TestDir::new());
    let (servers, without) = (cloud(&place, 1), TestServer::start(&none));
    let join = async |place, server: &TestServer| {
        let mut raw = RawHttp2::connect(place, server.server.bound.grpc, "node1", MAX_WINDOW).await;
        raw.call_path(JOIN, &HeaderMap::new()).await;
        raw
    };
    response(&mut join(&none, &without).await, 1).await;
    assert_eq!(without.server.metrics.links_rejected.counted("no_invitations"), 1);
    let mut long = join(&place, &servers[0]).await;
    long.data(&begun(1025)).await;
    response(&mut long, 1).await;
    let mut short = join(&place, &servers[0]).await;
    short.data(&begun(1024)).await;
    let second = short.call_path(JOIN, &HeaderMap::new()).await;
    response(&mut short, second).await;
    assert_eq!(servers[0].server.metrics.links_rejected.counted("overloaded"), 1);
}

const JOIN: &str = "/enrol.Enrol/Join";
