//! Two certificate verifiers of our own: for another pod of the same cloud, and one that trusts any server.

use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use super::{TlsParams, leaf, text};

/// Trusts a client that shows a *server's* certificate for the cloud's name, from the cloud's CA: a process that can
/// pose as the cloud to edges is a pod, so no further certificates are needed. A client without a certificate passes,
/// and is not a pod.
#[derive(Debug)]
pub(super) struct SiblingVerifier {
    servers: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl SiblingVerifier {
    /// Trusts certificates from `roots` for `name`, or without it for the first DNS name of this pod's chain.
    ///
    /// # Errors
    ///
    /// This pod's own certificate would not pass, so no sibling's would: the reason and the remedy.
    pub(super) fn new(
        roots: RootCertStore,
        name: Option<&ServerName<'static>>,
        own: &[CertificateDer<'_>],
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let (leaf, above) = own.split_first().ok_or("there is no certificate of our own")?;
        let name = match name {
            Some(name) => name.clone(),
            None => leaf::first_name(leaf).ok_or(NO_NAME)?,
        };
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .map_err(text)?;
        // The dates were checked when the certificate was read, and only bring warnings.
        let valid = leaf::validity(leaf)?;
        let now = UnixTime::now().as_secs().clamp(*valid.start(), *valid.end());
        let at = UnixTime::since_unix_epoch(Duration::from_secs(now));
        servers.verify_server_cert(leaf, above, &name, &[], at).map_err(|cause| unfit(&cause, &name))?;
        Ok(Self { servers, name })
    }

    /// The name that pods' certificates carry.
    pub(super) fn name(&self) -> &ServerName<'static> {
        &self.name
    }
}

impl ClientCertVerifier for SiblingVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A pod has one certificate and needs no hint.
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

/// Of these authorities the one that has signed a server's certificate, which comes first in its chain. Dates and names do
/// not count.
pub fn issuer(
    authorities: &[CertificateDer<'static>],
    chain: &[CertificateDer<'_>],
) -> Option<CertificateDer<'static>> {
    let (leaf, above) = chain.split_first()?;
    let valid = leaf::validity(leaf).ok()?;
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
        // The name is looked at last.
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
pub(super) struct Anyone(pub(super) Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
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

fn unfit(cause: &Error, name: &ServerName<'_>) -> String {
    let name = name.to_str();
    match cause {
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!(
            "our own certificate does not carry the name {name:?}, by which pods know each other: issue it anew with \
             that name, or set mode.cloud.registry.name to one that it carries"
        ),
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "our own certificate was not issued by a CA of mode.cloud.stream.server.ca, so other pods refuse it: name \
             the file of the CA that signed it"
                .into()
        }
        cause => format!(
            "our own certificate will not do as a server's for {name:?}, so other pods refuse it: {cause}; issue it anew \
             for servers: `tunnel init` makes one"
        ),
    }
}

const NO_NAME: &str = "our own certificate carries no DNS name by which pods could know each other: issue it anew with \
                       one, the same for all pods";
