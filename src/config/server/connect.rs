//! The table `mode.cloud.ssh`: where clients send CONNECT. Its keys for access are the defaults of all other front
//! ends' tables.

use std::net::Ipv4Addr;

use crate::config::listen::{self, AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, ListenConfig};

/// `[mode.cloud.ssh]`: the CONNECT front end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshConfig {
    /// Where clients come in.
    pub listen: ListenConfig,
    /// Who may.
    pub access: AccessConfig,
}

/// Reads the table, and warns if it leaves the door open.
pub(crate) fn read(cloud: &mut ConfigTable<'_>, report: &mut Diagnostics) -> SshConfig {
    let mut table = cloud.table("ssh", report);
    let found = listen::read(&mut table, "listen", "port", report);
    let listen = found.unwrap_or(ListenConfig::by_default(Ipv4Addr::UNSPECIFIED, PORT, "listen"));
    let access = AccessConfig::read(&mut table, PROOFS, &AccessConfig::default(), report);
    let reached = if table.is_present() {
        "every node"
    } else {
        "every node (there is no such table, so the port is open as in SuperEdge)"
    };
    access.warn_if_open(table.key("auth"), listen.at, PROOFS, reached, report);
    table.finish(report);
    SshConfig { listen, access }
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };

/// The port that SuperEdge opens for ssh, even without a key in its file.
const PORT: u16 = 22;
