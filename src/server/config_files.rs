//! The files named by a server's config, read before anything runs, and the policies that can change at run time.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tracing::{error, warn};

use crate::config::server::LinkListenerConfig;
use crate::config::server::invitations::InvitationStoreKind;
use crate::enrolment::AdvertisedCa;
use crate::listener::egress;
use crate::server::config::ServerConfig;
use crate::server::edge_links;
use crate::session_io::rights::RightsChange;
use crate::startup::tls_files::tls_params;
use crate::startup::{NotPrepared, Prepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::policy::NodeGlob;
use tunnel_base::policy::targets::Targets;
use tunnel_base::policy::tokens::NodeTokens;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::link_auth::LinkCaFiles;
use tunnel_net::tls::peer::{PeerTls, PeerTlsConfig};
use tunnel_net::tls::{self, ClientAuth, IdentityFiles, TlsServerConfig, link_alpn, pem};

/// The contents of the files.
#[derive(Debug)]
pub(crate) struct LoadedServerFiles {
    /// TLS of the gRPC port.
    pub(crate) tls: ReloadedValue<ServerTls>,
    /// The CA and certificate that joining nodes receive; `None` if joining is not enabled.
    pub(crate) authority: Option<ReloadedValue<AdvertisedCa>>,
    /// The tokens of edges.
    pub(crate) tokens: ReloadedValue<NodeTokens>,
    pub(crate) parts: Arc<PartFiles>,
}

/// What the parts of a server use.
#[derive(Debug)]
pub(crate) struct PartFiles {
    /// TLS for dialling peers; `None` if there are none, or this server has no certificate for them.
    pub(crate) peers: Option<ReloadedValue<PeerTls>>,
    /// A client of the system's DNS servers.
    pub(crate) resolver: Resolver,
    /// A client of the DNS servers that know where nodes are; by default the system's.
    pub(crate) dns: Resolver,
}

impl PartFiles {
    /// Reads the files. `has_tls` is false if the error of a file for links is already noted.
    pub(crate) fn read(
        settings: &ServerConfig,
        has_tls: bool,
        startup: &mut StartupErrorCollector,
    ) -> Prepared<Self> {
        let before = startup.errors();
        let peers = if has_tls { peers(settings, startup) } else { None };
        let resolver = Resolver::system();
        let dns = match settings.dns.resolvers.as_slice() {
            [] => Ok(resolver.clone()),
            servers => startup.collect(
                StartupErrorKind::Config,
                &["server.dns.resolvers"],
                Resolver::of_servers(servers),
            ),
        };
        if !has_tls || startup.errors() > before {
            return Err(NotPrepared);
        }
        Ok(Self { peers, resolver, dns: dns? })
    }
}

impl LoadedServerFiles {
    /// Reloads the files when they change.
    pub(crate) fn watch(&self, watcher: &FileWatcher) {
        watcher.watch("tls", &self.tls);
        watcher.watch("tokens", &self.tokens);
    }

    /// Reads all files.
    pub(crate) fn read(settings: &ServerConfig, startup: &mut StartupErrorCollector) -> Prepared<Self> {
        let tls = tls(settings, startup);
        let parts = PartFiles::read(settings, tls.is_ok(), startup);
        // The error of a certificate that cannot be read is already noted.
        let is_noted = tls.is_err() && pem::leaf(&settings.links.cert).is_none();
        let authority = if is_noted { Ok(None) } else { invitation_ca(settings, startup) };
        let egress = settings.listeners.iter().any(|listener| listener.kind.name == egress::KIND.name);
        let invitations = settings.invitations.store != InvitationStoreKind::None;
        let file = &settings.links.token_file;
        let by_cluster = edge_ca(settings).is_some() || settings.service_account.is_some();
        let tokens = edge_links::read(file, by_cluster || invitations, egress, startup);
        publisher(settings, startup);
        let congestion = settings.links.congestion.as_deref();
        startup.congestion("server.links.congestion", congestion)?;
        Ok(Self { tls: tls?, authority: authority?, tokens: tokens?, parts: Arc::new(parts?) })
    }
}

/// Reads the TLS files of the port for links.
pub(crate) fn tls(
    settings: &ServerConfig,
    startup: &mut StartupErrorCollector,
) -> Prepared<ReloadedValue<ServerTls>> {
    let links = &settings.links;
    let params = tls_params(&settings.tls, startup);
    let has_ca = links.peer_ca.exists() || settings.invitations.store != InvitationStoreKind::None;
    let edges = edge_ca(settings).map(Path::to_owned);
    let users = settings.clients.client_ca.as_deref().map(Path::to_owned);
    // Each file separately, so that all errors are noted.
    let are_usable = [
        startup.check_certs(CERT, Some(&links.cert)),
        startup.check_private_key(KEY, Some(&links.key)),
        startup.check_certs(CA, has_ca.then_some(&links.peer_ca)),
        startup.check_certs(USERS_CA, users.as_deref()),
        startup.check_certs(EDGE_CA, edges.as_deref()),
    ];
    let name = settings.peers.certificate_name.as_deref().filter(|_| has_ca);
    let name = name.map(tls::server_name).transpose();
    let name = startup.collect(StartupErrorKind::Config, &["server.peers.certificate_name"], name);
    if are_usable.contains(&false) {
        return Err(NotPrepared);
    }
    // Without the file no peer can link here, so callers need not present a certificate.
    let peers = has_ca.then(|| links.peer_ca.to_path_buf());
    let clients = LinkCaFiles { edges, users, peers, peer_name: name? };
    let (params, warnings) = params?;
    for warning in warnings {
        warn!("{warning}");
    }
    let identity = IdentityFiles { cert: links.cert.to_path_buf(), key: links.key.to_path_buf() };
    let clients = ClientAuth::Links(clients);
    let server = TlsServerConfig { identity, clients, params, alpn: link_alpn() };
    startup.collect(StartupErrorKind::Config, &[CERT, KEY], server.load())
}

/// Reads the TLS files for dialling peers. Returns `None` if no peers are configured, or the files do not allow links
/// to them. The latter is an error if the config names peers, otherwise a warning.
fn peers(settings: &ServerConfig, startup: &mut StartupErrorCollector) -> Option<ReloadedValue<PeerTls>> {
    let peer_settings = &settings.peers;
    if !peer_settings.several {
        return None;
    }
    let why = match peer_tls(&settings.links, peer_settings.certificate_name.as_deref()) {
        Ok(tls) => return Some(tls),
        Err(why) => why,
    };
    match peer_settings.named {
        Some(named) if named.must_link => {
            let error = format!("it names peers, but none can be linked to: {why}; {REMEDY}");
            let _ = startup.collect(StartupErrorKind::Config, &[named.key], Err::<(), _>(error));
        }
        Some(named) => error!(
            key = startup.spelled(named.key),
            error = %why,
            hint = REMEDY,
            "cannot link to peers, only nodes linked here are reachable"
        ),
        None => warn!(error = %why, hint = REMEDY, "cannot ask peers for their nodes"),
    }
    None
}

fn peer_tls(links: &LinkListenerConfig, name: Option<&str>) -> Result<ReloadedValue<PeerTls>, String> {
    let name = name.map(tls::server_name).transpose()?;
    let identity = IdentityFiles { cert: links.cert.to_path_buf(), key: links.key.to_path_buf() };
    PeerTlsConfig { identity, ca: links.peer_ca.to_path_buf(), name }
        .load()
        .map_err(|cause| cause.to_string())
}

/// Reads the CA and certificate for joining nodes, if joining is enabled.
pub(crate) fn invitation_ca(
    settings: &ServerConfig,
    startup: &mut StartupErrorCollector,
) -> Prepared<Option<ReloadedValue<AdvertisedCa>>> {
    if settings.invitations.store == InvitationStoreKind::None {
        return Ok(None);
    }
    let links = &settings.links;
    let authority = AdvertisedCa::load(links.peer_ca.to_path_buf(), links.cert.to_path_buf());
    startup.collect(StartupErrorKind::Config, &["server.links.peer_ca"], authority).map(Some)
}

/// Returns the file of CAs of certificates that edges may present; `None` if they may present none.
pub(crate) fn edge_ca(settings: &ServerConfig) -> Option<&Path> {
    settings.csr.as_ref()?.edge_ca.as_deref()
}

/// Notes errors that prevent publishing. A start reads these files later, because publishing must not prevent access to
/// nodes; `config check` reads them here.
fn publisher(settings: &ServerConfig, startup: &mut StartupErrorCollector) {
    if !startup.is_check {
        return;
    }
    for (table, etcd) in settings.etcds() {
        startup.check_certs(&format!("{table}.etcd.ca"), etcd.ca.as_deref());
        startup.check_certs(&format!("{table}.etcd.cert"), etcd.cert.as_deref());
        startup.check_private_key(&format!("{table}.etcd.key"), etcd.key.as_deref());
        if let Some(password) = &etcd.password_file {
            startup.check_file(&format!("{table}.etcd.password_file"), password, not_empty);
        }
    }
    let csr = settings.csr.as_ref().map(|csr| &csr.cluster);
    let account = settings.service_account.as_ref().map(|account| &account.cluster);
    let clusters = settings.peers.cluster.iter().chain(&settings.addresses.cluster).chain(csr).chain(account);
    if let Some(kubeconfig) = clusters.filter_map(|cluster| cluster.kubeconfig.as_ref()).next() {
        startup.check_file("--kubeconfig", kubeconfig, not_empty);
    }
}

fn not_empty(text: &[u8]) -> Result<(), &'static str> {
    if text.trim_ascii().is_empty() { Err("file is empty; write its content into it") } else { Ok(()) }
}

