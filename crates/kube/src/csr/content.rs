//! Content of a PKCS #10 text. A request that could be read in more than one way is marked as odd, because the
//! signer's parser may differ from ours.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use x509_parser::asn1_rs;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::{ParsedCriAttribute, X509CriAttribute};
use x509_parser::extensions::{GeneralName, ParsedExtension, X509Extension};
use x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use tunnel_net::tls::certificate::ip;

/// The parsed contents of a certificate request (PKCS #10) that the approver checks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrContent {
    /// Common names of the subject.
    pub common_names: Vec<String>,
    /// Organizations of the subject.
    pub organizations: Vec<String>,
    /// Alternative names that are DNS names.
    pub dns: Vec<String>,
    /// Alternative names that are addresses.
    pub ips: Vec<IpAddr>,
    /// Unexpected or ambiguous content, as a clause.
    pub odd: Option<&'static str>,
}

impl CsrContent {
    /// Reads a PEM-encoded PKCS#10 request. Returns `None` if it is invalid.
    pub fn read(pem: &[u8]) -> Option<Self> {
        let der = decoded(pem)?;
        let (rest, request) = X509CertificationRequest::from_der(&der).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let info = &request.certification_request_info;
        let mut content = Self { odd: oddity_of(&info.subject), ..Self::default() };
        content.common_names = texts(info.subject.iter_common_name())?;
        content.organizations = texts(info.subject.iter_organization())?;
        let mut extensions = Vec::new();
        // Of several requests or lists of names, the signer might use another than this program has checked.
        for (n, attribute) in info.iter_attributes().enumerate() {
            match requested(attribute) {
                Some(requested) if n == 0 => extensions.extend(requested),
                _ => content.odd = Some("it has attributes other than one extension request"),
            }
        }
        for (n, extension) in names(&extensions).enumerate() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) if n == 0 => {
                    names.general_names.iter().for_each(|name| content.take(name));
                }
                _ => content.odd = Some("its alternative names are ambiguous"),
            }
        }
        Some(content)
    }

    fn take(&mut self, name: &GeneralName<'_>) {
        match name {
            GeneralName::DNSName(name) => self.dns.push((*name).to_owned()),
            GeneralName::IPAddress(bytes) => match ip(bytes) {
                Some(ip) => self.ips.push(ip),
                None => self.odd = Some("one of its addresses is invalid"),
            },
            _ => self.odd = Some("it has alternative names that are neither DNS names nor addresses"),
        }
    }
}

/// Returns the DER content of a PEM text that holds exactly one block.
fn decoded(pem: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(pem).ok()?.trim();
    let body = text.strip_prefix("-----BEGIN CERTIFICATE REQUEST-----")?;
    let body = body.strip_suffix("-----END CERTIFICATE REQUEST-----")?;
    let plain: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    STANDARD.decode(plain).ok()
}

/// Returns `None` if a value has an unsupported string encoding.
fn texts<'a>(
    values: impl Iterator<Item = &'a x509_parser::x509::AttributeTypeAndValue<'a>>,
) -> Option<Vec<String>> {
    values.map(|value| value.as_str().ok().map(str::to_owned)).collect()
}

/// Returns the reason if the subject has attributes other than common names and organizations.
fn oddity_of(subject: &X509Name<'_>) -> Option<&'static str> {
    let known = subject.iter_common_name().count() + subject.iter_organization().count();
    (subject.iter_attributes().count() != known).then_some("its subject has more than a CN and an O")
}

/// Returns the extensions that an attribute requests. Returns `None` for any other attribute, and for one with several
/// values, because the parser returns only the first.
pub(super) fn requested<'a>(attribute: &'a X509CriAttribute<'a>) -> Option<&'a [X509Extension<'a>]> {
    let ParsedCriAttribute::ExtensionRequest(request) = attribute.parsed_attribute() else { return None };
    let (read, set) = asn1_rs::Header::from_der(attribute.value).ok()?;
    let whole = set.length().definite().ok()? == read.len();
    whole.then_some(&request.extensions)
}

pub(super) fn names<'a>(
    extensions: &'a [&'a X509Extension<'a>],
) -> impl Iterator<Item = &'a X509Extension<'a>> {
    extensions.iter().copied().filter(|extension| extension.oid == OID_X509_EXT_SUBJECT_ALT_NAME)
}

