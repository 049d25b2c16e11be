//! Sets up links to peers, and the search for nodes there.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tracing::{error, info_span, warn};

use crate::admin::readiness::Readiness;
use crate::config::server::LinkListenerConfig;
use crate::config::server::peers::PeerConfig;
use crate::kubernetes::ServerPods;
use crate::registry::peers::peer::TlsPeerDialer;
use crate::registry::peers::{PeerAddressSource, Peers};
use crate::registry::search::Dns;
use crate::registry::{Finder, Registry, Unasked};
use crate::server::config::ServerConfig;
use crate::startup::{Startup, StartupErrorKind};
use tunnel_base::drain::Drain;
use tunnel_base::names::Host;
use tunnel_base::policy::zone::Zone;
use tunnel_link::grpc::LinkContext;
use tunnel_link::link::Link;
use tunnel_net::pool::Pool;
use tunnel_net::reload::Reload;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{self, Identity, PeerTls, PeerTlsConfig};

/// The peers of a server that has some, and the links made to them, to be driven by the caller.
pub(crate) type PeerParts = (Arc<Peers>, mpsc::Receiver<Link>);

/// The parts of the core that the finder needs.
#[derive(Debug)]
pub(crate) struct FinderDeps<'a> {
    pub(crate) link_context: &'a LinkContext,
    pub(crate) pool: &'a Pool,
    pub(crate) zone: &'a Arc<Zone>,
    /// TLS for dialling peers; `None` if there are none, or this server has no certificate for them.
    pub(crate) tls: Option<Reload<PeerTls>>,
    /// Resolves the names of peers in the config.
    pub(crate) resolver: &'a Resolver,
    /// Resolves the names of nodes.
    pub(crate) dns: &'a Resolver,
    /// Addresses in the DNS records of nodes that do not belong to any server.
    pub(crate) no_servers: &'a watch::Receiver<BTreeSet<IpAddr>>,
    /// The nodes that are linked here.
    pub(crate) registry: Arc<Registry>,
    /// This server's gRPC port.
    pub(crate) port: u16,
}

/// Reads the TLS files for dialling peers. Returns `None` if no peers are configured, or the files do not allow links
/// to them. The latter is an error if the config names peers, otherwise a warning.
pub(crate) fn dialer(settings: &ServerConfig, startup: &mut Startup) -> Option<Reload<PeerTls>> {
    let asked = &settings.peers;
    if !asked.several {
        return None;
    }
    let why = match peer_tls(&settings.links, asked.certificate_name.as_deref()) {
        Ok(tls) => return Some(tls),
        Err(why) => why,
    };
    match asked.named {
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

/// Sets up the finder as configured, and the report of peers that do not answer or cannot be asked. Without TLS for
/// peers, it only searches the nodes linked here. `pods` has peers in addition to the configured ones.
pub(crate) fn finder(
    asked: &PeerConfig,
    joined: FinderDeps<'_>,
    pods: Option<&ServerPods>,
    readiness: &Readiness,
) -> (Arc<Finder>, Option<PeerParts>) {
    let FinderDeps { link_context, pool, zone, tls, resolver, dns, no_servers, registry, port } = joined;
    let (own, drain) = (link_context.table.instance(), &link_context.drain);
    let Some(tls) = tls else {
        let finder = Finder::without_peers(registry, own);
        report_unasked(finder.clone(), pods, true, readiness.clone(), drain);
        return (finder, None);
    };
    let service = asked.dns_name.as_ref().and_then(|service| match &service.host {
        Host::Name(name) => Some((name.to_string(), service.port)),
        Host::Ip(_) => None,
    });
    let named = PeerAddressSource {
        list: asked.addresses.clone(),
        service,
        cluster: pods.map(|pods| pods.peers.clone()),
    };
    let addresses = named.follow(Arc::new(resolver.clone()), drain);
    let (dialer, made) = TlsPeerDialer::new(tls, pool.clone(), link_context.clone());
    let peers = Peers::new(addresses, registry.clone(), dialer, own, drain.clone());
    let dns = Dns::new(Arc::new(dns.clone()), zone.clone()).excluding(no_servers.clone());
    let finder = Finder::new(registry, own, peers.clone(), dns, port);
    report(peers.clone(), readiness.clone(), drain);
    report_unasked(finder.clone(), pods, false, readiness.clone(), drain);
    (finder, Some((peers, made)))
}

/// Reports in `/readyz` which listed peers do not answer, and why. This does not make the server unready.
fn report(peers: Arc<Peers>, readiness: Readiness, drain: &Drain) {
    let draining = drain.clone();
    drain.spawn(info_span!("report"), async move {
        let mut changes = peers.changes();
        loop {
            changes.mark_unchanged();
            readiness.set_degraded("peers", peers.check());
            tokio::select! {
                () = draining.draining() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    });
}

/// Reports servers in the cluster that cannot be asked for a node: in `/readyz`, and in the error of a node that is not
/// found. `unlinked` is true if this server cannot link to peers.
fn report_unasked(
    finder: Arc<Finder>,
    pods: Option<&ServerPods>,
    unlinked: bool,
    readiness: Readiness,
    drain: &Drain,
) {
    let Some(ServerPods { peers: mut listed, mut unlisted, .. }) = pods.cloned() else { return };
    let draining = drain.clone();
    drain.spawn(info_span!("report"), async move {
        loop {
            let (why, text) = match &*unlisted.borrow_and_update() {
                Some(cause) => (Some(Unasked::Unlisted), Err(cause.clone())),
                None if unlinked && !listed.borrow_and_update().is_empty() => {
                    (Some(Unasked::Unlinked), Err(format!("cannot link to the other servers; {REMEDY}")))
                }
                None => (None, Ok(())),
            };
            finder.set_unasked(why);
            readiness.set_degraded("peer_discovery", text);
            let changed = tokio::select! {
                () = draining.draining() => return,
                changed = listed.changed() => changed,
                changed = unlisted.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    });
}

fn peer_tls(links: &LinkListenerConfig, name: Option<&str>) -> Result<Reload<PeerTls>, String> {
    let name = name.map(tls::server_name).transpose().map_err(|cause| cause.to_string())?;
    let identity = Identity { cert: links.cert.clone(), key: links.key.clone() };
    PeerTlsConfig { identity, ca: links.peer_ca.clone(), name }.load().map_err(|cause| cause.to_string())
}

/// The hint for servers that cannot link to each other.
const REMEDY: &str = "give all servers a cert from one CA, and put that CA into the file of peer_ca in [server.links], by \
                      default /etc/tunnel/certs/ca.crt";
