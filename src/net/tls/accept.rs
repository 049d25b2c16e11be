//! TLS handshakes with clients: a bounded number at once, each for a bounded time.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;

use super::{Fault, leaf};
use crate::net::door::{Attended, Door, Limits, Slot, Source};
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;

/// Does the handshakes of a port. Cheap to clone; clones share the turns.
#[derive(Debug, Clone)]
pub struct Acceptor {
    tls: Reload<ServerConfig>,
    turns: Door,
    pool: Pool,
}

/// A connection under TLS.
pub type TlsSocket = TlsStream<Encrypted>;

/// What TLS sits on.
pub type Encrypted = Buffered<Attended<TcpStream>>;

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct Shaken {
    /// The connection. While the turn is held it is watched for silence.
    pub stream: TlsSocket,
    /// Its turn: dropped to let the next one in.
    pub turn: Slot,
    /// When the turn should be over.
    pub until: Instant,
}

/// Why there was no handshake.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Unshaken {
    /// A fixed label for metrics.
    pub cause: &'static str,
    /// The sentence.
    pub why: String,
    /// What was wrong with the handshake, where the client is to blame.
    pub fault: Option<Fault>,
    /// The connection, if an alert was written to it. It must be closed with care, so that the alert arrives.
    pub socket: Option<Encrypted>,
}

impl Acceptor {
    /// For a port at which at most so many connections wait.
    pub fn new(tls: Reload<ServerConfig>, pool: Pool, waiting: usize) -> Self {
        let patience = Some(PATIENCE);
        let limits = Limits { slots: HANDSHAKES, for_one: usize::MAX, waiting, patience };
        Self { tls, turns: Door::new(limits), pool }
    }

    /// Waits for the first byte, then for the turn, then does the handshake. `slot` is the connection's place at its
    /// entrance: it counts as busy from the first byte on. Cancel safe: a dropped call gives its turn back.
    ///
    /// # Errors
    ///
    /// The client stayed silent, too many others wait, the turn was given to another source, or TLS failed.
    pub async fn accept(&self, socket: TcpStream, from: SocketAddr, slot: &Slot) -> Result<Shaken, Unshaken> {
        // A peek, because the socket may be reported readable before a byte is there.
        if timeout(FIRST_BYTE, socket.peek(&mut [0])).await.is_err() {
            return Err(Unshaken::new("silent", format!("nothing came within {FIRST_BYTE:?}")));
        }
        slot.busy();
        let Ok(turn) = self.turns.enter(&Source::of(from.ip())).await else {
            return Err(Unshaken::new("too_many", "too many wait for their TLS handshake"));
        };
        if socket.ready(Interest::READABLE).await.is_ok_and(|ready| ready.is_read_closed()) {
            return Err(Unshaken::new("gone", "the client left before its turn"));
        }
        // Boxed, so that those who wait above do not take its room, nor a link that comes of it.
        Box::pin(self.shake(socket, turn)).await
    }

    async fn shake(&self, socket: TcpStream, turn: Slot) -> Result<Shaken, Unshaken> {
        let until = Instant::now() + TURN;
        // The turn counts as silent only while this side waits for the client: one that waits for us keeps it.
        let socket = Buffered::new(turn.attend(socket), self.pool.clone());
        let handshake = TlsAcceptor::from(self.tls.load()).accept(socket).into_fallible();
        let lost = turn.lost();
        let shaken = tokio::select! {
            biased;
            () = lost.cancelled() => return Err(Unshaken::new("gave_way", "gave way in its TLS handshake")),
            shaken = timeout_at(until, handshake) => shaken,
        };
        match shaken {
            Ok(Ok(stream)) => Ok(Shaken { stream, turn, until }),
            Ok(Err((error, socket))) => {
                let fault = Fault::of(&error);
                let failed = Unshaken::new("tls", format!("the client's TLS handshake failed: {fault}"));
                Err(Unshaken { socket: Some(socket), fault: Some(fault), ..failed })
            }
            Err(_) => Err(Unshaken::new("tls_too_slow", "TLS handshake took too long")),
        }
    }
}

impl Shaken {
    /// The names in the certificate that the client has shown: its CN, then its DNS names; `None` if it has shown none.
    pub fn names(&self) -> Option<Vec<String>> {
        let shown = self.stream.get_ref().1.peer_certificates()?;
        Some(shown.first().map(|leaf| leaf::names(leaf)).unwrap_or_default())
    }
}

impl Unshaken {
    fn new(cause: &'static str, why: impl Into<String>) -> Self {
        Self { cause, why: why.into(), fault: None, socket: None }
    }
}

/// Connections at once that have their turn.
pub const HANDSHAKES: usize = 1000;

/// Who has its turn loses it to a waiting one only after this silence.
const PATIENCE: Duration = Duration::from_secs(3);

/// Time from the connection to the first byte of its handshake. A crowd's may come late; who is silent gives way to others
/// much sooner.
const FIRST_BYTE: Duration = Duration::from_secs(10);

