//! TLS handshakes with clients: a bounded number at once, each for a bounded time, and what was wrong in words.

use std::net::SocketAddr;
use std::time::Duration;
use std::{fmt, io};

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::{self, AlertDescription, CertificateError, ServerConfig};
use tokio_rustls::server::TlsStream;
use x509_parser::prelude::ASN1Time;

use crate::limiter::{ActivityTracked, FairLimiter, Limits, Permit, Source};
use crate::pool::Pool;
use crate::reload::Reload;
use crate::socket::Buffered;
use crate::tls::certificate;
use tunnel_base::logging::printable;

/// Does the handshakes of a port. Cheap to clone; clones share the turns.
#[derive(Debug, Clone)]
pub struct TlsHandshaker {
    tls: Reload<ServerConfig>,
    limiter: FairLimiter,
    pool: Pool,
}

/// A connection under TLS.
pub type TlsSocket = TlsStream<TlsIo>;

/// What TLS sits on.
pub type TlsIo = Buffered<ActivityTracked<TcpStream>>;

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct TlsAccepted {
    /// The connection. While the turn is held it is watched for silence.
    pub stream: TlsSocket,
    /// Its turn: dropped to let the next one in.
    pub permit: Permit,
    /// When the turn should be over.
    pub until: Instant,
}

/// Why there was no handshake.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct TlsAcceptError {
    /// A fixed label for metrics.
    pub cause: &'static str,
    /// The sentence.
    pub why: String,
    /// What was wrong with the handshake, where the client is to blame.
    pub fault: Option<HandshakeError>,
    /// The connection, if an alert was written to it. It must be closed with care, so that the alert arrives.
    pub socket: Option<TlsIo>,
}

impl TlsHandshaker {
    /// For a port at which at most so many connections wait.
    pub fn new(tls: Reload<ServerConfig>, pool: Pool, waiting: usize) -> Self {
        let patience = Some(HANDSHAKE_IDLE_TIMEOUT);
        let limits = Limits { permits: HANDSHAKES, per_source: usize::MAX, waiting, idle_timeout: patience };
        Self { tls, limiter: FairLimiter::new(limits), pool }
    }

    /// Waits for the first byte, then for the turn, then does the handshake. `slot` is the connection's place at its
    /// entrance: it counts as busy from the first byte on. Cancel safe: a dropped call gives its turn back.
    ///
    /// # Errors
    ///
    /// The client stayed silent, too many others wait, the turn was given to another source, or TLS failed.
    pub async fn accept(
        &self,
        socket: TcpStream,
        from: SocketAddr,
        slot: &Permit,
    ) -> Result<TlsAccepted, TlsAcceptError> {
        // A peek, because the socket may be reported readable before a byte is there.
        if timeout(FIRST_BYTE, socket.peek(&mut [0])).await.is_err() {
            return Err(TlsAcceptError::new("silent", format!("nothing came within {FIRST_BYTE:?}")));
        }
        slot.mark_active();
        let Ok(turn) = self.limiter.acquire(&Source::of(from.ip())).await else {
            return Err(TlsAcceptError::new("too_many", "too many wait for their TLS handshake"));
        };
        if socket.ready(Interest::READABLE).await.is_ok_and(|ready| ready.is_read_closed()) {
            return Err(TlsAcceptError::new("gone", "the client left before its turn"));
        }
        // Boxed, so that those who wait above do not take its room, nor a link that comes of it.
        Box::pin(self.shake(socket, turn)).await
    }

    async fn shake(&self, socket: TcpStream, turn: Permit) -> Result<TlsAccepted, TlsAcceptError> {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        // The turn counts as silent only while this side waits for the client: one that waits for us keeps it.
        let socket = Buffered::new(turn.track_activity(socket), self.pool.clone());
        let handshake = TlsAcceptor::from(self.tls.load()).accept(socket).into_fallible();
        let lost = turn.revoked();
        let shaken = tokio::select! {
            biased;
            () = lost.cancelled() => return Err(TlsAcceptError::new("gave_way", "gave way in its TLS handshake")),
            shaken = timeout_at(until, handshake) => shaken,
        };
        match shaken {
            Ok(Ok(stream)) => Ok(TlsAccepted { stream, permit: turn, until }),
            Ok(Err((error, socket))) => {
                let fault = HandshakeError::of(&error);
                let failed =
                    TlsAcceptError::new("tls", format!("the client's TLS handshake failed: {fault}"));
                Err(TlsAcceptError { socket: Some(socket), fault: Some(fault), ..failed })
            }
            Err(_) => Err(TlsAcceptError::new("tls_too_slow", "TLS handshake took too long")),
        }
    }
}

