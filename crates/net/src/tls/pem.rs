//! Reads certificates and keys from PEM files. Only this code uses the PEM library.

use std::io;
use std::path::Path;

use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use tunnel_base::files;
use tunnel_proto::printable::printable;

/// Parses all certificates of a file, at least one. `path` is only used in the error, which names the file, what was
/// found in it, and how to fix that.
pub fn certs(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certs = rustls_pemfile::certs(&mut &*pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|cause| damaged(path, &cause))?;
    if certs.is_empty() {
        let (found, hint) = content(pem, &CERTIFICATE_FORMS);
        let path = path.display();
        return Err(format!(
            "{path} holds no certificate: {found}; expected at least one `BEGIN CERTIFICATE` block{hint}"
        ));
    }
    Ok(certs)
}

/// Returns the first certificate of a file. `None` if there is none, or the file cannot be read. Blocks on the disk.
pub fn leaf(path: &Path) -> Option<CertificateDer<'static>> {
    certs(path, &files::read(path).ok()?).ok()?.into_iter().next()
}

/// Parses the first private key of a file: PKCS#8, PKCS#1 or SEC1. Errors are like those of [`certs`].
pub fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    let has_passphrase = pem.windows(PASSPHRASE.len()).any(|bytes| bytes == PASSPHRASE.as_bytes());
    let key = if has_passphrase { Ok(None) } else { rustls_pemfile::private_key(&mut &*pem) };
    key.map_err(|cause| damaged(path, &cause))?.ok_or_else(|| {
        let (found, hint) = content(pem, &KEY_FORMS);
        let path = path.display();
        format!(
            "{path} holds no private key: {found}; expected a `BEGIN PRIVATE KEY` block without a passphrase{hint}"
        )
    })
}

fn damaged(path: &Path, cause: &io::Error) -> String {
    format!(
        "{} is damaged: {cause}; restore it from the original (`openssl x509 -in FILE -noout -text` prints a \
         certificate)",
        path.display()
    )
}

/// Describes a file without the expected block, and returns the hint for the first form that it contains.
fn content(pem: &[u8], forms: &[(&str, &'static str)]) -> (String, &'static str) {
    let text = String::from_utf8_lossy(pem);
    let labels =
        text.lines().filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"));
    let mut labels: Vec<_> = labels.take(MAX_LABELS).map(printable).collect();
    labels.dedup();
    let found = match labels.as_slice() {
        _ if pem.trim_ascii().is_empty() => "it is empty".to_owned(),
        _ if text.contains(PASSPHRASE) => "it has an encrypted block".to_owned(),
        [] if pem.first() == Some(&DER_SEQUENCE) => "it is a binary file (DER or PKCS #12)".to_owned(),
        [] => "it has no PEM block".to_owned(),
        labels => format!("it has a block {}", labels.join(", ")),
    };
    let is_in = |form: &str| {
        form == BINARY && found.contains(BINARY)
            || form == PASSPHRASE && text.contains(PASSPHRASE)
            || labels.iter().any(|label| label.contains(form))
    };
    (found.clone(), forms.iter().find(|(form, _)| is_in(form)).map_or("", |(_, hint)| hint))
}

/// Forms in which openssl writes certificates, by their label, and how to convert them.
const CERTIFICATE_FORMS: [(&str, &str); 6] = [
    (
        BINARY,
        "; convert it with `openssl x509 -inform DER -in OLD -out NEW`, or `openssl pkcs12 -in OLD -nokeys -out NEW`",
    ),
    ("PKCS7", "; convert it with `openssl pkcs7 -print_certs -in OLD -out NEW`"),
    ("CERTIFICATE REQUEST", "; a CA has to sign the request first"),
    ("TRUSTED CERTIFICATE", "; convert it with `openssl x509 -in OLD -out NEW`"),
    ("X509 CERTIFICATE", "; convert it with `openssl x509 -in OLD -out NEW`"),
    ("PRIVATE KEY", "; it may be the file of the key"),
];

/// The same for keys.
const KEY_FORMS: [(&str, &str); 5] = [
    (
        BINARY,
        "; convert it with `openssl pkey -inform DER -in OLD -out NEW`, or `openssl pkcs12 -in OLD -nocerts -nodes -out NEW`",
    ),
    (PASSPHRASE, "; remove the passphrase with `openssl pkey -in OLD -out NEW`"),
    ("ENCRYPTED PRIVATE KEY", "; remove the passphrase with `openssl pkey -in OLD -out NEW`"),
    ("PUBLIC KEY", "; this is only the public half of the key"),
    ("CERTIFICATE", "; it may be the file of the certificate"),
];

/// A form without labels.
const BINARY: &str = "binary";
/// A header in a block of an encrypted key, in openssl's traditional form.
const PASSPHRASE: &str = "Proc-Type: 4,ENCRYPTED";
/// First byte of every certificate and key in DER.
const DER_SEQUENCE: u8 = 0x30;
/// Maximum number of blocks that an error names.
const MAX_LABELS: usize = 5;

/// Kinds of keys that the library supports; openssl makes more.
pub const SUPPORTED_KEYS: &str = "RSA with 2048 to 8192 bits, ECDSA with P-256, P-384 or P-521, or Ed25519";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_and_key_are_found_in_one_file() {
        let made = rcgen::generate_simple_self_signed(["edge".into()]).unwrap();
        let both = format!("{}{}{}", made.cert.pem(), made.signing_key.serialize_pem(), made.cert.pem());
        assert_eq!(certs(Path::new("x"), both.as_bytes()).unwrap().len(), 2);
        assert!(private_key(Path::new("x"), both.as_bytes()).is_ok());
    }

    #[test]
    fn an_unusable_pem_file_is_an_error_with_its_name_and_cause() {
        let path = Path::new("cloud.crt");
        let block = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
        let no_cert = |label: &str| certs(path, block(label).as_bytes()).unwrap_err();
        let no_key = |label: &str| private_key(path, block(label).as_bytes()).unwrap_err();
        let encrypted =
            b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\nAAAA\n\
                          -----END RSA PRIVATE KEY-----\n";
        for (shown, expected) in [
            (certs(path, b"").unwrap_err(), "cloud.crt holds no certificate: it is empty"),
            (
                private_key(path, b"no pem").unwrap_err(),
                "cloud.crt holds no private key: it has no PEM block",
            ),
            (certs(path, b"0\x82").unwrap_err(), "it is a binary file (DER or PKCS #12); expected"),
            (private_key(path, b"0\x82").unwrap_err(), "`openssl pkey -inform DER -in OLD"),
            (no_cert("PKCS7"), "it has a block PKCS7; expected at least one"),
            (no_cert("TRUSTED CERTIFICATE"), "`openssl x509 -in OLD -out NEW`"),
            (no_cert("CERTIFICATE REQUEST"), "a CA has to sign the request first"),
            (no_cert("EC PRIVATE KEY"), "it may be the file of the key"),
            (no_key("ENCRYPTED PRIVATE KEY"), "remove the passphrase with `openssl pkey"),
            (private_key(path, encrypted).unwrap_err(), "remove the passphrase with `openssl pkey"),
            (no_key("PUBLIC KEY"), "only the public half of the key"),
            (no_key("CERTIFICATE"), "it may be the file of the certificate"),
            (
                certs(path, b"-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n").unwrap_err(),
                "is damaged",
            ),
            (certs(path, b"-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap_err(), "is damaged"),
        ] {
            assert!(shown.contains(expected), "{shown}");
        }
    }
}
