//! Starts the front ends of `[mode.cloud.https]` and `[mode.cloud.http]`.

use tokio_rustls::rustls::{ClientConfig, ServerConfig};
use tracing::info_span;

use super::certificates;
use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, HttpsMode, NodePort};
use crate::frontend::{self, Http, Https, Passthrough, Reencrypted, Tls};
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
        HttpsMode::Terminate(files, _) => certificates::read(settings, files, startup).map(Some),
    };
    let targets = match &https.mode {
        HttpsMode::Terminate(_, Some(shown)) => certificates::for_targets(shown, startup).map(Some),
        _ => Some(None),
    };
    let ports = bind(&https.ports, startup);
    let (guard, clients, targets, ports) = (guard?, tls?, targets?, ports?);
    let sides = clients.map(|clients| Sides { clients, targets });
    // One port follows the files for all.
    let mut watched = sides.clone();
    let port = |(listener, stands_for)| match (sides.clone(), stands_for) {
        (Some(sides), stands_for) => {
            Some(terminating((listener, stands_for), guard.clone(), sides, watched.take()))
        }
        (None, StandsFor::Target(target)) => {
            Some(ClientPort::tcp(listener, guard.clone(), |_| Passthrough { target }))
        }
        // The settings do not have it: no Host is read there.
        (None, StandsFor::Host) => None,
    };
    Some(ports.into_iter().filter_map(port).collect())
}

/// The TLS of a port that ends the clients'.
#[derive(Clone)]
struct Sides {
    clients: Reload<ServerConfig>,
    /// Towards targets; `None`: edges speak it.
    targets: Option<Reload<ClientConfig>>,
}

impl Sides {
    /// Follows the files until links end.
    fn watch(self, core: &Core) {
        let links = &core.stopping.links;
        links.spawn(info_span!("tls"), self.clients.watch(links.clone()));
        if let Some(targets) = self.targets {
            links.spawn(info_span!("target tls"), targets.watch(links.clone()));
        }
    }
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

/// A port that ends the clients' TLS. It follows the files of what is `watched`.
fn terminating(
    (listener, stands_for): (Listener, StandsFor),
    guard: Guard,
    Sides { clients, targets }: Sides,
    watched: Option<Sides>,
) -> ClientPort {
    let follow = |core: &Core| {
        if let Some(watched) = watched {
            watched.watch(core);
        }
    };
    match targets {
        None => ClientPort::tcp(listener, guard, move |core: &Core| {
            follow(core);
            Tls::new(Https(node_port(stands_for, core)), clients, core.context.pool.clone())
        }),
        Some(tls) => ClientPort::tcp(listener, guard, move |core: &Core| {
            follow(core);
            let front_end = Reencrypted { port: node_port(stands_for, core), tls };
            Tls::new(front_end, clients, core.context.pool.clone())
        }),
    }
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
