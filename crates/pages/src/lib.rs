//! Returns memory that a process does not need to the system.
//!
//! `malloc_trim` has no safe wrapper in any crate that we know. It is wrapped here, separate from the program, which
//! forbids `unsafe`.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

/// Returns the free heap pages of all threads to the system.
///
/// glibc returns only the end of its heaps, so a process that was large once stays large. With another C library this
/// does nothing. It blocks threads that allocate meanwhile; it takes milliseconds for hundreds of MiB.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes any number, locks each heap itself, and touches only free memory.
    let _ = unsafe { libc::malloc_trim(0) };
}

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

    /// Returns this process's private memory in KiB.
    fn private() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
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
        let before = private();
        trim_heap();
        if cfg!(target_env = "gnu") {
            assert!(private() + 40_000 < before, "{before} KiB, then {}", private());
        }
        assert!(blocks.iter().all(|block| block.iter().all(|byte| *byte == 1)));
    }
}
