//! Starts the CONNECT front end from `[mode.cloud.ssh]`.

use super::ports::ClientPort;
use crate::config::cloud::Cloud;
use crate::frontend::{Connect, Ssh};
use crate::startup::{Gates, Startup};

/// Reads the front end's files and binds its port; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let ssh = &settings.ssh;
    let guard = gates.prepare("mode.cloud.ssh", &ssh.access, startup);
    let listener = startup.bind_optional("mode.cloud.ssh", ssh.listen);
    let (guard, listener) = (guard?, listener?);
    let port = |listener| ClientPort::tcp(listener, guard.clone(), |_| Connect::<Ssh>::default());
    Some(listener.into_iter().map(port).collect())
}
