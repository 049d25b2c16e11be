//! The program and others side by side: one column for each, measured in turns.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::echoes::{SETTLED, micros};
use super::memory::steady;
use crate::Figure;
use crate::echo::Echo;
use crate::load::{Kind, Load};
use crate::peers;
use crate::process::Process;
use crate::proxy::Proxy;
use crate::role::Role;
use crate::sessions::Tail;
use crate::table::{grid, interval, median, mib, short};

/// A row's name, and how a value of it is displayed.
type Row = (&'static str, fn(f64) -> String);

/// Returns one value for each row, or fewer if the later ones cannot be measured.
type Measure = fn(&Bench, &mut Proxy) -> Result<Vec<f64>>;

/// Rows that are measured together.
struct RowGroup {
    figure: Figure,
    rows: &'static [Row],
    /// Whether there is only one round.
    once: bool,
    measure: Measure,
}

/// Returns a figure that is measured in every round.
const fn rounds(figure: Figure, rows: &'static [Row], measure: Measure) -> RowGroup {
    RowGroup { figure, rows, once: false, measure }
}

/// Returns a figure that is measured once.
const fn once(figure: Figure, rows: &'static [Row], measure: Measure) -> RowGroup {
    RowGroup { figure, rows, once: true, measure }
}

impl Bench {
    /// Measures the program, the references, and the programs of these directories. Returns a table.
    ///
    /// Only the rows of the figures in `only`, if there are any.
    pub(crate) fn peers(&self, dirs: &[PathBuf], only: &[Figure]) -> Result<String> {
        let stand = self.stand()?;
        let (place, targets) = (stand.place, stand.targets);
        let mut heads = vec![String::new()];
        // Each with the number of times that it had to be started again.
        let mut proxies: Vec<(Proxy, u32)> =
            stand.tunnel.into_iter().chain([stand.relay]).chain(stand.ssh).map(|proxy| (proxy, 0)).collect();
        for (proxy, _) in &proxies {
            heads.push(match (proxy.name, &self.binary) {
                ("tunnel", Some(binary)) => version(Command::new(binary).arg("--version"))?,
                ("ssh -R", _) => format!("ssh -R, {}", version(Command::new("ssh").arg("-V"))?),
                (name, _) => name.to_owned(),
            });
        }
        for dir in dirs {
            match peers::start(dir, &place, &targets) {
                Ok(proxy) => {
                    proxies.push((proxy, 0));
                    heads.push(dir.file_name().unwrap_or_default().to_string_lossy().replace('-', " "));
                }
                Err(why) => eprintln!("{} is left out: {why:#}", dir.display()),
            }
        }
        // Memory is the first figure; see there.
        thread::sleep(self.time(30.0));
        let mut rows = Vec::new();
        for figure in FIGURES.iter().filter(|group| only.is_empty() || only.contains(&group.figure)) {
            rows.extend(self.figure(figure, &mut proxies));
        }
        let again = proxies.iter().map(|(_, again)| again.to_string());
        rows.push(std::iter::once(AGAIN.to_owned()).chain(again).collect());
        let mut table = grid(&heads, &rows);
        for (name, _) in peers::PROGRAMS {
            if proxies.iter().all(|(proxy, _)| proxy.name != name) {
                table += &format!("\n{name} is left out: it could not be built or started here.\n");
            }
        }
        Ok(table)
    }

    /// Measures one figure of every program in turns. Returns its rows.
    fn figure(&self, figure: &RowGroup, proxies: &mut [(Proxy, u32)]) -> Vec<Vec<String>> {
        let rounds = if figure.once { 1 } else { self.rounds };
        let mut found: Vec<Vec<Vec<f64>>> = vec![Vec::new(); proxies.len()];
        for _ in 0..rounds {
            for ((proxy, again), found) in proxies.iter_mut().zip(&mut found) {
                let measured = (figure.measure)(self, proxy).map(|values| found.push(values));
                if let Err(why) = measured.and_then(|()| check(proxy)) {
                    eprintln!("{} is started again: {why:#}", proxy.name);
                    *again += 1;
                    proxy.restart().unwrap_or_else(|why| eprintln!("{}: {why:#}", proxy.name));
                }
            }
        }
        let mut rows = Vec::new();
        for (at, (name, show)) in figure.rows.iter().enumerate() {
            let mut row = vec![(*name).to_owned()];
            for found in &found {
                let values: Vec<f64> = found.iter().filter_map(|values| values.get(at).copied()).collect();
                let failed = rounds - values.len();
                let interval = interval(&values)
                    .map(|[low, high]| format!(" ({} to {})", show(low), show(high)))
                    .unwrap_or_default();
                row.push(match failed {
                    0 => format!("{}{interval}", show(median(values))),
                    failed if failed == rounds => FAILED.to_owned(),
                    failed => {
                        format!("{}{interval}; {FAILED} {failed} of {rounds} times", show(median(values)))
                    }
                });
            }
            eprintln!("{}", row.join(" | "));
            rows.push(row);
        }
        rows
    }

    fn bulk_of(&self, proxy: &Proxy, kind: Kind, sessions: usize) -> Result<Vec<f64>> {
        self.one(proxy, kind, sessions).map(|(rate, cost)| vec![rate, cost])
    }

    /// Opens the sessions in sequence, then in fifty loops.
    fn set_up(&self, proxy: &Proxy) -> Result<Vec<f64>> {
        let (alone, crowd) = (self.opened(proxy, 1)?, self.opened(proxy, 50)?);
        #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
        let (count, failed) = (crowd.echoes.nanos.len() as f64, (alone.failed + crowd.failed) as f64);
        Ok(vec![alone.echoes.p50(), count / self.time(2.0).as_secs_f64(), crowd.echoes.p99(), failed])
    }

    /// Measures echoes and a download next to one reader that has stopped.
    fn one_stalled(&self, proxy: &Proxy) -> Result<Vec<f64>> {
        let alone = self.seldom(proxy, 2.0).measure(None)?;
        let way = proxy.ways.source.clone();
        let load = Load { way, kind: Kind::Stalled, clients: 1, time: None }.start(None)?;
        thread::sleep(SETTLED);
        let mut values = vec![alone.p99()];
        match self.seldom(proxy, 2.0).measure(None) {
            Ok(next_to) => values.extend([next_to.p99(), self.one(proxy, Kind::Download, 1)?.0]),
            Err(why) => eprintln!("{}: {why:#}", proxy.name),
        }
        load.finish()?;
        Ok(values)
    }
}

/// Returns the resident memory of both ends, idle, and how much more there is for a thousand sessions.
fn resident(proxy: &Proxy) -> Result<Vec<f64>> {
    let both = || -> Result<Vec<f64>> { proxy.processes.iter().map(|one| one.resident().map(mib)).collect() };
    steady(proxy)?;
    let mut all = both()?;
    let hold = Role::Hold { way: proxy.ways.echo.clone(), count: 1000 };
    let mut hold = Process::role(None, &hold)?;
    let _: usize = hold.read_output()?;
    steady(proxy)?;
    let more: Vec<f64> = both()?.iter().zip(&all).map(|(busy, idle)| busy - idle).collect();
    all.extend(more);
    Ok(all)
}

/// Returns the part of the files that arrive whole, and whether a client that has ended gets a response.
fn ends(proxy: &Proxy) -> Result<Vec<f64>> {
    let tail = Tail { way: proxy.ways.file.clone(), times: FILES };
    let whole: u32 = Process::role(None, &Role::Tail(tail))?.read_output()?;
    let (mut client, _) = proxy.ways.sink.open()?;
    client.write_all(b"x")?;
    client.shutdown(Shutdown::Write)?;
    client.set_read_timeout(Some(LOST))?;
    let answered = client.read_exact(&mut [0; 8]).is_ok();
    Ok(vec![f64::from(whole), f64::from(u8::from(answered))])
}

/// Resets the line between both ends. Returns whether a session survives that, and the seconds until a new one works.
fn cut(proxy: &mut Proxy) -> Result<Vec<f64>> {
    let Some(port) = proxy.port else {
        return Ok(vec![f64::NAN; 2]);
    };
    let (mut session, _) = proxy.ways.echo.open()?;
    echo(&mut session)?;
    let filter = format!("( dport = :{port} )");
    let ended = Command::new("ss").args(["-KHtn", "state", "established", &filter]).output()?;
    ensure!(!ended.stdout.is_empty(), "ss cannot end connections to port {port} on this machine");
    let took = proxy.until_reachable(RETURN)?;
    let survives = echo(&mut session).is_ok();
    Ok(vec![f64::from(u8::from(survives)), took.as_secs_f64()])
}

/// Kills the clients' side and starts it again at once. Returns whether a session survives that, and the seconds until
/// a new one works.
fn killed(proxy: &mut Proxy) -> Result<Vec<f64>> {
    if proxy.name == "relay" {
        // It would open other ports.
        return Ok(vec![f64::NAN; 2]);
    }
    let (mut session, _) = proxy.ways.echo.open()?;
    echo(&mut session)?;
    proxy.processes.first_mut().context("no process")?.start_again()?;
    let took = proxy.until_reachable(RETURN)?;
    let survives = echo(&mut session).is_ok();
    Ok(vec![f64::from(u8::from(survives)), took.as_secs_f64()])
}

/// Fails if the program does not work after its clients have left, or is busy and so would disturb the next one.
fn check(proxy: &Proxy) -> Result<()> {
    echo(&mut proxy.ways.echo.open()?.0)?;
    thread::sleep(CALM);
    let before = proxy.cpu()?;
    thread::sleep(CALM);
    ensure!(proxy.cpu()?.saturating_sub(before) < CALM / 4, "still busy after its clients have left");
    Ok(())
}

fn echo(session: &mut TcpStream) -> Result<()> {
    session.set_read_timeout(Some(LOST))?;
    session.write_all(b"x")?;
    Ok(session.read_exact(&mut [0])?)
}

/// Returns the name and version that a program prints about itself.
fn version(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    Ok(text.split([',', '(', '\n']).next().unwrap_or_default().trim().to_owned())
}

fn rate(value: f64) -> String {
    format!("{} MiB/s", short(value))
}

fn memory(value: f64) -> String {
    format!("{} MiB", short(value))
}

fn seconds(value: f64) -> String {
    if value.is_nan() { "-".to_owned() } else { format!("{} s", short(value)) }
}

fn count(value: f64) -> String {
    format!("{value:.0}")
}

fn yes(value: f64) -> String {
    match value {
        value if value.is_nan() => "-".to_owned(),
        value if value < 1.0 => "no".to_owned(),
        _ => "yes".to_owned(),
    }
}

/// Memory is first, as programs keep some of what the other figures make them use. The last one kills the programs.
const FIGURES: &[RowGroup] = &[
    once(
        Figure::Memory,
        &[
            ("memory idle, server", memory),
            ("memory idle, edge", memory),
            ("memory more for 1,000 idle sessions, server", memory),
            ("memory more for 1,000 idle sessions, edge", memory),
        ],
        |_, proxy| resident(proxy),
    ),
    rounds(
        Figure::Bulk,
        &[("one download", rate), ("CPU of both processes per GiB of it", seconds)],
        |bench, proxy| bench.bulk_of(proxy, Kind::Download, 1),
    ),
    rounds(
        Figure::Bulk,
        &[("one upload", rate), ("CPU of both processes per GiB of it", seconds)],
        |bench, proxy| bench.bulk_of(proxy, Kind::Upload, 1),
    ),
    rounds(
        Figure::Bulk,
        &[("eight downloads", rate), ("CPU of both processes per GiB of them", seconds)],
        |bench, proxy| bench.bulk_of(proxy, Kind::Download, 8),
    ),
    rounds(
        Figure::Bulk,
        &[("eight uploads", rate), ("CPU of both processes per GiB of them", seconds)],
        |bench, proxy| bench.bulk_of(proxy, Kind::Upload, 8),
    ),
    rounds(Figure::Echo, &[("echo of 64 bytes, idle, p50", micros)], |bench, proxy| {
        Ok(vec![Echo::tight(&proxy.ways.echo, bench.time(2.0)).measure(None)?.p50()])
    }),
    rounds(
        Figure::Loaded,
        &[("echo next to four downloads, p99", micros), ("the four downloads meanwhile", rate)],
        |bench, proxy| {
            let (echoes, moved) = bench.echoes_next_to(proxy, Kind::Download)?;
            Ok(vec![echoes.p99(), moved.rate() / f64::from(1 << 20)])
        },
    ),
    rounds(
        Figure::Open,
        &[
            ("new session to first echoed byte, p50", micros),
            ("fifty loops of that, sessions a second", short),
            ("fifty loops of that, p99", micros),
            ("sessions that failed", count),
        ],
        |bench, proxy| bench.set_up(proxy),
    ),
    rounds(
        Figure::Stalled,
        &[
            ("echo with pauses, p99", micros),
            ("the same next to one reader that has stopped", micros),
            ("one download next to it", rate),
        ],
        |bench, proxy| bench.one_stalled(proxy),
    ),
    once(
        Figure::Tail,
        &[
            ("whole files of 5, the target ending while the client sends", count),
            ("response after the client has ended its direction", yes),
        ],
        |_, proxy| ends(proxy),
    ),
    rounds(
        Figure::Cut,
        &[
            ("line between server and edge reset: its sessions survive", yes),
            ("the same: until a new session works", seconds),
        ],
        |_, proxy| cut(proxy),
    ),
    rounds(
        Figure::Restart,
        &[
            ("server killed and started again: its sessions survive", yes),
            ("the same: until a new session works", seconds),
        ],
        |_, proxy| killed(proxy),
    ),
];
/// Time after the last client until a program must be idle.
const CALM: Duration = Duration::from_millis(300);
/// The cell of a program that cannot do it.
const FAILED: &str = "does not work";
/// The last row.
const AGAIN: &str = "times it had to be started again, as it no longer worked or never came to rest";
/// Number of times that the target ends.
const FILES: usize = 5;
/// A response that takes longer counts as lost.
const LOST: Duration = Duration::from_secs(5);
/// Maximum time until a killed program works again.
const RETURN: Duration = Duration::from_secs(60);
