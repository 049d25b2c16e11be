//! The ports of `[server.https]` and `[server.http]`, and their certificates.

use tokio_rustls::rustls::{self, ClientConfig};
use tracing::info_span;

use crate::config::server::ServerConfig;
use crate::config::server::https::{HttpsMode, ListenerTlsConfig, NodePortConfig, TargetIdentity};
use crate::listener::authenticated::OverTls;
use crate::listener::https::{self, Http, Https, HttpsReencrypt, Passthrough};
use crate::server::{ClientListener, ServerCore, config_files};
use crate::startup::access::{AccessPolicyBuilder, ListenerAccess};
use crate::startup::{Startup, StartupErrorKind};
use tunnel_base::policy::ports::PortTarget;
use tunnel_net::listen::TcpAccept;
use tunnel_net::reload::Reload;
use tunnel_net::tls::{self, ClientAuth, Identity, TlsClientConfig, TlsServerConfig, Trust};

/// Binds all ports with TLS. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let https = &settings.https;
    if https.ports.is_empty() {
        return Some(Vec::new());
    }
    let guard = policies.prepare("server.https", &https.access, startup);
    // Outer: whether the files are valid; inner: whether there are any.
    let tls = match &https.mode {
        HttpsMode::Passthrough => Some(None),
        HttpsMode::Terminate(files, _) => read(settings, files, startup).map(Some),
    };
    let targets = match &https.mode {
        HttpsMode::Terminate(_, Some(shown)) => for_targets(shown, startup).map(Some),
        _ => Some(None),
    };
    let ports = bind(&https.ports, startup);
    let (guard, clients, targets, ports) = (guard?, tls?, targets?, ports?);
    let sides = clients.map(|clients| HttpsTls { clients, targets });
    // The first port watches the files for all.
    let mut watched = sides.clone();
    let port = |(listener, stands_for)| match (sides.clone(), stands_for) {
        (Some(sides), stands_for) => {
            Some(tls_listener((listener, stands_for), guard.clone(), sides, watched.take()))
        }
        (None, PortTarget::Target(target)) => {
            Some(ClientListener::tcp(listener, guard.clone(), |_| Passthrough { target }))
        }
        // The config does not allow it: no Host header is read there.
        (None, PortTarget::Host) => None,
    };
    Some(ports.into_iter().filter_map(port).collect())
}

/// The TLS of a port that terminates the clients' TLS.
#[derive(Clone)]
struct HttpsTls {
    clients: Reload<rustls::ServerConfig>,
    /// TLS to targets; `None` if edges provide it.
    targets: Option<Reload<ClientConfig>>,
}

impl HttpsTls {
    /// Watches the files until links end.
    fn watch(self, core: &ServerCore) {
        let links = &core.shutdown.links;
        links.spawn(info_span!("tls"), self.clients.watch(links.clone()));
        if let Some(targets) = self.targets {
            links.spawn(info_span!("target tls"), targets.watch(links.clone()));
        }
    }
}

/// Binds all ports without TLS. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare_http(
    settings: &ServerConfig,
    policies: &mut AccessPolicyBuilder,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let http = &settings.http;
    if http.ports.is_empty() {
        return Some(Vec::new());
    }
    let (guard, ports) = (policies.prepare("server.http", &http.access, startup), bind(&http.ports, startup));
    let (guard, ports) = (guard?, ports?);
    let port = |(listener, stands_for)| {
        ClientListener::tcp(listener, guard.clone(), |core: &ServerCore| Http(node_port(stands_for, core)))
    };
    Some(ports.into_iter().map(port).collect())
}

/// Returns a port that terminates the clients' TLS. It watches the files of `watched`.
fn tls_listener(
    (listener, stands_for): (TcpAccept, PortTarget),
    guard: ListenerAccess,
    HttpsTls { clients, targets }: HttpsTls,
    watched: Option<HttpsTls>,
) -> ClientListener {
    let follow = |core: &ServerCore| {
        if let Some(watched) = watched {
            watched.watch(core);
        }
    };
    match targets {
        None => ClientListener::tcp(listener, guard, move |core: &ServerCore| {
            follow(core);
            OverTls::new(Https(node_port(stands_for, core)), clients, core.context.pool.clone())
        }),
        Some(tls) => ClientListener::tcp(listener, guard, move |core: &ServerCore| {
            follow(core);
            let protocol = HttpsReencrypt { port: node_port(stands_for, core), tls };
            OverTls::new(protocol, clients, core.context.pool.clone())
        }),
    }
}

/// Binds all ports before returning, so that each error is noted.
fn bind(ports: &[NodePortConfig], startup: &mut Startup) -> Option<Vec<(TcpAccept, PortTarget)>> {
    let bound = ports.iter().map(|port| Some((startup.bind(&port.key, port.at)?, port.stands_for.clone())));
    bound.collect::<Vec<_>>().into_iter().collect()
}

fn node_port(stands_for: PortTarget, core: &ServerCore) -> https::NodePort {
    let (finder, ports) = (core.context.finder.clone(), core.context.ports.clone());
    https::NodePort { stands_for, finder, ports }
}

// Reads the certificates that a client port presents and requests.

/// Returns the TLS of a port for HTTP/1. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn read(
    settings: &ServerConfig,
    certificates: &ListenerTlsConfig,
    startup: &mut Startup,
) -> Option<Reload<rustls::ServerConfig>> {
    let ListenerTlsConfig { cert, key, client_ca, .. } = certificates;
    let keys = ["cert", "key", "client_ca"].map(|file| certificates.key(file));
    let offer = config_files::tls_params(settings, startup);
    // Each file separately, so that all errors are noted.
    let has_cert = startup.check_file(&keys[0], cert, |text| tls::certs(cert, text));
    let has_key = startup.check_file(&keys[1], key, |text| tls::private_key(key, text));
    let ca = client_ca.as_ref();
    let has_ca = ca.is_none_or(|ca| startup.check_file(&keys[2], ca, |text| tls::certs(ca, text)));
    let (offer, _) = offer.filter(|_| has_cert && has_key && has_ca)?;
    let identity = Identity { cert: cert.clone(), key: key.clone() };
    let clients = ca.cloned().map_or(ClientAuth::Anonymous, ClientAuth::Required);
    let server = TlsServerConfig { identity, clients, offer, alpn: vec![b"http/1.1".to_vec()] };
    startup.collect(StartupErrorKind::Config, &[&keys[0], &keys[1]], server.load())
}

/// Returns the TLS from a port for HTTP/1 to targets. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn for_targets(shown: &TargetIdentity, startup: &mut Startup) -> Option<Reload<ClientConfig>> {
    let TargetIdentity { cert, key, ca } = shown.clone();
    let keys = ["cert", "key", "ca"].map(|file| format!("server.https.target_{file}"));
    let [has_cert, has_key] = [
        startup.check_file(&keys[0], &cert, |text| tls::certs(&cert, text)),
        startup.check_file(&keys[1], &key, |text| tls::private_key(&key, text)),
    ];
    let has_ca = ca.as_ref().is_none_or(|ca| startup.check_file(&keys[2], ca, |text| tls::certs(ca, text)));
    if !(has_cert && has_key && has_ca) {
        return None;
    }
    let identity = Some(Identity { cert, key });
    let trust = ca.map_or(Trust::NoVerify, Trust::Ca);
    let client = TlsClientConfig { trust, identity, alpn: vec![b"http/1.1".to_vec()] };
    startup.collect(StartupErrorKind::Config, &[&keys[0]], client.load())
}
