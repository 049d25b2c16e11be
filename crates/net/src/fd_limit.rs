//! The limit of open files of this process, and a reserve that connections of clients and to targets do not use.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::os::MAX_FILES;

/// Limits of open files before and after [`raise`].
#[derive(derive_more::Display, Debug, Clone, Copy, PartialEq, Eq)]
#[display("open file limit {to}, was {from}; hard limit {hard}")]
pub struct FdLimits {
    /// The soft limit at start.
    pub from: u64,
    /// The soft limit now: equal to the hard limit, unless the system refused to raise it.
    pub to: u64,
    /// The hard limit.
    pub hard: u64,
}

/// Raises the soft limit to the hard one. The limit is unchanged if the system refuses.
pub fn raise() -> FdLimits {
    let found = getrlimit(Resource::Nofile);
    let hard = found.maximum.or(MAX_FILES);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: found.maximum });
    let hard = hard.unwrap_or(u64::MAX);
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

/// Fails like the system at its limit if a file that was just opened belongs to the reserve.
///
/// # Errors
///
/// It does. Close the file.
pub fn ensure_outside_reserve(file: &impl AsFd) -> io::Result<()> {
    let limit = limit();
    ensure_outside(file, limit, reserve(limit))
}

/// Like [`ensure_outside_reserve`], but for files open only briefly, which may use half of the reserve.
///
/// # Errors
///
/// The file belongs to the other half. Close it.
pub fn ensure_outside_half_of_reserve(file: &impl AsFd) -> io::Result<()> {
    let limit = limit();
    ensure_outside(file, limit, reserve(limit) / 2)
}

/// Checks whether only the reserve is left, by opening a file.
///
/// # Errors
///
/// It is, or the system lacks files.
pub fn check() -> io::Result<()> {
    ensure_outside_reserve(&UnixDatagram::unbound()?)
}

/// Returns true if an operation failed because too many files are open.
pub fn is_exceeded(cause: &io::Error) -> bool {
    Errno::from_io_error(cause).is_some_and(|errno| matches!(errno, Errno::MFILE | Errno::NFILE))
}

/// Returns how many connections in the reserve each operator's port may have. All four together leave half of it.
pub fn operator_connections(limit: u64) -> usize {
    usize::try_from(reserve(limit) / 8).unwrap_or(usize::MAX).max(1)
}

/// Returns true if a file that was just opened is in the last eighth below the reserve.
///
/// Waiting connections must then use fewer files.
pub fn are_scarce(file: &impl AsFd, limit: u64) -> bool {
    number(file) >= limit - reserve(limit) - limit / 8
}

fn ensure_outside(file: &impl AsFd, limit: u64, kept: u64) -> io::Result<()> {
    if number(file) < limit - kept { Ok(()) } else { Err(Errno::MFILE.into()) }
}

fn reserve(limit: u64) -> u64 {
    limit.div_ceil(RESERVE_DIVISOR).min(FD_RESERVE)
}

fn number(file: &impl AsFd) -> u64 {
    u64::try_from(file.as_fd().as_raw_fd()).unwrap_or(0)
}

/// The text for a client that gets no session because only the reserve is left.
pub const REACHED: &str = "limit of open files reached; raise it (ulimit -Hn, LimitNOFILE)";

/// Files that sessions may not use: operators' ports, links, DNS, reloaded files and the log need some.
const FD_RESERVE: u64 = 256;

/// With a low limit, the reserve is this fraction of it.
const RESERVE_DIVISOR: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raise_sets_the_hard_limit_and_returns_both_limits() {
        let raised = raise();
        assert_eq!((raised.to, limit()), (raised.hard, raised.hard));
        assert_eq!(raise().from, raised.hard);
    }

    #[test]
    fn the_last_file_descriptors_are_reserved() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = u64::try_from(file.as_raw_fd()).unwrap();
        assert!(is_in_reserve(&file, number + 1) && is_in_reserve(&file, 0));
        assert!(!is_in_reserve(&file, number + FD_RESERVE + 1) && !is_in_reserve(&file, u64::MAX));
        assert!(
            is_in_reserve(&file, number + number / (2 * RESERVE_DIVISOR)),
            "the reserve of a low limit is a fraction of it"
        );
    }

    #[test]
    fn a_file_descriptor_in_the_reserve_fails_like_an_exceeded_limit() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = u64::try_from(file.as_raw_fd()).unwrap();
        ensure_outside(&file, number + 9, 8).unwrap();
        let failed = ensure_outside(&file, number + 8, 8).unwrap_err();
        assert!(is_exceeded(&failed) && failed.to_string().contains("Too many open files"), "{failed}");
        assert!(!is_exceeded(&io::ErrorKind::PermissionDenied.into()));
        check().unwrap();
        assert_eq!(
            (operator_connections(u64::MAX), operator_connections(128), operator_connections(16)),
            (32, 2, 1)
        );
    }

    #[test]
    fn file_descriptors_are_scarce_before_the_reserve_is_reached() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = u64::try_from(file.as_raw_fd()).unwrap();
        assert!(are_scarce(&file, number) && are_scarce(&file, number + number / 4));
        assert!(!are_scarce(&file, 2 * number + 4) && !are_scarce(&file, u64::MAX));
    }

    #[test]
    fn permits_never_exceed_their_share_of_the_file_descriptors() {
        assert_eq!(at_most(1, 4), 1);
        assert!(u64::try_from(at_most(usize::MAX, 4)).unwrap() <= limit() / 4);
    }
}
