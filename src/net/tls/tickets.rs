//! Tickets by which clients resume sessions at any pod, whichever gave them: what seals them comes from the private key that
//! all pods share, so that pods that start anew know them too.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::aead::{AES_256_GCM, Aad, Nonce, RandomizedNonceKey};
use aws_lc_rs::digest::{Context, Digest, SHA256};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, Prk, Salt};
use tokio_rustls::rustls::ProtocolVersion;
use tokio_rustls::rustls::crypto::aws_lc_rs::Ticketer;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::ProducesTickets;
use tokio_rustls::rustls::time_provider::{DefaultTimeProvider, TimeProvider};

use super::{ClientCertificates, ServerSettings, leaf, text};
use crate::net::pem;

/// What a server's sessions stand on. Only servers that agree on all of it take each other's tickets.
struct Ground<'a> {
    /// The private key.
    key: &'a [u8],
    /// The certificates, who is believed and what is offered, in the same order at each.
    parts: Vec<&'a [u8]>,
    /// The end of the certificate, in seconds since 1970: no ticket outlives it.
    until: u64,
}

/// Seals and opens tickets of TLS 1.3. Those of TLS 1.2 hold what decrypts their whole session, so they are sealed by `own`,
/// whose keys nobody else ever has.
pub(super) struct Tickets {
    root: Prk,
    ground: Digest,
    until: u64,
    clock: Arc<dyn TimeProvider>,
    own: Arc<dyn ProducesTickets>,
    keys: ArcSwap<Keys>,
}

/// The keys of the days whose tickets are taken.
struct Keys {
    today: u64,
    /// From the oldest day on to tomorrow, as clocks differ.
    of_days: Vec<RandomizedNonceKey>,
}

impl ServerSettings {
    /// What gives and takes the tickets of a server with these files.
    pub(super) fn tickets(&self, cert: &[u8], key: &[u8], cas: &[Vec<u8>]) -> Result<Tickets, String> {
        let private = pem::key(&self.identity.key, key).map_err(text)?;
        let leaf = pem::certs(&self.identity.cert, cert).map_err(text)?;
        let until = leaf.first().map_or(Ok(0), |leaf| leaf::validity(leaf).map(|dates| *dates.end()))?;
        let (rule, offered) = (self.clients.rule(), self.alpn.concat());
        let mut parts = vec![cert, rule.as_bytes(), &offered];
        parts.extend(cas.iter().map(Vec::as_slice));
        let ground = Ground { key: private.secret_der(), parts, until };
        let own = Ticketer::new().map_err(text)?;
        Tickets::new(&ground, Arc::new(DefaultTimeProvider), own).map_err(text)
    }
}

impl ClientCertificates {
    /// The same text for all servers that believe by the same rule, given the same files.
    fn rule(&self) -> String {
        match self {
            Self::Anonymous => "anonymous".into(),
            Self::Optional(_) => "optional".into(),
            Self::Required(_) => "required".into(),
            Self::Siblings(_, name) => {
                format!("siblings {}", name.as_ref().map(ServerName::to_str).unwrap_or_default())
            }
            Self::Agents(_, others) => format!("agents, {}", others.rule()),
        }
    }
}

impl Tickets {
    /// For servers on that ground.
    ///
    /// # Errors
    ///
    /// The library makes no keys.
    fn new(
        ground: &Ground<'_>,
        clock: Arc<dyn TimeProvider>,
        own: Arc<dyn ProducesTickets>,
    ) -> Result<Self, Unspecified> {
        let root = Salt::new(HKDF_SHA256, LABEL).extract(ground.key);
        let mut parts = Context::new(&SHA256);
        for part in &ground.parts {
            parts.update(&(part.len() as u64).to_be_bytes());
            parts.update(part);
        }
        let (ground, until) = (parts.finish(), ground.until);
        let today = now(&*clock) / DAY;
        let keys = ArcSwap::from_pointee(Keys::new(&root, ground.as_ref(), today)?);
        Ok(Self { root, ground, until, clock, own, keys })
    }

    /// The keys of now; `None` once the certificate has ended.
    fn keys(&self) -> Option<Arc<Keys>> {
        let now = now(&*self.clock);
        let keys = self.keys.load_full();
        if now >= self.until || keys.today == now / DAY {
            return (now < self.until).then_some(keys);
        }
        let keys = Arc::new(Keys::new(&self.root, self.ground.as_ref(), now / DAY).ok()?);
        self.keys.store(Arc::clone(&keys));
        Some(keys)
    }
}

impl Keys {
    fn new(root: &Prk, ground: &[u8], today: u64) -> Result<Self, Unspecified> {
        let of_day = |day: u64| {
            let (mut key, day) = ([0; 32], day.to_be_bytes());
            root.expand(&[ground, &day], HKDF_SHA256)?.fill(&mut key)?;
            RandomizedNonceKey::new(&AES_256_GCM, &key)
        };
        let days = today.saturating_sub(DAYS)..=today + 1;
        Ok(Self { today, of_days: days.map(of_day).collect::<Result<_, _>>()? })
    }

    fn of(&self, day: u64) -> Option<&RandomizedNonceKey> {
        let nth = day.checked_sub(self.today.saturating_sub(DAYS))?;
        self.of_days.get(usize::try_from(nth).ok()?)
    }
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        let left = self.until.saturating_sub(now(&*self.clock));
        u32::try_from(left.min(DAYS * DAY)).unwrap_or(0)
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        let keys = self.keys()?;
        if version(plain) != Some(ProtocolVersion::TLSv1_3) {
            return self.own.encrypt(plain);
        }
        let day = keys.today.to_be_bytes();
        let mut sealed = plain.to_vec();
        let nonce = keys.of(keys.today)?.seal_in_place_append_tag(Aad::from(day), &mut sealed).ok()?;
        Some([&day[..], nonce.as_ref(), &sealed].concat())
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        let keys = self.keys()?;
        let opened = || {
            let (day, sealed) = ticket.split_first_chunk::<8>()?;
            let (nonce, sealed) = sealed.split_first_chunk::<12>()?;
            let mut sealed = sealed.to_vec();
            let key = keys.of(u64::from_be_bytes(*day))?;
            let plain = key.open_in_place(Nonce::from(nonce), Aad::from(day), &mut sealed).ok()?;
            Some(plain.to_vec())
        };
        opened().or_else(|| self.own.decrypt(ticket))
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tickets").field("until", &self.until).finish_non_exhaustive()
    }
}

/// The version of a session as the library writes it: behind the server's name, if there is one.
fn version(session: &[u8]) -> Option<ProtocolVersion> {
    let behind = match session {
        [0, behind @ ..] => behind,
        [1, len, named @ ..] => named.get(usize::from(*len)..)?,
        _ => return None,
    };
    Some(ProtocolVersion::from(u16::from_be_bytes(*behind.first_chunk()?)))
}

fn now(clock: &dyn TimeProvider) -> u64 {
    clock.current_time().map_or(0, |now| now.as_secs())
}

/// In what this program derives from the private key.
const LABEL: &[u8] = b"tunnel: session tickets, 1";
const DAY: u64 = 24 * 3600;
/// So many days are tickets taken; TLS 1.3 allows no more.
const DAYS: u64 = 7;

#[cfg(test)]
mod tests;
