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
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};

use crate::reload::Reload;
use crate::tls::error::HandshakeError;
use crate::tls::{TlsParams, certificate, text};

/// Trusts a client with a *server's* certificate for the cloud's name, from the cloud's CA.
///
/// A process that can present itself to edges as a server is a server, so no further certificates are needed. A client
/// without a certificate is accepted, but not as a peer.
#[derive(Debug)]
pub(crate) struct PeerCertVerifier {
    servers: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl PeerCertVerifier {
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
        servers.verify_server_cert(leaf, above, &name, &[], at).map_err(|cause| unfit(&cause, &name))?;
        Ok(Self { servers, name })
    }

    /// Returns the name that servers' certificates contain.
    pub(crate) fn name(&self) -> &ServerName<'static> {
        &self.name
    }
}

impl ClientCertVerifier for PeerCertVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A server has only one certificate and needs no hint.
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
        self.servers.verify_server_cert(leaf, above, &self.name, &[], now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.servers.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.servers.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.servers.supported_verify_schemes()
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

// Certificates of edges: which are trusted at the port for links. Nowhere are they trusted as clients.

/// The certificates of edges: issued by a CA in this file, with exactly the subject `EDGE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeCerts {
    /// The file of CAs.
    pub ca: PathBuf,
}

impl EdgeCerts {
    /// Returns the DNS names of an edge's certificate, or `None` if it is another one. The handshake has verified the
    /// certificate.
    pub fn names(der: &[u8]) -> Option<Vec<String>> {
        certificate::is_edges(der).then(|| certificate::dns_names(der))
    }

    /// Fails if a CA for edges' certificates is also in the other file, even with another certificate.
    ///
    /// A cluster's CA signs for others as well, and must not be able to create servers.
    pub(crate) fn check_disjoint(
        &self,
        issuers: &RootCertStore,
        path: &Path,
        others: &RootCertStore,
    ) -> Result<(), String> {
        let keys = |of: &RootCertStore| -> BTreeSet<Vec<u8>> {
            of.roots.iter().map(|root| root.subject_public_key_info.to_vec()).collect()
        };
        if keys(issuers).is_disjoint(&keys(others)) {
            return Ok(());
        }
        Err(format!(
            "{} (edge_ca) and {} (peer_ca) contain the same CA, which also signs certificates for others, who could then \
             impersonate a server; use a separate CA for servers in ca",
            self.ca.display(),
            path.display()
        ))
    }
}

/// Verifies certificates of one kind by one rule, and all others by another, so that no CA can issue both.
#[derive(Debug)]
pub(crate) struct CertKindVerifier {
    pub(crate) kind: CertKind,
    /// Trusts the CAs for certificates of this kind.
    pub(crate) issued: Arc<dyn ClientCertVerifier>,
    /// `None` if no other client may present a certificate.
    pub(crate) others: Option<Arc<dyn ClientCertVerifier>>,
}

/// A kind of certificates, told by what they contain.
#[derive(Debug)]
pub(crate) enum CertKind {
    /// Those with the subject of edges.
    Edge,
    /// Those of users.
    User(UserCerts),
}

impl CertKind {
    fn includes(&self, leaf: &CertificateDer<'_>) -> bool {
        match self {
            Self::Edge => certificate::is_edges(leaf),
            Self::User(rule) => rule.is_users(leaf),
        }
    }
}

impl ClientCertVerifier for CertKindVerifier {
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
        if self.kind.includes(leaf) {
            return self.issued.verify_client_cert(leaf, above, now);
        }
        match &self.others {
            Some(others) => others.verify_client_cert(leaf, above, now),
            None => Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.issued.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.issued.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.issued.supported_verify_schemes()
    }
}

// Certificates of users at the port for links: any but those of edges and those for the servers' name.

/// The rule that tells users' certificates from those of edges and servers, so that no certificate is of two kinds.
#[derive(Debug, Clone, Default)]
pub(crate) struct UserCerts {
    /// The name that servers' certificates contain; `None` if no server can link here.
    pub(crate) servers: Option<ServerName<'static>>,
}

impl UserCerts {
    fn is_users(&self, leaf: &CertificateDer<'_>) -> bool {
        let is_servers = |name| certificate::is_for_server(leaf, name);
        !certificate::is_edges(leaf) && !self.servers.as_ref().is_some_and(is_servers)
    }
}

/// Trusts clients by another rule, but never by a certificate that was issued for an edge.
///
/// Otherwise a node, or a thief of its disk, would be a client of all other nodes.
#[derive(Debug)]
pub(crate) struct ClientVerifier(pub(crate) Arc<dyn ClientCertVerifier>);

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

    #[test]
    fn the_ca_of_edges_must_differ_from_the_ca_of_servers() {
        let (cloud, cluster) = (TestCa::new("cloud"), Cluster::new());
        let load = |ca: PathBuf| {
            let agents = EdgeCerts { ca };
            let peers = ClientAuth::Peers(cloud.ca(), None);
            let clients = ClientAuth::Edges(agents, Box::new(peers));
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
        let agents = EdgeCerts { ca: cluster.dir.path().join("ca.crt") };
        let peers = ClientAuth::Peers(cloud.ca(), None);
        let (identity, clients) = (cloud.issue("pod", "a.b"), ClientAuth::Edges(agents, Box::new(peers)));
        let edge = client(Trust::Ca(cloud.ca()), Some(cluster.issue(EDGE.0, &["node1"]))).load();
        let config = server(identity, clients).load().config.clone();
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(do_handshake(&edge, &config).await, expected);
        }
    }

    #[tokio::test]
    async fn edge_certificates_need_the_clusters_ca_and_server_certificates_the_clouds() {
        let (cloud, cluster, other) = (TestCa::new("cloud"), Cluster::new(), Cluster::new());
        let agents = EdgeCerts { ca: cluster.dir.path().join("ca.crt") };
        let peers = ClientAuth::Peers(cloud.ca(), None);
        let peer_server = cloud.issue("pod", "a.b");
        let tls = server(peer_server.clone(), ClientAuth::Edges(agents.clone(), Box::new(peers)));
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
                Ok::<_, std::io::Error>(leaf.and_then(|leaf| EdgeCerts::names(&leaf)))
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
