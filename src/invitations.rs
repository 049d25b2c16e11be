//! Machines that become nodes by invitation: makes and honours invitations, and knows the tokens of who has joined.

pub mod store;

use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::invitations::store::{
    CellError, EnrolmentState, InvitationError, SecretHash, SharedState, TooManyInvitations,
};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_base::names::NodeName;
use tunnel_net::limiter::{LoginThrottle, Source};
use tunnel_net::reload::{Reload, ReloadError};
use tunnel_net::tls;
use tunnel_net::tls::certificate::host_of;
use tunnel_net::tls::verify::issuer;

/// What the pods of a cloud share of nodes that join, as this pod knows it, and the ways to change it.
#[derive(Debug)]
pub struct Enrolment {
    cell: tokio::sync::Mutex<SharedState>,
    known: ArcSwap<EnrolmentState>,
    changed: watch::Sender<()>,
    /// When the store was last read, well or not.
    looked: Mutex<Option<Instant>>,
    authority: Reload<ServerCa>,
    wrong: Mutex<LoginThrottle>,
}

/// An invitation, as its maker gets it.
#[derive(Debug, Clone)]
pub struct IssuedInvitation {
    /// What is given to who sets the machine up: a secret.
    pub code: InvitationCode,
    /// Until when it counts.
    pub until: SystemTime,
    /// A name or address of the cloud, of those in its certificate.
    pub host: Option<String>,
}

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum EnrolError<E> {
    /// It may not be.
    #[error(transparent)]
    Refused(E),
    /// The store cannot be used now.
    #[error("invitations cannot be kept: {0}")]
    Store(#[from] CellError),
    /// The store holds something else.
    #[error("invitations cannot be read: {0}; name another store, or mend it")]
    Foreign(String),
    /// Others were quicker each time.
    #[error("other pods have changed the invitations {MAX_TRIES} times while we tried: try again")]
    Contended,
}

/// Why a machine has not joined.
#[derive(Debug, thiserror::Error)]
pub enum JoinRefusal {
    /// What it asks with is none.
    #[error("{0}")]
    Malformed(&'static str),
    /// Its invitation does not count.
    #[error(transparent)]
    Uninvited(InvitationError),
    /// Too many wrong ones came from there.
    #[error("too many wrong invitations from your address: wait a minute")]
    TooOften,
    /// It may ask again.
    #[error("{0}")]
    Later(String),
}

impl Enrolment {
    /// Nothing is known until [`Self::follow`] runs, or somebody looks.
    pub fn new(cell: SharedState, authority: Reload<ServerCa>) -> Arc<Self> {
        Arc::new(Self {
            cell: tokio::sync::Mutex::new(cell),
            known: ArcSwap::default(),
            changed: watch::Sender::new(()),
            looked: Mutex::default(),
            authority,
            wrong: Mutex::new(LoginThrottle::new()),
        })
    }

    /// Who has joined, as last read.
    pub fn known(&self) -> Arc<EnrolmentState> {
        self.known.load_full()
    }

    /// A receiver that is notified when [`Self::known`] changes.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The authority (PEM) by which the cloud is to be believed.
    pub fn certificates(&self) -> String {
        self.authority.load().certificates.clone()
    }

    /// Reads the store every few seconds until draining begins; `report` hears after each time whether that went well.
    pub async fn follow(self: Arc<Self>, report: impl Fn(Result<(), String>), drain: Drain) {
        let mut failing = false;
        loop {
            let looked = self.look().await;
            if let Err(why) = &looked
                && !failing
            {
                warn!("who has joined is not known anew, trying on: {why}");
            }
            failing = looked.is_err();
            report(looked.map_err(|why| why.to_string()));
            tokio::select! {
                biased;
                () = drain.draining() => return,
                () = sleep(LOOK_INTERVAL.mul_f64(0.5 + rand::random::<f64>())) => {}
            }
        }
    }

    /// Reads the store now, for who may have joined a moment ago at another pod; but not if that was done within a second.
    pub async fn refresh_soon(&self) {
        let due = |looked: Option<Instant>| looked.is_none_or(|looked| looked.elapsed() >= LOOK_PAUSE);
        if due(*lock(&self.looked)) {
            // The failure is told by `follow`.
            let _ = tokio::time::timeout(LOOK_TIMEOUT, self.look()).await;
        }
    }

    /// Makes an invitation that counts for so long; `who` is for the log.
    ///
    /// # Errors
    ///
    /// It was not made.
    pub async fn invite(
        &self,
        node: &NodeName,
        lasting: Duration,
        who: &str,
    ) -> Result<IssuedInvitation, EnrolError<TooManyInvitations>> {
        let authority = self.authority.load();
        let code = InvitationCode::random(authority.pin);
        let (now, hash) = (now(), code.hash());
        let until = now.saturating_add(lasting.as_secs());
        self.change(|enrolled| enrolled.invite(hash.clone(), node, until, now)).await?;
        info!(target: AUDIT, who, %node, seconds = lasting.as_secs(), "an invitation was made");
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(until);
        Ok(IssuedInvitation { code, until, host: authority.host.clone() })
    }

    /// Takes a node's token and open invitations away. Whether there was any.
    ///
    /// # Errors
    ///
    /// The store cannot be used.
    pub async fn revoke(&self, node: &NodeName, who: &str) -> Result<bool, EnrolError<Infallible>> {
        let revoked = self.change(|enrolled| Ok(enrolled.revoke(node))).await?;
        if revoked {
            info!(target: AUDIT, who, %node, "the node's token and its open invitations were revoked");
        }
        Ok(revoked)
    }

    /// Has a machine join: `secret` is its invitation's, `token` what it wants to prove itself with.
    ///
    /// # Errors
    ///
    /// It has not joined, for all that is known here.
    pub async fn join(&self, from: IpAddr, secret: &str, node: &str, token: &str) -> Result<(), JoinRefusal> {
        let who = (Source::of(from), 0);
        if lock(&self.wrong).check(&who, Instant::now()) {
            return Err(JoinRefusal::TooOften);
        }
        let name =
            node.parse::<NodeName>().map_err(|_| JoinRefusal::Malformed("that is no name of a node"))?;
        let strong = (MIN_TOKEN..=MAX_TOKEN).contains(&token.len());
        if !strong || !token.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(JoinRefusal::Malformed("the token has to be 32 to 128 letters and digits"));
        }
        let (hash, token, now) = (SecretHash::of(secret), SecretHash::of(token), now());
        let joined = self.change(|enrolled| enrolled.join(&hash, &name, token.clone(), now)).await;
        match joined {
            Ok(true) => info!(target: AUDIT, who = %name, %from, "a node has joined by its invitation"),
            Ok(false) => info!(target: AUDIT, who = %name, %from, "a node that has joined asked again"),
            Err(EnrolError::Refused(why)) => {
                lock(&self.wrong).add(who, Instant::now());
                return Err(JoinRefusal::Uninvited(why));
            }
            Err(why) => {
                warn!(%from, node = %name, "not joined: {why}");
                return Err(JoinRefusal::Later("this pod cannot tell who is invited: see its log".into()));
            }
        }
        Ok(())
    }

    async fn look(&self) -> Result<(), EnrolError<Infallible>> {
        let mut cell = self.cell.lock().await;
        let seen = cell.read().await;
        *lock(&self.looked) = Some(Instant::now());
        let read = self.parse(&seen?.text).map_err(EnrolError::Foreign)?;
        self.know(read);
        Ok(())
    }

    /// Changes what all pods share: reads it, applies the change, and writes it unless another pod was quicker; then
    /// once more.
    async fn change<T, E>(
        &self,
        apply: impl Fn(&mut EnrolmentState) -> Result<T, E>,
    ) -> Result<T, EnrolError<E>> {
        let mut cell = self.cell.lock().await;
        for _ in 0..MAX_TRIES {
            let seen = cell.read().await?;
            let old = self.parse(&seen.text).map_err(EnrolError::Foreign)?;
            let mut new = old.clone();
            let done = apply(&mut new).map_err(EnrolError::Refused)?;
            if new == old || cell.write(&seen, new.to_text()).await? {
                self.know(new);
                return Ok(done);
            }
            sleep(TRY_PAUSE.mul_f64(rand::random())).await;
        }
        Err(EnrolError::Contended)
    }

    /// A store that has lost what it held, as a disk that is not mounted has, revokes nobody.
    fn parse(&self, text: &[u8]) -> Result<EnrolmentState, String> {
        if text.trim_ascii().is_empty() && **self.known.load() != EnrolmentState::default() {
            return Err("they are gone, and what was read before counts on".into());
        }
        EnrolmentState::parse(text)
    }

    fn know(&self, enrolled: EnrolmentState) {
        if **self.known.load() != enrolled {
            self.known.store(Arc::new(enrolled));
            self.changed.send_replace(());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// How often the store is read, on average.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Between two looks for the sake of strangers.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// How long a stranger's call waits for such a look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// Tries to change what others change as well, and the longest pause between them.
const MAX_TRIES: usize = 30;
const TRY_PAUSE: Duration = Duration::from_millis(50);

/// Characters of a token that nobody guesses, and that fits everywhere.
const MIN_TOKEN: usize = 32;
const MAX_TOKEN: usize = 128;

// The authority by which a cloud is to be believed.

/// What those get to know who want to join a cloud.
#[derive(Debug, Clone)]
pub struct ServerCa {
    /// The certificates of its authorities, PEM: one, or several while they change.
    pub(crate) certificates: String,
    /// Of the one that has signed the pods' certificate.
    pub(crate) pin: Pin,
    /// A name in that certificate.
    pub(crate) host: Option<String>,
}

impl ServerCa {
    /// Reads the authorities' file and that of the pod's certificate, now and when they change.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or none of the authorities has signed the certificate.
    pub fn load(authorities: PathBuf, certificate: PathBuf) -> Result<Reload<Self>, ReloadError> {
        let paths = vec![authorities.clone(), certificate.clone()];
        Reload::new(paths, move |contents| {
            let [ca, cert] = contents else { return Err("a file is missing".into()) };
            let all = tls::certs(&authorities, ca).map_err(|cause| cause.to_string())?;
            let chain = tls::certs(&certificate, cert).map_err(|cause| cause.to_string())?;
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

// What an invitation looks like: one word, with a hash of the cloud's authority and a secret in it.

/// An invitation's code. It is a secret, and displays as what is given to who sets a machine up.
#[derive(Clone, PartialEq, Eq)]
pub struct InvitationCode {
    pin: Pin,
    secret: [u8; SECRET_BYTES],
}

/// The first half of the SHA-256 of an authority's certificate (DER).
pub type Pin = [u8; PIN_BYTES];

/// A text that is no code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "that is no invitation: want the {CODE_CHARS} letters, digits, - and _ that `tunnel invite` has printed"
)]
pub struct CodeError;

impl InvitationCode {
    /// A new one of the cloud with this authority.
    pub fn random(pin: Pin) -> Self {
        Self { pin, secret: rand::random() }
    }

    /// Of the authority that the cloud has to show.
    pub fn pin(&self) -> Pin {
        self.pin
    }

    /// What the cloud knows the invitation by, and nobody else.
    pub fn secret(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.secret)
    }

    /// By which the cloud keeps it.
    pub(crate) fn hash(&self) -> SecretHash {
        SecretHash::of(&self.secret())
    }
}

impl FromStr for InvitationCode {
    type Err = CodeError;

    fn from_str(text: &str) -> Result<Self, CodeError> {
        let text = text.trim().strip_prefix(START).ok_or(CodeError)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| CodeError)?;
        let (pin, secret) = bytes.split_first_chunk().ok_or(CodeError)?;
        Ok(Self { pin: *pin, secret: secret.try_into().map_err(|_| CodeError)? })
    }
}

impl fmt::Display for InvitationCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{START}{}", URL_SAFE_NO_PAD.encode([self.pin.as_slice(), &self.secret].concat()))
    }
}

impl fmt::Debug for InvitationCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// 128 bits that nobody finds a second certificate for.
const PIN_BYTES: usize = 16;

/// 128 bits that nobody guesses.
const SECRET_BYTES: usize = 16;

/// How a code begins: what follows may be `-`, which a command line would take for an option's.
const START: char = 'i';

/// That, and as many as 32 bytes take.
const CODE_CHARS: usize = 44;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod code_tests {
    use super::*;

    #[test]
    fn a_code_is_one_word_that_is_read_as_it_was_printed() {
        let code = InvitationCode::random([7; PIN_BYTES]);
        let text = code.to_string();
        assert_eq!(text.len(), CODE_CHARS);
        assert!(!InvitationCode::random([0xf8; PIN_BYTES]).to_string().starts_with('-'), "that is an option");
        assert_eq!(format!(" {text}\n").parse(), Ok(code.clone()));
        assert_eq!((code.pin(), format!("{code:?}").as_str()), ([7; PIN_BYTES], "***"));
        for bad in ["", "abc", &text[1..], &format!("{text}A"), &text.replace(&text[..1], "!")] {
            assert_eq!(bad.parse::<InvitationCode>(), Err(CodeError), "{bad}");
        }
    }
}
