//! The parts of a server that follow tables of its config: each starts when its table comes, ends when that goes, and
//! starts again when that changes.

pub(crate) mod part;

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tracing::info_span;

use crate::config::plan::log_changed;
use crate::kubernetes::EdgeWatches;
use crate::parts::with_kubernetes;
use crate::server::config::ServerConfig;
use crate::server::config_files;
use crate::server::edge_links::ClusterProofs;
use crate::server::running::part::RunningPart;
use crate::server::{Drains, ServerContext, peers};
use tunnel_base::addresses::cluster_state::KnownNodes;
use tunnel_base::drain::Drain;

/// A part of a server.
struct Part {
    /// The keys of the tables that it follows.
    tables: &'static [&'static str],
    /// Whether it uses files that must be read first.
    has_files: bool,
    /// Returns the drain with which it ends at the latest.
    drain: fn(&Drains) -> &Drain,
    /// Takes over what the tables set, and starts the tasks that they require.
    start: fn(&RunningPart),
}

/// All parts, in the order in which they follow a change. What a table proves comes first.
const PARTS: [Part; 7] = [
    Part {
        tables: &["server.service_account", "server.csr", "server.addresses", "server.node_names"],
        has_files: false,
        drain: |all| &all.links,
        start: prove_edges,
    },
    Part { tables: &["server.addresses"], has_files: false, drain: |all| &all.links, start: locate },
    Part { tables: &["server.csr"], has_files: false, drain: |all| &all.links, start: keep_certificates },
    Part { tables: &["server.node_ports"], has_files: false, drain: |all| &all.links, start: keep_ports },
    Part { tables: &["server.node_names"], has_files: false, drain: |all| &all.links, start: keep_names },
    Part { tables: PEERS_AND_DNS, has_files: true, drain: |all| &all.links, start: peers::start },
    Part { tables: PEERS_AND_DNS, has_files: true, drain: |all| &all.publisher, start: RunningPart::publish },
];

/// Records are published in the cluster of the peers, and a zone implies peers.
const PEERS_AND_DNS: &[&str] = &["server.peers", "server.dns"];

/// The parts that run, in the order of [`PARTS`].
#[derive(Debug)]
pub(crate) struct RunningParts(Vec<RunningPart>);

impl RunningParts {
    pub(crate) fn start(server: &Arc<ServerContext>, settings: &Arc<ServerConfig>) -> Self {
        Self(PARTS.iter().map(|part| part.start(server, settings)).collect())
    }

    /// Ends the parts with tables that have changed, and starts them again. If `read` returns false, the files cannot be
    /// read, and the parts that use them are as before. Not cancel safe.
    pub(crate) async fn follow(&mut self, settings: &Arc<ServerConfig>, mut read: impl FnMut() -> bool) {
        let mut is_read = None;
        let mut followed = BTreeSet::new();
        for (part, running) in PARTS.iter().zip(&mut self.0) {
            let mut changed = running.settings.plan(settings).changes();
            changed.retain(|key| part.tables.contains(&key.as_str()));
            if changed.is_empty() || part.has_files && !*is_read.get_or_insert_with(&mut read) {
                continue;
            }
            running.drain.finish(END_TIMEOUT, pending()).await;
            running.readiness.forget();
            *running = part.start(&running.server, settings);
            followed.append(&mut changed);
        }
        log_changed(&followed, "tables reloaded");
    }
}

impl Part {
    fn start(&self, server: &Arc<ServerContext>, settings: &Arc<ServerConfig>) -> RunningPart {
        let drain = Drain::new();
        let parent = (self.drain)(&server.drains);
        let drains = [parent, &drain].map(Drain::clone);
        parent.spawn(info_span!("part"), async move {
            let [parent, part] = drains;
            tokio::select! {
                () = parent.draining() => {}
                () = part.draining() => {}
            }
            part.finish(END_TIMEOUT, pending()).await;
        });
        let readiness = server.readiness.of_part();
        let running = RunningPart { server: server.clone(), settings: settings.clone(), readiness, drain };
        (self.start)(&running);
        running
    }
}

/// Watches the Nodes, if the config uses anything that requires the permission to list them, and the pods of edges, if
/// it has their ServiceAccount.
fn prove_edges(RunningPart { server, settings, readiness, drain, .. }: &RunningPart) {
    let names = settings.node_names.as_ref();
    let certificates = settings.csr.as_ref().filter(|csr| csr.edge_ca.is_some());
    let account = settings.service_account.as_ref();
    let cluster = settings.addresses.cluster.as_ref();
    let cluster = cluster.or(certificates.map(|csr| &csr.cluster));
    let cluster = cluster.or(account.map(|account| &account.cluster));
    let cluster = cluster.or(names.map(|names| &names.cluster));
    let edges = names.map(|names| names.edges.clone());
    let proofs = &server.edge_links.proofs;
    // Known until now, so that no link ends before the Nodes are listed again.
    let known: KnownNodes = proofs.borrow().nodes.as_ref().and_then(|nodes| nodes.borrow().clone());
    let follow = |cluster| -> Option<EdgeWatches> {
        with_kubernetes!(
            Some(api::server::follow_nodes(cluster, edges, account, known, readiness, drain)),
            else None
        )
    };
    let (nodes, pod_tokens) = cluster.and_then(follow).unzip();
    let certificates = config_files::edge_ca(settings).is_some();
    proofs.send_replace(ClusterProofs { nodes, certificates, pod_tokens: pod_tokens.flatten() });
}

/// Assigns addresses to nodes, by the table and by the cluster.
fn locate(RunningPart { server, settings, readiness, drain, .. }: &RunningPart) {
    let book = &server.clients.addresses;
    book.replace(settings.addresses.nodes.clone(), settings.addresses.cluster.is_some());
    if let Some(cluster) = &settings.addresses.cluster {
        with_kubernetes!(api::server::follow_addresses(cluster, book, readiness, drain), else ());
    }
}

fn keep_certificates(RunningPart { settings, readiness, drain, .. }: &RunningPart) {
    if let Some(csr) = &settings.csr {
        with_kubernetes!(api::server::csr::keep_server(csr, readiness, drain), else ());
    }
}

fn keep_ports(RunningPart { server, settings, readiness, drain, .. }: &RunningPart) {
    match &settings.ports {
        None => _ = server.ports.send_replace(Default::default()),
        Some(ports) => {
            let own = server.own_ports.clone();
            let redirected = server.ports.clone();
            with_kubernetes!(api::server::keep_ports(ports, own, redirected, readiness, drain), else ());
        }
    }
}

fn keep_names(RunningPart { server, settings, readiness, drain, .. }: &RunningPart) {
    match &settings.node_names {
        None => _ = server.service_addresses.send_replace(Default::default()),
        Some(names) => {
            let service = server.service_addresses.clone();
            let pod = &settings.pod_name;
            with_kubernetes!(api::server::keep_node_names(names, pod, service, readiness, drain), else ());
        }
    }
}

/// Time for the tasks of a part to end: the records of a publisher are withdrawn within 2 s.
const END_TIMEOUT: Duration = Duration::from_secs(3);
