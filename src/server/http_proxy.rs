//! Starts the HTTP proxy from `[mode.cloud.http_proxy]`.

use crate::config::server::ServerConfig;
use crate::listener::http_proxy::Proxy;
use crate::server::ClientListener;
use crate::startup::Startup;
use crate::startup::access::AccessPolicies;

/// Reads the listener's files and binds its port. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare(
    settings: &ServerConfig,
    gates: &mut AccessPolicies,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let Some(proxy) = &settings.http_proxy else { return Some(Vec::new()) };
    let guard = gates.prepare("mode.cloud.http_proxy", &proxy.access, startup);
    let listener = startup.bind(&format!("mode.cloud.http_proxy.{}", proxy.listen.key), proxy.listen.at);
    Some(vec![ClientListener::tcp(listener?, guard?, |_| Proxy)])
}
