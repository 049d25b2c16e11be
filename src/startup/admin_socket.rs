//! Default locations of the admin sockets of a machine's programs.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use tunnel_net::unix_accept::{UnixAccept, UnixBindError};

/// Directories for admin sockets, the preferred one first.
#[derive(Debug)]
pub struct SocketDirs {
    /// For programs of root, and of the user that owns the directory.
    shared: PathBuf,
    /// For programs of this user only.
    own: Vec<PathBuf>,
    user: u32,
}

impl SocketDirs {
    /// Returns the directories of this process's user. `runtime` is `XDG_RUNTIME_DIR`, which is ignored if another user
    /// owns it.
    pub fn of_user(runtime: Option<&Path>) -> Self {
        let user = rustix::process::geteuid().as_raw();
        let runtime = runtime.filter(|dir| dir.is_absolute() && check_private(dir, user).is_ok());
        let temporary = Path::new(TEMPORARY).join(format!("tunnel-{user}"));
        let own = runtime.map(|dir| dir.join("tunnel")).into_iter().chain([temporary]).collect();
        Self { shared: RUN_DIR.into(), own, user }
    }

    /// Listens at `name.sock`, in the first usable directory. If another process listens there, the file is
    /// `name-2.sock`, and so on.
    ///
    /// # Errors
    ///
    /// Returns the reason for each directory.
    pub fn bind(&self, name: &str) -> Result<UnixAccept, String> {
        let mut reasons = Vec::new();
        for dir in std::iter::once(&self.shared).chain(&self.own) {
            let made = if *dir == self.shared { self.make_shared() } else { self.make_own(dir) };
            let bound = match made {
                Ok(()) => bind_free(dir, name).map_err(|cause| cause.to_string()),
                Err(cause) => Err(format!("{}: {cause}", dir.display())),
            };
            match bound {
                Ok(listener) => return Ok(listener),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; "))
    }

    /// Returns the sockets of programs with these names that this user can trust. Some programs may have ended.
    pub fn sockets(&self, names: &[&str]) -> Vec<PathBuf> {
        let own = self.own.iter().filter(|dir| check_private(dir, self.user).is_ok());
        let dirs = std::iter::once(&self.shared).chain(own);
        let mut found: Vec<_> = dirs.flat_map(|dir| sockets_in(dir, names)).collect();
        // Servers before edges, in any directory.
        found.sort_by_key(|(name, _)| *name);
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// Creates the shared directory if this user is root; for other users it must exist.
    fn make_shared(&self) -> io::Result<()> {
        if self.user != 0 {
            return Ok(());
        }
        make(&self.shared, 0o755)
    }

    /// Creates this user's directory. In `/tmp` another user may have created one of this name, and would own the
    /// sockets in it.
    fn make_own(&self, dir: &Path) -> io::Result<()> {
        make(dir, 0o700)?;
        check_private(dir, self.user)
    }
}

fn make(dir: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(dir) {
        Err(cause) if cause.kind() != io::ErrorKind::AlreadyExists => Err(cause),
        _ => Ok(()),
    }
}

/// Checks that a directory belongs to this user, and that no other user may enter it.
fn check_private(dir: &Path, user: u32) -> io::Result<()> {
    let found = fs::symlink_metadata(dir)?;
    if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(
        "expected a directory of this user that no other user may enter; remove it or set its mode to 0700",
    ))
}

fn bind_free(dir: &Path, name: &str) -> Result<UnixAccept, UnixBindError> {
    let mut bound = UnixAccept::bind(&dir.join(format!("{name}.sock")));
    for number in 2..=MAX_SOCKETS {
        if !matches!(bound, Err(UnixBindError::Taken(_))) {
            break;
        }
        bound = UnixAccept::bind(&dir.join(format!("{name}-{number}.sock")));
    }
    bound
}

/// Returns the sockets in a directory, each with the index of its name in `names` and its number.
fn sockets_in(dir: &Path, names: &[&str]) -> Vec<((usize, u32), PathBuf)> {
    let files: Vec<_> = match fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect(),
        // The sockets exist. A caller that connects to one gets the system's error.
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
            names.iter().map(|name| format!("{name}.sock").into()).collect()
        }
        Err(_) => Vec::new(),
    };
    let place = |file: &str| {
        let stem = file.strip_suffix(".sock")?;
        let (name, number) = match stem.rsplit_once('-') {
            Some((name, number)) => (name, number.parse().ok()?),
            None => (stem, 1),
        };
        Some((names.iter().position(|one| *one == name)?, number))
    };
    let mut found: Vec<_> =
        files.iter().filter_map(|file| Some((place(file.to_str()?)?, dir.join(file)))).collect();
    found.sort();
    found
}

