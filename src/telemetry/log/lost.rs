//! Log lines that never came into a file: how many, and why.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tracing_appender::non_blocking::ErrorCounter;

/// What is lost of one set of log files, or of all logs of the process. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct LostLines(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Lines that the disk did not take.
    unwritten: AtomicU64,
    /// Why the last line was not written; `None`: it was.
    trouble: Mutex<Option<String>>,
    /// Count the lines for which the writers' queues had no room.
    queues: Mutex<Vec<ErrorCounter>>,
}

impl LostLines {
    /// Counts the lines as well that this queue has no room for.
    pub(super) fn count_queue(&self, queue: ErrorCounter) {
        self.0.queues.lock().unwrap_or_else(PoisonError::into_inner).push(queue);
    }

    /// A line could not be written. The first one of a row is told on stderr, as no log can tell it.
    pub(super) fn lose(&self, dir: &Path, cause: &io::Error) {
        self.0.unwritten.fetch_add(1, Relaxed);
        let mut trouble = self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if trouble.is_none() {
            let why = format!("log files in {} cannot be written: {cause}", dir.display());
            // If stderr is gone as well, the metric and /readyz remain.
            let _ = writeln!(io::stderr(), "tunnel: {why}; log lines are lost until that is mended");
            *trouble = Some(why);
        }
    }

    /// A line was written. Why those before it were not, if so.
    pub(super) fn written(&self) -> Option<String> {
        self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// All lines that were lost.
    pub(super) fn count(&self) -> u64 {
        let queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped: usize = queues.iter().map(ErrorCounter::dropped_lines).sum();
        self.0.unwritten.load(Relaxed) + dropped as u64
    }

    /// Why lines are being lost now; `None`: none is.
    pub(super) fn trouble(&self) -> Option<String> {
        self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Those of the process, whose logs are started once.
pub(super) static OF_PROCESS: LazyLock<LostLines> = LazyLock::new(LostLines::default);

/// Lines of this process's logs that were lost: the disk did not take them, or too many waited for it.
pub fn lost_lines() -> u64 {
    OF_PROCESS.count()
}

/// Why lines of this process's logs are being lost now, as a line for `/readyz`; empty: none is.
pub fn log_trouble() -> String {
    OF_PROCESS.trouble().map(|why| format!("log: {why}\n")).unwrap_or_default()
}
