//! A file that several processes change, each in its turn, and that its readers see whole.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why such a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SharedFileError {
    /// Something else holds the lock, and for long. Usual cause: a pod that hangs in its disk.
    #[error("{} is locked by another process for more than {LOCK_PATIENCE:?}: see who holds it with `fuser`", .0.display())]
    Locked(PathBuf),
    /// The system refused a step.
    #[error("{}: {cause}; check that its directory exists, is not full, and that this user may write there", .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The writing task broke, which is a fault of ours.
    #[error("the file was not written: {0}")]
    Broken(String),
}

/// Does what blocks where it may. Not cancel safe: it goes on without its caller.
pub(super) async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SharedFileError> + Send + 'static,
) -> Result<T, SharedFileError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|cause| Err(SharedFileError::Broken(cause.to_string())))
}

/// Makes the directory of a new file, for this user alone. Where that fails, writing the file says why.
pub(super) fn make_directory(file: &Path) {
    if let Some(dir) = file.parent() {
        let _ = DirBuilder::new().mode(0o700).create(dir);
    }
}

/// The file's turn, until the result is dropped. Of links, it locks beside where they lead.
pub(super) fn lock(file: &Path) -> Result<File, SharedFileError> {
    let path = &beside(file, "lock");
    let mut open = OpenOptions::new();
    let lock = open.create(true).truncate(false).write(true).open(path).map_err(failed(path))?;
    for _ in 0..LOCK_PATIENCE.as_millis() / LOCK_PAUSE.as_millis() {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(cause)) => return Err(failed(path)(cause)),
        }
    }
    Err(SharedFileError::Locked(path.clone()))
}

/// What stands in it; `None`: there is none.
pub(super) fn content(file: &Path) -> Result<Option<Vec<u8>>, SharedFileError> {
    match fs::read(file) {
        Ok(text) => Ok(Some(text)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(failed(file)(cause)),
    }
}

/// Readers see the old text or the new one, whole, even after a power cut. `mode` is that of a file that is new. Only
/// for who holds the [`lock`].
pub(super) fn replace(file: &Path, mode: u32, text: &[u8]) -> Result<(), SharedFileError> {
    // One name is enough: only who holds the lock writes it, and what a dead process left is thrown away.
    let fresh = &beside(file, "new");
    let write = || {
        match fs::remove_file(fresh) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
        let mut writing = OpenOptions::new().write(true).create_new(true).mode(mode).open(fresh)?;
        if let Ok(old) = fs::metadata(file) {
            writing.set_permissions(old.permissions())?;
        }
        writing.write_all(text)?;
        writing.sync_all()?;
        fs::rename(fresh, file)?;
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all()
    };
    write().map_err(failed(fresh))
}

fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
}

fn failed(path: &Path) -> impl Fn(io::Error) -> SharedFileError {
    move |cause| SharedFileError::Io { path: path.to_owned(), cause }
}

/// Longest wait for other writers: each takes a few milliseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);
