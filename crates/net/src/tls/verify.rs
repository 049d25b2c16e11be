//! Verifiers of certificates: of peers, of edges and other clients, and one that trusts any server. Certificates of
//! clients, which are verified again while their sessions last.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};
use tracing::warn;

use crate::reload::Reload;
use crate::tls::error::HandshakeError;
use crate::tls::{TlsParams, certificate, roots, text};

/// Trusts a client with a *server's* certificate for the cloud's name, from the cloud's CA.
///
/// A process that can present itself to edges as a server is a server, so no further certificates are needed.
#[derive(Debug)]
pub(crate) struct PeerVerifier {
    servers: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl PeerVerifier {
    /// Trusts certificates from `roots` for `name`, or for the first DNS name of this server's chain if `name` is
    /// `None`.
    ///
    /// # Errors
    ///
    /// This server's own certificate would not be accepted, so no peer's would. The text contains a hint.
    pub(crate) fn new(
        roots: RootCertStore,
        name: Option<&ServerName<'static>>,
        own: &[CertificateDer<'_>],
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let (leaf, above) = own.split_first().ok_or("there is no server certificate")?;
        let name = match name {
            Some(name) => name.clone(),
            None => certificate::first_name(leaf).ok_or(NO_NAME)?,
        };
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .map_err(text)?;
        // Dates are checked when the certificate is read, and only cause warnings.
        let valid = certificate::validity(leaf)?;
        let now = UnixTime::now().as_secs().clamp(*valid.start(), *valid.end());
        let at = UnixTime::since_unix_epoch(Duration::from_secs(now));
        let peers = Self { servers, name };
        peers.verify(leaf, above, at).map_err(|cause| unfit(&cause, &peers.name))?;
        Ok(peers)
    }

    /// Returns the name that servers' certificates contain.
    pub(crate) fn name(&self) -> &ServerName<'static> {
        &self.name
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        at: UnixTime,
    ) -> Result<(), Error> {
        self.servers.verify_server_cert(leaf, above, &self.name, &[], at).map(drop)
    }
}

/// Returns the CA among `authorities` that issued a server's certificate, which is the first in its chain.
///
/// Dates and names are not checked.
pub fn issuer(
    authorities: &[CertificateDer<'static>],
    chain: &[CertificateDer<'_>],
) -> Option<CertificateDer<'static>> {
    let (leaf, above) = chain.split_first()?;
    let valid = certificate::validity(leaf).ok()?;
    let now = UnixTime::now().as_secs().clamp(*valid.start(), *valid.end());
    let at = UnixTime::since_unix_epoch(Duration::from_secs(now));
    let name = ServerName::try_from("localhost").ok()?;
    let has_signed = |authority: &&CertificateDer<'static>| {
        let mut roots = RootCertStore::empty();
        let provider = TlsParams::default().provider();
        if roots.add((*authority).clone()).is_err() {
            return false;
        }
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
        // The verifier checks the name last.
        servers.is_ok_and(|servers| match servers.verify_server_cert(leaf, above, &name, &[], at) {
            Ok(_) => true,
            Err(Error::InvalidCertificate(cause)) => matches!(
                cause,
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }
            ),
            Err(_) => false,
        })
    };
    authorities.iter().find(has_signed).cloned()
}

/// Trusts every certificate, but still checks that the server has its key.
#[derive(Debug)]
pub(crate) struct NoVerifier(pub(crate) Arc<CryptoProvider>);

impl ServerCertVerifier for NoVerifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Says why peers reject this server's certificate, and what to do.
fn unfit(cause: &Error, name: &ServerName<'_>) -> String {
    let name = name.to_str();
    match cause {
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!(
            "this server's certificate does not contain the name {name:?}, which peers expect; reissue it with that \
             name, or set server.peers.certificate_name to a name that it contains"
        ),
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "this server's certificate was not issued by a CA in server.links.peer_ca, so peers reject it; \
             configure the file of the CA that signed it"
                .into()
        }
        cause => format!(
            "peers reject this server: {}; reissue it for servers, for example with `tunnel init`",
            HandshakeError::of_tls(cause)
        ),
    }
}

const NO_NAME: &str = "this server's certificate contains no DNS name for peers to check; reissue it with one, the \
                       same for all servers";

// Certificates at the port for links: of edges, users and peers.

