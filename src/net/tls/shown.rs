//! The certificate that a server shows, and a warning of clients that expect another name.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tracing::warn;

/// Shows one certificate to all.
#[derive(Debug)]
pub(super) struct Shown {
    certified: Arc<CertifiedKey>,
    file: PathBuf,
    warned: Mutex<Option<Instant>>,
}

impl Shown {
    /// Shows what was read from `file`.
    pub(super) fn new(certified: CertifiedKey, file: PathBuf) -> Self {
        Self { certified: Arc::new(certified), file, warned: Mutex::default() }
    }

    /// Whether the certificate is for that name. One that cannot be read is not judged.
    fn is_for(&self, name: &str) -> bool {
        let Some(leaf) = self.certified.cert.first() else { return true };
        match (ParsedCertificate::try_from(leaf), ServerName::try_from(name)) {
            (Ok(leaf), Ok(name)) => verify_server_name(&leaf, &name).is_ok(),
            _ => true,
        }
    }

    /// Whether it is time for another warning.
    fn may_warn(&self) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let may = warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL);
        if may {
            *warned = Some(Instant::now());
        }
        may
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        if let Some(name) = hello.server_name()
            && !self.is_for(name)
            && self.may_warn()
        {
            warn!(
                name,
                file = %self.file.display(),
                "a client expects this name, and the certificate does not have it: a client that verifies it goes away; \
                 issue the certificate with it among its subject alternative names"
            );
        }
        Some(self.certified.clone())
    }
}

/// Between two such warnings: each client may send any name.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::TlsParams;
    use crate::net::tls::tests::Authority;

    #[tokio::test(start_paused = true)]
    async fn a_name_that_the_certificate_lacks_is_told_once_a_minute() {
        let ca = Authority::new("ca");
        let identity = ca.issue("s", "*.edge.example");
        let read = |file: &PathBuf| std::fs::read(file).unwrap();
        let (cert, key) = (read(&identity.cert), read(&identity.key));
        let certified = identity.certified(&cert, &key, &TlsParams::default().provider()).unwrap();
        let shown = Shown::new(certified, identity.cert);
        assert!(
            shown.is_for("node1.edge.example") && !shown.is_for("node1") && !shown.is_for("a.b.edge.example")
        );
        assert!(shown.may_warn() && !shown.may_warn());
        tokio::time::advance(WARN_INTERVAL).await;
        assert!(shown.may_warn());
    }
}
