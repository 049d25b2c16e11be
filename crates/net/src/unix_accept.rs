//! Listening on a Unix socket: a file that only its owner may open.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use crate::listen::{Accept, BACKLOG, accept_next};
use tunnel_base::files::{FileLock, with_suffix};

/// A listening Unix socket. Its file is removed on drop.
#[derive(Debug)]
pub struct UnixAccept {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, to recognise it.
    file: (u64, u64),
}

/// The error of a path that cannot be listened on, with a hint.
#[derive(Debug, thiserror::Error)]
pub enum UnixBindError {
    /// Another process listens there.
    #[error("another program listens on {0}; stop it or choose another path")]
    Taken(PathBuf),
    /// The path is not a socket.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NoSocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}: {cause}; check that the directory exists and is writable")]
    System {
        /// The requested path.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

impl UnixAccept {
    /// Listens on a path with a file that only its owner may open. Replaces the file of a terminated process.
    ///
    /// Waits briefly while another program starts listening there. Only for startup, as it blocks.
    ///
    /// # Errors
    ///
    /// Another process listens there, another kind of file has the path, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, UnixBindError> {
        let failed = |cause| UnixBindError::System { path: path.into(), cause };
        // Otherwise, if two start at once, the second could remove the socket that the first has just put in place of
        // an old one.
        let _alone = FileLock::acquire(&with_suffix(path, ".lock"), LOCK_TIMEOUT).map_err(failed)?;
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(UnixBindError::NoSocket(path.into())),
            Ok(_) if is_listening(path).map_err(failed)? => return Err(UnixBindError::Taken(path.into())),
            Ok(_) => fs::remove_file(path).map_err(failed)?,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed(cause)),
        }
        Self::bind_new(path).map_err(failed)
    }

    fn bind_new(path: &Path) -> io::Result<Self> {
        let socket = private_socket()?;
        socket.bind(&SockAddr::unix(path)?)?;
        let backlog = i32::try_from(BACKLOG).unwrap_or(i32::MAX);
        socket.listen(backlog)?;
        let socket = UnixListener::from_std(socket.into())?;
        Ok(Self { socket, path: path.into(), file: identity(path)? })
    }
}

impl Accept for UnixAccept {
    type AnyStream = UnixStream;

    fn at(&self) -> impl fmt::Display {
        self.path.display()
    }

    async fn accept(&self) -> (UnixStream, SocketAddr) {
        let (stream, _) = accept_next(self.path.display(), || self.socket.accept()).await;
        (stream, (Ipv4Addr::LOCALHOST, 0).into())
    }
}

impl Drop for UnixAccept {
    fn drop(&mut self) {
        // A newer process may have replaced it.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates a socket with a file that only its owner can open, because the system gives the file the mode of its socket.
///
/// Changing the file's own mode later could change another file that has the path by then.
fn private_socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let file = File::from(OwnedFd::from(socket));
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(OwnedFd::from(file).into())
}

/// Returns true if a process listens on a socket's file.
fn is_listening(path: &Path) -> io::Result<bool> {
    // Must not block on a full queue.
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Ok(()) => Ok(true),
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(cause) => Err(cause),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Timeout for the lock. Starting to listen takes much less.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_unix_socket_is_private_and_its_file_is_removed_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        let listener = UnixAccept::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let (_client, (_, from)) =
            tokio::join!(async { UnixStream::connect(&path).await.unwrap() }, listener.accept());
        assert!(from.ip().is_loopback());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_file_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the file remains");
        let first = UnixAccept::bind(&path).unwrap();
        let taken = UnixAccept::bind(&path).unwrap_err().to_string();
        assert!(taken.contains("another program listens on") && taken.contains("egress.sock"), "{taken}");
        // The file at this path now belongs to the second listener, so the first must not remove it.
        fs::remove_file(&path).unwrap();
        let _second = UnixAccept::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_foreign_lock_on_the_directory_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let held = File::open(dir.path()).unwrap();
        held.lock().unwrap();
        let _listener = UnixAccept::bind(&dir.path().join("egress.sock")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no lock is left");
    }

    #[test]
    fn a_socket_file_is_private_as_soon_as_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        private_socket().unwrap().bind(&SockAddr::unix(&path).unwrap()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn of_two_concurrent_binds_one_listens_and_the_other_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        for _ in 0..100 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let (start, runtime) = (std::sync::Barrier::new(2), tokio::runtime::Handle::current());
            let bind = || {
                let _inside = runtime.enter();
                start.wait();
                UnixAccept::bind(&path)
            };
            let both = thread::scope(|scope| {
                let both = [scope.spawn(bind), scope.spawn(bind)];
                both.map(|one| one.join().unwrap())
            });
            let (bound, failed): (Vec<_>, Vec<_>) = both.into_iter().partition(Result::is_ok);
            assert_eq!((bound.len(), failed.len()), (1, 1));
            assert!(matches!(failed[0], Err(UnixBindError::Taken(_))), "{failed:?}");
            UnixStream::connect(&path).await.unwrap();
        }
    }

    #[tokio::test]
    async fn the_destination_of_a_symlink_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (link, file) = (dir.path().join("egress.sock"), dir.path().join("file"));
        fs::write(&file, "precious").unwrap();
        for at in [&file, &dir.path().join("nothing")] {
            std::os::unix::fs::symlink(at, &link).unwrap();
            let refused = UnixAccept::bind(&link).unwrap_err().to_string();
            assert!(refused.contains("is not a socket"), "{refused}");
            fs::remove_file(&link).unwrap();
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn an_unusable_socket_path_is_an_error_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let refused = UnixAccept::bind(&file).unwrap_err().to_string();
        assert!(refused.contains("is not a socket") && file.exists(), "{refused}");
        let nowhere = UnixAccept::bind(&dir.path().join("a/b")).unwrap_err().to_string();
        assert!(nowhere.contains("check that the directory"), "{nowhere}");
        let long = UnixAccept::bind(&dir.path().join("x".repeat(120))).unwrap_err().to_string();
        assert!(long.contains("cannot listen on"), "{long}");
    }
}
