//! Certificates and keys out of PEM files; the only user of the PEM library.

use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Why a PEM file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// The file is not PEM, or has a damaged block.
    #[error("{} is damaged: {cause}; write it anew from the original; `openssl x509 -in FILE -noout -text` shows what a certificate holds", .path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// The parser's error.
        cause: std::io::Error,
    },
    /// No certificate in a file that must have one. Usual cause: the key's path in place of the certificate's.
    #[error("{} holds no certificate: want at least one `BEGIN CERTIFICATE` block", .0.display())]
    NoCertificate(PathBuf),
    /// No private key in a file that must have one. Usual causes: the wrong path, or a key with a passphrase.
    #[error(
        "{} holds no private key: want one `BEGIN PRIVATE KEY` block without a passphrase \
         (take one off with `openssl pkey -in old.key -out new.key`)", .0.display()
    )]
    NoKey(PathBuf),
}

/// All certificates of a file, at least one. `path` is for the error only.
pub fn certs(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let certs = rustls_pemfile::certs(&mut &*pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|cause| PemError::Damaged { path: path.into(), cause })?;
    if certs.is_empty() { Err(PemError::NoCertificate(path.into())) } else { Ok(certs) }
}

/// The first private key of a file: PKCS#8, PKCS#1 or SEC1. `path` is for the error only.
pub fn key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, PemError> {
    rustls_pemfile::private_key(&mut &*pem)
        .map_err(|cause| PemError::Damaged { path: path.into(), cause })?
        .ok_or_else(|| PemError::NoKey(path.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_and_key_are_found_in_one_file() {
        let made = rcgen::generate_simple_self_signed(["edge".into()]).unwrap();
        let both = format!("{}{}{}", made.cert.pem(), made.signing_key.serialize_pem(), made.cert.pem());
        assert_eq!(certs(Path::new("x"), both.as_bytes()).unwrap().len(), 2);
        assert!(key(Path::new("x"), both.as_bytes()).is_ok());
    }

    #[test]
    fn what_is_missing_is_said_with_the_files_name() {
        let path = Path::new("cloud.crt");
        for (shown, wanted) in [
            (certs(path, b"").unwrap_err(), "cloud.crt holds no certificate"),
            (key(path, b"no pem").unwrap_err(), "cloud.crt holds no private key"),
            (
                certs(path, b"-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n").unwrap_err(),
                "is damaged",
            ),
            (certs(path, b"-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap_err(), "is damaged"),
        ] {
            assert!(shown.to_string().contains(wanted), "{shown}");
        }
    }
}
