//! Certificates for one test: an authority, and what it signs.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// An authority made for one test.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

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
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes the authority, and a server's certificate for names and addresses, into a directory. What stands there
    /// under these names is overwritten.
    pub(crate) fn write(&self, dir: &Path, names: &[&str]) -> Files {
        let key = KeyPair::generate().expect("a key");
        let names: Vec<_> = names.iter().map(|name| String::from(*name)).collect();
        let params = CertificateParams::new(names).expect("names that a certificate can carry");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        let files = Files { ca: dir.join("ca.crt"), cert: dir.join("cloud.crt"), key: dir.join("cloud.key") };
        std::fs::write(&files.ca, &self.pem).expect("a file");
        std::fs::write(&files.cert, cert.pem()).expect("a file");
        std::fs::write(&files.key, key.serialize_pem()).expect("a file");
        files
    }
}
