//! Session tickets that edges can use at any server, whichever issued them.
//!
//! They are encrypted with keys derived from the private key that all servers share, so restarted servers know them
//! too. If clients are authenticated by certificates, shared tickets are not accepted, because anyone with that key
//! could create one with any certificate.

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
use tokio_rustls::rustls::time_provider::TimeProvider;

use crate::tls::{self, ClientAuth, TlsServerConfig, certificate, text};

/// The inputs of a server's TLS sessions. Servers accept each other's tickets only if all of these are equal.
struct TicketScope<'a> {
    /// The private key.
    key: &'a [u8],
    /// The certificates, trusted CAs and offered protocols, in the same order at each server.
    parts: Vec<&'a [u8]>,
}

/// A ticketer for rustls: encrypts the session tickets of a server, and decrypts those of servers with the same keys.
pub(crate) struct Tickets {
    /// Expiry of the certificate in seconds since 1970. No ticket is valid longer.
    until: u64,
    clock: Arc<dyn TimeProvider>,
    /// For tickets of TLS 1.3. If `None`, `own` encrypts these too.
    shared: Option<Shared>,
    /// Keys of this process only. They encrypt all tickets of TLS 1.2, which contain secrets that decrypt the whole
    /// session.
    own: Arc<dyn ProducesTickets>,
}

/// The keys of all servers with the same [`TicketScope`].
struct Shared {
    root: Prk,
    scope: Digest,
    keys: ArcSwap<Keys>,
}

/// The keys of the days with valid tickets.
struct Keys {
    today: u64,
    /// From the oldest day until tomorrow, because clocks differ.
    of_days: Vec<RandomizedNonceKey>,
}

impl TlsServerConfig {
    /// Creates the tickets of a server with these files.
    pub(crate) fn tickets(
        &self,
        cert: &[u8],
        key: &[u8],
        cas: &[Vec<u8>],
        clock: Arc<dyn TimeProvider>,
    ) -> Result<Tickets, String> {
        let leaf = tls::certs(&self.identity.cert, cert).map_err(text)?;
        let until =
            leaf.first().map_or(Ok(0), |leaf| certificate::validity(leaf).map(|dates| *dates.end()))?;
        let own = Ticketer::new().map_err(text)?;
        let shared = if self.clients.forbids_shared_tickets() {
            None
        } else {
            Some(self.shared(cert, key, cas, &*clock)?)
        };
        Ok(Tickets { until, clock, shared, own })
    }

    fn shared(
        &self,
        cert: &[u8],
        key: &[u8],
        cas: &[Vec<u8>],
        clock: &dyn TimeProvider,
    ) -> Result<Shared, String> {
        let private = tls::private_key(&self.identity.key, key).map_err(text)?;
        let (rule, offered) = (self.clients.rule(), self.alpn.concat());
        let mut parts = vec![cert, rule.as_bytes(), &offered];
        parts.extend(cas.iter().map(Vec::as_slice));
        Shared::new(&TicketScope { key: private.secret_der(), parts }, now(clock)).map_err(text)
    }
}

impl ClientAuth {
    /// Returns true if shared tickets must not be used, because clients are authenticated by certificates.
    ///
    /// Anyone who has the server's key could create a ticket with any client's certificate. Peers have that key anyway,
    /// and edges have fewer rights than peers.
    fn forbids_shared_tickets(&self) -> bool {
        match self {
            Self::Required(_) => true,
            Self::Anonymous | Self::Peers(..) => false,
            Self::Edges(_, others) => others.forbids_shared_tickets(),
        }
    }

    /// Returns the same text for all servers that authenticate clients by the same rule, given the same files.
    fn rule(&self) -> String {
        match self {
            Self::Anonymous => "anonymous".into(),
            Self::Required(_) => "required".into(),
            Self::Peers(_, name) => {
                format!("peers {}", name.as_ref().map(ServerName::to_str).unwrap_or_default())
            }
            Self::Edges(_, others) => format!("agents, {}", others.rule()),
        }
    }
}

impl Shared {
    /// Derives the keys of a scope.
    ///
    /// # Errors
    ///
    /// The library cannot create keys.
    fn new(scope: &TicketScope<'_>, now: u64) -> Result<Self, Unspecified> {
        let root = Salt::new(HKDF_SHA256, LABEL).extract(scope.key);
        let mut parts = Context::new(&SHA256);
        for part in &scope.parts {
            parts.update(&(part.len() as u64).to_be_bytes());
            parts.update(part);
        }
        let scope = parts.finish();
        let keys = ArcSwap::from_pointee(Keys::new(&root, scope.as_ref(), now / DAY)?);
        Ok(Self { root, scope, keys })
    }

