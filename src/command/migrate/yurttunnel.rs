//! A deployment of YurtTunnel as a config of this program, with a remark on each of its settings.

pub(crate) mod flags;
pub(crate) mod objects;
pub(crate) mod output;

use crate::command::migrate::yurttunnel::objects::YurtTunnelDeployment;
use crate::command::migrate::yurttunnel::output::{cloud, edge};
use crate::command::{CommandError, Role};

/// Returns a config of servers or edges that replaces the objects in these texts, each with the name of its file.
pub(crate) fn migrate(texts: &[(String, String)], role: Role) -> Result<String, CommandError> {
    let mut old = YurtTunnelDeployment::default();
    for (text, name) in texts {
        old.add(text).map_err(|why| CommandError::unusable(format!("{name}: {why}")))?;
    }
    match role {
        Role::Server => cloud(&old),
        Role::Edge => edge(&old),
    }
    .map_err(CommandError::unusable)
}

/// A comment line in the config that `tunnel migrate` prints: what becomes of one flag or object of the old tunnel, and
/// why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MigrationRemark {
    verdict: MigrationVerdict,
    /// The setting with its value.
    what: String,
    why: String,
}

/// What `tunnel migrate` makes of a setting of the old tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MigrationVerdict {
    /// It has the same meaning here.
    Kept,
    /// It has another form, or must be handled by hand.
    Changed,
    /// It has no counterpart.
    Gone,
    /// Its purpose is not known.
    Unknown,
}

#[cfg(test)]
mod tests;
