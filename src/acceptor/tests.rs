use std::future::poll_fn;
use std::net::Shutdown;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::acceptor::target_dialer::TargetDialerRole;
use tunnel_base::policy::targets::Targets;
use tunnel_link::link::Link;
use tunnel_link::table::handles::{OpenOutcome, PendingOpen, Session};
use tunnel_link::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_net::ChunkStream;
use tunnel_net::interfaces::{InterfaceSnapshot, LocalAddresses};
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::{FrameKind, Remote, SessionKey};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, Target};
use tunnel_proto::state::LinkId;

use super::*;

/// An opener and an acceptor with an in-memory link between them.
struct Pair {
    opener: Arc<SessionTable>,
    link: Arc<Link>,
    metrics: Metrics,
    drain: Drain,
}

impl Pair {
    fn new() -> Self {
        let limits = SessionLimits {
            windows: WindowLimits { start: 64 * 1024, max: 1024 * 1024 },
            memory: 16 << 20,
            sessions: 100,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let metrics = Metrics::edge();
        let drain = Drain::new();
        let table = |metrics| SessionTable::new(Instance::random(), limits.clone(), metrics);
        let (opener, acceptor) = (table(Metrics::edge()), table(metrics.clone()));
        let node = "edge-1".parse().unwrap();
        let place = TargetDialer {
            role: TargetDialerRole::Node(node),
            own: LocalAddresses::new(InterfaceSnapshot::default),
            targets: Arc::new(ArcSwap::from_pointee(Targets::default())),
            resolver: Resolver::system(),
            sockets: None,
        };
        let pool = BufferPool::new();
        let judged = JudgedSessions::default();
        let backend = SessionAcceptor::new(place, None, pool, judged, metrics.clone(), drain.clone());
        let link = |n| Link::new(LinkId(n), Remote::Server("edge-1".parse().unwrap()), None);
        let (near, far) = (link(1), link(2));
        pump(&drain, &near, &far, &acceptor, Some(backend));
        pump(&drain, &far, &near, &opener, None);
        Self { opener, link: near, metrics, drain }
    }

    async fn ask(&self, target: &str, category: SessionCategory) -> (PendingOpen, OpenOutcome) {
        let node = "edge-1".parse().unwrap();
        let target: Target = target.parse().unwrap();
        let opening = self.opener.open(node, target, category, "ops@10.0.0.1:5".into(), "test").unwrap();
        opening.ask(&self.link, None);
        let answer = opening.answer().await;
        (opening, answer)
    }

    /// Waits until the acceptor has no session. Returns how often sessions ended with `result`.
    async fn ended(&self, result: &'static str) -> u64 {
        while self.metrics.sessions.now(LISTENER) > 0 {
            tokio::task::yield_now().await;
        }
        self.metrics.sessions.closed(LISTENER, result)
    }
}

fn pump(
    drain: &Drain,
    from: &Arc<Link>,
    back: &Arc<Link>,
    to: &Arc<SessionTable>,
    backend: Option<SessionAcceptor>,
) {
    let (from, back, to) = (Arc::clone(from), Arc::clone(back), Arc::clone(to));
    drain.spawn(tracing::Span::none(), async move {
        while let Some(frame) = poll_fn(|cx| from.poll_pull(cx, Instant::now())).await {
            let FrameKind::Session(id, category, word) = frame.body else { continue };
            let key = SessionKey { id, category, node: frame.node };
            if let Some(FrameEvent::Incoming(offer)) = to.on_frame(&back, key, word, Instant::now()) {
                backend.as_ref().unwrap().serve_incoming(offer);
            }
        }
    });
}

async fn give(session: &mut Session, text: &'static [u8]) {
    let mut bytes = Bytes::from_static(text);
    while !bytes.is_empty() {
        poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
    }
}

async fn take_all(session: &mut Session) -> std::io::Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        match poll_fn(|cx| session.poll_read_chunk(cx)).await? {
            bytes if bytes.is_empty() => return Ok(all),
            bytes => all.extend_from_slice(&bytes),
        }
    }
}

async fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("edge-1:{}", listener.local_addr().unwrap().port());
    (listener, target)
}

