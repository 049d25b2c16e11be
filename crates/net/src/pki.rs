//! Makes certificates for a private network: a CA, new or existing, and the certificates it signs for servers and
//! clients.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _,
};
use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, ParsedExtension, X509Certificate};

use crate::tls::certificate::{alternative_names, name_text};
use crate::tls::pem::{certs, private_key};
use tunnel_base::files;

/// A CA with its own key. Two CAs never trust each other's certificates.
#[derive(Debug)]
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    until: SystemTime,
}

/// A certificate and its key, both as PEM.
#[derive(derive_more::Debug)]
#[debug("IssuedCert({cert})")]
pub struct IssuedCert {
    cert: String,
    key: String,
}

/// A key that never leaves this machine, and the PKCS#10 request to sign a certificate for it.
#[derive(Debug)]
pub struct CertificateRequest {
    pem: String,
    key: KeyPair,
}

/// The error of a certificate or file that cannot be read or created.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PkiError(String);

impl From<rcgen::Error> for PkiError {
    fn from(cause: rcgen::Error) -> Self {
        Self(format!("cannot create a certificate: {cause}"))
    }
}

impl CertificateAuthority {
    /// Creates a CA with this common name.
    ///
    /// It and everything it signs are valid from an hour ago, because clocks differ, until `valid` from now.
    pub fn new(name: &str, valid: Duration) -> Result<Self, PkiError> {
        let key = KeyPair::generate()?;
        let until = SystemTime::now() + valid;
        let mut params = params(name, &[], until)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem, until })
    }

    /// Reads an existing CA from the first certificate of a PEM file and from that of its key. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or the certificate is not a CA's, is not valid now, or does not belong to the key.
    pub fn read(cert: &Path, key: &Path) -> Result<Self, PkiError> {
        let read = |path: &Path| {
            let content = files::read(path);
            content.map_err(|cause| PkiError(format!("cannot read {}: {cause}", path.display())))
        };
        let no = |why: &str| PkiError(format!("{} {why}", cert.display()));
        let pem = read(cert)?;
        let private = read(key)?;
        let certs = certs(cert, &pem).map_err(PkiError)?;
        let private = private_key(key, &private).map_err(PkiError)?;
        let der = certs.into_iter().next().ok_or_else(|| no("holds no certificate"))?;
        let (_, found) =
            X509Certificate::from_der(&der).map_err(|cause| no(&format!("is not a certificate: {cause}")))?;
        // Signing works with any certificate and key. Each remote would reject the results, without these reasons.
        if !found.is_ca() {
            return Err(no("is not a CA certificate; expected basicConstraints CA:TRUE"));
        }
        let validity = found.validity();
        if !validity.is_valid() {
            let from = validity.not_before;
            let to = validity.not_after;
            return Err(no(&format!("is valid from {from} to {to}, not now; check this machine's clock")));
        }
        let key = KeyPair::try_from(&private).map_err(|_| {
            no("comes with a key of a kind that cannot sign here; expected RSA, ECDSA with P-256 or P-384, or Ed25519")
        })?;
        if key.der_bytes() != found.public_key().subject_public_key.as_ref() {
            return Err(no("does not belong to the key; use the key that it was created with"));
        }
        let seconds = u64::try_from(validity.not_after.timestamp()).unwrap_or(0);
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let issuer = Issuer::from_ca_cert_der(&der, key)?;
        Ok(Self { issuer, pem: String::from_utf8_lossy(&pem).into_owned(), until })
    }

    /// Limits the validity of certificates that it signs to `valid` from now, and never beyond its own.
    #[must_use]
    pub fn signing_for(self, valid: Duration) -> Self {
        Self { until: self.until.min(SystemTime::now() + valid), ..self }
    }

    /// The CA's certificate as PEM. Anyone who must trust the CA needs it.
    #[must_use]
    pub fn cert(&self) -> &str {
        &self.pem
    }

    /// The CA's key as PEM. Anyone who holds it can sign certificates that are trusted wherever the CA is trusted.
    #[must_use]
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate for a server that clients reach by these DNS names and IP addresses.
    ///
    /// It is also valid for a client, because servers present theirs to each other.
    pub fn server(&self, names: &[impl ToString]) -> Result<IssuedCert, PkiError> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let common = names.first().cloned().unwrap_or_default();
        let mut params = params(&common, &names, self.until)?;
        params.extended_key_usages = vec![ServerAuth, ClientAuth];
        self.sign(params)
    }

    /// Issues a certificate for a client with this common name. It is not valid for a server.
    pub fn client(&self, name: &str) -> Result<IssuedCert, PkiError> {
        let mut params = params(name, &[], self.until)?;
        params.extended_key_usages = vec![ClientAuth];
        self.sign(params)
    }

    /// Issues a certificate with the subject, the names and the uses of an earlier one (PEM, leaf first), and a new
    /// key.
    ///
    /// # Errors
    ///
    /// The certificate cannot be read, or another CA has issued it.
    pub fn renew(&self, cert: &str) -> Result<IssuedCert, PkiError> {
        let no = |why: &str| PkiError(format!("the certificate {why}"));
        let der = first(cert).ok_or_else(|| no("holds no `BEGIN CERTIFICATE` block"))?;
        let parsed = X509Certificate::from_der(&der);
        let (_, found) = parsed.map_err(|_| no("is not an X.509 certificate"))?;
        let ours = first(&self.pem).ok_or_else(|| no("cannot be compared with the CA"))?;
        let parsed = X509Certificate::from_der(&ours);
        let (_, authority) = parsed.map_err(|_| no("cannot be compared with the CA"))?;
        if !is_issued_by(&found, &authority) {
            return Err(no("was issued by another CA"));
        }
        let common = found.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let names: Option<Vec<String>> = alternative_names(&found).iter().map(name_text).collect();
        let names = names.ok_or_else(|| no("has a name that is no DNS name or IP address"))?;
        let mut params = params(common.unwrap_or_default(), &names, self.until)?;
        let uses = found.extended_key_usage().ok().flatten();
        let uses = uses.map_or((false, false), |uses| (uses.value.server_auth, uses.value.client_auth));
        params.extended_key_usages = [(uses.0, ServerAuth), (uses.1, ClientAuth)]
            .into_iter()
            .filter(|(has, _)| *has)
            .map(|(_, it)| it)
            .collect();
        self.sign(params)
    }

    fn sign(&self, mut params: CertificateParams) -> Result<IssuedCert, PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?.pem();
        Ok(IssuedCert { cert, key: key.serialize_pem() })
    }
}

