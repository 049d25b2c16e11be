//! TLS settings from files. They are rebuilt when the files change, for the handshakes that follow.

mod accept;
mod agents;
mod ends;
mod fault;
mod leaf;
mod mutual;
mod offer;
mod shown;
mod tickets;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tracing::warn;

pub use accept::{Acceptor, Encrypted, HANDSHAKES, Shaken, TlsSocket, Unshaken};
use agents::{AgentVerifier, ClientVerifier};
pub use agents::{Agents, EDGE, KUBELET_CLIENT};
pub use ends::{Ends, date};
pub use fault::Fault;
pub use leaf::{About, Oddity, Summary, host_of, summary};
pub use mutual::{Dialer, Mutual};
pub use offer::TlsParams;
use shown::Shown;
pub use verify::issuer;
use verify::{Anyone, SiblingVerifier};

use super::pem;
use super::reload::{Reload, ReloadError};

/// What a server's TLS is made from.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Certificate and key to show.
    pub identity: Identity,
    /// Whether clients show certificates too.
    pub clients: ClientCertificates,
    /// Versions and suites.
    pub offer: TlsParams,
    /// Application protocols, the most wanted first: `h2` for links, only `http/1.1` for HTTPS.
    pub alpn: Vec<Vec<u8>>,
}

/// What a client's TLS is made from.
#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// Which servers it trusts.
    pub trust: Trust,
    /// Certificate and key to show to servers that ask.
    pub identity: Option<Identity>,
    /// Application protocols, the most wanted first.
    pub alpn: Vec<Vec<u8>>,
}

/// PEM files of a certificate chain (leaf first) and its key; they may be one file.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The chain.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// Which certificates a server asks of its clients.
#[derive(Debug, Clone)]
pub enum ClientCertificates {
    /// No certificate is asked for.
    Anonymous,
    /// One issued by a CA of this file, and not to an edge, or no handshake.
    Required(PathBuf),
    /// For a pod's own port: edges show none; another pod shows one that a CA of this file issued to a *server* of
    /// this name (none: the first DNS name of our own), as our own is. Any other ends the handshake.
    Siblings(PathBuf, Option<ServerName<'static>>),
    /// Edges may show one as well; what others show is as the inner one says.
    Agents(Agents, Box<Self>),
}

/// Which servers a client trusts.
#[derive(Debug, Clone)]
pub enum Trust {
    /// Those whose certificate was issued by a CA of this file (one or several). The system's CAs are not asked.
    Ca(PathBuf),
    /// Any certificate: for loopback targets, where no third party is on the path, and where the operator says so.
    Anyone,
}

/// Why TLS settings cannot be used. Each sentence is for the operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The text is not one of Go's names of TLS versions.
    #[error("{0:?} is not a TLS version: want VersionTLS12 or VersionTLS13")]
    Version(String),
    /// None of the suites is supported.
    #[error(
        "none of the cipher suites {0:?} is offered here: leave the list empty, or add \
             TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    )]
    NoSuite(String),
    /// Not something a certificate can be checked against.
    #[error(
        "{0:?} is neither a DNS name nor an IP address: set the name that the server's certificate carries"
    )]
    Name(String),
}

impl ServerSettings {
    /// Reads the files now. Warnings about the certificate are logged, here and whenever it changes.
    ///
    /// Call [`Reload::load`] for each handshake, and run [`Reload::watch`]; established connections are not affected.
    pub fn load(self) -> Result<Reload<ServerConfig>, ReloadError> {
        let mut paths = vec![self.identity.cert.clone(), self.identity.key.clone()];
        paths.extend(self.clients.files());
        Reload::new(paths, move |contents| match contents {
            [cert, key, cas @ ..] => self.config(cert, key, cas),
            _ => Err("a file is missing".into()),
        })
    }

