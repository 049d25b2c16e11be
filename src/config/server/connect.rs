//! The table `mode.cloud.ssh`: the CONNECT listener. Its access rules are the defaults of all other listeners' tables.

use std::net::Ipv4Addr;

use crate::config::listen::{self, AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, ListenConfig};

/// `[mode.cloud.ssh]`: the server's CONNECT listener for users and their tools, such as ssh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshConfig {
    /// Address where clients connect.
    pub listen: ListenConfig,
    /// Access rules.
    pub access: AccessConfig,
}

/// Reads the table, and warns if the port is open to all clients.
pub(crate) fn read(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SshConfig {
    let mut table = cloud.table("ssh", report);
    let found = listen::read(&mut table, "listen", "port", report);
    let listen = found.unwrap_or(ListenConfig::by_default(Ipv4Addr::UNSPECIFIED, PORT, "listen"));
    let access = AccessConfig::read(&mut table, PROOFS, &AccessConfig::default(), report);
    let reached = if table.is_present() {
        "every node"
    } else {
        "every node (the table is absent, so the port is open as in SuperEdge)"
    };
    access.warn_if_open(table.key("auth"), listen.at, PROOFS, reached, report);
    table.finish(report);
    SshConfig { listen, access }
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };

/// The port that SuperEdge opens for SSH, even if its file does not set it.
const PORT: u16 = 22;