impl CertificateRequest {
    /// Creates a key, and a request for a certificate with this common name, organization, DNS names and IP addresses.
    pub fn new(common: &str, organization: &str, names: &[&str]) -> Result<Self, PkiError> {
        // The signer alone decides how long it is valid.
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let mut params = params(common, &names, SystemTime::now())?;
        params.distinguished_name.push(DnType::OrganizationName, organization);
        let key = KeyPair::generate()?;
        let pem = params.serialize_request(&key)?.pem()?;
        Ok(Self { pem, key })
    }

    /// The request as PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Combines the key with the certificates that the signer issued for it (PEM, leaf first).
    ///
    /// # Errors
    ///
    /// Fails if the text holds no certificate, or one for another key.
    pub fn signed(self, certificates: &str) -> Result<IssuedCert, PkiError> {
        let no = |why: &str| PkiError(format!("the issued certificate {why}"));
        let der =
            first(certificates).ok_or_else(|| no("cannot be read; expected a `BEGIN CERTIFICATE` block"))?;
        let (_, cert) =
            X509Certificate::from_der(&der).map_err(|_| no("cannot be read: not an X.509 certificate"))?;
        if cert.public_key().subject_public_key.as_ref() != self.key.der_bytes() {
            return Err(no("is for another key"));
        }
        Ok(IssuedCert { cert: certificates.to_owned(), key: self.key.serialize_pem() })
    }
}

impl IssuedCert {
    /// The certificate as PEM.
    #[must_use]
    pub fn cert(&self) -> &str {
        &self.cert
    }

    /// The key as PEM.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Writes both files and replaces existing ones. Only the owner can read the key. Blocks on the disk.
    pub fn write(&self, cert: &Path, key: &Path) -> Result<(), PkiError> {
        replace(cert, CERT_MODE, &self.cert).and_then(|()| replace(key, KEY_MODE, &self.key))
    }

    /// Writes both into one file and replaces an existing one, so that they always match.
    ///
    /// Only its owner can read the file. Blocks on the disk.
    pub fn write_together(&self, file: &Path) -> Result<(), PkiError> {
        let end = if self.cert.ends_with('\n') { "" } else { "\n" };
        replace(file, KEY_MODE, &format!("{}{end}{}", self.cert, self.key))
    }
}

/// Returns true if the CA has issued the certificate, by the ids of its key; CAs of this program share their name.
fn is_issued_by(cert: &X509Certificate<'_>, authority: &X509Certificate<'_>) -> bool {
    let issuer = cert.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0),
        _ => None,
    });
    let own = authority.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0),
        _ => None,
    });
    cert.issuer().as_raw() == authority.subject().as_raw()
        && (own.is_none() || issuer.is_none() || issuer == own)
}

/// Returns the first certificate of a PEM text.
fn first(pem: &str) -> Option<CertificateDer<'static>> {
    rustls_pemfile::certs(&mut pem.as_bytes()).next().and_then(Result::ok)
}

