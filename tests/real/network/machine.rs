//! A separate machine for a test, with respect to network and mounts: two namespaces, which vanish when no process
//! uses them.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::process::{TIMEOUT, run_command};

/// The address of a machine behind a NAT.
pub(crate) const BEHIND_NAT: &str = "192.168.78.2";

/// A network with nothing but loopback, and private mounts.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Ends with its input, so that a killed test leaves nothing behind.
    keeper: Child,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-c", "ip link set lo up && echo up && exec cat"]);
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut up = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut up).unwrap();
        assert_eq!(up, "up\n", "cannot create namespaces here");
        Self { keeper }
    }

    /// Returns a command that runs a program on this machine. Its process ID is that of the program, without a
    /// wrapper process.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let entry = self.entry();
        let mut words = entry.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg(program);
        command
    }

    /// Returns the words in front of a command that run it on this machine.
    pub(crate) fn entry(&self) -> String {
        let spaces = format!("/proc/{}/ns", self.keeper.id());
        format!("nsenter --net={spaces}/net --mount={spaces}/mnt")
    }

    /// Runs a line of shell here, and returns what it prints. Fails the test unless the line succeeds.
    pub(crate) fn sh(&self, line: &str) -> String {
        let mut command = self.command("sh");
        command.args(["-ec", line]);
        let output = run_command(line, &mut command, None, TIMEOUT);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    }

    /// Connects another machine: a device here and one there, each with its address (`10.0.0.1/24`).
    pub(crate) fn cable(
        &self,
        (device, address): (&str, &str),
        far: &Self,
        (there, far_address): (&str, &str),
    ) {
        let peer = far.keeper.id();
        self.sh(&format!(
            "ip link add {device} type veth peer name {there} netns {peer}
            ip addr add {address} dev {device}
            ip link set {device} up"
        ));
        far.sh(&format!("ip addr add {far_address} dev {there}; ip link set {there} up"));
    }

    /// Connects a machine through a NAT, whose machine is returned: it dials out from [`BEHIND_NAT`], and nothing can
    /// dial it.
    pub(crate) fn nat(&self, node: &Self) -> Self {
        let router = Self::new();
        self.cable(("nat", "10.78.0.1/24"), &router, ("wan", "10.78.0.2/24"));
        router.cable(("lan", "192.168.78.1/24"), node, ("lan", &format!("{BEHIND_NAT}/24")));
        router.sh("ip route add default via 10.78.0.1
            echo 1 > /proc/sys/net/ipv4/ip_forward
            nft add table ip nat
            nft add chain ip nat post '{ type nat hook postrouting priority 100; }'
            nft add rule ip nat post oifname wan masquerade
            nft add table ip shut
            nft add chain ip shut forward '{ type filter hook forward priority 0; }'
            nft add rule ip shut forward iifname wan ct state new drop");
        node.sh("ip route add default via 192.168.78.1");
        router
    }

    /// Blocks new connections to this machine on this device; its own connections to others still work.
    pub(crate) fn shut(&self, device: &str) {
        self.sh(&format!(
            "nft add table inet shut
            nft add chain inet shut input '{{ type filter hook input priority 0; }}'
            nft add chain inet shut output '{{ type filter hook output priority 0; }}'
            nft add rule inet shut input iifname {device} ct state new drop"
        ));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