    fn keys(&self, now: u64) -> Option<Arc<Keys>> {
        let keys = self.keys.load_full();
        if keys.today == now / DAY {
            return Some(keys);
        }
        let keys = Arc::new(Keys::new(&self.root, self.scope.as_ref(), now / DAY).ok()?);
        self.keys.store(Arc::clone(&keys));
        Some(keys)
    }

    fn seal(&self, plain: &[u8], now: u64) -> Option<Vec<u8>> {
        let keys = self.keys(now)?;
        let day = keys.today.to_be_bytes();
        let mut sealed = plain.to_vec();
        let nonce = keys.of(keys.today)?.seal_in_place_append_tag(Aad::from(day), &mut sealed).ok()?;
        Some([&day[..], nonce.as_ref(), &sealed].concat())
    }

    fn open(&self, ticket: &[u8], now: u64) -> Option<Vec<u8>> {
        let (day, sealed) = ticket.split_first_chunk::<8>()?;
        let (nonce, sealed) = sealed.split_first_chunk::<12>()?;
        let (keys, mut sealed) = (self.keys(now)?, sealed.to_vec());
        let key = keys.of(u64::from_be_bytes(*day))?;
        let plain = key.open_in_place(Nonce::from(nonce), Aad::from(day), &mut sealed).ok()?;
        Some(plain.to_vec())
    }
}

impl Tickets {
    /// Returns true if both sides' certificates are valid. Otherwise a full handshake decides, and accepts a renewed
    /// certificate.
    fn may_resume(&self, session: &TicketSession<'_>, now: u64) -> bool {
        let is_valid = |leaf| certificate::validity(leaf).is_ok_and(|dates| dates.contains(&now));
        now < self.until && session.leaf.is_none_or(is_valid)
    }
}

impl Keys {
    fn new(root: &Prk, scope: &[u8], today: u64) -> Result<Self, Unspecified> {
        let of_day = |day: u64| {
            let (mut key, day) = ([0; 32], day.to_be_bytes());
            root.expand(&[scope, &day], HKDF_SHA256)?.fill(&mut key)?;
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
        let most = self.shared.as_ref().map_or_else(|| self.own.lifetime().into(), |_| DAYS * DAY);
        u32::try_from(left.min(most)).unwrap_or(0)
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        let now = now(&*self.clock);
        let session = TicketSession::read(plain).filter(|session| self.may_resume(session, now))?;
        match &self.shared {
            Some(shared) if session.version == ProtocolVersion::TLSv1_3 => shared.seal(plain, now),
            _ => self.own.encrypt(plain),
        }
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        let now = now(&*self.clock);
        let opened = self.shared.as_ref().and_then(|shared| shared.open(ticket, now));
        let plain = opened.or_else(|| self.own.decrypt(ticket))?;
        TicketSession::read(&plain).is_some_and(|session| self.may_resume(&session, now)).then_some(plain)
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tickets").field("until", &self.until).finish_non_exhaustive()
    }
}

/// The fields of a decrypted session ticket that decide whether it may be resumed.
#[derive(Debug, PartialEq)]
struct TicketSession<'a> {
    version: ProtocolVersion,
    /// The client's certificate without its chain, if it presented one.
    leaf: Option<&'a [u8]>,
}

impl<'a> TicketSession<'a> {
    /// Parses the text that the library writes into a ticket.
    ///
    /// The format is internal to the library. If it changes, no tickets are used, only full handshakes.
    fn read(text: &'a [u8]) -> Option<Self> {
        let (_server_name, text) = optional::<1>(text)?;
        let (version, text) = text.split_first_chunk()?;
        let (_suite, text) = text.split_first_chunk::<2>()?;
        let (_secret, text) = counted::<1>(text)?;
        let (_extended_secret, text) = text.split_first()?;
        let (chain, _) = optional::<3>(text)?;
        let leaf = match chain {
            Some(chain) => Some(counted::<3>(chain)?.0),
            None => None,
        };
        Some(Self { version: ProtocolVersion::from(u16::from_be_bytes(*version)), leaf })
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

fn now(clock: &dyn TimeProvider) -> u64 {
    clock.current_time().map_or(0, |now| now.as_secs())
}

/// Label in the key derivation from the private key.
const LABEL: &[u8] = b"tunnel: session tickets, 1";
const DAY: u64 = 24 * 3600;
/// Number of days for which tickets are valid, the maximum in TLS 1.3.
const DAYS: u64 = 7;

#[cfg(test)]
pub(crate) mod tests;
