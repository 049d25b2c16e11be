//! Finding a node: linked here, else where it was found before, else by DNS and by asking the other pods.

mod announce;
mod contest;
mod interest;
mod known;
mod missing;
mod search;

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::names::{Instance, NodeName};
use crate::protocol::{LinkSender, Parked, Peer, SessionTable};
use crate::registry::Dns;
use crate::registry::siblings::{NodeFound, Siblings};
use crate::registry::{Claim, Claimant, NodeLocation, Registry};

use interest::Interest;
use known::LocationCache;
pub use missing::NotFound;
use search::{NodeQuery, Searches};

/// Finds nodes, here and at other pods.
#[derive(Debug)]
pub struct Finder {
    registry: Arc<Registry>,
    /// This process.
    own: Instance,
    others: Option<Others>,
}

/// What one of several pods needs to find nodes elsewhere.
#[derive(Debug)]
struct Others {
    siblings: Arc<Siblings>,
    known: Arc<LocationCache>,
    searches: Searches,
    interest: Interest,
}

/// A path to a node: the link over which a session is to be opened or resumed.
#[derive(Debug, Clone)]
pub struct Path {
    /// The node's own link, or one to the pod that has it.
    pub sender: Arc<LinkSender>,
    /// The node's process; none for a plain node that is linked here.
    pub instance: Option<Instance>,
}

impl Finder {
    /// For a pod that is alone.
    pub fn alone(registry: Arc<Registry>, own: Instance) -> Arc<Self> {
        Arc::new(Self { registry, own, others: None })
    }

    /// For one of several pods, the process `own`. A pod that DNS names is asked at `port`, unless a list names
    /// another.
    pub fn new(
        registry: Arc<Registry>,
        own: Instance,
        siblings: Arc<Siblings>,
        dns: Dns,
        port: u16,
    ) -> Arc<Self> {
        let known = Arc::new(LocationCache::default());
        let searches = Searches::new(siblings.clone(), known.clone(), dns, port);
        Arc::new(Self {
            registry,
            own,
            others: Some(Others { siblings, known, searches, interest: Interest::default() }),
        })
    }

    /// Whether no other pod is ever asked.
    pub fn is_alone(&self) -> bool {
        self.others.is_none()
    }

    /// The nodes that are linked to this pod.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// A path to a node: to its process `instance` if one is given, and neither over the link `not` nor through the pod
    /// at that link's other end. Takes about 2 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod has the node; the error names the pods that were asked.
    pub async fn find(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        not: Option<&LinkSender>,
    ) -> Result<Path, NotFound> {
        let wanted = NodeQuery::new(node, instance, not);
        if let Ok(path) = self.at_hand(&wanted) {
            return Ok(path);
        }
        let mut searching = pin!(self.search(wanted.clone()));
        let mut came = false;
        loop {
            // The waiter is made before the second look: a node that comes between the two ends the wait below. The
            // search itself would not notice it, as it asks other pods only.
            let arrival = self.registry.arrival(node);
            let missing = match self.at_hand(&wanted) {
                Ok(path) => return Ok(path),
                // The node has come, but as another process than the one that is sought. The caller decides how long it
                // still waits for that one.
                Err(missing) if came && missing.another => return Err(missing),
                Err(missing) => missing,
            };
            let not_found = tokio::select! {
                biased;
                found = &mut searching => match found {
                    Ok(yes) => return Ok(Path { sender: yes.sender, instance: yes.instance }),
                    Err(not_found) => not_found,
                },
                () = arrival.come() => {
                    came = true;
                    continue;
                }
            };
            let another = missing.another || not_found.another;
            let moving = missing.moving || not_found.moving;
            let seen = missing.seen.into_iter().chain(not_found.seen).min();
            return Err(NotFound { seen, another, moving, ..not_found });
        }
    }

    /// Whether there is a node of that name, as far as is known without asking anybody. What was heard of a pod's nodes
    /// before the link to it was made does not count: nobody has said since that they are there, or gone.
    pub fn knows(&self, node: &NodeName) -> bool {
        let Ok(Path { sender, .. }) = self.at_hand(&NodeQuery::new(node, None, None)) else { return false };
        let heard = || self.others.as_ref().and_then(|others| others.known.age(node));
        sender.peer != Peer::Pod || heard().is_some_and(|heard| heard <= sender.age())
    }

    /// What edges at other pods say of their nodes' addresses, as far as the nodes are known to be there.
    pub fn claims(&self) -> Vec<Claim> {
        let Some(others) = &self.others else { return Vec::new() };
        let mut said = others.known.claims();
        said.retain(|(node, _)| self.knows(node));
        let claim = |node: &NodeName, ip: &IpAddr| Claim { ip: *ip, node: node.clone(), by: Claimant::Edge };
        said.iter().flat_map(|(node, ips)| ips.iter().map(move |ip| claim(node, ip))).collect()
    }

