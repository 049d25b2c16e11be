//! Log files: daily ones, limited in days and bytes, and one at a path of its own.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use time::{Date, OffsetDateTime};

use crate::files::with_suffix;
use crate::logging::LogError;
use crate::logging::dropped_lines::DroppedLines;

/// How many days and bytes of log files are kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogRetention {
    /// Number of days, including today.
    pub days: usize,
    /// Total bytes of all files.
    pub bytes: u64,
}

/// A writer of `name.<date>.log`. Within a day, a file that grows too long is renamed to `name.<date>.log.1` and so on.
#[derive(Debug)]
pub(crate) struct LogFiles {
    dir: PathBuf,
    name: &'static str,
    kept: LogRetention,
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
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
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
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(taken) => {
                        rest = rest.get(taken..).unwrap_or_default();
                        self.torn = !rest.is_empty();
                    }
                    Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
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
            Err(cause) => self
                .write_line(line)
                .and_then(|()| self.write_line(format!("cannot rotate log files: {cause}\n").as_bytes())),
        }
    }
}

impl LogFiles {
    /// Opens today's file for appending.
    pub(crate) fn open(
        dir: &Path,
        name: &'static str,
        kept: LogRetention,
        dropped: DroppedLines,
    ) -> io::Result<Self> {
        let current = OpenLogFile::open(&file_of(dir, name, today()))?;
        let files = Self { dir: dir.to_owned(), name, kept, current, dropped };
        files.remove_oldest()?;
        Ok(files)
    }

    /// Starts a new file if the current one is full, of an earlier day, moved or deleted. Removes files beyond the
    /// limits.
    fn rotate(&mut self) -> io::Result<()> {
        let day = today();
        let path = file_of(&self.dir, self.name, day);
        // The name decides, not the open file: log rotation and people move and delete files at any time.
        match fs::metadata(&path) {
            Ok(found) if found.len() >= self.kept.bytes / PARTS => self.rename_full(&path, day)?,
            Ok(found) if id_of(&found) == self.current.id => return Ok(()),
            _ => {}
        }
        self.current = OpenLogFile::open(&path)?;
        self.remove_oldest()
    }

    fn rename_full(&self, current: &Path, day: Date) -> io::Result<()> {
        let date = day.to_string();
        let used = self.list()?.iter().filter(|f| f.date == date).map(|f| f.part).max().unwrap_or(0);
        fs::rename(current, with_suffix(current, &format!(".{}", used.saturating_add(1))))
    }

    /// Removes the oldest files until the rest, counting the current file at its full length, is within the limits.
    fn remove_oldest(&self) -> io::Result<()> {
        let mut room = self.kept.bytes - self.kept.bytes / PARTS;
        let mut dates = Vec::new();
        for file in self.list()?.into_iter().rev() {
            if dates.last() != Some(&file.date) {
                dates.push(file.date.clone());
            }
            let current = file.part == 0 && dates.len() == 1;
            if !current && (dates.len() > self.kept.days || file.bytes > room) {
                // Remove all older files too: a gap in the middle would mislead the reader.
                room = 0;
                fs::remove_file(&file.path)?;
            } else if !current {
                room -= file.bytes;
            }
        }
        Ok(())
    }

    /// Returns the log files, oldest first: by date, then parts in their order, then the current file.
    fn list(&self) -> io::Result<Vec<LogDirEntry>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some((date, part)) = name.to_str().and_then(|n| parse(n, self.name)) else { continue };
            let date = date.to_owned();
            let bytes = entry.metadata()?.len();
            files.push(LogDirEntry { path: entry.path(), date, part, bytes });
        }
        files.sort_by_key(|f| (f.date.clone(), if f.part == 0 { u32::MAX } else { f.part }));
        Ok(files)
    }
}

impl Write for LogFiles {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let rotated = self.rotate();
        let written = self.current.write_despite(rotated, line);
        // Returning an error here would have no effect: nothing reads it.
        let written = written.map_err(|cause| LogError::Dir { dir: self.dir.clone(), cause });
        self.dropped.record(&self.dir, written);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.current.file.flush()
    }
}

/// A writer of the file of audit lines, which grows until it is moved.
#[derive(Debug)]
pub(crate) struct AuditFile {
    path: PathBuf,
    current: OpenLogFile,
    dropped: DroppedLines,
}

