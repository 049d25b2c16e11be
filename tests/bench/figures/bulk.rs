//! One and eight sessions at full speed: rate and CPU time of each proxy, measured in turns.

use std::collections::BTreeMap;

use anyhow::Result;

use super::{Bench, Setup, goal, only_with};
use crate::load::{Kind, Load};
use crate::proxy::Proxy;
use crate::table::{Bound, Row, Table, median, mib, short};

/// The rounds of one proxy: MiB per second, CPU seconds per GiB.
type Rounds = BTreeMap<&'static str, (Vec<f64>, Vec<f64>)>;

impl Bench {
    /// Measures both directions, with one session and eight.
    pub(crate) fn bulk(&self, table: &mut Table) -> Result<()> {
        let stand = self.stand()?;
        for (sessions, kind, word) in [
            (1, Kind::Download, "one download"),
            (1, Kind::Upload, "one upload"),
            (MANY, Kind::Download, "eight downloads"),
            (MANY, Kind::Upload, "eight uploads"),
        ] {
            let mut rounds = Rounds::new();
            for _ in 0..self.rounds {
                for proxy in stand.all() {
                    let (rate, cost) = self.one(proxy, kind, sessions)?;
                    let of = rounds.entry(proxy.name).or_default();
                    of.0.push(rate);
                    of.1.push(cost);
                }
            }
            for (name, (rates, costs)) in &rounds {
                eprintln!("{word} {name}: MiB/s {rates:.0?}, cpu-s/GiB {costs:.2?}");
            }
            Self::report_bulk(&stand, word, sessions, &rounds, table);
        }
        Ok(())
    }

    fn report_bulk(stand: &Setup, word: &str, sessions: usize, rounds: &Rounds, table: &mut Table) {
        let tunnel = stand.tunnel.as_ref();
        let rate = |name: &str| median(rounds.get(name).map(|of| of.0.clone()).unwrap_or_default());
        let cost = |name: &str| median(rounds.get(name).map(|of| of.1.clone()).unwrap_or_default());
        let rate_bound = if sessions == 1 {
            let ssh = rate("ssh -R") / rate("relay");
            Bound::Least(0.85, goal(ssh, 0.95))
        } else {
            Bound::Least(0.8, 0.9)
        };
        table.add(Row {
            figure: format!("bulk, {word}, rate against the relay's"),
            tunnel: format!("{} MiB/s", short(rate("tunnel"))),
            reference: format!("{} MiB/s", short(rate("relay"))),
            others: format!("ssh -R {} MiB/s", short(rate("ssh -R"))),
            value: rate("tunnel") / rate("relay"),
            bound: only_with(tunnel, rate_bound),
        });
        table.add(Row {
            figure: format!("CPU per GiB of both processes, {word}, against the relay's"),
            tunnel: format!("{} s", short(cost("tunnel"))),
            reference: format!("{} s", short(cost("relay"))),
            others: format!("ssh -R {} s", short(cost("ssh -R"))),
            value: cost("tunnel") / cost("relay"),
            bound: only_with(tunnel, Bound::Most(1.25, 1.15)),
        });
    }

    /// Runs this number of concurrent sessions once. Returns their total MiB per second, and the CPU seconds per GiB of
    /// all the proxy's processes.
    pub(crate) fn one(&self, proxy: &Proxy, kind: Kind, sessions: usize) -> Result<(f64, f64)> {
        let way = if kind == Kind::Upload { &proxy.ways.sink } else { &proxy.ways.source };
        let load = Load { way: way.clone(), kind, clients: sessions, time: Some(self.time(3.0)) };
        let before = proxy.cpu()?;
        let moved = load.measure(None)?;
        let spent = proxy.cpu()?.saturating_sub(before).as_secs_f64();
        Ok((moved.rate() / f64::from(1 << 20), spent / (mib(moved.bytes) / 1024.0)))
    }
}

/// Number of sessions that share a link.
const MANY: usize = 8;
