//! TLS configs from files. They are rebuilt when the files change, and used for later handshakes.

pub mod certificate;
pub mod client_hello;
pub mod error;
pub mod handshake;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
mod tickets;
pub mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::NoServerSessionStorage;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{
    self, CipherSuite, ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite,
    SupportedProtocolVersion, version,
};
use tracing::warn;

#[cfg(doc)]
use crate::reload::FileWatcher;
use crate::reload::{Reload, ReloadError};
use crate::tls::certificate::SingleCertResolver;
use crate::tls::tickets::Tickets;
use crate::tls::verify::{ClientVerifier, LinkAuth, NoVerifier, PeerVerifier, ServerTls};
use tunnel_base::logging::printable;

/// The TLS config of a server: its files and options, before they are loaded.
#[derive(Debug, Clone)]
pub struct TlsServerConfig {
    /// The certificate and key to present.
    pub identity: Identity,
    /// Which certificates clients must present.
    pub clients: ClientAuth,
    /// Versions and cipher suites.
    pub offer: TlsParams,
    /// Application protocols in order of preference: `h2` for links, only `http/1.1` for HTTPS.
    pub alpn: Vec<Vec<u8>>,
}

/// The TLS config of a client: its files and options, before they are loaded.
#[derive(Debug, Clone)]
pub struct TlsClientConfig {
    /// Which servers are trusted.
    pub trust: Trust,
    /// The certificate and key to present to servers that request one.
    pub identity: Option<Identity>,
    /// Application protocols in order of preference.
    pub alpn: Vec<Vec<u8>>,
}

/// The PEM files of a certificate chain (leaf first) and its key. Both may be the same file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The chain.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// Which certificates a server requests from its clients.
#[derive(Debug, Clone)]
pub enum ClientAuth {
    /// No certificate is requested.
    Anonymous,
    /// Clients must present a certificate from a CA in this file that was not issued for an edge.
    Required(PathBuf),
    /// At the port for links: edges, users and peers may present certificates, each from their own CAs.
    Links(LinkAuth),
}

/// The servers that a TLS client trusts.
#[derive(Debug, Clone)]
pub enum Trust {
    /// Servers with a certificate from a CA in this file (one or several). The system's CAs are not used.
    Ca(PathBuf),
    /// Servers with a certificate from a CA that the system trusts.
    System,
    /// Any server: for loopback targets, where no third party is on the path, and where the operator allows it.
    NoVerify,
}

/// The reason why a TLS configuration cannot be used. Each text is for the operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The text is not one of Go's names of TLS versions.
    #[error("{0:?} is not a TLS version; expected VersionTLS12 or VersionTLS13")]
    Version(String),
    /// None of the cipher suites is supported.
    #[error(
        "none of the cipher suites {0:?} is supported; leave the list empty, or add \
             TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    )]
    NoSuite(String),
    /// The text is not a name that a certificate can contain.
    #[error("{0:?} is neither a DNS name nor an IP address; use a name in the server's certificate")]
    Name(String),
}

impl TlsServerConfig {
    /// Reads the files now. Logs warnings about the certificate now and whenever it changes.
    ///
    /// Call [`Reload::load`] for each handshake, and watch it with a [`FileWatcher`].
    pub fn load(self) -> Result<Reload<ServerTls>, ReloadError> {
        let mut paths = vec![self.identity.cert.clone(), self.identity.key.clone()];
        paths.extend(self.clients.files());
        Reload::new(paths, move |contents| match contents {
            [cert, key, cas @ ..] => self.config(cert, key, cas),
            _ => Err("a file is missing".into()),
        })
    }

