//! Files that hold secrets.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use tracing::warn;

/// Warns of a secret file that every user of this machine may read; `key` names it in the config. Blocks on the disk: for
/// start-up. Whether the file is there at all is for others to tell.
pub fn warn_of_readers(key: &str, path: &Path) {
    if let Ok(found) = std::fs::metadata(path)
        && found.mode() & OTHERS_READ != 0
    {
        let file = path.display();
        warn!(key, %file, "it holds a secret, and every user of this machine may read it: chmod o-rwx {file}");
    }
}

/// The bit of a file's mode by which those may read it who are neither its owner nor of its group.
const OTHERS_READ: u32 = 0o004;
