//! Files that hold secrets.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use tracing::warn;

/// Warns of a secret file that every user of this machine may read; `key` names it in the config. Ignores a missing
/// file. Blocks on the disk: for start-up.
pub fn warn_of_readers(key: &str, path: &Path) {
    if let Ok(found) = std::fs::metadata(path)
        && found.mode() & OTHERS_READ != 0
    {
        let file = path.display();
        warn!(key, %file, "it holds a secret, and every user of this machine may read it: chmod o-rwx {file}");
    }
}

/// The mode bit that lets every user read a file.
const OTHERS_READ: u32 = 0o004;
