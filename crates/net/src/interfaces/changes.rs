//! Changes of addresses and routes.

use std::io;
use std::os::unix::net;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::UnixDatagram;
use tokio::time::sleep;

use crate::os::networks::{NetworkSnapshot, is_report, reports};
use crate::os::suspended;

/// A subscription to changes of addresses and routes. Needs no privilege.
#[derive(Debug)]
pub struct NetworkChanges {
    /// A socket to the kernel, wrapped in this type to receive from it asynchronously.
    kernel: UnixDatagram,
    room: Vec<u8>,
    known: NetworkSnapshot,
    /// Seconds for which this machine has been suspended since it was started.
    suspended: i64,
}

impl NetworkChanges {
    /// Subscribes to changes. Must be called in a runtime.
    ///
    /// # Errors
    ///
    /// The system does not report changes, or there are too many open files.
    pub fn watch() -> io::Result<Self> {
        let kernel = UnixDatagram::from_std(net::UnixDatagram::from(reports()?))?;
        Ok(Self {
            kernel,
            room: vec![0; REPORT_ROOM],
            known: NetworkSnapshot::read()?,
            suspended: suspended(),
        })
    }

    /// Waits for the next change, or until the machine wakes after it was suspended. All changes since the last call are
    /// reported as one. Cancel safe.
    ///
    /// Router advertisements and DHCP renewals announce the same addresses and routes again, which is no change.
    ///
    /// # Errors
    ///
    /// The kernel reports no more changes.
    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            let is_changed = tokio::select! {
                ready = self.kernel.readable() => ready.and_then(|()| self.take_reports())?,
                () = sleep(WAKE_CHECK) => {
                    let before = std::mem::replace(&mut self.suspended, suspended());
                    self.suspended > before + 1
                }
            };
            if is_changed {
                return Ok(());
            }
        }
    }

    /// Reads all pending reports. Returns true if the network has changed.
    fn take_reports(&mut self) -> io::Result<bool> {
        let mut reported = false;
        loop {
            reported |= match self.kernel.try_recv(&mut self.room) {
                Ok(len) => is_report(self.room.get(..len).unwrap_or_default()),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => break,
                // There were so many reports at once that the kernel dropped some.
                Err(cause) if Errno::from_io_error(&cause) == Some(Errno::NOBUFS) => true,
                Err(cause) => return Err(cause),
            };
        }
        if !reported {
            return Ok(false);
        }
        // Without the kernel's answer, for lack of files, the report may be a change.
        let Ok(now) = NetworkSnapshot::read() else { return Ok(true) };
        let changed = now != self.known;
        self.known = now;
        Ok(changed)
    }
}

/// Larger than any message about one address or route.
const REPORT_ROOM: usize = 8 * 1024;

/// Interval of checks whether the machine was suspended.
const WAKE_CHECK: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::process::Command;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_suspension_is_a_change() {
        let mut changes = NetworkChanges::watch().unwrap();
        changes.suspended -= 3600;
        let within = 2 * WAKE_CHECK;
        assert!(timeout(within, changes.next()).await.unwrap().is_ok());
        assert!(timeout(within, changes.next()).await.is_err(), "once");
    }

    /// Runs the next test in a network namespace of its own.
    #[test]
    fn a_repeated_kernel_announcement_is_no_change() {
        let has_ip = Command::new("ip").arg("-V").output().is_ok();
        if !rustix::process::geteuid().is_root() || !has_ip {
            return;
        }
        let test = "interfaces::changes::tests::in_own_namespace";
        let program = std::env::current_exe().unwrap();
        let mut unshare = Command::new("unshare");
        let output = unshare.arg("--net").arg(program).args(["--exact", test, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[tokio::test]
    #[ignore = "changes the network of this machine, unless it is in a namespace"]
    async fn in_own_namespace() {
        let ip = |text: &str| {
            let output = Command::new("ip").args(text.split(' ')).output().unwrap();
            assert!(output.status.success(), "ip {text}: {output:?}");
        };
        ip("link add name one type veth peer name two");
        ip("link set one up");
        ip("link set two up");
        let mut changes = NetworkChanges::watch().unwrap();
        for text in [
            "addr add 10.0.0.5/24 dev one",
            "addr add 2001:db8::5/64 dev one nodad",
            "route add default via 10.0.0.1",
        ] {
            ip(text);
            changes.next().await.unwrap();
        }
        // As by router advertisements, DHCP renewals and containers.
        for text in [
            "addr change 10.0.0.5/24 dev one valid_lft 1000 preferred_lft 1000",
            "addr change 2001:db8::5/64 dev one valid_lft 1000 preferred_lft 1000",
            "route replace default via 10.0.0.1",
            "addr add 10.0.0.5/32 dev two",
            "addr add fe80::7/64 dev two nodad",
        ] {
            ip(text);
            changes.kernel.readable().await.unwrap();
            assert!(!changes.take_reports().unwrap(), "{text}");
        }
        for text in
            ["route replace default via 10.0.0.2", "addr del 2001:db8::5/64 dev one", "route del default"]
        {
            ip(text);
            changes.next().await.unwrap();
        }
        ip("route add default via 10.0.0.1");
        changes.next().await.unwrap();
        // A line that is lost and returns. The kernel does not report the routes that go with it.
        for text in ["link set two down", "link set two up", "link set one down"] {
            ip(text);
            timeout(Duration::from_secs(5), changes.next()).await.expect(text).unwrap();
        }
        ip("link set one up");
        ip("route add default via 10.0.0.1");
        timeout(Duration::from_secs(5), changes.next()).await.expect("the same network").unwrap();
    }
}
