//! Starts the TCP front ends from `[mode.cloud.tcp]`.

use std::sync::atomic::AtomicBool;

use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, Forward, TcpPort};
use crate::frontend::Tcp;
use crate::startup::{Gates, Startup};

/// Binds all ports; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let ports = settings.tcp.iter().map(|port| {
        let guard = gates.prepare(&port.key, &port.access, startup);
        let listener = startup.bind(&port.key, port.at);
        let port = port.clone();
        Some(ClientPort::tcp(listener?, guard?, move |core| front_end(port, core)))
    });
    // All of them first, so that each fault is noted.
    ports.collect::<Vec<_>>().into_iter().collect()
}

fn front_end(port: TcpPort, core: &Core) -> Tcp {
    let Forward { node, target } = port.to;
    let finder = core.context.finder.clone();
    Tcp { node, target, send_proxy: port.send_proxy, finder, warned: AtomicBool::new(false) }
}
