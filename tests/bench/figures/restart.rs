//! Edge or server killed and restarted: time until an echo succeeds.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Bench;
use crate::table::{Bound, Row, Table, largest, median, short};

impl Bench {
    /// Measures both, each restarted at once, and after a pause of one second.
    pub(crate) fn restart(&self, table: &mut Table) -> Result<()> {
        let mut stand = self.stand()?;
        let Some(mut proxy) = stand.tunnel.take() else {
            eprintln!("restart: skipped, measures only the program");
            return Ok(());
        };
        let starts: [(&str, usize); 2] = [("edge", 1), ("server", 0)];
        for (what, which) in starts {
            // After a pause the backoff decides, which is necessary to avoid a storm of dials: reported without a
            // bound.
            for (absence, bound) in [(Duration::ZERO, Some(Bound::Most(0.5, 0.3))), (ABSENCE, None)] {
                let mut took = Vec::new();
                for _ in 0..self.rounds {
                    let process = proxy.processes.get_mut(which).context("two processes")?;
                    process.kill();
                    thread::sleep(absence);
                    let since = Instant::now();
                    process.start_again()?;
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

/// Long enough for some failed attempts of the other end.
const ABSENCE: Duration = Duration::from_secs(1);
/// Maximum time until the pair is reachable.
const TIMEOUT: Duration = Duration::from_secs(20);
