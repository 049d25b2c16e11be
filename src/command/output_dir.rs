//! Writes the files of a command for people: all of them or none, and nothing that is there is overwritten.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::command::CommandError;

/// A folder that is about to get files. They are written beside one another into a folder within it, and moved out of
/// that at the end, all for this user alone. Dropped before its end, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct OutputDir {
    dir: PathBuf,
    /// What it will hold: files and folders by their names.
    entries: BTreeSet<String>,
    /// Whether there was no folder.
    is_new: bool,
    /// Held, so that no other run is at work there.
    lock: File,
    /// Whether what is written stays.
    is_kept: bool,
}

impl OutputDir {
    /// Makes the folder, unless it is there. `entries` are the names of what it will hold.
    ///
    /// # Errors
    ///
    /// Some of that is there already, another run is at work, or nothing can be written there.
    pub(crate) fn start(dir: &Path, entries: impl IntoIterator<Item = String>) -> Result<Self, CommandError> {
        let folder = Self::resume(dir, entries)?;
        let cleared = fs::remove_dir_all(folder.unfinished()).and_then(|()| made(&folder.unfinished()));
        cleared.map_err(|cause| failed(&folder.unfinished(), &cause))?;
        Ok(folder)
    }

    /// As [`Self::begin`], with what an earlier run has written and kept.
    pub(crate) fn resume(
        dir: &Path,
        entries: impl IntoIterator<Item = String>,
    ) -> Result<Self, CommandError> {
        let entries: BTreeSet<String> = entries.into_iter().collect();
        let paths = entries.iter().map(|name| dir.join(name));
        let taken = paths.filter(|path| fs::symlink_metadata(path).is_ok());
        let taken: Vec<String> = taken.map(|path| path.display().to_string()).collect();
        if !taken.is_empty() {
            return Err(CommandError::cannot_write(format!(
                "{} there already, and nothing is overwritten: name another folder, or move it away",
                if let [one] = taken.as_slice() { format!("{one} is") } else { taken.join(", ") + " are" }
            )));
        }
        let is_new = made_now(dir).map_err(|cause| failed(dir, &cause))?;
        let lock = File::open(dir).map_err(|cause| failed(dir, &cause))?;
        if lock.try_lock().is_err() {
            return Err(CommandError::cannot_write(format!(
                "another run is at work in {}: wait for it",
                dir.display()
            )));
        }
        let folder = Self { dir: dir.to_owned(), entries, is_new, lock, is_kept: false };
        made_now(&folder.unfinished()).map_err(|cause| failed(&folder.unfinished(), &cause))?;
        Ok(folder)
    }

    /// Where the files are until the end.
    pub(crate) fn unfinished(&self) -> PathBuf {
        self.dir.join(UNFINISHED)
    }

