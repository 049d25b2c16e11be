//! The table `mode.cloud.ssh`: where clients send CONNECT. Its keys for access are the defaults of all other front
//! ends' tables.

use std::net::Ipv4Addr;

use crate::config::listen::{self, Access, AuthMethods};
use crate::config::table::Table;
use crate::config::{ListenConfig, Report};

/// `[mode.cloud.ssh]`: the CONNECT front end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ssh {
    /// Where clients come in.
    pub listen: ListenConfig,
    /// Who may.
    pub access: Access,
}

/// Reads the table, and warns if it leaves the door open.
pub(crate) fn read(cloud: &mut Table<'_>, report: &mut Report) -> Ssh {
    let mut table = cloud.table("ssh", report);
    let found = listen::read(&mut table, "listen", "port", report);
    let listen = found.unwrap_or(ListenConfig::by_default(Ipv4Addr::UNSPECIFIED, PORT, "listen"));
    let access = Access::read(&mut table, PROOFS, &Access::default(), report);
    let reached = if table.is_present() {
        "every node"
    } else {
        "every node (there is no such table, so the port is open as in SuperEdge)"
    };
    access.warn_if_open(table.key("auth"), listen.at, PROOFS, reached, report);
    table.finish(report);
    Ssh { listen, access }
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };

/// The port that SuperEdge opens for ssh, even without a key in its file.
const PORT: u16 = 22;
