//! The checks that a client passes before anything is opened for it: address, password, rules.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::listener::{Denial, NAME_CHARS};
use tunnel_base::names::NodeName;
use tunnel_base::policy::zone::Zone;
use tunnel_base::policy::{CertificateGlob, Networks, Rules, plain};
use tunnel_net::limiter::{FairLimiter, Limits, LoginThrottle, Source, Who};
use tunnel_net::reload::Reload;

/// The access checks of one front end: every client passes them before anything is opened for it.
#[derive(Debug, Clone, Default)]
pub struct AccessPolicy {
    /// Networks that clients may come from; `None`: any address.
    pub allow_from: Option<Networks>,
    /// Users and their passwords; `None`: no client is asked for one.
    pub logins: Option<Arc<PasswordChecker>>,
    /// Names of client certificates that are accepted.
    pub names: Vec<CertificateGlob>,
    /// Which users and networks may reach which nodes and ports.
    pub rules: Rules,
    /// The DNS zone in which nodes have a second name; `None`: only their own names are accepted.
    pub zone: Option<Arc<Zone>>,
}

/// Names and passwords, as bcrypt hashes from an htpasswd file.
#[derive(Clone)]
pub struct Users {
    hashes: HashMap<String, String>,
    /// A hash that no password fits, and whose check takes as long as the slowest of `hashes`, so that its time does
    /// not show whether a user exists.
    nobody: String,
}

/// Why an htpasswd file cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsersError {
    /// No line holds a user with a bcrypt hash. Make one with `htpasswd -nB name`.
    #[error("no user with a bcrypt hash in it: make one with `htpasswd -nB <name>`")]
    Empty,
}

/// Checks passwords: a few at once, the sources in turn. A right one is remembered for a minute.
pub struct PasswordChecker {
    users: Reload<Users>,
    recent: Mutex<LoginCache>,
    failures: Mutex<LoginThrottle>,
    /// Two random keys of this process for the fingerprints in [`Self::recent`].
    keys: (RandomState, RandomState),
    turns: FairLimiter,
}

impl AccessPolicy {
    /// Checks the client's address against [`Self::allow_from`].
    ///
    /// # Errors
    ///
    /// [`Denial::Forbidden`] if not.
    pub fn check_source(&self, from: IpAddr) -> Result<(), Denial> {
        match &self.allow_from {
            Some(networks) if !networks.contains(from) => {
                Err(Denial::Forbidden(format!("your address {} is not allowed here", plain(from))))
            }
            _ => Ok(()),
        }
    }

    /// The user whose password the request's head holds, or `None` if no client is asked for one. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`Denial::Credentials`] if the password is missing, [`Denial::Password`] if it is wrong; [`Denial::Busy`] if too
    /// many are being checked, [`Denial::WrongPasswords`] if too many from this address were wrong.
    pub async fn authenticate(&self, head: &HeaderMap, from: IpAddr) -> Result<Option<String>, Denial> {
        match &self.logins {
            None => Ok(None),
            Some(logins) => logins.check(head, Source::of(from)).await.map(Some),
        }
    }

    /// The user that a certificate with these names stands for: the first of them that is accepted at that front end.
    ///
    /// # Errors
    ///
    /// [`Denial::Forbidden`] if none is.
    pub fn user_of_certificate(&self, names: &[String], front: &str) -> Result<String, Denial> {
        let accepted = |name: &&String| self.names.iter().any(|glob| glob.matches(name));
        let user = names.iter().find(accepted).cloned();
        user.ok_or_else(|| Denial::unknown(names, front))
    }

    /// Checks the rules for this client, node and port.
    ///
    /// # Errors
    ///
    /// [`Denial::Forbidden`] if not.
    pub fn authorize(
        &self,
        user: Option<&str>,
        from: IpAddr,
        node: &NodeName,
        port: u16,
    ) -> Result<(), Denial> {
        if self.rules.allows(user, from, node, port) {
            return Ok(());
        }
        let who = user.unwrap_or("you");
        Err(Denial::Forbidden(format!("no rule lets {who} reach port {port} of node {node}")))
    }
}

impl Users {
    /// Reads an htpasswd file: `name:hash` a line; empty lines and those that begin with `#` are passed over.
    ///
    /// Lines without a bcrypt hash are left out with a warning: the other kinds are too weak to hold today.
    ///
    /// # Errors
    ///
    /// No line holds a user with a bcrypt hash.
    pub fn parse(text: &str) -> Result<Self, UsersError> {
        let mut hashes = HashMap::new();
        let mut cost = MIN_COST;
        for (at, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, hash) = line.split_once(':').unwrap_or((line, ""));
            match bcrypt_cost(hash) {
                Some(found) if !name.is_empty() => {
                    cost = cost.max(found);
                    hashes.insert(name.to_owned(), hash.to_owned());
                }
                _ => warn!(
                    line = at,
                    "not a user with a bcrypt hash of cost {MIN_COST} to {MAX_COST}, left out: \
                     make it anew with `htpasswd -nB <name>`"
                ),
            }
        }
        if hashes.is_empty() {
            return Err(UsersError::Empty);
        }
        Ok(Self { hashes, nobody: format!("$2b${cost:02}${DUMMY_HASH}") })
    }

    /// How many users there are.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Always false after [`Self::parse`], which takes no file without users.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }
}

impl PasswordChecker {
    /// Each check reads the users that the file holds at that moment.
    pub fn new(users: Reload<Users>) -> Self {
        Self {
            users,
            recent: Mutex::default(),
            failures: Mutex::new(LoginThrottle::new()),
            keys: (RandomState::new(), RandomState::new()),
            turns: FairLimiter::new(Limits {
                permits: max_concurrent(),
                per_source: usize::MAX,
                waiting: WAITING,
                idle_timeout: None,
            }),
        }
    }