impl TlsAccepted {
    /// The names in the certificate that the client has shown: its CN, then its DNS names; `None` if it has shown none.
    pub fn names(&self) -> Option<Vec<String>> {
        let shown = self.stream.get_ref().1.peer_certificates()?;
        Some(shown.first().map(|leaf| certificate::names(leaf)).unwrap_or_default())
    }
}

impl TlsAcceptError {
    fn new(cause: &'static str, why: impl Into<String>) -> Self {
        Self { cause, why: why.into(), fault: None, socket: None }
    }
}

/// Connections at once that have their turn.
pub const HANDSHAKES: usize = 1000;

/// Who has its turn loses it to a waiting one only after this silence.
const HANDSHAKE_IDLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time from the connection to the first byte of its handshake. A crowd's may come late; who is silent gives way to others
/// much sooner.
const FIRST_BYTE: Duration = Duration::from_secs(10);

/// Time that a turn lasts.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

// What was wrong in a TLS handshake, in words that need no knowledge of the library's.

/// What was wrong. Displays as what was found, about the far end ("it"), without a remedy: that depends on whose
/// settings are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeError {
    /// Its certificate was signed by an authority that is not among those that are believed.
    UnknownIssuer,
    /// Its certificate is for these names, and not for the one that was wanted.
    Name(Vec<String>),
    /// Its certificate has expired: when, and what this machine's clock says.
    Expired(String, String),
    /// Its certificate is not valid yet: from when on it is, and what this machine's clock says.
    NotValidYet(String, String),
    /// Its certificate is an authority's own.
    CaUsedAsEndEntity,
    /// Its certificate may not be used by a server, or not by a client.
    Purpose,
    /// It does not speak TLS.
    NotTls,
    /// It speaks TLS, but not the protocol that is wanted over it.
    Protocol,
    /// It does not believe this end's certificate, or wants one.
    AlertReceived(AlertDescription),
    /// It closed the connection in the middle.
    Closed,
    /// Its certificate will not do for another reason, in the library's words.
    OtherCertificate(String),
    /// Something else, in the library's words.
    Other(String),
}

impl HandshakeError {
    /// What made a handshake fail.
    pub fn of(error: &io::Error) -> Self {
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
            return match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    Self::Closed
                }
                _ => Self::Other(error.to_string()),
            };
        };
        match tls {
            rustls::Error::InvalidCertificate(cause) => Self::of_certificate(cause),
            rustls::Error::InvalidMessage(_) => Self::NotTls,
            rustls::Error::NoApplicationProtocol
            | rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => Self::Protocol,
            rustls::Error::AlertReceived(alert) if is_of_a_certificate(*alert) => Self::AlertReceived(*alert),
            other => Self::Other(printable(&other.to_string())),
        }
    }

    fn of_certificate(cause: &CertificateError) -> Self {
        use CertificateError as E;
        match cause {
            E::UnknownIssuer | E::BadSignature => Self::UnknownIssuer,
            E::NotValidForNameContext { presented, .. } => {
                Self::Name(presented.iter().take(MAX_NAMES).map(|name| bare(name)).collect())
            }
            E::NotValidForName => Self::Name(Vec::new()),
            E::ExpiredContext { time, not_after } => Self::Expired(moment(*not_after), date(*time)),
            E::NotValidYetContext { time, not_before } => Self::NotValidYet(moment(*not_before), date(*time)),
            E::InvalidPurpose | E::InvalidPurposeContext { .. } => Self::Purpose,
            // No verifier but the one of clients says so.
            E::ApplicationVerificationFailure => Self::OtherCertificate(
                "its certificate was made for an edge, and an edge is no client".into(),
            ),
            // The library has no variant of its own for it.
            E::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => Self::CaUsedAsEndEntity,
            other => Self::OtherCertificate(printable(
                &rustls::Error::InvalidCertificate(other.clone()).to_string(),
            )),
        }
    }

    /// Whether it is the far end's certificate that will not do.
    pub fn is_of_the_certificate(&self) -> bool {
        matches!(
            self,
            Self::UnknownIssuer
                | Self::Name(_)
                | Self::Expired(..)
                | Self::NotValidYet(..)
                | Self::CaUsedAsEndEntity
                | Self::Purpose
                | Self::OtherCertificate(_)
        )
    }

    /// A fixed word, for what is counted or summed up.
    pub fn name(&self) -> &'static str {
        match self {
            Self::UnknownIssuer => "authority",
            Self::Name(_) => "name",
            Self::Expired(..) => "expired",
            Self::NotValidYet(..) => "too_early",
            Self::CaUsedAsEndEntity => "is_authority",
            Self::Purpose => "purpose",
            Self::NotTls => "no_tls",
            Self::Protocol => "protocol",
            Self::AlertReceived(_) => "disbelieves",
            Self::Closed => "closed",
            Self::OtherCertificate(_) => "certificate",
            Self::Other(_) => "other",
        }
    }
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownIssuer => {
                f.write_str("its certificate was signed by an authority that is not believed")
            }
            Self::Name(names) if names.is_empty() => f.write_str("its certificate is not for that name"),
            Self::Name(names) => {
                write!(f, "its certificate is for {}, and not for that name", names.join(", "))
            }
            Self::Expired(on, now) => {
                write!(f, "its certificate has expired on {on}, and this machine's clock says {now}")
            }
            Self::NotValidYet(from, now) => {
                write!(f, "its certificate is valid from {from} on, and this machine's clock says {now}")
            }
            Self::CaUsedAsEndEntity => {
                f.write_str("its certificate is an authority's own, which no server and no client may show")
            }
            Self::Purpose => {
                f.write_str("its certificate is not made for this end of a connection (extended key usage)")
            }
            Self::NotTls => f.write_str("it does not speak TLS"),
            Self::Protocol => f.write_str("it speaks TLS, but another protocol than this one over it"),
            Self::AlertReceived(alert) => {
                write!(f, "it does not take the certificate, or wants one (TLS alert {alert:?})")
            }
            Self::Closed => f.write_str("it closed the connection in the middle of the handshake"),
            Self::OtherCertificate(text) | Self::Other(text) => f.write_str(text),
        }
    }
}

