//! Decides whether a node may be published in a foreign zone, where its name may already belong to another host.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::time::{Instant, timeout};
use tracing::warn;

use tunnel_base::policy::zone::{DnsNameError, NodeZone};
use tunnel_net::resolver::{DnsLookupError, Resolver};
use tunnel_proto::names::NodeName;

/// Decides which nodes may have a record. Compares with the addresses that a name already has in DNS.
#[derive(derive_more::Debug)]
#[debug("RecordFilter")]
pub struct RecordFilter {
    /// Resolver for the current addresses of names.
    resolver: Resolver,
    is_pod: Box<IsServer>,
    nodes: Option<Box<NodeLister>>,
    /// The Nodes of the cluster, and when they were listed.
    listed: Option<(Instant, BTreeSet<String>)>,
    verdicts: HashMap<NodeName, DnsNameCheck>,
    /// Nodes already logged as not published.
    named: HashSet<NodeName>,
}

type IsServer = dyn Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync;
/// Lists the Nodes of a cluster.
pub type NodeLister = dyn Fn() -> BoxFuture<'static, Result<BTreeSet<String>, String>> + Send + Sync;

/// The outcome of looking up a node's name in DNS before it is published, kept by a [`RecordFilter`].
#[derive(Debug)]
struct DnsNameCheck {
    /// An address of the name that belongs to no server.
    taken: Option<IpAddr>,
    /// Time of the lookup; a name that was taken is looked up again later.
    at: Instant,
}

impl RecordFilter {
    /// Creates a policy. `resolver` looks up names, and `is_pod` returns true if a server accepts links at an address,
    /// within a few seconds. `nodes` lists the cluster's Nodes, all of which may be published: their names in lower
    /// case, or why they cannot be listed.
    pub fn new(
        resolver: Resolver,
        is_pod: impl Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static,
        nodes: Option<Box<NodeLister>>,
    ) -> Self {
        Self {
            resolver,
            is_pod: Box::new(is_pod),
            nodes,
            listed: None,
            verdicts: HashMap::new(),
            named: HashSet::new(),
        }
    }

    /// Returns the records of the nodes that may have one. Logs the reason for each of the others once, up to a limit.
    /// `ours` are the addresses of servers in the store.
    pub(crate) async fn records(
        &mut self,
        nodes: Vec<NodeName>,
        zone: &NodeZone,
        ours: &BTreeSet<IpAddr>,
    ) -> Vec<String> {
        let mut named = Vec::new();
        for node in nodes {
            match zone.name(&node) {
                Ok(name) => named.push((node, name)),
                Err(DnsNameError::Foreign) if self.is_of_cluster(&node).await => {
                    named.push((node.clone(), node.as_str().to_ascii_lowercase()));
                }
                Err(why) => self.warn_once(&node, &why),
            }
        }
        // Without a zone, a node's name may be that of another host, whose clients must not come here.
        if zone.is_open() {
            self.look_up(&named, ours).await;
            named.retain(|(node, name)| match self.verdicts.get(node).and_then(|verdict| verdict.taken) {
                Some(at) => {
                    self.warn_once(node, &format_args!("{name} resolves to {at}, which is no server; rename the node, or set server.dns.zone"));
                    false
                }
                None => true,
            });
        }
        named.into_iter().map(|(_, name)| name).collect()
    }

    /// Returns true if the cluster has a Node of that name. Uses the last list, which is refreshed at intervals if the
    /// name is not in it.
    async fn is_of_cluster(&mut self, node: &NodeName) -> bool {
        let Some(nodes) = &self.nodes else { return false };
        let name = node.as_str().to_ascii_lowercase();
        let listed = self.listed.as_ref();
        if listed.is_none_or(|(at, names)| !names.contains(&name) && at.elapsed() >= RECHECK_AFTER) {
            let names = match nodes().await {
                Ok(names) => names,
                Err(cause) => {
                    if listed.is_none() {
                        warn!(error = cause, "cannot list Nodes, names with dots are not published");
                    }
                    self.listed.take().map(|(_, names)| names).unwrap_or_default()
                }
            };
            self.listed = Some((Instant::now(), names));
        }
        self.listed.as_ref().is_some_and(|(_, names)| names.contains(&name))
    }

