//! A client's connection and its targets, in memory.

use std::net::SocketAddr;

use bytes::BytesMut;
use http::HeaderMap;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{mpsc, oneshot};
use tracing::Span;

use crate::admission::tests::context;
use crate::admission::{AccessPolicy, OpenRequest};
use crate::session_io::tests::linked;
use crate::session_io::{LocalParty, run_session};
use tunnel_base::drain::Drain;
use tunnel_link::table::handles::{IncomingSession, Session};
use tunnel_net::ChunkStream;
use tunnel_net::limiter::{FairLimiter, PermitLimits, Source};

use super::*;
use http::request::Parts;

pub(crate) struct Site {
    client: DuplexStream,
    offered: mpsc::Receiver<IncomingSession>,
    pub(crate) context: ListenerContext,
    /// The limiter with the client's connection permit, which is the only one.
    pub(crate) limiter: FairLimiter,
    over: oneshot::Receiver<&'static str>,
}

/// The target's end of a session.
pub(crate) struct Target {
    pub(crate) session: Session,
    arrived: BytesMut,
}

impl Site {
    pub(crate) fn new() -> Self {
        let drain = Drain::new();
        let (table, link, offered) = linked(&drain);
        let context = context(AccessPolicy::default(), drain.clone(), table, Some(link));
        let (limiter, from) =
            (FairLimiter::new(PermitLimits::permits(1)), SocketAddr::from(([127, 0, 0, 1], 5)));
        let permit = limiter.try_acquire(&Source::of(from.ip())).unwrap();
        let (client, socket) = duplex(CLIENT_BUFFER);
        let (ended, over) = oneshot::channel();
        let served = context.clone();
        drain.spawn(Span::none(), async move {
            let context = Arc::new(served.clone());
            let mut admission = Admission::new(context, from, permit);
            let word = match forward(Box::new(socket), &mut admission, None, &by_host).await {
                AdmissionOutcome::Opened { session, socket, buffered } => {
                    let socket = Socket::with_early(socket, served.pool.clone(), buffered);
                    run_session(session, LocalParty::Client, socket, &served.metrics).await;
                    "carried"
                }
                AdmissionOutcome::Closed(Some(_)) => "ok",
                AdmissionOutcome::Closed(None) => "upstream_truncated",
                AdmissionOutcome::Failed { reason, .. } => reason,
            };
            let _ = ended.send(word);
        });
        Self { client, offered, context, limiter, over }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.client.write_all(text.as_bytes()).await.unwrap();
    }

    /// Checks that the client receives this text next.
    pub(crate) async fn expect(&mut self, text: &str) {
        let mut received = String::new();
        for byte in text.bytes() {
            received.push(char::from(self.client.read_u8().await.expect(text)));
            if !received.as_bytes().ends_with(&[byte]) {
                break;
            }
        }
        assert_eq!(received, text);
    }

    /// Returns the next head that the client receives.
    pub(crate) async fn head(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.client.read_u8().await.expect("a head"));
        }
        String::from_utf8(head).unwrap()
    }

    /// Returns everything else that the client receives.
    pub(crate) async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        let _ = self.client.read_to_end(&mut rest).await;
        String::from_utf8_lossy(&rest).into_owned()
    }

    pub(crate) async fn target(&mut self) -> Target {
        Target::of(self.offered.recv().await.unwrap())
    }

    /// Returns the requested target, or the head of the response that the client receives without one.
    pub(crate) async fn target_or_answer(&mut self) -> Result<Target, String> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            tokio::select! {
                offer = self.offered.recv() => return Ok(Target::of(offer.unwrap())),
                byte = self.client.read_u8() => head.push(byte.unwrap()),
            }
        }
        Err(String::from_utf8(head).unwrap())
    }

    /// Returns true if no other session was requested.
    pub(crate) fn requested_no_session(&mut self) -> bool {
        self.offered.try_recv().is_err()
    }

    pub(crate) async fn finish(&mut self) {
        self.client.shutdown().await.unwrap();
    }

    /// Disconnects the client, and returns how serving it ended.
    pub(crate) async fn disconnect(self) -> (&'static str, ListenerContext) {
        drop(self.client);
        (self.over.await.unwrap(), self.context)
    }

    /// Returns how serving the client ended while it was still connected.
    pub(crate) async fn outcome(&mut self) -> &'static str {
        (&mut self.over).await.unwrap()
    }

    /// Returns the number of sessions with this result, once no session is open.
    pub(crate) async fn ended(context: &ListenerContext, result: &'static str) -> u64 {
        while context.metrics.sessions.now(LISTENER) > 0 {
            tokio::task::yield_now().await;
        }
        context.metrics.sessions.closed(LISTENER, result)
    }
}

