//! The resources of a process: memory, descriptors, threads, and its own metrics.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::Process;
use crate::table::mib;

/// One sample of one process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessSample {
    /// Private bytes.
    pub(crate) memory: u64,
    /// Number of open descriptors.
    pub(crate) descriptors: usize,
    /// Number of threads.
    pub(crate) threads: usize,
    /// Values from `/metrics`, by series.
    pub(crate) counts: BTreeMap<String, f64>,
}

impl ProcessSample {
    /// Samples a process and its metrics.
    pub(crate) fn of(process: &Process, admin: SocketAddr) -> Result<Self> {
        let entries = |what: &str| {
            Ok::<_, anyhow::Error>(fs::read_dir(format!("/proc/{}/{what}", process.id()))?.count())
        };
        Ok(Self {
            memory: process.memory()?,
            descriptors: entries("fd")?,
            threads: entries("task")?,
            counts: metrics(admin)?,
        })
    }

    /// Returns the sum of all series of a metric.
    pub(crate) fn count(&self, metric: &str) -> f64 {
        let is = |series: &str| {
            series.strip_prefix(metric).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        self.counts.iter().filter(|(series, _)| is(series)).map(|(_, value)| value).sum()
    }

    #[expect(clippy::cast_precision_loss, reason = "no process has 2^52 descriptors")]
    /// Returns the resources that should have been freed while the process is idle; empty if there are none.
    pub(crate) fn excess(&self, before: &Self) -> Vec<String> {
        let mut excess = Vec::new();
        let (now, then) = (mib(self.memory), mib(before.memory));
        if now > (then * MEMORY_FACTOR).max(then + MEMORY_MORE) {
            excess.push(format!("{now:.1} MiB of memory, before {then:.1} MiB"));
        }
        // Each link is a connection, and links move between processes.
        let links = (self.links() - before.links()).max(0.0);
        let descriptors = self.descriptors as f64;
        if descriptors > before.descriptors as f64 + links + 2.0 {
            excess.push(format!(
                "{descriptors} descriptors, before {}; {links} more links",
                before.descriptors
            ));
        }
        let (now, then) = (self.count(TASKS), before.count(TASKS));
        if now > then + links * TASKS_OF_A_LINK + 2.0 {
            excess.push(format!("{now} tasks, before {then}; {links} more links"));
        }
        // Threads that read files live for 10 s, and a process watches about that many files.
        if self.threads > before.threads + 6 {
            excess.push(format!("threads {}, before {}", self.threads, before.threads));
        }
        for metric in EMPTY {
            if self.count(metric) > 0.0 {
                excess.push(format!("{metric} {}", self.count(metric)));
            }
        }
        excess
    }

    /// Returns the number of open links.
    pub(crate) fn links(&self) -> f64 {
        self.count("tunnel_links_open")
    }
}

/// Returns a process's metrics, by series.
pub(crate) fn metrics(admin: SocketAddr) -> Result<BTreeMap<String, f64>> {
    let mut stream = TcpStream::connect_timeout(&admin, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page).context("no metrics")?;
    let value = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        Some((series.to_owned(), value.parse().ok()?))
    };
    Ok(page.lines().filter(|line| line.starts_with("tunnel_")).filter_map(value).collect())
}

/// Gauges that are zero once all sessions have ended.
const EMPTY: [&str; 3] = ["tunnel_sessions_open", "tunnel_sessions_relayed", "tunnel_buffer_bytes"];
/// A process that has worked for long keeps more free memory than one that has worked for seconds.
const MEMORY_FACTOR: f64 = 1.5;
/// The same, in MiB, for a small process.
const MEMORY_MORE: f64 = 16.0;
/// The gauge of tasks.
pub(crate) const TASKS: &str = "tunnel_tokio_tasks";
/// Tasks that serve a link's connection and its call, and that supervise them.
const TASKS_OF_A_LINK: f64 = 4.0;
/// A stopped process sends no metrics.
const TIMEOUT: Duration = Duration::from_secs(2);
