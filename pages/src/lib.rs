//! Gives pages that a process does not need back to the system.
//!
//! Neither call has a safe form in any crate that we know, so they are wrapped here, away from the program, which forbids
//! `unsafe`. Both may be called at any time, from any thread, any number of times.

mod maps;

use std::fs;
use std::io;

/// Gives back the free pages of the heap, of all threads. Returns whether there were any.
///
/// glibc gives back only what lies at the end of its heaps: a process that was large once stays as large. With another
/// C library this does nothing. Holds up threads that allocate meanwhile; takes milliseconds for hundreds of MiB.
#[must_use = "it says whether there was anything to give back"]
pub fn trim_heap() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes any number, locks each heap itself, and touches only what is free.
        let released = unsafe { libc::malloc_trim(0) };
        released != 0
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

/// Forgets the pages of the program's own file, code and constants, until they are used again. Returns how many bytes
/// of addresses that were.
///
/// For each page that is used the kernel also maps those around it, so that behind its start most of a program is
/// mapped though little of it is needed any more. What is used again comes from the page cache, or from the file if the
/// system is short of memory.
///
/// # Errors
///
/// The kernel does not say what is mapped: `/proc` is not there, or not readable.
pub fn forget_program() -> io::Result<usize> {
    let program = fs::read_link("/proc/self/exe")?;
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let mut forgotten = 0;
    for range in maps::pristine(&smaps, &program) {
        let start = std::ptr::without_provenance_mut(range.start);
        // SAFETY: the range is one mapping of the program's own file, which stays as long as the process. It cannot be
        // written to, and no page of it differs from the file: each comes back as it was when it is used again.
        let failed = unsafe { libc::madvise(start, range.len(), libc::MADV_DONTNEED) };
        // It fails for memory that is locked, which is to stay.
        if failed == 0 {
            forgotten += range.len();
        }
    }
    Ok(forgotten)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kilobytes of a line of this process's state.
    fn own(key: &str) -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
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

    #[test]
    fn a_program_goes_on_without_the_pages_that_it_forgot() {
        let said = "constants are there".to_owned();
        let forgotten = forget_program().unwrap();
        assert!(forgotten > 100 * 1024, "{forgotten} bytes");
        assert_eq!(said, "constants are there");
        // Code that nothing has run so far.
        assert_eq!("3.25".parse::<f64>().unwrap().to_string(), "3.25");
        assert!(std::panic::catch_unwind(|| panic!("unwinding reads the tables")).is_err());
    }
}
