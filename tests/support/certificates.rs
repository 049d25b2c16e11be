//! Certificates for one test: an authority, and what it signs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tunnel_net::pki;

/// An authority made for one test.
#[derive(Debug)]
pub(crate) struct Authority(pub(crate) pki::CertificateAuthority);

/// A certificate with its authority and key, as the files that a config names.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    /// The authority's certificate.
    pub(crate) ca: PathBuf,
    /// The server's certificate.
    pub(crate) cert: PathBuf,
    /// The server's key.
    pub(crate) key: PathBuf,
}

impl Authority {
    /// An authority with a key of its own; two of them never trust each other's certificates.
    pub(crate) fn new() -> Self {
        Self(pki::CertificateAuthority::new("authority of a test", VALID).expect("an authority"))
    }

    /// Writes the authority, and a server's certificate for names and addresses, into a directory. What stands there
    /// under these names is overwritten.
    pub(crate) fn write(&self, dir: &Path, names: &[&str]) -> Files {
        let files = Files { ca: dir.join("ca.crt"), cert: dir.join("cloud.crt"), key: dir.join("cloud.key") };
        std::fs::write(&files.ca, self.0.cert()).expect("a file");
        let issued = self.0.server(names).expect("names that a certificate can carry");
        issued.write(&files.cert, &files.key).expect("two files");
        files
    }
}

/// Longer than any test, and than the time for which an end is told before.
const VALID: Duration = Duration::from_secs(60 * 24 * 3600);