/// The hint for servers that cannot link to each other.
pub(crate) const REMEDY: &str = "give all servers a cert from one CA, and put that CA into the file of peer_ca in [server.links], by \
                      default /etc/tunnel/certs/ca.crt";

const CERT: &str = "server.links.cert";
const KEY: &str = "server.links.key";
const USERS_CA: &str = "server.clients.client_ca";
const EDGE_CA: &str = "server.csr.edge_ca";
const CA: &str = "server.links.peer_ca";

/// The current rules of a server. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct LivePolicies {
    /// Targets that edges may have this server dial.
    pub(crate) for_edges: Arc<ArcSwap<Targets>>,
    /// Targets outside of nodes that clients may have it dial.
    pub(crate) for_clients: Arc<ArcSwap<Targets>>,
    /// The nodes that edges may reach through this server.
    pub(crate) nodes: Arc<ArcSwap<Vec<NodeGlob>>>,
}

impl LivePolicies {
    pub(crate) fn new(settings: &ServerConfig) -> Self {
        let policies = Self::default();
        policies.change(settings).apply();
        policies
    }

    /// Returns the change to the rules of this config.
    pub(crate) fn change(&self, settings: &ServerConfig) -> RightsChange {
        let mut change = RightsChange::default();
        change.replace(&self.for_edges, settings.edge_access.targets.clone());
        change.replace(&self.for_clients, settings.direct.targets.clone());
        change.replace(&self.nodes, settings.edge_access.nodes.clone());
        change
    }
}
