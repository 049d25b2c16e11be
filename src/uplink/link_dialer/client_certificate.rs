//! The client certificate of an edge, issued through `[edge.csr]`.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_rustls::rustls::ClientConfig;
use tracing::debug;

use tunnel_base::files;
use tunnel_base::unix_time::now;
use tunnel_net::reload::fingerprint;
use tunnel_net::tls::certificate::NotAfter;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, link_alpn};

/// The edge's client certificate, issued through `[edge.csr]` and read from its file for each link, and the CA
/// file for servers. Clones share the cache.
#[derive(Debug, Clone)]
pub(crate) struct EdgeCertificate {
    /// File with certificate and key.
    pub(crate) file: PathBuf,
    /// CA file.
    pub(crate) ca: PathBuf,
    /// The TLS config loaded last.
    kept: Arc<Mutex<Option<CachedTlsConfig>>>,
}

/// The TLS config that an [`EdgeCertificate`] loaded last, used again while its files do not change.
#[derive(Debug)]
struct CachedTlsConfig {
    /// Fingerprint of the files.
    text: u64,
    tls: Arc<ClientConfig>,
}

impl EdgeCertificate {
    pub(crate) fn new(file: PathBuf, ca: PathBuf) -> Self {
        Self { file, ca, kept: Arc::default() }
    }

    /// Returns the TLS config with the current certificate, or `None` if there is none or it has expired.
    ///
    /// While the files do not change, the config stays the same, with the session tickets of earlier links.
    pub(crate) async fn tls(&self) -> Option<Arc<ClientConfig>> {
        let Self { file, ca, kept } = self.clone();
        // Read the files for each link: links are dialled rarely, and a renewed certificate is used at once.
        match tokio::task::spawn_blocking(move || {
            let texts = [&file, &ca].map(|path| files::read(path).unwrap_or_default());
            let ends = NotAfter::of(&texts[0]);
            if ends.is_some_and(|ends| ends.first < now()) {
                return Err("expired".to_owned());
            }
            let text = fingerprint(&texts);
            let mut kept = kept.lock();
            if let Some(kept) = kept.as_ref().filter(|kept| kept.text == text) {
                return Ok(kept.tls.clone());
            }
            let identity = Some(IdentityFiles { cert: file.clone(), key: file });
            let settings = TlsClientConfig { trust: Trust::Ca(ca), identity, alpn: link_alpn() };
            let tls = settings.load().map_err(|cause| cause.to_string())?.load();
            *kept = Some(CachedTlsConfig { text, tls: tls.clone() });
            Ok(tls)
        })
        .await
        {
            Ok(Ok(config)) => Some(config),
            Ok(Err(cause)) => {
                debug!(error = cause, "client certificate not usable, not presented");
                None
            }
            Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use tunnel_net::tls::testing::TestCa;

    use super::*;

    /// Issues a certificate for those years into one file with its key.
    fn issue(ca: &TestCa, years: Range<i32>) -> PathBuf {
        let IdentityFiles { cert, key } = ca.issue_for("agent", "node1", years);
        let file = cert.with_extension("pem");
        let both = [cert, key].map(|part| std::fs::read_to_string(part).unwrap()).concat();
        std::fs::write(&file, both).unwrap();
        file
    }

    #[tokio::test]
    async fn an_expired_certificate_is_not_presented() {
        let ca = TestCa::new("ca");
        for (years, is_shown) in [(2020..2021, false), (2020..4000, true)] {
            let own = EdgeCertificate::new(issue(&ca, years), ca.ca());
            assert_eq!(own.tls().await.is_some(), is_shown);
        }
    }

    #[tokio::test]
    async fn tls_tickets_are_kept_across_links_until_the_certificate_is_renewed() {
        let ca = TestCa::new("ca");
        let own = EdgeCertificate::new(issue(&ca, 2020..4000), ca.ca());
        let (first, second) = (own.tls().await.unwrap(), own.clone().tls().await.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        issue(&ca, 2020..4000);
        let renewed = own.tls().await.unwrap();
        assert!(!Arc::ptr_eq(&first, &renewed) && Arc::ptr_eq(&renewed, &own.tls().await.unwrap()));
        issue(&ca, 2020..2021);
        assert!(own.tls().await.is_none());
    }
}