/// Time that a turn lasts.
const TURN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::tests::{Authority, SetTime, client, server, server_at};
    use crate::net::tls::{ClientCertificates, Trust, server_name};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::HandshakeKind;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    fn slot(from: SocketAddr) -> Slot {
        Door::new(Limits::slots(1)).try_enter(&Source::of(from.ip())).unwrap()
    }

    #[tokio::test]
    async fn a_session_is_resumed_for_as_long_as_the_clients_own_certificate_is_valid() {
        let (ca, clock) = (Authority::new("ca"), SetTime(Arc::new(AtomicU64::new(YEAR_2029))));
        let clients = ClientCertificates::Required(ca.ca());
        let config = server_at(ca.issue("s", "a.b"), clients, &clock);
        let acceptor = Acceptor::new(Reload::fixed(config), Pool::new(), 9);
        let shows = ca.issue_for("c", "pod", 2020..2030);
        // What stands behind its own may be over: an authority's of before, say.
        let others = [&shows, &ca.issue_for("o", "other", 2020..2021)];
        let chain = others.map(|one| std::fs::read_to_string(&one.cert).unwrap()).concat();
        std::fs::write(&shows.cert, chain).unwrap();
        let connector = TlsConnector::from(client(Trust::Ca(ca.ca()), Some(shows)).load());
        let from = "192.0.2.1:1".parse().unwrap();
        let slot = slot(from);
        let handshake = async || {
            let (near, served) = pair().await;
            let connect = async {
                let mut near = connector.connect(server_name("a.b").unwrap(), near).await.unwrap();
                // With what comes behind the handshake a session is resumed.
                let _ = near.read_u8().await;
                near.get_ref().1.handshake_kind().unwrap()
            };
            let accept = async {
                let mut shaken = acceptor.accept(served, from, &slot).await?;
                shaken.stream.write_all(b"x").await.unwrap();
                Ok::<_, Unshaken>(shaken.names())
            };
            let (accepted, kind) = tokio::join!(accept, connect);
            (accepted.map_err(|unshaken| unshaken.to_string()), kind)
        };
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed, HandshakeKind::Resumed] {
            let (accepted, kind) = handshake().await;
            assert!(accepted.unwrap().unwrap().contains(&"pod".to_owned()));
            assert_eq!(kind, expected);
        }
        clock.0.store(YEAR_2029 + 2 * 366 * 24 * 3600, Relaxed);
        for _ in 0..2 {
            let (accepted, kind) = handshake().await;
            assert!(accepted.is_err());
            assert_eq!(kind, HandshakeKind::Full, "so that one with a new certificate is let in");
        }
    }

    /// The middle of that year.
    const YEAR_2029: u64 = 1_877_000_000;

    #[tokio::test]
    async fn who_has_left_while_it_waited_costs_no_handshake() {
        let ca = Authority::new("ca");
        let limits = Limits { slots: 1, for_one: usize::MAX, waiting: 9, patience: None };
        let acceptor = Acceptor {
            tls: server(ca.issue("s", "a.b"), ClientCertificates::Anonymous),
            turns: Door::new(limits),
            pool: Pool::new(),
        };
        let from: SocketAddr = "192.0.2.1:1".parse().unwrap();
        let turn = acceptor.turns.try_enter(&Source::of(from.ip())).unwrap();
        let (mut leaves, served) = pair().await;
        leaves.write_all(&[22]).await.unwrap();
        let slot = slot(from);
        let its_turn = async {
            drop(leaves);
            // The runtime hears of this pair no sooner than of that end.
            pair().await;
            drop(turn);
        };
        let (accepted, ()) = tokio::join!(acceptor.accept(served, from, &slot), its_turn);
        assert_eq!(accepted.unwrap_err().cause, "gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_handshake_gives_way_to_another_source_and_silence_ends_by_itself() {
        let ca = Authority::new("ca");
        let limits = Limits { slots: 1, for_one: usize::MAX, waiting: 9, patience: Some(PATIENCE) };
        let acceptor = Acceptor {
            tls: server(ca.issue("s", "a.b"), ClientCertificates::Anonymous),
            turns: Door::new(limits),
            pool: Pool::new(),
        };
        let (slow, other) = ("192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap());
        let (mut stalls, served) = pair().await;
        stalls.write_all(&[22]).await.unwrap();
        let (slow_slot, other_slot) = (slot(slow), slot(other));
        let first = acceptor.accept(served, slow, &slow_slot);
        let second = async {
            // The first one has its turn by then.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let (speaks, served) = pair().await;
            let connect = TlsConnector::from(client(Trust::Ca(ca.ca()), None).load());
            let connects = connect.connect(server_name("a.b").unwrap(), speaks);
            let (accepted, connected) = tokio::join!(acceptor.accept(served, other, &other_slot), connects);
            connected.and(accepted.map_err(std::io::Error::other)).map(|shaken| shaken.names())
        };
        let (first, second) = tokio::join!(first, second);
        assert_eq!((first.unwrap_err().cause, second.unwrap()), ("gave_way", None));

        let (_silent, served) = pair().await;
        let begun = Instant::now();
        assert_eq!(acceptor.accept(served, slow, &slow_slot).await.unwrap_err().cause, "silent");
        assert_eq!(begun.elapsed().as_secs(), FIRST_BYTE.as_secs());
    }
}
