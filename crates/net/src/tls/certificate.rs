//! Certificates: their names, their expiry, and errors that clients would only report as "bad certificate".

use std::net::IpAddr;
use std::ops::RangeInclusive;

use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::server::ParsedCertificate;
use x509_parser::asn1_rs::Tag;
use x509_parser::oid_registry::OID_KEY_TYPE_EC_PUBLIC_KEY;
use x509_parser::prelude::{ASN1Time, FromDer, GeneralName, X509Certificate, X509Version};

use tunnel_proto::names::Host;

/// Checks the certificate that a server will present.
///
/// Returns an error if no client would accept it, and warnings about dates and about what some clients reject. Each
/// text contains a hint.
pub(crate) fn check(der: &[u8]) -> Result<Vec<CertificateWarning>, String> {
    check_at(der, ASN1Time::now())
}

/// Parses a certificate.
fn parse(der: &[u8]) -> Result<X509Certificate<'_>, String> {
    let parsed = X509Certificate::from_der(der);
    parsed.map(|(_, cert)| cert).map_err(|cause| format!("is not an X.509 certificate: {cause}"))
}

/// Returns the common names of the subject.
fn common_names<'c>(cert: &'c X509Certificate<'_>) -> impl Iterator<Item = &'c str> {
    cert.subject().iter_common_name().filter_map(|name| name.as_str().ok())
}

/// Returns the subject alternative names.
pub fn alternative_names<'c, 'a>(cert: &'c X509Certificate<'a>) -> &'c [GeneralName<'a>] {
    let names = cert.subject_alternative_name().ok().flatten();
    names.map_or(&[], |names| names.value.general_names.as_slice())
}

/// Returns those of them that are DNS names.
fn dns<'c>(cert: &'c X509Certificate<'_>) -> impl Iterator<Item = &'c str> {
    alternative_names(cert).iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(*name),
        _ => None,
    })
}

/// Returns a DNS name or an IP address as text; `None` for any other name.
pub fn name_text(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => ip(bytes).map(|ip| ip.to_string()),
        _ => None,
    }
}

/// Returns the IP address that a name contains.
pub fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// Returns the certificate's first DNS name that is not a wildcard.
pub(crate) fn first_name(der: &[u8]) -> Option<ServerName<'static>> {
    let cert = parse(der).ok()?;
    dns(&cert).find_map(|name| ServerName::try_from(name.to_owned()).ok())
}

/// Returns the first name or address that a client can dial. Wildcards are skipped.
pub fn host_of(der: &[u8]) -> Option<Host> {
    let cert = parse(der).ok()?;
    alternative_names(&cert).iter().find_map(|name| match name {
        GeneralName::DNSName(name) => ServerName::try_from(*name).ok()?.to_str().parse().ok(),
        GeneralName::IPAddress(bytes) => ip(bytes).map(Host::Ip),
        _ => None,
    })
}

/// Returns the names of the certificate's owner: the common names of the subject, then the other DNS names.
pub(crate) fn names(der: &[u8]) -> Vec<String> {
    let Ok(cert) = parse(der) else { return Vec::new() };
    let common: Vec<_> = common_names(&cert).collect();
    let others = dns(&cert).filter(|name| !common.contains(name));
    common.iter().copied().chain(others).map(str::to_owned).collect()
}

/// Returns the DNS names.
pub(crate) fn dns_names(der: &[u8]) -> Vec<String> {
    parse(der).map(|cert| dns(&cert).map(str::to_owned).collect()).unwrap_or_default()
}

/// Returns true if the certificate claims to be an edge's: its subject is exactly [`EDGE_SUBJECT`].
pub(crate) fn is_edges(der: &[u8]) -> bool {
    let Ok(cert) = parse(der) else { return false };
    let subject = cert.subject();
    let (common_name, organization) = EDGE_SUBJECT;
    subject.iter_attributes().count() == 2
        && common_names(&cert).next() == Some(common_name)
        && subject.iter_organization().next().and_then(|name| name.as_str().ok()) == Some(organization)
}

/// Returns true if the certificate is for this name of a server.
pub(crate) fn is_for_server(der: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
    ParsedCertificate::try_from(der).is_ok_and(|cert| verify_server_name(&cert, name).is_ok())
}

/// Returns true if the certificate was issued for an edge, for its links or for its kubelet.
///
/// Common names are compared without case, like `names` in the config.
pub(crate) fn is_for_edges(der: &[u8]) -> bool {
    let Ok(cert) = parse(der) else { return false };
    common_names(&cert).any(|name| {
        let name = name.to_ascii_lowercase();
        name == EDGE_SUBJECT.0 || name.starts_with(KUBELET_CLIENT_PREFIX)
    })
}

