//! Lines that edges have: rates of one session against plain TCP, fresh and after a pause; fairness between sessions;
//! echoes in parallel with them; the same through a second server.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use super::Bench;
use super::over_line::OverLine;
use super::slow::millis;
use crate::echo::{Echo, Echoes, WARM};
use crate::line::Carry;
use crate::load::{Kind, Load, Transferred};
use crate::table::{Bound, Row, Table, short};
use crate::way::Ways;

/// The lines and parts to measure.
#[derive(Args, Clone, Debug)]
pub(crate) struct LinesArgs {
    /// Of `lines`, only these.
    #[arg(long, value_delimiter = ',', value_enum)]
    lines: Vec<LineKind>,
    /// Of `lines`, only with these congestion controls of the kernel.
    #[arg(long, value_delimiter = ',', default_values = ["bbr", "cubic"])]
    congestion: Vec<String>,
    /// Of `lines`, only these parts.
    #[arg(long, value_delimiter = ',', value_enum)]
    parts: Vec<Part>,
    /// Idle time of a link of `lines` before the rates after a pause, in seconds.
    #[arg(long, default_value_t = 20)]
    pause_seconds: u64,
}

/// The name of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LineKind {
    /// 100 Mbit/s, 200 ms.
    Far,
    /// 10 Mbit/s, 600 ms.
    Satellite,
    /// 20 Mbit/s, 40 ms, 1 % loss.
    Lossy,
    /// 1 Gbit/s, 20 ms.
    Wide,
    /// 4 Mbit/s, 80 ms, 3 % loss.
    Poor,
    /// 50 Mbit/s, 40 ms, jitter of 30 ms.
    Uneven,
}

/// A measurement of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// One session's rate, on a fresh link and after a pause.
    Rates,
    /// Fairness of four sessions, and an echo in parallel with them.
    Beside,
    /// One session's rate through a second server.
    Pods,
}

impl Bench {
    /// Measures every line with every congestion control.
    pub(crate) fn lines(&self, table: &mut Table) -> Result<()> {
        let is_selected = |which: &&LineKind| self.lines.lines.is_empty() || self.lines.lines.contains(which);
        for which in LineKind::value_variants().iter().filter(is_selected) {
            for congestion in &self.lines.congestion {
                self.line(*which, congestion, table).with_context(|| format!("{which:?}, {congestion}"))?;
            }
        }
        Ok(())
    }

    fn line(&self, which: LineKind, congestion: &str, table: &mut Table) -> Result<()> {
        let is_selected = |part| self.lines.parts.is_empty() || self.lines.parts.contains(&part);
        let stand = self.over_line(which.carry(), congestion, is_selected(Part::Pods))?;
        let [tunnel, direct] = stand.proxies.as_slice() else {
            anyhow::bail!("lines: requires the program, to compare it with the direct route");
        };
        let name = format!("{}, {congestion}", which.words());
        let measured = Measured { bench: self, stand: &stand, carry: which.carry(), name };
        // The edge is linked once this returns.
        Echo::tight(&tunnel.ways.echo, Duration::ZERO).measure(Some(&stand.space))?;
        let fresh = is_selected(Part::Rates).then(|| measured.both(&tunnel.ways)).transpose()?;
        let paused = is_selected(Part::Rates).then(|| measured.paused(&tunnel.ways)).transpose()?;
        let mixed = is_selected(Part::Beside).then(|| measured.mixed(&tunnel.ways, "tunnel")).transpose()?;
        let mut by_second = None;
        if is_selected(Part::Pods) {
            let far = stand.far.as_ref().context("there is no second server")?;
            Echo::tight(&far.echo, Duration::ZERO).measure(Some(&stand.space))?;
            by_second = Some(measured.both(far)?);
        }
        // Plain TCP comes last: it fills the line's queue, which an idle link would mistake for congestion of the line.
        if fresh.is_some() || by_second.is_some() {
            let direct = measured.twice(&direct.ways)?;
            let pause = format!(" after {} s", self.lines.pause_seconds);
            for (when, rates) in [("", fresh), (&*pause, paused), (" through a second server", by_second)] {
                if let Some(rates) = rates {
                    measured.compare(when, rates, direct, table);
                }
            }
        }
        if let Some(mixed) = mixed {
            measured.compare_mixed(&mixed, &measured.mixed(&direct.ways, "plain TCP")?, which, table);
        }
        Ok(())
    }
}

