//! The soak test: injects faults into a cloud of three servers and six edges for minutes, while forty clients check
//! every byte.

mod client;
mod cluster;
mod faults;
mod judge;
mod opener;
mod pattern;
mod plan;
mod pump;
mod tables;
mod target;
mod weigh;
mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::runtime::Runtime;

pub(crate) use opener::Opener;

use crate::soak::client::Client;
use crate::soak::cluster::Cluster;
use crate::soak::faults::FaultInjector;
use crate::soak::world::{HANG, World};

/// Injects faults into three servers and six edges while clients check every byte. Prints tables, and fails on any
/// error.
#[derive(Debug, Parser)]
#[command(name = "soak")]
pub(crate) struct Flags {
    /// Program under test. Default: target/release/tunnel, otherwise target/fast/tunnel.
    #[arg(long)]
    tunnel: Option<PathBuf>,
    /// Duration of fault injection, in seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Seed for sessions and faults, but not for their timing. Printed at the start. Default: random.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 40)]
    clients: u64,
    /// Keep configs and logs even if there were no errors.
    #[arg(long)]
    keep: bool,
}

/// Runs the soak test.
pub(crate) fn run(flags: &Flags) -> Result<()> {
    let seed = flags.seed.unwrap_or_else(rand::random);
    let dir = tempfile::Builder::new().prefix("tunnel-soak-").tempdir()?.keep();
    println!("seed {seed}; configs, logs and events: {}", dir.display());
    let faults = Soak::start(flags, seed, &dir)?.run(Duration::from_secs(flags.seconds))?;
    if faults.is_empty() {
        if !flags.keep {
            std::fs::remove_dir_all(&dir)?;
        }
        println!("seed {seed}: no errors.");
        return Ok(());
    }
    for fault in &faults {
        println!("ERROR {fault}");
    }
    bail!("seed {seed}: {} errors; see {}", faults.len(), dir.display())
}

/// One run.
struct Soak {
    seed: u64,
    clients: u64,
    runtime: Runtime,
    world: Arc<World>,
    cluster: Cluster,
}

impl Soak {
    fn start(flags: &Flags, seed: u64, dir: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let world = World::new(dir)?;
        let target = runtime.block_on(target::listen(&world))?;
        let cluster = Cluster::start(dir, flags.tunnel.as_deref(), target)?;
        Ok(Self { seed, clients: flags.clients, runtime, world, cluster })
    }

    /// Warms up, injects faults, and waits until everything is idle. Returns the errors.
    fn run(mut self, time: Duration) -> Result<Vec<String>> {
        let mut conductor = FaultInjector::new(StdRng::seed_from_u64(self.seed));
        self.reaches_all("before any fault");
        self.work(WARM, Instant::now() + WARM_UP, |_| Ok(()))?;
        self.rests(&mut conductor)?;
        std::thread::sleep(IDLE);
        let before = self.cluster.weigh()?;
        println!("warm: {}", self.world.progress());

        let started = Instant::now();
        let mut next = started + PROGRESS;
        self.work(0, started + time, |soak| {
            conductor.turn(&mut soak.cluster, &soak.world)?;
            if Instant::now() >= next {
                next += PROGRESS;
                let injected: u64 = conductor.injected().values().sum();
                let (at, resumed) = (started.elapsed().as_secs(), soak.cluster.resumed());
                println!(
                    "{at:4} s: {injected} faults injected, {resumed} resumes, {}",
                    soak.world.progress()
                );
            }
            Ok(())
        })?;
        self.rests(&mut conductor)?;
        self.reaches_all("after the last fault");
        let excess = self.cluster.settles(&before, SETTLES);
        for what in excess.into_iter().chain(self.cluster.screams()) {
            self.world.fault(what);
        }
        if self.cluster.interactive_links() == 0 && time > INTERACTIVE_WITHIN {
            self.world.fault("no edge has opened an interactive link".to_owned());
        }
        println!("{}", tables::all(&self.cluster, &self.world, &conductor, &before));
        Ok(std::mem::take(&mut self.world.book().faults))
    }

    /// Runs clients until `until`, and calls `meanwhile` repeatedly.
    fn work(
        &mut self,
        first: u64,
        until: Instant,
        mut meanwhile: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.world.resting.store(false, Relaxed);
        for number in first..first + self.clients {
            let client = Client::new(self.world.clone(), self.cluster.ways.clone(), self.seed, number);
            self.runtime.spawn(client.work());
        }
        while Instant::now() < until {
            meanwhile(self)?;
            std::thread::sleep(TURN);
        }
        self.world.resting.store(true, Relaxed);
        Ok(())
    }

    /// Stops new faults and sessions, undoes all faults, and waits until all sessions have ended.
    fn rests(&mut self, conductor: &mut FaultInjector) -> Result<()> {
        let until = Instant::now() + LONGEST;
        while conductor.tidy(&mut self.cluster, &self.world)? || self.world.running.load(Relaxed) > 0 {
            if Instant::now() > until {
                self.world.fault(format!("not idle after {LONGEST:?}: {}", self.world.progress()));
                break;
            }
            std::thread::sleep(TURN);
        }
        Ok(())
    }

    /// Checks that each node is reachable through each door.
    fn reaches_all(&self, when: &str) {
        for why in self.runtime.block_on(client::unreachable(&self.world, &self.cluster.ways)) {
            self.world.fault(format!("{when}: {why}"));
        }
    }
}

/// Time within which some edge has both bulk and keystrokes on one line.
const INTERACTIVE_WITHIN: Duration = Duration::from_secs(60);
/// Numbers of the clients that warm up.
const WARM: u64 = 1_000;
/// How long clients work before the first fault, so that one-off allocations are done.
const WARM_UP: Duration = Duration::from_secs(10);
/// Time after which unused threads have ended.
const IDLE: Duration = Duration::from_secs(12);
/// Interval between two checks for due work.
const TURN: Duration = Duration::from_millis(50);
/// Interval between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(10);
/// The longest session, and how long each of its sides may hang.
const LONGEST: Duration = Duration::from_secs(60 + 2 * HANG.as_secs());
/// Time within which an unused cluster frees what it does not need.
const SETTLES: Duration = Duration::from_secs(90);