    /// Looks up new names in batches. Names are published even if DNS does not answer.
    async fn look_up(&mut self, named: &[(NodeName, String)], ours: &BTreeSet<IpAddr>) {
        let here: HashSet<&NodeName> = named.iter().map(|(node, _)| node).collect();
        self.verdicts.retain(|node, verdict| {
            here.contains(node) && (verdict.taken.is_none() || verdict.at.elapsed() < RECHECK_AFTER)
        });
        let new: Vec<_> = named.iter().filter(|(node, _)| !self.verdicts.contains_key(node)).collect();
        for some in new.chunks(AT_ONCE) {
            let lookups = some.iter().map(|(_, name)| self.foreign_address(name, ours));
            let taken = join_all(lookups).await;
            let silent = taken.iter().any(Result::is_err);
            for ((node, _), taken) in some.iter().zip(taken) {
                let verdict = DnsNameCheck { taken: taken.unwrap_or_default(), at: Instant::now() };
                self.verdicts.insert(node.clone(), verdict);
            }
            if silent {
                return;
            }
        }
    }

    /// Returns an address of the name that belongs to no server, if there is one. Returns an error if DNS does not
    /// answer.
    async fn foreign_address(&self, name: &str, ours: &BTreeSet<IpAddr>) -> Result<Option<IpAddr>, ()> {
        let found = match timeout(TIMEOUT, self.resolver.lookup(name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(DnsLookupError::NotFound(_))) => return Ok(None),
            Ok(Err(_)) | Err(_) => return Err(()),
        };
        for ip in found.into_iter().filter(|ip| !ours.contains(ip)).take(MAX_ADDRESSES) {
            if !timeout(TIMEOUT, (self.is_pod)(ip)).await.unwrap_or(false) {
                return Ok(Some(ip));
            }
        }
        Ok(None)
    }

    fn warn_once(&mut self, node: &NodeName, why: &dyn fmt::Display) {
        if self.named.len() >= MAX_NAMED || !self.named.insert(node.clone()) {
            return;
        }
        warn!(%node, reason = %why, "node not published");
        if self.named.len() == MAX_NAMED {
            warn!("further unpublished nodes will not be logged");
        }
    }
}

/// Maximum number of nodes logged as not published.
const MAX_NAMED: usize = 1000;
/// Maximum number of concurrent lookups.
const AT_ONCE: usize = 64;
/// Maximum number of addresses checked per name.
const MAX_ADDRESSES: usize = 8;
/// Time until a foreign name is looked up again.
const RECHECK_AFTER: Duration = Duration::from_secs(30);
/// Timeout for each answer of DNS or of a server.
const TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn dotted_names_are_published_only_for_listed_nodes_and_the_list_is_cached() {
        let nobody = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = Resolver::of_servers(&[nobody.local_addr().unwrap()]).unwrap();
        let (zone, lookups) =
            (NodeZone::new(String::new(), Vec::new(), |_| false), Arc::new(AtomicUsize::new(0)));
        let count = lookups.clone();
        let list: Box<NodeLister> = Box::new(move || {
            let turn = count.fetch_add(1, Relaxed);
            Box::pin(async move {
                match turn {
                    0 => Ok(BTreeSet::from(["a.example.org".to_owned()])),
                    _ => Err("forbidden".to_owned()),
                }
            })
        });
        let mut vet = RecordFilter::new(dns, |_| Box::pin(async { false }), Some(list));
        let nodes = || ["A.example.org", "b.example.org", "n"].map(|node| node.parse().unwrap()).to_vec();
        for _ in 0..10 {
            let records = vet.records(nodes(), &zone, &BTreeSet::new()).await;
            assert_eq!(records, ["a.example.org", "n"], "no name is refused if DNS does not answer");
        }
        assert_eq!(lookups.load(Relaxed), 1);
        tokio::time::advance(RECHECK_AFTER).await;
        assert_eq!(
            vet.records(nodes(), &zone, &BTreeSet::new()).await.len(),
            2,
            "the last list remains valid"
        );
        assert_eq!(lookups.load(Relaxed), 2);
    }
}