    fn config(&self, cert: &[u8], key: &[u8], cas: &[Vec<u8>]) -> Result<ServerTls, String> {
        let provider = self.offer.provider();
        let identity = self.identity.certified(cert, key, &provider)?;
        for warning in
            identity.cert.first().map_or(Ok(Vec::new()), |leaf| certificate::check(leaf)).unwrap_or_default()
        {
            warn!(file = %self.identity.cert.display(), %warning, "problem with the server certificate");
        }
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(self.offer.versions())
            .map_err(text)?;
        let users = match &self.clients {
            ClientAuth::Links(links) => links.user_certs(&identity.cert),
            ClientAuth::Anonymous | ClientAuth::Required(_) => None,
        };
        let clients = self.clients.verifier(cas, &identity, provider)?;
        let builder = match clients.clone() {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let chain = identity.cert.clone();
        let shown = SingleCertResolver::new(identity, self.identity.cert.clone());
        let mut config = builder.with_cert_resolver(Arc::new(shown));
        config.alpn_protocols.clone_from(&self.alpn);
        // A session resumed by its id does not check whether its certificate is still valid; a session resumed by a
        // ticket does.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        // Tickets are stored by clients, so sessions that may be resumed use no memory here.
        config.ticketer = Arc::new(Tickets::new(&chain, Arc::clone(&config.time_provider))?);
        Ok(ServerTls::new(config, clients, users))
    }
}

impl TlsClientConfig {
    /// Reads the files now. Call [`Reload::load`] for each handshake, and watch it with a [`FileWatcher`].
    pub fn load(self) -> Result<Reload<ClientConfig>, ReloadError> {
        let identity = self.identity.iter().flat_map(|i| [i.cert.clone(), i.key.clone()]);
        let paths = identity.chain(self.trust.ca().cloned()).collect();
        Reload::new(paths, move |contents| match (&self.identity, contents) {
            (Some(identity), [cert, key, ca @ ..]) => self.config(Some((identity, cert, key)), ca.first()),
            (_, ca) => self.config(None, ca.first()),
        })
    }

    fn config(
        &self,
        identity: Option<(&Identity, &[u8], &[u8])>,
        ca: Option<&Vec<u8>>,
    ) -> Result<ClientConfig, String> {
        let provider = TlsParams::default().provider();
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(text)?;
        let builder = match (&self.trust, ca) {
            (Trust::Ca(path), Some(pem)) => builder.with_root_certificates(roots(path, pem)?),
            (Trust::Ca(path), None) => return Err(format!("{} is missing", path.display())),
            (Trust::System, _) => builder.with_root_certificates(system_roots()?),
            (Trust::NoVerify, _) => {
                let anyone = Arc::new(NoVerifier(Arc::clone(&provider)));
                builder.dangerous().with_custom_certificate_verifier(anyone)
            }
        };
        let mut config = match identity {
            Some((identity, cert, key)) => {
                let certified = identity.certified(cert, key, &provider)?;
                builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols.clone_from(&self.alpn);
        Ok(config)
    }
}

/// Parses the name to check a server's certificate against: a DNS name or an IP address.
///
/// An address must be among the certificate's addresses, and no SNI is sent for it.
pub fn server_name(text: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::Name(text.to_owned()))
}

impl Identity {
    fn certified(&self, cert: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<CertifiedKey, String> {
        let chain = certs(&self.cert, cert).map_err(text)?;
        let key = private_key(&self.key, key).map_err(text)?;
        if let Some(leaf) = chain.first() {
            certificate::check(leaf).map_err(|error| format!("{} {error}", self.cert.display()))?;
        }
        CertifiedKey::from_der(chain, key, provider).map_err(|cause| match cause {
            rustls::Error::InconsistentKeys(_) => format!(
                "the key in {} does not belong to the certificate in {}; replace both together",
                self.key.display(),
                self.cert.display()
            ),
            // The library has no separate variant for it.
            rustls::Error::General(_) => format!(
                "{} is damaged, or its kind of key is not supported; expected {SUPPORTED_KEYS}",
                self.key.display()
            ),
            cause => format!("{} and {}: {cause}", self.cert.display(), self.key.display()),
        })
    }
}

impl ClientAuth {
    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Anonymous => Vec::new(),
            Self::Required(ca) => vec![ca.clone()],
            Self::Links(links) => links.files(),
        }
    }

