//! What this program needs of Linux. `macos.rs` beside it has the same names.

#[path = "linux/announcement.rs"]
pub mod announcement;
#[path = "linux/netlink.rs"]
pub mod netlink;
#[path = "linux/networks.rs"]
pub(crate) mod networks;
#[path = "linux/sockets.rs"]
pub mod sockets;

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;
use std::{fs, future, io};

use aws_lc_rs::digest::{SHA256, digest};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::system::sysinfo;
use rustix::time::{ClockId, clock_gettime};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Marks the packets of a socket, for nftables rules. Requires CAP_NET_ADMIN.
pub(crate) fn set_mark(socket: &SockRef<'_>, mark: u32) -> io::Result<()> {
    socket.set_mark(mark)
}

/// Limits the unsent bytes in the kernel.
pub(crate) fn limit_unsent(socket: &SockRef<'_>, bytes: u32) -> io::Result<()> {
    socket.set_tcp_notsent_lowat(bytes)
}

/// Fails the connection when sent bytes stay unacknowledged for this time.
pub(crate) fn limit_silence(socket: &SockRef<'_>, time: Duration) -> io::Result<()> {
    socket.set_tcp_user_timeout(Some(time))
}

/// Selects the kernel's congestion control.
pub(crate) fn set_congestion(socket: &SockRef<'_>, name: &str) -> io::Result<()> {
    socket.set_tcp_congestion(name.as_bytes())
}

/// Completes once the remote has closed its socket, so that it accepts no bytes either. A remote that has only finished
/// its direction does. Cancel safe.
pub(crate) async fn closed(socket: &UnixStream) {
    let ended = socket.ready(Interest::PRIORITY).await;
    if ended.is_ok() && socket.ready(Interest::WRITABLE).await.is_ok_and(|ready| !ready.is_write_closed()) {
        future::pending().await
    }
}

/// Returns the seconds for which this machine has been suspended since it was started: one clock stops meanwhile.
pub fn suspended() -> i64 {
    clock_gettime(ClockId::Boottime).tv_sec - clock_gettime(ClockId::Monotonic).tv_sec
}

/// Ends this process with its parent, also if that is killed.
pub fn end_with_parent() {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

/// A number of this machine, and one of its boot. They do not reveal the IDs of which they are made.
pub static BOOT: LazyLock<Option<u128>> = LazyLock::new(|| {
    let hash = |file| {
        let id = fs::read_to_string(file).ok()?;
        let hash = digest(&SHA256, format!("tunnel {id}").as_bytes());
        Some(u128::from(u64::from_be_bytes(*hash.as_ref().first_chunk()?)))
    };
    Some(hash("/etc/machine-id")? << 64 | hash("/proc/sys/kernel/random/boot_id")?)
});

/// Returns the memory in bytes that this process may use: the smallest of `limit`, the limits of its control groups and
/// their parents (v1 and v2), and all memory of the machine.
pub fn memory(limit: Option<usize>) -> usize {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let machine = sysinfo();
    // On 32 bits the first is narrower than the product.
    let all = u128::from(machine.totalram) * u128::from(machine.mem_unit);
    let all = u64::try_from(all).unwrap_or(u64::MAX);
    let least = group_limits(&groups, Path::new("/sys/fs/cgroup")).into_iter().fold(all, u64::min);
    usize::try_from(least).unwrap_or(usize::MAX).min(limit.unwrap_or(usize::MAX))
}

/// Keeps the kernel from giving this process pages of 2 MiB, of which it would use little.
pub fn use_small_pages() {
    // Without it, the process only takes more memory.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

/// Returns the limits of a process's control groups below `root`, given its `/proc/self/cgroup`. In a container a group's
/// own path may be missing, but the root always exists and then holds the group's limit.
fn group_limits(groups: &str, root: &Path) -> Vec<u64> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Next to version 1, version 2 is mounted at `unified`.
        let places: &[_] = match controllers {
            "" => &[("", "memory.max"), ("unified", "memory.max")],
            _ if controllers.split(',').any(|one| one == "memory") => &[("memory", "memory.limit_in_bytes")],
            _ => continue,
        };
        for (place, name) in places {
            for group in Path::new(path.trim_start_matches('/')).ancestors() {
                let limit = fs::read_to_string(root.join(place).join(group).join(name));
                // No limit is the word "max", or in version 1 a number that is larger than any machine.
                limits.extend(limit.ok().and_then(|text| text.trim().parse::<u64>().ok()));
            }
        }
    }
    limits
}

/// Whether [`sockets::remote_user`] finds the user.
pub const KNOWS_REMOTE_USERS: bool = true;

/// The maximum limit of open files where the hard one is no number.
pub(crate) const MAX_FILES: Option<u64> = None;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limits_are_read_from_the_cgroup_and_its_parents() {
        let root = tempfile::tempdir().unwrap();
        let limits = |files: &[(&str, &str)], groups: &str| {
            let _ = fs::remove_dir_all(root.path());
            for (file, text) in files {
                let file = root.path().join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, format!("{text}\n")).unwrap();
            }
            group_limits(groups, root.path())
        };
        // Version 2, in nested slices of which some have no limit. Its root has no file, except in a container.
        let files = [
            ("a.slice/memory.max", "300"),
            ("a.slice/b.slice/memory.max", "max"),
            ("a.slice/b.slice/c.service/memory.max", "200"),
        ];
        assert_eq!(limits(&files, "0::/a.slice/b.slice/c.service\n"), [200, 300]);
        assert_eq!(limits(&files[..2], "0::/a.slice/b.slice/c.service\n"), [300]);
        assert_eq!(limits(&files[1..2], "0::/a.slice/b.slice\n"), [0; 0]);
        assert_eq!(limits(&[("memory.max", "100")], "0::/kubepods/pod1\n"), [100]);
        // Version 1, also next to an empty version 2, and version 2 next to a version 1 without memory.
        let files = [
            ("memory/a:b/memory.limit_in_bytes", "200"),
            ("memory/memory.limit_in_bytes", "9223372036854771712"),
            ("cpu/x/memory.limit_in_bytes", "1"),
            ("unified/a/cgroup.procs", ""),
        ];
        let groups = "5:cpu:/x\n4:hugetlb,memory:/a:b\n0::/a\nnonsense\n";
        assert_eq!(limits(&files, groups), [200, 9_223_372_036_854_771_712]);
        assert_eq!(limits(&[("unified/a/memory.max", "400")], "5:cpu:/x\n0::/a/b\n"), [400]);
        assert_eq!(limits(&[], groups), [0; 0]);
    }

    #[test]
    fn a_limit_of_the_config_counts_if_it_is_the_smallest() {
        let all = memory(None);
        assert_eq!([memory(Some(1 << 20)), memory(Some(usize::MAX))], [1 << 20, all]);
    }
}
