//! TLS handshakes with clients, limited in number and time.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::io::{AsyncBufReadExt as _, Interest};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

use crate::limiter::{AcquireError, ActivityTracked, FairLimiter, Permit, PermitLimits, Source};
use crate::pool::BufferPool;
use crate::reload::ReloadedValue;
use crate::socket::{Buffered, Connection as _};
use crate::tls::HTTP_2;
use crate::tls::client_certificate::{ClientCertificate, ServerTls};
use crate::tls::error::TlsHandshakeError;
use crate::websocket::WebSocket;
use tunnel_base::policy::Networks;

/// Performs the handshakes of a port. Cheap to clone; clones share the permits.
#[derive(Debug, Clone)]
pub struct TlsHandshaker {
    tls: ReloadedValue<ServerTls>,
    limiter: FairLimiter,
    pool: BufferPool,
}

/// A connection with TLS.
pub type TlsSocket = TlsStream<TlsTransport>;

/// The transport below TLS. Only links use WebSockets.
pub type TlsTransport = Buffered<ActivityTracked<Either<TcpStream, WebSocket>>>;

/// An accepted TLS connection with a completed handshake.
#[derive(Debug)]
pub struct TlsAccepted {
    /// The connection. While the permit is held, its reads mark the permit as active or idle.
    pub stream: TlsSocket,
    /// The handshake's permit. Drop it to start the next handshake.
    pub permit: Permit,
    /// The deadline for releasing the permit.
    pub until: Instant,
}

/// The reason why the TLS handshake of an accepted connection failed.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct TlsAcceptError {
    /// A fixed label for metrics.
    pub reason: &'static str,
    /// The error text.
    pub why: String,
    /// The handshake error, if the client caused it.
    pub error: Option<TlsHandshakeError>,
    /// The connection, if an alert was written to it. Close it gracefully, so that the alert arrives.
    pub socket: Option<TlsTransport>,
}

/// What an accepted handshake gives.
pub type TlsResult<T> = Result<T, TlsAcceptError>;

impl TlsHandshaker {
    /// Creates a handshaker with a limiter of [`handshake_limits`], which ports may share.
    pub fn new(tls: ReloadedValue<ServerTls>, pool: BufferPool, limiter: FairLimiter) -> Self {
        Self { tls, limiter, pool }
    }

    /// Waits for the first byte, then for a permit, then performs the handshake.
    ///
    /// `permit` is the connection's permit of the accept loop, which is marked active from the first byte. Cancel safe:
    /// a dropped call releases its permit.
    ///
    /// # Errors
    ///
    /// The client sent nothing, too many others wait, the permit was revoked for another source, or TLS failed.
    pub async fn accept(
        &self,
        socket: TcpStream,
        from: SocketAddr,
        permit: &Permit,
    ) -> TlsResult<TlsAccepted> {
        let turn = self.turn(&socket, from, permit).await?;
        // Boxed, so that waiting calls above do not take its memory, nor does a link that results from it.
        Box::pin(self.shake(Either::Left(socket), turn, permit.revoked())).await
    }

    /// Like [`Self::accept`], for a link, whose TLS may be inside of a WebSocket. Returns also its client's address,
    /// which [`WebSocket::accept`] may learn from `proxies`.
    ///
    /// # Errors
    ///
    /// Like [`Self::accept`], or the request for a WebSocket was refused.
    pub async fn accept_link(
        &self,
        socket: TcpStream,
        from: SocketAddr,
        permit: &Permit,
        proxies: &Networks,
    ) -> TlsResult<(TlsAccepted, SocketAddr)> {
        let turn = self.turn(&socket, from, permit).await?;
        let lost = turn.revoked();
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        // Boxed like a handshake.
        let upgrade = Box::pin(async {
            let refused = |why: String| TlsAcceptError::new("websocket", format!("WebSocket refused: {why}"));
            let mut first = [0];
            // A proxy that ends TLS may speak none to this port.
            if socket.peek(&mut first).await.is_ok() && first == GET {
                let io = turn.track_activity(socket);
                let accepted = WebSocket::accept(io, from, proxies).await.map_err(refused)?;
                return Ok(Either::Right((accepted, turn)));
            }
            let mut accepted = self.shake(Either::Left(socket), turn, permit.revoked()).await?;
            // A caller without ALPN may speak HTTP/2 as well.
            if accepted.stream.get_ref().1.alpn_protocol() == Some(HTTP_2)
                || accepted.stream.fill_buf().await.is_ok_and(|bytes| !bytes.starts_with(&GET))
            {
                return Ok(Either::Left(accepted));
            }
            let TlsAccepted { stream, permit: turn, .. } = accepted;
            let accepted = WebSocket::accept(stream, from, proxies).await.map_err(refused)?;
            Ok(Either::Right((accepted, turn)))
        });
        let outer = permit.revoked();
        let upgraded = tokio::select! {
            biased;
            () = lost.cancelled() => return Err(TlsAcceptError::new("evicted", "evicted in its TLS handshake")),
            () = outer.cancelled() => return Err(TlsAcceptError::new("evicted", "evicted in its TLS handshake")),
            upgraded = timeout_at(until, upgrade) => upgraded,
        };
        let late = |_| TlsAcceptError::new("tls_timeout", "no HTTP request in time after the TLS handshake");
        // Before the next wait, so that connections that wait above do not take the memory of the result.
        let (websocket, client, mut turn) = match upgraded.map_err(late)?? {
            Either::Left(accepted) => return Ok((accepted, from)),
            Either::Right(((websocket, client), turn)) => (websocket, client, turn),
        };
        // The permits of all clients of a proxy must not be those of one source. None waits for its own: it would
        // meanwhile have memory that no limit counts.
        if client.ip() != from.ip() {
            turn = self.limiter.try_acquire(&Source::of(client.ip())).map_err(crowded)?;
        }
        let shaking = Box::pin(self.shake(Either::Right(websocket), turn, permit.revoked()));
        Ok((shaking.await?, client))
    }

