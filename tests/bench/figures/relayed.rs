//! A session with client and edge at different servers, against a session at one server.

use anyhow::Result;

use super::Bench;
use crate::echo::Echo;
use crate::load::Kind;
use crate::place::Place;
use crate::proxy::Proxy;
use crate::relay;
use crate::table::{Bound, Row, Table, median, short};
use crate::targets::Targets;
use crate::tunnel::Tunnel;

/// The rounds of one of the two.
#[derive(Debug, Default)]
struct Results {
    /// CPU seconds per GiB.
    cost: Vec<f64>,
    /// MiB per second.
    rate: Vec<f64>,
    /// Microseconds.
    echo: Vec<f64>,
}

impl Bench {
    /// Measures in turns; both routes lead to the same edge.
    pub(crate) fn relayed(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("relayed: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let near = Tunnel::configure(&place, &targets, binary)?;
        let far = near.peer(&place, &targets)?;
        let mut stand = near.reachable()?;
        // The cost of a session is the CPU time of all three processes, whichever server accepted it.
        stand.processes.push(far.server()?);
        let local = stand.ways.clone();
        let ways = [("local", local), ("relayed", far.ways())];
        let mut shown = [Results::default(), Results::default()];
        let relays = [relay::start(&place, &targets)?, relay::start_longer(&place, &targets)?];
        let mut bare = [Results::default(), Results::default()];
        for round in 0..self.rounds {
            for (relay, shown) in relays.iter().zip(&mut bare) {
                self.sample(relay, shown)?;
            }
            for ((name, way), shown) in ways.iter().zip(&mut shown) {
                stand.ways = way.clone();
                if round == 0 {
                    let took = stand.until_reachable(COME_UP)?;
                    eprintln!("{name}: reachable after {took:.2?}");
                }
                self.sample(&stand, shown)?;
            }
        }
        eprintln!("{shown:.2?}, bare relays {bare:.2?}");
        let ([local, relayed], [two, three]) = (shown, bare);
        Self::compare(
            table,
            "relayed session: CPU per GiB of servers and edge, download",
            "s",
            (relayed.cost, local.cost),
            (three.cost, two.cost),
            Some(Bound::Most(1.4, 1.3)),
        );
        Self::compare(
            table,
            "relayed session: rate of one download",
            "MiB/s",
            (relayed.rate, local.rate),
            (three.rate, two.rate),
            Some(Bound::Least(0.8, 0.9)),
        );
        Self::compare(
            table,
            "relayed session: echo of 64 bytes, idle, p50",
            "us",
            (relayed.echo, local.echo),
            (three.echo, two.echo),
            None,
        );
        Ok(())
    }

    fn sample(&self, proxy: &Proxy, shown: &mut Results) -> Result<()> {
        let (rate, cost) = self.one(proxy, Kind::Download, 1)?;
        let echo = Echo::tight(&proxy.ways.echo, self.time(2.0)).measure(None)?;
        shown.rate.push(rate);
        shown.cost.push(cost);
        shown.echo.push(echo.p50());
        Ok(())
    }

    fn compare(
        table: &mut Table,
        figure: &str,
        unit: &str,
        rounds: (Vec<f64>, Vec<f64>),
        bare: (Vec<f64>, Vec<f64>),
        bound: Option<Bound>,
    ) {
        let (relayed, local) = (median(rounds.0), median(rounds.1));
        let (three, two) = (median(bare.0), median(bare.1));
        table.add(Row {
            figure: format!("{figure}, against a local one's"),
            tunnel: format!("{} {unit}", short(relayed)),
            reference: format!("local {} {unit}", short(local)),
            others: format!("bare relay of three processes against two {}", short(three / two)),
            value: relayed / local,
            bound,
        });
    }
}

/// Maximum time until a server finds its peer's node.
const COME_UP: std::time::Duration = std::time::Duration::from_secs(10);
