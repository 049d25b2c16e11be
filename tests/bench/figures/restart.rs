//! Edge or pod killed and started again: how long until an echo comes through.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Bench;
use crate::table::{Bound, Row, Table, largest, median, short};

impl Bench {
    /// Both, each started again at once, and after a second of absence.
    pub(crate) fn restart(&self, table: &mut Table) -> Result<()> {
        let mut stand = self.stand()?;
        let (Some(again), Some(mut proxy)) = (stand.again.take(), stand.tunnel.take()) else {
            eprintln!("restart: only the program itself is measured");
            return Ok(());
        };
        let starts: [(&str, usize); 2] = [("edge", 1), ("pod", 0)];
        for (what, which) in starts {
            // After an absence it is the backoff that decides, which is the price of not being a storm: told, not
            // judged.
            for (absence, bound) in [(Duration::ZERO, Some(Bound::Most(0.5, 0.3))), (ABSENCE, None)] {
                let mut took = Vec::new();
                for _ in 0..self.rounds {
                    let process = proxy.processes.get_mut(which).context("two processes")?;
                    process.kill();
                    thread::sleep(absence);
                    let since = Instant::now();
                    *process = if which == 0 { again.server()? } else { again.edge()? };
                    proxy.until_reachable(TIMEOUT)?;
                    took.push(since.elapsed().as_secs_f64());
                }
                eprintln!("{what}, started again after {absence:?}, s: {took:.3?}");
                let after = if absence.is_zero() { String::new() } else { format!(" after {absence:?}") };
                table.add(Row {
                    figure: format!("{what} killed and started again{after}: s until reachable, worst"),
                    tunnel: format!("{} s, median {} s", short(largest(&took)), short(median(took.clone()))),
                    reference: String::new(),
                    others: String::new(),
                    value: largest(&took),
                    bound,
                });
            }
        }
        Ok(())
    }
}

/// Long enough that the other end has tried in vain some times.
const ABSENCE: Duration = Duration::from_secs(1);
/// What is not reachable by now will not be.
const TIMEOUT: Duration = Duration::from_secs(20);