    /// Waits for the first byte, then for a permit.
    async fn turn(&self, socket: &TcpStream, from: SocketAddr, permit: &Permit) -> TlsResult<Permit> {
        // Peeks, because the socket may be reported readable before a byte is there.
        if timeout(FIRST_BYTE_TIMEOUT, socket.peek(&mut [0])).await.is_err() {
            return Err(TlsAcceptError::new("timed_out", format!("no data within {FIRST_BYTE_TIMEOUT:?}")));
        }
        permit.mark_active();
        let turn = self.limiter.acquire(&Source::of(from.ip())).await;
        let turn = turn.map_err(crowded).inspect_err(|_| send_full(socket))?;
        if socket.ready(Interest::READABLE).await.is_ok_and(|ready| ready.is_read_closed()) {
            return Err(TlsAcceptError::new("gone", "client disconnected before its TLS handshake"));
        }
        Ok(turn)
    }

    /// Returns the certificate that an accepted client has presented, or `None` if it has presented none.
    pub fn certificate(&self, accepted: &TlsAccepted) -> Option<ClientCertificate> {
        let chain = accepted.stream.get_ref().1.peer_certificates()?;
        Some(ClientCertificate::new(chain, &self.tls))
    }

    async fn shake(
        &self,
        socket: Either<TcpStream, WebSocket>,
        turn: Permit,
        outer: CancellationToken,
    ) -> TlsResult<TlsAccepted> {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        // The permit is idle only while this side waits for the client. A client that waits for this side keeps its
        // permit.
        let socket = Buffered::new(turn.track_activity(socket), self.pool.clone());
        let mut handshake = self.tls.load().acceptor().accept(socket).into_fallible();
        let lost = turn.revoked();
        let accepted = tokio::select! {
            biased;
            () = lost.cancelled() => None,
            () = outer.cancelled() => None,
            accepted = timeout_at(until, &mut handshake) => Some(accepted),
        };
        let Some(accepted) = accepted else {
            // Its next read fails then, so that it returns the connection.
            lost.cancel();
            if let Some(Err((_, socket))) = handshake.now_or_never() {
                socket.tcp().into_iter().for_each(send_full);
            }
            return Err(TlsAcceptError::new("evicted", "evicted in its TLS handshake"));
        };
        match accepted {
            Ok(Ok(stream)) => Ok(TlsAccepted { stream, permit: turn, until }),
            Ok(Err((error, socket))) => {
                let error = TlsHandshakeError::of(&error);
                let failed = TlsAcceptError::new("tls", format!("TLS handshake failed: {error}"));
                Err(TlsAcceptError { socket: Some(socket), error: Some(error), ..failed })
            }
            Err(_) => Err(TlsAcceptError::new("tls_timeout", "TLS handshake timed out")),
        }
    }
}

impl TlsAcceptError {
    fn new(reason: &'static str, why: impl Into<String>) -> Self {
        Self { reason, why: why.into(), error: None, socket: None }
    }
}

fn crowded(_: AcquireError) -> TlsAcceptError {
    TlsAcceptError::new("limit_reached", "too many connections wait for a TLS handshake")
}

/// Tells a client that it lost its place. First reads what it has sent: otherwise closing would reset the connection.
fn send_full(socket: &TcpStream) {
    let _ = socket.try_read(&mut [0; 4096]);
    let _ = socket.try_write(&INTERNAL_ERROR);
}

