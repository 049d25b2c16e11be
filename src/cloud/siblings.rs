//! From the settings of other pods to who finds nodes there.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::{mpsc, watch};
use tracing::{error, info_span, warn};

use crate::admin::Readiness;
use crate::config::cloud::{Server, registry};
use crate::drain::Drain;
use crate::names::Host;
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::tls::{self, Dialer, Identity, Mutual};
use crate::policy::zone::Zone;
use crate::protocol::Link;
use crate::protocol::grpc::LinkContext;
use crate::registry::Registry;
use crate::registry::dns::Dns;
use crate::registry::find::Finder;
use crate::registry::siblings::{Siblings, addresses};

/// Who finds nodes, and what of other pods the wiring has to look after.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) finder: Arc<Finder>,
    pub(super) several: Option<Several>,
}

/// This pod is one of several.
#[derive(Debug)]
pub(super) struct Several {
    pub(super) siblings: Arc<Siblings>,
    /// Links that were made to other pods, to be driven.
    pub(super) made: mpsc::Receiver<Link>,
}

/// Sets up what the settings ask for: nothing, if nothing says that there are other pods. `port` is our own gRPC port;
/// `cluster` tells of pods beside those of the settings.
///
/// # Errors
///
/// Other pods are named, and there can be no link to them.
pub(super) fn finder(
    settings: &registry::Registry,
    server: &Server,
    registry: Arc<Registry>,
    (ground, pool, system, zone): (&LinkContext, &Pool, &Resolver, &Arc<Zone>),
    port: u16,
    cluster: Option<watch::Receiver<Vec<SocketAddr>>>,
) -> anyhow::Result<Found> {
    let (asked, own) = (&settings.siblings, ground.table.instance());
    if !asked.several {
        return Ok(Found { finder: Finder::alone(registry, own), several: None });
    }
    let tls = match mutual(server, asked.name.as_deref()) {
        Ok(tls) => tls,
        Err(why) => {
            match asked.named {
                Some(named) if named.must_link => {
                    let fault =
                        format!("{} names other pods, and none can be linked to: {REMEDY}", named.key);
                    return Err(why.context(fault));
                }
                Some(named) => error!(
                    "{} names other pods, and none can be linked to, so that nodes are reached only through the very \
                     pod that they are linked to: {REMEDY}: {why:#}",
                    named.key
                ),
                None => warn!("other pods cannot be asked for their nodes: {REMEDY}: {why:#}"),
            }
            return Ok(Found { finder: Finder::alone(registry, own), several: None });
        }
    };
    let drain = &ground.drain;
    let resolver = match asked.dns.as_slice() {
        [] => system.clone(),
        servers => Resolver::of_servers(servers).context("mode.cloud.registry.dns")?,
    };
    drain.spawn(info_span!("tls"), tls.clone().watch(drain.clone()));
    let service = asked.service.as_ref().and_then(|service| match &service.host {
        Host::Name(name) => Some((name.to_string(), service.port)),
        Host::Ip(_) => None,
    });
    let named = addresses::Named { list: asked.list.clone(), service, cluster };
    let addresses = addresses::follow(named, system.clone(), drain);
    let (siblings, made) = Siblings::new(addresses, registry.clone(), tls, pool.clone(), ground.clone());
    let dns = Dns::new(resolver, zone.clone());
    let finder = Finder::new(registry, own, siblings.clone(), dns, port);
    Ok(Found { finder, several: Some(Several { siblings, made }) })
}

/// Tells in `/readyz` which of the pods that are listed do not answer, and why. That makes this pod no less ready.
pub(super) fn report(siblings: Arc<Siblings>, readiness: Readiness, drain: &Drain) {
    let draining = drain.clone();
    drain.spawn(info_span!("report"), async move {
        let mut changes = siblings.changes();
        loop {
            changes.mark_unchanged();
            readiness.note("other pods", siblings.check());
            tokio::select! {
                () = draining.draining() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    });
}

fn mutual(server: &Server, name: Option<&str>) -> anyhow::Result<Reload<Dialer>> {
    let name = name.map(tls::server_name).transpose().context("mode.cloud.registry.name")?;
    let identity = Identity { cert: server.cert.clone(), key: server.key.clone() };
    let mutual = Mutual { identity, ca: server.ca.clone(), name };
    mutual.load().context("mode.cloud.stream.server.ca, cert and key")
}

/// What lets pods know each other.
const REMEDY: &str =
    "give all pods a cert of one authority, and its certificate as ca, in [mode.cloud.stream.server]";
