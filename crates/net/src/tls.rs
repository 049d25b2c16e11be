//! TLS configs from files. They are rebuilt when the files change, and used for later handshakes.

pub mod certificate;
pub mod client_certificate;
pub mod client_hello;
pub mod error;
pub mod handshake;
pub mod link_auth;
pub mod params;
pub mod peer;
pub mod pem;
pub mod resolver;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
mod tickets;
pub mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::NoServerSessionStorage;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tracing::warn;

use crate::reload::{ReloadError, ReloadedValue};
use crate::tls::client_certificate::ServerTls;
use crate::tls::link_auth::LinkCaFiles;
use crate::tls::params::TlsParams;
use crate::tls::pem::{SUPPORTED_KEYS, certs, private_key};
use crate::tls::resolver::SingleCertResolver;
use crate::tls::tickets::Tickets;
use crate::tls::verify::NoVerifier;

#[cfg(doc)]
use crate::reload::FileWatcher;
/// The TLS config of a server: its files and options, before they are loaded.
#[derive(Debug, Clone)]
pub struct TlsServerConfig {
    /// The certificate and key to present.
    pub identity: IdentityFiles,
    /// Which certificates clients must present.
    pub clients: ClientAuth,
    /// Versions and cipher suites.
    pub params: TlsParams,
    /// Application protocols in order of preference: `h2` for links, only `http/1.1` for HTTPS.
    pub alpn: Vec<Vec<u8>>,
}

/// The TLS config of a client: its files and options, before they are loaded.
#[derive(Debug, Clone)]
pub struct TlsClientConfig {
    /// Which servers are trusted.
    pub trust: Trust,
    /// The certificate and key to present to servers that request one.
    pub identity: Option<IdentityFiles>,
    /// Application protocols in order of preference.
    pub alpn: Vec<Vec<u8>>,
}

/// The PEM files of a certificate chain (leaf first) and its key. Both may be the same file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityFiles {
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
    Links(LinkCaFiles),
}

/// The servers that a TLS client trusts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// Servers with a certificate from a CA in this file (one or several). The system's CAs are not used.
    Ca(PathBuf),
    /// Servers with a certificate from a CA that the system trusts.
    System,
    /// Servers with a certificate from a CA in these files, or one that the system trusts. On a system without any, those
    /// of Mozilla.
    Public(Vec<PathBuf>),
    /// Any server: for loopback targets, where no third party is on the path, and where the operator allows it.
    NoVerify,
}

impl TlsServerConfig {
    /// Reads the files now. Logs warnings about the certificate now and whenever it changes.
    ///
    /// Call [`ReloadedValue::load`] for each handshake, and watch it with a [`FileWatcher`].
    pub fn load(self) -> Result<ReloadedValue<ServerTls>, ReloadError> {
        let mut paths = vec![self.identity.cert.clone(), self.identity.key.clone()];
        paths.extend(self.clients.files());
        ReloadedValue::new(paths, move |contents| match contents {
            [cert, key, cas @ ..] => self.config(cert, key, cas),
            _ => Err("a file is missing".into()),
        })
    }

    fn config(&self, cert: &[u8], key: &[u8], cas: &[Vec<u8>]) -> Result<ServerTls, String> {
        let provider = self.params.provider();
        let identity = self.identity.certified(cert, key, &provider)?;
        for warning in
            identity.cert.first().map_or(Ok(Vec::new()), |leaf| certificate::check(leaf)).unwrap_or_default()
        {
            warn!(file = %self.identity.cert.display(), %warning, "problem with the server certificate");
        }
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(self.params.versions)
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
        Ok(ServerTls { config: Arc::new(config), clients, users, accepted: Default::default() })
    }
}

impl TlsClientConfig {
    /// Reads the files now. Call [`ReloadedValue::load`] for each handshake, and watch it with a [`FileWatcher`].
    pub fn load(self) -> Result<ReloadedValue<ClientConfig>, ReloadError> {
        let identity = self.identity.iter().flat_map(|i| [i.cert.clone(), i.key.clone()]);
        let paths = identity.chain(self.trust.cas().iter().cloned()).collect();
        ReloadedValue::new(paths, move |contents| match (&self.identity, contents) {
            (Some(identity), [cert, key, cas @ ..]) => self.config(Some((identity, cert, key)), cas),
            (_, cas) => self.config(None, cas),
        })
    }

    fn config(
        &self,
        identity: Option<(&IdentityFiles, &[u8], &[u8])>,
        cas: &[Vec<u8>],
    ) -> Result<ClientConfig, String> {
        let provider = TlsParams::default().provider();
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(text)?;
        let mut trusted = match &self.trust {
            Trust::Public(_) => {
                system_roots().unwrap_or_else(|_| webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect())
            }
            Trust::System => system_roots()?,
            Trust::Ca(_) | Trust::NoVerify => RootCertStore::empty(),
        };
        for (path, pem) in self.trust.cas().iter().zip(cas) {
            trusted.extend(roots(path, pem)?.roots);
        }
        let builder = match &self.trust {
            Trust::Ca(_) | Trust::Public(_) | Trust::System => builder.with_root_certificates(trusted),
            Trust::NoVerify => {
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

/// The application protocols (ALPN) at both ends of a link. HTTP/1.1 is for [WebSockets](crate::websocket).
pub fn link_alpn() -> Vec<Vec<u8>> {
    vec![HTTP_2.to_vec(), HTTP_1.to_vec()]
}

/// The protocol of links.
pub const HTTP_2: &[u8] = b"h2";
/// The protocol of WebSockets.
pub const HTTP_1: &[u8] = b"http/1.1";

/// Parses the name to check a server's certificate against: a DNS name or an IP address.
///
/// An address must be among the certificate's addresses, and no SNI is sent for it.
pub fn server_name(text: &str) -> Result<ServerName<'static>, String> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    ServerName::try_from(bare.to_owned()).map_err(|_| {
        format!("{text:?} is neither a DNS name nor an IP address; use a name in the server's certificate")
    })
}

impl IdentityFiles {
    fn certified(&self, cert: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<CertifiedKey, String> {
        let chain = certs(&self.cert, cert)?;
        let key = private_key(&self.key, key)?;
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
            (Self::Required(path), [ca, ..]) => link_auth::required(roots(path, ca)?, provider).map(Some),
            (Self::Links(links), _) => links.verifier(cas, &own.cert, provider),
            (Self::Anonymous | Self::Required(_), _) => Ok(None),
        }
    }
}

impl Trust {
    fn cas(&self) -> &[PathBuf] {
        match self {
            Self::Ca(ca) => std::slice::from_ref(ca),
            Self::Public(cas) => cas,
            Self::System | Self::NoVerify => &[],
        }
    }
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let (_, ignored) = roots.add_parsable_certificates(certs(path, pem)?);
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

#[cfg(test)]
pub(crate) mod tests;
