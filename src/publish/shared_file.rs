//! A file that several processes change one at a time, and that readers always see complete.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::time::Duration;

use tunnel_base::files::{self, FileLock, with_suffix};

/// Runs blocking work on a suitable thread. Not cancel safe: the work continues without its caller.
pub(crate) async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|cause| Err(format!("the file was not written: {cause}")))
}

/// Creates the directory of a new file, accessible for this user only. Ignores errors, because writing the file then
/// reports them.
pub(crate) fn make_directory(file: &Path) {
    if let Some(dir) = file.parent() {
        let _ = DirBuilder::new().mode(0o700).create(dir);
    }
}

/// Locks the file until the result is dropped. For a symbolic link, the lock file is next to the target.
pub(crate) fn lock(file: &Path) -> Result<FileLock, String> {
    let path = with_suffix(file, ".lock");
    FileLock::acquire(&path, LOCK_TIMEOUT).map_err(|cause| match cause.kind() {
        io::ErrorKind::WouldBlock => format!(
            "{} has been locked by another process for more than {LOCK_TIMEOUT:?}; find it with `fuser`",
            path.display()
        ),
        _ => failed(&path)(cause),
    })
}

/// Returns the content of the file, or `None` if it does not exist.
pub(crate) fn content(file: &Path) -> Result<Option<Vec<u8>>, String> {
    match files::read(file) {
        Ok(text) => Ok(Some(text)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(failed(file)(cause)),
    }
}

/// Replaces the file atomically, even in case of a power failure. `mode` is the mode of a new file. The caller must
/// hold the [`lock`].
pub(crate) fn replace(file: &Path, mode: u32, text: &[u8]) -> Result<(), String> {
    let keep_mode = |new: &File| match fs::metadata(file) {
        Ok(old) => new.set_permissions(old.permissions()),
        Err(_) => Ok(()),
    };
    files::replace(file, mode, text, keep_mode).map_err(failed(file))
}

/// Returns a conversion of the system's errors about that file.
pub(crate) fn failed(path: &Path) -> impl Fn(io::Error) -> String {
    move |cause| {
        let path = path.display();
        format!("{path}: {cause}; check that its directory exists, is not full and is writable for this user")
    }
}

/// Timeout for the lock. Other writers take a few milliseconds each.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
