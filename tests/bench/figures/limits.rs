//! Server and edge under the limits of a small node: a bulk copy in parallel with twenty sessions, over a long line.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::Bench;
use super::slow::millis;
use crate::echo::{Echo, Echoes};
use crate::groups::{Groups, LimitStats};
use crate::line::Carry;
use crate::load::{Kind, Load, Transferred};
use crate::process::Process;
use crate::table::{Bound, Row, Table, mib, short};

impl Bench {
    /// Measures each direction once.
    pub(crate) fn limits(&self, table: &mut Table) -> Result<()> {
        for (what, kind) in [("download", Kind::Download), ("upload", Kind::Upload)] {
            let groups = [Groups::make("server", 100 << 20, 50)?, Groups::make("edge", 20 << 20, 20)?];
            // Dropped before the control groups, which contain its processes.
            let mut stand =
                self.over_line_within(LINE, "cubic", false, groups.each_ref().map(Groups::limiters))?;
            let mut rates = Vec::new();
            let mut echoes = Echoes::default();
            for proxy in &stand.proxies {
                let echo = Echo {
                    clients: SESSIONS,
                    pause: Some(Duration::from_millis(500)),
                    ..Echo::tight(&proxy.ways.echo, self.time(60.0))
                };
                let way = if kind == Kind::Download { &proxy.ways.source } else { &proxy.ways.sink };
                let load = Load { way: way.clone(), kind, clients: 1, time: Some(self.time(40.0)) };
                // Waits until the proxy is up, which takes seconds under such limits.
                Echo::tight(&proxy.ways.echo, Duration::from_secs(1)).measure(Some(&stand.space))?;
                let mut running_echo = echo.start(Some(&stand.space))?;
                let moved: Transferred = load.measure(Some(&stand.space))?;
                rates.push((proxy.name, moved.rate() * 8.0 / 1e6));
                let found = running_echo.read_output()?;
                if proxy.name == "tunnel" {
                    echoes = found;
                }
            }
            let Some(tunnel) = stand.proxies.first_mut().filter(|proxy| proxy.name == "tunnel") else {
                continue;
            };
            ensure!(tunnel.processes.iter_mut().all(Process::alive), "a process has ended under its limits");
            let [server, edge] = &groups;
            let (server, edge) = (server.seen()?, edge.seen()?);
            let rate =
                |name: &str| rates.iter().find(|(of, _)| *of == name).map_or(f64::NAN, |(_, rate)| *rate);
            #[expect(clippy::cast_precision_loss, reason = "a few processes")]
            let kills = (server.kills + edge.kills) as f64;
            table.add(Row {
                figure: format!(
                    "edge 20m/20Mi, server 50m/100Mi, 100 Mbit/s and 200 ms: one {what} beside {SESSIONS} sessions; \
                     killed"
                ),
                tunnel: format!(
                    "{} Mbit/s; echoes p50 {} ms, max {} ms; {}; {}",
                    short(rate("tunnel")),
                    millis(echoes.p50()),
                    millis(echoes.max()),
                    describe("edge", &edge),
                    describe("server", &server),
                ),
                reference: format!("direct {} Mbit/s", short(rate("direct"))),
                others: String::new(),
                value: kills,
                bound: Some(Bound::Most(0.0, 0.0)),
            });
            drop(stand);
        }
        Ok(())
    }
}

fn describe(process: &str, seen: &LimitStats) -> String {
    let LimitStats { most, hits, held_back, .. } = seen;
    format!(
        "{process} {} MiB at most, at its limit {hits} times, held back {held_back:.1?}",
        short(mib(*most))
    )
}

/// Sessions in parallel with the copy.
const SESSIONS: usize = 20;

/// The line of the requirement, both ways.
const LINE: Carry = Carry {
    rate: 100_000_000,
    delay: Duration::from_millis(100),
    queue: 2_500_000,
    loss: 0,
    jitter: Duration::ZERO,
};
