//! Starts the HTTP proxy from `[mode.cloud.http_proxy]`.

use super::ports::ClientPort;
use crate::config::cloud::Cloud;
use crate::frontend::Proxy;
use crate::startup::{Gates, Startup};

/// Reads the front end's files and binds its port; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let Some(proxy) = &settings.http_proxy else { return Some(Vec::new()) };
    let guard = gates.prepare("mode.cloud.http_proxy", &proxy.access, startup);
    let listener = startup.bind(&format!("mode.cloud.http_proxy.{}", proxy.listen.key), proxy.listen.at);
    Some(vec![ClientPort::tcp(listener?, guard?, |_| Proxy)])
}
