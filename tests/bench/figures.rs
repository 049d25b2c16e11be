//! The figures: what is started for each, and what is asked of it.

mod balance;
mod bulk;
mod cut;
mod echoes;
mod edges;
mod egress;
mod https;
mod limits;
pub(crate) mod lines;
mod memory;
mod over_line;
mod relayed;
mod restart;
mod resume;
mod sessions;
mod slow;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Error, Result};

use crate::place::Place;
use crate::process::Process;
use crate::proxy::Proxy;
use crate::table::{Row, Table};
use crate::targets::Targets;
use crate::tunnel::Tunnel;
use crate::{Figure, relay, ssh};

/// What a run was asked for.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The program under test; none measures the references only.
    pub(crate) binary: Option<PathBuf>,
    /// Where configs and logs go.
    pub(crate) dir: PathBuf,
    /// Shorter everything.
    pub(crate) quick: bool,
    /// Rounds of what is taken in pairs.
    pub(crate) rounds: usize,
    /// Compare with `ssh -R` too.
    pub(crate) ssh: bool,
    /// How long the idle line is watched.
    pub(crate) idle: Duration,
    /// What is asked of the long lines.
    pub(crate) lines: lines::Asked,
    /// How many edges hang at one pod.
    pub(crate) edges: usize,
    /// A program that cannot resume, to compare with.
    pub(crate) against: Option<PathBuf>,
}

/// What stands for one figure on loopback: all proxies side by side, fresh for each figure.
#[derive(Debug)]
struct Stand {
    tunnel: Option<Proxy>,
    relay: Proxy,
    ssh: Option<Proxy>,
    targets: Targets,
    /// How to start the program once more.
    again: Option<Tunnel>,
}

impl Bench {
    /// Takes one figure.
    pub(crate) fn measure(&self, figure: Figure, table: &mut Table) -> Result<()> {
        match figure {
            Figure::Bulk => self.bulk(table),
            Figure::Echo => self.echo(table),
            Figure::Loaded => self.loaded(table),
            Figure::Paced => self.paced(table),
            Figure::Stalled => self.stalled(table),
            Figure::Open => self.open(table),
            Figure::Egress => self.egress(table),
            Figure::Https => self.https(table),
            Figure::Tail => self.tail(table),
            Figure::Memory => self.memory(100, table),
            Figure::Thousand => self.memory(1000, table),
            Figure::Restart => self.restart(table),
            Figure::Slow => self.slow(table),
            Figure::Lines => self.lines(table),
            Figure::Limits => self.limits(table),
            Figure::Idle => self.idle_line(table),
            Figure::Cut => self.cut(table),
            Figure::Relayed => self.relayed(table),
            Figure::Resume => self.resume(table),
            Figure::Edges => self.idle_edges(table),
            Figure::Shrink => self.shrink(table),
            Figure::Balance => self.balance(table),
        }
    }

    /// The row of a figure that could not be taken: it misses whatever is asked of it.
    pub(crate) fn failed(figure: Figure, why: &Error) -> Row {
        Row {
            figure: format!("{figure:?}"),
            tunnel: format!("failed: {why:#}").replace(['|', '\n'], " "),
            reference: String::new(),
            others: String::new(),
            value: f64::NAN,
            bound: Some(crate::table::Bound::Most(0.0, 0.0)),
        }
    }

    /// What the table is about: the program and the machine.
    pub(crate) fn heading(&self) -> Result<String> {
        let cores = std::thread::available_parallelism()?;
        let cpu = std::fs::read_to_string("/proc/cpuinfo")?;
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("");
        let model = model.trim_start_matches(['\t', ' ', ':']);
        let kernel = Command::new("uname").arg("-r").output()?;
        let kernel = String::from_utf8_lossy(&kernel.stdout);
        let build = match &self.binary {
            None => "references only",
            Some(path) if path.components().any(|part| part.as_os_str() == "release") => "release build",
            Some(_) => "not the release build",
        };
        let speed = if self.quick { ", quick" } else { "" };
        Ok(format!("{cores} cores of {model}, Linux {}, {build}{speed}\n", kernel.trim()))
    }

    /// Starts everything for one figure on loopback.
    fn stand(&self) -> Result<Stand> {
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let again = match &self.binary {
            Some(binary) => Some(Tunnel::configure(&place, &targets, binary)?),
            None => None,
        };
        let tunnel = again.as_ref().map(Tunnel::reachable).transpose()?;
        let mut relay = relay::start(&place, &targets)?;
        relay.until_reachable(Duration::from_secs(5))?;
        let ssh = match self.ssh.then(|| ssh::start(&place, &targets)) {
            Some(Ok(proxy)) => Some(proxy),
            Some(Err(why)) => {
                eprintln!("ssh -R skipped: {why:#}");
                None
            }
            None => None,
        };
        let stand = Stand { tunnel, relay, ssh, targets, again };
        for proxy in stand.all() {
            let ids: Vec<u32> = proxy.processes.iter().map(Process::id).collect();
            eprintln!("{}: processes {ids:?}, cloud side first", proxy.name);
        }
        Ok(stand)
    }

    /// A time that a quick run divides by four.
    fn time(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(if self.quick { seconds / 4.0 } else { seconds })
    }
}

impl Stand {
    /// The proxies to compare: the program first, the relay second.
    fn all(&self) -> Vec<&Proxy> {
        self.tunnel.iter().chain([&self.relay]).chain(&self.ssh).collect()
    }
}

/// What another proxy reached in this run as a goal; without that proxy, `otherwise`.
fn goal(reached: f64, otherwise: f64) -> f64 {
    if reached.is_nan() { otherwise } else { (reached * 100.0).round() / 100.0 }
}

/// For rows about the program: absent, they only inform.
fn only_with<T>(tunnel: Option<&Proxy>, bound: T) -> Option<T> {
    tunnel.map(|_| bound)
}
