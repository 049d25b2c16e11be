//! Verifiers of certificates: of peers, and one that trusts any server.

use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::tls::error::TlsHandshakeError;
use crate::tls::params::TlsParams;
use crate::tls::{certificate, text};

/// Defines the methods of a verifier that check signatures, with the algorithms of its field `$provider`.
macro_rules! signatures_checked_by {
    ($provider:tt) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, cert, signed, &self.$provider.signature_verification_algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, signed, &self.$provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.$provider.signature_verification_algorithms.supported_schemes()
        }
    };
}
pub(super) use signatures_checked_by;

/// Trusts a client with a *server's* certificate for the cloud's name, from the cloud's CA.
///
/// A process that can present itself to edges as a server is a server, so no further certificates are needed.
#[derive(Debug)]
pub(crate) struct PeerVerifier {
    servers: Arc<WebPkiServerVerifier>,
    /// The name that servers' certificates contain.
    pub(crate) name: ServerName<'static>,
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
        let peers = Self { servers, name };
        peers.verify(leaf, above, time_in_validity(leaf)?).map_err(|cause| unfit(&cause, &peers.name))?;
        Ok(peers)
    }

    pub(super) fn verify(
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
    let at = time_in_validity(leaf).ok()?;
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

/// Returns the current time or, if the certificate is not valid now, the nearest time when it is. Dates are checked when
/// a certificate is read, and only cause warnings.
fn time_in_validity(leaf: &CertificateDer<'_>) -> Result<UnixTime, String> {
    let valid = certificate::validity(leaf)?;
    let now = UnixTime::now().as_secs().clamp(*valid.start(), *valid.end());
    Ok(UnixTime::since_unix_epoch(Duration::from_secs(now)))
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

    signatures_checked_by!(0);
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
            TlsHandshakeError::of_tls(cause)
        ),
    }
}

const NO_NAME: &str = "this server's certificate contains no DNS name for peers to check; reissue it with one, the \
                       same for all servers";

#[cfg(test)]
mod tests {
    use crate::tls::certificate::EDGE_SUBJECT;
    use crate::tls::link_auth::{LinkCaFiles, edge_names};
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use std::path::PathBuf;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::HandshakeKind;

    use crate::tls::params::TlsParams;
    use crate::tls::testing::{TestCa, client, server};
    use crate::tls::tickets::tests::do_handshake;
    use crate::tls::{ClientAuth, IdentityFiles, TlsServerConfig, Trust, server_name};

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
        fn issue(&self, common_name: &str, nodes: &[&str]) -> IdentityFiles {
            let names: Vec<_> = nodes.iter().map(|node| (*node).to_owned()).collect();
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, common_name);
            params.distinguished_name.push(DnType::OrganizationName, EDGE_SUBJECT.1);
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate().unwrap();
            let file = self.dir.path().join(format!("{common_name}-{}.pem", nodes.join("-")));
            let text = params.signed_by(&key, &self.issuer).unwrap().pem() + &key.serialize_pem();
            std::fs::write(&file, text).unwrap();
            IdentityFiles { cert: file.clone(), key: file }
        }
    }

    fn edges_and_peers(edge_ca: PathBuf, servers: &TestCa) -> ClientAuth {
        let (edges, peers) = (Some(edge_ca), Some(servers.ca()));
        ClientAuth::Links(LinkCaFiles { edges, peers, ..LinkCaFiles::default() })
    }

    #[test]
    fn the_ca_of_edges_must_differ_from_the_ca_of_servers() {
        let (cloud, cluster) = (TestCa::new("cloud"), Cluster::new());
        let load = |ca: PathBuf| {
            let clients = edges_and_peers(ca, &cloud);
            let params = TlsParams::default();
            let identity = cloud.issue("pod", "a.b");
            TlsServerConfig { identity, clients, params, alpn: Vec::new() }.load()
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
        let edge = client(Trust::Ca(cloud.ca()), Some(cluster.issue(EDGE_SUBJECT.0, &["node1"]))).load();
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
        let shows = async |shown: Option<IdentityFiles>| {
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
            assert_eq!(shows(Some(cluster.issue(EDGE_SUBJECT.0, names))).await, Ok(Some(owned)));
        }
        for foreign in
            [other.issue(EDGE_SUBJECT.0, &["node1"]), cluster.issue("system:node:node1", &["node1"])]
        {
            assert!(shows(Some(foreign)).await.is_err());
        }
    }
}
