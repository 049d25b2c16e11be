//! The certificate that a server presents, and a warning about clients that expect another name.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tracing::warn;

use crate::tls::certificate;

/// A resolver for rustls that presents the same certificate to all clients, whatever name they ask for.
#[derive(Debug)]
pub(crate) struct SingleCertResolver {
    certified: Arc<CertifiedKey>,
    file: PathBuf,
    /// When a warning was logged last.
    warned: Mutex<Option<Instant>>,
}

impl SingleCertResolver {
    /// Creates a resolver for the certificate read from `file`.
    pub(crate) fn new(certified: CertifiedKey, file: PathBuf) -> Self {
        Self { certified: Arc::new(certified), file, warned: Mutex::default() }
    }

    /// Returns true if the certificate is valid for that name, or the name is not one that it can contain.
    fn is_for(&self, name: &str) -> bool {
        let leaf = self.certified.cert.first();
        let name = ServerName::try_from(name);
        leaf.zip(name.ok()).is_none_or(|(leaf, name)| certificate::is_for_server(leaf, &name))
    }

    /// Returns true if another warning is due.
    fn may_warn(&self) -> bool {
        let mut warned = self.warned.lock();
        let may = warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL);
        if may {
            *warned = Some(Instant::now());
        }
        may
    }
}

impl ResolvesServerCert for SingleCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        if let Some(name) = hello.server_name()
            && !self.is_for(name)
            && self.may_warn()
        {
            warn!(
                name,
                file = %self.file.display(),
                hint = "reissue it with this subject alternative name; clients that verify it disconnect",
                "certificate lacks the name that a client expects"
            );
        }
        Some(self.certified.clone())
    }
}

/// Minimum time between two such warnings, because clients may send any name.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use crate::tls::params::TlsParams;
    use crate::tls::testing::TestCa;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_name_missing_in_the_certificate_is_warned_about_once_a_minute() {
        let ca = TestCa::new("ca");
        let identity = ca.issue("s", "*.edge.example");
        let read = |file: &PathBuf| std::fs::read(file).unwrap();
        let (cert, key) = (read(&identity.cert), read(&identity.key));
        let certified = identity.certified(&cert, &key, &TlsParams::default().provider()).unwrap();
        let shown = SingleCertResolver::new(certified, identity.cert);
        assert!(
            shown.is_for("node1.edge.example") && !shown.is_for("node1") && !shown.is_for("a.b.edge.example")
        );
        assert!(shown.may_warn() && !shown.may_warn());
        tokio::time::advance(WARN_INTERVAL).await;
        assert!(shown.may_warn());
    }
}
