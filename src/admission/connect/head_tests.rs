use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::admission::AccessPolicy;
use crate::admission::tests::context;
use crate::session_io::tests::linked;
use tunnel_base::drain::Drain;
use tunnel_link::table::handles::IncomingSession;
use tunnel_net::limiter::{FairLimiter, PermitLimits, Source};
use tunnel_net::tls::testing::over;

use super::*;

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (client, listener.accept().await.unwrap().0)
}

/// Serves a connection at a listener with one link. The link's remote end passes each requested session to `accept`.
async fn served<C, F>(socket: C, accept: impl AsyncFnOnce(IncomingSession) -> F) -> AdmissionOutcome
where
    C: Connection + 'static,
{
    let drain = Drain::new();
    let (table, link, mut offered) = linked(&drain);
    let context = Arc::new(context(AccessPolicy::default(), drain.clone(), table, Some(link)));
    let from = SocketAddr::from(([127, 0, 0, 1], 5));
    let permit = FairLimiter::new(PermitLimits::permits(1)).try_acquire(&Source::of(from.ip())).unwrap();
    let mut admission = Admission::new(context, from, permit);
    let accepts = async {
        let _far = accept(offered.recv().await.unwrap()).await;
        pending::<()>().await;
    };
    tokio::select! {
        done = Box::pin(ConnectProtocol.handshake(socket, &mut admission)) => done,
        () = accepts => unreachable!(),
    }
}

/// Serves one head, and returns the outcome, the client's end and the requested target.
async fn serve_head(head: &[u8]) -> (AdmissionOutcome, TcpStream, Option<String>) {
    let (mut client, server) = pair().await;
    client.write_all(head).await.unwrap();
    let mut target = None;
    let done = served(server, async |offer| {
        target = Some(offer.target.to_string());
        offer.accept()
    })
    .await;
    (done, client, target)
}