/// The certificates that a server accepts at its port for links. Any other certificate ends the handshake; a client may
/// present none.
#[derive(Debug, Clone, Default)]
pub struct LinkAuth {
    /// The file of CAs that sign edges' certificates, which have exactly the subject `EDGE`.
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
struct LinkVerifier {
    edges: Option<Arc<dyn ClientCertVerifier>>,
    users: Option<(UserCerts, ClientVerifier)>,
    peers: Option<PeerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl LinkAuth {
    pub(super) fn files(&self) -> Vec<PathBuf> {
        [&self.edges, &self.users, &self.peers].into_iter().flatten().cloned().collect()
    }

    /// Returns the rule that tells users' certificates from others; `None` if no user may present one. `own` is this
    /// server's certificate.
    pub(super) fn user_certs(&self, own: &[CertificateDer<'_>]) -> Option<UserCerts> {
        let of_own = || own.first().and_then(|leaf| certificate::first_name(leaf));
        let servers = self.peers.as_ref().and_then(|_| self.peer_name.clone().or_else(of_own));
        self.users.as_ref().map(|_| UserCerts { servers })
    }

    /// Returns the verifier, or `None` if no certificate is accepted. `cas` are the contents of [`Self::files`].
    pub(super) fn verifier(
        &self,
        cas: &[Vec<u8>],
        own: &[CertificateDer<'_>],
        provider: Arc<CryptoProvider>,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
        let mut cas = cas.iter();
        let mut next = |file: &Option<PathBuf>| -> Result<Option<RootCertStore>, String> {
            let with_content = file.as_ref().and_then(|path| Some((path, cas.next()?)));
            with_content.map(|(path, pem)| roots(path, pem)).transpose()
        };
        let (edges, users, peers) = (next(&self.edges)?, next(&self.users)?, next(&self.peers)?);
        if let (Some(edges), Some(peers)) = (&edges, &peers) {
            self.check_disjoint(edges, peers)?;
        }
        let peers = peers.and_then(|roots| {
            PeerVerifier::new(roots, self.peer_name.as_ref(), own, &provider)
                .inspect_err(|cause| warn!(error = %cause, "peers cannot link to this server"))
                .ok()
        });
        let edges = edges.map(|roots| issued_by(roots, &provider)).transpose()?;
        let users = users.map(|roots| ClientVerifier::new(roots, &provider)).transpose()?;
        let users = self.user_certs(own).zip(users);
        if edges.is_none() && users.is_none() && peers.is_none() {
            return Ok(None);
        }
        Ok(Some(Arc::new(LinkVerifier { edges, users, peers, provider })))
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

impl ClientCertVerifier for LinkVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Clients have only one certificate and need no hint.
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match (&self.edges, &self.users, &self.peers) {
            (Some(edges), ..) if certificate::is_edges(leaf) => edges.verify_client_cert(leaf, above, now),
            (_, Some((rule, users)), _) if rule.is_users(leaf) => users.verify_client_cert(leaf, above, now),
            (.., Some(peers)) => peers.verify(leaf, above, now).map(|()| ClientCertVerified::assertion()),
            _ => Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
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
pub(crate) struct UserCerts {
    /// The name that servers' certificates contain; `None` if no server can link here.
    servers: Option<ServerName<'static>>,
}

impl UserCerts {
    fn is_users(&self, leaf: &CertificateDer<'_>) -> bool {
        let is_servers = |name| certificate::is_for_server(leaf, name);
        !certificate::is_edges(leaf) && !self.servers.as_ref().is_some_and(is_servers)
    }
}

/// Trusts clients with certificates from some CAs, but never with one that was issued for an edge.
///
/// Otherwise a node, or a thief of its disk, would be a client of all other nodes.
#[derive(Debug)]
pub(crate) struct ClientVerifier(Arc<dyn ClientCertVerifier>);

impl ClientVerifier {
    pub(crate) fn new(roots: RootCertStore, provider: &Arc<CryptoProvider>) -> Result<Self, String> {
        issued_by(roots, provider).map(Self)
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(leaf, above, now)?;
        if certificate::is_for_edges(leaf) {
            return Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

// Certificates of clients, which are verified again while their sessions last: they expire, and CAs are removed.

/// The TLS of a server's port, with the rule for clients' certificates.
pub struct ServerTls {
    /// The configuration of handshakes.
    pub config: Arc<ServerConfig>,
    /// `None` if no certificate is requested.
    clients: Option<Arc<dyn ClientCertVerifier>>,
    /// The rule for users' certificates; `None` if users can present none.
    users: Option<UserCerts>,
    /// Accepted chains, each with the last second (Unix time) for which that holds. Clients have few certificates, so
    /// thousands of sessions cost one verification.
    accepted: Mutex<HashMap<Arc<Chain>, u64>>,
}

/// A certificate and those above it, leaf first.
pub(crate) type Chain = [CertificateDer<'static>];

/// The certificate of a connected client.
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// Its names: the CN, then the DNS names.
    pub names: Arc<[String]>,
    pub(crate) chain: Arc<Chain>,
    pub(crate) tls: Reload<ServerTls>,
}

impl ServerTls {
    pub(crate) fn new(
        config: ServerConfig,
        clients: Option<Arc<dyn ClientCertVerifier>>,
        users: Option<UserCerts>,
    ) -> Self {
        Self { config: Arc::new(config), clients, users, accepted: Mutex::default() }
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

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").field("clients", &self.clients).finish_non_exhaustive()
    }
}

impl ClientCertificate {
    /// Returns a chain that a client has presented at a port with this TLS.
    pub fn new(chain: &[CertificateDer<'static>], tls: &Reload<ServerTls>) -> Self {
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

    /// Verifies the certificate by the current CAs and the current time. Returns the last second (Unix time) for which
    /// the result holds unless the CAs change.
    ///
    /// # Errors
    ///
    /// The client's next handshake would fail for this reason.
    pub fn verify(&self) -> Result<u64, Error> {
        self.tls.load().verify(&self.chain)
    }
}

/// Maximum number of accepted chains that are remembered, about 2 KiB each.
const MAX_ACCEPTED: usize = 1024;

#[cfg(test)]
mod tests {
    use crate::tls::certificate::EDGE;
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::HandshakeKind;

    use crate::tls::testing::{TestCa, client, server};
    use crate::tls::tickets::tests::do_handshake;
    use crate::tls::{ClientAuth, Identity, TlsParams, TlsServerConfig, Trust, server_name};

    use super::*;

    /// A cluster's CA, in a directory.
    struct Cluster {
        issuer: Issuer<'static, KeyPair>,
        dir: tempfile::TempDir,
    }

    impl Cluster {
        fn new() -> Self {
            let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::default());
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
            Self { issuer: Issuer::new(params, key), dir }
        }

        /// Issues a client certificate with this subject for these nodes.
        fn issue(&self, common_name: &str, nodes: &[&str]) -> Identity {
            let names: Vec<_> = nodes.iter().map(|node| (*node).to_owned()).collect();
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, common_name);
            params.distinguished_name.push(DnType::OrganizationName, EDGE.1);
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate().unwrap();
            let file = self.dir.path().join(format!("{common_name}-{}.pem", nodes.join("-")));
            let text = params.signed_by(&key, &self.issuer).unwrap().pem() + &key.serialize_pem();
            std::fs::write(&file, text).unwrap();
            Identity { cert: file.clone(), key: file }
        }
    }

    fn edges_and_peers(edge_ca: PathBuf, servers: &TestCa) -> ClientAuth {
        let (edges, peers) = (Some(edge_ca), Some(servers.ca()));
        ClientAuth::Links(LinkAuth { edges, peers, ..LinkAuth::default() })
    }

    #[test]
    fn the_ca_of_edges_must_differ_from_the_ca_of_servers() {
        let (cloud, cluster) = (TestCa::new("cloud"), Cluster::new());
        let load = |ca: PathBuf| {
            let clients = edges_and_peers(ca, &cloud);
            let offer = TlsParams::default();
            let identity = cloud.issue("pod", "a.b");
            TlsServerConfig { identity, clients, offer, alpn: Vec::new() }.load()
        };
        let file = cluster.dir.path().join("ca.crt");
        assert!(load(file.clone()).is_ok());
        let both = std::fs::read_to_string(&file).unwrap() + &std::fs::read_to_string(cloud.ca()).unwrap();
        std::fs::write(&file, both).unwrap();
        for shared in [cloud.ca(), file] {
            let why = load(shared).map(drop).unwrap_err().to_string();
            assert!(why.contains("contain the same CA") && why.contains("for servers in ca"), "{why}");
        }
    }

    #[tokio::test]
    async fn an_edge_with_a_certificate_resumes_its_tls_session() {
        let (cloud, cluster) = (TestCa::new("cloud"), Cluster::new());
        let clients = edges_and_peers(cluster.dir.path().join("ca.crt"), &cloud);
        let identity = cloud.issue("pod", "a.b");
        let edge = client(Trust::Ca(cloud.ca()), Some(cluster.issue(EDGE.0, &["node1"]))).load();
        let config = server(identity, clients).load().config.clone();
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(do_handshake(&edge, &config).await, expected);
        }
    }

    #[tokio::test]
    async fn edge_certificates_need_the_clusters_ca_and_server_certificates_the_clouds() {
        let (cloud, cluster, other) = (TestCa::new("cloud"), Cluster::new(), Cluster::new());
        let peer_server = cloud.issue("pod", "a.b");
        let clients = edges_and_peers(cluster.dir.path().join("ca.crt"), &cloud);
        let tls = server(peer_server.clone(), clients);
        let shows = async |shown: Option<Identity>| {
            let connector = TlsConnector::from(client(Trust::Ca(cloud.ca()), shown).load());
            let (near, far) = duplex(1 << 16);
            let connect = async {
                let mut near = connector.connect(server_name("a.b").unwrap(), near).await?;
                near.read_u8().await
            };
            let accept = async {
                let mut stream = tls.load().acceptor().accept(far).await?;
                stream.write_all(b"x").await?;
                let leaf = stream.get_ref().1.peer_certificates().map(|shown| shown[0].clone());
                Ok::<_, std::io::Error>(leaf.and_then(|leaf| edge_names(&leaf)))
            };
            let (accepted, _) = tokio::join!(accept, connect);
            accepted.map_err(|cause| cause.to_string())
        };
        assert_eq!(shows(None).await, Ok(None));
        assert_eq!(shows(Some(peer_server)).await, Ok(None), "not an edge's certificate");
        for names in [["node1"].as_slice(), &["node1", "node2"]] {
            let owned = names.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(shows(Some(cluster.issue(EDGE.0, names))).await, Ok(Some(owned)));
        }
        for foreign in [other.issue(EDGE.0, &["node1"]), cluster.issue("system:node:node1", &["node1"])] {
            assert!(shows(Some(foreign)).await.is_err());
        }
    }
}
