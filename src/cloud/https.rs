//! Starts the front ends of `[mode.cloud.https]` and `[mode.cloud.http]`.

use tokio_rustls::rustls::ServerConfig;
use tracing::info_span;

use super::certificates;
use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, HttpsMode, NodePort};
use crate::frontend::{self, Http, Https, Passthrough, Tls};
use crate::net::listen::Listener;
use crate::net::reload::Reload;
use crate::policy::StandsFor;
use crate::startup::{Gates, Guard, Startup};

/// Binds all ports with TLS; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let https = &settings.https;
    if https.ports.is_empty() {
        return Some(Vec::new());
    }
    let guard = gates.prepare("mode.cloud.https", &https.access, startup);
    // Outer: whether the files will do; inner: whether there are any.
    let tls = match &https.mode {
        HttpsMode::Passthrough => Some(None),
        HttpsMode::Terminate(files) => certificates::read(settings, files, startup).map(Some),
    };
    let ports = bind(&https.ports, startup);
    let (guard, tls, ports) = (guard?, tls?, ports?);
    // One port follows the files for all.
    let mut watched = tls.clone();
    let port = |(listener, stands_for)| match (tls.clone(), stands_for) {
        (Some(tls), stands_for) => {
            Some(terminating((listener, stands_for), guard.clone(), tls, watched.take()))
        }
        (None, StandsFor::Target(target)) => {
            Some(ClientPort::tcp(listener, guard.clone(), |_| Passthrough { target }))
        }
        // The settings do not have it: no Host is read there.
        (None, StandsFor::Host) => None,
    };
    Some(ports.into_iter().filter_map(port).collect())
}

/// Binds all ports without TLS; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare_plain(
    settings: &Cloud,
    gates: &mut Gates,
    startup: &mut Startup,
) -> Option<Vec<ClientPort>> {
    let http = &settings.http;
    if http.ports.is_empty() {
        return Some(Vec::new());
    }
    let (guard, ports) =
        (gates.prepare("mode.cloud.http", &http.access, startup), bind(&http.ports, startup));
    let (guard, ports) = (guard?, ports?);
    let port = |(listener, stands_for)| {
        ClientPort::tcp(listener, guard.clone(), |core: &Core| Http(node_port(stands_for, core)))
    };
    Some(ports.into_iter().map(port).collect())
}

fn terminating(
    (listener, stands_for): (Listener, StandsFor),
    guard: Guard,
    tls: Reload<ServerConfig>,
    watched: Option<Reload<ServerConfig>>,
) -> ClientPort {
    ClientPort::tcp(listener, guard, move |core: &Core| {
        let links = &core.stopping.links;
        if let Some(watched) = watched {
            links.spawn(info_span!("tls"), watched.watch(links.clone()));
        }
        Tls::new(Https(node_port(stands_for, core)), tls, core.context.pool.clone())
    })
}

/// Binds all of them first, so that each fault is noted.
fn bind(ports: &[NodePort], startup: &mut Startup) -> Option<Vec<(Listener, StandsFor)>> {
    let bound = ports.iter().map(|port| Some((startup.bind(&port.key, port.at)?, port.stands_for.clone())));
    bound.collect::<Vec<_>>().into_iter().collect()
}

fn node_port(stands_for: StandsFor, core: &Core) -> frontend::NodePort {
    let (finder, ports) = (core.context.finder.clone(), core.context.ports.clone());
    frontend::NodePort { stands_for, finder, ports }
}
