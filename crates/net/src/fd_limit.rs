//! The limit of open files of this process, and a reserve that new connections do not use.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limits of open files before and after [`raise`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdLimits {
    /// The soft limit at start.
    pub from: u64,
    /// The soft limit now: equal to the hard limit, unless the system refused to raise it.
    pub to: u64,
    /// The hard limit.
    pub hard: u64,
}

impl fmt::Display for FdLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, hard } = self;
        write!(f, "open file limit {to}, was {from}; hard limit {hard}")
    }
}

/// Raises the soft limit to the hard one. The limit is unchanged if the system refuses.
pub fn raise() -> FdLimits {
    let found = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, maximum: found.maximum });
    let hard = found.maximum.unwrap_or(u64::MAX);
    FdLimits { from: found.current.unwrap_or(u64::MAX), to: limit(), hard }
}

/// Returns how many files may be open at most.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns `permits`, but at most `1/part` of the files that may be open.
pub fn at_most(permits: usize, part: u64) -> usize {
    usize::try_from(limit() / part).map_or(permits, |files| files.clamp(1, permits.max(1)))
}

/// Returns true if a file that was just opened belongs to the reserve below `limit`.
///
/// The system assigns the lowest free number, so all lower numbers are in use.
pub fn is_in_reserve(file: &impl AsFd, limit: u64) -> bool {
    number(file) >= limit - reserve(limit)
}

/// Returns true if a file that was just opened is in the last eighth below the reserve.
///
/// Waiting connections must then use fewer files.
pub fn are_scarce(file: &impl AsFd, limit: u64) -> bool {
    number(file) >= limit - reserve(limit) - limit / 8
}

fn reserve(limit: u64) -> u64 {
    limit.div_ceil(KEPT_PART).min(FD_RESERVE)
}

fn number(file: &impl AsFd) -> u64 {
    u64::try_from(file.as_fd().as_raw_fd()).unwrap_or(0)
}

/// Files that new connections may not use: targets, DNS, reloaded files and the log need some.
const FD_RESERVE: u64 = 256;

/// With a low limit, the reserve is this fraction of it.
const KEPT_PART: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_to_the_hard_limit_and_told() {
        let raised = raise();
        assert_eq!((raised.to, limit()), (raised.hard, raised.hard));
        assert_eq!(raise().from, raised.hard);
    }

    #[test]
    fn the_last_files_are_kept() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let number = u64::try_from(file.as_raw_fd()).unwrap();
        assert!(is_in_reserve(&file, number + 1) && is_in_reserve(&file, 0));
        assert!(!is_in_reserve(&file, number + FD_RESERVE + 1) && !is_in_reserve(&file, u64::MAX));
        assert!(
            is_in_reserve(&file, number + number / (2 * KEPT_PART)),
            "the reserve of a low limit is a fraction of it"
        );
    }

    #[test]
    fn files_are_scarce_before_the_last_are_kept() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let number = u64::try_from(file.as_raw_fd()).unwrap();
        assert!(are_scarce(&file, number) && are_scarce(&file, number + number / 4));
        assert!(!are_scarce(&file, 2 * number + 4) && !are_scarce(&file, u64::MAX));
    }

    #[test]
    fn slots_never_take_more_than_their_part() {
        assert_eq!(at_most(1, 4), 1);
        assert!(u64::try_from(at_most(usize::MAX, 4)).unwrap() <= limit() / 4);
    }
}
