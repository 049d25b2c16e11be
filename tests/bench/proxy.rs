//! A proxy under comparison: its routes and its two processes.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::echo;
use crate::process::Process;
use crate::way::Ways;

/// A running proxy.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// The name in the table.
    pub(crate) name: &'static str,
    /// Routes of clients to the targets through the proxy.
    pub(crate) ways: Ways,
    /// The process on the clients' side, then the one on the targets' side; empty for direct routes.
    pub(crate) processes: Vec<Process>,
    /// The port that the targets' side dials, if it dials one.
    pub(crate) port: Option<u16>,
}

impl Proxy {
    /// Returns the CPU time of all its processes so far.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        self.processes.iter().map(Process::cpu).sum()
    }

    /// Returns the private bytes of each process.
    pub(crate) fn memory(&self) -> Result<Vec<u64>> {
        self.processes.iter().map(Process::memory).collect()
    }

    /// Returns the private bytes of the process on the targets' side.
    pub(crate) fn edge_memory(&self) -> Result<u64> {
        self.processes.last().context("a direct route has no process")?.memory()
    }

    /// Starts all its processes again and waits for an echo.
    pub(crate) fn restart(&mut self) -> Result<()> {
        for process in &mut self.processes {
            process.start_again()?;
            // Not every client retries if the server does not listen yet.
            thread::sleep(Duration::from_secs(1));
        }
        self.until_reachable(Duration::from_secs(10)).map(drop)
    }

    /// Retries without delay until an echo returns. Returns how long that took.
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

/// Pause between two attempts: well below the measured times.
const TIGHT: Duration = Duration::from_millis(2);