impl AuditFile {
    /// Opens the file for appending.
    pub(crate) fn open(path: PathBuf, dropped: DroppedLines) -> Result<Self, LogError> {
        match OpenLogFile::open(&path) {
            Ok(current) => Ok(Self { path, current, dropped }),
            Err(cause) => Err(LogError::AuditFile { path, cause }),
        }
    }

    /// Opens the file again if it was moved or deleted.
    fn reopen(&mut self) -> io::Result<()> {
        if fs::metadata(&self.path).is_ok_and(|found| id_of(&found) == self.current.id) {
            return Ok(());
        }
        self.current = OpenLogFile::open(&self.path)?;
        Ok(())
    }
}

impl Write for AuditFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let reopened = self.reopen();
        let written = self.current.write_despite(reopened, line);
        let written = written.map_err(|cause| LogError::AuditFile { path: self.path.clone(), cause });
        self.dropped.record(&self.path, written);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.current.file.flush()
    }
}

/// A log file found in the directory, so that the oldest can be removed.
#[derive(Debug)]
struct LogDirEntry {
    path: PathBuf,
    /// Day in its name, as `2026-11-21`.
    date: String,
    /// Number of the part: 0 for the file itself, 1 for the part renamed first.
    part: u32,
    bytes: u64,
}

/// Parses date and part of a log file's name, `name.2026-11-21.log` or `name.2026-11-21.log.3`.
fn parse<'a>(file: &'a str, name: &str) -> Option<(&'a str, u32)> {
    let rest = file.strip_prefix(name)?.strip_prefix('.')?;
    let (date, part) = rest.split_once(".log")?;
    let dated = date.len() == 10 && date.bytes().all(|b| b.is_ascii_digit() || b == b'-');
    let part = if part.is_empty() { 0 } else { part.strip_prefix('.')?.parse().ok()? };
    dated.then_some((date, part))
}

fn file_of(dir: &Path, name: &str, day: Date) -> PathBuf {
    dir.join(format!("{name}.{day}.log"))
}

