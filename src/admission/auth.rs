//! Passwords of clients: the users, and the checks, which are limited.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::admission::denial::{Denial, NAME_CHARS};
use tunnel_net::fair_map::FairMap;
use tunnel_net::guesses::{GuessError, GuessLimiter};
use tunnel_net::limiter::{FairLimiter, PermitLimits, Source};
use tunnel_net::reload::ReloadedValue;

/// User names and bcrypt password hashes from an htpasswd file.
#[derive(derive_more::Debug, Clone)]
#[debug("Users({})", hashes.len())]
pub struct Users {
    hashes: HashMap<String, Arc<str>>,
    /// A hash that matches no password. Checking it takes as long as the slowest of `hashes`, so that timing does not
    /// reveal whether a user exists.
    nobody: Arc<str>,
}

/// A successful login, which is valid until the user's password changes.
#[derive(derive_more::Debug, Clone)]
#[debug("Login({user})")]
pub struct Login {
    /// The user.
    pub user: String,
    /// The hash that the password matched.
    hash: Arc<str>,
}

/// A password checker that limits concurrent checks, is fair to sources, and caches correct passwords for a minute.
#[derive(derive_more::Debug)]
#[debug("PasswordChecker({:?})", users.load())]
pub struct PasswordChecker {
    users: ReloadedValue<Users>,
    /// Fingerprints of successful logins, with their times.
    recent: Mutex<FairMap<Source, u128, Instant>>,
    guesses: GuessLimiter,
    /// Two random keys of this process for the fingerprints in `recent`.
    keys: (RandomState, RandomState),
    turns: FairLimiter,
}

impl Users {
    /// Parses an htpasswd file with one `name:hash` per line. Empty lines and lines that start with `#` are skipped.
    ///
    /// Lines without a bcrypt hash are skipped with a warning, because the other kinds are too weak.
    ///
    /// # Errors
    ///
    /// Returns the reason and a hint if no line contains a user with a bcrypt hash.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
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
                    hashes.insert(name.to_owned(), hash.into());
                }
                _ => warn!(
                    line = at,
                    min_cost = MIN_COST,
                    max_cost = MAX_COST,
                    hint = "create the line with `htpasswd -nB <name>`",
                    "htpasswd line without usable bcrypt hash skipped"
                ),
            }
        }
        if hashes.is_empty() {
            return Err("no user with a bcrypt hash; create one with `htpasswd -nB <name>`");
        }
        Ok(Self { hashes, nobody: format!("$2b${cost:02}${DUMMY_HASH}").into() })
    }
}

impl PasswordChecker {
    /// Creates a checker. Each check uses the current content of the users file.
    pub fn new(users: ReloadedValue<Users>) -> Self {
        Self {
            users,
            recent: Mutex::new(FairMap::new(MAX_RECENT_LOGINS)),
            guesses: GuessLimiter::new(MAX_WRONG_PASSWORDS, MAX_WRONG_PASSWORDS_OF_SOURCE),
            keys: (RandomState::new(), RandomState::new()),
            turns: FairLimiter::new(PermitLimits {
                permits: max_concurrent(),
                per_source: usize::MAX,
                waiting: MAX_WAITING_LOGINS,
                idle_timeout: None,
            }),
        }
    }

    /// Returns true if the user still has the password of this login.
    pub(crate) fn is_current(&self, login: &Login) -> bool {
        self.users.load().hashes.get(&login.user) == Some(&login.hash)
    }

    /// Returns the login of the user whose password is in these headers. Cancel safe.
    pub(crate) async fn check(&self, head: &HeaderMap, from: Source) -> Result<Login, Denial> {
        let given = head.get(PROXY_AUTHORIZATION).ok_or(Denial::Credentials)?;
        let (name, password) = parse_basic(given.as_bytes()).ok_or(Denial::NotBasic)?;
        let (hash, known) = {
            let users = self.users.load();
            let hash = users.hashes.get(&name);
            (hash.unwrap_or(&users.nobody).clone(), hash.is_some())
        };
        let print = self.fingerprint(&name, &password, &hash);
        let login = Login { user: name, hash };
        if self.is_recent(print) {
            return Ok(login);
        }
        self.judge(from, &login, true)?;
        let turn = timeout(LOGIN_TIMEOUT, self.turns.acquire(&from)).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(Denial::Busy("too many logins at once"))?;
        // While this login waited, another one with the same password may have succeeded, or others may have failed.
        if self.is_recent(print) {
            return Ok(login);
        }
        self.judge(from, &login, true)?;
        let hash = login.hash.clone();
        let right = tokio::task::spawn_blocking(move || {
            // The check owns the permit: a client that disconnects neither stops the check nor frees the permit early.
            let _turn = turn;
            bcrypt::verify(password, &hash).unwrap_or(false)
        });
        // Others may have failed during the check. Then this one is denied, right or wrong.
        self.judge(from, &login, right.await.unwrap_or(false) && known)?;
        let now = Instant::now();
        let mut recent = self.recent.lock();
        if recent.len() >= MAX_RECENT_LOGINS {
            recent.retain(|since| since.elapsed() < LOGIN_TTL);
        }
        recent.insert(&from, print, now, now);
        Ok(login)
    }

