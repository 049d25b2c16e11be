//! Records in a hosts file that several servers and people share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tracing::info;

use crate::publish::shared_file::{content, failed, in_background, lock, replace};
use tunnel_base::files::{self, with_suffix};
use tunnel_base::policy::hosts_lines::{merged, servers, without};
use tunnel_base::stores::{RecordStore, StoreFuture};

/// Our lines in a hosts file: `<address>    <name>`. Of other lines, only those of dead servers are removed.
///
/// Each server with lines also has a sign of life in a file beside it, a number that it changes with every check. So a
/// server is known to be dead without a link to it, and lines of people are never taken for those of a server.
#[derive(Debug)]
pub struct Hosts {
    file: PathBuf,
    server: IpAddr,
    seen: SeenLifeSigns,
}

/// The sign of life of each server, by its address.
type ServerHeartbeats = BTreeMap<IpAddr, String>;

/// The last sign of life of each server, and when it was first seen.
type SeenLifeSigns = HashMap<IpAddr, (String, Instant)>;

impl Hosts {
    /// Creates the lines of the server at this address.
    pub fn new(file: PathBuf, server: IpAddr) -> Self {
        Self { file, server, seen: SeenLifeSigns::new() }
    }
}

impl RecordStore for Hosts {
    /// Replaces our lines with these, and removes lines of servers without a sign of life for a while.
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> StoreFuture<'a, ()> {
        let Self { file, server, seen } = self;
        let file = file.clone();
        let server = *server;
        let seen = std::mem::take(seen);
        let now = Instant::now();
        let records = records.clone();
        Box::pin(async move {
            self.seen = in_background(move || write(&file, server, &records, seen, now)).await?;
            Ok(())
        })
    }

    fn withdraw(&mut self) -> StoreFuture<'_, ()> {
        self.write(&NO_RECORDS)
    }

    /// Returns the addresses that have lines in the form that servers write. Empty if the file cannot be read.
    fn servers(&self) -> BoxFuture<'_, BTreeSet<IpAddr>> {
        let text = tokio::fs::read(self.file.clone());
        Box::pin(async {
            text.await.and_then(files::decode).map_or_else(|_| BTreeSet::new(), |text| servers(&text))
        })
    }

    fn due(&self) -> Instant {
        Instant::now() + REWRITE_INTERVAL
    }
}

/// Updates the file. Takes and returns the signs of life of other servers.
fn write(
    file: &Path,
    server: IpAddr,
    records: &BTreeSet<String>,
    seen: SeenLifeSigns,
    now: Instant,
) -> Result<SeenLifeSigns, String> {
    // The target of a symbolic link is replaced, not the link.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let _held = lock(file)?;
    let signs_file = &with_suffix(file, ".signs");
    let mut signs = read_signs(signs_file)?;
    // Its own sign proves nothing to this server, which must not judge its own lines.
    signs.remove(&server);
    let seen = follow(seen, &signs, now);
    let dead: BTreeSet<_> =
        seen.iter().filter(|(_, (_, since))| *since + STALE_AFTER <= now).map(|(ip, _)| *ip).collect();
    let old = content(file)?;
    let mut new = merged(old.as_deref().unwrap_or_default(), server, records);
    if !dead.is_empty() {
        new = without(&new, &dead);
        info!(servers = ?dead, "removed lines of stopped servers");
    }
    // DNS servers read the whole file again after a write.
    if old.as_ref() != Some(&new) {
        replace(file, MODE, &new)?;
    }
    signs.retain(|ip, _| !dead.contains(ip));
    // Without lines there is nothing to remove should this server die.
    if !records.is_empty() {
        signs.insert(server, rand::random::<u64>().to_string());
    }
    write_signs(signs_file, &signs)?;
    Ok(seen)
}

/// Returns the signs of life with the time at which each was first seen.
fn follow(mut seen: SeenLifeSigns, signs: &ServerHeartbeats, now: Instant) -> SeenLifeSigns {
    let since = |(ip, sign): (&IpAddr, &String)| match seen.remove(ip) {
        Some((old, since)) if old == *sign => (*ip, (old, since)),
        _ => (*ip, (sign.clone(), now)),
    };
    signs.iter().map(since).collect()
}

/// Reads the lines `<address> <sign>` of the file with the signs of life. Other lines are ignored.
fn read_signs(file: &Path) -> Result<ServerHeartbeats, String> {
    let text = content(file)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let sign = |line: &str| {
        let (ip, sign) = line.split_once(' ')?;
        Some((ip.parse().ok()?, sign.to_owned()))
    };
    Ok(text.lines().filter_map(sign).collect())
}

/// Replaces the file with the signs of life, or removes it if nobody lives.
fn write_signs(file: &Path, signs: &ServerHeartbeats) -> Result<(), String> {
    if signs.is_empty() {
        return match fs::remove_file(file) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(failed(file)(cause)),
            _ => Ok(()),
        };
    }
    let text: String = signs.iter().map(|(ip, sign)| format!("{ip} {sign}\n")).collect();
    replace(file, SIGNS_MODE, text.as_bytes())
}

