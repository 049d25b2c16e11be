//! Limits of memory and processor time as Kubernetes sets them for a container: control groups (version 1).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Two groups for the processes of one container; they must have ended before this is dropped.
#[derive(Debug)]
pub(crate) struct Groups {
    memory: PathBuf,
    cpu: PathBuf,
}

/// What became of the processes under their limits.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The most memory that they had at once, in bytes.
    pub(crate) most: u64,
    /// How often they wanted more than their limit, before the kernel made room.
    pub(crate) hits: u64,
    /// How many were killed for it.
    pub(crate) kills: u64,
    /// For how long they were held back for the processor time that they had used.
    pub(crate) held_back: Duration,
}

impl Groups {
    /// Makes them: so many bytes, and so many thousandths of a core.
    pub(crate) fn make(name: &str, bytes: u64, millicores: u64) -> Result<Self> {
        let of = |kind: &str| {
            let path = Path::new(GROUPS).join(kind).join(format!("bench{}-{name}", std::process::id()));
            fs::create_dir(&path).with_context(|| {
                format!(
                    "cannot make {}: this figure wants root and control groups of version 1",
                    path.display()
                )
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

    /// The files into which a process that is to be limited writes its number.
    pub(crate) fn limiters(&self) -> Vec<PathBuf> {
        [&self.memory, &self.cpu].map(|group| group.join("cgroup.procs")).to_vec()
    }

    /// What has become of them so far.
    pub(crate) fn seen(&self) -> Result<Seen> {
        let memory = |file: &str| read(&self.memory.join(file));
        let kills = field(&memory("memory.oom_control")?, "oom_kill")?;
        let held_back = field(&read(&self.cpu.join("cpu.stat"))?, "throttled_time")?;
        Ok(Seen {
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
                eprintln!("{} is left behind: {why}", group.display());
            }
        }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The number behind a word.
fn field(text: &str, name: &str) -> Result<u64> {
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found: Vec<_> = words.filter(|words| words.first() == Some(&name)).collect();
    ensure!(found.len() == 1, "no {name} in {text:?}");
    Ok(found.first().and_then(|words| words.get(1)).context("no number")?.parse()?)
}

const GROUPS: &str = "/sys/fs/cgroup";
/// As Kubernetes has it.
const PERIOD_MICROS: u64 = 100_000;
