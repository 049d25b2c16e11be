//! TLS to peers: both servers present the certificate that they present to edges.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::reload::{ReloadError, ReloadedValue};
use crate::tls::params::TlsParams;
use crate::tls::pem::certs;
use crate::tls::verify::PeerVerifier;
use crate::tls::{IdentityFiles, TlsClientConfig, Trust, roots};

/// The TLS files of a server that dials peers.
#[derive(Debug, Clone)]
pub struct PeerTlsConfig {
    /// The server's certificate and key, the same as on its port.
    pub identity: IdentityFiles,
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
    /// Reads the files now. Call [`ReloadedValue::load`] for each handshake, and watch it with a `FileWatcher`.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, or if peers would reject this server's certificate. The text contains a hint.
    ///
    /// Dates are not checked here, because the server's own port warns about them.
    pub fn load(self) -> Result<ReloadedValue<PeerTls>, ReloadError> {
        let paths = vec![self.identity.cert.clone(), self.identity.key.clone(), self.ca.clone()];
        let client = TlsClientConfig {
            trust: Trust::Ca(self.ca.clone()),
            identity: Some(self.identity),
            alpn: vec![b"h2".to_vec()],
        };
        let ca_path = self.ca;
        let name = self.name;
        ReloadedValue::new(paths, move |contents| {
            let ([cert, key, ca], Some(identity)) = (contents, &client.identity) else {
                return Err("a file is missing".into());
            };
            let own = certs(&identity.cert, cert)?;
            let provider = TlsParams::default().provider();
            let peers = PeerVerifier::new(roots(&ca_path, ca)?, name.as_ref(), &own, &provider)?;
            let config = client.config(Some((identity, cert, key)), std::slice::from_ref(ca))?;
            Ok(PeerTls { config: Arc::new(config), name: peers.name.clone() })
        })
    }
}
