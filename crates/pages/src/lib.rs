//! Returns pages that a process does not need to the system.
//!
//! Some of the calls have no safe wrapper in any crate that we know. They are wrapped here, separate from the program,
//! which forbids `unsafe`. All functions may be called at any time, from any thread, any number of times.

mod alone;
mod maps;

use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasher, Hash};
use std::io;

/// Returns the free heap pages of all threads to the system. Returns true if there were any.
///
/// glibc returns only the end of its heaps, so a process that was large once stays large. With another C library this
/// does nothing. It blocks threads that allocate meanwhile; it takes milliseconds for hundreds of MiB.
#[must_use = "returns whether there was anything to release"]
pub fn trim_heap() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes any number, locks each heap itself, and touches only free memory.
        let released = unsafe { libc::malloc_trim(0) };
        released != 0
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

/// The result of [`release_program_pages`], for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleasedPages {
    /// Bytes of address space that no longer have pages.
    pub bytes: usize,
    /// Whether pages that are used again are mapped one by one, without the pages around them.
    pub alone: bool,
}

/// Drops the pages of the program and its libraries, code and constants, until they are used again.
///
/// For each page used, the kernel also maps those around it. So after its start most of a program is mapped, but little
/// of it is still needed.
///
/// Pages that are used again come from the page cache, or from the file if memory is short. From then on they are
/// mapped one by one, if the kernel supports and permits it (Linux 6.7).
///
/// # Errors
///
/// Returns an error if `/proc` is missing or not readable.
pub fn release_program_pages() -> io::Result<ReleasedPages> {
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let watch = alone::watch();
    let mut forgotten = ReleasedPages { bytes: 0, alone: watch.is_ok() };
    for range in maps::clean_mappings(&smaps) {
        forgotten.alone &=
            watch.as_ref().is_ok_and(|watch| alone::disable_fault_around(watch, &range).is_ok());
        let start = std::ptr::without_provenance_mut(range.start);
        // SAFETY: the range is one mapping of a file, which the kernel keeps while it is mapped. It is not writable,
        // and no page of it differs from the file: each has the same contents when it is used again. Nothing in the
        // program loads or unloads a library after the start (names are resolved without libc, which would). So the
        // range is still that file's, and no loader is writing there before it makes the pages read-only.
        let failed = unsafe { libc::madvise(start, range.len(), libc::MADV_DONTNEED) };
        // It fails for locked memory, which must stay.
        if failed == 0 {
            forgotten.bytes += range.len();
        }
    }
    Ok(forgotten)
}

/// Drops the unused pages of this thread's stack, and returns their size in bytes of address space.
///
/// Deep calls, as during the start of a program, leave hundreds of KiB behind.
///
/// # Errors
///
/// Returns the same errors as [`release_program_pages`].
pub fn release_stack_pages() -> io::Result<usize> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let local = 0_u8;
    let left = (std::ptr::from_ref(&local).addr() - FRAMES) & !(MAX_PAGE - 1);
    let Some(start) = maps::start(&maps, left).filter(|start| *start < left) else { return Ok(0) };
    // SAFETY: stacks grow down, so everything in use of this stack lies above, or within `FRAMES` of, a variable of
    // this frame. Nothing refers to memory below, down to the guard that ends each stack's mapping. No other thread
    // uses it.
    let failed =
        unsafe { libc::madvise(std::ptr::without_provenance_mut(start), left - start, libc::MADV_DONTNEED) };
    Ok(if failed == 0 { left - start } else { 0 })
}

/// Upper bound in bytes of the stack used by the calls that release it.
const FRAMES: usize = 16 * 1024;
/// Multiple of all page sizes.
const MAX_PAGE: usize = 64 * 1024;

/// Shrinks a table that was large. Call it after each removal.
///
/// Usually it compares two numbers. The entries are moved only each time that their number has halved.
pub fn shrink<K: Eq + Hash, V, S: BuildHasher>(table: &mut HashMap<K, V, S>) {
    table.shrink_to(MIN_ROOM.max(table.len() * 4));
}

