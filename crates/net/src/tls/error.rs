//! Errors of TLS handshakes, described without the library's terms.

use std::io;

use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::{self, AlertDescription, CertificateError, PeerMisbehaved};

use crate::tls::certificate::date;
use crate::tls::pem::SUPPORTED_KEYS;
use tunnel_proto::printable::printable;

/// The error of a TLS handshake.
///
/// Displays what was found about the remote ("it"), without a hint, because that depends on whose configuration is
/// concerned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsHandshakeError {
    /// The certificate was signed by a CA that is not trusted.
    #[error("its certificate was signed by a CA that this end does not trust")]
    UnknownIssuer,
    /// The certificate is for these names, and not for the expected one.
    #[error("{}", wrong_name(.0))]
    Name(Vec<String>),
    /// The certificate has expired: when, and the time of this machine's clock.
    #[error("its certificate expired on {0}; the time on this machine is {1}")]
    Expired(String, String),
    /// The certificate is not valid yet: since when it is, and the time of this machine's clock.
    #[error("its certificate is valid from {0}; the time on this machine is {1}")]
    NotValidYet(String, String),
    /// The certificate is a CA's own.
    #[error("its certificate is a CA certificate, which no server or client may present")]
    CaUsedAsEndEntity,
    /// The certificate is not valid for a server, or for a client.
    #[error("its certificate is not valid for this end of a connection (extended key usage)")]
    Purpose,
    /// The remote does not speak TLS.
    #[error("it does not speak TLS")]
    NotTls,
    /// The remote speaks TLS, but not the required protocol over it.
    #[error("it speaks TLS, but not the required protocol over it (ALPN)")]
    Protocol,
    /// The remote rejects this end's certificate, or requires one.
    #[error("it rejects the certificate, or requires one (TLS alert {0:?})")]
    AlertReceived(AlertDescription),
    /// The server is stopping.
    #[error("it is stopping")]
    Stopping,
    /// The remote closed the connection during the handshake.
    #[error("it closed the connection during the handshake")]
    Closed,
    /// The certificate is not valid for another reason, in the library's words.
    #[error("{0}")]
    OtherCertificate(String),
    /// Another error, in the library's words.
    #[error("{0}")]
    Other(String),
}

impl TlsHandshakeError {
    /// Returns the error that made a handshake fail.
    pub fn of(error: &io::Error) -> Self {
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
            return match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    Self::Closed
                }
                _ => Self::Other(error.to_string()),
            };
        };
        Self::of_tls(tls)
    }

    /// Returns the description of an error of the library.
    pub fn of_tls(error: &rustls::Error) -> Self {
        match error {
            rustls::Error::InvalidCertificate(cause) => Self::of_certificate(cause),
            rustls::Error::InvalidMessage(_) => Self::NotTls,
            rustls::Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName) => {
                Self::Other(BAD_SERVER_NAME.to_owned())
            }
            rustls::Error::NoApplicationProtocol
            | rustls::Error::PeerMisbehaved(PeerMisbehaved::SelectedUnofferedApplicationProtocol)
            | rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => Self::Protocol,
            rustls::Error::AlertReceived(AlertDescription::UserCanceled) => Self::Stopping,
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
            // The current time has no more precision than the day, so that a repeated error stays the same.
            E::ExpiredContext { time, not_after } => Self::Expired(moment(*not_after), date(time.as_secs())),
            E::NotValidYetContext { time, not_before } => {
                Self::NotValidYet(moment(*not_before), date(time.as_secs()))
            }
            E::InvalidPurpose | E::InvalidPurposeContext { .. } => Self::Purpose,
            E::UnsupportedSignatureAlgorithmContext { .. }
            | E::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => Self::OtherCertificate(format!(
                "its certificate, or that of its CA, has a signature that is not supported; expected \
                 {SUPPORTED_KEYS}, with SHA-256 or longer"
            )),
            // Only the verifier of clients returns this.
            E::ApplicationVerificationFailure => Self::OtherCertificate(
                "its certificate was issued for an edge, which must not act as a client".into(),
            ),
            // The library has no separate variant for it.
            E::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => Self::CaUsedAsEndEntity,
            other => Self::OtherCertificate(printable(
                &rustls::Error::InvalidCertificate(other.clone()).to_string(),
            )),
        }
    }

    /// Returns true if the error concerns the remote's certificate.
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

    /// Returns a fixed word for metrics and summaries.
    pub fn name(&self) -> &'static str {
        match self {
            Self::UnknownIssuer => "unknown_issuer",
            Self::Name(_) => "name",
            Self::Expired(..) => "expired",
            Self::NotValidYet(..) => "not_valid_yet",
            Self::CaUsedAsEndEntity => "ca_used_as_end_entity",
            Self::Purpose => "wrong_purpose",
            Self::NotTls => "not_tls",
            Self::Protocol => "protocol",
            Self::AlertReceived(_) => "alert_received",
            Self::Stopping => "stopping",
            Self::Closed => "closed_by_remote",
            Self::OtherCertificate(_) => "certificate",
            Self::Other(_) => "other",
        }
    }
}

