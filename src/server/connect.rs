//! Starts the CONNECT listener from `[mode.cloud.ssh]`.

use crate::config::server::ServerConfig;
use crate::listener::connect::{Connect, Ssh};
use crate::server::ClientListener;
use crate::startup::Startup;
use crate::startup::access::AccessPolicies;

/// Reads the listener's files and binds its port. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare(
    settings: &ServerConfig,
    gates: &mut AccessPolicies,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let ssh = &settings.ssh;
    let guard = gates.prepare("mode.cloud.ssh", &ssh.access, startup);
    let listener = startup.bind_optional("mode.cloud.ssh", ssh.listen);
    let (guard, listener) = (guard?, listener?);
    let port = |listener| ClientListener::tcp(listener, guard.clone(), |_| Connect::<Ssh>::default());
    Some(listener.into_iter().map(port).collect())
}