    /// Writes a file, by its path within the folder, with the folders above it.
    ///
    /// # Errors
    ///
    /// It was written before, the disk is full, or the like.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<(), CommandError> {
        let failed = |cause| failed(&self.dir.join(path), &cause);
        let at = self.place(path).map_err(failed)?;
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&at)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        let written = write();
        if written.as_ref().is_err_and(|cause| cause.kind() != io::ErrorKind::AlreadyExists) {
            // Half a file would be taken for a whole one.
            let _ = fs::remove_file(&at);
        }
        written.map_err(failed)
    }

    /// As [`Self::write`], in place of what was written there before.
    pub(crate) fn rewrite(&self, path: &str, text: &str) -> Result<(), CommandError> {
        match fs::remove_file(self.unfinished().join(path)) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                Err(failed(&self.dir.join(path), &cause))
            }
            _ => self.write(path, text),
        }
    }

    /// As [`Self::write`], unless it was written before. What stands there now.
    pub(crate) fn write_once(&self, path: &str, text: &str) -> Result<String, CommandError> {
        match fs::read_to_string(self.unfinished().join(path)) {
            Ok(before) if !before.is_empty() => Ok(before),
            _ => self.rewrite(path, text).map(|()| text.to_owned()),
        }
    }

    /// Leaves what is written for [`Self::resume`].
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }

    /// Where a file is until the end; the folders above it are made.
    fn place(&self, path: &str) -> io::Result<PathBuf> {
        let mut at = self.unfinished();
        let (folders, name) = path.rsplit_once('/').map_or((None, path), |(above, name)| (Some(above), name));
        for folder in folders.into_iter().flat_map(|above| above.split('/')) {
            at.push(folder);
            made_now(&at)?;
        }
        at.push(name);
        Ok(at)
    }

    /// Puts everything where it belongs.
    ///
    /// # Errors
    ///
    /// The system refused, and nothing was put there.
    pub(crate) fn finish(self) -> Result<(), CommandError> {
        let unfinished = self.unfinished();
        let moved = |name: &String| fs::rename(unfinished.join(name), self.dir.join(name));
        for (at, name) in self.entries.iter().enumerate() {
            if let Err(cause) = moved(name) {
                for name in self.entries.iter().take(at) {
                    // As far as it can be undone.
                    let _ = fs::rename(self.dir.join(name), unfinished.join(name));
                }
                return Err(failed(&self.dir.join(name), &cause));
            }
        }
        // What has been moved is found after a power cut as well.
        let synced = fs::remove_dir(&unfinished).and_then(|()| self.lock.sync_all());
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
        // What cannot be removed is named by the next run.
        let _ = fs::remove_dir_all(self.unfinished());
        if self.is_new {
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

fn made(dir: &Path) -> io::Result<()> {
    DirBuilder::new().mode(DIR_MODE).create(dir)
}

/// Makes a folder, unless it is there. Whether it was not.
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

/// Where the files are until all are written.
const UNFINISHED: &str = ".unfinished";
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

    fn started(dir: &Path) -> Result<OutputDir, CommandError> {
        OutputDir::start(dir, ["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn all_is_there_at_the_end_for_its_owner_alone_and_nothing_before() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("new");
        let folder = started(&dir).unwrap();
        folder.write("a", "1").unwrap();
        folder.write("b/c/d", "2").unwrap();
        assert_eq!(names(&dir), [UNFINISHED.to_owned()].into());
        let second = started(&dir).unwrap_err().text;
        assert!(second.contains("another run is at work in"), "{second}");
        folder.finish().unwrap();
        assert_eq!(names(&dir), ["a".to_owned(), "b".to_owned()].into());
        assert_eq!(fs::read_to_string(dir.join("b/c/d")).unwrap(), "2");
        let mode = |path: &str| fs::metadata(dir.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(["", "a", "b", "b/c", "b/c/d"].map(mode), [0o700, 0o600, 0o700, 0o700, 0o600]);
    }

    #[test]
    fn what_is_there_is_named_and_stays() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("b"), "theirs").unwrap();
        let told = started(place.path()).unwrap_err().text;
        assert!(told.contains("/b is there already, and nothing is overwritten"), "{told}");
        assert_eq!(fs::read_to_string(place.path().join("b")).unwrap(), "theirs");
        assert_eq!(names(place.path()), ["b".to_owned()].into());
    }

    #[test]
    fn what_has_failed_on_the_way_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("new");
        let folder = started(&dir).unwrap();
        folder.write("a", "1").unwrap();
        assert!(folder.write("a", "2").unwrap_err().text.contains("cannot write"));
        drop(folder);
        assert!(!dir.exists());
        // One that lacks a part takes back what it has moved.
        let folder = started(place.path()).unwrap();
        folder.write("a", "1").unwrap();
        folder.finish().unwrap_err();
        assert!(names(place.path()).is_empty());
        // What a killed run has left is in nobody's way, and goes on only where that is asked for.
        let folder = started(place.path()).unwrap();
        folder.write("a", "1").unwrap();
        folder.keep();
        let resumed = OutputDir::resume(place.path(), ["a".to_owned()]).unwrap();
        assert_eq!(resumed.write_once("a", "2").unwrap(), "1");
        resumed.rewrite("a", "3").unwrap();
        assert_eq!(resumed.write_once("a", "2").unwrap(), "3");
        resumed.keep();
        let folder = started(place.path()).unwrap();
        assert_eq!(folder.write_once("a", "4").unwrap(), "4");
        drop(folder);
        let told = started(&place.path().join("not/there")).unwrap_err().text;
        assert!(told.contains("check that the folder above it exists"), "{told}");
    }
}