/// Whether who sends it did not like a certificate.
fn is_of_a_certificate(alert: AlertDescription) -> bool {
    use AlertDescription as A;
    matches!(
        alert,
        A::BadCertificate
            | A::UnsupportedCertificate
            | A::CertificateRevoked
            | A::CertificateExpired
            | A::CertificateUnknown
            | A::UnknownCA
            | A::AccessDenied
            | A::CertificateRequired
    )
}

/// A name as people write it: the library shows `DnsName("a.b")` and `IpAddress(10.0.0.1)`.
fn bare(shown: &str) -> String {
    let inner = shown.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(shown);
    printable(inner.trim_matches('"'))
}

/// A moment to the minute, as `2026-11-22 12:00 UTC`.
fn moment(at: UnixTime) -> String {
    let hours = at.as_secs() % DAY / 3600;
    format!("{} {hours:02}:{:02} UTC", date(at), at.as_secs() % 3600 / 60)
}

/// A day, as `2026-11-22`: this machine's, so that a sentence that is told again is the same all day.
fn date(at: UnixTime) -> String {
    let at = i64::try_from(at.as_secs()).ok().and_then(|secs| ASN1Time::from_timestamp(secs).ok());
    at.map_or_else(|| "a date out of all bounds".to_owned(), |at| at.to_datetime().date().to_string())
}

const DAY: u64 = 24 * 60 * 60;

