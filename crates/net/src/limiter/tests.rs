use super::*;

fn source(text: &str) -> Source {
    Source::of(text.parse().unwrap())
}

#[test]
fn a_source_is_an_ipv4_address_or_an_ipv6_network() {
    assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:1"));
    assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    assert_ne!(source("::1"), source("0.0.0.1"));
}

#[tokio::test]
async fn a_place_comes_back_when_it_is_dropped() {
    let limiter = FairLimiter::new(Limits { idle_timeout: None, ..Limits::permits(1) });
    let permit = limiter.try_acquire(&"a").unwrap();
    assert_eq!(limiter.try_acquire(&"a").unwrap_err(), AcquireError::Total);
    assert_eq!(limiter.try_acquire(&"b").unwrap_err(), AcquireError::Total);
    drop(permit);
    drop(limiter.try_acquire(&"b").unwrap());
    assert!(limiter.lock().shares.is_empty() && limiter.lock().holders.is_empty());
}

#[tokio::test]
async fn who_loses_its_place_is_told() {
    let limiter = FairLimiter::new(Limits::permits(2));
    let (one, two) = (limiter.try_acquire(&"a").unwrap(), limiter.try_acquire(&"a").unwrap());
    one.mark_active();
    let three = limiter.try_acquire(&"b").unwrap();
    assert!(two.revoked().is_cancelled() && !one.revoked().is_cancelled() && !three.revoked().is_cancelled());
    drop((one, two, three));
    assert!(limiter.lock().shares.is_empty() && limiter.lock().holders.is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_waits_gets_the_place_of_one_that_is_silent_for_too_long() {
    let patience = Duration::from_secs(3);
    let limiter = FairLimiter::new(Limits { waiting: 9, idle_timeout: Some(patience), ..Limits::permits(2) });
    let (one, two) = (limiter.try_acquire(&"a").unwrap(), limiter.try_acquire(&"a").unwrap());
    let started = Instant::now();
    let three = limiter.acquire(&"a").await.unwrap();
    let waited = started.elapsed();
    assert!(waited >= patience && waited <= patience + GRANT_INTERVAL, "{waited:?}");
    assert!(one.revoked().is_cancelled() && !two.revoked().is_cancelled());
    let four = limiter.acquire(&"b").await.unwrap();
    assert!(started.elapsed() < patience + 2 * GRANT_INTERVAL, "{:?}", started.elapsed());
    drop((one, two, three, four));
    assert!(limiter.lock().shares.is_empty() && limiter.lock().holders.is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_no_longer_waits_takes_no_turn() {
    let limiter = FairLimiter::new(Limits { waiting: 9, idle_timeout: None, ..Limits::permits(1) });
    let permit = limiter.try_acquire(&"a").unwrap();
    assert!(timeout(Duration::from_secs(1), limiter.acquire(&"a")).await.is_err());
    let (_, entered) = tokio::join!(async { drop(permit) }, limiter.acquire(&"b"));
    drop(entered.unwrap());
    assert!(limiter.lock().shares.is_empty() && limiter.lock().holders.is_empty());
}

/// An edge that waits for a slow server must not lose its permit to the next edge, which would be served as slowly.
#[tokio::test(start_paused = true)]
async fn who_has_spoken_is_not_silent_until_there_is_nothing_left_to_read() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    let patience = Duration::from_secs(3);
    let limiter = FairLimiter::new(Limits { waiting: 9, idle_timeout: Some(patience), ..Limits::permits(1) });
    let permit = limiter.try_acquire(&"a").unwrap();
    let (mut far, near) = duplex(64);
    let mut near = permit.track_activity(near);
    far.write_all(b"hello").await.unwrap();
    let mut taken = [0; 5];
    near.read_exact(&mut taken).await.unwrap();
    assert!(
        timeout(10 * patience, limiter.acquire(&"a")).await.is_err(),
        "this side is slow, not the client"
    );
    assert!(timeout(Duration::ZERO, near.read_exact(&mut taken)).await.is_err());
    assert!(timeout(2 * patience, limiter.acquire(&"a")).await.is_ok(), "now the client is idle");
    assert!(permit.revoked().is_cancelled());
    far.write_all(b"hello").await.unwrap();
    near.read_exact(&mut taken).await.unwrap();
    assert!(near.hook.permit.is_none(), "a revoked permit is no longer tracked");
}
