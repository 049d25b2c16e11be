//! The TLS versions and cipher suites of a server, from Go's names.

use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::{CipherSuite, SupportedCipherSuite, SupportedProtocolVersion, version};

use crate::tls::TlsError;

/// TLS versions and cipher suites. The default is TLS 1.2 and 1.3 with every suite of the library.
#[derive(Debug, Clone)]
pub struct TlsParams {
    provider: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
}

impl TlsParams {
    /// Parses `tls_min_version` and `tls_cipher_suites` in SuperEdge's spelling. Empty text means the default.
    ///
    /// TLS 1.3 and its suites are always enabled, as in Go. The second value contains warnings about deviations from
    /// the input: unsupported suites are ignored, versions below 1.2 become 1.2.
    pub fn parse(min_version: &str, suites: &str) -> Result<(Self, Vec<String>), TlsError> {
        let mut warnings = Vec::new();
        let mut versions = match min_version.trim() {
            "" | "VersionTLS12" => BOTH,
            "VersionTLS13" => NEWEST,
            old @ ("VersionTLS10" | "VersionTLS11") => {
                warnings
                    .push(format!("tls_min_version {old} is no longer supported, raised to VersionTLS12"));
                BOTH
            }
            other => return Err(TlsError::Version(other.to_owned())),
        };
        let mut provider = provider();
        if !suites.trim().is_empty() {
            let (supported, unknown) = chosen(&provider, suites);
            if supported.is_empty() {
                return Err(TlsError::NoSuite(suites.to_owned()));
            }
            warnings.extend(unknown.iter().map(|name| {
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

    pub(crate) fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        self.versions
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
fn chosen<'a>(provider: &CryptoProvider, list: &'a str) -> (Vec<SupportedCipherSuite>, Vec<&'a str>) {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match provider.cipher_suites.iter().find(|suite| has_go_name(suite, name)) {
            Some(suite) => known.push(*suite),
            None => unknown.push(name),
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
    const SHIPPED: &str = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,\
        TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,\
        TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305,TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305,\
        TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA,TLS_RSA_WITH_AES_128_CBC_SHA";

    fn old_suites(offer: &TlsParams) -> usize {
        offer.provider.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count()
    }

    #[test]
    fn superedges_default_list_gives_six_suites_and_warnings_about_the_rest() {
        let (offer, warnings) = TlsParams::parse("VersionTLS12", SHIPPED).unwrap();
        assert_eq!(old_suites(&offer), 6);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert_eq!(offer.provider.cipher_suites.len() - 6, 3, "suites of TLS 1.3 are always enabled");
    }

    #[test]
    fn empty_settings_select_the_default() {
        let (offer, warnings) = TlsParams::parse("", " ").unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (2, 6, 0));
    }

    #[test]
    fn tls13_aes_128_gcm_is_the_preferred_suite() {
        for offer in [TlsParams::default(), TlsParams::parse("", SHIPPED).unwrap().0] {
            let first = offer.provider.cipher_suites[0].suite();
            assert_eq!(first, CipherSuite::TLS13_AES_128_GCM_SHA256);
        }
    }

    #[test]
    fn old_versions_are_raised_with_a_warning_and_unknown_ones_are_refused() {
        let (offer, warnings) = TlsParams::parse("VersionTLS10", "").unwrap();
        assert_eq!((offer.versions.len(), warnings.len()), (2, 1));
        assert_eq!(TlsParams::parse("VersionTLS13", "").unwrap().0.versions.len(), 1);
        assert!(matches!(TlsParams::parse("1.2", ""), Err(TlsError::Version(_))));
    }

    #[test]
    fn a_list_without_a_usable_suite_is_an_error() {
        assert!(matches!(TlsParams::parse("", "TLS_RSA_WITH_RC4_128_SHA"), Err(TlsError::NoSuite(_))));
    }

    #[test]
    fn a_list_of_tls_1_3_suites_only_offers_no_older_version() {
        let (offer, warnings) = TlsParams::parse("", "TLS_AES_128_GCM_SHA256").unwrap();
        assert_eq!((offer.versions.len(), old_suites(&offer), warnings.len()), (1, 0, 0));
    }
}