    fn config(&self, cert: &[u8], key: &[u8], cas: &[Vec<u8>]) -> Result<ServerConfig, String> {
        let provider = self.offer.provider();
        let identity = self.identity.certified(cert, key, &provider)?;
        for warning in
            identity.cert.first().map_or(Ok(Vec::new()), |leaf| leaf::check(leaf)).unwrap_or_default()
        {
            warn!(file = %self.identity.cert.display(), "the server's certificate {warning}");
        }
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(self.offer.versions())
            .map_err(text)?;
        let builder = match self.clients.verifier(cas, &identity, provider)? {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let shown = Shown::new(identity, self.identity.cert.clone());
        let mut config = builder.with_cert_resolver(Arc::new(shown));
        config.alpn_protocols.clone_from(&self.alpn);
        // A session that is resumed by its id asks nobody whether its certificate is still valid; a ticket does.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        // The clients keep the tickets: thousands of edges that come back at once, to whichever pod, resume without memory here.
        config.ticketer = Arc::new(self.tickets(cert, key, cas, Arc::clone(&config.time_provider))?);
        Ok(config)
    }
}

impl ClientSettings {
    /// Reads the files now. Call [`Reload::load`] for each handshake, and run [`Reload::watch`].
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
            (Trust::Anyone, _) => {
                let anyone = Arc::new(Anyone(Arc::clone(&provider)));
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

/// The name to check a server's certificate against: a DNS name, or an address, which is then looked for among the
/// certificate's addresses while no name is sent.
pub fn server_name(text: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::Name(text.to_owned()))
}

impl Identity {
    fn certified(&self, cert: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<CertifiedKey, String> {
        let chain = pem::certs(&self.cert, cert).map_err(text)?;
        let key = pem::key(&self.key, key).map_err(text)?;
        if let Some(leaf) = chain.first() {
            leaf::check(leaf).map_err(|fault| format!("{} {fault}", self.cert.display()))?;
        }
        CertifiedKey::from_der(chain, key, provider).map_err(|cause| match cause {
            rustls::Error::InconsistentKeys(_) => format!(
                "the key in {} does not belong to the certificate in {}: replace both together",
                self.key.display(),
                self.cert.display()
            ),
            cause => format!("{} and {}: {cause}", self.cert.display(), self.key.display()),
        })
    }
}

impl ClientCertificates {
    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Anonymous => Vec::new(),
            Self::Required(ca) | Self::Siblings(ca, _) => vec![ca.clone()],
            Self::Agents(agents, others) => [vec![agents.ca.clone()], others.files()].concat(),
        }
    }

    /// The verifier of clients' certificates, from the files of CAs; `None` if no certificate is asked for.
    fn verifier(
        &self,
        cas: &[Vec<u8>],
        own: &CertifiedKey,
        provider: Arc<CryptoProvider>,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
        let Some((ca, more)) = cas.split_first() else { return Ok(None) };
        match self {
            Self::Anonymous => Ok(None),
            Self::Agents(agents, others) => {
                let issuers = roots(&agents.ca, ca)?;
                for (path, pem) in others.files().iter().zip(more) {
                    agents.are_apart(&issuers, path, &roots(path, pem)?)?;
                }
                let issuers = Arc::new(issuers);
                let issued = WebPkiClientVerifier::builder_with_provider(issuers, Arc::clone(&provider));
                let (issued, others) = (issued.build().map_err(text)?, others.verifier(more, own, provider)?);
                Ok(Some(Arc::new(AgentVerifier::new(issued, others))))
            }
            Self::Required(path) => {
                let issued =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path, ca)?), provider);
                Ok(Some(Arc::new(ClientVerifier(issued.build().map_err(text)?))))
            }
            Self::Siblings(path, name) => {
                let siblings = SiblingVerifier::new(roots(path, ca)?, name.as_ref(), &own.cert, &provider);
                Ok(siblings
                    .inspect_err(|cause| warn!("no other pod can link to this one: {cause}"))
                    .ok()
                    .map(|siblings| Arc::new(siblings) as _))
            }
        }
    }
}

impl Trust {
    fn ca(&self) -> Option<&PathBuf> {
        match self {
            Self::Ca(ca) => Some(ca),
            Self::Anyone => None,
        }
    }
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let (_, ignored) = roots.add_parsable_certificates(pem::certs(path, pem).map_err(text)?);
    if roots.is_empty() {
        return Err(format!("{} holds no usable CA certificate: want X.509 version 3", path.display()));
    }
    if ignored > 0 {
        warn!(file = %path.display(), ignored, "some CA certificates cannot be used and are left out");
    }
    Ok(roots)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn text(cause: impl ToString) -> String {
    cause.to_string()
}

#[cfg(test)]
pub(crate) mod tests;