#[cfg(test)]
mod tests {
    use rcgen::{Attribute, CertificateParams, DnType, KeyPair, SanType};

    use tunnel_net::pki::CertificateRequest;

    use super::*;

    #[test]
    fn the_content_of_a_request_is_read() {
        let request = CertificateRequest::new(
            "tunnel-agent-client",
            "openyurt:yurttunnel",
            &["n1", "10.0.0.1", "fd00::1"],
        );
        let content = CsrContent::read(request.unwrap().pem().as_bytes()).unwrap();
        assert_eq!(content.common_names, ["tunnel-agent-client"]);
        assert_eq!(content.organizations, ["openyurt:yurttunnel"]);
        assert_eq!(content.dns, ["n1"]);
        assert_eq!(content.ips, ["10.0.0.1", "fd00::1"].map(|ip| ip.parse::<IpAddr>().unwrap()));
        assert_eq!(content.odd, None);
        let bare = CertificateRequest::new("tunnel-proxy-client", "openyurt:yurttunnel", &[]).unwrap();
        let bare = CsrContent::read(bare.pem().as_bytes()).unwrap();
        assert!(bare.dns.is_empty() && bare.ips.is_empty() && bare.odd.is_none());
    }

    #[test]
    fn an_invalid_request_is_not_read() {
        let request = CertificateRequest::new("a", "b", &["n1"]).unwrap().pem().to_owned();
        let more = format!("{request}{request}");
        let before = format!("x\n{request}");
        let cut = request.replacen("MI", "", 1);
        for text in ["", "junk", &more, &before, &cut, "-----BEGIN CERTIFICATE REQUEST-----"] {
            assert_eq!(CsrContent::read(text.as_bytes()), None, "{text}");
        }
        assert_eq!(CsrContent::read(b"\xff"), None);
    }

    /// Returns the oddity of a request with these parameters and additional attributes.
    fn odd(change: impl FnOnce(&mut CertificateParams), more: Vec<Attribute>) -> Option<&'static str> {
        let mut params = CertificateParams::new(["n1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "a");
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let pem = params.serialize_request_with_attributes(&key, more).unwrap().pem().unwrap();
        CsrContent::read(pem.as_bytes()).unwrap().odd
    }

    #[test]
    fn an_ambiguous_request_is_odd() {
        assert_eq!(odd(|_| (), Vec::new()), None);
        let unit = |p: &mut CertificateParams| p.distinguished_name.push(DnType::OrganizationalUnitName, "u");
        assert!(odd(unit, Vec::new()).unwrap().contains("subject"));
        let mail = |p: &mut CertificateParams| {
            p.subject_alt_names.push(SanType::Rfc822Name("a@b.c".try_into().unwrap()));
        };
        assert!(odd(mail, Vec::new()).unwrap().contains("neither DNS names"));
        // A second extension request, which signers written in Go read as well.
        let extension_request: &[u64] = &[1, 2, 840, 113_549, 1, 9, 14];
        let san: &[u8] = &[0x30, 0x0d, 0x30, 0x0b, 6, 3, 0x55, 0x1d, 0x11, 4, 4, 0x30, 2, 0x82, 0];
        let values = [&[0x31, 15][..], san].concat();
        let second = Attribute { oid: extension_request, values: values.clone() };
        assert!(odd(|_| (), vec![second]).unwrap().contains("attributes other"));
        // Two values in one attribute.
        let two = Attribute { oid: extension_request, values: [&[0x31, 30][..], san, san].concat() };
        let alone = |p: &mut CertificateParams| p.subject_alt_names.clear();
        assert!(odd(alone, vec![two]).unwrap().contains("attributes other"));
        let one = Attribute { oid: extension_request, values };
        assert_eq!(odd(alone, vec![one]), None);
    }
}
