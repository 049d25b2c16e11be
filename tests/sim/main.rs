//! Tests the tunnel layer in simulated time with an adversarial scheduler.
//!
//! Each run derives from a seed. `SIM_SEED=n` repeats one with a trace; `SIM_SECONDS=n` sets the duration.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
#![expect(clippy::disallowed_methods, reason = "tests read environment variables set by the developer")]

mod chance;
mod check;
mod delivery;
mod fleet;
mod harm;
mod held;
mod interactive;
mod ledger;
mod lid;
mod line;
mod middle;
mod owner;
mod paths;
mod plan;
mod process;
mod relay_model;
mod script;
mod silent;
mod tasks;
mod turns;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use tokio::task::coop::unconstrained;
use tokio::time::Instant;

use ledger::Seen;
use plan::Scenario;

#[test]
fn sessions_survive_every_cut_of_their_links() {
    many(Scenario::Cuts);
}

#[test]
fn a_session_dropped_at_one_end_ends_at_the_other() {
    many(Scenario::Drops);
}

#[test]
fn keystrokes_and_pings_wait_for_one_frame_at_most() {
    many(Scenario::Turns);
}

#[test]
fn sessions_without_a_path_leave_no_state_after_the_resume_timeout() {
    many(Scenario::Grace);
}

#[test]
fn sessions_survive_links_and_servers_and_never_reach_another_process() {
    many(Scenario::Pods);
}

#[test]
fn a_seed_reproduces_its_run() {
    let seeds = |scenario| if scenario == Scenario::Pods { 0..15 } else { 5..6 };
    for scenario in [Scenario::Cuts, Scenario::Drops, Scenario::Turns, Scenario::Grace, Scenario::Pods] {
        for seed in seeds(scenario) {
            let (mut first, mut second) = (Vec::new(), Vec::new());
            run(seed, scenario, Some(&mut first), &mut Seen::default()).unwrap();
            run(seed, scenario, Some(&mut second), &mut Seen::default()).unwrap();
            let differs = first.iter().zip(&second).position(|(a, b)| a != b);
            assert_eq!(
                differs,
                None,
                "{scenario:?} {seed}: {:?}",
                differs.map(|at| (&first[at], &second[at]))
            );
            assert!(first.len() == second.len() && !first.is_empty(), "{scenario:?} {seed}");
        }
    }
}

/// Runs one seed after another until the time is up.
fn many(scenario: Scenario) {
    if let Some(seed) = number("SIM_SEED") {
        return one(seed, scenario, &mut Seen::default());
    }
    // There are five such tests; two run concurrently on two processors.
    let share = if scenario == Scenario::Pods { 0.6 } else { 0.35 };
    let seconds = number("SIM_SECONDS").unwrap_or(20);
    let until = Instant::now() + Duration::from_secs(seconds).mul_f64(share);
    let from = number("SIM_FROM").unwrap_or(0);
    let (mut seed, mut seen) = (from, Seen::default());
    while Instant::now() < until || seed < from + MIN_SEEDS {
        one(seed, scenario, &mut seen);
        seed += 1;
    }
    println!("{scenario:?}: seeds {from} to {}: {seen:?}", seed - 1);
    assert!(seen.bytes > 0 && (scenario == Scenario::Turns || seen.resumed > 0), "{seen:?}");
    assert!(scenario != Scenario::Pods || seen.relayed > 0 && seen.died > 0, "{seen:?}");
    assert!(matches!(scenario, Scenario::Turns | Scenario::Grace) || seen.backup_links > 0, "{seen:?}");
    let [over, back] = seen.classified;
    assert!(matches!(scenario, Scenario::Turns | Scenario::Grace) || over > 0, "{seen:?}");
    assert!(!matches!(scenario, Scenario::Cuts | Scenario::Drops) || back > 0, "{seen:?}");
    assert!(scenario != Scenario::Drops || seen.broke > 0, "{seen:?}");
    assert!(scenario != Scenario::Turns || seen.timed > 0, "no keystroke was timed");
}

/// Returns the value of an environment variable set by the developer.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn one(seed: u64, scenario: Scenario, seen: &mut Seen) {
    let Err(why) = run(seed, scenario, None, seen) else { return };
    let mut trace = Vec::new();
    let _ = run(seed, scenario, Some(&mut trace), seen);
    let tail = trace.len().saturating_sub(LAST_LINES);
    panic!("{}\n{why}\nSIM_SEED={seed} repeats it ({scenario:?})", trace[tail..].join("\n"));
}

fn run(
    seed: u64,
    scenario: Scenario,
    trace: Option<&mut Vec<String>>,
    seen: &mut Seen,
) -> Result<(), String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let ledger = ledger::Ledger::new(trace.is_some());
    let result = catch_unwind(AssertUnwindSafe(|| {
        // Without `unconstrained`, tokio would wake tasks without a reason, and hide lost wake-ups.
        runtime.block_on(unconstrained(async {
            world::Simulation::new(seed, scenario, ledger.clone()).live().await
        }))
    }));
    ledger.add_to(seen);
    ledger.add_broken(seen);
    if let Some(trace) = trace {
        *trace = ledger.trace();
    }
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panic: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")))
    })
}

/// Minimum number of seeds: enough to see every rare combination once, on any machine.
const MIN_SEEDS: u64 = 20;
/// Number of trace lines shown for a failed run.
const LAST_LINES: usize = 12000;