impl Target {
    fn of(offer: IncomingSession) -> Self {
        Self { session: offer.accept(), arrived: BytesMut::new() }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        let mut bytes = Bytes::copy_from_slice(text.as_bytes());
        while !bytes.is_empty() {
            poll_fn(|cx| self.session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        }
    }

    pub(crate) async fn finish(&mut self) {
        poll_fn(|cx| self.session.poll_finish(cx)).await.unwrap();
    }

    /// Returns the next head that arrives.
    pub(crate) async fn head(&mut self) -> String {
        loop {
            if let Some(at) = self.arrived.windows(4).position(|four| four == b"\r\n\r\n") {
                return String::from_utf8(self.arrived.split_to(at + 4).to_vec()).unwrap();
            }
            assert!(self.more().await, "no head: {:?}", self.arrived);
        }
    }

    /// Checks that this text arrives next.
    pub(crate) async fn expect(&mut self, text: &str) {
        assert_eq!(self.take(text.len()).await, text);
    }

    /// Returns the next bytes that arrive.
    pub(crate) async fn take(&mut self, length: usize) -> String {
        while self.arrived.len() < length {
            assert!(self.more().await, "only {:?}", self.arrived);
        }
        String::from_utf8(self.arrived.split_to(length).to_vec()).unwrap()
    }

    /// Returns everything that arrives until the end, and whether the remote end finished normally.
    pub(crate) async fn rest(&mut self) -> (String, bool) {
        loop {
            match poll_fn(|cx| self.session.poll_read_chunk(cx)).await {
                Ok(bytes) if !bytes.is_empty() => self.arrived.extend_from_slice(&bytes),
                end => return (String::from_utf8(self.arrived.split().to_vec()).unwrap(), end.is_ok()),
            }
        }
    }

    /// Returns true if no further bytes have arrived.
    pub(crate) async fn receives_nothing(&mut self) -> bool {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let more = poll_fn(|cx| Poll::Ready(self.session.poll_read_chunk(cx).is_ready())).await;
        self.arrived.is_empty() && !more
    }

    async fn more(&mut self) -> bool {
        let bytes = poll_fn(|cx| self.session.poll_read_chunk(cx)).await.unwrap();
        self.arrived.extend_from_slice(&bytes);
        !bytes.is_empty()
    }
}

/// Returns a request for a node whose target is named by the Host header, and denies the host `no`.
fn by_host(head: &Parts) -> Result<OpenRequest, Denial> {
    let host = head.headers.get("host").map_or("", |host| host.to_str().unwrap());
    match host.split(':').next() {
        Some("no") => Err(Denial::Forbidden("not you".into())),
        host => {
            let target = format!("{}:80", host.filter(|host| !host.is_empty()).unwrap_or("node1")).parse()?;
            Ok(OpenRequest { node: "node1".parse().ok(), target, credentials: HeaderMap::new() })
        }
    }
}

/// Size in bytes of the buffer towards the client.
pub(crate) const CLIENT_BUFFER: usize = 256 * 1024;

const LISTENER: &str = "line";
