//! Starts the TCP listeners from `[mode.cloud.tcp]`.

use std::sync::atomic::AtomicBool;

use crate::config::server::ServerConfig;
use crate::config::server::tcp::{Forward, TcpListenerConfig};
use crate::listener::tcp::Tcp;
use crate::server::{ClientListener, ServerCore};
use crate::startup::Startup;
use crate::startup::access::AccessPolicies;

/// Binds all ports. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare(
    settings: &ServerConfig,
    gates: &mut AccessPolicies,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let ports = settings.tcp.iter().map(|port| {
        let guard = gates.prepare(&port.key, &port.access, startup);
        let listener = startup.bind(&port.key, port.at);
        let port = port.clone();
        Some(ClientListener::tcp(listener?, guard?, move |core| protocol(port, core)))
    });
    // All ports first, so that each error is noted.
    ports.collect::<Vec<_>>().into_iter().collect()
}

fn protocol(port: TcpListenerConfig, core: &ServerCore) -> Tcp {
    let Forward { node, target } = port.to;
    let finder = core.context.finder.clone();
    Tcp { node, target, send_proxy: port.send_proxy, finder, warned: AtomicBool::new(false) }
}
