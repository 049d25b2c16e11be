//! Bytes of hostile edges and clients can neither forge nor flood the log.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};

use bytes::{BufMut, BytesMut};
use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;
use tunnel_base::names::Instance;

use crate::support::clients::ask;
use crate::support::programs::{TestDir, TestServer};
use crate::support::raw::Raw;
use crate::support::{remote, wait_until};

/// The lines that the tasks of this thread log, as a reader that escapes nothing sees them.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    pub(crate) fn start() -> (Self, DefaultGuard) {
        LazyLock::force(&SECOND);
        let lines = Self::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
        (lines, tracing::subscriber::set_default(log))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    pub(crate) fn count(&self, part: &str) -> usize {
        self.text().lines().filter(|line| line.contains(part)).count()
    }

    /// Returns the number of refusals that were logged with `part` in their line, or summed up for that cause.
    fn told(&self, part: &str, cause: &str) -> usize {
        let text = self.text();
        let sums =
            text.lines().filter(|line| line.contains("similar refusals not logged") && line.contains(cause));
        let more = sums.map(|line| {
            let (_, behind) = line.split_once("suppressed=").unwrap();
            behind.split(' ').next().unwrap().parse::<usize>().unwrap()
        });
        more.sum::<usize>() + self.count(part)
    }
}

impl Write for Lines {
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
async fn an_edges_last_message_stays_on_its_line_and_moves_no_cursor() {
    let (lines, _guard) = Lines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    for (node, instance) in [("plain", None), ("extended", Some(Instance::random()))] {
        let edge = Raw::link(&place, &server, node, instance).await;
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
async fn a_clients_head_forges_no_line() {
    let (lines, _guard) = Lines::start();
    let server = TestServer::start(&TestDir::new());
    let user = "b3BzCklORk8gZm9yZ2VkG1sySjpwdw=="; // ops, a newline, INFO forged, an escape
    for head in [
        "CONNECT no\u{9b}de:22 HTTP/1.1\r\n\r\n".to_owned(),
        "CONNECT node1:22 HTTP/1.1\r\nTraceId: a\u{9b}31m\u{2028}\r\nUser-Agent: \u{9b}2J\r\n\r\n".to_owned(),
        format!("CONNECT node1:22 HTTP/1.1\r\nProxy-Authorization: Basic {user}\r\n\r\n"),
    ] {
        let answer = ask(server.connect, &head).await;
        assert!(answer.body.chars().all(|c| c == '\n' || !c.is_control()), "{answer:?}");
    }
    wait_until("both are logged", || lines.count("tunnel::access") >= 2).await;
    let text = lines.text();
    assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{2028}'), "{text:?}");
    assert!(!text.contains("forged"), "{text}");
}

#[tokio::test]
async fn endless_refusals_are_summed_up_and_all_are_counted() {
    let (lines, _guard) = Lines::start();
    let place = TestDir::new();
    let server = TestServer::start(&place);
    place.file("token", "default:another\n");
    let other = TestServer::start(&place);
    for _ in 0..100 {
        assert_eq!(server.ask("node1").await.status, 400);
    }
    for _ in 0..30 {
        assert!(remote::try_link(&place, other.server.bound.grpc, "node1", None).await.is_err());
    }
    assert_eq!(server.server.metrics.sessions.closed("connect", "bad_target"), 100);
    wait_until("each is logged or summed up", || {
        lines.told("bad target", "bad_target") == 100 && lines.told("the token differs", "\"token\"") == 30
    })
    .await;
    assert!(lines.count("bad target") < 100, "{}", lines.text());
}

const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
