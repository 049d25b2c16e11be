//! The table `server.connect`: the CONNECT listener. Its access rules are the defaults of all other listeners' tables.

use crate::config::listen::{self, AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, ListenConfig};

/// `[server.connect]`: the server's CONNECT listener for users and their tools, such as ssh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectConfig {
    /// Address where clients connect.
    pub listen: ListenConfig,
    /// Access rules.
    pub access: AccessConfig,
}

/// Reads the table, and warns if the port is open to all clients. Returns `None` if it is absent, or has no address,
/// which is an error; and the access rules that other listeners inherit.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    report: &mut Diagnostics,
) -> (Option<ConnectConfig>, AccessConfig) {
    let mut table = cloud.table("connect", report);
    let listen = listen::read(&mut table, "listen", report);
    listen::require(&table, listen.is_some(), report);
    let access = AccessConfig::read(&mut table, PROOFS, &AccessConfig::default(), report);
    if let Some(listen) = &listen {
        access.warn_if_open(table.key("auth"), listen.at, PROOFS, "every node", report);
    }
    table.finish(report);
    let connect = listen.map(|listen| ConnectConfig { listen, access: access.clone() });
    (connect, access)
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };
