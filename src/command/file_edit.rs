//! Edits files that a running program reads.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::{CommandError, CommandResult};
use tunnel_base::files::{self, FileLock, with_suffix};

/// A text file that is being edited. A second edit of it is refused until this one is dropped.
#[derive(Debug)]
pub(crate) struct FileEdit {
    /// The path without symbolic links, so that a link stays.
    path: PathBuf,
    /// The text that it had.
    pub(crate) text: String,
    _lock: FileLock,
}

impl FileEdit {
    /// Locks a file, and reads it. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read as text, or another edit is active.
    pub(crate) fn start(path: &Path) -> CommandResult<Self> {
        let unreadable = |cause: io::Error| {
            CommandError::unusable(format!("cannot read {}: {cause}; check the path", path.display()))
        };
        let real = fs::canonicalize(path).map_err(unreadable)?;
        let lock = FileLock::acquire(&with_suffix(&real, ".lock"), Duration::ZERO).map_err(|cause| {
            CommandError::cannot_write(match cause.kind() {
                io::ErrorKind::WouldBlock => {
                    format!("another command is changing {}; wait for it", real.display())
                }
                _ => cannot_replace(&real, &cause),
            })
        })?;
        let text = files::read_text(&real).map_err(unreadable)?;
        Ok(Self { path: real, text, _lock: lock })
    }

    /// Replaces the file like [`replace`].
    pub(crate) fn replace(&self, text: &str) -> CommandResult<()> {
        replace(&self.path, text)
    }
}

/// Replaces a file at once, so that no reader sees a part of it. Owner and mode stay. Blocks on the disk.
///
/// # Errors
///
/// Returns the system's error. The file is then unchanged, unless only writing its folder to the disk failed.
pub(crate) fn replace(path: &Path, text: &str) -> CommandResult<()> {
    let keep_owner_and_mode = |file: &File| {
        let before = fs::metadata(path)?;
        let now = file.metadata()?;
        if (now.uid(), now.gid()) != (before.uid(), before.gid()) {
            fchown(file, Some(before.uid()), Some(before.gid()))?;
        }
        file.set_permissions(before.permissions())
    };
    files::replace(path, 0o600, text.as_bytes(), keep_owner_and_mode)
        .map_err(|cause| CommandError::cannot_write(cannot_replace(path, &cause)))
}

fn cannot_replace(path: &Path, cause: &io::Error) -> String {
    let hint = "run this as root or as the file's owner, and check that the disk is not full";
    format!("cannot replace {}: {cause}; {hint}", path.display())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_edit_keeps_mode_and_symlink_and_excludes_a_concurrent_edit() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        let edit = FileEdit::start(&link).unwrap();
        assert_eq!(edit.text, "old");
        assert!(FileEdit::start(&file).unwrap_err().text.contains("another command is changing"));
        edit.replace("new").unwrap();
        drop(edit);
        assert_eq!(fs::read_to_string(&link).unwrap(), "new");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no other file is left");
        let none = FileEdit::start(&dir.path().join("none")).unwrap_err();
        assert!(none.text.contains("cannot read"), "{none}");
    }
}