fn params(common: &str, names: &[String], until: SystemTime) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(names).map_err(|cause| {
        PkiError(format!(
            "cannot put {names:?} into a certificate: {cause}; use ASCII DNS names or IP addresses"
        ))
    })?;
    params.distinguished_name.push(DnType::CommonName, common);
    params.not_before = (SystemTime::now() - MAX_CLOCK_SKEW).into();
    params.not_after = until.into();
    Ok(params)
}

fn replace(path: &Path, mode: u32, text: &str) -> Result<(), PkiError> {
    let written = files::replace(path, mode, text.as_bytes(), |_| Ok(()));
    written.map_err(|cause| {
        let path = path.display();
        PkiError(format!("cannot write {path}: {cause}; check that its directory exists and is writable"))
    })
}

/// How far not-before lies in the past, so that a machine whose clock is slow by less accepts a new certificate at
/// once.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3600);
const CERT_MODE: u32 = 0o644;
const KEY_MODE: u32 = 0o600;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use x509_parser::prelude::GeneralName;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn der(pem: &str) -> Vec<u8> {
        rustls_pemfile::certs(&mut pem.as_bytes()).next().unwrap().unwrap().to_vec()
    }

    #[test]
    fn server_certificates_have_names_and_addresses_and_client_ones_a_common_name() {
        let authority = CertificateAuthority::new("ours", DAY).unwrap();
        let server = der(&authority.server(&["cloud.test", "10.0.0.1", "::1"]).unwrap().cert);
        let (_, server) = X509Certificate::from_der(&server).unwrap();
        let names = server.subject_alternative_name().unwrap().unwrap().value;
        let ip6 = std::net::Ipv6Addr::LOCALHOST.octets();
        let expected = [
            GeneralName::DNSName("cloud.test"),
            GeneralName::IPAddress(&[10, 0, 0, 1]),
            GeneralName::IPAddress(&ip6),
        ];
        assert_eq!(names.general_names, expected);
        let uses = server.extended_key_usage().unwrap().unwrap().value;
        assert!(uses.server_auth && uses.client_auth);

        let client = der(&authority.client("kube-apiserver").unwrap().cert);
        let (_, client) = X509Certificate::from_der(&client).unwrap();
        assert_eq!(client.subject().to_string(), "CN=kube-apiserver");
        assert!(client.subject_alternative_name().unwrap().is_none());
        let uses = client.extended_key_usage().unwrap().unwrap().value;
        assert!(uses.client_auth && !uses.server_auth);
        assert_eq!(client.issuer().to_string(), "CN=ours");
        assert!(!client.is_ca());
    }

    #[test]
    fn a_renewed_certificate_differs_only_in_key_and_validity() {
        let authority = CertificateAuthority::new("tunnel CA", DAY).unwrap();
        let server = authority.server(&["cloud.test", "10.0.0.1", "fd00::1"]).unwrap();
        let client = authority.client("kube-apiserver").unwrap();
        for before in [server, client] {
            let after = authority.renew(before.cert()).unwrap();
            assert_ne!((before.cert(), before.key()), (after.cert(), after.key()));
            let (before, after) = (der(before.cert()), der(after.cert()));
            let (_, before) = X509Certificate::from_der(&before).unwrap();
            let (_, after) = X509Certificate::from_der(&after).unwrap();
            assert_eq!(before.subject(), after.subject());
            assert_eq!(before.issuer(), after.issuer());
            let names = |cert: &X509Certificate<'_>| {
                let names = cert.subject_alternative_name().unwrap();
                names.map(|names| format!("{:?}", names.value.general_names))
            };
            assert_eq!(names(&before), names(&after));
            let uses = |cert: &X509Certificate<'_>| {
                let uses = cert.extended_key_usage().unwrap().unwrap().value.clone();
                (uses.server_auth, uses.client_auth)
            };
            assert_eq!(uses(&before), uses(&after));
        }
        let other = CertificateAuthority::new("tunnel CA", DAY).unwrap();
        let foreign = authority.renew(other.client("a").unwrap().cert()).unwrap_err().to_string();
        assert_eq!(foreign, "the certificate was issued by another CA");
        let junk = authority.renew("junk").unwrap_err().to_string();
        assert_eq!(junk, "the certificate holds no `BEGIN CERTIFICATE` block");
    }

    #[test]
    fn a_request_has_its_subject_and_accepts_only_a_certificate_for_its_key() {
        use x509_parser::prelude::X509CertificationRequest;
        let request = || {
            CertificateRequest::new("tunnel-proxy-client", "openyurt:yurttunnel", &["n1", "10.0.0.1"])
                .unwrap()
        };
        let ours = request();
        let pem = x509_parser::pem::parse_x509_pem(ours.pem().as_bytes()).unwrap().1;
        assert_eq!(pem.label, "CERTIFICATE REQUEST");
        let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
        let subject = csr.certification_request_info.subject.to_string();
        assert_eq!(subject, "CN=tunnel-proxy-client, O=openyurt:yurttunnel");

        let authority = CertificateAuthority::new("ours", DAY).unwrap();
        let sign = |request: &CertificateRequest| {
            let csr = rcgen::CertificateSigningRequestParams::from_pem(request.pem()).unwrap();
            csr.signed_by(&authority.issuer).unwrap().pem()
        };
        let (mine, other) = (sign(&ours), sign(&request()));
        for (foreign, why) in [(other.as_str(), "is for another key"), ("", "cannot be read")] {
            let refused = request().signed(foreign).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("both.pem");
        ours.signed(&mine).unwrap().write_together(&file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let both = std::fs::read_to_string(&file).unwrap();
        assert!(both.contains("BEGIN CERTIFICATE-----") && both.contains("PRIVATE KEY-----"));
    }

    #[test]
    fn certificates_are_valid_from_now_for_the_requested_time() {
        let authority = CertificateAuthority::new("ours", DAY).unwrap();
        let now = i64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs())
            .unwrap();
        for pem in [authority.cert(), &authority.client("c").unwrap().cert] {
            let der = der(pem);
            let (_, cert) = X509Certificate::from_der(&der).unwrap();
            let (from, to) = (cert.validity().not_before.timestamp(), cert.validity().not_after.timestamp());
            assert!((now - 3700..now - 3500).contains(&from), "{from}");
            assert!((now + 86_300..now + 86_500).contains(&to), "{to}");
        }
    }

    #[test]
    fn a_written_key_file_is_private_and_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("a.crt"), dir.path().join("a.key"));
        for file in [&key, &dir.path().join("a.key.new")] {
            fs::write(file, "older").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
        }
        let issued = CertificateAuthority::new("ours", DAY).unwrap().server(&["a.b"]).unwrap();
        issued.write(&cert, &key).unwrap();
        assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::read_to_string(&key).unwrap().starts_with("-----BEGIN PRIVATE KEY-----"));
        assert!(fs::read_to_string(&cert).unwrap().starts_with("-----BEGIN CERTIFICATE-----"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(!format!("{issued:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_loaded_ca_never_signs_beyond_its_own_expiry() {
        let first = CertificateAuthority::new("ours", DAY).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("ca.crt"), dir.path().join("ca.key"));
        fs::write(&cert, first.cert()).unwrap();
        fs::write(&key, first.key()).unwrap();
        let again = CertificateAuthority::read(&cert, &key).unwrap().signing_for(100 * DAY);
        let ends = |pem: &str| {
            let der = der(pem);
            X509Certificate::from_der(&der).unwrap().1.validity().not_after.timestamp()
        };
        let server = again.server(&["a.b"]).unwrap();
        assert_eq!((again.cert(), ends(server.cert())), (first.cert(), ends(first.cert())));
        let (der, ca) = (der(server.cert()), der(first.cert()));
        let (_, signed) = X509Certificate::from_der(&der).unwrap();
        let (_, ca) = X509Certificate::from_der(&ca).unwrap();
        assert_eq!(signed.issuer(), ca.subject());
        let short = CertificateAuthority::read(&cert, &key).unwrap().signing_for(DAY / 2);
        assert!(ends(short.server(&["a.b"]).unwrap().cert()) < ends(first.cert()) - 40_000);
    }

    #[test]
    fn an_unusable_ca_is_an_error_with_its_cause() {
        let (ours, others) = (
            CertificateAuthority::new("ours", DAY).unwrap(),
            CertificateAuthority::new("others", DAY).unwrap(),
        );
        let server = ours.server(&["a.b"]).unwrap();
        let over = CertificateAuthority::new("over", Duration::ZERO).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for (cert, key, expected) in [
            (ours.cert(), others.key(), "does not belong to the key"),
            (ours.cert(), "junk".to_owned(), "ca.key holds no private key"),
            (server.cert(), server.key().to_owned(), "is not a CA certificate"),
            ("junk", ours.key(), "holds no certificate"),
            (over.cert(), over.key(), "not now"),
        ] {
            let files = [dir.path().join("ca.crt"), dir.path().join("ca.key")];
            fs::write(&files[0], cert).unwrap();
            fs::write(&files[1], key).unwrap();
            let error = CertificateAuthority::read(&files[0], &files[1]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_error_contains_the_invalid_name_or_path() {
        let authority = CertificateAuthority::new("ours", DAY).unwrap();
        let error = authority.server(&["a.b", "wölkchen"]).unwrap_err().to_string();
        assert!(error.contains("wölkchen") && error.contains("ASCII DNS names"), "{error}");
        let missing = Path::new("/nowhere/at/all.crt");
        let error = authority.client("c").unwrap().write(missing, missing).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all.crt") && error.contains("directory"), "{error}");
    }
}
