//! A pod's TLS towards other pods: both show the certificate that they show to edges.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::verify::SiblingVerifier;
use super::{ClientSettings, Identity, TlsParams, Trust, pem, roots, text};
use crate::net::reload::{Reload, ReloadError};

/// The files of a pod that dials other pods.
#[derive(Debug, Clone)]
pub struct Mutual {
    /// Its own certificate and key, the same as on its port.
    pub identity: Identity,
    /// The file of CAs that issue pods' certificates.
    pub ca: PathBuf,
    /// The DNS name that all of them carry; `None`: the first one of this pod's certificate.
    pub name: Option<ServerName<'static>>,
}

/// TLS for dialling another pod.
#[derive(Debug)]
pub struct Dialer {
    /// Shows this pod's certificate, and trusts the CAs.
    pub config: Arc<ClientConfig>,
    /// The name that the other pod's certificate must carry.
    pub name: ServerName<'static>,
}

impl Mutual {
    /// Reads the files now. Take [`Reload::load`] for each handshake, and run [`Reload::watch`].
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or our own certificate would be refused by other pods: why, with the remedy. Dates
    /// are not checked here; the server's side warns of them.
    pub fn load(self) -> Result<Reload<Dialer>, ReloadError> {
        let paths = vec![self.identity.cert.clone(), self.identity.key.clone(), self.ca.clone()];
        let client = ClientSettings {
            trust: Trust::Ca(self.ca.clone()),
            identity: Some(self.identity),
            alpn: vec![b"h2".to_vec()],
        };
        let (ca_path, name) = (self.ca, self.name);
        Reload::new(paths, move |contents| {
            let ([cert, key, ca], Some(identity)) = (contents, &client.identity) else {
                return Err("a file is missing".into());
            };
            let own = pem::certs(&identity.cert, cert).map_err(text)?;
            let provider = TlsParams::default().provider();
            let siblings = SiblingVerifier::new(roots(&ca_path, ca)?, name.as_ref(), &own, &provider)?;
            let config = client.config(Some((identity, cert, key)), Some(ca))?;
            Ok(Dialer { config: Arc::new(config), name: siblings.name().clone() })
        })
    }
}
