//! Records in a hosts file that several pods, and people, share.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::lines::{merged, pods};
use crate::registry::shared_file::{self, SharedFileError};

/// Our lines in a hosts file: `<address>    <name>`. Every other byte of it is left as it is.
#[derive(Debug, Clone)]
pub struct Hosts {
    file: PathBuf,
    pod: IpAddr,
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
    pub async fn write(&self, records: BTreeSet<String>) -> Result<(), SharedFileError> {
        let Self { file, pod } = self.clone();
        shared_file::in_background(move || write(&file, pod, &records)).await
    }
}

fn write(file: &Path, pod: IpAddr, records: &BTreeSet<String>) -> Result<(), SharedFileError> {
    // Where a link leads is replaced, not the link.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let _held = shared_file::lock(file)?;
    let old = shared_file::content(file)?;
    let new = merged(old.as_deref().unwrap_or_default(), pod, records);
    if old.as_ref() == Some(&new) {
        return Ok(());
    }
    shared_file::replace(file, MODE, &new)
}

/// The mode of a new file: for every reader, as DNS servers are.
const MODE: u32 = 0o666;

/// How often we look whether our lines still stand: somebody may have written the file anew.
pub(super) const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

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
