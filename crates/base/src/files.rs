//! Files with text from people and other programs: reading them in any common encoding, replacing them while running
//! programs read them, and locks among the programs that replace them.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

/// An exclusive lock, held until it is dropped. It is a file that only its owner may open, because anyone who may open
/// a file or a directory may lock it.
#[derive(Debug)]
#[must_use = "dropping a lock releases it"]
pub struct FileLock {
    path: PathBuf,
    _file: File,
}

impl FileLock {
    /// Creates and locks the file at a path. While another process holds the lock, waits until `timeout`. Blocks the
    /// thread.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::WouldBlock`] if another process still holds the lock, otherwise the system's error.
    pub fn acquire(path: &Path, timeout: Duration) -> io::Result<Self> {
        // A link or a pipe at this path is never opened.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let mut pauses = timeout.as_millis() / LOCK_PAUSE.as_millis();
        loop {
            let mut open = OpenOptions::new();
            let file =
                open.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags).open(path)?;
            match file.try_lock() {
                Ok(()) if is_at(&file, path)? => return Ok(Self { path: path.to_owned(), _file: file }),
                // The last holder has removed this file.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if pauses > 0 => {
                    pauses -= 1;
                    thread::sleep(LOCK_PAUSE);
                }
                Err(cause) => return Err(cause.into()),
            }
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Best effort: the next holder uses the file otherwise.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns true if a path has this open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    Ok(fs::symlink_metadata(path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino())))
}

/// Time between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Returns the path with an ending after its name, in the same directory.
pub fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Reads a file without its byte order mark. Every file that people edit is read by this function or [`decode`]. Blocks
/// on the disk.
///
/// # Errors
///
/// Returns the system's error, or that of [`decode`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    decode(fs::read(path)?)
}

/// Like [`read`], but the file must be text.
///
/// # Errors
///
/// Returns an error that names the line if the file is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    text(fs::read(path)?)
}

/// Returns the content of a file without the byte order mark that editors of Windows write.
///
/// # Errors
///
/// Returns [`io::ErrorKind::InvalidData`] if the content is UTF-16.
pub fn decode(mut content: Vec<u8>) -> io::Result<Vec<u8>> {
    match content.as_slice() {
        [0xef, 0xbb, 0xbf, ..] => Ok(content.split_off(3)),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "it is UTF-16; save it as UTF-8"))
        }
        _ => Ok(content),
    }
}

/// Like [`decode`], but the content must be text.
///
/// # Errors
///
/// Returns an error that names the line if the content is not UTF-8.
pub fn text(content: Vec<u8>) -> io::Result<String> {
    String::from_utf8(decode(content)?).map_err(|cause| {
        let valid = cause.utf8_error().valid_up_to();
        let line = cause.as_bytes().iter().take(valid).filter(|byte| **byte == b'\n').count() + 1;
        io::Error::new(io::ErrorKind::InvalidData, format!("line {line} is not UTF-8; save it as UTF-8"))
    })
}

/// Returns the hint for a file that cannot be read. Empty if the error has one.
pub fn hint(cause: &io::Error) -> &'static str {
    if cause.kind() == io::ErrorKind::InvalidData {
        ""
    } else {
        "; check the path, and that this user may read it"
    }
}

/// Writes a new file, for this user only. Blocks on the disk.
///
/// # Errors
///
/// [`io::ErrorKind::AlreadyExists`] if the file exists, otherwise the system's error; then a part may be written.
pub fn create_private(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Replaces a file by renaming, so that no reader sees a part of it, and a reader of the old file never sees the new
/// content. The new file gets that mode, and then what `prepare` does to it, before it has any content. Only one caller at
/// a time may replace a file, because the name of the new one is fixed. Blocks on the disk.
///
/// # Errors
///
/// Returns the system's error. The file is then unchanged, unless only writing its folder to the disk failed.
pub fn replace(
    path: &Path,
    mode: u32,
    content: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let fresh = with_suffix(path, ".new");
    let write = || {
        match fs::remove_file(&fresh) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        prepare(&file)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        // The new name survives a power failure.
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all()
    };
    write().inspect_err(|_| {
        // Best effort: the next call removes it otherwise.
        let _ = fs::remove_file(&fresh);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use super::*;

    #[test]
    fn a_lock_excludes_others_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        let held = FileLock::acquire(&path, Duration::ZERO).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let other = FileLock::acquire(&path, Duration::ZERO).unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::WouldBlock);
        drop(held);
        assert!(!path.exists());
        // The file of a killed process is no lock.
        fs::write(&path, "").unwrap();
        drop(FileLock::acquire(&path, Duration::ZERO).unwrap());
        let target = dir.path().join("target");
        symlink(&target, &path).unwrap();
        FileLock::acquire(&path, Duration::ZERO).unwrap_err();
        assert!(!target.exists(), "a link is not followed");
    }

    #[test]
    fn only_one_of_several_threads_holds_the_lock_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (path, is_held) = (dir.path().join("x.lock"), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = FileLock::acquire(&path, Duration::from_secs(60)).unwrap();
                        assert!(!is_held.swap(true, SeqCst));
                        thread::yield_now();
                        is_held.store(false, SeqCst);
                    }
                });
            }
        });
    }

    #[test]
    fn a_byte_order_mark_is_ignored_and_other_encodings_are_errors() {
        let read = |content: &[u8]| text(content.to_vec()).map_err(|cause| cause.to_string());
        assert_eq!(read(b"\xef\xbb\xbfnode1:a\n").as_deref(), Ok("node1:a\n"));
        assert_eq!(read("a\u{feff}".as_bytes()).as_deref(), Ok("a\u{feff}"), "only at the start");
        assert_eq!(read(b"\xef\xbb").unwrap_err(), "line 1 is not UTF-8; save it as UTF-8");
        assert_eq!(read(b"a\nb\n\xfcber\n").unwrap_err(), "line 3 is not UTF-8; save it as UTF-8");
        for mark in [[0xff, 0xfe], [0xfe, 0xff]] {
            assert_eq!(read(&[&mark[..], b"a\0"].concat()).unwrap_err(), "it is UTF-16; save it as UTF-8");
        }
    }
}
