//! Certificates of clients: of edges, users and peers at the port for links, and of those at ports that require one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};
use tracing::warn;

use crate::tls::verify::{PeerVerifier, signatures_checked_by};
use crate::tls::{certificate, roots, text};

/// The certificates that a server accepts at its port for links. Any other certificate ends the handshake; a client may
/// present none.
#[derive(Debug, Clone, Default)]
pub struct LinkCaFiles {
    /// The file of CAs that sign edges' certificates, which have exactly the subject `EDGE_SUBJECT`.
    pub edges: Option<PathBuf>,
    /// The file of CAs that sign users' certificates: all but those of edges and those for the servers' name.
    pub users: Option<PathBuf>,
    /// The file of CAs that sign servers' certificates.
    pub peers: Option<PathBuf>,
    /// The name for which the certificates of peers must be valid for a *server*, like this server's own. `None` means
    /// the first DNS name of this server's certificate.
    pub peer_name: Option<ServerName<'static>>,
}

/// Verifies each certificate by the CAs for its kind alone, so that no CA can issue certificates of another kind.
#[derive(Debug)]
struct ClientVerifier {
    edges: Option<Arc<dyn ClientCertVerifier>>,
    /// The rule for which certificates are users', and their verifier. Without a rule all are that are not edges', and
    /// each client must present one.
    users: Option<(Option<UserCertRule>, Arc<dyn ClientCertVerifier>)>,
    peers: Option<PeerVerifier>,
    provider: Arc<CryptoProvider>,
}

/// Returns a verifier of clients that must present a certificate from these CAs, and not one that was issued for an
/// edge.
pub(super) fn required(
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let users = Some((None, issued_by(roots, &provider)?));
    Ok(Arc::new(ClientVerifier { edges: None, users, peers: None, provider }))
}

impl LinkCaFiles {
    pub(super) fn files(&self) -> Vec<PathBuf> {
        [&self.edges, &self.users, &self.peers].into_iter().flatten().cloned().collect()
    }

    /// Returns the rule that tells users' certificates from others; `None` if no user may present one. `own` is this
    /// server's certificate.
    pub(super) fn user_certs(&self, own: &[CertificateDer<'_>]) -> Option<UserCertRule> {
        let servers = self.peers.as_ref().and_then(|_| {
            self.peer_name.clone().or_else(|| own.first().and_then(|leaf| certificate::first_name(leaf)))
        });
        self.users.as_ref().map(|_| UserCertRule { servers })
    }

    /// Returns the verifier, or `None` if no certificate is accepted. `cas` are the contents of [`Self::files`].
    pub(super) fn verifier(
        &self,
        cas: &[Vec<u8>],
        own: &[CertificateDer<'_>],
        provider: Arc<CryptoProvider>,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
        let mut cas = cas.iter();
        // `cas` has no entry for a file that is not set, so each file takes its content in the order of
        // [`Self::files`].
        let mut next = |file: &Option<PathBuf>| -> Result<Option<RootCertStore>, String> {
            let with_content = file.as_ref().and_then(|path| Some((path, cas.next()?)));
            with_content.map(|(path, pem)| roots(path, pem)).transpose()
        };
        let edges = next(&self.edges)?;
        let users = next(&self.users)?;
        let peers = next(&self.peers)?;
        if let (Some(edges), Some(peers)) = (&edges, &peers) {
            self.check_disjoint(edges, peers)?;
        }
        // A server that cannot recognise peers still serves edges and users, so this is only a warning.
        let peers = peers.and_then(|roots| {
            PeerVerifier::new(roots, self.peer_name.as_ref(), own, &provider)
                .inspect_err(|cause| warn!(error = %cause, "peers cannot link to this server"))
                .ok()
        });
        let edges = edges.map(|roots| issued_by(roots, &provider)).transpose()?;
        let users = users.map(|roots| issued_by(roots, &provider)).transpose()?;
        let users = self.user_certs(own).map(Some).zip(users);
        if edges.is_none() && users.is_none() && peers.is_none() {
            return Ok(None);
        }
        Ok(Some(Arc::new(ClientVerifier { edges, users, peers, provider })))
    }

    /// Fails if a CA for edges' certificates also signs servers' certificates, even with another certificate.
    ///
    /// A cluster's CA signs for others as well, and must not be able to create servers.
    fn check_disjoint(&self, edges: &RootCertStore, peers: &RootCertStore) -> Result<(), String> {
        let keys = |of: &RootCertStore| -> BTreeSet<Vec<u8>> {
            of.roots.iter().map(|root| root.subject_public_key_info.to_vec()).collect()
        };
        if keys(edges).is_disjoint(&keys(peers)) {
            return Ok(());
        }
        let shown = |file: &Option<PathBuf>| file.as_deref().unwrap_or(Path::new("")).display().to_string();
        Err(format!(
            "{} (edge_ca) and {} (peer_ca) contain the same CA, which also signs certificates for others, who could then \
             impersonate a server; use a separate CA for servers in ca",
            shown(&self.edges),
            shown(&self.peers)
        ))
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        match &self.users {
            Some((None, users)) => users.root_hint_subjects(),
            // At the port for links, clients have only one certificate and need no hint.
            _ => &[],
        }
    }

    fn client_auth_mandatory(&self) -> bool {
        matches!(self.users, Some((None, _)))
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match (&self.edges, &self.users, &self.peers) {
            (Some(edges), ..) if certificate::is_edges(leaf) => edges.verify_client_cert(leaf, above, now),
            (_, Some((rule, users)), _) if rule.as_ref().is_none_or(|rule| rule.is_users(leaf)) => {
                let verified = users.verify_client_cert(leaf, above, now)?;
                // Otherwise a node, or a thief of its disk, would be a client of all other nodes.
                if certificate::is_for_edges(leaf) {
                    return Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
                }
                Ok(verified)
            }
            (.., Some(peers)) => peers.verify(leaf, above, now).map(|()| ClientCertVerified::assertion()),
            _ => Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)),
        }
    }

    signatures_checked_by!(provider);
}

/// Returns a verifier of clients with certificates from these CAs.
fn issued_by(
    roots: RootCertStore,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build().map_err(text)
}

/// Returns the DNS names of an edge's certificate, or `None` if it is another one. The handshake has verified the
/// certificate.
pub fn edge_names(der: &[u8]) -> Option<Vec<String>> {
    certificate::is_edges(der).then(|| certificate::dns_names(der))
}

/// The rule that tells users' certificates from those of edges and servers, so that no certificate is of two kinds.
#[derive(Debug, Clone)]
pub(crate) struct UserCertRule {
    /// The name that servers' certificates contain; `None` if no server can link here.
    servers: Option<ServerName<'static>>,
}

impl UserCertRule {
    pub(super) fn is_users(&self, leaf: &CertificateDer<'_>) -> bool {
        let is_servers = |name| certificate::is_for_server(leaf, name);
        !certificate::is_edges(leaf) && !self.servers.as_ref().is_some_and(is_servers)
    }
}
