//! Listening on a unix socket: a file that only its owner may open.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use super::{Accept, BACKLOG, accept_next};

/// A listening unix socket, whose file goes with it.
#[derive(Debug)]
pub struct LocalListener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, by which it is known to be ours.
    file: (u64, u64),
}

/// Why a path cannot be listened on: the path, the cause, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum LocalBindError {
    /// A process answers there.
    #[error("another program listens on {0}: stop it, or choose another path")]
    Taken(PathBuf),
    /// Something else has that name.
    #[error("{0} exists and is no socket: remove it, or choose another path")]
    NoSocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}: {cause}; check the directory, and that this user may write to it")]
    System {
        /// The path asked for.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

impl LocalListener {
    /// Listens on a path, whose file nobody but its owner may open. The file of a process that is gone is replaced. Waits
    /// a moment for another program that begins to listen in the same directory: for start-up.
    ///
    /// # Errors
    ///
    /// Another process listens there, another kind of file has the path, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, LocalBindError> {
        let failed = |cause| LocalBindError::System { path: path.into(), cause };
        // Of two that start at once, the second would else remove what the first has just made of the file of a third.
        let _alone = lock_directory(path).map_err(failed)?;
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(LocalBindError::NoSocket(path.into())),
            Ok(_) if answers(path).map_err(failed)? => return Err(LocalBindError::Taken(path.into())),
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

impl Accept for LocalListener {
    type Stream = UnixStream;

    fn at(&self) -> impl fmt::Display {
        self.path.display()
    }

    async fn accept(&self) -> (UnixStream, SocketAddr) {
        let (stream, _) = accept_next(self.path.display(), || self.socket.accept()).await;
        (stream, (Ipv4Addr::LOCALHOST, 0).into())
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        // A newer process may have put its own there.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A socket whose file will be its owner's alone: the system gives a file the mode of its socket. To change the file's
/// own mode would be to change that of whatever has its path by then.
fn private_socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let file = File::from(OwnedFd::from(socket));
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(OwnedFd::from(file).into())
}

/// Waits until no other program begins to listen in the directory of a path; none does until the result is dropped.
fn lock_directory(path: &Path) -> io::Result<File> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir = File::open(dir)?;
    for _ in 0..LOCK_TRIES {
        match dir.try_lock() {
            Ok(()) => return Ok(dir),
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(cause)) => return Err(cause),
        }
    }
    Err(io::Error::other("another program locks its directory"))
}

/// Whether somebody listens on a socket's file.
fn answers(path: &Path) -> io::Result<bool> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A full queue must not keep us waiting.
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

/// How often the lock is tried for, two seconds in all: to begin to listen takes much less.
const LOCK_TRIES: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_its_owners_and_its_file_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        let listener = LocalListener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let (_client, (_, from)) =
            tokio::join!(async { UnixStream::connect(&path).await.unwrap() }, listener.accept());
        assert!(from.ip().is_loopback());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn the_file_of_a_process_that_is_gone_is_taken_over_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let first = LocalListener::bind(&path).unwrap();
        let taken = LocalListener::bind(&path).unwrap_err().to_string();
        assert!(taken.contains("another program listens on") && taken.contains("egress.sock"), "{taken}");
        // What the first one leaves behind at its end is the second one's file.
        fs::remove_file(&path).unwrap();
        let _second = LocalListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn the_file_is_its_owners_from_its_first_moment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        private_socket().unwrap().bind(&SockAddr::unix(&path).unwrap()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn of_two_that_start_at_once_one_listens_and_the_other_is_told_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        for _ in 0..100 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let (start, runtime) = (std::sync::Barrier::new(2), tokio::runtime::Handle::current());
            let bind = || {
                let _inside = runtime.enter();
                start.wait();
                LocalListener::bind(&path)
            };
            let both = thread::scope(|scope| {
                let both = [scope.spawn(bind), scope.spawn(bind)];
                both.map(|one| one.join().unwrap())
            });
            let (bound, failed): (Vec<_>, Vec<_>) = both.into_iter().partition(Result::is_ok);
            assert_eq!((bound.len(), failed.len()), (1, 1));
            assert!(matches!(failed[0], Err(LocalBindError::Taken(_))), "{failed:?}");
            UnixStream::connect(&path).await.unwrap();
        }
    }

    #[tokio::test]
    async fn what_a_link_leads_to_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (link, file) = (dir.path().join("egress.sock"), dir.path().join("file"));
        fs::write(&file, "precious").unwrap();
        for at in [&file, &dir.path().join("nothing")] {
            std::os::unix::fs::symlink(at, &link).unwrap();
            let refused = LocalListener::bind(&link).unwrap_err().to_string();
            assert!(refused.contains("is no socket"), "{refused}");
            fs::remove_file(&link).unwrap();
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn what_cannot_be_listened_on_is_told_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let refused = LocalListener::bind(&file).unwrap_err().to_string();
        assert!(refused.contains("is no socket") && file.exists(), "{refused}");
        let nowhere = LocalListener::bind(&dir.path().join("a/b")).unwrap_err().to_string();
        assert!(nowhere.contains("check the directory"), "{nowhere}");
        let long = LocalListener::bind(&dir.path().join("x".repeat(120))).unwrap_err().to_string();
        assert!(long.contains("cannot listen on"), "{long}");
    }
}
