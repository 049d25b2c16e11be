//! Has the kernel map each page of a file by itself, at its first use.
//!
//! Else it maps what lies around a page as well: fifteen pages, and from Linux 6.18 on all that was read or written in one go
//! with it. It leaves that out where userfaultfd watches for writes. Here nobody writes, and nobody listens.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_WP_ASYNC, UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range,
    uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};

/// From now on, pages of this range are mapped one by one. What is mapped stays.
///
/// # Errors
///
/// The range is not mapped, or the kernel was built without this.
pub(crate) fn disable_fault_around(watch: &OwnedFd, range: &Range<usize>) -> io::Result<()> {
    let watched = uffdio_range { start: range.start as u64, len: range.len() as u64 };
    let mut asked = uffdio_register { range: watched, mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
    // SAFETY: it is the struct that this call takes and fills, and no page of the range changes by it. Writing is never
    // held up, as the kernel itself answers (`WP_ASYNC`).
    let failed = unsafe { libc::ioctl(watch.as_raw_fd(), UFFDIO_REGISTER as _, &raw mut asked) };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: it changes how pages are mapped, and none of them. It fails where the kernel knows no huge pages.
    let _ = unsafe { libc::madvise(start, range.len(), libc::MADV_NOHUGEPAGE) };
    Ok(())
}

/// The kernel's watch over ranges, for as long as the process lives.
///
/// # Errors
///
/// The kernel cannot (it is older than 6.7), or does not let this process, as in many sandboxes; or the process has no room for
/// one more file, so the next call tries again.
pub(crate) fn watch() -> io::Result<&'static OwnedFd> {
    match WATCH.get() {
        Some(watch) => Ok(watch),
        None => make().map(|watch| WATCH.get_or_init(|| watch)),
    }
}

fn make() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY.cast_signed();
    // SAFETY: it takes one number, and makes a file.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let made = i32::try_from(made).ok().filter(|made| *made >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the file was just made, and nobody else knows it.
    let watch = unsafe { OwnedFd::from_raw_fd(made) };
    let mut asked =
        uffdio_api { api: u64::from(UFFD_API), features: u64::from(UFFD_FEATURE_WP_ASYNC), ioctls: 0 };
    // SAFETY: it is the struct that this call takes and fills.
    let failed = unsafe { libc::ioctl(made, UFFDIO_API as _, &raw mut asked) };
    if failed == 0 { Ok(watch) } else { Err(io::Error::last_os_error()) }
}

static WATCH: OnceLock<OwnedFd> = OnceLock::new();
