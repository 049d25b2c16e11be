//! Bytes of hostile edges and clients can neither forge nor flood the log.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, BytesMut};
use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::layer::SubscriberExt as _;
use tunnel::invitations::invitee::Invitee;
use tunnel::uplink::client::UserCredentials;
use tunnel_base::logging::LogLevelHandle;
use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Instance, NodeName};

use crate::enrol::{join_as_user, join_at};
use crate::http_proxy::site;
use crate::support::clients::{assert_reset, get, send_request};
use crate::support::programs::{TOKEN, TestDir, TestServer, edge};
use crate::support::raw::RawHttp2;
use crate::support::{pause_time, remote, wait_until};

/// The lines that the tasks of this thread log, as a reader that escapes nothing sees them.
#[derive(Clone, Default)]
pub(crate) struct LogLines(Arc<Mutex<Vec<u8>>>);

impl LogLines {
    pub(crate) fn start() -> (Self, DefaultGuard) {
        Self::at(0)
    }

    /// Like [`Self::start`], but with the level of `-v` with that number.
    fn at(verbosity: i32) -> (Self, DefaultGuard) {
        LazyLock::force(&SECOND);
        let lines = Self::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || to.clone());
        let log = tracing_subscriber::registry().with(LogLevelHandle::new(verbosity).0).with(log);
        (lines, tracing::subscriber::set_default(log))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    pub(crate) fn count(&self, part: &str) -> usize {
        self.text().lines().filter(|line| line.contains(part)).count()
    }

    /// Returns the number of refusals that were logged with `part` in their line, or summed up for that cause.
    fn sum(&self, part: &str, cause: &str) -> usize {
        let text = self.text();
        let sums =
            text.lines().filter(|line| line.contains("similar lines not logged") && line.contains(cause));
        let more = sums.map(|line| {
            let (_, behind) = line.split_once("suppressed=").unwrap();
            behind.split(' ').next().unwrap().parse::<usize>().unwrap()
        });
        more.sum::<usize>() + self.count(part)
    }
}

impl Write for LogLines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// With a single log, a line that another test reaches first counts as disabled, because the thread of that test has no
/// log. With two, every log is asked.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

/// Appends a header field as a literal.
fn literal(block: &mut BytesMut, name: &str, value: &str) {
    block.put_u8(0);
    for text in [name, value] {
        block.put_u8(u8::try_from(text.len()).unwrap());
        block.put_slice(text.as_bytes());
    }
}

#[tokio::test]
async fn the_grpc_message_of_an_edge_is_logged_in_one_line_without_control_characters() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    for (node, instance) in [("plain", None), ("extended", Some(Instance::random()))] {
        let edge = RawHttp2::link(&place, &server, node, instance).await;
        let mut trailers = BytesMut::new();
        literal(&mut trailers, "grpc-status", "2");
        literal(&mut trailers, "grpc-message", "bye%0A2026-01-01T00:00:00Z INFO forged%0D%1B[2J%C2%9B31m");
        edge.frame(HEADERS, END_STREAM | END_HEADERS, 1, &trailers).await;
        wait_until("the link has ended", || server.link(node).is_none()).await;
    }
    wait_until("both are logged", || lines.count("link has ended") == 2).await;
    let text = lines.text();
    assert!(text.lines().all(|line| line.contains("link has ended") || !line.contains("forged")), "{text}");
    assert_eq!(lines.count("bye 2026-01-01T00:00:00Z INFO forged"), 2, "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}

#[tokio::test]
async fn a_request_head_cannot_forge_a_log_line() {
    let (lines, _guard) = LogLines::start();
    let server = TestServer::start(&TestDir::new());
    let user = "b3BzCklORk8gZm9yZ2VkG1sySjpwdw=="; // ops, a newline, INFO forged, an escape
    for head in [
        "CONNECT no\u{9b}de:22 HTTP/1.1\r\n\r\n".to_owned(),
        "CONNECT node1:22 HTTP/1.1\r\nTraceId: a\u{9b}31m\u{2028}\r\nUser-Agent: \u{9b}2J\r\n\r\n".to_owned(),
        format!("CONNECT node1:22 HTTP/1.1\r\nProxy-Authorization: Basic {user}\r\n\r\n"),
    ] {
        let answer = send_request(server.connect, &head).await;
        assert!(answer.body.chars().all(|c| c == '\n' || !c.is_control()), "{answer:?}");
    }
    wait_until("both are logged", || lines.count("tunnel::access") >= 2).await;
    let text = lines.text();
    assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{2028}'), "{text:?}");
    assert!(!text.contains("forged"), "{text}");
}

/// Text that ends a line, clears a terminal's screen, sets its title, changes its colour, and reverses the direction of
/// writing.
const WILD: &str = "no\r\n2026-01-01T00:00:00Z INFO forged\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m\u{202e}\0";

#[tokio::test]
async fn the_reasons_of_an_edge_contain_no_control_characters_in_any_output() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut scripted = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let is_plain = |text: &str| text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}');
    let refuses = async {
        let (id, SessionFrame::Open { epoch, .. }) = scripted.next_session_frame().await else {
            panic!("an Open first")
        };
        let refusal = SessionError { code: ErrorCode::TargetUnreachable, reason: WILD.into() };
        scripted.send_session(id, SessionFrame::Refused { epoch, refusal }).await;
    };
    let (answer, ()) = tokio::join!(server.request_connect("node1:22"), refuses);
    assert_eq!(answer.status, 502);
    assert!(answer.head.split("\r\n").all(is_plain) && is_plain(&answer.body), "{answer:?}");
    assert!(!answer.head.contains("\r\n2026"), "{answer:?}");
    // The same as the end of a session that was open.
    let opens = async {
        let (id, SessionFrame::Open { epoch, .. }) = scripted.next_session_frame().await else {
            panic!("an Open first")
        };
        scripted.send_session(id, SessionFrame::opened(1000, epoch)).await;
        (id, epoch)
    };
    let (mut client, (id, epoch)) = tokio::join!(server.open("node1:22"), opens);
    let refusal = SessionError { code: ErrorCode::Cancelled, reason: WILD.into() };
    scripted.send_session(id, SessionFrame::Reset { epoch, refusal }).await;
    assert_reset(&mut client).await;
    wait_until("both are logged", || lines.count("tunnel::access") == 2).await;
    assert!(is_plain(&lines.text()), "{:?}", lines.text());
    assert_eq!(lines.count("forged"), lines.count("tunnel::access"), "{}", lines.text());
    let status = get(server.server.bound.log, "/status").await;
    assert!(is_plain(&status.body), "{status:?}");
}

