//! Echoes of an interactive session: alone, and in parallel with downloads, paced readers or stalled readers.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::{Bench, Setup, goal, only_with};
use crate::echo::{Echo, Echoes};
use crate::load::{Kind, Load, Transferred};
use crate::proxy::Proxy;
use crate::table::{Bound, Row, Table, median, mib, short};

/// The rounds of one proxy: medians and 99th percentiles, in microseconds.
type Rounds = BTreeMap<&'static str, (Vec<f64>, Vec<f64>)>;

impl Bench {
    /// Measures echoes alone.
    pub(crate) fn echo(&self, table: &mut Table) -> Result<()> {
        let stand = self.stand()?;
        let mut rounds = Rounds::new();
        for _ in 0..self.rounds {
            let ways = stand.targets.straight();
            let straight = Proxy { name: "direct", ways, processes: Vec::new(), port: None };
            for proxy in stand.all().into_iter().chain([&straight]) {
                let found = Echo::tight(&proxy.ways.echo, self.time(2.0)).measure(None)?;
                note(&mut rounds, proxy, &found);
            }
        }
        report("echo", &rounds);
        table.add(Row {
            figure: "echo of 64 bytes, idle, p50 against the relay's".into(),
            tunnel: micros(at(&rounds, "tunnel").0),
            reference: micros(at(&rounds, "relay").0),
            others: format!(
                "ssh -R {}, direct {}",
                micros(at(&rounds, "ssh -R").0),
                micros(at(&rounds, "direct").0)
            ),
            value: at(&rounds, "tunnel").0 / at(&rounds, "relay").0,
            bound: only_with(stand.tunnel.as_ref(), Bound::Most(2.0, 1.5)),
        });
        Ok(())
    }

    /// Measures echoes in parallel with four downloads.
    pub(crate) fn loaded(&self, table: &mut Table) -> Result<()> {
        let rounds =
            self.measure_next_to("4 bulk downloads", Kind::Download, Bound::Most(1.5, 1.0), table)?;
        let (own, ssh) = (at(&rounds, "tunnel").1, at(&rounds, "ssh -R").1);
        table.add(Row {
            figure: "echo next to 4 bulk downloads, p99 in ms".into(),
            tunnel: micros(own),
            reference: String::new(),
            others: format!("ssh -R {}", micros(ssh)),
            value: own / 1000.0,
            bound: (!own.is_nan()).then_some(Bound::Most(4.0, goal(ssh / 1000.0, 4.0))),
        });
        Ok(())
    }

    /// Measures echoes in parallel with four readers at 2 MiB/s.
    pub(crate) fn paced(&self, table: &mut Table) -> Result<()> {
        self.measure_next_to("4 readers of 2 MiB/s", Kind::Paced(2 << 20), Bound::Most(2.0, 1.5), table)
            .map(drop)
    }

    fn measure_next_to(&self, what: &str, kind: Kind, bound: Bound, table: &mut Table) -> Result<Rounds> {
        let stand = self.stand()?;
        let mut rounds = Rounds::new();
        let mut rates: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for _ in 0..self.rounds {
            for proxy in stand.all() {
                let (found, moved) = self.echoes_next_to(proxy, kind)?;
                note(&mut rounds, proxy, &found);
                rates.entry(proxy.name).or_default().push(moved.rate() / f64::from(1 << 20));
            }
        }
        report(what, &rounds);
        eprintln!("meanwhile MiB/s: {rates:.0?}");
        for (word, pick) in [("p50", 0), ("p99", 1)] {
            let of = |name: &str| <[f64; 2]>::from(at(&rounds, name)).get(pick).copied().unwrap_or(f64::NAN);
            let rate = |name: &str| short(median(rates.get(name).cloned().unwrap_or_default()));
            table.add(Row {
                figure: format!("echo next to {what}, {word} against the relay's"),
                tunnel: format!("{} at {} MiB/s", micros(of("tunnel")), rate("tunnel")),
                reference: format!("{} at {} MiB/s", micros(of("relay")), rate("relay")),
                others: format!("ssh -R {} at {} MiB/s", micros(of("ssh -R")), rate("ssh -R")),
                value: of("tunnel") / of("relay"),
                bound: only_with(stand.tunnel.as_ref(), bound),
            });
        }
        Ok(rounds)
    }

    /// Measures echoes in parallel with four sessions of this kind.
    pub(super) fn echoes_next_to(&self, proxy: &Proxy, kind: Kind) -> Result<(Echoes, Transferred)> {
        let load = Load { way: proxy.ways.source.clone(), kind, clients: 4, time: None };
        let mut load = load.start(None)?;
        let echo = self.seldom(proxy, 4.0).measure(None)?;
        load.dismiss();
        Ok((echo, load.read_output()?))
    }

