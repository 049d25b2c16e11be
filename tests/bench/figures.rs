//! The figures: setup and measurement of each.

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
mod peers;
mod relayed;
mod restart;
mod resume;
mod sessions;
mod slow;
mod user;

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

/// The options of a run.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The program under test; `None` measures the references only.
    pub(crate) binary: Option<PathBuf>,
    /// Directory of configs and logs.
    pub(crate) dir: PathBuf,
    /// Whether to shorten everything.
    pub(crate) quick: bool,
    /// Rounds of figures that are measured in pairs.
    pub(crate) rounds: usize,
    /// Whether to compare with `ssh -R` too.
    pub(crate) ssh: bool,
    /// How long to watch the idle line.
    pub(crate) idle: Duration,
    /// Options of the long lines.
    pub(crate) lines: lines::LinesArgs,
    /// Number of edges linked to one server.
    pub(crate) edges: usize,
    /// A program that cannot resume, for comparison.
    pub(crate) against: Option<PathBuf>,
}

/// The setup of one figure on loopback: all proxies in parallel, restarted for each figure.
#[derive(Debug)]
struct Setup {
    tunnel: Option<Proxy>,
    relay: Proxy,
    ssh: Option<Proxy>,
    targets: Targets,
    place: Place,
}

impl Bench {
    /// Measures one figure.
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
            Figure::User => self.user(table),
            Figure::Resume => self.resume(table),
            Figure::Edges => self.idle_edges(table),
            Figure::Shrink => self.shrink(table),
            Figure::Balance => self.balance(table),
        }
    }

    /// Returns the row of a failed figure, which misses its requirement.
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

    /// Returns the heading of the table: the program and the machine.
    pub(crate) fn heading(&self) -> Result<String> {
        let cores = std::thread::available_parallelism()?;
        let cpu = std::fs::read_to_string("/proc/cpuinfo")?;
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("");
        let model = model.trim_start_matches(['\t', ' ', ':']);
        let kernel = Command::new("uname").arg("-r").output()?;
        let kernel = String::from_utf8_lossy(&kernel.stdout);
        let build = match &self.binary {
            None => "references only",
            Some(path) if path.components().any(|part| part.as_os_str() == "release") => "profile release",
            Some(_) => "not the profile release",
        };
        let speed = if self.quick { ", quick" } else { "" };
        Ok(format!("{cores} cores of {model}, Linux {}, {build}{speed}\n", kernel.trim()))
    }

    /// Starts all proxies of one figure on loopback.
    fn stand(&self) -> Result<Setup> {
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = match &self.binary {
            Some(binary) => Some(Tunnel::configure(&place, &targets, binary)?.reachable()?),
            None => None,
        };
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
        let stand = Setup { tunnel, relay, ssh, targets, place };
        for proxy in stand.all() {
            let ids: Vec<u32> = proxy.processes.iter().map(Process::id).collect();
            eprintln!("{}: processes {ids:?}, server side first", proxy.name);
        }
        Ok(stand)
    }

    /// Returns a duration, divided by four in a quick run.
    fn time(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(if self.quick { seconds / 4.0 } else { seconds })
    }
}

impl Setup {
    /// Returns the proxies to compare: the program first, the relay second.
    fn all(&self) -> Vec<&Proxy> {
        self.tunnel.iter().chain([&self.relay]).chain(&self.ssh).collect()
    }
}

/// Returns the value that another proxy reached in this run as a goal; `otherwise` without that proxy.
fn goal(reached: f64, otherwise: f64) -> f64 {
    if reached.is_nan() { otherwise } else { (reached * 100.0).round() / 100.0 }
}

/// Returns the bound for rows about the program. Without the program, rows have no bound.
fn only_with<T>(tunnel: Option<&Proxy>, bound: T) -> Option<T> {
    tunnel.map(|_| bound)
}