async fn all(mut client: TcpStream) -> String {
    let mut text = String::new();
    client.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn each_form_of_connect_head_opens_a_session_and_gets_a_bare_200() {
    for head in [
        "CONNECT node1:22 HTTP/1.0\r\n\r\n",
        "CONNECT node1:22 HTTP/1.1\r\nHost: 10.0.0.1:8080\r\nProxy-Connection: Keep-Alive\r\n\r\n",
        "CONNECT node1:22 HTTP/1.1\r\n\r\n",
        "CONNECT node1:22 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n",
    ] {
        let (done, mut client, target) = serve_head(head.as_bytes()).await;
        let AdmissionOutcome::Opened { session: _session, socket, buffered } = done else {
            panic!("{head}: {done:?}")
        };
        assert_eq!((target.as_deref(), buffered.len()), (Some("node1:22"), 0), "{head}");
        let mut one_read = [0; 4096];
        let n = client.read(&mut one_read).await.unwrap();
        let version = if head.contains("1.0") { "1.0" } else { "1.1" };
        let text = std::str::from_utf8(&one_read[..n]).unwrap();
        let line = format!("HTTP/{version} 200 Connection established\r\n");
        assert!(text.starts_with(&line) && text.ends_with("\r\n\r\n"), "{text:?}");
        for header in ["content-length", "transfer-encoding", "date", "close"] {
            assert!(!text.to_lowercase().contains(header), "{text:?}");
        }
        drop(socket);
        assert_eq!(all(client).await, "", "nothing after the head");
    }
}

#[tokio::test]
async fn bytes_after_the_connect_head_are_kept() {
    let (done, _client, _) = serve_head(b"CONNECT node1:22 HTTP/1.1\r\n\r\nSSH-2.0-early\r\n").await;
    let AdmissionOutcome::Opened { buffered, .. } = done else { panic!("{done:?}") };
    assert_eq!(buffered, "SSH-2.0-early\r\n");
}

#[tokio::test]
async fn a_denial_is_sent_completely_before_the_connection_closes() {
    let (done, client, _) = serve_head(b"CONNECT [fd00::1]:22 HTTP/1.0\r\n\r\n").await;
    let AdmissionOutcome::Closed(Some(socket)) = done else { panic!("{done:?}") };
    drop(socket);
    let text = all(client).await;
    assert!(text.starts_with("HTTP/1.0 421 no node is known for [fd00::1]:22\r\n"), "{text}");
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let length = format!("content-length: {}", body.len());
    assert!(head.lines().any(|l| l == length), "{text}");
    assert!(body.starts_with("no node is known for [fd00::1]:22\n"), "{text}");
    assert!(head.contains("connection: close") || !head.contains("keep-alive"), "{text}");
}

#[tokio::test]
async fn an_invalid_connect_target_is_denied_with_the_reason() {
    for (target, reason) in [
        ("fd00:1::7:22", "bad target: \"fd00:1::7:22\" has no port; expected host:port"),
        ("[fd00:1::7:22", "bad target: \"[fd00:1::7\" is not a name"),
        ("node\u{e9}:22", "bad target: \"node\u{e9}\" is not a name"),
    ] {
        let (done, client, _) =
            serve_head(format!("CONNECT {target} HTTP/1.0\r\nHost: a\r\n\r\n").as_bytes()).await;
        assert!(matches!(done, AdmissionOutcome::Closed(Some(_))), "{target}: {done:?}");
        drop(done);
        let text = all(client).await;
        assert!(
            text.starts_with("HTTP/1.0 400 bad target: ") && text.contains(&format!("\r\n\r\n{reason}")),
            "{text}"
        );
        assert_eq!(text.matches("HTTP/").count(), 1, "{text}");
    }
}

#[tokio::test]
async fn another_method_is_denied_before_its_body_arrives() {
    let head = b"POST http://a/ HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nsome";
    let (done, _client, _) = serve_head(head).await;
    assert!(matches!(done, AdmissionOutcome::Closed(Some(_))), "{done:?}");
}

#[tokio::test]
async fn input_that_is_not_http_opens_no_session() {
    let long = format!("CONNECT node1:22 HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(70_000));
    for (head, word, begin) in [
        ("SSH-2.0-OpenSSH_9.2\r\n\r\n", "ssh_without_proxy_command", "SSH-2.0-tunnel\r\n"),
        ("EHLO a.b\r\n\r\n", "header_invalid", "HTTP/1.1 400 bad request: no valid HTTP request"),
        ("CONNECT a b c HTTP/1.1\r\n\r\n", "header_invalid", "HTTP/1.1 400 bad request: "),
        (
            "CONNECT a:1 HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n",
            "header_too_large",
            "HTTP/1.1 400 bad request: Content-Length is too large",
        ),
        (long.as_str(), "header_too_large", "HTTP/1.1 431 the request's head is too long: at most 32 KiB"),
    ] {
        let (done, mut client, _) = serve_head(head.as_bytes()).await;
        let AdmissionOutcome::Failed { reason, socket: Some(_socket) } = done else {
            panic!("{head}: {done:?}")
        };
        assert_eq!(reason, word);
        let mut text = vec![0; begin.len()];
        client.read_exact(&mut text).await.unwrap();
        assert_eq!(std::str::from_utf8(&text).unwrap(), begin);
    }
}

#[tokio::test]
async fn a_connection_without_a_head_is_counted_as_header_missing() {
    let (client, server) = pair().await;
    drop(client);
    let done = served(server, async |_| panic!("no head")).await;
    assert!(matches!(done, AdmissionOutcome::Failed { reason: "header_missing", .. }), "{done:?}");
}

/// Checks that a client is served if it closes its write half after its head, long before the session is open.
async fn is_served<N, C>(mut client: N, server: C)
where
    N: AsyncRead + AsyncWrite + Unpin,
    C: Connection + 'static,
{
    client.write_all(b"CONNECT node1:22 HTTP/1.0\r\n\r\nearly").await.unwrap();
    client.shutdown().await.unwrap();
    let accept = async |offer: IncomingSession| {
        // A reader that waits for the end of the stream has detected it by now.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        offer.accept()
    };
    let done = served(server, accept).await;
    let AdmissionOutcome::Opened { session: _session, mut socket, mut buffered } = done else {
        panic!("not opened")
    };
    let mut space = [0; 9];
    while let n @ 1.. = socket.read(&mut space).await.unwrap() {
        buffered = [&buffered, &space[..n]].concat().into();
    }
    assert_eq!(buffered, "early");
    socket.write_all(b"SSH-2.0").await.unwrap();
    socket.shutdown().await.unwrap();
    drop(socket);
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    assert_eq!(received, "HTTP/1.0 200 Connection established\r\n\r\nSSH-2.0");
}

#[tokio::test]
async fn a_client_that_half_closes_early_is_still_served() {
    let (client, server) = pair().await;
    is_served(client, server).await;
    let (client, server) = UnixStream::pair().unwrap();
    is_served(client, server).await;
    let (client, server) = pair().await;
    let (client, server) = over(client, server).await;
    is_served(client, server).await;
}

/// Checks that the opening is dropped once the client has disconnected.
async fn is_dropped<N, C>(mut client: N, server: C, leave: impl FnOnce(N))
where
    N: AsyncWrite + Unpin,
    C: Connection + 'static,
{
    client.write_all(b"CONNECT node1:22 HTTP/1.1\r\n\r\n").await.unwrap();
    let leaves = async |offer: IncomingSession| {
        leave(client);
        offer
    };
    let done = served(server, leaves).await;
    assert!(matches!(done, AdmissionOutcome::Failed { reason: "reset_while_opening", .. }));
}

#[tokio::test]
async fn a_client_that_disconnects_while_opening_cancels_the_session() {
    let reset = |client: TcpStream| SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    let (client, server) = pair().await;
    is_dropped(client, server, reset).await;
    let (client, server) = pair().await;
    let (client, server) = over(client, server).await;
    is_dropped(client, server, |client| reset(client.into_inner().0)).await;
    let (client, server) = UnixStream::pair().unwrap();
    is_dropped(client, server, drop).await;
}

/// A stream that records each write, and the number of writes before each flush.
struct Recorded(DuplexStream, Arc<Mutex<WriteRecord>>);

#[derive(Default)]
struct WriteRecord {
    written: Vec<Vec<u8>>,
    flushed: Vec<usize>,
}

impl Connection for Recorded {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

impl AsyncRead for Recorded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, out)
    }
}

impl AsyncWrite for Recorded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.1.lock().written.push(bytes.to_vec());
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut record = self.1.lock();
        let written = record.written.len();
        record.flushed.push(written);
        drop(record);
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn the_200_is_written_and_flushed_at_once() {
    let (mut client, server) = duplex(1000);
    let record = Arc::<Mutex<WriteRecord>>::default();
    let recorded = Recorded(server, record.clone());
    client.write_all(b"CONNECT node-a:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await.unwrap();
    let done = served(recorded, async |offer: IncomingSession| offer.accept()).await;
    assert!(matches!(done, AdmissionOutcome::Opened { .. }), "{done:?}");
    let record = record.lock();
    assert_eq!(record.written, [b"HTTP/1.1 200 Connection established\r\n\r\n"]);
    assert_eq!(record.flushed.last(), Some(&1), "flushed after the write");
}

#[tokio::test]
async fn an_http_2_client_gets_a_400_about_http_1_1() {
    let (done, client, _) = serve_head(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let AdmissionOutcome::Failed { reason: "header_invalid", socket } = done else { panic!("{done:?}") };
    drop(socket);
    assert!(all(client).await.starts_with("HTTP/1.1 400 only HTTP/1.1 is served here\r\n"));
}