static NO_RECORDS: BTreeSet<String> = BTreeSet::new();

/// Mode of the file with the signs of life. Only servers read it.
const SIGNS_MODE: u32 = 0o600;

/// Mode of a new file: readable for all users, because DNS servers run as other users.
const MODE: u32 = 0o666;

/// Time between two checks of our lines: another program may have rewritten the file.
const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Time without a change after which a sign of life is a dead server's: three checks.
const STALE_AFTER: Duration = Duration::from_secs(30);

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
    async fn the_hosts_file_keeps_mode_and_symlink_and_is_created_if_missing() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("hosts"), dir.path().join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        Hosts::new(file.clone(), ip(1)).write(&names(&[])).await.unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        Hosts::new(link.clone(), ip(1)).write(&names(&["a"])).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "10.0.0.1    a\n");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[tokio::test]
    async fn a_byte_order_mark_in_a_hosts_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        fs::write(&file, "\u{feff}10.0.0.1    old\n127.0.0.1 localhost\n").unwrap();
        let mut hosts = Hosts::new(file.clone(), ip(1));
        assert_eq!(hosts.servers().await, BTreeSet::from([ip(1)]));
        hosts.write(&names(&["a"])).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "10.0.0.1    a\n127.0.0.1 localhost\n");
    }

    #[tokio::test]
    async fn a_missing_directory_of_the_hosts_file_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let error = Hosts::new(dir.path().join("no/hosts"), ip(1)).write(&names(&[])).await.unwrap_err();
        assert!(error.to_string().contains("check that its directory exists"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn lines_of_a_killed_server_are_removed_and_all_others_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        let people = "10.0.0.9    printer\n";
        fs::write(&file, people).unwrap();
        let pod = |last| Hosts::new(file.clone(), ip(last));
        let (mut killed, mut here, mut there) = (pod(1), pod(2), pod(3));
        let node = names(&["node"]);
        killed.write(&node).await.unwrap();
        let lives = async |pods: &mut [&mut Hosts], time: Duration| {
            for _ in 0..time.as_secs() / REWRITE_INTERVAL.as_secs() {
                tokio::time::advance(REWRITE_INTERVAL).await;
                for pod in &mut *pods {
                    pod.write(&node).await.unwrap();
                }
            }
        };
        let lines = || fs::read_to_string(&file).unwrap();
        lives(&mut [&mut here, &mut there, &mut killed], STALE_AFTER * 2).await;
        let all = lines();
        // Its last sign is first seen after one interval.
        lives(&mut [&mut here, &mut there], STALE_AFTER).await;
        assert_eq!(lines(), all, "a server may be late");
        lives(&mut [&mut here], REWRITE_INTERVAL).await;
        assert_eq!(lines(), format!("10.0.0.3    node\n10.0.0.2    node\n{people}"));
        killed.write(&node).await.unwrap();
        assert!(lines().contains("10.0.0.1    node\n"), "a server that was only stopped writes them again");
        lives(&mut [&mut there], STALE_AFTER * 2).await;
        assert_eq!(lines(), format!("10.0.0.3    node\n{people}"));
        for mut pod in [here, there] {
            pod.write(&names(&[])).await.unwrap();
        }
        assert_eq!(lines(), people);
        assert!(!dir.path().join("hosts.signs").exists(), "no sign remains");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_server_removes_lines_of_a_server_killed_earlier() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        Hosts::new(file.clone(), ip(1)).write(&names(&["a"])).await.unwrap();
        let mut later = Hosts::new(file.clone(), ip(2));
        later.write(&names(&["a"])).await.unwrap();
        tokio::time::advance(STALE_AFTER).await;
        later.write(&names(&["a"])).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "10.0.0.2    a\n");
    }

    #[test]
    fn eight_concurrent_writers_of_a_hosts_file_lose_no_lines() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts");
        let foreign = "127.0.0.1 localhost\n#CustomStart\n10.0.0.3    x\n#CustomEnd";
        fs::write(&file, foreign).unwrap();
        std::thread::scope(|scope| {
            for server in 1..=8_u8 {
                let file = &file;
                scope.spawn(move || {
                    for turn in 0..25 {
                        let mine = names(&[&format!("n{server}"), &format!("turn{turn}-{server}")]);
                        // On a busy machine a writer may wait longer for the others than it would in a server.
                        let written = loop {
                            match write(file, ip(server), &mine, SeenLifeSigns::new(), Instant::now()) {
                                Err(why)
                                    if why.to_string().contains("has been locked by another process") => {}
                                other => break other,
                            }
                        };
                        written.unwrap();
                        let now = fs::read_to_string(file).unwrap();
                        assert!(now.contains(&format!("10.0.0.{server}    turn{turn}-{server}\n")), "{now}");
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
