//! Certificates of clients, which are verified again while their sessions last: they expire, and CAs are removed.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{Error, ServerConfig};

use crate::reload::ReloadedValue;
use crate::tls::certificate;
use crate::tls::link_auth::UserCertRule;

/// The TLS of a server's port, with the rule for clients' certificates.
#[derive(Debug)]
pub struct ServerTls {
    /// The configuration of handshakes.
    pub config: Arc<ServerConfig>,
    /// `None` if no certificate is requested.
    pub(super) clients: Option<Arc<dyn ClientCertVerifier>>,
    /// The rule for users' certificates; `None` if users can present none.
    pub(super) users: Option<UserCertRule>,
    /// Accepted chains, each with the last second (Unix time) for which that holds. Clients have few certificates, so
    /// thousands of sessions cost one verification.
    pub(super) accepted: Mutex<HashMap<Arc<Chain>, u64>>,
}

/// A certificate and those above it, leaf first.
pub(crate) type Chain = [CertificateDer<'static>];

/// The certificate of a connected client.
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// Its names: the CN, then the DNS names.
    pub names: Arc<[String]>,
    pub(crate) chain: Arc<Chain>,
    pub(crate) tls: ReloadedValue<ServerTls>,
}

impl ServerTls {
    /// Returns true if clients must present a certificate.
    pub fn requests_certificates(&self) -> bool {
        self.clients.is_some()
    }

    /// Returns an acceptor of connections.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.clone())
    }

    /// Returns this chain as it is stored here, if it is.
    fn shared(&self, chain: &Chain) -> Arc<Chain> {
        let known = self.accepted.lock().get_key_value(chain).map(|(known, _)| known.clone());
        known.unwrap_or_else(|| chain.into())
    }

    /// Verifies a chain as in a handshake. Returns the last second (Unix time) for which the result holds.
    fn verify(&self, chain: &Arc<Chain>) -> Result<u64, Error> {
        let (Some(clients), Some((leaf, above))) = (&self.clients, chain.split_first()) else {
            return Ok(u64::MAX);
        };
        let now = self.config.time_provider.current_time().ok_or(Error::FailedToGetCurrentTime)?;
        if let Some(until) = self.accepted.lock().get(chain).filter(|until| **until >= now.as_secs()) {
            return Ok(*until);
        }
        clients.verify_client_cert(leaf, above, now)?;
        // A chain may contain others that have expired.
        let ends = chain.iter().filter_map(|one| certificate::validity(one).ok().map(|dates| *dates.end()));
        let until = ends.filter(|end| *end >= now.as_secs()).min().unwrap_or(u64::MAX);
        let mut accepted = self.accepted.lock();
        if accepted.len() >= MAX_ACCEPTED {
            accepted.clear();
        }
        accepted.insert(chain.clone(), until);
        Ok(until)
    }
}

impl ClientCertificate {
    /// Returns a chain that a client has presented at a port with this TLS.
    pub fn new(chain: &[CertificateDer<'static>], tls: &ReloadedValue<ServerTls>) -> Self {
        let names = chain.first().map(|leaf| certificate::names(leaf)).unwrap_or_default();
        Self { names: names.into(), chain: tls.load().shared(chain), tls: tls.clone() }
    }

    /// Returns true if this is a user's certificate, at the port for links.
    pub fn is_users(&self) -> bool {
        let tls = self.tls.load();
        self.leaf().is_some_and(|leaf| tls.users.as_ref().is_some_and(|rule| rule.is_users(leaf)))
    }

    /// Returns the certificate itself, without those above it.
    pub fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.chain.first()
    }

    /// Verifies the certificate by the current CAs and the current time. `now` is the TLS of the client's port if that was
    /// opened again. Returns the last second (Unix time) for which the result holds unless the CAs change.
    ///
    /// # Errors
    ///
    /// The client's next handshake would fail for this reason.
    pub fn verify(&self, now: Option<&ReloadedValue<ServerTls>>) -> Result<u64, Error> {
        now.unwrap_or(&self.tls).load().verify(&self.chain)
    }
}

/// Maximum number of accepted chains that are remembered, about 2 KiB each.
const MAX_ACCEPTED: usize = 1024;