    /// Returns the verifier of clients' certificates, or `None` if no certificate is requested. `cas` are the contents
    /// of [`Self::files`].
    fn verifier(
        &self,
        cas: &[Vec<u8>],
        own: &CertifiedKey,
        provider: Arc<CryptoProvider>,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
        match (self, cas) {
            (Self::Required(path), [ca, ..]) => {
                Ok(Some(Arc::new(ClientVerifier::new(roots(path, ca)?, &provider)?)))
            }
            (Self::Links(links), _) => links.verifier(cas, &own.cert, provider),
            (Self::Anonymous | Self::Required(_), _) => Ok(None),
        }
    }
}

impl Trust {
    fn ca(&self) -> Option<&PathBuf> {
        match self {
            Self::Ca(ca) => Some(ca),
            Self::System | Self::NoVerify => None,
        }
    }
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let (_, ignored) = roots.add_parsable_certificates(certs(path, pem).map_err(text)?);
    if roots.is_empty() {
        return Err(format!("{} holds no usable CA certificate; expected X.509 version 3", path.display()));
    }
    if ignored > 0 {
        warn!(file = %path.display(), ignored, "unusable CA certificates ignored");
    }
    Ok(roots)
}

/// Returns the CAs that the system trusts.
fn system_roots() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let cause = found.errors.first().map(|cause| format!(" ({cause})")).unwrap_or_default();
        return Err(format!(
            "the system has no CA certificates{cause}; install ca-certificates, or name a CA file"
        ));
    }
    Ok(roots)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn text(cause: impl ToString) -> String {
    cause.to_string()
}

// The TLS versions and cipher suites of a server, from Go's names.

/// TLS versions and cipher suites. The default is TLS 1.2 and 1.3 with every suite of the library.
#[derive(Debug, Clone)]
pub struct TlsParams {
    provider: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
}

impl TlsParams {
    /// Parses `tls_min_version` and `tls_cipher_suites` in SuperEdge's spelling. Empty text means the default.
    ///
    /// TLS 1.3 and its suites are always enabled, as in Go. The second value contains warnings about deviations from
    /// the input: unsupported suites are ignored, versions below 1.2 become 1.2.
    pub fn parse(min_version: &str, suites: &str) -> Result<(Self, Vec<String>), TlsError> {
        let mut warnings = Vec::new();
        let mut versions = match min_version.trim() {
            "" | "VersionTLS12" => BOTH,
            "VersionTLS13" => NEWEST,
            old @ ("VersionTLS10" | "VersionTLS11") => {
                warnings
                    .push(format!("tls_min_version {old} is no longer supported, raised to VersionTLS12"));
                BOTH
            }
            other => return Err(TlsError::Version(other.to_owned())),
        };
        let mut provider = provider();
        if !suites.trim().is_empty() {
            let (supported, unknown) = chosen(&provider, suites);
            if supported.is_empty() {
                return Err(TlsError::NoSuite(suites.to_owned()));
            }
            warnings.extend(unknown.iter().map(|name| {
                format!("tls_cipher_suites: {name} is not supported (insecure or misspelt) and is ignored")
            }));
            provider.cipher_suites.retain(|suite| suite.tls13().is_some() || supported.contains(suite));
            if !supported.iter().any(|suite| suite.tls13().is_none()) {
                versions = NEWEST;
            }
        }
        Ok((Self { provider: Arc::new(provider), versions }, warnings))
    }

    pub(crate) fn provider(&self) -> Arc<CryptoProvider> {
        Arc::clone(&self.provider)
    }

    pub(crate) fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        self.versions
    }
}

impl Default for TlsParams {
    fn default() -> Self {
        Self { provider: Arc::new(provider()), versions: BOTH }
    }
}

/// Returns the library's provider, but prefers AES-128 with SHA-256 among TLS 1.3's suites.
///
/// AES-128 costs less per byte than AES-256. SHA-256 costs less per handshake than SHA-384, for which CPUs have no
/// instructions.
fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

/// Returns the supported suites of a list, and the names of the others.
fn chosen<'a>(provider: &CryptoProvider, list: &'a str) -> (Vec<SupportedCipherSuite>, Vec<&'a str>) {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match provider.cipher_suites.iter().find(|suite| has_go_name(suite, name)) {
            Some(suite) => known.push(*suite),
            None => unknown.push(name),
        }
    }
    (known, unknown)
}

/// Returns true if a suite has this name in Go.
///
/// Go writes `TLS_` where the library writes `TLS13_`, and has two old names without their `_SHA256`.
fn has_go_name(suite: &SupportedCipherSuite, name: &str) -> bool {
    let Some(ours) = suite.suite().as_str() else { return false };
    let ours = ours.strip_prefix("TLS13_").or_else(|| ours.strip_prefix("TLS_")).unwrap_or(ours);
    let name = name.strip_prefix("TLS_").unwrap_or(name);
    name == ours || (name.ends_with("_CHACHA20_POLY1305") && ours.strip_suffix("_SHA256") == Some(name))
}

