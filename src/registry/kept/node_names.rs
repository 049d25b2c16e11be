//! The address of every node of a cluster in a ConfigMap from which DNS answers: edges' names lead to the pods, all others
//! to the nodes themselves.
//!
//! One pod writes it, the holder of a [`Lease`]. What it writes carries the number of its term, and replaces the very
//! version that it has read. A write that was on its way for too long is refused, as its successor begins with one of
//! its own; and who finds a higher number stops.

mod lines;
mod node;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Api;
use kube::runtime::watcher::{self, Event};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::lease::{Lease, Term};
use crate::drain::Drain;
use crate::policy::Glob;
use crate::registry::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};
use crate::registry::follow::{Followed, Take};
use node::{NamedNode, Nodes};
use write::Stopped;

/// What is written, and where.
#[derive(Debug, Clone)]
pub struct NodeNameParams {
    /// Where all of it is.
    pub cluster: Cluster,
    /// Namespace of ConfigMap and Lease.
    pub namespace: String,
    /// The ConfigMap.
    pub configmap: String,
    /// Its key.
    pub key: String,
    /// The Lease.
    pub lease: String,
    /// Who this process is; no other one is called so.
    pub me: String,
    /// Label and value of Nodes that are edges.
    pub edges: (String, String),
    /// What names with dots that Nodes may have look like: no other Node with dots in its name is written.
    pub names: Vec<Glob>,
    /// Service in our own namespace that leads to the pods.
    pub service: String,
    /// ConfigMap of our own namespace in which pods say which nodes they have: each edge's name leads to its pod, and to
    /// the Service only if it is at none. `None`: to the Service, always.
    pub holders: Option<String>,
}

/// Keeps the ConfigMap true for as long as this pod holds the Lease.
pub struct NodeNames {
    params: NodeNameParams,
    report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
    nodes: Mutex<Nodes>,
    /// The Service's addresses, which are no pod's.
    service: watch::Sender<BTreeSet<IpAddr>>,
    /// Nodes of which the log has told that they have no name, and why.
    left_out: Mutex<BTreeMap<String, &'static str>>,
    /// Nodes have changed.
    news: Notify,
}

impl NodeNames {
    /// Sends no request yet. `report` gets whether the ConfigMap is true, as far as this pod knows, and if not, why.
    pub fn new(params: NodeNameParams, report: impl Fn(Result<(), String>) + Send + Sync + 'static) -> Self {
        let service = watch::Sender::new(BTreeSet::new());
        let (nodes, left_out) = (Mutex::default(), Mutex::default());
        Self { params, report: Box::new(report), nodes, service, left_out, news: Notify::new() }
    }

    /// The addresses of the Service, to which names of nodes lead although no pod has them; empty until they are known.
    pub fn service(&self) -> watch::Receiver<BTreeSet<IpAddr>> {
        self.service.subscribe()
    }

    /// Works until draining begins.
    pub async fn run(self, drain: Drain) {
        let NodeNameParams { cluster, namespace, lease, me, .. } = self.params.clone();
        let mut lease = Lease::new(cluster, namespace, lease, me);
        tokio::select! {
            () = self.follow_service() => {}
            () = async {
                loop {
                    let Some(term) = self.begins(&mut lease, &drain).await else { return };
                    info!(term = term.number, "this pod writes the names of nodes");
                    tokio::select! {
                        () = lease.keep(term) => warn!("another pod is to write the names of nodes: the Lease is lost"),
                        why = self.term(term) => warn!("names of nodes: this pod stops: {why}"),
                        () = drain.draining() => {}
                    }
                    if drain.is_draining() {
                        return lease.release(term).await;
                    }
                    // Whoever holds it now has written, or will have: what we know of it is over.
                    sleep(PAUSE).await;
                }
            } => {}
        }
    }

    /// Waits for a term; `None`: draining has begun.
    async fn begins(&self, lease: &mut Lease, drain: &Drain) -> Option<Term> {
        let acquired = async {
            // The Lease may have been deleted, and begin anew with a number that is lower than what was written.
            let least = loop {
                match self.written_term().await {
                    Ok(number) => break number.saturating_add(1),
                    Err(cause) => (self.report)(Err(cause.to_string())),
                }
                sleep(PAUSE).await;
            };
            lease.acquire(least, &self.report).await
        };
        tokio::select! {
            term = acquired => Some(term),
            () = drain.draining() => None,
        }
    }

    /// Writes until somebody else has; why it has stopped.
    async fn term(&self, term: Term) -> String {
        loop {
            *self.nodes() = Nodes::default();
            let (cluster, which) = (&self.params.cluster, watcher::Config::default());
            let followed = Followed { cluster, what: "Nodes, for their names", which };
            let whole = Instant::now() + WHOLE;
            tokio::select! {
                never = followed.follow(|client, _| Api::<NamedNode>::all(client), self) => match never {},
                why = self.keep(term) => return why,
                // All is listed anew.
                () = sleep_until(whole) => {}
            }
        }
    }

    async fn keep(&self, term: Term) -> String {
        let look_again = if self.params.holders.is_some() { LOOK_AT_HOLDERS } else { LOOK_AGAIN };
        let (mut first, mut next) = (true, Instant::now());
        loop {
            tokio::select! {
                () = self.news.notified() => sleep(GATHERING).await,
                () = sleep(look_again) => {}
            }
            sleep_until(next).await;
            let Some(nodes) = self.nodes().whole() else { continue };
            let passed = timeout(REQUEST_TIMEOUT, self.pass(term, &nodes, first)).await;
            match passed.unwrap_or(Err(Stopped::Failed(ClusterError::Silent))) {
                Ok(written) => {
                    first = false;
                    if written {
                        next = Instant::now() + BETWEEN_WRITES;
                    }
                    (self.report)(Ok(()));
                }
                Err(Stopped::Fenced(why)) => return why,
                Err(Stopped::Failed(cause)) => (self.report)(Err(cause.to_string())),
            }
        }
    }

    /// Learns the addresses of the Service again and again, whoever holds the Lease.
    async fn follow_service(&self) {
        loop {
            let looked = timeout(REQUEST_TIMEOUT, async {
                let (client, home) = self.params.cluster.connect().await?;
                self.look_up(&client, &home).await
            });
            // That it fails is told by whoever writes.
            let _ = looked.await;
            sleep(LOOK_AGAIN).await;
        }
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Take<NamedNode> for &NodeNames {
    fn take(&mut self, event: Event<NamedNode>) -> bool {
        let (news, followed) = {
            let mut nodes = self.nodes();
            (nodes.take(event, &self.params.edges), nodes.are_followed())
        };
        if news {
            self.news.notify_one();
        }
        followed
    }
}

impl std::fmt::Debug for NodeNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeNames").field("params", &self.params).finish_non_exhaustive()
    }
}

/// How long changes are gathered: each write sends the whole text.
const GATHERING: Duration = Duration::from_millis(200);

/// The least time between two writes of a term: a kubelet may change its own Node as often as it likes.
const BETWEEN_WRITES: Duration = Duration::from_secs(5);

/// How often it is looked at although no Node has changed: the Service or the text itself may have.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// The same where edges' names lead to the pods that have them.
const LOOK_AT_HOLDERS: Duration = Duration::from_secs(2);

/// How often all Nodes are listed anew.
const WHOLE: Duration = Duration::from_secs(30 * 60);

/// Before another try for a term.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
