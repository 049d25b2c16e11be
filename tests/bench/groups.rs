//! Limits of memory and CPU time, as Kubernetes sets them for a container: control groups (version 1).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Two control groups for the processes of one container. The processes must have ended before this is dropped.
#[derive(Debug)]
pub(crate) struct Groups {
    memory: PathBuf,
    cpu: PathBuf,
}

/// Statistics of the processes under their limits.
#[derive(Debug)]
pub(crate) struct LimitStats {
    /// Maximum memory in use at one time, in bytes.
    pub(crate) most: u64,
    /// Number of times that they reached the memory limit, before the kernel reclaimed memory.
    pub(crate) hits: u64,
    /// Number of processes killed for it.
    pub(crate) kills: u64,
    /// Total time that they were throttled by the CPU limit.
    pub(crate) held_back: Duration,
}

impl Groups {
    /// Creates the groups with a limit of memory in bytes and of CPU in thousandths of a core.
    pub(crate) fn make(name: &str, bytes: u64, millicores: u64) -> Result<Self> {
        let of = |kind: &str| {
            let path = Path::new(GROUPS).join(kind).join(format!("bench{}-{name}", std::process::id()));
            fs::create_dir(&path).with_context(|| {
                format!("cannot create {}: requires root and control groups of version 1", path.display())
            })?;
            Ok::<_, anyhow::Error>(path)
        };
        let groups = Self { memory: of("memory")?, cpu: of("cpu")? };
        fs::write(groups.memory.join("memory.limit_in_bytes"), bytes.to_string())?;
        fs::write(groups.cpu.join("cpu.cfs_period_us"), PERIOD_MICROS.to_string())?;
        let quota = millicores * PERIOD_MICROS / 1000;
        fs::write(groups.cpu.join("cpu.cfs_quota_us"), quota.to_string())?;
        Ok(groups)
    }

    /// Returns the files to which a process writes its id to join the groups.
    pub(crate) fn limiters(&self) -> Vec<PathBuf> {
        [&self.memory, &self.cpu].map(|group| group.join("cgroup.procs")).to_vec()
    }

    /// Returns the statistics so far.
    pub(crate) fn seen(&self) -> Result<LimitStats> {
        let memory = |file: &str| read(&self.memory.join(file));
        let kills = field(&memory("memory.oom_control")?, "oom_kill")?;
        let held_back = field(&read(&self.cpu.join("cpu.stat"))?, "throttled_time")?;
        Ok(LimitStats {
            most: memory("memory.max_usage_in_bytes")?.trim().parse()?,
            hits: memory("memory.failcnt")?.trim().parse()?,
            kills,
            held_back: Duration::from_nanos(held_back),
        })
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for group in [&self.memory, &self.cpu] {
            if let Err(why) = fs::remove_dir(group) {
                eprintln!("cannot remove {}: {why}", group.display());
            }
        }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the number after a word.
fn field(text: &str, name: &str) -> Result<u64> {
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found: Vec<_> = words.filter(|words| words.first() == Some(&name)).collect();
    ensure!(found.len() == 1, "no {name} in {text:?}");
    Ok(found.first().and_then(|words| words.get(1)).context("no number")?.parse()?)
}

const GROUPS: &str = "/sys/fs/cgroup";
/// The period that Kubernetes uses.
const PERIOD_MICROS: u64 = 100_000;
