//! Files that running programs read while they are replaced.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::Path;

/// Replaces a file by renaming, so that no reader sees a part of it, and a reader of the old file never sees the new
/// text. With `mode` the new file gets that mode; without it the file must exist, and its owner and mode stay. Blocks on
/// the disk.
///
/// # Errors
///
/// Returns the system's error. The file is then unchanged.
pub fn replace(path: &Path, mode: Option<u32>, text: &str) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let write = || {
        match fs::remove_file(&fresh) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
        let create = |mode| OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh);
        let mut file = match mode {
            Some(mode) => create(mode)?,
            None => {
                let (before, file) = (fs::metadata(path)?, create(0o600)?);
                let now = file.metadata()?;
                if (now.uid(), now.gid()) != (before.uid(), before.gid()) {
                    fchown(&file, Some(before.uid()), Some(before.gid()))?;
                }
                file.set_permissions(before.permissions())?;
                file
            }
        };
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().inspect_err(|_| {
        // Best effort: the next call removes it otherwise.
        let _ = fs::remove_file(&fresh);
    })
}
