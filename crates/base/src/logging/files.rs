//! Log files that only their owner may read: one that is renamed when it is full, and one that grows until it is moved.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::files::with_suffix;
use crate::logging::LogError;
use crate::logging::dropped_lines::DroppedLines;

/// A writer of lines to a file, which is opened again after it was moved or deleted.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    /// The flag that names the file, for errors.
    key: &'static str,
    /// Length in bytes at which the file is renamed to `path.1`; `None`: it is never renamed here.
    full: Option<u64>,
    current: OpenLogFile,
    dropped: DroppedLines,
}

/// A file that lines are appended to.
#[derive(Debug)]
struct OpenLogFile {
    file: File,
    /// Its device and inode.
    id: (u64, u64),
    /// Whether it ends in the middle of a line.
    torn: bool,
}

impl OpenLogFile {
    /// Opens a file for appending. Only its owner may read it: log lines name clients, nodes and targets.
    fn open(path: &Path) -> io::Result<Self> {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        // A FIFO that no program reads must not block the log.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
        let id = id_of(&file.metadata()?);
        Ok(Self { file, id, torn: false })
    }

    /// Writes a whole line, after ending a partially written one.
    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        let end = if self.torn { &b"\n"[..] } else { b"" };
        for piece in [end, line] {
            let mut rest = piece;
            while !rest.is_empty() {
                match self.file.write(rest) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(taken) => {
                        rest = rest.get(taken..).unwrap_or_default();
                        self.torn = !rest.is_empty();
                    }
                    Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                    Err(cause) => return Err(cause),
                }
            }
        }
        Ok(())
    }

    /// Writes a line after an attempt to open the next file. Its error loses no line while this file still has a name.
    fn write_despite(&mut self, opened: io::Result<()>, line: &[u8]) -> io::Result<()> {
        match opened {
            Ok(()) => self.write_line(line),
            Err(cause) if self.file.metadata().is_ok_and(|found| found.nlink() == 0) => Err(cause),
            Err(cause) => self.write_line(line).and_then(|()| {
                self.write_line(format!("cannot open the next log file: {cause}\n").as_bytes())
            }),
        }
    }
}

impl LogFile {
    /// Opens the file for appending.
    pub(crate) fn open(
        path: PathBuf,
        key: &'static str,
        full: Option<u64>,
        dropped: DroppedLines,
    ) -> Result<Self, LogError> {
        match OpenLogFile::open(&path) {
            Ok(current) => Ok(Self { path, key, full, current, dropped }),
            Err(cause) => Err(LogError { key, path, cause }),
        }
    }

    /// Opens the next file if the current one is full, was moved or deleted.
    fn refresh(&mut self) -> io::Result<()> {
        // The name decides, not the open file: people and other programs move and delete files at any time.
        match fs::metadata(&self.path) {
            Ok(found) if self.full.is_some_and(|full| found.len() >= full) => shift(&self.path)?,
            Ok(found) if id_of(&found) == self.current.id => return Ok(()),
            _ => {}
        }
        self.current = OpenLogFile::open(&self.path)?;
        Ok(())
    }
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let refreshed = self.refresh();
        let written = self.current.write_despite(refreshed, line);
        // Returning an error here would have no effect: nothing reads it.
        let written = written.map_err(|cause| LogError { key: self.key, path: self.path.clone(), cause });
        self.dropped.record(&self.path, written);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.current.file.flush()
    }
}

/// Renames a full file to `path.1`, after `path.1` to `path.2`, and so on. The last one is replaced.
fn shift(path: &Path) -> io::Result<()> {
    for number in (1..FILES).rev() {
        let newer =
            if number == 1 { path.to_owned() } else { with_suffix(path, &format!(".{}", number - 1)) };
        match fs::rename(newer, with_suffix(path, &format!(".{number}"))) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
    }
    Ok(())
}

