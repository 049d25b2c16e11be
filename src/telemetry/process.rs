//! What the kernel and the runtime say about this process, read when somebody asks.

use std::fmt;
use std::fs;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// Memory, processor time and open files of this process, from `/proc/self`, and its tasks, at each scrape.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        if let Some(bytes) = resident_bytes().and_then(|b| i64::try_from(b).ok()) {
            let help = "Memory of this process that is in RAM";
            let at = encoder.encode_descriptor(
                "process_resident_memory",
                help,
                Some(&Unit::Bytes),
                MetricType::Gauge,
            )?;
            ConstGauge::new(bytes).encode(at)?;
        }
        if let Some(time) = cpu_time() {
            let help = "Processor time used, user and system together";
            let at =
                encoder.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?;
            ConstCounter::new(time.as_secs_f64()).encode(at)?;
        }
        if let Some(files) = open_files().and_then(|n| i64::try_from(n).ok()) {
            let help = "Open file descriptors";
            let at = encoder.encode_descriptor("process_open_fds", help, None, MetricType::Gauge)?;
            ConstGauge::new(files).encode(at)?;
        }
        if let Some(tasks) = tasks() {
            let at = encoder.encode_descriptor("tunnel_tasks", "Tasks alive now", None, MetricType::Gauge)?;
            ConstGauge::new(tasks).encode(at)?;
        }
        Ok(())
    }
}

/// A third of the memory that this process may use, at most `most` bytes.
pub fn third_of_memory(most: usize) -> usize {
    let third = memory_limit().and_then(|limit| usize::try_from(limit / 3).ok());
    third.map_or(most, |third| third.min(most))
}

/// How much memory this process may use, in bytes: the smallest limit of its cgroups (v2 and v1), if there is one.
fn memory_limit() -> Option<u64> {
    let paths = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = paths.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok());
    limits.filter(|limit| *limit < NO_LIMIT).min()
}

fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn cpu_time() -> Option<Duration> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name, in parentheses, and may hold spaces and parentheses itself.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(FIELDS_BEFORE_UTIME);
    let user: u64 = times.next()?.parse().ok()?;
    let system: u64 = times.next()?.parse().ok()?;
    Some(Duration::from_millis(user.checked_add(system)?.checked_mul(TICK_MILLIS)?))
}

fn open_files() -> Option<usize> {
    // The directory's own descriptor is open while it is read.
    fs::read_dir("/proc/self/fd").ok().map(|dir| dir.count().saturating_sub(1))
}

/// None outside a runtime.
fn tasks() -> Option<i64> {
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    i64::try_from(runtime.metrics().num_alive_tasks()).ok()
}

/// cgroup v1 writes a number near the largest for "none".
const NO_LIMIT: u64 = 1 << 60;
/// Fields between the program's name and `utime`; proc(5): state is field 3, utime 14, stime 15.
const FIELDS_BEFORE_UTIME: usize = 11;

/// Linux shows times to programs in hundredths of a second (USER_HZ), on every architecture we build for.
const TICK_MILLIS: u64 = 10;

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[test]
    fn the_kernel_tells_memory_time_and_files() {
        assert!(resident_bytes().unwrap() > 500_000);
        assert!(cpu_time().unwrap() < Duration::from_secs(3600));
        let before = open_files().unwrap();
        let _held: Vec<_> = (0..50).map(|_| fs::File::open("/proc/self/status").unwrap()).collect();
        assert!(open_files().unwrap() >= before.max(50));
    }

    #[tokio::test]
    async fn tasks_count_as_long_as_they_live() {
        let (before, mut set) = (tasks().unwrap(), JoinSet::new());
        for _ in 0..7 {
            set.spawn(std::future::pending::<()>());
        }
        assert_eq!(tasks().unwrap(), before + 7);
        set.shutdown().await;
        assert_eq!(tasks().unwrap(), before);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = cpu_time().unwrap();
        let mut sum = 0u64;
        while cpu_time().unwrap() < before + Duration::from_millis(20) {
            sum = (0..1_000_000).fold(sum, |a, b| std::hint::black_box(a ^ b));
        }
    }
}
