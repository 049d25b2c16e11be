//! TLS of the benchmark's own clients and servers.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig, crypto, version};

use crate::place::Certificates;

/// Returns the config of a client that verifies the server, and presents its own certificate if requested.
pub(crate) fn client(certificates: &Certificates) -> Result<ClientConfig> {
    let key = PrivateKeyDer::from_pem_file(certificates.client_key())?;
    Ok(ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&version::TLS13])?
        .with_root_certificates(roots(&certificates.ca())?)
        .with_client_auth_cert(chain(&certificates.client_cert())?, key)?)
}

/// Returns the config of a server, which accepts only clients with a certificate if `requires_client_cert` is set.
pub(crate) fn server(certificates: &Certificates, requires_client_cert: bool) -> Result<ServerConfig> {
    let provider = Arc::new(crypto::aws_lc_rs::default_provider());
    let verifier = if requires_client_cert {
        let roots = Arc::new(roots(&certificates.ca())?);
        WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?
    } else {
        WebPkiClientVerifier::no_client_auth()
    };
    let key = PrivateKeyDer::from_pem_file(certificates.key())?;
    Ok(ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(&certificates.cert())?, key)?)
}

/// Returns a provider that prefers the same suite as the program.
fn provider() -> crypto::CryptoProvider {
    let mut provider = crypto::aws_lc_rs::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

fn roots(ca: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for cert in chain(ca)? {
        roots.add(cert)?;
    }
    Ok(roots)
}

fn chain(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    Ok(CertificateDer::pem_file_iter(file)?.collect::<Result<_, _>>()?)
}