fn id_of(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Length at which a file is full. All of them take an eighth of the smallest disk that nodes come with.
pub(crate) const FULL: u64 = 100 * 1024 * 1024 / FILES;
/// Maximum number of files. Replacing the oldest of eight leaves most of the history.
const FILES: u64 = 8;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Opens a file that is renamed at that length.
    fn rotated(path: &Path, full: u64, dropped: &DroppedLines) -> LogFile {
        LogFile::open(path.to_owned(), "--log-dir", Some(full), dropped.clone()).unwrap()
    }

    fn text(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn log_files_stay_within_their_number_and_size_and_keep_the_newest_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.log");
        for stranger in ["t.log.8", "t.log.old", "other.log.1"] {
            fs::write(dir.path().join(stranger), "x").unwrap();
        }
        let mut file = rotated(&path, 1000, &DroppedLines::default());
        for n in 0..1000 {
            file.write_all(format!("{n:099}\n").as_bytes()).unwrap();
        }
        let older = (1..FILES).rev().map(|number| with_suffix(&path, &format!(".{number}")));
        let lines: String = older.chain([path.clone()]).map(|part| text(&part)).collect();
        assert!((7000..=8000).contains(&lines.len()), "{} bytes", lines.len());
        let numbers: Vec<u64> = lines.lines().map(|l| l.parse().unwrap()).collect();
        let first = 1000 - numbers.len() as u64;
        assert_eq!(numbers, (first..1000).collect::<Vec<_>>(), "the last lines, in order, without a gap");
        let files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(Result::unwrap).collect();
        assert_eq!(files.len(), 8 + 3, "other files stay");
        let is_private = |file: &fs::DirEntry| file.metadata().unwrap().permissions().mode() & 0o777 == 0o600;
        assert_eq!(files.iter().filter(|file| is_private(file)).count(), 8);
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_counted_and_reported_until_a_write_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.log");
        let dropped = DroppedLines::default();
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut file = rotated(&path, FULL, &dropped);
        for line in ["one\n", "two\n"] {
            file.write_all(line.as_bytes()).unwrap();
        }
        let trouble = dropped.trouble().unwrap();
        let expected = format!("cannot write the log file {}: No space", path.display());
        assert!(trouble.starts_with(&expected), "{trouble}");
        assert_eq!(dropped.count(), 2);
        fs::remove_file(&path).unwrap();
        file.write_all(b"three\n").unwrap();
        assert_eq!((dropped.trouble(), dropped.count()), (None, 2));
        file.current.torn = true;
        file.write_all(b"four\n").unwrap();
        assert_eq!(text(&path), "three\n\nfour\n", "a partial line is ended first");
    }

    #[test]
    fn a_moved_or_deleted_log_file_is_reopened() {
        let dir = tempfile::tempdir().unwrap();
        let [logs, moved] = ["logs", "moved"].map(|name| dir.path().join(name));
        let dropped = DroppedLines::default();
        let path = logs.join("t.log");
        let mut file = rotated(&path, FULL, &dropped);
        let mut written = |line: &str| {
            file.write_all(line.as_bytes()).unwrap();
            text(&path)
        };
        assert_eq!(written("one\n"), "one\n");
        fs::rename(&path, &moved).unwrap();
        assert_eq!(written("two\n"), "two\n");
        assert_eq!(text(&moved), "one\n");
        fs::remove_file(&path).unwrap();
        assert_eq!(written("three\n"), "three\n");
        fs::remove_dir_all(&logs).unwrap();
        assert_eq!(written("four\n"), "four\n");
        // Where no directory can be made, the lines are counted as dropped.
        fs::remove_dir_all(&logs).unwrap();
        fs::write(&logs, "").unwrap();
        assert_eq!((written("five\n"), dropped.count()), (String::new(), 1));
        fs::remove_file(&logs).unwrap();
        assert_eq!((written("six\n"), dropped.trouble()), ("six\n".into(), None));
    }

    #[test]
    fn a_file_that_cannot_be_renamed_keeps_its_lines_and_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.log");
        let dropped = DroppedLines::default();
        fs::write(dir.path().join("t.log.6"), "").unwrap();
        fs::create_dir(dir.path().join("t.log.7")).unwrap();
        let mut file = rotated(&path, 1, &dropped);
        for line in ["one\n", "two\n"] {
            file.write_all(line.as_bytes()).unwrap();
        }
        assert!(text(&path).starts_with("one\ntwo\ncannot open the next log file: "), "{}", text(&path));
        assert_eq!(dropped.count(), 0);
    }

    #[test]
    fn a_file_that_is_not_rotated_is_private_and_appended_to_and_opened_again_after_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let [path, moved] = ["new/audit.log", "audit.log.1"].map(|name| dir.path().join(name));
        let dropped = DroppedLines::default();
        let open = |path| LogFile::open(path, "--audit-file", None, dropped.clone()).unwrap();
        open(path.clone()).write_all(b"one\n").unwrap();
        let mut file = open(path.clone());
        file.write_all(b"two\n").unwrap();
        assert_eq!(text(&path), "one\ntwo\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::rename(&path, &moved).unwrap();
        file.write_all(b"three\n").unwrap();
        assert_eq!((text(&moved), text(&path)), ("one\ntwo\n".into(), "three\n".into()));
        // While the path cannot be opened, lines go to the file that was moved.
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        file.write_all(b"four\n").unwrap();
        assert!(text(&moved).starts_with("three\nfour\ncannot open the next log file: "), "{}", text(&moved));
        fs::remove_file(&moved).unwrap();
        file.write_all(b"five\n").unwrap();
        let trouble = dropped.trouble().unwrap();
        assert!(trouble.starts_with(&format!("cannot write the log file {}: ", path.display())), "{trouble}");
        fs::remove_dir(&path).unwrap();
        file.write_all(b"six\n").unwrap();
        assert_eq!((text(&path), dropped.trouble(), dropped.count()), ("six\n".into(), None, 1));
    }

    #[test]
    fn a_fifo_that_no_program_reads_is_an_error_and_blocks_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(LogFile::open(path, "--audit-file", None, DroppedLines::default()).is_err());
    }

    #[test]
    fn a_writable_log_does_not_hide_that_another_one_is_not() {
        let dropped = DroppedLines::default();
        let why = |path: &str| LogError { key: "", path: path.into(), cause: ErrorKind::NotFound.into() };
        dropped.record(Path::new("/b"), Err(why("/b")));
        dropped.record(Path::new("/a"), Ok(()));
        dropped.record(Path::new("/b"), Err(why("/b")));
        assert!(dropped.trouble().is_some_and(|trouble| trouble.contains("/b")));
        dropped.record(Path::new("/b"), Ok(()));
        assert_eq!((dropped.trouble(), dropped.count()), (None, 2));
    }
}
