use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use tokio::task::JoinSet;

use tunnel_base::drain::Drain;
use tunnel_net::reload::FileWatcher;

use super::*;

fn header(value: &str) -> HeaderMap {
    HeaderMap::from_iter([(PROXY_AUTHORIZATION, value.parse().unwrap())])
}

fn head(credentials: &str) -> HeaderMap {
    header(&format!("Basic {}", BASE64.encode(credentials)))
}

fn here() -> Source {
    Source::of([10, 0, 0, 1].into())
}

async fn check(logins: &PasswordChecker, credentials: &str) -> Result<String, Denial> {
    logins.check(&head(credentials), here()).await.map(|login| login.user)
}

fn hashed(password: &str) -> String {
    bcrypt::hash(password, MIN_COST).unwrap()
}

fn logins(text: &str) -> PasswordChecker {
    PasswordChecker::new(ReloadedValue::fixed(Users::parse(text).unwrap()))
}

#[tokio::test]
async fn only_the_correct_password_of_a_known_user_is_accepted() {
    let logins = logins(&format!("# people\n\nops:{}\n", hashed("se:cret")));
    assert_eq!(check(&logins, "ops:se:cret").await.unwrap(), "ops");
    for wrong in ["ops:secret", "ops:", "root:se:cret", ":se:cret", "ops", ""] {
        let denied = check(&logins, wrong).await.unwrap_err();
        let user = wrong.split_once(':').map(|(user, _)| user);
        let is_named = matches!((&denied, user), (Denial::Password(name), Some(user)) if name == user);
        assert!(is_named || user.is_none() && matches!(denied, Denial::NotBasic), "{wrong}: {denied}");
    }
    for value in ["Basic", "Basic !!!", "Bearer b3BzOnNlOmNyZXQ=", "", "Basic \u{e9}"] {
        let denied = logins.check(&header(value), here()).await;
        assert!(matches!(denied, Err(Denial::NotBasic)), "{value}");
    }
    assert!(matches!(logins.check(&HeaderMap::new(), here()).await, Err(Denial::Credentials)));
    for value in ["basic  b3BzOnNlOmNyZXQ=", "Basic b3BzOnNlOmNyZXQ"] {
        assert_eq!(logins.check(&header(value), here()).await.unwrap().user, "ops", "{value}");
    }
}

#[tokio::test]
async fn a_latin_1_login_equals_its_utf_8_form() {
    let logins = logins(&format!("j\u{f6}rg:{}", hashed("na\u{ef}f")));
    assert_eq!(check(&logins, "j\u{f6}rg:na\u{ef}f").await.unwrap(), "j\u{f6}rg");
    let latin_1 = format!("Basic {}", BASE64.encode(b"j\xf6rg:na\xeff"));
    assert_eq!(logins.check(&header(&latin_1), here()).await.unwrap().user, "j\u{f6}rg");
}

#[tokio::test(start_paused = true)]
async fn a_successful_login_is_cached_for_a_minute() {
    let logins = logins(&format!("ops:{}", hashed("pw")));
    check(&logins, "ops:pw").await.unwrap();
    // Without permits only cached logins succeed.
    let _turns: Vec<_> = (0..max_concurrent()).map(|_| logins.turns.try_acquire(&here()).unwrap()).collect();
    assert_eq!(check(&logins, "ops:pw").await.unwrap(), "ops");
    assert!(matches!(check(&logins, "ops:other").await, Err(Denial::Busy(_))));
    tokio::time::advance(LOGIN_TTL).await;
    assert!(matches!(check(&logins, "ops:pw").await, Err(Denial::Busy(_))));
}

