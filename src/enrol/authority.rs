//! The authority by which a cloud is to be believed.

use std::path::PathBuf;

use aws_lc_rs::digest::{SHA256, digest};

use super::code::Pin;
use crate::net::pem;
use crate::net::reload::{Reload, ReloadError};
use crate::net::tls::{host_of, issuer};

/// What those get to know who want to join a cloud.
#[derive(Debug, Clone)]
pub struct CloudAuthority {
    /// The certificates of its authorities, PEM: one, or several while they change.
    pub(super) certificates: String,
    /// Of the one that has signed the pods' certificate.
    pub(super) pin: Pin,
    /// A name in that certificate.
    pub(super) host: Option<String>,
}

impl CloudAuthority {
    /// Reads the authorities' file and that of the pod's certificate, now and when they change.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or none of the authorities has signed the certificate.
    pub fn load(authorities: PathBuf, certificate: PathBuf) -> Result<Reload<Self>, ReloadError> {
        let paths = vec![authorities.clone(), certificate.clone()];
        Reload::new(paths, move |contents| {
            let [ca, cert] = contents else { return Err("a file is missing".into()) };
            let all = pem::certs(&authorities, ca).map_err(|cause| cause.to_string())?;
            let chain = pem::certs(&certificate, cert).map_err(|cause| cause.to_string())?;
            let signer = issuer(&all, &chain).ok_or_else(|| {
                format!(
                    "none of the authorities in {} has signed {}: name the file of the one that has",
                    authorities.display(),
                    certificate.display()
                )
            })?;
            let host = chain.first().and_then(|leaf| host_of(leaf));
            let certificates = String::from_utf8_lossy(ca).into_owned();
            Ok(Self { certificates, pin: Self::pin_of(&signer), host })
        })
    }

    /// What an invitation says of an authority's certificate (DER).
    pub fn pin_of(certificate: &[u8]) -> Pin {
        let mut pin = Pin::default();
        pin.iter_mut().zip(digest(&SHA256, certificate).as_ref()).for_each(|(pin, byte)| *pin = *byte);
        pin
    }
}
