//! Metrics of this process, read from the kernel and the runtime at each scrape.

use std::time::Duration;
use std::{fmt, fs};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::logging::dropped_lines;

/// A collector for memory, CPU time, start time, open files and their limit, and tasks of this process.
#[derive(Debug)]
pub(crate) struct ProcessCollector;

impl Collector for ProcessCollector {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let bytes = Some(&Unit::Bytes);
        let seconds = Some(&Unit::Seconds);
        let memory = resident_bytes().map(ConstGauge::new);
        encode(&mut to, "process_resident_memory", "Resident memory size", bytes, memory)?;
        let cpu = cpu_time().map(|used| ConstCounter::new(used.as_secs_f64()));
        encode(&mut to, "process_cpu", "Total user and system CPU time spent", seconds, cpu)?;
        let start = start_time().map(ConstGauge::new);
        let help = "Start time of the process since the Unix epoch";
        encode(&mut to, "process_start_time", help, seconds, start)?;
        let most = getrlimit(Resource::Nofile)
            .current
            .and_then(|most| i64::try_from(most).ok())
            .map(ConstGauge::new);
        encode(&mut to, "process_max_fds", "Maximum number of open file descriptors", None, most)?;
        let dropped = Some(ConstCounter::new(dropped_lines::count()));
        let help = "Total number of log lines dropped because a write failed or the queue was full";
        encode(&mut to, "tunnel_log_lines_dropped", help, None, dropped)?;
        let files = open_files().map(ConstGauge::new);
        encode(&mut to, "process_open_fds", "Number of open file descriptors", None, files)?;
        let tasks = tasks().map(ConstGauge::new);
        encode(&mut to, "tunnel_tokio_tasks", "Number of live tasks of the Tokio runtime", None, tasks)
    }
}

/// Encodes a metric, unless its value is unknown.
fn encode(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: Option<impl EncodeMetric>,
) -> fmt::Result {
    let Some(value) = value else { return Ok(()) };
    value.encode(to.encode_descriptor(name, help, unit, value.metric_type())?)
}

/// Returns a field of `/proc/self/stat` by its number in proc(5). Field 2, a name in parentheses, may contain blanks.
fn stat(field: usize) -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, from_3) = stat.rsplit_once(')')?;
    from_3.split_whitespace().nth(field - 3)?.parse().ok()
}

fn resident_bytes() -> Option<i64> {
    i64::try_from(stat(24)? * u64::try_from(page_size()).ok()?).ok()
}

/// Returns the user and system CPU time.
fn cpu_time() -> Option<Duration> {
    clock_gettime(ClockId::ProcessCPUTime).try_into().ok()
}

/// Returns the start time in seconds since 1970. The kernel reports it in ticks since boot.
fn start_time() -> Option<f64> {
    let kernel = fs::read_to_string("/proc/stat").ok()?;
    let boot: u64 = kernel.lines().find_map(|line| line.strip_prefix("btime "))?.parse().ok()?;
    Some(boot as f64 + stat(22)? as f64 / clock_ticks_per_second() as f64)
}

/// Counts open files.
fn open_files() -> Option<i64> {
    // The directory's own descriptor is open during the read.
    let files = fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
    i64::try_from(files).ok()
}

/// Returns the number of the runtime's tasks, or `None` outside of a runtime.
fn tasks() -> Option<i64> {
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    i64::try_from(runtime.metrics().num_alive_tasks()).ok()
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[test]
    fn memory_cpu_time_and_open_files_are_read_from_the_kernel() {
        assert!(resident_bytes().unwrap() > 500_000);
        assert!(cpu_time().unwrap() < Duration::from_secs(3600));
        let before = open_files().unwrap();
        let _held: Vec<_> = (0..50).map(|_| fs::File::open("/proc/self/status").unwrap()).collect();
        assert!(open_files().unwrap() >= before.max(50));
    }

    #[tokio::test]
    async fn tasks_are_counted_while_they_live() {
        let (before, mut set) = (tasks().unwrap(), JoinSet::new());
        for _ in 0..7 {
            set.spawn(std::future::pending::<()>());
        }
        assert_eq!(tasks().unwrap(), before + 7);
        set.shutdown().await;
        assert_eq!(tasks().unwrap(), before);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let used = || cpu_time().unwrap();
        let before = used();
        let mut sum = 0u64;
        while used() < before + Duration::from_millis(20) {
            sum = (0..1_000_000).fold(sum, |a, b| std::hint::black_box(a ^ b));
        }
    }
}