#[tokio::test]
async fn wrong_passwords_from_one_source_delay_no_other_source() {
    let logins = Arc::new(logins(&format!("ops:{}", hashed("pw"))));
    let done = Arc::new(AtomicUsize::new(0));
    // Separate tasks, like connections: a single task would poll the wrong logins as long as they are woken, before it
    // polls the other.
    let (mut wrong, mut right) = (JoinSet::new(), JoinSet::new());
    for n in 0..250 {
        let (logins, done) = (logins.clone(), done.clone());
        // A different name each time, so that fair permits protect the others and not the throttle.
        let head = head(&format!("user{n}:wrong"));
        wrong.spawn(async move {
            assert!(logins.check(&head, here()).await.is_err());
            done.fetch_add(1, Relaxed);
        });
    }
    right.spawn(async move {
        // On a busy machine some are done before this one starts.
        let before = done.load(Relaxed);
        logins.check(&head("ops:pw"), Source::of([10, 0, 0, 2].into())).await.unwrap();
        done.load(Relaxed) - before
    });
    let meanwhile = right.join_next().await.unwrap().unwrap();
    // Without shares it would wait for nearly all. The machine decides which of the running checks ends first.
    assert!(meanwhile <= 100, "{meanwhile} wrong ones were checked meanwhile");
}

#[tokio::test(start_paused = true)]
async fn ten_failures_in_a_minute_throttle_only_that_source_and_user() {
    let logins = logins(&format!("ops:{}\nroot:{}", hashed("pw"), hashed("pw")));
    let started = Instant::now();
    for _ in 0..10 {
        assert!(matches!(check(&logins, "ops:wrong").await, Err(Denial::Password(_))));
    }
    assert!(
        matches!(check(&logins, "ops:pw").await, Err(Denial::WrongPasswords)),
        "after {:?}",
        started.elapsed()
    );
    check(&logins, "root:pw").await.unwrap();
    logins.check(&head("ops:pw"), Source::of([10, 0, 0, 2].into())).await.unwrap();
    // It is cached after the login from the other address, so it is not throttled.
    check(&logins, "ops:pw").await.unwrap();
    tokio::time::advance(LOGIN_TTL).await;
    for _ in 0..9 {
        assert!(matches!(check(&logins, "ops:wrong").await, Err(Denial::Password(_))));
    }
    check(&logins, "ops:pw").await.unwrap();
    // The success does not reset the count of failures.
    assert!(matches!(check(&logins, "ops:wrong").await, Err(Denial::Password(_))));
    assert!(matches!(check(&logins, "ops:wrong").await, Err(Denial::WrongPasswords)));
}

#[tokio::test(start_paused = true)]
async fn a_changed_users_file_applies_to_cached_logins() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("ops:{}\nroot:{}", hashed("pw"), hashed("pw"))).unwrap();
    let parse = |text: &[u8]| Users::parse(&String::from_utf8_lossy(text)).map_err(|e| e.to_string());
    let users = ReloadedValue::file(file.path(), parse).unwrap();
    let drain = Drain::new();
    FileWatcher::new(&drain).watch("users", &users);
    let logins = PasswordChecker::new(users.clone());
    check(&logins, "ops:pw").await.unwrap();
    check(&logins, "root:pw").await.unwrap();
    std::fs::write(file.path(), format!("ops:{}", hashed("new"))).unwrap();
    while users.load().hashes.len() > 1 {
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
    }
    assert!(check(&logins, "ops:pw").await.is_err());
    assert!(check(&logins, "root:pw").await.is_err());
    assert!(check(&logins, "ops:new").await.is_ok());
}

#[test]
fn only_bcrypt_hashes_are_read_from_a_users_file() {
    let good = hashed("pw");
    let weak = format!("a:{{SHA}}x\nb:$apr1$x$y\nc:plain\nd\n:{good}\ne:$2y$31${}", &good[7..]);
    assert!(Users::parse(&weak).unwrap_err().starts_with("no user with a bcrypt hash"));
    assert_eq!(Users::parse(&format!("{weak}\nf:{}", good.replace("$2b$", "$2y$"))).unwrap().hashes.len(), 1);
    assert!(
        Users::parse(&format!("a:{}!", &good[..59])).unwrap_err().starts_with("no user with a bcrypt hash")
    );
}

#[test]
fn an_unknown_user_costs_as_much_as_the_most_expensive_hash() {
    let dear = bcrypt::hash("pw", MIN_COST + 2).unwrap();
    let users = Users::parse(&format!("a:{}\nb:{dear}", hashed("pw"))).unwrap();
    assert_eq!(users.nobody.parse::<bcrypt::HashParts>().unwrap().get_cost(), MIN_COST + 2);
    assert!(!bcrypt::verify("pw", &users.nobody).unwrap(), "checked in full, and matches no password");
}