/// Returns the certificate's validity in seconds since 1970.
pub(crate) fn validity(der: &[u8]) -> Result<RangeInclusive<u64>, String> {
    let cert = parse(der)?;
    let seconds = |time: ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
    let from = seconds(cert.validity().not_before);
    let to = seconds(cert.validity().not_after);
    Ok(from..=to.max(from))
}

/// A summary of a certificate and its current state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSummary {
    /// Common names, then DNS names.
    pub names: Vec<String>,
    /// The first DNS name that is not a wildcard.
    pub dns: Option<String>,
    /// The last day of validity, as `2026-11-22`.
    pub until: String,
    /// Days until expiry; negative after it.
    pub days: i64,
    /// The reasons why some or all clients reject it, each with a hint.
    pub oddities: Vec<CertificateWarning>,
}

/// The reason why some or all clients reject a certificate. Displays as a text that follows the file's name, with a
/// hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found}; {hint}")]
pub struct CertificateWarning {
    /// The property that it concerns.
    pub about: CertWarningKind,
    /// The problem.
    pub found: String,
    /// The hint.
    pub hint: &'static str,
}

/// The property of a certificate that a [`CertificateWarning`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertWarningKind {
    /// The usage that it was issued for.
    Kind,
    /// It has expired.
    Dates,
    /// It is not valid yet, or this machine's clock is wrong.
    Clock,
}

/// Summarises a server's certificate and its problems.
///
/// # Errors
///
/// No server can present it. The text follows the file's name.
pub fn summary(der: &[u8]) -> Result<CertificateSummary, String> {
    let now = ASN1Time::now();
    let oddities = check_at(der, now)?;
    let cert = parse(der)?;
    let end = cert.validity().not_after;
    Ok(CertificateSummary {
        names: names(der),
        dns: first_name(der).map(|name| name.to_str().into_owned()),
        until: day(end),
        days: (end.timestamp() - now.timestamp()).div_euclid(24 * 60 * 60),
        oddities,
    })
}

fn check_at(der: &[u8], now: ASN1Time) -> Result<Vec<CertificateWarning>, String> {
    let cert = parse(der)?;
    // No client accepts a certificate with one of these three properties, so a server with it must not start.
    if cert.version() != X509Version::V3 {
        return Err("is not X.509 version 3, which clients require; reissue it with subject \
                    alternative names, for example with `tunnel init`"
            .into());
    }
    if der.len() > MAX_CERTIFICATE {
        return Err(format!(
            "has {} bytes, but clients accept at most {MAX_CERTIFICATE}; reissue it with fewer names, or with a wildcard",
            der.len()
        ));
    }
    let key = &cert.public_key().algorithm;
    if key.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY
        && key.parameters.as_ref().is_none_or(|curve| curve.header.tag() != Tag::Oid)
    {
        return Err("describes its key's curve by numbers, which clients reject; make the key again with the curve's \
                    name, for example with `openssl ecparam -name prime256v1 -genkey`"
            .into());
    }
    // The other problems are for the doctor and a config check. They do not stop a start, because a renewed file needs
    // no restart.
    let mut odd = Vec::new();
    let mut is =
        |about, found: &str, hint| odd.push(CertificateWarning { about, found: found.to_owned(), hint });
    if cert.is_ca() {
        is(
            CertWarningKind::Kind,
            "is a CA certificate, which edges reject for a server",
            "issue a server certificate with it, for example with `tunnel init`",
        );
    }
    if alternative_names(&cert).is_empty() {
        is(
            CertWarningKind::Kind,
            "has no subject alternative names, which clients require",
            "reissue it with the names and addresses that clients use",
        );
    }
    if let Ok(Some(uses)) = cert.extended_key_usage()
        && !(uses.value.any || uses.value.server_auth)
    {
        let found = "is not valid for servers (extended key usage), so clients reject it";
        is(CertWarningKind::Kind, found, "reissue it with serverAuth");
    }
    let from = cert.validity().not_before;
    let to = cert.validity().not_after;
    if now < from {
        is(
            CertWarningKind::Clock,
            &format!("is not valid before {}", day(from)),
            "check this machine's clock, or wait",
        );
    }
    if now > to {
        let hint = "renew it where its CA's key is: `tunnel cert renew`; no restart is needed";
        is(CertWarningKind::Dates, &format!("expired on {}", day(to)), hint);
    }
    Ok(odd)
}

/// Formats a day, as `2026-11-22`.
fn day(time: ASN1Time) -> String {
    time.to_datetime().date().to_string()
}

/// The expiry of a file's certificates, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAfter {
    /// The earliest expiry.
    pub first: u64,
    /// The latest expiry.
    pub last: u64,
}

impl NotAfter {
    /// Reads a PEM text. Returns `None` if it contains no readable certificate.
    pub fn of(pem: &[u8]) -> Option<Self> {
        let certificates = rustls_pemfile::certs(&mut &*pem).filter_map(Result::ok).collect::<Vec<_>>();
        let ends = certificates.iter().filter_map(|der| validity(der).ok()).map(|valid| *valid.end());
        let first = ends.clone().min()?;
        let last = ends.max()?;
        Some(Self { first, last })
    }
}

