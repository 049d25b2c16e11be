//! Writes the files of a command for people: all or none, without overwriting any.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::{CommandError, CommandResult};
use tunnel_base::files::{self, FileLock};

/// A folder that is about to receive files. They are written to a subfolder first and moved at the end, with access for
/// this user only. If it is dropped before [`Self::finish`], nothing remains.
#[derive(Debug)]
pub(crate) struct OutputDir {
    dir: PathBuf,
    /// Names of its future files and folders.
    entries: BTreeSet<String>,
    /// Whether the folder was created now.
    is_new: bool,
    /// A lock that excludes other runs.
    lock: Option<FileLock>,
    /// Whether the written files remain on drop.
    is_kept: bool,
}

impl OutputDir {
    /// Creates the folder, unless it exists. `entries` are the names of its future contents.
    ///
    /// # Errors
    ///
    /// Returns an error if an entry exists, another run is active, or the folder is not writable.
    pub(crate) fn start(dir: &Path, entries: impl IntoIterator<Item = String>) -> CommandResult<Self> {
        let folder = Self::resume(dir, entries)?;
        let cleared = fs::remove_dir_all(folder.unfinished()).and_then(|()| made(&folder.unfinished()));
        cleared.map_err(|cause| failed(&folder.unfinished(), &cause))?;
        Ok(folder)
    }

    /// Like [`Self::start`], but keeps what an earlier run wrote.
    pub(crate) fn resume(dir: &Path, entries: impl IntoIterator<Item = String>) -> CommandResult<Self> {
        let entries: BTreeSet<String> = entries.into_iter().collect();
        let paths = entries.iter().map(|name| dir.join(name));
        // A dangling symbolic link is an entry as well, which `exists` would miss.
        let taken = paths.filter(|path| fs::symlink_metadata(path).is_ok());
        let taken: Vec<String> = taken.map(|path| path.display().to_string()).collect();
        if !taken.is_empty() {
            return Err(CommandError::cannot_write(format!(
                "{} away, or choose another folder",
                match taken.as_slice() {
                    [one] => format!("{one} is there already, and nothing is overwritten; move it"),
                    more => format!(
                        "{} are there already, and nothing is overwritten; move them",
                        more.join(", ")
                    ),
                }
            )));
        }
        let is_new = made_now(dir).map_err(|cause| failed(dir, &cause))?;
        // Two runs at once would mix their unfinished files.
        let lock =
            FileLock::acquire(&dir.join(LOCK), Duration::ZERO).map_err(|cause| match cause.kind() {
                io::ErrorKind::WouldBlock => CommandError::cannot_write(format!(
                    "another run is active in {}; wait for it",
                    dir.display()
                )),
                _ => failed(dir, &cause),
            })?;
        let folder = Self { dir: dir.to_owned(), entries, is_new, lock: Some(lock), is_kept: false };
        made_now(&folder.unfinished()).map_err(|cause| failed(&folder.unfinished(), &cause))?;
        Ok(folder)
    }

    /// Returns the subfolder for unfinished files.
    pub(crate) fn unfinished(&self) -> PathBuf {
        self.dir.join(UNFINISHED)
    }

    /// Writes a file, by its path within the folder, and creates its parent folders. Replaces an earlier version.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk is full, or similar.
    pub(crate) fn write(&self, path: &str, text: &str) -> CommandResult<()> {
        let at = self.unfinished().join(path);
        let write = || {
            if let Some(above) = at.parent() {
                DirBuilder::new().recursive(true).mode(DIR_MODE).create(above)?;
            }
            files::replace(&at, FILE_MODE, text.as_bytes(), |_| Ok(()))
        };
        write().map_err(|cause| failed(&self.dir.join(path), &cause))
    }

    /// Like [`Self::write`], unless the file was written before. Returns its content.
    pub(crate) fn write_once(&self, path: &str, text: &str) -> CommandResult {
        match fs::read_to_string(self.unfinished().join(path)) {
            Ok(before) if !before.is_empty() => Ok(before),
            _ => self.write(path, text).map(|()| text.to_owned()),
        }
    }