/// One line with one congestion control.
#[derive(Debug)]
struct Measured<'a> {
    bench: &'a Bench,
    stand: &'a OverLine,
    carry: Carry,
    name: String,
}

impl Measured<'_> {
    /// Returns the rates of a download and of an upload after it, in Mbit/s.
    fn both(&self, ways: &Ways) -> Result<[f64; 2]> {
        Ok([self.rate(ways, Kind::Download)?, self.rate(ways, Kind::Upload)?])
    }

    /// Like [`Self::both`], each after a pause.
    fn paused(&self, ways: &Ways) -> Result<[f64; 2]> {
        let pause = || thread::sleep(Duration::from_secs(self.bench.lines.pause_seconds));
        pause();
        let down = self.rate(ways, Kind::Download)?;
        pause();
        Ok([down, self.rate(ways, Kind::Upload)?])
    }

    /// Returns the mean of two runs of [`Self::both`].
    fn twice(&self, ways: &Ways) -> Result<[f64; 2]> {
        let ([down, up], [again_down, again_up]) = (self.both(ways)?, self.both(ways)?);
        Ok([down.midpoint(again_down), up.midpoint(again_up)])
    }

    fn compare_mixed(&self, tunnel: &Mixed, direct: &Mixed, which: LineKind, table: &mut Table) {
        let quarter = which.carry().delay.as_secs_f64() * 1000.0 / 2.0;
        let bound = Bound::Most(quarter.max(25.0), quarter.max(20.0));
        for (when, of, bound) in [
            ("once they are up", Mixed::after as fn(&Mixed) -> f64, Some(bound)),
            ("as they begin", Mixed::start, None),
        ] {
            table.add(Row {
                figure: format!("{}: echo p99 next to 4 downloads, {when}, ms above idle", self.name),
                tunnel: format!("idle p99 {} ms", millis(tunnel.idle.p99())),
                reference: format!("plain TCP +{} ms", short(of(direct))),
                others: String::new(),
                value: of(tunnel),
                bound,
            });
        }
        table.add(Row {
            figure: format!("{}: least of four downloads, share of the most", self.name),
            tunnel: format!("{} Mbit/s in all", short(mbit(&tunnel.moved))),
            reference: format!("plain TCP {}", short(direct.share())),
            others: String::new(),
            value: tunnel.share(),
            bound: Some(Bound::Least(0.8, 0.8)),
        });
    }

    /// Measures echoes alone and in parallel with four downloads, first while these start, then at full rate. On lines
    /// with loss, the few packets that are lost twice decide the 99th percentile, so it takes longer.
    fn mixed(&self, ways: &Ways, name: &str) -> Result<Mixed> {
        let space = Some(self.stand.space.as_str());
        let echo = Echo {
            clients: 8,
            pause: Some(Duration::from_millis(5)),
            warm: FOUND + 4 * self.carry.delay,
            ..Echo::tight(&ways.echo, self.bench.time(if self.carry.loss > 0 { 60.0 } else { 20.0 }))
        };
        let idle = echo.clone().measure(space)?;
        let load = Load { way: ways.source.clone(), kind: Kind::Download, clients: 4, time: None };
        let mut load = load.start(space)?;
        let begin = Echo { warm: WARM, time: COME_UP, ..echo.clone() }.measure(space)?;
        let after = echo.measure(space)?;
        load.dismiss();
        let moved: Transferred = load.read_output()?;
        drop(load);
        settle();
        for (when, echoes) in [("idle", &idle), ("as four downloads begin", &begin), ("next to them", &after)]
        {
            eprintln!(
                "{}, {name}: echo {when} p50 {} p90 {} p99 {} max {}",
                self.name,
                millis(echoes.p50()),
                millis(echoes.micros(0.9)),
                millis(echoes.p99()),
                millis(echoes.max()),
            );
        }
        Ok(Mixed { idle, begin, after, moved })
    }

    /// Adds rows for the tunnel's download and upload, measured `when`, against plain TCP's.
    fn compare(&self, when: &str, tunnel: [f64; 2], direct: [f64; 2], table: &mut Table) {
        for ((what, tunnel), direct) in ["download", "upload"].into_iter().zip(tunnel).zip(direct) {
            eprintln!("{}: {what}{when}: {} Mbit/s, direct {}", self.name, short(tunnel), short(direct));
            table.add(Row {
                figure: format!("{}: {what}{when}, rate against plain TCP's", self.name),
                tunnel: format!("{} Mbit/s", short(tunnel)),
                reference: format!("direct {} Mbit/s", short(direct)),
                others: String::new(),
                value: tunnel / direct,
                bound: Some(Bound::Least(0.85, 0.95)),
            });
        }
    }

    /// Returns the rate of one session in Mbit/s.
    fn rate(&self, ways: &Ways, kind: Kind) -> Result<f64> {
        let way = if kind == Kind::Upload { &ways.sink } else { &ways.source };
        let load = Load { way: way.clone(), kind, clients: 1, time: Some(self.time()) };
        let moved = load.measure(Some(&self.stand.space))?;
        settle();
        Ok(mbit(&moved))
    }

    fn time(&self) -> Duration {
        match self.bench.quick {
            true => QUICK,
            false if self.carry.loss > 0 => LONG_WITH_LOSS,
            false => LONG,
        }
    }
}