/// Formats the day of a time in seconds since 1970, as `2026-11-22`.
pub fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| ASN1Time::from_timestamp(seconds).ok());
    time.map_or_else(|| "an invalid date".to_owned(), |time| time.to_datetime().date().to_string())
}

/// Maximum size of a certificate in bytes that TLS libraries accept; those of kubelets and servers have 1 or 2 KiB.
const MAX_CERTIFICATE: usize = 0xffff;

/// Common name and organization of edges' certificates. They are YurtTunnel's.
pub const EDGE_SUBJECT: (&str, &str) = ("tunnel-agent-client", "openyurt:yurttunnel");

/// Prefix of the common name of certificates that edges present to kubelets: `tunnel:NODE`. `tunnel init` creates them.
///
/// Used to recognise them, because kubelets' CA may also sign clients' certificates.
pub const KUBELET_CLIENT_PREFIX: &str = "tunnel:";

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};

    use super::*;

    fn made(change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let mut params = CertificateParams::new(["tunnel.cloud.io".to_owned()]).unwrap();
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2030, 1, 1);
        change(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    fn warned(change: impl FnOnce(&mut CertificateParams)) -> String {
        let now = ASN1Time::from_timestamp(1_750_000_000).unwrap();
        let odd = check_at(&made(change), now).unwrap();
        odd.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_valid_certificate_gives_no_warning() {
        assert_eq!(warned(|_| ()), "");
    }

    #[test]
    fn each_certificate_problem_gives_its_own_warning() {
        let ca = |p: &mut CertificateParams| p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        assert!(warned(ca).contains("is a CA certificate"));
        let uses = |p: &mut CertificateParams| {
            p.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        };
        assert!(warned(uses).contains("is not valid for servers"));
        assert!(warned(|p| p.subject_alt_names.clear()).contains("no subject alternative names"));
        assert!(warned(|p| p.not_after = date_time_ymd(2021, 1, 1)).contains("expired on"));
        assert!(warned(|p| p.not_before = date_time_ymd(2029, 1, 1)).contains("not valid before"));
        assert!(check(b"junk").unwrap_err().contains("not an X.509"));
    }

    #[test]
    fn certificate_names_are_the_common_name_and_the_dns_names() {
        let der = made(|p| {
            p.distinguished_name.push(rcgen::DnType::CommonName, "system:kube-apiserver");
            p.subject_alt_names.push(rcgen::SanType::IpAddress([10, 0, 0, 1].into()));
        });
        assert_eq!(names(&der), ["system:kube-apiserver", "tunnel.cloud.io"]);
        let der = made(|p| p.distinguished_name.push(rcgen::DnType::CommonName, "tunnel.cloud.io"));
        assert_eq!(names(&der), ["tunnel.cloud.io"]);
        assert_eq!(names(b"junk"), [""; 0]);
    }

    #[test]
    fn certificates_for_edges_are_recognised_by_their_common_name() {
        let of = |common_name: &str, organization: Option<&str>| {
            made(|p| {
                p.distinguished_name = rcgen::DistinguishedName::new();
                p.distinguished_name.push(rcgen::DnType::CommonName, common_name);
                if let Some(organization) = organization {
                    p.distinguished_name.push(rcgen::DnType::OrganizationName, organization);
                }
            })
        };
        for (name, organization, is_links) in [
            (EDGE_SUBJECT.0, Some(EDGE_SUBJECT.1), true),
            (EDGE_SUBJECT.0, Some("o"), false),
            (EDGE_SUBJECT.0, None, false),
            ("Tunnel-Agent-Client", Some(EDGE_SUBJECT.1), false),
            ("tunnel:node1", None, false),
            ("TUNNEL:node1", Some("system:masters"), false),
        ] {
            let der = of(name, organization);
            assert!(is_for_edges(&der), "{name}, {organization:?}");
            assert_eq!(is_edges(&der), is_links, "{name}, {organization:?}");
        }
        for name in ["tunnel-proxy-client", "tunnel", "kube-apiserver", "tunnel-agent-client-2"] {
            assert!(!is_for_edges(&of(name, Some(EDGE_SUBJECT.1))), "{name}");
        }
        assert!(!is_for_edges(b"junk"));
    }

    #[test]
    fn an_x509_version_1_certificate_is_refused() {
        // The version is the innermost integer of `[0] { INTEGER 2 }`. With 0, the certificate is parsed as version 1.
        let mut der = made(|_| ());
        let at = der.windows(5).position(|w| w == [0xa0, 3, 2, 1, 2]).unwrap();
        der[at + 4] = 0;
        assert!(check(&der).unwrap_err().contains("version 3"));
    }
}
