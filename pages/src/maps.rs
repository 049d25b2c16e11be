//! What the kernel says is mapped.

use std::ops::Range;
use std::path::Path;

/// The mappings of `program` that nobody can write to and of which no page differs from the file, by `/proc/self/smaps`.
pub(crate) fn pristine(smaps: &str, program: &Path) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in smaps.lines() {
        if let Some(head) = Head::read(line) {
            mapping = (head.of(program) && !head.writable).then_some(head.range);
        } else if let Some(own) = line.strip_prefix("Anonymous:") {
            found.extend(mapping.take().filter(|_| own.trim() == "0 kB"));
        }
    }
    found
}

/// The first line of a mapping: `START-END PERMISSIONS OFFSET DEVICE INODE PATH`.
struct Head<'a> {
    range: Range<usize>,
    writable: bool,
    path: &'a str,
}

impl<'a> Head<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let mut fields = rest.splitn(5, ' ');
        let permissions = fields.next()?;
        Some(Self { range, writable: permissions.contains('w'), path: fields.last()?.trim_start() })
    }

    fn of(&self, program: &Path) -> bool {
        Path::new(self.path) == program
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
7f9c79431000-7f9c79433000 r-xp 00000000 00:00 0
Anonymous:             0 kB
";

    #[test]
    fn only_what_is_as_in_the_file_is_found() {
        let found = pristine(SMAPS, Path::new("/bin/a program"));
        assert_eq!(found, [0x55a6_1d40_6000..0x55a6_1d9d_c000, 0x55a6_1d9d_c000..0x55a6_1ea4_6000]);
        assert_eq!(pristine(SMAPS, Path::new("/lib/libc.so.6")).len(), 1);
        assert_eq!(pristine(SMAPS, Path::new("/bin/a")), []);
    }

    #[test]
    fn a_mapping_of_which_the_kernel_tells_nothing_is_left_alone() {
        let untold = SMAPS.replace("Anonymous:", "Anon:");
        assert_eq!(pristine(&untold, Path::new("/bin/a program")), []);
        let replaced = SMAPS.replace("/bin/a program", "/bin/a program (deleted)");
        assert_eq!(pristine(&replaced, Path::new("/bin/a program")), []);
    }

    proptest! {
        #[test]
        fn whatever_is_read_nothing_panics(text: String) {
            let _ = pristine(&text, Path::new("/bin/a program"));
        }
    }
}