    /// The node that has been linked to this pod for longest, and whether there are others. If there is none here: one
    /// of those that are known to be at other pods, the first by name.
    pub fn longest(&self) -> Option<(NodeName, bool)> {
        self.registry.longest().or_else(|| self.others.as_ref()?.known.first())
    }

    /// A path that needs no search: the node is linked here, or at a pod that is remembered and to which there is a
    /// link.
    fn at_hand(&self, wanted: &NodeQuery) -> Result<Path, NotFound> {
        let node = &wanted.node;
        let mut missing = NotFound::default();
        match self.registry.find(node) {
            // The link is closed already and its task is about to remove it: another thread is between the two.
            NodeLocation::Here(linked) if linked.sender.is_closed() => missing.seen = Some(Duration::ZERO),
            NodeLocation::Here(linked) if wanted.suits(linked.instance, &linked.sender) => {
                return Ok(Path { sender: linked.sender, instance: linked.instance });
            }
            NodeLocation::Here(linked) => missing.another = !wanted.is_of(linked.instance),
            NodeLocation::Nowhere(seen) => missing.seen = seen,
        }
        missing.moving = missing.seen.is_some_and(|seen| seen < MOVE_WINDOW);
        if let Some(others) = &self.others
            && let Some((pod, instance)) = others.known.of(node)
            && let Some(sender) = others.siblings.current(pod).and_then(|pod| pod.up())
        {
            if wanted.suits(instance, &sender) {
                return Ok(Path { sender, instance });
            }
            missing.another |= !wanted.is_of(instance);
        }
        Err(missing)
    }

    async fn search(&self, wanted: NodeQuery) -> Result<NodeFound, NotFound> {
        let Some(others) = &self.others else { return Err(NotFound::default()) };
        let node = wanted.node.clone();
        let any = wanted.is_any();
        let missed = if any { others.known.missing(&node) } else { None };
        let found = match missed {
            Some(not_found) => Err(not_found),
            None => others.searches.join(wanted).await.inspect_err(|not_found| {
                if any {
                    others.known.miss(&node, not_found);
                }
            }),
        };
        found.map_err(|not_found| {
            let lost = others.known.lost(&node);
            let moving = lost.into_iter().chain(not_found.seen).any(|since| since < MOVE_WINDOW);
            let seen = not_found.seen.into_iter().chain(others.known.seen(&node)).min();
            NotFound { seen, moving, ..not_found }
        })
    }

    /// A path to the pod whose process is `instance`. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod that could be reached is that process. The error names those that could not be reached.
    pub async fn find_pod(&self, instance: Option<Instance>) -> Result<Path, NotFound> {
        let (Some(others), Some(wanted)) = (&self.others, instance) else { return Err(NotFound::default()) };
        match others.siblings.process(wanted).await {
            Ok(sender) => Ok(Path { sender, instance }),
            Err(trouble) => Err(NotFound { trouble, ..NotFound::default() }),
        }
    }

    /// Whether the node is known to be linked, and as another process than this one.
    pub fn is_another(&self, node: &NodeName, instance: Instance) -> bool {
        let wanted = NodeQuery::new(node, Some(instance), None);
        self.at_hand(&wanted).is_err_and(|missing| missing.another)
    }

    /// Closes all links to other pods.
    pub fn close_links(&self) {
        for link in self.others.iter().flat_map(|others| others.siblings.links()) {
            link.close();
        }
    }

    /// Notes that the node is not at the pod behind this path, because the node was not there.
    pub fn is_wrong(&self, node: &NodeName, path: &Path) {
        if let Some(others) = &self.others {
            others.known.forget(node, &others.siblings.behind(&path.sender));
        }
    }

    /// A node was linked anew at the pod `at`, which may be this one. Other links over which our sessions run to it are
    /// pinged; those that do not answer within 1 s are left. Returns the sessions that need another path.
    pub async fn make_way(&self, at: Instance, node: &NodeName, table: &SessionTable) -> Vec<Parked> {
        let Some(others) = &self.others else { return Vec::new() };
        if table.is_empty() && table.passing().0 == 0 {
            return Vec::new();
        }
        let mut links = others.siblings.links();
        links.retain(|link| link.instance != Some(at) && link.sessions() > 0 && table.leads(link, node));
        let lives = join_all(links.iter().map(|link| link.answers_within(PONG_TIMEOUT))).await;
        let mut parked = Vec::new();
        for (link, _) in links.iter().zip(lives).filter(|(_, lives)| !lives) {
            self.is_wrong(node, &Path { sender: link.clone(), instance: None });
            table.release(link, |of| of == node);
            parked.extend(table.leave(link, |of, _| of == node));
        }
        parked
    }
}

/// How long an edge that has lost its link usually takes to link again: for so long its node counts as moving.
pub(super) const MOVE_WINDOW: Duration = Duration::from_secs(3);
/// How long an old link has to answer a ping when its node has come elsewhere.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
