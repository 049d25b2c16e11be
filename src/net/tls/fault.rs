//! What was wrong in a TLS handshake, in words that need no knowledge of the library's.

use std::fmt;
use std::io;

use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::{self, AlertDescription, CertificateError};
use x509_parser::prelude::ASN1Time;

use crate::telemetry::printable;

/// What was wrong. Displays as what was found, about the far end ("it"), without a remedy: that depends on whose
/// settings are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Its certificate was signed by an authority that is not among those that are believed.
    Authority,
    /// Its certificate is for these names, and not for the one that was wanted.
    Name(Vec<String>),
    /// Its certificate has expired: when, and what this machine's clock says.
    Expired(String, String),
    /// Its certificate is not valid yet: from when on it is, and what this machine's clock says.
    TooEarly(String, String),
    /// Its certificate is an authority's own.
    IsAuthority,
    /// Its certificate may not be used by a server, or not by a client.
    Purpose,
    /// It does not speak TLS.
    NoTls,
    /// It speaks TLS, but not the protocol that is wanted over it.
    Protocol,
    /// It does not believe this end's certificate, or wants one.
    Disbelieves(AlertDescription),
    /// It closed the connection in the middle.
    Closed,
    /// Its certificate will not do for another reason, in the library's words.
    OtherCertificate(String),
    /// Something else, in the library's words.
    Other(String),
}

impl Fault {
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
            rustls::Error::InvalidMessage(_) => Self::NoTls,
            rustls::Error::NoApplicationProtocol
            | rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => Self::Protocol,
            rustls::Error::AlertReceived(alert) if is_of_a_certificate(*alert) => Self::Disbelieves(*alert),
            other => Self::Other(printable(&other.to_string())),
        }
    }

    fn of_certificate(cause: &CertificateError) -> Self {
        use CertificateError as E;
        match cause {
            E::UnknownIssuer | E::BadSignature => Self::Authority,
            E::NotValidForNameContext { presented, .. } => {
                Self::Name(presented.iter().take(MOST_NAMES).map(|name| bare(name)).collect())
            }
            E::NotValidForName => Self::Name(Vec::new()),
            E::ExpiredContext { time, not_after } => Self::Expired(moment(*not_after), date(*time)),
            E::NotValidYetContext { time, not_before } => Self::TooEarly(moment(*not_before), date(*time)),
            E::InvalidPurpose | E::InvalidPurposeContext { .. } => Self::Purpose,
            // No verifier but the one of clients says so.
            E::ApplicationVerificationFailure => Self::OtherCertificate(
                "its certificate was made for an edge, and an edge is no client".into(),
            ),
            // The library has no variant of its own for it.
            E::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => Self::IsAuthority,
            other => Self::OtherCertificate(printable(
                &rustls::Error::InvalidCertificate(other.clone()).to_string(),
            )),
        }
    }

    /// Whether it is the far end's certificate that will not do.
    pub fn is_of_the_certificate(&self) -> bool {
        matches!(
            self,
            Self::Authority
                | Self::Name(_)
                | Self::Expired(..)
                | Self::TooEarly(..)
                | Self::IsAuthority
                | Self::Purpose
                | Self::OtherCertificate(_)
        )
    }

    /// A fixed word, for what is counted or summed up.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Authority => "authority",
            Self::Name(_) => "name",
            Self::Expired(..) => "expired",
            Self::TooEarly(..) => "too_early",
            Self::IsAuthority => "is_authority",
            Self::Purpose => "purpose",
            Self::NoTls => "no_tls",
            Self::Protocol => "protocol",
            Self::Disbelieves(_) => "disbelieves",
            Self::Closed => "closed",
            Self::OtherCertificate(_) => "certificate",
            Self::Other(_) => "other",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority => f.write_str("its certificate was signed by an authority that is not believed"),
            Self::Name(names) if names.is_empty() => f.write_str("its certificate is not for that name"),
            Self::Name(names) => {
                write!(f, "its certificate is for {}, and not for that name", names.join(", "))
            }
            Self::Expired(on, now) => {
                write!(f, "its certificate has expired on {on}, and this machine's clock says {now}")
            }
            Self::TooEarly(from, now) => {
                write!(f, "its certificate is valid from {from} on, and this machine's clock says {now}")
            }
            Self::IsAuthority => {
                f.write_str("its certificate is an authority's own, which no server and no client may show")
            }
            Self::Purpose => {
                f.write_str("its certificate is not made for this end of a connection (extended key usage)")
            }
            Self::NoTls => f.write_str("it does not speak TLS"),
            Self::Protocol => f.write_str("it speaks TLS, but another protocol than this one over it"),
            Self::Disbelieves(alert) => {
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
const MOST_NAMES: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::tests::{Authority, client, server};
    use crate::net::tls::{ClientCertificates, Identity, Trust, server_name};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    /// What each end finds when a client that believes `trusted` wants `a.b`.
    async fn met(shown: Identity, trusted: &Authority) -> (Option<Fault>, Option<Fault>) {
        let (near, far) = duplex(1 << 16);
        let accept = TlsAcceptor::from(server(shown, ClientCertificates::Anonymous).load());
        let connect = TlsConnector::from(client(Trust::Ca(trusted.ca()), None).load());
        let (ours, theirs) =
            tokio::join!(connect.connect(server_name("a.b").unwrap(), near), accept.accept(far));
        (ours.err().map(|e| Fault::of(&e)), theirs.err().map(|e| Fault::of(&e)))
    }

    #[tokio::test]
    async fn each_fault_of_a_certificate_has_its_words_at_both_ends() {
        let (ca, other) = (Authority::new("ca"), Authority::new("other"));
        assert_eq!(met(ca.issue("s", "a.b"), &ca).await, (None, None));
        let (ours, theirs) = met(ca.issue("s", "a.b"), &other).await;
        assert_eq!(
            (ours, theirs),
            (Some(Fault::Authority), Some(Fault::Disbelieves(AlertDescription::UnknownCA)))
        );
        let (ours, _) = met(ca.issue("s", "c.d"), &ca).await;
        assert_eq!(ours, Some(Fault::Name(vec!["c.d".into()])));
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
        for (says, fault) in [(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], Fault::NoTls), (b"", Fault::Closed)]
        {
            let (near, mut far) = duplex(1 << 16);
            let connect = TlsConnector::from(client(Trust::Ca(ca.ca()), None).load());
            let plain = async {
                far.read_u8().await.unwrap();
                far.write_all(says).await.unwrap();
                far.shutdown().await.unwrap();
                far
            };
            let (shaken, _far) = tokio::join!(connect.connect(server_name("a.b").unwrap(), near), plain);
            assert_eq!(Fault::of(&shaken.unwrap_err()), fault);
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
