use futures_util::FutureExt as _;
use proptest::prelude::*;
use tokio::task::unconstrained;

use super::*;

fn source(text: &str) -> Source {
    Source::of(text.parse().unwrap())
}

fn assert_empty<K: Clone + Ord + Hash>(limiter: &FairLimiter<K>) {
    let state = limiter.0.lock();
    assert!(state.holders.is_empty() && state.suspended.is_empty());
    assert!(state.waiting.is_empty() && state.turns.is_empty());
}

#[test]
fn a_source_is_an_ipv4_address_or_an_ipv6_64() {
    assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:1"));
    assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    assert_ne!(source("::1"), source("0.0.0.1"));
}

#[tokio::test]
async fn a_dropped_permit_is_available_again() {
    let limiter = FairLimiter::new(PermitLimits { idle_timeout: None, ..PermitLimits::permits(1) });
    let permit = limiter.try_acquire(&"a").unwrap();
    assert_eq!(limiter.try_acquire(&"a").unwrap_err(), AcquireError::Total);
    assert_eq!(limiter.try_acquire(&"b").unwrap_err(), AcquireError::Total);
    drop(permit);
    drop(limiter.try_acquire(&"b").unwrap());
    assert_empty(&limiter);
}

#[tokio::test]
async fn an_evicted_permit_is_revoked() {
    let limiter = FairLimiter::new(PermitLimits::permits(2));
    let (one, two) = (limiter.try_acquire(&"a").unwrap(), limiter.try_acquire(&"a").unwrap());
    one.mark_active();
    let three = limiter.try_acquire(&"b").unwrap();
    assert!(two.revoked().is_cancelled() && !one.revoked().is_cancelled() && !three.revoked().is_cancelled());
    drop((one, two, three));
    assert_empty(&limiter);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_call_gets_the_permit_of_a_holder_idle_for_too_long() {
    let patience = Duration::from_secs(3);
    let limiter = FairLimiter::new(PermitLimits {
        waiting: 9,
        idle_timeout: Some(patience),
        ..PermitLimits::permits(2)
    });
    let (one, two) = (limiter.try_acquire(&"a").unwrap(), limiter.try_acquire(&"a").unwrap());
    let started = Instant::now();
    let three = limiter.acquire(&"a").await.unwrap();
    let waited = started.elapsed();
    assert!(waited >= patience && waited <= patience + GRANT_INTERVAL, "{waited:?}");
    assert!(one.revoked().is_cancelled() && !two.revoked().is_cancelled());
    let four = limiter.acquire(&"b").await.unwrap();
    assert!(started.elapsed() < patience + 2 * GRANT_INTERVAL, "{:?}", started.elapsed());
    drop((one, two, three, four));
    assert_empty(&limiter);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_gets_no_permit() {
    let limiter =
        FairLimiter::new(PermitLimits { waiting: 9, idle_timeout: None, ..PermitLimits::permits(1) });
    let permit = limiter.try_acquire(&"a").unwrap();
    assert!(timeout(Duration::from_secs(1), limiter.acquire(&"a")).await.is_err());
    let (_, entered) = tokio::join!(async { drop(permit) }, limiter.acquire(&"b"));
    drop(entered.unwrap());
    assert_empty(&limiter);
}

/// An edge that waits for a slow server must not lose its permit to the next edge, which would be served as slowly.
#[tokio::test(start_paused = true)]
async fn a_holder_is_idle_only_once_there_is_nothing_left_to_read() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    let patience = Duration::from_secs(3);
    let limiter = FairLimiter::new(PermitLimits {
        waiting: 9,
        idle_timeout: Some(patience),
        ..PermitLimits::permits(1)
    });
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
    let failed = near.read_exact(&mut taken).await.unwrap_err();
    assert_eq!(failed.kind(), std::io::ErrorKind::ConnectionAborted);
}

#[tokio::test(start_paused = true)]
async fn a_source_may_hold_all_permits_until_another_needs_its_share() {
    let limiter = FairLimiter::new(PermitLimits::permits(100));
    let many: Vec<_> = (0..100).map(|_| limiter.try_acquire(&"many").unwrap()).collect();
    let few: Vec<_> = (0..50).map(|_| limiter.try_acquire(&"few").unwrap()).collect();
    let revoked = |permits: &[Permit<_>]| permits.iter().filter(|held| held.is_revoked()).count();
    assert!(revoked(&many[..50]) == 50 && revoked(&many) == 50, "the longest idle are evicted");
    // From now on each has half of the permits, and a newcomer of the first evicts only a holder of its own source.
    let _newcomer = limiter.try_acquire(&"many").unwrap();
    assert_eq!(limiter.0.lock().holders.len(), 100);
    assert_eq!(revoked(&few), usize::from(limiter.0.lock().holders.count(&"many") > 50));
}

#[tokio::test(start_paused = true)]
async fn active_holders_are_evicted_only_for_a_source_with_fewer() {
    let limiter = FairLimiter::new(PermitLimits::permits(2));
    let [first, second] = [(); 2].map(|()| limiter.try_acquire(&"a").unwrap());
    first.mark_active();
    second.mark_active();
    assert_eq!(limiter.try_acquire(&"a").unwrap_err(), AcquireError::Total);
    let other = limiter.try_acquire(&"b").unwrap();
    assert!(first.is_revoked() && !second.is_revoked() && !other.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn a_suspended_permit_is_never_revoked_and_evicts_another_when_resumed() {
    let limiter = FairLimiter::new(PermitLimits::permits(2));
    let (works, idle) = (limiter.try_acquire(&"rich").unwrap(), limiter.try_acquire(&"rich").unwrap());
    works.suspend();
    let first = limiter.try_acquire(&"a").unwrap();
    assert!(!idle.is_revoked(), "a permit was free");
    let second = limiter.try_acquire(&"b").unwrap();
    assert!(idle.is_revoked() && !first.is_revoked() && !second.is_revoked());
    let strangers: Vec<_> =
        (0..100).map(|n| limiter.try_acquire(&&*format!("stranger {n}").leak()).unwrap()).collect();
    assert!(!works.is_revoked());
    works.mark_idle();
    let others = strangers.iter().chain([&first, &second]);
    assert!(!works.is_revoked() && others.filter(|held| !held.is_revoked()).count() == 1);
    assert_eq!(limiter.0.lock().holders.len(), 2);
    drop((works, idle, first, second, strangers));
    assert_empty(&limiter);
}

/// Returns the limits of a queue for one permit that is never revoked.
fn queue(waiting: usize) -> PermitLimits {
    PermitLimits { permits: 1, per_source: usize::MAX, waiting, idle_timeout: None }
}

#[tokio::test(start_paused = true)]
async fn sources_take_turns_however_many_calls_each_has_waiting() {
    let limiter = FairLimiter::new(queue(100));
    let held = limiter.try_acquire(&"flood").unwrap();
    let acquire = async |who| limiter.acquire(&who).await;
    let mut order = Vec::new();
    let mut calls = Vec::new();
    for who in ["flood"; 50].into_iter().chain(["a", "b"]) {
        let mut call = Box::pin(unconstrained(acquire(who)));
        assert!(call.as_mut().now_or_never().is_none());
        calls.push((who, call));
    }
    drop(held);
    while !calls.is_empty() {
        let next = calls.iter_mut().position(|(who, call)| match call.as_mut().now_or_never() {
            // The permit is dropped here, for the next turn.
            Some(permit) => permit.map(|_| order.push(*who)).is_ok(),
            None => false,
        });
        drop(calls.remove(next.unwrap()));
    }
    assert_eq!(order.len(), 52);
    assert!(order[..3].contains(&"a") && order[..3].contains(&"b"), "{:?}", &order[..5]);
    assert_empty(&limiter);
}

#[tokio::test(start_paused = true)]
async fn an_idle_holders_permit_goes_to_the_waiting_call_and_not_to_a_newcomer() {
    let patience = Duration::from_secs(3);
    let limiter = FairLimiter::new(PermitLimits { idle_timeout: Some(patience), ..queue(9) });
    let idle = limiter.try_acquire(&"idle").unwrap();
    let mut first = Box::pin(limiter.acquire(&"first"));
    assert!(first.as_mut().now_or_never().is_none());
    tokio::time::advance(patience).await;
    let mut newcomer = Box::pin(limiter.acquire(&"newcomer"));
    assert!(newcomer.as_mut().now_or_never().is_none());
    let granted = first.as_mut().now_or_never().unwrap().unwrap();
    assert!(idle.is_revoked() && !granted.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn a_source_that_floods_the_queue_evicts_only_its_own_calls() {
    let limiter = FairLimiter::new(queue(10));
    let held = limiter.try_acquire(&"held").unwrap();
    let wait = |who| {
        let mut call = Box::pin(unconstrained(limiter.acquire(who)));
        assert!(call.as_mut().now_or_never().is_none());
        call
    };
    let mut honest: Vec<_> = (0..3).map(|_| wait(&"honest")).collect();
    let flood: Vec<_> = (0..1000).map(|_| wait(&"flood")).collect();
    let refused: Vec<_> = flood.into_iter().filter_map(|mut call| call.as_mut().now_or_never()).collect();
    assert!(refused.len() == 993 && refused.iter().all(|refused| refused.is_err()));
    assert!(honest.iter_mut().all(|call| call.as_mut().now_or_never().is_none()));
    drop((held, honest));
    assert_empty(&limiter);
}

impl<K: Clone + Ord + Hash> Permit<K> {
    fn is_revoked(&self) -> bool {
        self.revoked.is_cancelled()
    }
}

/// One step of a random sequence. Numbers select a permit.
#[derive(Debug, Clone)]
enum Step {
    Acquire(u8),
    Drop(usize),
    Active(usize),
    Idle(usize),
    Suspend(usize),
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u8..5).prop_map(Step::Acquire),
        1 => (0_usize..99).prop_map(Step::Drop),
        1 => (0_usize..99).prop_map(Step::Active),
        2 => (0_usize..99).prop_map(Step::Idle),
        1 => (0_usize..99).prop_map(Step::Suspend),
        1 => (1_u64..3000).prop_map(Step::Later),
    ]
}

/// Acquires a permit, and checks that the limiter refuses and evicts nobody that the rules protect.
fn acquire_checked(limiter: &FairLimiter<u8>, held: &[(u8, Permit<u8>)], who: u8) -> Option<Permit<u8>> {
    let PermitLimits { permits, per_source, idle_timeout, .. } = limiter.0.lock().limits;
    let count = |of| limiter.0.lock().holders.count(&of);
    let (before, most) = (count(who), (0..5).map(count).max().unwrap());
    let all = limiter.0.lock().holders.len();
    let victim = limiter.0.lock().holders.victim();
    let has_more = before + 1 < most;
    let is_idle = victim.as_ref().is_some_and(|victim| {
        !victim.active && idle_timeout.is_some_and(|patience| victim.since.elapsed() >= patience)
    });
    let lost_before = held.iter().filter(|(_, permit)| permit.is_revoked()).count();
    let acquired = limiter.try_acquire(&who);
    let lost = held.iter().filter(|(_, permit)| permit.is_revoked()).count() - lost_before;
    let limited = per_source < permits && before >= per_source;
    let evicts = all >= permits && idle_timeout.is_some() && (has_more || is_idle);
    match acquired {
        Err(AcquireError::PerSource) => assert!(limited && lost == 0),
        Err(AcquireError::Total) => assert!(all >= permits && !evicts && lost == 0),
        Ok(_) => assert!(!limited && (all < permits || evicts) && lost == usize::from(all >= permits)),
    }
    acquired.ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_steps_never_break_the_limits(
        permits in 1_usize..8,
        per_source in 1_usize..9,
        idle_timeout in proptest::option::of(0_u64..2000),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let idle_timeout = idle_timeout.map(Duration::from_millis);
            let limiter = FairLimiter::new(PermitLimits { permits, per_source, waiting: 0, idle_timeout });
            let mut held: Vec<(u8, Permit<u8>)> = Vec::new();
            for step in &steps {
                let nth = |n: usize| n % held.len().max(1);
                match *step {
                    Step::Acquire(who) => {
                        let acquired = acquire_checked(&limiter, &held, who);
                        held.extend(acquired.map(|permit| (who, permit)));
                    }
                    Step::Drop(n) if !held.is_empty() => drop(held.remove(nth(n))),
                    Step::Active(n) if !held.is_empty() => held[nth(n)].1.mark_active(),
                    Step::Idle(n) if !held.is_empty() => held[nth(n)].1.mark_idle(),
                    Step::Suspend(n) if !held.is_empty() => held[nth(n)].1.suspend(),
                    Step::Later(millis) => tokio::time::advance(Duration::from_millis(millis)).await,
                    _ => {}
                }
                let state = limiter.0.lock();
                assert!(state.holders.len() <= permits);
                let kept = held.iter().filter(|(_, permit)| !permit.is_revoked()).count();
                assert_eq!(kept, state.holders.len() + state.suspended.len());
                drop(state);
                assert_eq!(limiter.has_revoked(), kept < held.len());
            }
            drop(held);
            assert_empty(&limiter);
        });
    }
}