/// Returns the text about a certificate that is for these names, and not for the expected one.
fn wrong_name(names: &[String]) -> String {
    match names {
        [] => "its certificate is not for that name".to_owned(),
        names => format!("its certificate is for {}, and not for that name", names.join(", ")),
    }
}

/// The library accepts fewer server names than nodes may have.
const BAD_SERVER_NAME: &str = "its server name (SNI) is not valid for TLS: a label is empty or longer than 63 bytes, or \
                               the last label is a number";

/// Returns true if the sender of the alert rejected a certificate, or misses one.
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
            // Its signature is wrong: another CA of the same name has issued it.
            | A::DecryptError
    )
}

/// Returns a name without the library's notation, which is `DnsName("a.b")` and `IpAddress(10.0.0.1)`.
fn bare(shown: &str) -> String {
    let inner = shown.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(shown);
    printable(inner.trim_matches('"'))
}

/// Formats a time to the minute, as `2026-11-22 12:00 UTC`.
fn moment(at: UnixTime) -> String {
    let hours = at.as_secs() % DAY / 3600;
    format!("{} {hours:02}:{:02} UTC", date(at.as_secs()), at.as_secs() % 3600 / 60)
}

const DAY: u64 = 24 * 60 * 60;

/// Maximum number of reported names of a certificate, which may have hundreds.
const MAX_NAMES: usize = 5;

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::TlsConnector;

    use crate::tls::testing::{TestCa, client, server};
    use crate::tls::{ClientAuth, IdentityFiles, Trust, server_name};

    use super::*;

    /// Returns what each end finds when a client that trusts `trusted` expects `a.b`.
    async fn handshake_errors(
        shown: IdentityFiles,
        trusted: &TestCa,
    ) -> (Option<TlsHandshakeError>, Option<TlsHandshakeError>) {
        let (near, far) = duplex(1 << 16);
        let accept = server(shown, ClientAuth::Anonymous).load().acceptor();
        let connect = TlsConnector::from(client(Trust::Ca(trusted.ca()), None).load());
        let (ours, theirs) =
            tokio::join!(connect.connect(server_name("a.b").unwrap(), near), accept.accept(far));
        (ours.err().map(|e| TlsHandshakeError::of(&e)), theirs.err().map(|e| TlsHandshakeError::of(&e)))
    }

    #[tokio::test]
    async fn each_certificate_problem_has_its_own_handshake_error() {
        let (ca, other) = (TestCa::new("ca"), TestCa::new("other"));
        assert_eq!(handshake_errors(ca.issue("s", "a.b"), &ca).await, (None, None));
        let (ours, theirs) = handshake_errors(ca.issue("s", "a.b"), &other).await;
        assert_eq!(
            (ours, theirs),
            (
                Some(TlsHandshakeError::UnknownIssuer),
                Some(TlsHandshakeError::AlertReceived(AlertDescription::UnknownCA))
            )
        );
        let (ours, _) = handshake_errors(ca.issue("s", "c.d"), &ca).await;
        assert_eq!(ours, Some(TlsHandshakeError::Name(vec!["c.d".into()])));
        let (ours, _) = handshake_errors(ca.issue_for("s", "a.b", 1990..2001), &ca).await;
        let message = ours.unwrap().to_string();
        assert!(
            message.contains("expired on 2001-01-01 00:00 UTC; the time on this machine is 20"),
            "{message}"
        );
        let (ours, _) = handshake_errors(ca.issue_for("s", "a.b", 2190..2201), &ca).await;
        let message = ours.unwrap().to_string();
        assert!(message.contains("valid from 2190-01-01 00:00 UTC; the time"), "{message}");
    }

    #[tokio::test]
    async fn a_remote_without_tls_and_one_that_closes_have_different_errors() {
        let ca = TestCa::new("ca");
        for (sent, error) in [
            (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], TlsHandshakeError::NotTls),
            (b"", TlsHandshakeError::Closed),
        ] {
            let (near, mut far) = duplex(1 << 16);
            let connect = TlsConnector::from(client(Trust::Ca(ca.ca()), None).load());
            let plain = async {
                far.read_u8().await.unwrap();
                far.write_all(sent).await.unwrap();
                far.shutdown().await.unwrap();
                far
            };
            let (accepted, _far) = tokio::join!(connect.connect(server_name("a.b").unwrap(), near), plain);
            assert_eq!(TlsHandshakeError::of(&accepted.unwrap_err()), error);
        }
    }

    #[test]
    fn server_names_are_shown_without_their_type() {
        assert_eq!(
            [bare("DnsName(\"a.b\")"), bare("IpAddress(10.0.0.1)"), bare("odd")],
            ["a.b", "10.0.0.1", "odd"]
        );
    }
}