/// Echoes in parallel with four downloads.
#[derive(Debug)]
struct Mixed {
    idle: Echoes,
    begin: Echoes,
    after: Echoes,
    moved: Transferred,
}

impl Mixed {
    /// Returns the milliseconds above idle at the 99th percentile.
    fn start(&self) -> f64 {
        (self.begin.p99() - self.idle.p99()) / 1000.0
    }

    fn after(&self) -> f64 {
        (self.after.p99() - self.idle.p99()) / 1000.0
    }

    /// Returns the share of the slowest of the four, relative to the fastest.
    #[expect(clippy::cast_precision_loss, reason = "no run moves 2^52 bytes")]
    fn share(&self) -> f64 {
        let [least, most] = [self.moved.each.iter().min(), self.moved.each.iter().max()];
        least.zip(most).map_or(f64::NAN, |(least, most)| *least as f64 / *most as f64)
    }
}

/// Waits until the line and the kernel's buffers are empty.
fn settle() {
    thread::sleep(SETTLE);
}

impl LineKind {
    fn carry(self) -> Carry {
        let carry = |mbit: u64, rtt: u64, queue| Carry {
            rate: mbit * 1_000_000,
            delay: Duration::from_millis(rtt) / 2,
            queue,
            loss: 0,
            jitter: Duration::ZERO,
        };
        match self {
            Self::Far => carry(100, 200, 2 << 20),
            Self::Satellite => carry(10, 600, 1 << 20),
            Self::Lossy => Carry { loss: 10, ..carry(20, 40, 256 << 10) },
            Self::Wide => carry(1000, 20, 4 << 20),
            Self::Poor => Carry { loss: 30, ..carry(4, 80, 256 << 10) },
            Self::Uneven => Carry { jitter: Duration::from_millis(30), ..carry(50, 40, 1 << 20) },
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Far => "100 Mbit/s, 200 ms",
            Self::Satellite => "10 Mbit/s, 600 ms",
            Self::Lossy => "20 Mbit/s, 40 ms, 1 % loss",
            Self::Wide => "1 Gbit/s, 20 ms",
            Self::Poor => "4 Mbit/s, 80 ms, 3 % loss",
            Self::Uneven => "50 Mbit/s, 40 ms, jitter 30 ms",
        }
    }
}

fn mbit(moved: &Transferred) -> f64 {
    moved.rate() * 8.0 / 1e6
}

/// Duration of one rate: long enough that the start of a transfer hardly matters.
const LONG: Duration = Duration::from_secs(12);
/// Duration on lines with random loss: plain TCP's slow start, of random length, hardly matters.
const LONG_WITH_LOSS: Duration = Duration::from_secs(30);
/// Duration in a quick run.
const QUICK: Duration = Duration::from_secs(6);
/// Time until an interactive session has moved to the interactive link, in addition to two RTTs. Before that its bytes
/// wait behind bulk, and the move takes an RTT. Both are part of the figure for the start of the downloads.
const FOUND: Duration = Duration::from_secs(3);
/// Time until four downloads are at the line's rate; TCP needs this long at 600 ms.
const COME_UP: Duration = Duration::from_secs(6);
/// Time until the line is empty after a measurement.
const SETTLE: Duration = Duration::from_secs(2);