/// The directory that systemd creates for the packaged units.
const RUN_DIR: &str = "/run/tunnel";
/// Every user may create a directory here. Not `TMPDIR`, which may differ between a command and a service.
const TEMPORARY: &str = "/tmp";
/// Maximum number of sockets with one name in a directory: each program tries them in turn.
const MAX_SOCKETS: u32 = 32;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    const NAMES: [&str; 2] = ["server", "edge"];

    fn dirs(place: &Path) -> SocketDirs {
        let user = rustix::process::geteuid().as_raw();
        SocketDirs { shared: place.join("run"), own: vec![place.join("own")], user }
    }

    fn bound(dirs: &SocketDirs, name: &str) -> (UnixAccept, String) {
        use tunnel_net::listen::Accept as _;
        let listener = dirs.bind(name).unwrap();
        let at = listener.at().to_string();
        (listener, at)
    }

    #[tokio::test]
    async fn each_process_has_its_own_admin_socket_and_all_are_found() {
        let place = tempfile::tempdir().unwrap();
        let dirs = SocketDirs { user: 0, ..dirs(place.path()) };
        assert!(dirs.sockets(&NAMES).is_empty());
        let made: Vec<_> =
            ["edge", "server", "server", "edge", "server"].map(|name| bound(&dirs, name)).into();
        let at = |file: &str| place.path().join("run").join(file);
        let expected = ["server.sock", "server-2.sock", "server-3.sock", "edge.sock", "edge-2.sock"].map(at);
        fs::write(at("egress.sock"), "").unwrap();
        fs::write(at("server-x.sock"), "").unwrap();
        assert_eq!(dirs.sockets(&NAMES), expected);
        assert_eq!(dirs.sockets(&["server"]), expected[..3]);
        assert_eq!(fs::metadata(place.path().join("run")).unwrap().mode() & 0o777, 0o755);
        drop(made);
        assert_eq!(bound(&dirs, "server").1, expected[0].display().to_string());
    }

    #[tokio::test]
    async fn without_the_shared_directory_a_user_has_a_private_socket_directory() {
        let place = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let own = place.path().join("own");
        // The shared directory is never created.
        let dirs = SocketDirs { shared: place.path().join("no/run"), ..dirs(place.path()) };
        let (listener, at) = bound(&dirs, "edge");
        assert_eq!(at, own.join("edge.sock").display().to_string());
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        assert_eq!(dirs.sockets(&NAMES), [own.join("edge.sock")]);
        let other = SocketDirs { user: user + 1, ..dirs };
        assert!(other.sockets(&NAMES).is_empty(), "another user's socket is not trusted");
        let refused = other.bind("edge").unwrap_err().to_string();
        assert!(refused.contains("no other user may enter"), "{refused}");
        drop(listener);
    }

    #[tokio::test]
    async fn a_socket_directory_that_others_may_enter_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let dirs = SocketDirs { shared: place.path().join("no/run"), ..dirs(place.path()) };
        let own = place.path().join("own");
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(dirs.bind("edge").unwrap_err().to_string().contains("0700"));
        fs::remove_dir(&own).unwrap();
        let elsewhere = place.path().join("elsewhere");
        make(&elsewhere, 0o700).unwrap();
        symlink(&elsewhere, &own).unwrap();
        assert!(dirs.bind("edge").is_err(), "a symbolic link points elsewhere");
        assert!(fs::read_dir(&elsewhere).unwrap().next().is_none());
    }
}
