//! When the certificates of a file end.

use x509_parser::prelude::ASN1Time;

use super::leaf;

/// Seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// The first end of all.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl Ends {
    /// Of a PEM text; `None`: it holds no certificate that can be read.
    pub fn of(pem: &[u8]) -> Option<Self> {
        let certificates = rustls_pemfile::certs(&mut &*pem).filter_map(Result::ok).collect::<Vec<_>>();
        let ends = certificates.iter().filter_map(|der| leaf::validity(der).ok()).map(|valid| *valid.end());
        let (first, last) = (ends.clone().min()?, ends.max()?);
        Some(Self { first, last })
    }
}

/// A time as people write it.
pub fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| ASN1Time::from_timestamp(seconds).ok());
    time.map_or_else(|| seconds.to_string(), |time| time.to_string())
}