const BOTH: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];
const NEWEST: &[&SupportedProtocolVersion] = &[&version::TLS13];

// TLS to peers: both servers present the certificate that they present to edges.

/// The TLS files of a server that dials peers.
#[derive(Debug, Clone)]
pub struct PeerTlsConfig {
    /// The server's certificate and key, the same as on its port.
    pub identity: Identity,
    /// The file of CAs that issue servers' certificates.
    pub ca: PathBuf,
    /// The DNS name in all servers' certificates. `None` means the first one in this server's certificate.
    pub name: Option<ServerName<'static>>,
}

/// The TLS configuration for dialling a peer.
#[derive(Debug)]
pub struct PeerTls {
    /// The client configuration: presents this server's certificate, and trusts the CAs.
    pub config: Arc<ClientConfig>,
    /// The name that the peer's certificate must contain.
    pub name: ServerName<'static>,
}

impl PeerTlsConfig {
    /// Reads the files now. Call [`Reload::load`] for each handshake, and watch it with a [`FileWatcher`].
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, or if peers would reject this server's certificate. The text contains a hint.
    ///
    /// Dates are not checked here, because the server's own port warns about them.
    pub fn load(self) -> Result<Reload<PeerTls>, ReloadError> {
        let paths = vec![self.identity.cert.clone(), self.identity.key.clone(), self.ca.clone()];
        let client = TlsClientConfig {
            trust: Trust::Ca(self.ca.clone()),
            identity: Some(self.identity),
            alpn: vec![b"h2".to_vec()],
        };
        let (ca_path, name) = (self.ca, self.name);
        Reload::new(paths, move |contents| {
            let ([cert, key, ca], Some(identity)) = (contents, &client.identity) else {
                return Err("a file is missing".into());
            };
            let own = certs(&identity.cert, cert).map_err(text)?;
            let provider = TlsParams::default().provider();
            let peers = PeerVerifier::new(roots(&ca_path, ca)?, name.as_ref(), &own, &provider)?;
            let config = client.config(Some((identity, cert, key)), Some(ca))?;
            Ok(PeerTls { config: Arc::new(config), name: peers.name().clone() })
        })
    }
}

// Reads certificates and keys from PEM files. Only this code uses the PEM library.

/// The reason why a PEM file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// The file is not PEM, or has a damaged block.
    #[error(
        "{} is damaged: {cause}; restore it from the original \
         (`openssl x509 -in FILE -noout -text` prints a certificate)", .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        cause: std::io::Error,
    },
    /// The file contains no certificate. Usual cause: the key's path instead of the certificate's.
    #[error(
        "{} holds no certificate: {found}; expected at least one `BEGIN CERTIFICATE` block{hint}", .path.display()
    )]
    NoCertificate {
        /// The file.
        path: PathBuf,
        /// What it contains.
        found: String,
        /// How to convert that, if it is known.
        hint: &'static str,
    },
    /// The file contains no private key. Usual causes: the wrong path, or a key with a passphrase.
    #[error(
        "{} holds no private key: {found}; expected a `BEGIN PRIVATE KEY` block without a passphrase{hint}",
        .path.display()
    )]
    NoKey {
        /// The file.
        path: PathBuf,
        /// What it contains.
        found: String,
        /// How to convert that, if it is known.
        hint: &'static str,
    },
}

/// Parses all certificates of a file, at least one. `path` is only used in the error.
pub fn certs(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let certs = rustls_pemfile::certs(&mut &*pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|cause| PemError::Damaged { path: path.into(), cause })?;
    if certs.is_empty() {
        let (found, hint) = content(pem, &CERTIFICATE_FORMS);
        return Err(PemError::NoCertificate { path: path.into(), found, hint });
    }
    Ok(certs)
}

