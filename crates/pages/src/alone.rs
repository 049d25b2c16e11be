//! Makes the kernel map each page of a file separately, on first use.
//!
//! Otherwise it also maps the pages around it: fifteen pages, and since Linux 6.18 everything that was read or written
//! together with it. It does not do so where userfaultfd watches for writes. Nothing writes to these pages, and no
//! events are read.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_WP_ASYNC, UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range,
    uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};

/// Makes the kernel map pages of this range one by one from now on. Mapped pages stay mapped.
///
/// # Errors
///
/// Returns an error if the range is not mapped, or the kernel was built without this feature.
pub(crate) fn disable_fault_around(watch: &OwnedFd, range: &Range<usize>) -> io::Result<()> {
    let watched = uffdio_range { start: range.start as u64, len: range.len() as u64 };
    let mut asked = uffdio_register { range: watched, mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
    // SAFETY: it is the struct that this call reads and fills, and it changes no page of the range. Writes are never
    // blocked, because the kernel itself resolves them (`WP_ASYNC`).
    let failed = unsafe { libc::ioctl(watch.as_raw_fd(), UFFDIO_REGISTER as _, &raw mut asked) };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: it changes how pages are mapped, but not their contents. It fails if the kernel does not support huge
    // pages.
    let _ = unsafe { libc::madvise(start, range.len(), libc::MADV_NOHUGEPAGE) };
    Ok(())
}

/// Returns the userfaultfd of the process, which is open until the process ends.
///
/// # Errors
///
/// Returns an error if the kernel is older than 6.7 or forbids the call, as in many sandboxes. Also if the process is
/// out of file descriptors; the next call then tries again.
pub(crate) fn watch() -> io::Result<&'static OwnedFd> {
    match WATCH.get() {
        Some(watch) => Ok(watch),
        None => make().map(|watch| WATCH.get_or_init(|| watch)),
    }
}

fn make() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY.cast_signed();
    // SAFETY: it takes a number and creates a file descriptor.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let made = i32::try_from(made).ok().filter(|made| *made >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the file descriptor was just created and has no other owner.
    let watch = unsafe { OwnedFd::from_raw_fd(made) };
    let mut asked =
        uffdio_api { api: u64::from(UFFD_API), features: u64::from(UFFD_FEATURE_WP_ASYNC), ioctls: 0 };
    // SAFETY: it is the struct that this call reads and fills.
    let failed = unsafe { libc::ioctl(made, UFFDIO_API as _, &raw mut asked) };
    if failed == 0 { Ok(watch) } else { Err(io::Error::last_os_error()) }
}

static WATCH: OnceLock<OwnedFd> = OnceLock::new();