fn id_of(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

fn today() -> Date {
    OffsetDateTime::now_utc().date()
}

/// A week, and an eighth of the smallest disk that nodes come with.
pub(crate) const RETENTION: LogRetention = LogRetention { days: 7, bytes: 100 * 1024 * 1024 };

/// Divisor for the maximum size of one file: small files, so that removing the oldest leaves most of the history.
const PARTS: u64 = 8;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn log_files_stay_within_their_size_limit_and_keep_the_newest_lines() {
        let dir = tempfile::tempdir().unwrap();
        let kept = LogRetention { days: 7, bytes: 8000 };
        let mut files = LogFiles::open(dir.path(), "t", kept, DroppedLines::default()).unwrap();
        for n in 0..1000 {
            files.write_all(format!("{n:099}\n").as_bytes()).unwrap();
        }
        let all = files.list().unwrap();
        let total: u64 = all.iter().map(|f| f.bytes).sum();
        assert!((4000..=8100).contains(&total), "{total} bytes in {all:?}");
        let lines: String = all.iter().map(|f| fs::read_to_string(&f.path).unwrap()).collect();
        let numbers: Vec<u64> = lines.lines().map(|l| l.parse().unwrap()).collect();
        let first = 1000 - numbers.len() as u64;
        assert_eq!(numbers, (first..1000).collect::<Vec<_>>(), "the last lines, in order, without a gap");
    }

    #[test]
    fn only_log_files_of_the_last_days_are_kept_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        for day in 1..=9 {
            fs::write(dir.path().join(format!("t.2020-01-0{day}.log")), "x").unwrap();
        }
        for stranger in ["t.2020-01-01.txt", "other.2020-01-01.log", "t.today.log"] {
            fs::write(dir.path().join(stranger), "x").unwrap();
        }
        let kept = LogRetention { days: 3, bytes: 8000 };
        let _files = LogFiles::open(dir.path(), "t", kept, DroppedLines::default()).unwrap();
        let left = names(dir.path());
        assert_eq!(left.len(), 6, "{left:?}");
        for name in ["t.2020-01-08.log", "t.2020-01-09.log", "t.2020-01-01.txt", "other.2020-01-01.log"] {
            assert!(left.iter().any(|n| n == name), "{name} is not in {left:?}");
        }
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_counted_and_reported_until_a_write_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let dropped = DroppedLines::default();
        drop(LogFiles::open(dir.path(), "t", RETENTION, dropped.clone()).unwrap());
        let [name] = names(dir.path()).try_into().unwrap();
        let path = dir.path().join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut files = LogFiles::open(dir.path(), "t", RETENTION, dropped.clone()).unwrap();
        for line in ["one\n", "two\n"] {
            files.write_all(line.as_bytes()).unwrap();
        }
        let trouble = dropped.trouble().unwrap();
        assert!(
            trouble.contains(&*dir.path().to_string_lossy()) && trouble.contains("No space"),
            "{trouble}"
        );
        assert_eq!(dropped.count(), 2);
        fs::remove_file(&path).unwrap();
        files.write_all(b"three\n").unwrap();
        assert_eq!((dropped.trouble(), dropped.count()), (None, 2));
        files.current.torn = true;
        files.write_all(b"four\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n\nfour\n", "a partial line is ended first");
    }

    #[test]
    fn a_moved_or_deleted_log_file_is_reopened() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, moved) = (dir.path().join("logs"), dir.path().join("moved"));
        let dropped = DroppedLines::default();
        let mut files = LogFiles::open(&logs, "t", RETENTION, dropped.clone()).unwrap();
        let [name] = names(&logs).try_into().unwrap();
        let path = logs.join(name);
        let mut written = |line: &str| {
            files.write_all(line.as_bytes()).unwrap();
            fs::read_to_string(&path).unwrap_or_default()
        };
        assert_eq!(written("one\n"), "one\n");
        fs::rename(&path, &moved).unwrap();
        assert_eq!((written("two\n"), fs::read_to_string(&moved).unwrap()), ("two\n".into(), "one\n".into()));
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
    fn a_log_file_is_readable_only_by_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let kept = LogRetention { days: 7, bytes: 800 };
        let mut files = LogFiles::open(dir.path(), "t", kept, DroppedLines::default()).unwrap();
        for _ in 0..3 {
            files.write_all(&[b'x'; 100]).unwrap();
        }
        let mode = |file: &LogDirEntry| fs::metadata(&file.path).unwrap().permissions().mode() & 0o777;
        assert_eq!(files.list().unwrap().iter().map(mode).collect::<Vec<_>>(), [0o600; 3]);
    }

    #[test]
    fn the_audit_file_is_private_and_appended_to_and_opened_again_after_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let (path, moved) = (dir.path().join("new/audit.log"), dir.path().join("audit.log.1"));
        let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let dropped = DroppedLines::default();
        let open = || AuditFile::open(path.clone(), dropped.clone()).unwrap();
        open().write_all(b"one\n").unwrap();
        let mut file = open();
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
        assert!(text(&moved).starts_with("three\nfour\ncannot rotate log files: "), "{}", text(&moved));
        fs::remove_file(&moved).unwrap();
        file.write_all(b"five\n").unwrap();
        let trouble = dropped.trouble().unwrap();
        assert!(
            trouble.starts_with(&format!("cannot write the audit log {}: ", path.display())),
            "{trouble}"
        );
        fs::remove_dir(&path).unwrap();
        file.write_all(b"six\n").unwrap();
        assert_eq!((text(&path), dropped.trouble(), dropped.count()), ("six\n".into(), None, 1));
    }

    #[test]
    fn a_writable_log_does_not_hide_that_another_one_is_not() {
        let dropped = DroppedLines::default();
        let why =
            |path: &str| LogError::AuditFile { path: path.into(), cause: io::ErrorKind::NotFound.into() };
        dropped.record(Path::new("/b"), Err(why("/b")));
        dropped.record(Path::new("/a"), Ok(()));
        dropped.record(Path::new("/b"), Err(why("/b")));
        assert!(dropped.trouble().is_some_and(|trouble| trouble.contains("/b")));
        dropped.record(Path::new("/b"), Ok(()));
        assert_eq!((dropped.trouble(), dropped.count()), (None, 2));
    }

    #[test]
    fn a_restart_appends_to_the_same_log_file() {
        let dir = tempfile::tempdir().unwrap();
        for line in ["one\n", "two\n"] {
            let mut files = LogFiles::open(dir.path(), "t", RETENTION, DroppedLines::default()).unwrap();
            files.write_all(line.as_bytes()).unwrap();
        }
        let [name] = names(dir.path()).try_into().unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), "one\ntwo\n");
    }
}
