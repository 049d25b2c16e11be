//! The certificate that a file holds.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::fs;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use tunnel_net::tls::certificate::{alternative_names, name_text};
use tunnel_net::tls::pem;

/// The properties of a stored certificate that a renewal depends on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredCertificate {
    /// Time of receipt: the file's modification time.
    pub(crate) received: SystemTime,
    /// End of validity.
    pub(crate) until: SystemTime,
    /// Alternative names and addresses.
    pub(crate) names: BTreeSet<String>,
}

impl StoredCertificate {
    /// Reads the file. Returns `None` if it holds no valid certificate with its key.
    pub(crate) async fn read(file: &Path) -> Option<Self> {
        let text = fs::read(file).await.ok()?;
        let modified = fs::metadata(file).await.ok()?.modified().ok()?;
        Self::of(&text, file, modified, SystemTime::now())
    }

    fn of(text: &[u8], file: &Path, modified: SystemTime, now: SystemTime) -> Option<Self> {
        pem::private_key(file, text).ok()?;
        let leaf = pem::certs(file, text).ok()?.into_iter().next()?;
        let (_, certificate) = X509Certificate::from_der(&leaf).ok()?;
        let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let names = alternative_names(&certificate).iter().filter_map(name_text).collect();
        // A clock that was set back must not delay the renewal.
        (now < until).then_some(Self { received: modified.min(now), until, names })
    }
}

#[cfg(test)]
mod tests {
    use tunnel_net::pki::CertificateAuthority;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[tokio::test]
    async fn a_certificate_with_its_key_is_held_until_it_expires() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.pem");
        assert_eq!(StoredCertificate::read(&file).await, None);
        let issued =
            CertificateAuthority::new("ours", DAY).unwrap().server(&["a.b", "10.0.0.1", "fd00::1"]).unwrap();
        std::fs::write(&file, issued.cert()).unwrap();
        assert_eq!(StoredCertificate::read(&file).await, None, "the file has no key");
        issued.write_together(&file).unwrap();
        let held = StoredCertificate::read(&file).await.unwrap();
        assert_eq!(held.names, ["10.0.0.1", "a.b", "fd00::1"].map(str::to_owned).into());
        let life = held.until.duration_since(held.received).unwrap();
        assert!(life.abs_diff(DAY) < Duration::from_secs(60), "{life:?}");

        let (text, now) = (std::fs::read(&file).unwrap(), SystemTime::now());
        assert_eq!(StoredCertificate::of(&text, &file, now, now + 2 * DAY), None);
        let ahead = StoredCertificate::of(&text, &file, now + DAY, now).unwrap();
        assert_eq!(ahead.received, now);
    }
}
