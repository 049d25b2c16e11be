//! Edges that show a certificate: which of them are trusted at the port for links, and that they are clients nowhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use super::leaf;

/// What edges' certificates are: issued by a CA of this file, with exactly the subject [`EDGE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agents {
    /// The file of CAs.
    pub ca: PathBuf,
}

/// The one common name, and the one organization, of edges' certificates. They are YurtTunnel's.
pub const EDGE: (&str, &str) = ("tunnel-agent-client", "openyurt:yurttunnel");

/// How the common name begins of a certificate that an edge presents to its kubelet, as `tunnel init` makes them:
/// `tunnel:NODE`. Kubelets' CA also signs clients' certificates.
pub const KUBELET_CLIENT: &str = "tunnel:";

impl Agents {
    /// The node whose certificate this is: its one DNS name; `None`: it is not an edge's, inner `None`: it has none, or several.
    /// Whether it is to be believed was settled by the handshake.
    pub fn node(der: &[u8]) -> Option<Option<String>> {
        leaf::is_edges(der).then(|| match leaf::dns_names(der).as_slice() {
            [node] => Some(node.clone()),
            _ => None,
        })
    }

    /// An error if one of the CAs of edges' certificates is one of that file, too, in whichever certificate: a cluster's
    /// signs for others as well, and must not make pods.
    pub(super) fn are_apart(
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
            "{} (agent_ca) and {} (ca) hold the same authority: who signs edges' certificates signs for others, too, who \
             could then pose as a pod; give the pods an authority of their own in ca",
            self.ca.display(),
            path.display()
        ))
    }
}

/// Believes certificates with the subject of edges' by one rule, and all others by another: no CA makes both.
#[derive(Debug)]
pub(super) struct AgentVerifier {
    issued: Arc<dyn ClientCertVerifier>,
    /// `None`: nobody else may show one.
    others: Option<Arc<dyn ClientCertVerifier>>,
}

impl AgentVerifier {
    /// `issued` believes those of the agents' CAs.
    pub(super) fn new(
        issued: Arc<dyn ClientCertVerifier>,
        others: Option<Arc<dyn ClientCertVerifier>>,
    ) -> Self {
        Self { issued, others }
    }
}

impl ClientCertVerifier for AgentVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Who calls has one certificate and needs no hint.
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
        if leaf::is_edges(leaf) {
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

/// Trusts clients by another rule, but never by a certificate that was made for an edge: a node, or a thief of its disk,
/// would otherwise be a client of all other nodes.
#[derive(Debug)]
pub(super) struct ClientVerifier(pub(super) Arc<dyn ClientCertVerifier>);

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
        if leaf::is_for_edges(leaf) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::tests::{Authority, client, server};
    use crate::net::tls::tickets::tests::meet;
    use crate::net::tls::{ClientCertificates, Identity, Trust, server_name};
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::rustls::HandshakeKind;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    /// A cluster's authority, in a folder.
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

        /// A client's certificate of that subject for these nodes.
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
    fn the_authority_of_edges_certificates_is_never_the_pods() {
        let (cloud, cluster) = (Authority::new("cloud"), Cluster::new());
        let load = |ca: PathBuf| {
            let agents = Agents { ca };
            let siblings = ClientCertificates::Siblings(cloud.ca(), None);
            let clients = ClientCertificates::Agents(agents, Box::new(siblings));
            let offer = crate::net::tls::TlsParams::default();
            let identity = cloud.issue("pod", "a.b");
            crate::net::tls::ServerSettings { identity, clients, offer, alpn: Vec::new() }.load()
        };
        let file = cluster.dir.path().join("ca.crt");
        assert!(load(file.clone()).is_ok());
        let both = std::fs::read_to_string(&file).unwrap() + &std::fs::read_to_string(cloud.ca()).unwrap();
        std::fs::write(&file, both).unwrap();
        for shared in [cloud.ca(), file] {
            let why = load(shared).map(drop).unwrap_err().to_string();
            assert!(why.contains("hold the same authority") && why.contains("of their own in ca"), "{why}");
        }
    }

    #[tokio::test]
    async fn an_edge_with_a_certificate_resumes_at_any_pod() {
        let (cloud, cluster) = (Authority::new("cloud"), Cluster::new());
        let agents = Agents { ca: cluster.dir.path().join("ca.crt") };
        let siblings = ClientCertificates::Siblings(cloud.ca(), None);
        let (identity, clients) =
            (cloud.issue("pod", "a.b"), ClientCertificates::Agents(agents, Box::new(siblings)));
        let edge = client(Trust::Ca(cloud.ca()), Some(cluster.issue(EDGE.0, &["node1"]))).load();
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(meet(&edge, &server(identity.clone(), clients.clone()).load()).await, expected);
        }
    }

    #[tokio::test]
    async fn an_edges_certificate_is_of_the_clusters_authority_and_a_pods_of_the_clouds() {
        let (cloud, cluster, other) = (Authority::new("cloud"), Cluster::new(), Cluster::new());
        let agents = Agents { ca: cluster.dir.path().join("ca.crt") };
        let siblings = ClientCertificates::Siblings(cloud.ca(), None);
        let pod = cloud.issue("pod", "a.b");
        let tls = server(pod.clone(), ClientCertificates::Agents(agents.clone(), Box::new(siblings)));
        let shows = async |shown: Option<Identity>| {
            let connector = TlsConnector::from(client(Trust::Ca(cloud.ca()), shown).load());
            let (near, far) = duplex(1 << 16);
            let connect = async {
                let mut near = connector.connect(server_name("a.b").unwrap(), near).await?;
                near.read_u8().await
            };
            let accept = async {
                let mut stream = TlsAcceptor::from(tls.load()).accept(far).await?;
                stream.write_all(b"x").await?;
                let leaf = stream.get_ref().1.peer_certificates().map(|shown| shown[0].clone());
                Ok::<_, std::io::Error>(leaf.map(|leaf| Agents::node(&leaf)))
            };
            let (accepted, _) = tokio::join!(accept, connect);
            accepted.map_err(|cause| cause.to_string())
        };
        assert_eq!(shows(None).await, Ok(None));
        assert_eq!(shows(Some(pod)).await, Ok(Some(None)), "it is no edge's");
        let node = Some(Some(Some("node1".to_owned())));
        assert_eq!(shows(Some(cluster.issue(EDGE.0, &["node1"]))).await, Ok(node));
        let several = shows(Some(cluster.issue(EDGE.0, &["node1", "node2"]))).await;
        assert_eq!(several, Ok(Some(Some(None))), "it is no one node's");
        for foreign in [other.issue(EDGE.0, &["node1"]), cluster.issue("system:node:node1", &["node1"])] {
            assert!(shows(Some(foreign)).await.is_err());
        }
    }
}