#[tokio::test]
async fn an_offered_session_reaches_its_target_and_ends_cleanly_at_both_ends() {
    let pair = Pair::new();
    let (listener, target) = listening().await;
    let (opening, answer) = pair.ask(&target, SessionCategory::Ssh).await;
    assert_eq!(answer, OpenOutcome::Open);
    let mut session = opening.into_session();
    let (mut socket, _) = listener.accept().await.unwrap();
    give(&mut session, b"question").await;
    poll_fn(|cx| session.poll_finish(cx)).await.unwrap();
    let mut question = String::new();
    socket.read_to_string(&mut question).await.unwrap();
    assert_eq!(question, "question", "bytes and end arrive, and the half-closed session continues");
    socket.write_all(b"the answer").await.unwrap();
    drop(socket);
    assert_eq!(take_all(&mut session).await.unwrap(), b"the answer");
    assert_eq!(pair.ended("ok").await, 1);
    assert_eq!((pair.metrics.bytes_to_target.get(), pair.metrics.bytes_to_client.get()), (8, 10));
}

#[tokio::test]
async fn an_unreachable_or_forbidden_target_is_refused_with_its_reason() {
    let pair = Pair::new();
    let (listener, _) = listening().await;
    let at = listener.local_addr().unwrap();
    drop(listener);
    for (target, category, code, expected) in [
        (
            at.to_string().as_str(),
            SessionCategory::Ssh,
            ErrorCode::TargetRefused,
            format!("{at} refused the connection"),
        ),
        (
            "192.0.2.1:22",
            SessionCategory::Ssh,
            ErrorCode::NotAllowed,
            "this edge may not dial 192.0.2.1:22".into(),
        ),
        (
            "edge-1:443",
            SessionCategory::Https,
            ErrorCode::NotAllowed,
            "this end does not support TLS to targets".into(),
        ),
    ] {
        let (_opening, answer) = pair.ask(target, category).await;
        assert_eq!(answer, OpenOutcome::Refused(SessionError::new(code, expected)));
    }
    assert_eq!(pair.ended(ErrorCode::NotAllowed.name()).await, 2);
}

#[tokio::test]
async fn a_target_that_resets_its_connection_resets_the_session_with_that_reason() {
    let pair = Pair::new();
    let (listener, target) = listening().await;
    let (opening, _) = pair.ask(&target, SessionCategory::Ssh).await;
    let mut session = opening.into_session();
    let (socket, _) = listener.accept().await.unwrap();
    SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
    drop(socket);
    take_all(&mut session).await.unwrap_err();
    let why = "the target's connection failed: connection reset";
    assert_eq!(session.ended(), Some(SessionError::new(ErrorCode::ConnectionFailed, why)));
    assert_eq!(pair.ended("target_io_error").await, 1);
}

#[tokio::test]
async fn a_session_reset_by_the_opener_resets_the_targets_connection() {
    let pair = Pair::new();
    let (listener, target) = listening().await;
    let (opening, _) = pair.ask(&target, SessionCategory::Ssh).await;
    let (mut socket, _) = listener.accept().await.unwrap();
    opening.into_session().break_off(SessionError::new(ErrorCode::Cancelled, "the client went away"));
    let broken = socket.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset, "not a clean end");
    assert_eq!(pair.ended("cancelled").await, 1);
}

#[tokio::test]
async fn a_session_aborted_at_the_drain_deadline_is_counted_with_its_bytes() {
    let pair = Pair::new();
    let (listener, target) = listening().await;
    let (opening, _) = pair.ask(&target, SessionCategory::Ssh).await;
    let mut session = opening.into_session();
    let (mut socket, _) = listener.accept().await.unwrap();
    give(&mut session, b"half").await;
    let mut half = [0; 4];
    socket.read_exact(&mut half).await.unwrap();
    SockRef::from(&socket).shutdown(Shutdown::Write).unwrap();
    assert_eq!(take_all(&mut session).await.unwrap(), b"");
    pair.drain.finish(Duration::ZERO, async {}).await;
    assert_eq!((pair.ended("aborted").await, pair.metrics.bytes_to_target.get()), (1, 4));
    let broken = socket.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset, "not a clean end");
}
