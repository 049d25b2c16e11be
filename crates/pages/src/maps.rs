//! Parses the mappings reported by the kernel.

use std::collections::HashSet;
use std::ops::Range;

/// Returns the mappings of the program and its libraries that are not writable and of which no page differs from the
/// file, by `/proc/self/smaps`. A file is one of these if some part of it is executable.
pub(crate) fn clean_mappings(smaps: &str) -> Vec<Range<usize>> {
    let heads = || smaps.lines().filter_map(Head::read);
    let code: HashSet<&str> = heads().filter(Head::is_code).map(|head| head.path).collect();
    let mut found = Vec::new();
    let mut mapping = None;
    for line in smaps.lines() {
        if let Some(head) = Head::read(line) {
            let is_fixed = !head.permissions.contains('w') && code.contains(head.path);
            mapping = is_fixed.then_some(head.range);
        } else if let Some(own) = line.strip_prefix("Anonymous:") {
            found.extend(mapping.take().filter(|_| own.trim() == "0 kB"));
        }
    }
    found
}

/// Returns the start of the mapping that contains `address`, by `/proc/self/maps`.
pub(crate) fn start(maps: &str, address: usize) -> Option<usize> {
    let found = maps.lines().filter_map(Head::read).find(|head| head.range.contains(&address));
    found.map(|head| head.range.start)
}

/// The first line of a mapping: `START-END PERMISSIONS OFFSET DEVICE INODE PATH`.
struct Head<'a> {
    range: Range<usize>,
    permissions: &'a str,
    path: &'a str,
}

impl<'a> Head<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let mut fields = rest.splitn(5, ' ');
        let permissions = fields.next()?;
        Some(Self { range, permissions, path: fields.last()?.trim_start() })
    }

    /// Returns true if the mapping is an executable part of a file.
    fn is_code(&self) -> bool {
        self.permissions.contains('x') && self.path.starts_with('/')
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMAPS: &str = "\
55a61d406000-55a61d9dc000 r--p 00000000 08:01 131                        /bin/a program
Size:               5976 kB
Rss:                2560 kB
Anonymous:             0 kB
VmFlags: rd mr mw me sd
55a61d9dc000-55a61ea46000 r-xp 005d5000 08:01 131                        /bin/a program
Anonymous:             0 kB
55a61ea46000-55a61eafb000 r--p 0163e000 08:01 131                        /bin/a program
Anonymous:           724 kB
55a61eafb000-55a61eb01000 rw-p 016f2000 08:01 131                        /bin/a program
Anonymous:             0 kB
55a63ec11000-55a63ec76000 rw-p 00000000 00:00 0                          [heap]
Anonymous:           268 kB
7f9c7913e000-7f9c79164000 r--p 00000000 08:01 977                        /lib/libc.so.6
Anonymous:             0 kB
7f9c79164000-7f9c79261000 r-xp 00000000 08:01 977                        /lib/libc.so.6
Anonymous:             4 kB
7f9c79300000-7f9c79310000 r--p 00000000 08:01 98                         /lib/locale-archive
Anonymous:             0 kB
7f9c79431000-7f9c79433000 r-xp 00000000 00:00 0
Anonymous:             0 kB
";

    #[test]
    fn only_what_is_as_in_the_file_is_found() {
        let found = clean_mappings(SMAPS);
        let program = [0x55a6_1d40_6000..0x55a6_1d9d_c000, 0x55a6_1d9d_c000..0x55a6_1ea4_6000];
        assert_eq!(found[..2], program);
        assert_eq!(found.len(), 3);
        assert_eq!(found[2], 0x7f9c_7913_e000..0x7f9c_7916_4000);
    }

    #[test]
    fn the_mapping_around_an_address_is_found() {
        assert_eq!(start(SMAPS, 0x55a6_1eaf_c000), Some(0x55a6_1eaf_b000));
        assert_eq!(start(SMAPS, 0x55a6_1eb0_1000), None);
    }

    #[test]
    fn a_mapping_of_which_the_kernel_tells_nothing_is_left_alone() {
        let untold = SMAPS.replace("Anonymous:", "Anon:");
        assert_eq!(clean_mappings(&untold), []);
    }

    proptest! {
        #[test]
        fn whatever_is_read_nothing_panics(text: String) {
            let _ = (clean_mappings(&text), start(&text, 1));
        }
    }
}
