//! Stands in for the migration from YurtTunnel in a build without Kubernetes.

use std::io::Read;

use crate::command::CommandError;
use crate::command::migrate::MigrateArgs;
use crate::parts;

/// Returns the reason why this build migrates no deployment of YurtTunnel.
pub(crate) fn migrate(_: &MigrateArgs, _: impl Read) -> Result<String, CommandError> {
    parts::CLUSTER.map(|()| String::new()).map_err(CommandError::usage)
}