/// Parses the first private key of a file: PKCS#8, PKCS#1 or SEC1. `path` is only used in the error.
pub fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, PemError> {
    let none = || {
        let (found, hint) = content(pem, &KEY_FORMS);
        PemError::NoKey { path: path.into(), found, hint }
    };
    if pem.windows(PASSPHRASE.len()).any(|bytes| bytes == PASSPHRASE.as_bytes()) {
        return Err(none());
    }
    let key = rustls_pemfile::private_key(&mut &*pem);
    key.map_err(|cause| PemError::Damaged { path: path.into(), cause })?.ok_or_else(none)
}

/// Describes a file without the expected block, and returns the hint for the first form that it contains.
fn content(pem: &[u8], forms: &[(&str, &'static str)]) -> (String, &'static str) {
    let text = String::from_utf8_lossy(pem);
    let labels =
        text.lines().filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"));
    let mut labels: Vec<_> = labels.take(MAX_LABELS).map(printable).collect();
    labels.dedup();
    let found = match labels.as_slice() {
        _ if pem.trim_ascii().is_empty() => "it is empty".to_owned(),
        _ if text.contains(PASSPHRASE) => "it has an encrypted block".to_owned(),
        [] if pem.first() == Some(&DER_SEQUENCE) => "it is a binary file (DER or PKCS #12)".to_owned(),
        [] => "it has no PEM block".to_owned(),
        labels => format!("it has a block {}", labels.join(", ")),
    };
    let is_in = |form: &str| {
        form == BINARY && found.contains(BINARY)
            || form == PASSPHRASE && text.contains(PASSPHRASE)
            || labels.iter().any(|label| label.contains(form))
    };
    (found.clone(), forms.iter().find(|(form, _)| is_in(form)).map_or("", |(_, hint)| hint))
}

/// Forms in which openssl writes certificates, by their label, and how to convert them.
const CERTIFICATE_FORMS: [(&str, &str); 6] = [
    (
        BINARY,
        "; convert it with `openssl x509 -inform DER -in OLD -out NEW`, or `openssl pkcs12 -in OLD -nokeys -out NEW`",
    ),
    ("PKCS7", "; convert it with `openssl pkcs7 -print_certs -in OLD -out NEW`"),
    ("CERTIFICATE REQUEST", "; a CA has to sign the request first"),
    ("TRUSTED CERTIFICATE", "; convert it with `openssl x509 -in OLD -out NEW`"),
    ("X509 CERTIFICATE", "; convert it with `openssl x509 -in OLD -out NEW`"),
    ("PRIVATE KEY", "; it may be the file of the key"),
];

/// The same for keys.
const KEY_FORMS: [(&str, &str); 5] = [
    (
        BINARY,
        "; convert it with `openssl pkey -inform DER -in OLD -out NEW`, or `openssl pkcs12 -in OLD -nocerts -nodes -out NEW`",
    ),
    (PASSPHRASE, "; remove the passphrase with `openssl pkey -in OLD -out NEW`"),
    ("ENCRYPTED PRIVATE KEY", "; remove the passphrase with `openssl pkey -in OLD -out NEW`"),
    ("PUBLIC KEY", "; this is only the public half of the key"),
    ("CERTIFICATE", "; it may be the file of the certificate"),
];

/// A form without labels.
const BINARY: &str = "binary";
/// A header in a block of an encrypted key, in openssl's traditional form.
const PASSPHRASE: &str = "Proc-Type: 4,ENCRYPTED";
/// First byte of every certificate and key in DER.
const DER_SEQUENCE: u8 = 0x30;
/// Maximum number of blocks that an error names.
const MAX_LABELS: usize = 5;

/// Kinds of keys that the library supports; openssl makes more.
pub const SUPPORTED_KEYS: &str = "RSA with 2048 to 8192 bits, ECDSA with P-256, P-384 or P-521, or Ed25519";

#[cfg(test)]
pub(crate) mod tests;

#[cfg(test)]
mod params_tests {
    use super::*;

    /// The list in SuperEdge's default configuration.
    const SHIPPED: &str = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,\
        TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,\
        TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305,TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305,\
        TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA,TLS_RSA_WITH_AES_128_CBC_SHA";

    fn old_suites(offer: &TlsParams) -> usize {
        offer.provider.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count()
    }

    #[test]
    fn superedges_default_list_gives_six_suites_and_warnings_about_the_rest() {
        let (offer, warnings) = TlsParams::parse("VersionTLS12", SHIPPED).unwrap();
        assert_eq!(old_suites(&offer), 6);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert_eq!(offer.provider.cipher_suites.len() - 6, 3, "suites of TLS 1.3 are always enabled");
    }

    #[test]
    fn empty_settings_select_the_default() {
        let (offer, warnings) = TlsParams::parse("", " ").unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (2, 6, 0));
    }

    #[test]
    fn tls13_aes_128_gcm_is_the_preferred_suite() {
        for offer in [TlsParams::default(), TlsParams::parse("", SHIPPED).unwrap().0] {
            let first = offer.provider.cipher_suites[0].suite();
            assert_eq!(first, CipherSuite::TLS13_AES_128_GCM_SHA256);
        }
    }

    #[test]
    fn old_versions_are_raised_with_a_warning_and_unknown_ones_are_refused() {
        let (offer, warnings) = TlsParams::parse("VersionTLS10", "").unwrap();
        assert_eq!((offer.versions.len(), warnings.len()), (2, 1));
        assert_eq!(TlsParams::parse("VersionTLS13", "").unwrap().0.versions.len(), 1);
        assert!(matches!(TlsParams::parse("1.2", ""), Err(TlsError::Version(_))));
    }

    #[test]
    fn a_list_without_a_usable_suite_is_an_error() {
        assert!(matches!(TlsParams::parse("", "TLS_RSA_WITH_RC4_128_SHA"), Err(TlsError::NoSuite(_))));
    }

    #[test]
    fn a_list_of_tls_1_3_suites_only_offers_no_older_version() {
        let (offer, warnings) = TlsParams::parse("", "TLS_AES_128_GCM_SHA256").unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (1, 0, 0));
    }
}

