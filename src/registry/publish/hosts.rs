//! Records in a hosts file that several pods, and people, share.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::lines::{merged, pods};

/// Our lines in a hosts file: `<address>    <name>`. Every other byte of it is left as it is.
#[derive(Debug, Clone)]
pub struct Hosts {
    file: PathBuf,
    pod: IpAddr,
}

/// Why the hosts file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum HostsError {
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
    #[error("the hosts file was not written: {0}")]
    Broken(String),
}

impl Hosts {
    /// The lines of the pod at this address.
    pub fn new(file: PathBuf, pod: IpAddr) -> Self {
        Self { file, pod }
    }

    /// The addresses that have lines as pods write them; none if the file cannot be read.
    pub(super) async fn pods(&self) -> BTreeSet<IpAddr> {
        tokio::fs::read(&self.file).await.map_or_else(|_| BTreeSet::new(), |text| pods(&text))
    }

    /// Makes these our only lines. Not cancel safe: it goes on without its caller.
    pub async fn write(&self, records: BTreeSet<String>) -> Result<(), HostsError> {
        let Self { file, pod } = self.clone();
        let written = tokio::task::spawn_blocking(move || write(&file, pod, &records)).await;
        written.unwrap_or_else(|cause| Err(HostsError::Broken(cause.to_string())))
    }
}

fn write(file: &Path, pod: IpAddr, records: &BTreeSet<String>) -> Result<(), HostsError> {
    // Where a link leads is replaced, not the link.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let _held = lock(&beside(file, "lock"))?;
    let old = match fs::read(file) {
        Ok(text) => Some(text),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => None,
        Err(cause) => return Err(failed(file)(cause)),
    };
    let new = merged(old.as_deref().unwrap_or_default(), pod, records);
    if old.as_ref() == Some(&new) {
        return Ok(());
    }
    // One name is enough: only who holds the lock writes it, and what a dead process left is overwritten.
    let fresh = beside(file, "new");
    replace(file, &fresh, &new).map_err(failed(&fresh))
}

fn lock(path: &Path) -> Result<File, HostsError> {
    let mut open = OpenOptions::new();
    let lock = open.create(true).truncate(false).write(true).open(path).map_err(failed(path))?;
    for _ in 0..LOCK_PATIENCE.as_millis() / LOCK_PAUSE.as_millis() {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(cause)) => return Err(failed(path)(cause)),
        }
    }
    Err(HostsError::Locked(path.to_owned()))
}

/// Readers see the old text or the new one, whole, even after a power cut.
fn replace(file: &Path, fresh: &Path, text: &[u8]) -> io::Result<()> {
    let mut writing = File::create(fresh)?;
    if let Ok(old) = fs::metadata(file) {
        writing.set_permissions(old.permissions())?;
    }
    writing.write_all(text)?;
    writing.sync_all()?;
    fs::rename(fresh, file)?;
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
}

fn failed(path: &Path) -> impl Fn(io::Error) -> HostsError {
    move |cause| HostsError::Io { path: path.to_owned(), cause }
}

/// How often we look whether our lines still stand: somebody may have written the file anew.
pub(super) const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Longest wait for other writers: each takes a few milliseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[tokio::test]
    async fn the_file_keeps_its_mode_and_its_link_and_needs_not_exist() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("hosts"), dir.path().join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        Hosts::new(file.clone(), ip(1)).write(names(&[])).await.unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        Hosts::new(link.clone(), ip(1)).write(names(&["a"])).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "10.0.0.1    a\n");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[tokio::test]
    async fn a_directory_that_is_not_there_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let told = Hosts::new(dir.path().join("no/hosts"), ip(1)).write(names(&[])).await.unwrap_err();
        assert!(told.to_string().contains("check that its directory exists"), "{told}");
    }

    #[test]
    fn eight_writers_at_once_lose_nothing_of_one_another() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        let foreign = "127.0.0.1 localhost\n#CustomStart\n10.0.0.3    x\n#CustomEnd";
        fs::write(&file, foreign).unwrap();
        std::thread::scope(|scope| {
            for pod in 1..=8_u8 {
                let file = &file;
                scope.spawn(move || {
                    for turn in 0..25 {
                        let mine = names(&[&format!("n{pod}"), &format!("turn{turn}-{pod}")]);
                        write(file, ip(pod), &mine).unwrap();
                        let now = fs::read_to_string(file).unwrap();
                        assert!(now.contains(&format!("10.0.0.{pod}    turn{turn}-{pod}\n")), "{now}");
                        assert!(now.ends_with(foreign), "{now}");
                    }
                });
            }
        });
        let mut left: Vec<String> = fs::read_to_string(&file).unwrap().lines().map(str::to_owned).collect();
        left.sort();
        let mut expected: Vec<String> = foreign.lines().map(str::to_owned).collect();
        expected.extend(
            (1..=8).flat_map(|p| [format!("10.0.0.{p}    n{p}"), format!("10.0.0.{p}    turn24-{p}")]),
        );
        expected.sort();
        assert_eq!(left, expected);
    }
}