    async fn check(&self, head: &HeaderMap, from: Source) -> Result<String, Denial> {
        let given = head.get(PROXY_AUTHORIZATION).and_then(|v| basic(v.to_str().ok()?));
        let (name, password) = given.ok_or(Denial::Credentials)?;
        let (hash, known) = {
            let users = self.users.load();
            let hash = users.hashes.get(&name);
            (hash.unwrap_or(&users.nobody).clone(), hash.is_some())
        };
        let (who, print) = ((from, self.keys.0.hash_one(&name)), self.fingerprint(&name, &password, &hash));
        if self.recent().holds(print, Instant::now()) {
            return Ok(name);
        }
        self.check_throttle(&who)?;
        let turn = timeout(LOGIN_TIMEOUT, self.turns.acquire(&from)).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(Denial::Busy("too many logins at once"))?;
        // While this login waited, another with the same password may have been let in, or others may have failed.
        if self.recent().holds(print, Instant::now()) {
            return Ok(name);
        }
        self.check_throttle(&who)?;
        let right = tokio::task::spawn_blocking(move || {
            // The check takes the turn with it: a client that hangs up neither stops it nor frees the turn early.
            let _turn = turn;
            bcrypt::verify(password, &hash).unwrap_or(false)
        });
        if !(right.await.unwrap_or(false) && known) {
            self.failures().add(who, Instant::now());
            return Err(Denial::Password(name.chars().take(NAME_CHARS).collect()));
        }
        self.failures().forget(&who, Instant::now());
        self.recent().add(print, Instant::now());
        Ok(name)
    }

    /// Fails if this source and user have given too many wrong passwords within a minute.
    fn check_throttle(&self, who: &Who) -> Result<(), Denial> {
        let barred = self.failures().check(who, Instant::now());
        if barred { Err(Denial::WrongPasswords) } else { Ok(()) }
    }

    fn failures(&self) -> MutexGuard<'_, LoginThrottle> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A keyed hash of name, password and stored hash: when the file changes the stored hash, the old one fits no more.
    fn fingerprint(&self, name: &str, password: &str, hash: &str) -> u128 {
        let all = (name, password, hash);
        u128::from(self.keys.0.hash_one(all)) << 64 | u128::from(self.keys.1.hash_one(all))
    }

    fn recent(&self) -> MutexGuard<'_, LoginCache> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Users({})", self.hashes.len())
    }
}

impl fmt::Debug for PasswordChecker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Logins({:?})", self.users.load())
    }
}

/// Name and password of a `Basic` header's value.
fn basic(value: &str) -> Option<(String, String)> {
    let (scheme, code) = value.trim().split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(code.trim()).ok()?).ok()?;
    let (name, password) = text.split_once(':')?;
    Some((name.to_owned(), password.to_owned()))
}

/// The cost of a bcrypt hash, if it is one that can be checked in bearable time.
fn bcrypt_cost(hash: &str) -> Option<u32> {
    let cost = hash.parse::<bcrypt::HashParts>().ok()?.get_cost();
    // What the library can read may still be no base64; only a real check shows that, at its lowest cost.
    let cheapest = format!("$2b${MIN_COST:02}${}", hash.rsplit('$').next()?);
    bcrypt::verify("", &cheapest).ok()?;
    (MIN_COST..=MAX_COST).contains(&cost).then_some(cost)
}

/// Salt and hash of a random password that nobody knows.
const DUMMY_HASH: &str = "N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

/// bcrypt's least cost.
const MIN_COST: u32 = 4;

/// Each step doubles the time; 14 is about a second, more would let a few wrong passwords stop every login.
const MAX_COST: u32 = 14;

/// Checks at once: each fills a processor, and the tunnel needs one itself. Where there is but one, they share it.
fn max_concurrent() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1))
}

/// Logins of all sources together that may wait for their turn.
const WAITING: usize = 256;

/// How long a login may wait for its turn before it is denied as busy.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(5);

// Logins that succeeded within the last minute and need no second check.

/// Fingerprints of logins that succeeded, each with its time, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct LoginCache {
    since: HashMap<u128, Instant>,
    order: VecDeque<(Instant, u128)>,
}

impl LoginCache {
    pub(crate) fn holds(&self, print: u128, now: Instant) -> bool {
        self.since.get(&print).is_some_and(|since| now.saturating_duration_since(*since) < LOGIN_TTL)
    }

    pub(crate) fn add(&mut self, print: u128, now: Instant) {
        while let Some((since, oldest)) = self.order.front().copied() {
            if self.order.len() < RECENT && now.saturating_duration_since(since) < LOGIN_TTL {
                break;
            }
            self.order.pop_front();
            // An entry that was renewed since then stays.
            if self.since.get(&oldest) == Some(&since) {
                self.since.remove(&oldest);
            }
        }
        self.since.insert(print, now);
        self.order.push_back((now, print));
    }
}

/// How long a login needs no second check, so that each of many short connections does not cost a bcrypt.
pub(crate) const LOGIN_TTL: Duration = Duration::from_secs(60);

/// Successful logins that are remembered at most, about 100 bytes each.
const RECENT: usize = 16 * 1024;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod recent_tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut recent, now) = (LoginCache::default(), Instant::now());
        for print in 0..3 * RECENT as u128 {
            recent.add(print, now);
            recent.add(print, now);
            assert!(recent.holds(print, now));
        }
        assert!(recent.since.len() <= RECENT && recent.order.len() <= RECENT);
        assert!(!recent.holds(3 * RECENT as u128 - 1, now + LOGIN_TTL));
    }
}
