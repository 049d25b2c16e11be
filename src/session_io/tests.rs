use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, advance};
use tracing::Span;

use crate::session_io::judged::{JudgedSessions, SessionSubject, UNTIL_CHANGED};
use crate::session_io::rights::RightsChange;
use tunnel_base::drain::Drain;
use tunnel_link::link::Link;
use tunnel_link::table::handles::IncomingSession;
use tunnel_link::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_net::ChunkStream;
use tunnel_net::pool::BufferPool;
use tunnel_proto::frame::{FrameKind, Remote, SessionCategory, SessionKey};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, SessionId};
use tunnel_proto::state::LinkId;

use super::*;

const LISTENER: &str = "test";

/// The windows of the sessions of [`linked`].
pub(crate) const WINDOWS: WindowLimits = WindowLimits { start: 64 * 1024, max: 1024 * 1024 };

/// Returns the opener's table, its link, and a channel of the sessions offered at the link's other end, all in memory.
pub(crate) fn linked(drain: &Drain) -> (Arc<SessionTable>, Arc<Link>, mpsc::Receiver<IncomingSession>) {
    let resume_timeout = Duration::from_secs(60);
    let limits = SessionLimits {
        windows: WINDOWS,
        memory: 16 << 20,
        sessions: 9,
        resume_timeout,
        max_resume_timeout: Duration::ZERO,
    };
    let table = || SessionTable::new(Instance::random(), limits.clone(), Metrics::edge());
    let link = |n| Link::new(LinkId(n), Remote::Server("node1".parse().unwrap()), None);
    let (near, far, opener, acceptor) = (link(1), link(2), table(), table());
    let (offers, offered) = mpsc::channel::<IncomingSession>(1);
    for (from, back, to) in [(&near, &far, &acceptor), (&far, &near, &opener)] {
        let (from, back, to, offers) = (Arc::clone(from), Arc::clone(back), Arc::clone(to), offers.clone());
        drain.spawn(Span::none(), async move {
            while let Some(frame) = poll_fn(|cx| from.poll_pull(cx, Instant::now())).await {
                let FrameKind::Session(id, category, word) = frame.body else { continue };
                let key = SessionKey { id, category, node: frame.node };
                if let Some(FrameEvent::Incoming(offer)) = to.on_frame(&back, key, word, Instant::now()) {
                    offers.try_send(offer).unwrap();
                }
            }
        });
    }
    (opener, near, offered)
}

/// Returns an open session and its other end.
pub(crate) async fn session(drain: &Drain) -> (Session, Session) {
    let (opener, link, mut offered) = linked(drain);
    let (node, target) = ("node1".parse().unwrap(), "node1:22".parse().unwrap());
    let opening = opener.open(node, target, SessionCategory::Ssh, String::new(), LISTENER).unwrap();
    opening.ask(&link, None);
    let far_end = offered.recv().await.unwrap().accept();
    opening.answer().await;
    (opening.into_session(), far_end)
}

/// Runs a session of a client that sent `buffered`. Returns the client and the session's other end.
async fn carried(drain: &Drain, buffered: &'static [u8], metrics: &Metrics) -> (TcpStream, Session) {
    let (session, far_end) = session(drain).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, _) = listener.accept().await.unwrap();
    let socket = Socket::with_early(
        Box::new(socket) as AnyConnection,
        BufferPool::new(),
        Bytes::from_static(buffered),
    );
    run(drain, metrics, session.into(), socket);
    (client, far_end)
}

/// Runs a session with its client's socket, in a task.
fn run(drain: &Drain, metrics: &Metrics, session: SessionStream, socket: Socket<AnyConnection>) {
    let opened = OpenSession {
        session,
        buffered: Bytes::new(),
        access: AccessLogEntry::start(LISTENER, "test".into()),
        alive: metrics.sessions.start(LISTENER),
        judged: JudgedSessions::default().add(SessionSubject::default(), |_| Ok(UNTIL_CHANGED)).unwrap(),
        permit: None,
    };
    let metrics = metrics.clone();
    drain.spawn(Span::none(), async move { run_session(opened, LocalParty::Client, socket, &metrics).await });
}

pub(crate) async fn take(session: &mut impl ChunkStream) -> std::io::Result<Bytes> {
    poll_fn(|cx| session.poll_read_chunk(cx)).await
}

/// The remote end answers and finishes, and the client reads that.
async fn answered(client: &mut TcpStream, far: &mut Session) {
    let mut answer = Bytes::from_static(b"answer");
    poll_fn(|cx| far.poll_write_chunk(cx, &mut answer)).await.unwrap();
    poll_fn(|cx| far.poll_finish(cx)).await.unwrap();
    let mut text = String::new();
    client.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "answer");
}

