//! The cost of resumable sessions in bulk transfers: the program against one that drops the bytes it has sent.

use anyhow::{Context, Result};

use super::Bench;
use crate::load::Kind;
use crate::place::Place;
use crate::proxy::Proxy;
use crate::table::{Bound, Row, Table, median, short};
use crate::targets::Targets;
use crate::tunnel::Tunnel;

impl Bench {
    /// Measures in pairs; the two programs alternate in running first.
    pub(crate) fn resume(&self, table: &mut Table) -> Result<()> {
        let (Some(binary), Some(against)) = (&self.binary, &self.against) else {
            eprintln!("resume: requires --against PROGRAM; run scripts/resume-cost.sh, which builds it");
            return Ok(());
        };
        let mut stands = Vec::new();
        for binary in [binary, against] {
            let dir = tempfile::tempdir_in(&self.dir)?.keep();
            let place = Place::loopback(&dir)?;
            let targets = Targets::start(None, place.edge_address)?;
            stands.push((Tunnel::configure(&place, &targets, binary)?.reachable()?, targets));
        }
        for (kind, word) in [(Kind::Download, "download"), (Kind::Upload, "upload")] {
            let (mut rates, mut costs, mut with) = (Vec::new(), Vec::new(), Vec::new());
            for pair in 0..PAIRS {
                let one = |which: usize| -> Result<(f64, f64)> {
                    let (proxy, _): &(Proxy, Targets) = stands.get(which).context("two programs")?;
                    self.one(proxy, kind, 1)
                };
                let ((rate, cost), (rate_without, cost_without)) = if pair % 2 == 0 {
                    let first = one(0)?;
                    (first, one(1)?)
                } else {
                    let first = one(1)?;
                    (one(0)?, first)
                };
                rates.push(rate / rate_without);
                costs.push(cost / cost_without);
                with.push((rate, cost));
            }
            eprintln!("{word}: rates {rates:.3?}, costs {costs:.3?}");
            let own = |pick: fn(&(f64, f64)) -> f64| short(median(with.iter().map(pick).collect()));
            Self::add_ratio(
                table,
                &format!("{word}: rate"),
                own(|one| one.0) + " MiB/s",
                rates,
                Bound::Least(0.95, 0.95),
            );
            Self::add_ratio(
                table,
                &format!("{word}: CPU per GiB"),
                own(|one| one.1) + " s",
                costs,
                Bound::Most(1.05, 1.05),
            );
        }
        Ok(())
    }

    /// Adds a row with the median of the pairs' ratios, and its confidence interval.
    fn add_ratio(table: &mut Table, what: &str, own: String, mut ratios: Vec<f64>, bound: Bound) {
        ratios.sort_by(f64::total_cmp);
        let at = |n: usize| short_ratio(ratios.get(n).copied().unwrap_or(f64::NAN));
        table.add(Row {
            figure: format!("one {what}, against a program that cannot resume, {PAIRS} pairs"),
            tunnel: own,
            reference: String::new(),
            others: format!(
                "the median lies between {} and {}, with 95 % certainty",
                at(SURE),
                at(PAIRS - 1 - SURE)
            ),
            value: median(ratios),
            bound: Some(bound),
        });
    }
}

fn short_ratio(ratio: f64) -> String {
    format!("{ratio:.3}")
}

/// Number of pairs of runs.
const PAIRS: usize = 20;
/// The median lies between the sixth smallest and the sixth largest of twenty values with 95 % certainty.
const SURE: usize = 5;