/// Names of a certificate that are told; it may have hundreds.
const MAX_NAMES: usize = 5;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::HandshakeKind;

    use crate::tls::testing::{Authority, client, server};
    use crate::tls::tests::{SetTime, server_at};
    use crate::tls::{ClientAuth, Trust, server_name};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    fn slot(from: SocketAddr) -> Permit {
        FairLimiter::new(Limits::slots(1)).try_acquire(&Source::of(from.ip())).unwrap()
    }

    #[tokio::test]
    async fn a_session_is_resumed_for_as_long_as_the_clients_own_certificate_is_valid() {
        let (ca, clock) = (Authority::new("ca"), SetTime(Arc::new(AtomicU64::new(YEAR_2029))));
        let clients = ClientAuth::Required(ca.ca());
        let config = server_at(ca.issue("s", "a.b"), clients, &clock);
        let acceptor = TlsHandshaker::new(Reload::fixed(config), Pool::new(), 9);
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
                Ok::<_, TlsAcceptError>(shaken.names())
            };
            let (accepted, kind) = tokio::join!(accept, connect);
            (accepted.map_err(|handshake_failures| handshake_failures.to_string()), kind)
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
        let limits = Limits { permits: 1, per_source: usize::MAX, waiting: 9, idle_timeout: None };
        let acceptor = TlsHandshaker {
            tls: server(ca.issue("s", "a.b"), ClientAuth::Anonymous),
            limiter: FairLimiter::new(limits),
            pool: Pool::new(),
        };
        let from: SocketAddr = "192.0.2.1:1".parse().unwrap();
        let turn = acceptor.limiter.try_acquire(&Source::of(from.ip())).unwrap();
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
        let limits = Limits {
            permits: 1,
            per_source: usize::MAX,
            waiting: 9,
            idle_timeout: Some(HANDSHAKE_IDLE_TIMEOUT),
        };
        let acceptor = TlsHandshaker {
            tls: server(ca.issue("s", "a.b"), ClientAuth::Anonymous),
            limiter: FairLimiter::new(limits),
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
        let started = Instant::now();
        assert_eq!(acceptor.accept(served, slow, &slow_slot).await.unwrap_err().cause, "silent");
        assert_eq!(started.elapsed().as_secs(), FIRST_BYTE.as_secs());
    }
}

#[cfg(test)]
mod fault_tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use crate::tls::testing::{Authority, client, server};
    use crate::tls::{ClientAuth, Identity, Trust, server_name};

    use super::*;

    /// What each end finds when a client that believes `trusted` wants `a.b`.
    async fn met(shown: Identity, trusted: &Authority) -> (Option<HandshakeError>, Option<HandshakeError>) {
        let (near, far) = duplex(1 << 16);
        let accept = TlsAcceptor::from(server(shown, ClientAuth::Anonymous).load());
        let connect = TlsConnector::from(client(Trust::Ca(trusted.ca()), None).load());
        let (ours, theirs) =
            tokio::join!(connect.connect(server_name("a.b").unwrap(), near), accept.accept(far));
        (ours.err().map(|e| HandshakeError::of(&e)), theirs.err().map(|e| HandshakeError::of(&e)))
    }

    #[tokio::test]
    async fn each_fault_of_a_certificate_has_its_words_at_both_ends() {
        let (ca, other) = (Authority::new("ca"), Authority::new("other"));
        assert_eq!(met(ca.issue("s", "a.b"), &ca).await, (None, None));
        let (ours, theirs) = met(ca.issue("s", "a.b"), &other).await;
        assert_eq!(
            (ours, theirs),
            (
                Some(HandshakeError::UnknownIssuer),
                Some(HandshakeError::AlertReceived(AlertDescription::UnknownCA))
            )
        );
        let (ours, _) = met(ca.issue("s", "c.d"), &ca).await;
        assert_eq!(ours, Some(HandshakeError::Name(vec!["c.d".into()])));
        let (ours, _) = met(ca.issue_for("s", "a.b", 1990..2001), &ca).await;
        let told = ours.unwrap().to_string();
        assert!(
            told.contains("has expired on 2001-01-01 00:00 UTC, and this machine's clock says 20"),
            "{told}"
        );
        let (ours, _) = met(ca.issue_for("s", "a.b", 2190..2201), &ca).await;
        let told = ours.unwrap().to_string();
        assert!(told.contains("valid from 2190-01-01 00:00 UTC on"), "{told}");
    }

    #[tokio::test]
    async fn a_far_end_without_tls_is_told_from_one_that_goes_away() {
        let ca = Authority::new("ca");
        for (says, fault) in [
            (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], HandshakeError::NotTls),
            (b"", HandshakeError::Closed),
        ] {
            let (near, mut far) = duplex(1 << 16);
            let connect = TlsConnector::from(client(Trust::Ca(ca.ca()), None).load());
            let plain = async {
                far.read_u8().await.unwrap();
                far.write_all(says).await.unwrap();
                far.shutdown().await.unwrap();
                far
            };
            let (shaken, _far) = tokio::join!(connect.connect(server_name("a.b").unwrap(), near), plain);
            assert_eq!(HandshakeError::of(&shaken.unwrap_err()), fault);
        }
    }

    #[test]
    fn names_are_shown_as_people_write_them() {
        assert_eq!(
            [bare("DnsName(\"a.b\")"), bare("IpAddress(10.0.0.1)"), bare("odd")],
            ["a.b", "10.0.0.1", "odd"]
        );
    }
}
