//! A slow line: echoes in parallel with downloads, bulk, and ten idle minutes.

use std::time::Duration;

use anyhow::Result;

use super::{Bench, only_with};
use crate::echo::{Echo, Echoes};
use crate::line::Carry;
use crate::load::{Kind, Load};
use crate::proxy::Proxy;
use crate::table::{Bound, Row, Table, short};

/// The results of one proxy.
#[derive(Debug)]
struct Results {
    idle: Echoes,
    next_to_slow: Echoes,
    /// Rate of four downloads together, in Mbit/s.
    downloads: f64,
    /// Rate of one download alone, in Mbit/s.
    bulk: f64,
}

impl Bench {
    /// Measures echoes and bulk.
    pub(crate) fn slow(&self, table: &mut Table) -> Result<()> {
        let stand = self.over_line(LINE, "cubic", false)?.with_relay()?;
        let mut shown = Vec::new();
        for proxy in stand.proxies.iter().filter(|proxy| proxy.name != "direct") {
            let one = self.show(proxy, &stand.space)?;
            eprintln!(
                "{}: idle p50 {} p99 {} max {}; next to 4 downloads p50 {} p99 {} max {} (of {}), {} Mbit/s; one download {} Mbit/s",
                proxy.name,
                millis(one.idle.p50()),
                millis(one.idle.p99()),
                millis(one.idle.max()),
                millis(one.next_to_slow.p50()),
                millis(one.next_to_slow.p99()),
                millis(one.next_to_slow.max()),
                one.next_to_slow.nanos.len(),
                short(one.downloads),
                short(one.bulk),
            );
            shown.push((proxy.name, one));
        }
        let of = |name: &str, pick: &dyn Fn(&Results) -> f64| {
            shown.iter().find(|(of, _)| *of == name).map_or(f64::NAN, |(_, one)| pick(one))
        };
        let above = |one: &Results| (one.next_to_slow.p99() - one.idle.p99()) / 1000.0;
        let tested = stand.proxies.iter().find(|proxy| proxy.name == "tunnel");
        table.add(Row {
            figure: "20 Mbit/s, 40 ms: echo p99 next to 4 downloads, ms above idle".into(),
            tunnel: format!(
                "p50 {} ms, p99 {} ms, idle p99 {} ms",
                short(of("tunnel", &|one| one.next_to_slow.p50() / 1000.0)),
                short(of("tunnel", &|one| one.next_to_slow.p99() / 1000.0)),
                short(of("tunnel", &|one| one.idle.p99() / 1000.0))
            ),
            reference: format!("relay +{} ms", short(of("relay", &above))),
            others: String::new(),
            value: of("tunnel", &above),
            bound: only_with(tested, Bound::Most(25.0, 20.0)),
        });
        for (what, alone) in [("4 downloads", false), ("one download", true)] {
            let pick = &|one: &Results| if alone { one.bulk } else { one.downloads };
            table.add(Row {
                figure: format!("20 Mbit/s, 40 ms: {what}, share of the line"),
                tunnel: format!("{} Mbit/s", short(of("tunnel", pick))),
                reference: format!("relay {} Mbit/s", short(of("relay", pick))),
                others: String::new(),
                value: of("tunnel", pick) / LINE_MBIT,
                bound: only_with(tested, Bound::Least(0.9, 0.9)),
            });
        }
        Ok(())
    }

    fn show(&self, proxy: &Proxy, space: &str) -> Result<Results> {
        let echo = Echo {
            clients: 4,
            pause: Some(Duration::from_millis(5)),
            ..Echo::tight(&proxy.ways.echo, self.time(20.0))
        };
        let load =
            |clients, time| Load { way: proxy.ways.source.clone(), kind: Kind::Download, clients, time };
        let idle = Echo { clients: 1, ..echo.clone() }.measure(Some(space))?;
        let mut four = load(4, None).start(Some(space))?;
        let next_to_slow = echo.measure(Some(space))?;
        four.dismiss();
        let downloads = four.read_output::<crate::load::Transferred>()?;
        drop(four);
        // Wait until the line and the kernel's buffers are empty, before one download runs alone.
        std::thread::sleep(Duration::from_secs(2));
        let bulk = load(1, Some(self.time(20.0))).measure(Some(space))?;
        Ok(Results {
            idle,
            next_to_slow,
            downloads: downloads.rate() * 8.0 / 1e6,
            bulk: bulk.rate() * 8.0 / 1e6,
        })
    }

    /// Measures echoes for ten minutes. The direct route in parallel shows the machine's own effects.
    pub(crate) fn idle_line(&self, table: &mut Table) -> Result<()> {
        let stand = self.over_line(LINE, "cubic", false)?.with_relay()?;
        let mut watched = Vec::new();
        for proxy in &stand.proxies {
            let way = &proxy.ways.echo;
            let first = Echo::tight(way, Duration::from_secs(2)).measure(Some(&stand.space))?;
            let limit = Duration::from_secs_f64(first.p50() / 1e6) + STALL;
            let echo = Echo {
                pause: Some(Duration::from_millis(20)),
                report_above: Some(limit),
                ..Echo::tight(way, self.idle)
            };
            watched.push((proxy.name, first.p50(), echo));
        }
        let mut running = Vec::new();
        for (name, idle, echo) in watched {
            running.push((name, idle, echo.start(Some(&stand.space))?));
        }
        for (name, idle, mut process) in running {
            let found: Echoes = process.read_output()?;
            for (at, took) in &found.long {
                eprintln!("{name}: {took:?} at {at:.3}");
            }
            let bound = Bound::Most(STALL.as_secs_f64() * 1000.0, STALL.as_secs_f64() * 1000.0);
            table.add(Row {
                figure: format!(
                    "{name}: {:?} idle at 20 Mbit/s, 40 ms: longest echo, ms above idle p50",
                    self.idle
                ),
                tunnel: format!(
                    "{} ms of {} echoes, {} stalls",
                    millis(found.max()),
                    found.nanos.len(),
                    found.long.len()
                ),
                reference: format!("idle p50 {}", millis(idle)),
                others: String::new(),
                value: (found.max() - idle) / 1000.0,
                bound: (name == "tunnel").then_some(bound),
            });
        }
        Ok(())
    }
}

pub(crate) fn millis(micros: f64) -> String {
    short(micros / 1000.0)
}

/// The line of the requirement.
const LINE: Carry = Carry {
    rate: 20_000_000,
    delay: Duration::from_millis(20),
    queue: 256 * 1024,
    loss: 0,
    jitter: Duration::ZERO,
};
/// The same rate, in Mbit/s.
const LINE_MBIT: f64 = 20.0;
/// An echo this much above idle is a stall.
const STALL: Duration = Duration::from_millis(100);
