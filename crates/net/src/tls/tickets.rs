//! Session tickets: a client that comes back to the same process resumes its TLS session, without a certificate being
//! sent or verified.
//!
//! The keys are random, and belong to one config of one process: no ticket outlives either.

use std::sync::Arc;

use tokio_rustls::rustls::crypto::aws_lc_rs::Ticketer;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::server::ProducesTickets;
use tokio_rustls::rustls::time_provider::TimeProvider;

use crate::tls::{certificate, text};

/// A ticketer for rustls that resumes a session only while the certificates of both sides are valid.
#[derive(derive_more::Debug)]
#[debug("Tickets({until})")]
pub(crate) struct Tickets {
    /// Expiry of the server's certificate in seconds since 1970.
    until: u64,
    clock: Arc<dyn TimeProvider>,
    inner: Arc<dyn ProducesTickets>,
}

impl Tickets {
    /// Creates a ticketer with new keys for a server with this certificate and its chain.
    ///
    /// # Errors
    ///
    /// The certificate cannot be parsed, or the library cannot create keys.
    pub(crate) fn new(chain: &[CertificateDer<'_>], clock: Arc<dyn TimeProvider>) -> Result<Self, String> {
        let until =
            chain.first().map_or(Ok(0), |leaf| certificate::validity(leaf).map(|dates| *dates.end()))?;
        Ok(Self { until, clock, inner: Ticketer::new().map_err(text)? })
    }

    fn now(&self) -> u64 {
        self.clock.current_time().map_or(0, |now| now.as_secs())
    }

    /// Returns true if both sides' certificates are valid. Otherwise a full handshake decides, and accepts a renewed
    /// certificate.
    fn may_resume(&self, session: &[u8]) -> bool {
        let now = self.now();
        let is_valid = |leaf| certificate::validity(leaf).is_ok_and(|dates| dates.contains(&now));
        now < self.until && client_certificate(session).is_some_and(|leaf| leaf.is_none_or(is_valid))
    }
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        let left = self.until.saturating_sub(self.now());
        self.inner.lifetime().min(u32::try_from(left).unwrap_or(u32::MAX))
    }

    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        self.may_resume(session).then(|| self.inner.encrypt(session)).flatten()
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.inner.decrypt(ticket).filter(|session| self.may_resume(session))
    }
}

/// Returns the client's certificate without its chain, if it has presented one, from the text that the library writes
/// into a ticket. Returns `None` for an unknown text.
///
/// The format is internal to the library. If it changes, no tickets are used, only full handshakes.
fn client_certificate(session: &[u8]) -> Option<Option<&[u8]>> {
    let (_server_name, text) = optional::<1>(session)?;
    let (_version, text) = text.split_first_chunk::<2>()?;
    let (_suite, text) = text.split_first_chunk::<2>()?;
    let (_secret, text) = counted::<1>(text)?;
    let (_extended_secret, text) = text.split_first()?;
    let (chain, _) = optional::<3>(text)?;
    match chain {
        Some(chain) => counted::<3>(chain).map(|(leaf, _)| Some(leaf)),
        None => Some(None),
    }
}

/// Splits off a field that follows its length, which has `N` bytes.
fn counted<const N: usize>(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, text) = text.split_first_chunk::<N>()?;
    text.split_at_checked(len.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)))
}

/// Like [`counted`], but after a byte that indicates whether the field is present.
fn optional<const N: usize>(text: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    match text.split_first()? {
        (0, rest) => Some((None, rest)),
        (1, rest) => counted::<N>(rest).map(|(it, rest)| (Some(it), rest)),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
