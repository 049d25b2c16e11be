//! From `[mode.cloud.ssh]` to the CONNECT front end.

use super::gates::Gates;
use super::ports::ClientPort;
use crate::config::cloud::Cloud;
use crate::frontend::connect::Connect;
use crate::startup::Startup;

/// Reads its files and takes its port, if that can be had; `None`: something is wrong, and noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let ssh = &settings.ssh;
    let guard = gates.prepare(&ssh.access, startup);
    let listener = startup.bind_optional("mode.cloud.ssh", ssh.listen);
    let (guard, listener) = (guard?, listener?);
    Some(listener.into_iter().map(|listener| ClientPort::tcp(listener, guard.clone(), |_| Connect)).collect())
}