/// The fatal alert internal_error.
const INTERNAL_ERROR: [u8; 7] = [21, 3, 3, 0, 2, 2, 80];

/// Returns the limits of `permits` concurrent handshakes, for which at most `waiting` more connections wait.
pub fn handshake_limits(permits: usize, waiting: usize) -> PermitLimits {
    PermitLimits { permits, per_source: usize::MAX, waiting, idle_timeout: Some(HANDSHAKE_IDLE_TIMEOUT) }
}

/// Maximum number of concurrent handshakes of a process, however much memory it has: more would only take longer.
pub const MAX_HANDSHAKES: usize = 1000;

/// A handshake idle for this long may be evicted by a waiting one.
const HANDSHAKE_IDLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time from the connection to the first byte of the handshake.
///
/// In a crowd it may arrive late. An idle client is evicted for others much sooner.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);

/// The first byte of a request for a WebSocket. That of HTTP/2 is another one.
const GET: [u8; 1] = *b"G";

/// Time limit of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::HandshakeKind;

    use crate::tls::testing::{TestCa, client, server};
    use crate::tls::tests::{TestClock, server_at};
    use crate::tls::{ClientAuth, Trust, server_name};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    fn permit(from: SocketAddr) -> Permit {
        FairLimiter::new(PermitLimits::permits(1)).try_acquire(&Source::of(from.ip())).unwrap()
    }

    #[tokio::test]
    async fn a_connection_that_waits_does_not_take_the_memory_of_a_handshake() {
        let ca = TestCa::new("ca");
        let clock = TestClock(Arc::new(AtomicU64::new(YEAR_2029)));
        let tls = server_at(ca.issue("s", "a.b"), ClientAuth::Required(ca.ca()), &clock);
        let limiter = FairLimiter::new(handshake_limits(9, 9));
        let handshaker = TlsHandshaker::new(ReloadedValue::fixed(tls), BufferPool::new(), limiter);
        let from = "192.0.2.1:1".parse().unwrap();
        let permit = permit(from);
        let proxies = Networks::default();
        let waiting = handshaker.accept_link(pair().await.0, from, &permit, &proxies);
        assert!(size_of_val(&waiting) < 1024, "{} bytes", size_of_val(&waiting));
    }

    #[tokio::test]
    async fn a_tls_session_is_resumed_while_the_clients_own_certificate_is_valid() {
        let ca = TestCa::new("ca");
        let clock = TestClock(Arc::new(AtomicU64::new(YEAR_2029)));
        let clients = ClientAuth::Required(ca.ca());
        let tls = server_at(ca.issue("s", "a.b"), clients, &clock);
        let acceptor = TlsHandshaker::new(
            ReloadedValue::fixed(tls),
            BufferPool::new(),
            FairLimiter::new(handshake_limits(9, 9)),
        );
        let shows = ca.issue_for("c", "pod", 2020..2030);
        // Other certificates in the chain may have expired, for example that of a former CA.
        let others = [&shows, &ca.issue_for("o", "other", 2020..2021)];
        let chain = others.map(|one| std::fs::read_to_string(&one.cert).unwrap()).concat();
        std::fs::write(&shows.cert, chain).unwrap();
        let connector = TlsConnector::from(client(Trust::Ca(ca.ca()), Some(shows)).load());
        let from = "192.0.2.1:1".parse().unwrap();
        let permit = permit(from);
        let handshake = async || {
            let (near, served) = pair().await;
            let connect = async {
                let mut near = connector.connect(server_name("a.b").unwrap(), near).await.unwrap();
                // A session can only be resumed with the tickets that follow the handshake.
                let _ = near.read_u8().await;
                near.get_ref().1.handshake_kind().unwrap()
            };
            let accept = async {
                let mut accepted = acceptor.accept(served, from, &permit).await?;
                accepted.stream.write_all(b"x").await.unwrap();
                Ok::<_, TlsAcceptError>(acceptor.certificate(&accepted).unwrap())
            };
            let (accepted, kind) = tokio::join!(accept, connect);
            (accepted.map_err(|handshake_failures| handshake_failures.to_string()), kind)
        };
        let mut last = None;
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed, HandshakeKind::Resumed] {
            let (accepted, kind) = handshake().await;
            let certificate = accepted.unwrap();
            assert!(certificate.names.contains(&"pod".to_owned()));
            // Again from the accepted ones.
            assert_eq!(certificate.verify(None), Ok(YEAR_2030));
            assert_eq!(certificate.verify(None), Ok(YEAR_2030));
            assert_eq!(kind, expected);
            last = Some(certificate);
        }
        clock.0.store(YEAR_2029 + 2 * 366 * 24 * 3600, Relaxed);
        let late = TlsHandshakeError::of_tls(&last.unwrap().verify(None).unwrap_err());
        assert!(matches!(late, TlsHandshakeError::Expired(..)), "{late}");
        for _ in 0..2 {
            let (accepted, kind) = handshake().await;
            assert!(accepted.is_err());
            assert_eq!(kind, HandshakeKind::Full, "so that a client with a new certificate is accepted");
        }
    }

    /// The middle of 2029, and the beginning of 2030.
    const YEAR_2029: u64 = 1_877_000_000;
    const YEAR_2030: u64 = 1_893_456_000;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_loses_its_place_in_a_handshake_gets_an_alert() {
        let ca = TestCa::new("ca");
        let from: SocketAddr = "192.0.2.1:1".parse().unwrap();
        let other = Source::of([192, 0, 2, 9].into());
        for loses_turn in [true, false] {
            let handshaker = TlsHandshaker {
                tls: server(ca.issue("s", "a.b"), ClientAuth::Anonymous),
                limiter: FairLimiter::new(handshake_limits(1, 1)),
                pool: BufferPool::new(),
            };
            let outer = permit(from);
            let (mut near, served) = pair().await;
            near.write_all(&[22, 3, 1, 0, 200, 1]).await.unwrap();
            let accepting = handshaker.accept(served, from, &outer);
            let losing = async {
                while handshaker.limiter.try_acquire(&other).is_ok() {
                    tokio::task::yield_now().await;
                }
                outer.revoked().cancel();
            };
            let reason = if loses_turn {
                tokio::join!(accepting, handshaker.limiter.acquire(&other)).0.unwrap_err().reason
            } else {
                tokio::join!(accepting, losing).0.unwrap_err().reason
            };
            assert_eq!(reason, "evicted");
            let mut received = Vec::new();
            near.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, INTERNAL_ERROR);
        }
    }

    #[tokio::test]
    async fn a_client_that_leaves_while_it_waits_costs_no_handshake() {
        let ca = TestCa::new("ca");
        let limits = PermitLimits { permits: 1, per_source: usize::MAX, waiting: 9, idle_timeout: None };
        let acceptor = TlsHandshaker {
            tls: server(ca.issue("s", "a.b"), ClientAuth::Anonymous),
            limiter: FairLimiter::new(limits),
            pool: BufferPool::new(),
        };
        let from: SocketAddr = "192.0.2.1:1".parse().unwrap();
        let turn = acceptor.limiter.try_acquire(&Source::of(from.ip())).unwrap();
        let (mut leaves, served) = pair().await;
        leaves.write_all(&[22]).await.unwrap();
        let permit = permit(from);
        let its_turn = async {
            drop(leaves);
            // The runtime learns of this pair no earlier than of the dropped end.
            pair().await;
            drop(turn);
        };
        let (accepted, ()) = tokio::join!(acceptor.accept(served, from, &permit), its_turn);
        assert_eq!(accepted.unwrap_err().reason, "gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_handshake_is_evicted_by_another_source_and_a_silent_one_times_out() {
        let ca = TestCa::new("ca");
        let limits = PermitLimits {
            permits: 1,
            per_source: usize::MAX,
            waiting: 9,
            idle_timeout: Some(HANDSHAKE_IDLE_TIMEOUT),
        };
        let acceptor = TlsHandshaker {
            tls: server(ca.issue("s", "a.b"), ClientAuth::Anonymous),
            limiter: FairLimiter::new(limits),
            pool: BufferPool::new(),
        };
        let (slow, other) = ("192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap());
        let (mut stalls, served) = pair().await;
        stalls.write_all(&[22]).await.unwrap();
        let (slow_slot, other_slot) = (permit(slow), permit(other));
        let first = acceptor.accept(served, slow, &slow_slot);
        let second = async {
            // The first one has its permit by then.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let (client_stream, served) = pair().await;
            let connect = TlsConnector::from(client(Trust::Ca(ca.ca()), None).load());
            let connects = connect.connect(server_name("a.b").unwrap(), client_stream);
            let (accepted, connected) = tokio::join!(acceptor.accept(served, other, &other_slot), connects);
            connected
                .and(accepted.map_err(std::io::Error::other))
                .map(|accepted| acceptor.certificate(&accepted).map(|certificate| certificate.names))
        };
        let (first, second) = tokio::join!(first, second);
        assert_eq!((first.unwrap_err().reason, second.unwrap()), ("evicted", None));

        let (_silent, served) = pair().await;
        let started = Instant::now();
        assert_eq!(acceptor.accept(served, slow, &slow_slot).await.unwrap_err().reason, "timed_out");
        assert_eq!(started.elapsed().as_secs(), FIRST_BYTE_TIMEOUT.as_secs());
    }
}