#[cfg(test)]
mod pem_tests {
    use super::*;

    #[test]
    fn certificates_and_key_are_found_in_one_file() {
        let made = rcgen::generate_simple_self_signed(["edge".into()]).unwrap();
        let both = format!("{}{}{}", made.cert.pem(), made.signing_key.serialize_pem(), made.cert.pem());
        assert_eq!(certs(Path::new("x"), both.as_bytes()).unwrap().len(), 2);
        assert!(private_key(Path::new("x"), both.as_bytes()).is_ok());
    }

    #[test]
    fn an_unusable_pem_file_is_an_error_with_its_name_and_cause() {
        let path = Path::new("cloud.crt");
        let block = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
        let no_cert = |label: &str| certs(path, block(label).as_bytes()).unwrap_err();
        let no_key = |label: &str| private_key(path, block(label).as_bytes()).unwrap_err();
        let encrypted =
            b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\nAAAA\n\
                          -----END RSA PRIVATE KEY-----\n";
        for (shown, expected) in [
            (certs(path, b"").unwrap_err(), "cloud.crt holds no certificate: it is empty"),
            (
                private_key(path, b"no pem").unwrap_err(),
                "cloud.crt holds no private key: it has no PEM block",
            ),
            (certs(path, b"0\x82").unwrap_err(), "it is a binary file (DER or PKCS #12); expected"),
            (private_key(path, b"0\x82").unwrap_err(), "`openssl pkey -inform DER -in OLD"),
            (no_cert("PKCS7"), "it has a block PKCS7; expected at least one"),
            (no_cert("TRUSTED CERTIFICATE"), "`openssl x509 -in OLD -out NEW`"),
            (no_cert("CERTIFICATE REQUEST"), "a CA has to sign the request first"),
            (no_cert("EC PRIVATE KEY"), "it may be the file of the key"),
            (no_key("ENCRYPTED PRIVATE KEY"), "remove the passphrase with `openssl pkey"),
            (private_key(path, encrypted).unwrap_err(), "remove the passphrase with `openssl pkey"),
            (no_key("PUBLIC KEY"), "only the public half of the key"),
            (no_key("CERTIFICATE"), "it may be the file of the certificate"),
            (
                certs(path, b"-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n").unwrap_err(),
                "is damaged",
            ),
            (certs(path, b"-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap_err(), "is damaged"),
        ] {
            assert!(shown.to_string().contains(expected), "{shown}");
        }
    }
}
