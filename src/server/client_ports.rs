//! Binds the ports of clients whose table needs no more than that: CONNECT, egress, HTTP proxy and TCP.
//!
//! Each function reads the files of its listener and binds its ports. It returns `None` if there are errors, which
//! `startup` has noted.

use std::sync::atomic::AtomicBool;

use tracing::info_span;

use crate::config::server::ServerConfig;
use crate::config::server::egress::EgressConfig;
use crate::config::server::tcp::{Forward, TcpListenerConfig};
use crate::listener::authenticated::{OverTls, OverUnix};
use crate::listener::connect::{Egress, Ssh};
use crate::listener::http_proxy::Proxy;
use crate::listener::tcp::Tcp;
use crate::server::{ClientListener, ServerCore, https};
use crate::startup::Startup;
use crate::startup::access::AccessPolicyBuilder;

/// Prepares the listeners of `[server.connect]`.
pub(crate) fn connect(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let Some(connect) = &settings.connect else { return Some(Vec::new()) };
    let guard = policies.prepare("server.connect", &connect.access, startup);
    let listener = startup.bind_optional("server.connect", connect.listen);
    let (guard, listener) = (guard?, listener?);
    let port = |listener| ClientListener::tcp(listener, guard.clone(), |_| Ssh);
    Some(listener.into_iter().map(port).collect())
}

/// Prepares the listeners of `[server.egress]`.
pub(crate) fn egress(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let Some(egress) = &settings.egress else { return Some(Vec::new()) };
    let guard = policies.prepare("server.egress", egress.access(), startup);
    let port = match egress {
        EgressConfig::Port { listen, certificates, .. } => {
            let tls = https::read(settings, certificates, startup);
            let listener = startup.bind(&format!("server.egress.{}", listen.key), listen.at);
            let (guard, tls, listener) = (guard?, tls?, listener?);
            ClientListener::tcp(listener, guard, move |core: &ServerCore| {
                let links = &core.shutdown.links;
                links.spawn(info_span!("tls"), tls.clone().watch(links.clone()));
                OverTls::new(Egress, tls, core.context.pool.clone())
            })
        }
        EgressConfig::Unix { path, .. } => {
            let listener = startup.bind_local("server.egress.listen", path);
            let (guard, listener) = (guard?, listener?);
            ClientListener::new(listener, guard, |_| OverUnix(Egress))
        }
    };
    Some(vec![port])
}

/// Prepares the listeners of `[server.http_proxy]`.
pub(crate) fn http_proxy(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let Some(proxy) = &settings.http_proxy else { return Some(Vec::new()) };
    let guard = policies.prepare("server.http_proxy", &proxy.access, startup);
    let listener = startup.bind(&format!("server.http_proxy.{}", proxy.listen.key), proxy.listen.at);
    Some(vec![ClientListener::tcp(listener?, guard?, |_| Proxy)])
}

/// Prepares the listeners of `[server.tcp]`.
pub(crate) fn tcp(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let ports = settings.tcp.iter().map(|port| {
        let guard = policies.prepare(&port.key, &port.access, startup);
        let listener = startup.bind(&port.key, port.at);
        let port = port.clone();
        Some(ClientListener::tcp(listener?, guard?, move |core| forward(port, core)))
    });
    // All ports first, so that each error is noted.
    ports.collect::<Vec<_>>().into_iter().collect()
}

fn forward(port: TcpListenerConfig, core: &ServerCore) -> Tcp {
    let Forward { node, target } = port.to;
    let finder = core.context.finder.clone();
    Tcp { node, target, send_proxy: port.send_proxy, finder, warned: AtomicBool::new(false) }
}
