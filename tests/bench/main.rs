//! Measures `tunnel` against a bare TLS relay and `ssh -R`, all as real processes on this machine, and prints a table.
#![allow(clippy::disallowed_types, reason = "a benchmark measures real time, never paused time")]
#![allow(clippy::disallowed_methods, reason = "these processes are stopped as a whole, without draining")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints a table on a terminal")]

mod cutter;
mod echo;
mod edges;
mod figures;
mod groups;
mod line;
mod load;
mod nginx;
mod peers;
mod place;
mod process;
mod proxy;
mod relay;
mod role;
mod sessions;
mod soak;
mod ssh;
mod superedge;
mod table;
mod targets;
mod tls;
mod tunnel;
mod way;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use crate::figures::Bench;
use crate::table::Table;

/// Measures `tunnel` against a bare TLS relay and `ssh -R`; prints a Markdown table.
#[derive(Debug, Parser)]
struct Flags {
    /// Program under test. Default: target/release/tunnel, otherwise target/fast/tunnel.
    #[arg(long)]
    tunnel: Option<PathBuf>,
    /// Measure the references only.
    #[arg(long)]
    no_tunnel: bool,
    /// Do not measure `ssh -R`.
    #[arg(long)]
    no_ssh: bool,
    /// Only these figures. `idle` (ten minutes), `lines` (half an hour), `limits`, `thousand`, `edges`, `shrink`,
    /// `balance` and `resume` run only if listed here, or with --all.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Figure>,
    /// Only a table of the program, the references, and the programs in these directories, which scripts/peers.sh
    /// prints.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<PathBuf>,
    /// Every figure, including the long ones.
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// Fewer and shorter rounds: for profiling, not for the record.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    lines: figures::lines::LinesArgs,
    /// Duration of the idle line, in seconds.
    #[arg(long, default_value_t = 600)]
    idle_seconds: u64,
    /// Rounds of every figure that is measured in pairs.
    #[arg(long)]
    rounds: Option<usize>,
    /// Number of edges linked to one server in `edges`.
    #[arg(long, default_value_t = 10_000)]
    edges: usize,
    /// Program that cannot resume, for `resume`; scripts/resume-cost.sh builds it.
    #[arg(long)]
    against: Option<PathBuf>,
    /// Keep configs and logs, and print their directory.
    #[arg(long)]
    keep: bool,
    /// Passed by cargo to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A figure that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Figure {
    /// One session, and eight at once, at full speed in each direction: rate and CPU.
    Bulk,
    /// Echoes of 64 bytes without other traffic.
    Echo,
    /// Echoes in parallel with four downloads.
    Loaded,
    /// Echoes in parallel with four readers at 2 MiB/s each.
    Paced,
    /// Echoes in parallel with twenty stalled readers.
    Stalled,
    /// From CONNECT to the first echoed byte, in sequence and fifty at once.
    Open,
    /// CONNECT inside mutual TLS.
    Egress,
    /// HTTPS requests over persistent connections, against two nginx in a row.
    Https,
    /// The target ends while the client still sends.
    Tail,
    /// Memory while idle, with sessions, and after them.
    Memory,
    /// The same with a thousand sessions.
    Thousand,
    /// Edge or server killed and restarted.
    Restart,
    /// 20 Mbit/s, 40 ms: echoes in parallel with downloads, bulk.
    Slow,
    /// Lines that edges have, each against plain TCP: rates fresh and after a pause, fairness, echoes, a second server.
    Lines,
    /// Server and edge with the memory and CPU limits of a small node.
    Limits,
    /// Ten idle minutes on the line of `slow`.
    Idle,
    /// The line between edge and server cut while a session runs.
    Cut,
    /// Client and edge at different servers.
    Relayed,
    /// One download over a user's link, against plain CONNECT.
    User,
    /// Bulk against a program that cannot resume; requires --against.
    Resume,
    /// Ten thousand idle edges at one server, and half of them reconnecting.
    Edges,
    /// One server's memory after nine of ten edges have disconnected.
    Shrink,
    /// Half as many edges at two servers, and a third server that starts later.
    Balance,
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    match words.next().as_deref() {
        Some("role") => {
            let role = words.next().context("no role")?;
            return serde_json::from_str::<role::Role>(&role)?.play();
        }
        Some("soak") => return soak::run(&soak::Flags::parse_from(std::env::args().skip(1))),
        _ => {}
    }
    let flags = Flags::parse();
    let dir = tempfile::Builder::new().prefix("tunnel-bench-").tempdir()?;
    let dir_path = dir.path().to_owned();
    if flags.keep {
        eprintln!("configs and logs: {}", dir.keep().display());
    } else {
        end_on_signal(dir.path().to_owned())?;
    }
    let binary = if flags.no_tunnel { None } else { Some(tunnel::find(flags.tunnel.as_deref())?) };
    let bench = Bench {
        binary,
        dir: dir_path,
        quick: flags.quick,
        ssh: !flags.no_ssh,
        rounds: flags.rounds.unwrap_or(if flags.quick { 2 } else { 5 }),
        idle: Duration::from_secs(flags.idle_seconds),
        lines: flags.lines,
        edges: flags.edges,
        against: flags.against,
    };
    if !flags.peers.is_empty() {
        let table = bench.peers(&flags.peers, &flags.only)?;
        println!("{}\n{table}", bench.heading()?);
        return Ok(());
    }
    let long = [
        Figure::Idle,
        Figure::Lines,
        Figure::Limits,
        Figure::Thousand,
        Figure::Edges,
        Figure::Shrink,
        Figure::Balance,
        Figure::Resume,
    ];
    let selected: Vec<Figure> = Figure::value_variants()
        .iter()
        .copied()
        .filter(|figure| {
            flags.all || flags.only.contains(figure) || (flags.only.is_empty() && !long.contains(figure))
        })
        .collect();
    let mut table = Table::default();
    for figure in selected {
        eprintln!("-- {figure:?}");
        if let Err(why) = bench.measure(figure, &mut table) {
            eprintln!("{figure:?} failed: {why:#}");
            table.add(Bench::failed(figure, &why));
        }
    }
    println!("{}", bench.heading()?);
    println!("{}", table.markdown());
    println!("{}", table.verdict());
    Ok(())
}

/// On Ctrl-C or SIGTERM, removes the files and exits. The kernel kills the child processes. The process of the line
/// removes its namespaces when its input closes.
fn end_on_signal(dir: PathBuf) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut int, mut term) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {} }
        });
        let _ = std::fs::remove_dir_all(dir);
        std::process::exit(130);
    });
    Ok(())
}