async fn ended(metrics: &Metrics, result: &'static str) -> u64 {
    while metrics.sessions.now(LISTENER) > 0 {
        tokio::task::yield_now().await;
    }
    metrics.sessions.closed(LISTENER, result)
}

#[tokio::test]
async fn early_bytes_of_the_client_are_sent_first_and_both_directions_end_cleanly() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, mut far) = carried(&drain, b"early ", &metrics).await;
    client.write_all(b"and late").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(all(&mut far).await, b"early and late");
    answered(&mut client, &mut far).await;
    assert_eq!(ended(&metrics, "ok").await, 1);
    assert_eq!((metrics.bytes_to_target.get(), metrics.bytes_to_client.get()), (14, 6));
}

#[tokio::test]
async fn a_client_that_resets_its_connection_resets_the_session_with_that_reason() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (client, mut far) = carried(&drain, b"", &metrics).await;
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    take(&mut far).await.unwrap_err();
    let why = "the client's connection failed: connection reset";
    assert_eq!(far.ended(), Some(SessionError::new(ErrorCode::ConnectionFailed, why)));
    assert_eq!(ended(&metrics, "client_io_error").await, 1);
}

#[test]
fn both_ends_log_the_same_reason_for_a_failed_connection() {
    for (near, word) in [(LocalParty::Client, "client_io_error"), (LocalParty::Target, "target_io_error")] {
        let kind = std::io::ErrorKind::ConnectionReset;
        let here = end_reason(CopyEnd { by: Side::A, how: EndKind::ReadFailed(kind) }, near, None);
        let remote_error = SessionError::new(ErrorCode::ConnectionFailed, &here.1);
        let there = end_reason(
            CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) },
            near.other(),
            Some(&remote_error),
        );
        assert_eq!((here.0, &here), (word, &there));
        let other = SessionError::new(ErrorCode::Cancelled, &here.1);
        let there =
            end_reason(CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) }, near.other(), Some(&other));
        assert_eq!(there.0, "cancelled");
    }
}

#[tokio::test]
async fn a_reset_session_resets_the_clients_connection() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, far) = carried(&drain, b"", &metrics).await;
    far.break_off(SessionError::new(ErrorCode::Cancelled, "the target's connection was reset"));
    let broken = client.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(ended(&metrics, "cancelled").await, 1);
}

/// The client sends nothing, so no write reveals that the session has ended.
#[tokio::test]
async fn a_session_reset_after_its_end_closes_a_silent_client() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, mut far) = carried(&drain, b"", &metrics).await;
    answered(&mut client, &mut far).await;
    far.break_off(SessionError::new(ErrorCode::Cancelled, "the target's connection was reset"));
    assert_eq!(ended(&metrics, "cancelled").await, 1);
    client.remote_reset().await;
}

/// How a client or target that has finished its direction disconnects.
#[derive(Debug, Clone, Copy)]
enum DisconnectKind {
    /// It resets the connection.
    Reset,
    /// It closes its socket, so that its kernel answers the next packet with a reset.
    Close,
}

async fn leave(mut socket: TcpStream, how: DisconnectKind) {
    socket.write_all(b"last").await.unwrap();
    socket.shutdown().await.unwrap();
    if let DisconnectKind::Reset = how {
        SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// Reads a stream to its end.
async fn all(stream: &mut impl ChunkStream) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(bytes) = Some(take(stream).await.unwrap()).filter(|bytes| !bytes.is_empty()) {
        all.extend_from_slice(&bytes);
    }
    all
}

/// The other side neither sends nor finishes, so no write reveals that the client has disconnected.
#[tokio::test]
async fn a_client_that_disconnects_after_half_close_is_detected_without_a_write() {
    for how in [DisconnectKind::Reset, DisconnectKind::Close] {
        let (drain, metrics) = (Drain::new(), Metrics::edge());
        let (client, mut far) = carried(&drain, b"", &metrics).await;
        leave(client, how).await;
        assert_eq!(all(&mut far).await, b"last", "{how:?}");
        if let DisconnectKind::Close = how {
            // A packet that is answered with a reset, as a keepalive probe is.
            poll_fn(|cx| far.poll_write_chunk(cx, &mut Bytes::from_static(b"probe"))).await.unwrap();
        }
        assert_eq!(ended(&metrics, "client_io_error").await, 1, "{how:?}");
        take(&mut far).await.unwrap();
        assert_eq!(far.ended().unwrap().code, ErrorCode::ConnectionFailed, "{how:?}");
    }
}

#[tokio::test]
async fn a_direct_target_that_resets_after_half_close_is_detected_without_a_write() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, target) = run_direct(&drain, &metrics).await;
    leave(target, DisconnectKind::Reset).await;
    let mut got = Vec::new();
    client.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"last");
    assert_eq!(ended(&metrics, "target_io_error").await, 1);
    client.remote_reset().await;
}