    /// Returns echoes with pauses, as a person types, so that they cause no load themselves.
    pub(super) fn seldom(&self, proxy: &Proxy, seconds: f64) -> Echo {
        Echo { pause: Some(PAUSE), ..Echo::tight(&proxy.ways.echo, self.time(seconds)) }
    }

    /// Measures echoes in parallel with twenty stalled readers, against idle echoes, and the memory of each reader.
    pub(crate) fn stalled(&self, table: &mut Table) -> Result<()> {
        let stand = self.stand()?;
        for proxy in stand.all() {
            self.stalled_one(&stand, proxy, table)?;
        }
        Ok(())
    }

    fn stalled_one(&self, stand: &Setup, proxy: &Proxy, table: &mut Table) -> Result<()> {
        let mut idle = Rounds::new();
        let mut next_to = Rounds::new();
        let mut growth = Vec::new();
        for _ in 0..self.rounds {
            let alone = self.seldom(proxy, 2.0).measure(None)?;
            note(&mut idle, proxy, &alone);
            let before = proxy.memory()?;
            let way = proxy.ways.source.clone();
            let load = Load { way, kind: Kind::Stalled, clients: STALLED, time: None }.start(None)?;
            // Wait for the burst that fills all buffers.
            thread::sleep(SETTLED);
            let found = self.seldom(proxy, 2.0).measure(None)?;
            note(&mut next_to, proxy, &found);
            let after = proxy.memory()?;
            growth.push(after.iter().zip(&before).map(|(a, b)| a.saturating_sub(*b)).collect::<Vec<_>>());
            load.finish()?;
        }
        let kib: Vec<f64> = (0..2)
            .map(|which| {
                let most = growth.iter().filter_map(|both| both.get(which)).max().copied().unwrap_or(0);
                mib(most) * 1024.0 / f64::from(u32::try_from(STALLED).unwrap_or(u32::MAX))
            })
            .collect();
        eprintln!("{}: KiB for each stalled reader, most of all rounds: {kib:.0?}", proxy.name);
        let tested = stand.tunnel.as_ref().filter(|tunnel| tunnel.name == proxy.name);
        for (word, pick, bound) in [("p50", 0, Bound::Most(1.2, 1.0)), ("p99", 1, Bound::Most(1.5, 1.0))] {
            let of = |rounds: &Rounds| {
                <[f64; 2]>::from(at(rounds, proxy.name)).get(pick).copied().unwrap_or(f64::NAN)
            };
            table.add(Row {
                figure: format!(
                    "{}: echo next to {STALLED} stalled readers, {word} against idle",
                    proxy.name
                ),
                tunnel: micros(of(&next_to)),
                reference: format!("idle {}", micros(of(&idle))),
                others: String::new(),
                value: of(&next_to) / of(&idle),
                bound: only_with(tested, bound),
            });
        }
        table.add(Row {
            figure: format!("{}: KiB more for each stalled reader, both processes", proxy.name),
            tunnel: format!(
                "{} + {} KiB",
                short(kib.first().copied().unwrap_or(0.0)),
                short(kib.last().copied().unwrap_or(0.0))
            ),
            reference: "one window".into(),
            others: String::new(),
            value: kib.iter().sum(),
            bound: only_with(tested, Bound::Most(512.0, 512.0)),
        });
        Ok(())
    }
}

fn note(rounds: &mut Rounds, proxy: &Proxy, found: &Echoes) {
    let of = rounds.entry(proxy.name).or_default();
    of.0.push(found.p50());
    of.1.push(found.p99());
}

fn at(rounds: &Rounds, name: &str) -> (f64, f64) {
    let (p50, p99) = rounds.get(name).cloned().unwrap_or_default();
    (median(p50), median(p99))
}

fn report(what: &str, rounds: &Rounds) {
    for (name, (p50, p99)) in rounds {
        eprintln!("{what}, {name}: p50 {p50:.0?} us, p99 {p99:.0?} us");
    }
}

/// Formats a time as microseconds, or as milliseconds if that is easier to read.
pub(crate) fn micros(value: f64) -> String {
    match value {
        value if value.is_nan() => "-".to_owned(),
        value if value >= 1000.0 => format!("{} ms", short(value / 1000.0)),
        value => format!("{value:.0} us"),
    }
}

/// Pause between two echoes.
const PAUSE: Duration = Duration::from_millis(1);
/// Number of stalled readers.
const STALLED: usize = 20;
/// Time until stalled readers receive nothing more.
pub(super) const SETTLED: Duration = Duration::from_secs(1);