    /// Returns true if a login with this fingerprint succeeded within the last minute, and needs no second check.
    fn is_recent(&self, print: u128) -> bool {
        self.recent.lock().get(&print).is_some_and(|since| since.elapsed() < LOGIN_TTL)
    }

    /// Returns an error if the password is wrong, or if this source sent too many wrong ones within a minute.
    fn judge(&self, from: Source, login: &Login, is_right: bool) -> Result<(), Denial> {
        let judged = self.guesses.judge(from, &login.user, None, || if is_right { Ok(()) } else { Err(()) });
        judged.map_err(|error| match error {
            GuessError::Wrong(()) | GuessError::Unknown(()) => {
                Denial::Password(login.user.chars().take(NAME_CHARS).collect())
            }
            GuessError::TooMany => Denial::WrongPasswords,
        })
    }

    /// Returns a keyed hash of name, password and stored hash. It no longer matches once the file's hash changes.
    fn fingerprint(&self, name: &str, password: &str, hash: &str) -> u128 {
        let all = (name, password, hash);
        u128::from(self.keys.0.hash_one(all)) << 64 | u128::from(self.keys.1.hash_one(all))
    }
}

/// Parses name and password from the value of a `Basic` header. Some clients leave out base64's padding, and some
/// encode in Latin-1, although the challenge requests UTF-8.
fn parse_basic(value: &[u8]) -> Option<(String, String)> {
    let (scheme, code) = str::from_utf8(value).ok()?.trim().split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let bytes = BASE64.decode(code.trim()).ok()?;
    let text = String::from_utf8(bytes)
        .unwrap_or_else(|latin_1| latin_1.as_bytes().iter().map(|byte| char::from(*byte)).collect());
    let (name, password) = text.split_once(':')?;
    Some((name.to_owned(), password.to_owned()))
}

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns the cost of a bcrypt hash, or `None` if the hash is invalid or too expensive to check.
fn bcrypt_cost(hash: &str) -> Option<u32> {
    let cost = hash.parse::<bcrypt::HashParts>().ok()?.get_cost();
    // A hash that parses may still contain invalid base64, which only a real check detects: do one at the lowest cost.
    let cheapest = format!("$2b${MIN_COST:02}${}", hash.rsplit('$').next()?);
    bcrypt::verify("", &cheapest).ok()?;
    (MIN_COST..=MAX_COST).contains(&cost).then_some(cost)
}

/// Salt and hash of a random, discarded password.
const DUMMY_HASH: &str = "N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

/// Minimum cost of bcrypt.
const MIN_COST: u32 = 4;

/// Maximum accepted cost. Each step doubles the time, and 14 takes about a second. With a higher cost, a few wrong
/// passwords would block every login.
const MAX_COST: u32 = 14;

/// Returns the maximum number of concurrent checks: one per core, except one core for the rest of the process, but at
/// least one.
fn max_concurrent() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1))
}

/// Wrong passwords of a source for one user within a minute, after which no more are checked.
const MAX_WRONG_PASSWORDS: usize = 10;

/// The same for all users. Behind a balancer all clients may be one source, and bcrypt limits the rate as well.
const MAX_WRONG_PASSWORDS_OF_SOURCE: usize = 1000;

/// Lifetime of a recent login. It saves a bcrypt check for each of many short connections.
const LOGIN_TTL: Duration = Duration::from_secs(60);

/// Maximum number of recent logins; about 300 bytes each.
const MAX_RECENT_LOGINS: usize = 16 * 1024;

/// Maximum number of waiting logins, over all sources.
const MAX_WAITING_LOGINS: usize = 256;

/// Timeout for a waiting login, which is then denied as busy.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
