//! Log lines that were not written to a file: how many, and why.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock, OnceLock};

use parking_lot::Mutex;
use tracing::warn;
use tracing_appender::non_blocking::ErrorCounter;

use crate::logging::LogError;

/// Counts the log lines that were dropped, and holds the reason while lines are being dropped, for the metric and
/// `/readyz`. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct DroppedLines(Arc<DroppedLinesState>);

/// The counters and the last error that all clones of [`DroppedLines`] share.
#[derive(Debug, Default)]
struct DroppedLinesState {
    /// Number of lines that could not be written.
    unwritten: AtomicU64,
    /// Reason why the last line was not written, by the path of the file or directory that it was for.
    trouble: Mutex<BTreeMap<PathBuf, String>>,
    /// Counters of lines dropped because a writer's queue was full.
    queues: Mutex<Vec<ErrorCounter>>,
}

impl DroppedLines {
    /// Includes the lines that this queue drops.
    pub(crate) fn count_queue(&self, queue: ErrorCounter) {
        self.0.queues.lock().push(queue);
    }

    /// Records whether a line was written to this path. The first error of several in a row is reported to stderr, as
    /// no log can hold it.
    pub(crate) fn record(&self, path: &Path, written: Result<(), LogError>) {
        let mut trouble = self.0.trouble.lock();
        match written {
            Ok(()) => {
                let Some(error) = trouble.remove(path) else { return };
                drop(trouble);
                warn!(dropped = self.count(), error, "log files are writable again, lines were dropped");
            }
            Err(error) => {
                self.0.unwritten.fetch_add(1, Relaxed);
                trouble.entry(path.to_owned()).or_insert_with(|| {
                    // If stderr is closed too, the metric and /readyz still report it.
                    let _ =
                        writeln!(io::stderr(), "tunnel: {error}; log lines are dropped until this is fixed");
                    error.to_string()
                });
            }
        }
    }

    /// Returns the number of all dropped lines.
    pub(crate) fn count(&self) -> u64 {
        let queues = self.0.queues.lock();
        let dropped: usize = queues.iter().map(ErrorCounter::dropped_lines).sum();
        self.0.unwritten.load(Relaxed) + dropped as u64
    }

    /// Returns why lines are being dropped now, or `None` if they are not.
    pub(crate) fn trouble(&self) -> Option<String> {
        let trouble = self.0.trouble.lock();
        (!trouble.is_empty()).then(|| trouble.values().cloned().collect::<Vec<_>>().join("; "))
    }
}

/// The dropped lines of the process, where logging is started once.
pub(crate) static OF_PROCESS: LazyLock<DroppedLines> = LazyLock::new(DroppedLines::default);

/// The audit file of the process, if it has one.
pub(crate) static AUDIT_FILE: OnceLock<PathBuf> = OnceLock::new();

/// Returns an error if the disk of the audit file is nearly full, which nothing bounds but an operator. Returns `None` if
/// there is no such file.
pub fn audit_disk() -> Option<Result<(), String>> {
    AUDIT_FILE.get().map(|path| check_room(path, MIN_FREE_BYTES, MIN_FREE_PART))
}

/// Returns an error if less than `bytes` of a file's disk, and less than one of `part` parts of it, is free.
fn check_room(path: &Path, bytes: u64, part: u64) -> Result<(), String> {
    // That a file is missing is reported with the next line.
    let Ok(disk) = rustix::fs::statvfs(path) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free >= bytes || disk.f_bavail >= disk.f_blocks / part {
        return Ok(());
    }
    let mib = free >> 20;
    Err(format!(
        "the disk of the audit log {} has only {mib} MiB left; make room, or move the file away",
        path.display()
    ))
}

/// Room on a disk below which the audit log is reported: 1 GiB, or a twentieth of a smaller disk.
const MIN_FREE_BYTES: u64 = 1 << 30;
const MIN_FREE_PART: u64 = 20;

/// Returns the number of log lines that this process dropped because a write failed or a queue was full.
pub fn count() -> u64 {
    OF_PROCESS.count()
}

/// Returns a line for `/readyz` about why log lines are being dropped now; empty if they are not.
pub fn log_trouble() -> String {
    OF_PROCESS.trouble().map(|why| format!("log: {why}\n")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_for_audit_lines_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let full = check_room(dir.path(), u64::MAX, 1).unwrap_err();
        assert!(full.contains(dir.path().to_str().unwrap()) && full.contains("MiB left"), "{full}");
        assert_eq!(check_room(dir.path(), 0, 1), Ok(()), "enough bytes");
        assert_eq!(check_room(&dir.path().join("missing"), u64::MAX, 1), Ok(()));
    }
}
