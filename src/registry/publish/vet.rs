//! What is asked before a node is published in a zone that is not ours: whether its name is somebody else's already.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::names::NodeName;
use crate::net::resolver::{LookupError, Resolver};
use crate::policy::zone::Zone;

/// Who is asked.
pub struct Vet {
    /// For the addresses that a name has already.
    resolver: Resolver,
    is_pod: Box<IsPod>,
    verdicts: HashMap<NodeName, Verdict>,
    /// Nodes that were named because they are not published.
    named: HashSet<NodeName>,
}

type IsPod = dyn Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync;

#[derive(Debug)]
struct Verdict {
    /// An address that the name has, and that is no pod's.
    taken: Option<IpAddr>,
    at: Instant,
}

impl Vet {
    /// Asks `resolver` what names stand for, and `is_pod` whether one of the addresses takes links; within a few seconds.
    pub fn new(
        resolver: Resolver,
        is_pod: impl Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static,
    ) -> Self {
        Self { resolver, is_pod: Box::new(is_pod), verdicts: HashMap::new(), named: HashSet::new() }
    }

    /// The records of those nodes that may have one. Of each of the others it is said why, once, as long as there are not
    /// too many. `ours` are addresses of pods that stand in the store.
    pub(super) async fn records(
        &mut self,
        nodes: Vec<NodeName>,
        zone: &Zone,
        ours: &BTreeSet<IpAddr>,
    ) -> Vec<String> {
        let mut named = Vec::new();
        for node in nodes {
            match zone.name(&node) {
                Ok(name) => named.push((node, name)),
                Err(why) => self.tell(&node, &why),
            }
        }
        if zone.is_open() {
            self.look(&named, ours).await;
            named.retain(|(node, name)| match self.verdicts.get(node).and_then(|verdict| verdict.taken) {
                Some(at) => {
                    self.tell(node, &format_args!("{name} is {at} in DNS, where no pod answers: rename the node, or set mode.cloud.registry.zone"));
                    false
                }
                None => true,
            });
        }
        named.into_iter().map(|(_, name)| name).collect()
    }

    /// Asks for those of which nothing is known, some at a time. DNS that does not answer is no reason to publish nobody.
    async fn look(&mut self, named: &[(NodeName, String)], ours: &BTreeSet<IpAddr>) {
        let here: HashSet<&NodeName> = named.iter().map(|(node, _)| node).collect();
        self.verdicts.retain(|node, verdict| {
            here.contains(node) && (verdict.taken.is_none() || verdict.at.elapsed() < AGAIN)
        });
        let new: Vec<_> = named.iter().filter(|(node, _)| !self.verdicts.contains_key(node)).collect();
        for some in new.chunks(AT_ONCE) {
            let asked = some.iter().map(|(_, name)| self.stranger(name, ours));
            let taken = join_all(asked).await;
            let silent = taken.iter().any(Result::is_err);
            for ((node, _), taken) in some.iter().zip(taken) {
                let verdict = Verdict { taken: taken.unwrap_or_default(), at: Instant::now() };
                self.verdicts.insert(node.clone(), verdict);
            }
            if silent {
                return;
            }
        }
    }

    /// An address of a name that is no pod's, if it has one. An error if DNS does not answer.
    async fn stranger(&self, name: &str, ours: &BTreeSet<IpAddr>) -> Result<Option<IpAddr>, ()> {
        let found = match timeout(PATIENCE, self.resolver.lookup(name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(LookupError::NotFound(_))) => return Ok(None),
            Ok(Err(_)) | Err(_) => return Err(()),
        };
        for ip in found.into_iter().filter(|ip| !ours.contains(ip)).take(MOST_ADDRESSES) {
            if !timeout(PATIENCE, (self.is_pod)(ip)).await.unwrap_or(false) {
                return Ok(Some(ip));
            }
        }
        Ok(None)
    }

    fn tell(&mut self, node: &NodeName, why: &dyn fmt::Display) {
        if self.named.len() >= MOST_NAMED || !self.named.insert(node.clone()) {
            return;
        }
        warn!(%node, "the node is not published: {why}");
        if self.named.len() == MOST_NAMED {
            warn!("further nodes that are not published will not be named");
        }
    }
}

impl fmt::Debug for Vet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Vet")
    }
}

/// Nodes that are named because they are not published, so that they cannot fill the log.
const MOST_NAMED: usize = 1000;
/// Names that are asked for at once.
const AT_ONCE: usize = 64;
/// Addresses of one name that are looked at.
const MOST_ADDRESSES: usize = 8;
/// How long a name that is somebody else's is left alone before it is asked for again.
const AGAIN: Duration = Duration::from_secs(30);
/// For each answer: of DNS, and of a pod.
const PATIENCE: Duration = Duration::from_secs(2);
