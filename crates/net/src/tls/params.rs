//! The TLS versions and cipher suites of a server, from Go's names.

use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::{CipherSuite, SupportedCipherSuite, SupportedProtocolVersion, version};

/// TLS versions and cipher suites. The default is TLS 1.2 and 1.3 with every suite of the library.
#[derive(Debug, Clone)]
pub struct TlsParams {
    provider: Arc<CryptoProvider>,
    pub(crate) versions: &'static [&'static SupportedProtocolVersion],
}

impl TlsParams {
    /// Returns the parameters of a server. With `is_newest_only` it accepts only TLS 1.3, otherwise TLS 1.2 too. No name
    /// of a suite means all; the suites of TLS 1.3 are always enabled, as in Go. Also returns warnings about unsupported
    /// suites, which are ignored.
    ///
    /// # Errors
    ///
    /// None of the suites is supported.
    pub fn new(is_newest_only: bool, suites: &[String]) -> Result<(Self, Vec<String>), String> {
        let mut versions = if is_newest_only { NEWEST } else { BOTH };
        let mut warnings = Vec::new();
        let mut provider = provider();
        let suites: Vec<_> = suites.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
        if !suites.is_empty() {
            let (supported, unknown) = chosen(&provider, &suites);
            if supported.is_empty() {
                return Err(format!(
                    "none of the cipher suites {:?} is supported; leave the list empty, or add \
                     TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
                    suites.join(",")
                ));
            }
            warnings.extend(unknown.into_iter().map(|name| {
                format!("tls_cipher_suites: {name} is not supported (insecure or misspelt) and is ignored")
            }));
            provider.cipher_suites.retain(|suite| suite.tls13().is_some() || supported.contains(suite));
            if !supported.iter().any(|suite| suite.tls13().is_none()) {
                versions = NEWEST;
            }
        }
        Ok((Self { provider: Arc::new(provider), versions }, warnings))
    }

    pub(crate) fn provider(&self) -> Arc<CryptoProvider> {
        Arc::clone(&self.provider)
    }
}

impl Default for TlsParams {
    fn default() -> Self {
        Self { provider: Arc::new(provider()), versions: BOTH }
    }
}

/// Returns the library's provider, but prefers AES-128 with SHA-256 among TLS 1.3's suites.
///
/// AES-128 costs less per byte than AES-256. SHA-256 costs less per handshake than SHA-384, for which CPUs have no
/// instructions.
pub(super) fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

/// Returns the supported suites of a list, and the names of the others.
fn chosen<'a>(provider: &CryptoProvider, names: &[&'a str]) -> (Vec<SupportedCipherSuite>, Vec<&'a str>) {
    let mut known = Vec::new();
    let mut unknown = Vec::new();
    for name in names {
        match provider.cipher_suites.iter().find(|suite| has_go_name(suite, name)) {
            Some(suite) => known.push(*suite),
            None => unknown.push(*name),
        }
    }
    (known, unknown)
}

/// Returns true if a suite has this name in Go.
///
/// Go writes `TLS_` where the library writes `TLS13_`, and has two old names without their `_SHA256`.
fn has_go_name(suite: &SupportedCipherSuite, name: &str) -> bool {
    let Some(ours) = suite.suite().as_str() else { return false };
    let ours = ours.strip_prefix("TLS13_").or_else(|| ours.strip_prefix("TLS_")).unwrap_or(ours);
    let name = name.strip_prefix("TLS_").unwrap_or(name);
    name == ours || (name.ends_with("_CHACHA20_POLY1305") && ours.strip_suffix("_SHA256") == Some(name))
}

const BOTH: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];
const NEWEST: &[&SupportedProtocolVersion] = &[&version::TLS13];

#[cfg(test)]
mod tests {
    use super::*;

    /// The list in SuperEdge's default configuration.
    const SHIPPED: [&str; 8] = [
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
        "TLS_RSA_WITH_AES_128_CBC_SHA",
    ];

    fn params(suites: &[&str]) -> Result<(TlsParams, Vec<String>), String> {
        TlsParams::new(false, &suites.iter().map(|suite| (*suite).to_owned()).collect::<Vec<_>>())
    }

    fn old_suites(offer: &TlsParams) -> usize {
        offer.provider.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count()
    }

    #[test]
    fn superedges_default_list_gives_six_suites_and_warnings_about_the_rest() {
        let (offer, warnings) = params(&SHIPPED).unwrap();
        assert_eq!(old_suites(&offer), 6);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert_eq!(offer.provider.cipher_suites.len() - 6, 3, "suites of TLS 1.3 are always enabled");
    }

    #[test]
    fn empty_settings_select_the_default() {
        let (offer, warnings) = params(&[]).unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (2, 6, 0));
    }

    #[test]
    fn tls13_aes_128_gcm_is_the_preferred_suite() {
        for offer in [TlsParams::default(), params(&SHIPPED).unwrap().0] {
            let first = offer.provider.cipher_suites[0].suite();
            assert_eq!(first, CipherSuite::TLS13_AES_128_GCM_SHA256);
        }
    }

    #[test]
    fn a_server_may_accept_only_tls_1_3() {
        assert_eq!(TlsParams::new(true, &[]).unwrap().0.versions.len(), 1);
    }

    #[test]
    fn a_list_without_a_usable_suite_is_an_error() {
        assert!(params(&["TLS_RSA_WITH_RC4_128_SHA"]).unwrap_err().starts_with("none of the cipher suites"));
    }

    #[test]
    fn a_list_of_tls_1_3_suites_only_offers_no_older_version() {
        let (offer, warnings) = params(&["TLS_AES_128_GCM_SHA256"]).unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (1, 0, 0));
    }
}