/// A table with a capacity of this many entries is not shrunk.
const MIN_ROOM: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a value of this process's status in KiB.
    fn own(key: &str) -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Returns the resident KiB of the mapping around an address.
    fn resident(address: usize) -> u64 {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", maps::start(&smaps, address).unwrap());
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Uses `kib` KiB of the stack, and returns `kib`.
    #[inline(never)]
    fn deep(kib: usize) -> usize {
        let used = std::hint::black_box([kib; 128]);
        if kib == 0 { 0 } else { deep(kib - 1) + used[0] / kib }
    }

    #[test]
    fn a_stack_gives_back_what_was_left_and_goes_on() {
        let used = std::hint::black_box([7_u8; 10_000]);
        let deepest = || deep(1500);
        let thread = std::thread::Builder::new().stack_size(16 << 20);
        let checked = thread.spawn(move || {
            assert_eq!(deepest(), 1500);
            let before = resident(used.as_ptr().addr());
            assert!(release_stack_pages().unwrap() > 1 << 20);
            let after = resident(used.as_ptr().addr());
            assert_eq!((deepest(), used), (1500, [7; 10_000]));
            (before, after)
        });
        let (before, after) = checked.unwrap().join().unwrap();
        assert!(after + 1000 < before, "{before} KiB, then {after}");
    }

    #[test]
    fn a_table_that_was_large_is_moved_to_less_room_now_and_then() {
        let mut table: HashMap<u32, u8> = (0..100_000).map(|n| (n, 1)).collect();
        let mut moved = 0;
        for n in 0..99_900 {
            let before = table.get(&99_999).map(std::ptr::from_ref);
            table.remove(&n);
            shrink(&mut table);
            moved += usize::from(table.get(&99_999).map(std::ptr::from_ref) != before);
        }
        assert!(table.len() == 100 && table.capacity() < 2048, "{}", table.capacity());
        assert!((3..=8).contains(&moved), "{moved} times");
    }

    #[test]
    fn free_pages_between_used_ones_are_given_back() {
        let mut blocks: Vec<Vec<u8>> = (0..2000).map(|_| vec![1; 32 * 1024]).collect();
        let mut nth = 0;
        blocks.retain(|_| {
            nth += 1;
            nth % 8 == 0
        });
        let before = own("RssAnon:");
        let released = trim_heap();
        if cfg!(target_env = "gnu") {
            assert!(released && own("RssAnon:") + 40_000 < before, "{before} KiB, then {}", own("RssAnon:"));
        }
        assert!(blocks.iter().all(|block| block.iter().all(|byte| *byte == 1)));
    }

    /// Maps a file of 4 MiB, of which no page is resident yet.
    fn mapped() -> std::ops::Range<usize> {
        use std::io::Write as _;
        use std::os::fd::AsRawFd as _;
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

        static MADE: AtomicUsize = AtomicUsize::new(0);
        let (len, nth) = (4 << 20, MADE.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(format!("pages-{}-{nth}", std::process::id()));
        let mut file =
            fs::File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.write_all(&vec![5; len]).unwrap();
        fs::remove_file(path).unwrap();
        let (prot, private) = (libc::PROT_READ, libc::MAP_PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, private, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        start.addr()..start.addr() + len
    }

    /// Reads three bytes of the range, far from each other, and returns its resident KiB.
    fn looked_at(range: &std::ops::Range<usize>) -> u64 {
        for at in [0, 1 << 20, 3 << 20] {
            // SAFETY: it lies within a mapping that is never removed and never written to.
            let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(range.start + at).read_volatile() };
            assert_eq!(byte, 5);
        }
        resident(range.start)
    }

    /// Returns true if this process may call userfaultfd, and the kernel has the required feature.
    fn is_watch_known() -> bool {
        use linux_raw_sys::general::{UFFD_API, UFFD_FEATURE_WP_ASYNC, UFFD_USER_MODE_ONLY, uffdio_api};
        use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

        // SAFETY: it takes a number and creates a file descriptor, which has no other owner.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, UFFD_USER_MODE_ONLY) };
        if made < 0 {
            return false;
        }
        // SAFETY: the file descriptor was just created.
        let made = unsafe { OwnedFd::from_raw_fd(i32::try_from(made).unwrap()) };
        let mut asked = uffdio_api { api: u64::from(UFFD_API), features: 0, ioctls: 0 };
        let call = linux_raw_sys::ioctl::UFFDIO_API;
        // SAFETY: it is the struct that this call reads, and fills with the features of the kernel.
        assert_eq!(unsafe { libc::ioctl(made.as_raw_fd(), call as _, &raw mut asked) }, 0);
        asked.features & u64::from(UFFD_FEATURE_WP_ASYNC) != 0
    }

    #[test]
    fn what_is_used_is_mapped_without_what_lies_around_it() {
        let (range, usual) = (mapped(), mapped());
        if !is_watch_known() {
            return eprintln!("skipped: userfaultfd is forbidden, or the kernel is older than 6.7");
        }
        alone::disable_fault_around(alone::watch().unwrap(), &range).unwrap();
        // SAFETY: it takes a number.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap() / 1024;
        assert_eq!(looked_at(&range), 3 * page);
        assert!(looked_at(&usual) > 3 * page);
    }

    #[test]
    fn a_program_goes_on_without_the_pages_that_it_forgot() {
        let said = "constants are there".to_owned();
        let forgotten = release_program_pages().unwrap();
        assert!(forgotten.bytes > 100 * 1024, "{forgotten:?}");
        assert_eq!(said, "constants are there");
        // This code has not run before.
        assert_eq!("3.25".parse::<f64>().unwrap().to_string(), "3.25");
        assert!(std::panic::catch_unwind(|| panic!("unwinding reads the tables")).is_err());
    }
}
