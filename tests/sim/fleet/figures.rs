//! Counts the frames sent and received and the lookups of one server, in total and in its busiest second.

use std::sync::Mutex;

use tokio::time::Instant;

/// The counts of one server.
#[derive(Debug, Default)]
pub(crate) struct Figures(Mutex<Counts>);

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) sent: Rate,
    pub(crate) received: Rate,
    pub(crate) lookups: Rate,
    /// Longest queue of a link.
    pub(crate) waiting: usize,
}

/// A count in total, and in the busiest second.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    pub(crate) all: u64,
    pub(crate) peak: u64,
    second: Option<(Instant, u64)>,
}

impl Figures {
    pub(crate) fn count_sent(&self) {
        self.0.lock().unwrap().sent.one();
    }

    pub(crate) fn count_received(&self) {
        self.0.lock().unwrap().received.one();
    }

    pub(crate) fn looks_up(&self) {
        self.0.lock().unwrap().lookups.one();
    }

    pub(crate) fn waits(&self, waiting: usize) {
        let mut counts = self.0.lock().unwrap();
        counts.waiting = counts.waiting.max(waiting);
    }

    /// Returns the counts since the last call.
    pub(crate) fn take(&self) -> Counts {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Counts {
    /// Returns the maximum of each count.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            sent: self.sent.with(other.sent),
            received: self.received.with(other.received),
            lookups: self.lookups.with(other.lookups),
            waiting: self.waiting.max(other.waiting),
        }
    }
}

impl Rate {
    pub(crate) fn with(self, other: Self) -> Self {
        Self { all: self.all.max(other.all), peak: self.peak.max(other.peak), second: None }
    }

    /// Counts one.
    pub(crate) fn one(&mut self) {
        let now = Instant::now();
        let (since, count) = match self.second {
            Some((since, count)) if (now - since).as_secs() == 0 => (since, count + 1),
            _ => (now, 1),
        };
        self.second = Some((since, count));
        self.all += 1;
        self.peak = self.peak.max(count);
    }
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn memory() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