#[tokio::test]
async fn no_log_level_contains_a_secret() {
    let (lines, _guard) = LogLines::at(9);
    let place = TestDir::new();
    let users = place.file("htpasswd", &format!("ops:{}\n", bcrypt::hash(PASSWORD, 4).unwrap()));
    let auth = format!("auth = \"basic\"\nusers = {users:?}\n");
    let store = place.path().join("enrolled");
    let server = TestServer::with(
        &place,
        &format!(
            "{auth}[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n{auth}\
             [server.invitations]\nstore = \"file\"\nfile = {store:?}\n"
        ),
    );
    let mut scripted = remote::link(&place, &server, "node1", Some(Instance::random())).await;
    let login = |password: &str| format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(password));
    let (right, wrong) = (login(&format!("ops:{PASSWORD}")), login("ops:WRONG-PASSWORD"));
    let refuses = async {
        let (id, SessionFrame::Open { epoch, .. }) = scripted.next_session_frame().await else {
            panic!("an Open first")
        };
        let refusal = SessionError::new(ErrorCode::TargetUnreachable, "no");
        scripted.send_session(id, SessionFrame::Refused { epoch, refusal }).await;
        id
    };
    let head = format!("CONNECT node1:22 HTTP/1.1\r\n{right}\r\n");
    let (answer, id) = tokio::join!(send_request(server.connect, &head), refuses);
    assert_eq!(answer.status, 502, "{answer:?}");
    send_request(server.connect, &format!("CONNECT node1:22 HTTP/1.1\r\n{wrong}\r\n")).await;
    let site = site("the site").await;
    let _node2 = edge(&place, &server, "node2").await;
    let url = format!("http://node2:{}/path?QUERY", site.port());
    let head = format!(
        "GET {url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer BEARER\r\nCookie: COOKIE\r\n{right}Connection: close\r\n\r\n"
    );
    assert_eq!(send_request(server.port("http_proxy"), &head).await.status, 200);
    let enrolment = server.server.enrolment.get().unwrap();
    let node: NodeName = "node3".parse().unwrap();
    let hour = Duration::from_secs(3600);
    let code = enrolment.invite(&Invitee::Node(node.clone()), None, hour, false, "test").await.unwrap().code;
    let (joined, grpc) = ("JOINEDTOKEN".repeat(3), server.server.bound.grpc);
    join_at(&server, &code.secret(), "node3", &joined).await.unwrap();
    let headers = EdgeHello::edge_request(&node, &joined, Instance::random());
    let _node3 = remote::dial(&place, grpc, headers, "node3").await.unwrap();
    let alice = enrolment.invite(&"alice/".parse().unwrap(), None, hour, false, "test").await.unwrap().code;
    let UserCredentials::Token(_, token) =
        join_as_user(&place, grpc, &alice.to_string(), "laptop").await.unwrap().proof
    else {
        panic!("a token was made")
    };
    let token = token.load();
    enrolment.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap();
    let text = lines.text();
    assert!(text.contains("TRACE") && text.contains("node3") && text.contains(" h2::"), "{text}");
    let (topic, digits) = (id.topic(), id.topic().replace('-', ""));
    assert!(text.contains(&digits[..8]), "{digits}");
    let encoded =
        [format!("ops:{PASSWORD}"), "ops:WRONG-PASSWORD".into()].map(|plain| STANDARD.encode(plain));
    let secrets = [
        TOKEN,
        PASSWORD,
        "WRONG-PASSWORD",
        &encoded[0],
        &encoded[1],
        "BEARER",
        "COOKIE",
        "QUERY",
        &joined,
        &code.to_string(),
        &alice.to_string(),
        &alice.secret(),
        token[0].reveal(),
        &topic[8..],
        &digits[8..],
    ];
    for secret in secrets {
        let found: Vec<_> = text.lines().filter(|line| line.contains(secret)).take(3).collect();
        assert!(found.is_empty(), "{secret}: {found:#?}");
    }
}

const PASSWORD: &str = "CORRECT-PASSWORD";

#[tokio::test]
async fn repeated_refusals_are_summarised_in_the_log_and_all_are_counted() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    place.file("token", "default:another\n");
    let other = TestServer::start(&place);
    pause_time();
    for _ in 0..100 {
        assert_eq!(server.request_connect("node1").await.status, 400);
    }
    for n in 0..30 {
        let node = format!("node{n}");
        assert!(remote::try_link(&place, other.server.bound.grpc, &node, None).await.is_err());
    }
    assert_eq!(server.server.metrics.sessions.closed("connect", "bad_target"), 100);
    wait_until("each is logged or summed up", || {
        lines.sum("bad target", "bad_target") == 100 && lines.sum("the token differs", "\"token\"") == 30
    })
    .await;
    assert!(lines.count("bad target") < 100, "{}", lines.text());
}

const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