    /// Keeps the written files for [`Self::resume`].
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }

    /// Moves all files to their final place.
    ///
    /// # Errors
    ///
    /// Returns the system's error. The moves are then undone where possible.
    pub(crate) fn finish(self) -> CommandResult<()> {
        let unfinished = self.unfinished();
        let moved = |name: &String| fs::rename(unfinished.join(name), self.dir.join(name));
        for (at, name) in self.entries.iter().enumerate() {
            if let Err(cause) = moved(name) {
                for name in self.entries.iter().take(at) {
                    // Best effort.
                    let _ = fs::rename(self.dir.join(name), unfinished.join(name));
                }
                return Err(failed(&self.dir.join(name), &cause));
            }
        }
        // Makes the moves durable.
        let synced = fs::remove_dir(&unfinished).and_then(|()| File::open(&self.dir)?.sync_all());
        let synced = synced.map_err(|cause| failed(&unfinished, &cause));
        self.keep();
        synced
    }
}

impl Drop for OutputDir {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // The next run reports what cannot be removed.
        let _ = fs::remove_dir_all(self.unfinished());
        self.lock = None;
        if self.is_new {
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

fn made(dir: &Path) -> io::Result<()> {
    DirBuilder::new().mode(DIR_MODE).create(dir)
}

/// Creates a folder, unless it exists. Returns true if it was created.
fn made_now(dir: &Path) -> io::Result<bool> {
    match made(dir) {
        Ok(()) => Ok(true),
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(cause) => Err(cause),
    }
}

fn failed(path: &Path, cause: &io::Error) -> CommandError {
    CommandError::cannot_write(format!(
        "cannot write {}: {cause}; check that the folder above it exists, is not full, and that this user may write there",
        path.display()
    ))
}

/// The subfolder for unfinished files.
const UNFINISHED: &str = ".unfinished";
const LOCK: &str = ".unfinished.lock";
const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn names(dir: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn started(dir: &Path) -> CommandResult<OutputDir> {
        OutputDir::start(dir, ["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn output_files_appear_private_and_only_when_the_run_finishes() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("new");
        let folder = started(&dir).unwrap();
        folder.write("a", "1").unwrap();
        folder.write("b/c/d", "2").unwrap();
        assert_eq!(names(&dir), [UNFINISHED.to_owned(), LOCK.to_owned()].into());
        let second = started(&dir).unwrap_err().text;
        assert!(second.contains("another run is active in"), "{second}");
        folder.finish().unwrap();
        assert_eq!(names(&dir), ["a".to_owned(), "b".to_owned()].into());
        assert_eq!(fs::read_to_string(dir.join("b/c/d")).unwrap(), "2");
        let mode = |path: &str| fs::metadata(dir.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(["", "a", "b", "b/c", "b/c/d"].map(mode), [0o700, 0o600, 0o700, 0o700, 0o600]);
    }

    #[test]
    fn an_existing_entry_is_reported_and_not_overwritten() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("b"), "theirs").unwrap();
        let error = started(place.path()).unwrap_err().text;
        assert!(error.contains("/b is there already, and nothing is overwritten"), "{error}");
        assert_eq!(fs::read_to_string(place.path().join("b")).unwrap(), "theirs");
        assert_eq!(names(place.path()), ["b".to_owned()].into());
    }

    #[test]
    fn a_failed_run_leaves_no_output_files() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("new");
        let folder = started(&dir).unwrap();
        folder.write("a", "1").unwrap();
        assert!(folder.write("a/b", "2").unwrap_err().text.contains("cannot write"));
        drop(folder);
        assert!(!dir.exists());
        // A run with a missing entry takes back the moved files.
        let folder = started(place.path()).unwrap();
        folder.write("a", "1").unwrap();
        folder.finish().unwrap_err();
        assert!(names(place.path()).is_empty());
        // The leftovers of a killed run do not prevent a new run, and continue only if requested.
        let folder = started(place.path()).unwrap();
        folder.write("a", "1").unwrap();
        folder.keep();
        let resumed = OutputDir::resume(place.path(), ["a".to_owned()]).unwrap();
        assert_eq!(resumed.write_once("a", "2").unwrap(), "1");
        resumed.write("a", "3").unwrap();
        assert_eq!(resumed.write_once("a", "2").unwrap(), "3");
        resumed.keep();
        let folder = started(place.path()).unwrap();
        assert_eq!(folder.write_once("a", "4").unwrap(), "4");
        drop(folder);
        let error = started(&place.path().join("not/there")).unwrap_err().text;
        assert!(error.contains("check that the folder above it exists"), "{error}");
    }
}
