//! Certificates for one test: a CA, and what it signs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tunnel_net::pki;

/// A CA made for one test.
#[derive(Debug)]
pub(crate) struct Authority(pub(crate) pki::CertificateAuthority);

/// A certificate with its key and CA, as the files that a config names.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    /// Certificate of the CA.
    pub(crate) ca: PathBuf,
    /// Certificate of the server.
    pub(crate) cert: PathBuf,
    /// Private key of the server.
    pub(crate) key: PathBuf,
}

impl Authority {
    /// Creates a CA with a new key, so two of them never trust each other's certificates.
    pub(crate) fn new() -> Self {
        Self(pki::CertificateAuthority::new("CA of a test", VALID).expect("a CA"))
    }

    /// Writes the CA, and a server's certificate for names and addresses, into a directory. Overwrites existing files.
    pub(crate) fn write(&self, dir: &Path, names: &[&str]) -> Files {
        let files = Files { ca: dir.join("ca.crt"), cert: dir.join("cloud.crt"), key: dir.join("cloud.key") };
        std::fs::write(&files.ca, self.0.cert()).expect("a file");
        let issued = self.0.server(names).expect("names that a certificate can carry");
        issued.write(&files.cert, &files.key).expect("two files");
        files
    }
}

/// Longer than any test, and than the period in which an expiry is reported.
const VALID: Duration = Duration::from_secs(60 * 24 * 3600);