/// After a clean end of the connection, nc and an ssh that uses it would wait for more.
#[tokio::test]
async fn a_session_aborted_at_the_drain_deadline_resets_the_clients_connection() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, mut far) = carried(&drain, b"early", &metrics).await;
    assert_eq!(take(&mut far).await.unwrap(), "early");
    drain.finish(Duration::ZERO, async {}).await;
    let broken = client.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(ended(&metrics, "aborted").await, 1);
}

/// Runs a direct connection for a client. Returns the client and the target.
async fn run_direct(drain: &Drain, metrics: &Metrics) -> (TcpStream, TcpStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let pair = async || {
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    };
    let ((client, socket), (connection, target)) = (pair().await, pair().await);
    let session = SessionStream::direct(connection, BufferPool::new());
    run(drain, metrics, session, Socket::new(Box::new(socket), BufferPool::new()));
    (client, target)
}

#[tokio::test]
async fn a_direct_connection_is_copied_and_counted_like_a_session() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    let (mut client, mut target) = run_direct(&drain, &metrics).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut all = String::new();
    target.read_to_string(&mut all).await.unwrap();
    // The tail must arrive although the connection is dropped as soon as it is finished.
    let tail = vec![b'a'; 1 << 20];
    target.write_all(&tail).await.unwrap();
    target.shutdown().await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert_eq!((all.as_str(), answer.len()), ("question", tail.len()));
    drop(client);
    assert_eq!(ended(&metrics, "ok").await, 1);
    assert_eq!((metrics.bytes_to_target.get(), metrics.bytes_to_client.get()), (8, 1 << 20));
}

#[tokio::test]
async fn a_direct_connections_reset_is_attributed_to_its_side_and_passed_on() {
    let (drain, metrics) = (Drain::new(), Metrics::edge());
    for (by_target, word) in [(true, "target_io_error"), (false, "client_io_error")] {
        let (client, target) = run_direct(&drain, &metrics).await;
        let (breaks, mut sees) = if by_target { (target, client) } else { (client, target) };
        SockRef::from(&breaks).set_linger(Some(Duration::ZERO)).unwrap();
        drop(breaks);
        if !by_target {
            assert!(sees.read(&mut [0]).await.is_err(), "it must not look complete");
        }
        drop(sees);
        assert_eq!(ended(&metrics, word).await, 1, "{word}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_ends_no_session_that_was_ended_or_has_resumed_elsewhere() {
    let judged = JudgedSessions::default();
    let subject = |n| SessionSubject {
        id: Some(SessionId::from_bits(n)),
        node: Some("node1".parse().unwrap()),
        user: Some("alice".into()),
        relayed: None,
    };
    let judge = |change: &RightsChange| match change.is_empty() {
        true => Ok(UNTIL_CHANGED),
        false => Err("revoked".to_owned()),
    };
    let mut change = RightsChange::default();
    change.replace(&Arc::default(), 1);
    let ended = || judged.ended_by(&change).get("alice").copied();
    let _open = judged.add(subject(1), judge).unwrap();
    for n in [2, 3] {
        judged.park(judged.add(subject(n), judge).unwrap(), Instant::now() + Duration::from_secs(60));
    }
    assert_eq!(ended(), Some(3));
    judged.end("the grant was revoked", |one| one.id == subject(2).id);
    assert_eq!(ended(), Some(2));
    let until = Instant::now() + Duration::from_secs(60);
    assert!(judged.list_parked(subject(2), until, judge).unwrap_err().contains("the grant was revoked"));
    judged.list_parked(subject(3), until, |_| Ok(UNTIL_CHANGED)).unwrap();
    assert_eq!(ended(), Some(1), "another judge");
    advance(Duration::from_secs(61)).await;
    assert_eq!(ended(), Some(1));
    let until = Instant::now() + Duration::from_secs(60);
    (10..1000).for_each(|n| judged.list_parked(subject(n), until, judge).unwrap());
    assert_eq!(ended(), Some(1 + 64), "a node names no more");
}

#[tokio::test(start_paused = true)]
async fn a_session_that_was_ended_without_a_path_does_not_return_for_as_long_as_a_node_keeps_it() {
    let judged = JudgedSessions::default();
    let id = SessionId::from_bits(1);
    judged.refuse(id, "ended by an operator", Instant::now() + Duration::from_secs(60));
    for hours in [0, 12] {
        advance(Duration::from_secs(hours * 3600)).await;
        judged.end("another", |_| false);
        assert_eq!(judged.check_parked(id).unwrap_err(), "ended by an operator");
        assert!(judged.relayed().is_empty());
    }
    advance(Duration::from_secs(24 * 3600)).await;
    judged.end("another", |_| false);
    assert!(judged.unpark(id).is_none());
}
