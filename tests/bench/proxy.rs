//! A proxy under comparison: its ways and its two processes.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::echo;
use crate::process::Process;
use crate::way::Ways;

/// A running proxy.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// What the table calls it.
    pub(crate) name: &'static str,
    /// How clients reach the targets through it.
    pub(crate) ways: Ways,
    /// The process at the clients' side, then the one at the targets'; none for straight ways.
    pub(crate) processes: Vec<Process>,
}

impl Proxy {
    /// CPU time of all its processes so far.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        self.processes.iter().map(Process::cpu).sum()
    }

    /// Resident bytes of each process.
    pub(crate) fn rss(&self) -> Result<Vec<u64>> {
        self.processes.iter().map(Process::rss).collect()
    }

    /// Resident bytes of the process at the targets' side.
    pub(crate) fn edge_rss(&self) -> Result<u64> {
        self.processes.last().context("a straight way has no process")?.rss()
    }

    /// Tries until an echo comes back, as tightly as the machine allows; answers how long that took.
    pub(crate) fn until_reachable(&mut self, patience: Duration) -> Result<Duration> {
        let since = Instant::now();
        loop {
            match echo::once(&self.ways.echo) {
                Ok(()) => return Ok(since.elapsed()),
                Err(why) if since.elapsed() > patience => {
                    return Err(why)
                        .with_context(|| format!("{} not reachable after {patience:?}", self.name));
                }
                Err(_) => thread::sleep(TIGHT),
            }
            anyhow::ensure!(
                self.processes.iter_mut().all(Process::alive),
                "a process of {} has ended; see its log",
                self.name
            );
        }
    }
}

/// Between two tries: well below what is measured.
const TIGHT: Duration = Duration::from_millis(2);
