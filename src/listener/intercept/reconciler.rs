//! Which addresses are intercepted, for how long, and the task that reconciles the table.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, info_span, warn};

use crate::intercept::{InterceptError, InterceptSets, NftTable};
use crate::listener::ListenerDeps;
use crate::listener::intercept::{InterceptConfig, InterceptedNode, NodesByAddress};
use tunnel_base::addresses::{AddressClaim, ClaimRejectReason, ClaimSource, RejectedClaim};
use tunnel_base::names::NodeName;
use tunnel_base::policy::targets::is_off_limits;
use tunnel_net::interfaces::LocalAddresses;

/// The prepared table, and the listeners' lookup of intercepted nodes.
#[derive(Debug)]
pub(super) struct PreparedIntercept {
    pub(super) table: NftTable,
    pub(super) intercepted: Arc<NodesByAddress>,
    pub(super) settings: InterceptConfig,
}

impl PreparedIntercept {
    /// Intercepts until the server begins to stop. The receiver is notified once nothing is intercepted.
    pub(super) fn spawn(self, deps: &ListenerDeps) -> oneshot::Receiver<()> {
        let Self { table, intercepted, settings } = self;
        if !deps.uses_kubernetes && !settings.trust_edge_addresses {
            info!(
                hint =
                    "list addresses in the token file, or set server.intercept.trust_edge_addresses = true",
                "addresses claimed by edges are ignored without Kubernetes"
            );
        }
        let (done, emptied) = oneshot::channel();
        let own =
            LocalAddresses::of_interfaces(settings.host_ip.into_iter().chain(settings.pod_ip).collect());
        let reconciler = Reconciler::new(table, intercepted, settings, own, deps.clone());
        deps.links.spawn(info_span!("intercept"), reconciler.run(done));
        emptied
    }
}

// Reconciles the table: which addresses are intercepted follows from the links, at this server and at peers.

/// The only task that writes the table.
pub(super) struct Reconciler {
    table: NftTable,
    intercepted: Arc<NodesByAddress>,
    settings: InterceptConfig,
    /// The addresses of this host.
    own: LocalAddresses,
    deps: ListenerDeps,
    presence: InterceptedAddresses,
    seeker: NodeDiscovery,
    claim_log: ClaimLog,
    /// The intercepted ports.
    ports: BTreeSet<u16>,
    /// When the table was last written, if that succeeded.
    kept: Option<Instant>,
}

impl Reconciler {
    pub(super) fn new(
        table: NftTable,
        intercepted: Arc<NodesByAddress>,
        settings: InterceptConfig,
        own: LocalAddresses,
        deps: ListenerDeps,
    ) -> Self {
        let (presence, seeker, claim_log, ports) =
            (InterceptedAddresses::default(), NodeDiscovery::new(), ClaimLog::default(), BTreeSet::new());
        Self { table, intercepted, settings, own, deps, presence, seeker, claim_log, ports, kept: None }
    }

    /// Intercepts until the server begins to stop, then empties the table and notifies `emptied`. Deletes the table
    /// once no session needs it.
    pub(super) async fn run(mut self, emptied: oneshot::Sender<()>) {
        let (links, stopping) = (self.deps.links.clone(), self.deps.stopping.clone());
        let mut changes = self.deps.registry.subscribe();
        let mut pace = Debounce::new();
        while !stopping.is_cancelled() {
            let changed = self.refresh_addresses();
            if changed || self.kept.is_none_or(|at| at.elapsed() >= PORT_REFRESH_INTERVAL) {
                self.intercepted.set(self.presence.nodes().clone());
                let nodes = self.presence.nodes().keys().copied().collect();
                let kept = self.table.sync(&InterceptSets { nodes, ports: self.ports.clone() }).await;
                self.record_result(kept);
            }
            tokio::select! {
                () = stopping.cancelled() => {}
                () = pace.next(&mut changes) => {}
            }
        }
        let emptying = self.table.sync(&InterceptSets::default()).await;
        self.record_result(emptying);
        info!("interception stopped");
        // The receiver is missing if the start was aborted.
        let _ = emptied.send(());
        links.draining().await;
        self.table.delete().await;
    }

    /// Updates the intercepted addresses. Returns true if they have changed.
    fn refresh_addresses(&mut self) -> bool {
        let own = self.own.now().all;
        let peers = self.deps.peers.as_ref().map(|peers| peers.addresses()).unwrap_or_default();
        let refuses = |ip: IpAddr| {
            let why = [
                (!self.settings.networks.contains(ip), REASON_OUTSIDE_NETWORKS),
                (is_off_limits(ip), "loopback, link-local, metadata or the like"),
                (own.contains(&ip), REASON_HOST_ADDRESS),
                (peers.contains(&ip), REASON_PEER_ADDRESS),
            ];
            why.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
        };
        let mut claims = (self.deps.claims)();
        claims.extend(self.deps.finder.claims());
        let holders = self.deps.context.addresses.owners(claims, self.settings.trust_edge_addresses, refuses);
        // For addresses that are no longer claimed.
        let refused = |ip: IpAddr, node: &NodeName| {
            let claim = AddressClaim { ip, node: node.clone(), by: ClaimSource::Edge };
            refuses(ip).or_else(|| self.deps.context.addresses.refusal(&claim)).is_some()
        };
        let mut knows = HashMap::new();
        for node in
            holders.nodes.values().chain(self.presence.nodes().values().map(|intercepted| &intercepted.node))
        {
            if !knows.contains_key(node) {
                knows.insert(node.clone(), self.deps.finder.knows(node));
            }
        }
        let linked = |node: &NodeName| knows.get(node).copied().unwrap_or_default();
        let changed =
            self.presence.update(&holders.nodes, refused, linked, Instant::now(), self.deps.resume_timeout)
                | self.refresh_ports();
        let unknown = knows.iter().filter(|(_, knows)| !**knows).map(|(node, _)| node.clone()).collect();
        self.seeker.query_unknown(&unknown, &self.deps);
        self.log_rejected_claims(holders.rejected);
        changed
    }

    /// Updates the ports from the config and the ConfigMap. Returns true if they have changed.
    fn refresh_ports(&mut self) -> bool {
        let mut ports: BTreeSet<u16> = self.settings.ports.iter().map(|port| port.0).collect();
        let named = self.deps.ports.borrow();
        ports.extend(named.http.iter().chain(&named.https));
        let changed = self.ports != ports;
        drop(named);
        if changed {
            info!(?ports, "intercepted node ports changed");
            self.ports = ports;
        }
        changed
    }

    /// Logs the rejected claims, each once while it is rejected.
    fn log_rejected_claims(&mut self, rejected: Vec<RejectedClaim>) {
        // A cluster has many Nodes that are not edges, some of which run servers. Their claims are not mistakes.
        let is_usual = |rejected: &RejectedClaim| {
            rejected.claim.by == ClaimSource::Kubernetes
                && [REASON_OUTSIDE_NETWORKS, REASON_HOST_ADDRESS, REASON_PEER_ADDRESS]
                    .iter()
                    .any(|why| rejected.why == ClaimRejectReason::NotANodeAddress(why))
        };
        let (news, more) = self.claim_log.update(rejected.into_iter().filter(|it| !is_usual(it)).collect());
        for RejectedClaim { claim: AddressClaim { ip, node, by }, why } in news {
            warn!(
                %ip,
                %node,
                source = %by,
                reason = %why,
                hint = "correct the claim at its source",
                "address claim rejected"
            );
        }
        if let Some(more) = more {
            warn!(
                more,
                hint = "correct the claims logged before these",
                "too many rejected address claims to log"
            );
        }
    }

    /// Handles the result of writing the table.
    fn record_result(&mut self, kept: Result<(), InterceptError>) {
        let trouble = self.deps.readiness.trouble(INTERCEPT_CONDITION);
        match kept {
            Ok(()) => {
                if trouble.is_some() || self.kept.is_none() {
                    info!(addresses = self.presence.nodes().len(), "intercept rules active");
                }
                debug!(addresses = self.presence.nodes().len(), "intercept rules up to date");
                self.kept = Some(Instant::now());
                self.deps.readiness.set_degraded(INTERCEPT_CONDITION, Ok(()));
            }
            Err(cause) => {
                self.kept = None;
                let cause = cause.to_string();
                if trouble.as_ref() != Some(&cause) {
                    error!(error = %cause, "cannot update intercept rules, retrying");
                }
                self.deps.readiness.set_degraded(INTERCEPT_CONDITION, Err(cause));
            }
        }
    }
}

/// A third of the timeout after which the kernel forgets the ports.
const PORT_REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// Why most claims are rejected.
const REASON_OUTSIDE_NETWORKS: &str = "outside of the networks of [server.intercept]";

/// Why a claim for an address of a server is rejected.
const REASON_HOST_ADDRESS: &str = "this host's";
const REASON_PEER_ADDRESS: &str = "another server's";

/// The name of its condition in `/readyz`.
const INTERCEPT_CONDITION: &str = "intercept";

// When the intercepted addresses are updated.

/// A timer for updates: at each change and each tick, with a minimum time between two.
#[derive(Debug)]
pub(super) struct Debounce {
    ticks: Interval,
    looked: Instant,
}

impl Debounce {
    /// Returns the timer; the first update is due now.
    pub(super) fn new() -> Self {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, looked: Instant::now() }
    }

    /// Waits until the next update is due. No change is lost if it is dropped early.
    pub(super) async fn next(&mut self, changes: &mut watch::Receiver<()>) {
        sleep_until(self.looked + MIN_INTERVAL).await;
        tokio::select! {
            // The channel never closes: the registry holds the sender.
            _ = changes.changed() => {}
            _ = self.ticks.tick() => {}
        }
        self.looked = Instant::now();
    }
}

/// Interval between updates for changes without a notification: nodes at peers, claims, and the time since a
/// disconnect.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum time between two updates, each of which reads all claims; frequent reconnects cause no more than this.
const MIN_INTERVAL: Duration = Duration::from_millis(150);

// How long an address is intercepted: from its node's first link until the resume timeout after the last one. Pure.

/// The addresses that a server intercepts now, with their nodes. The [`Reconciler`] updates them from links and claims.
#[derive(Debug, Default)]
pub(super) struct InterceptedAddresses(HashMap<IpAddr, InterceptedNode>);

impl InterceptedAddresses {
    /// Updates from the holders of addresses, the claims that are refused, and the nodes that are linked to any server.
    /// Returns true if that changed anything.
    pub(super) fn update(
        &mut self,
        holders: &HashMap<IpAddr, NodeName>,
        refused: impl Fn(IpAddr, &NodeName) -> bool,
        linked: impl Fn(&NodeName) -> bool,
        now: Instant,
        resume_timeout: Duration,
    ) -> bool {
        let mut next = HashMap::with_capacity(self.0.len());
        for (ip, node) in holders {
            if linked(node) {
                next.insert(*ip, InterceptedNode { node: node.clone(), left: None });
            }
        }
        for (ip, was) in &self.0 {
            // An edge's claim ends with its link, so the address may have no holder meanwhile. If another node holds
            // it, or the claim is refused now, the address is released at once.
            let is_its = match holders.get(ip) {
                Some(node) => *node == was.node,
                None => !refused(*ip, &was.node),
            };
            let stays = is_its && !linked(&was.node);
            let left = was.left.unwrap_or(now);
            if stays && now - left < resume_timeout {
                next.insert(*ip, InterceptedNode { left: Some(left), ..was.clone() });
            }
        }
        let changed = self.0 != next;
        self.0 = next;
        changed
    }

    /// Returns all intercepted addresses.
    pub(super) fn nodes(&self) -> &HashMap<IpAddr, InterceptedNode> {
        &self.0
    }
}

// Searches for nodes whose addresses would be intercepted and that are not known to be linked anywhere. Peers announce
// all their nodes, but a server with too many leaves some out, and one that only DNS names may have no link.

/// The nodes that were searched for, and when.
#[derive(Debug)]
pub(super) struct NodeDiscovery {
    sought: HashMap<NodeName, Instant>,
    /// One permit: a round of searches starts once the previous one has ended.
    free: Arc<Semaphore>,
}

impl NodeDiscovery {
    pub(super) fn new() -> Self {
        Self { sought: HashMap::new(), free: Arc::new(Semaphore::new(1)) }
    }

    /// Searches for those `unknown` nodes that were not searched for recently. Results are stored in the finder.
    pub(super) fn query_unknown(&mut self, unknown: &HashSet<NodeName>, deps: &ListenerDeps) {
        self.sought.retain(|node, at| unknown.contains(node) && at.elapsed() < RETRY_AFTER);
        let due: Vec<_> = unknown.iter().filter(|node| !self.sought.contains_key(*node)).cloned().collect();
        if due.is_empty() || deps.finder.is_alone() {
            return;
        }
        let Ok(permit) = self.free.clone().try_acquire_owned() else { return };
        self.sought.extend(due.iter().map(|node| (node.clone(), Instant::now())));
        let (finder, drain) = (deps.finder.clone(), deps.links.clone());
        drain.clone().spawn(info_span!("node_discovery"), async move {
            let all = stream::iter(due).for_each_concurrent(MAX_CONCURRENT_QUERIES, |node| {
                let finder = finder.clone();
                async move { drop(finder.find_path(&node, None, None).await) }
            });
            tokio::select! {
                () = drain.draining() => {}
                () = all => {}
            }
            drop(permit);
        });
    }
}

/// Time after which an unknown node is searched for again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Maximum number of concurrent searches: each is a question to all servers.
const MAX_CONCURRENT_QUERIES: usize = 8;

// Which rejected claims are logged: each once while it is rejected, and a limited number. Pure.

/// The rejected claims of addresses that were logged, so that each is logged once.
#[derive(Debug, Default)]
pub(super) struct ClaimLog {
    /// Rejected claims at the last update, up to a limit.
    each: HashSet<RejectedClaim>,
    /// Whether there were more than that limit.
    has_more: bool,
}

impl ClaimLog {
    /// Takes all claims that are rejected now. Returns the new ones, and the number of further ones if their existence
    /// is new.
    pub(super) fn update(&mut self, mut rejected: Vec<RejectedClaim>) -> (Vec<RejectedClaim>, Option<usize>) {
        // They arrive in any order, and the same ones must be selected each time.
        rejected.sort_by_cached_key(|it| (it.claim.ip, it.claim.node.to_string(), it.claim.by));
        let more = rejected.len().saturating_sub(MAX_LOGGED_CLAIMS);
        rejected.truncate(MAX_LOGGED_CLAIMS);
        let news = rejected.iter().filter(|it| !self.each.contains(it)).cloned().collect();
        let more_is_news = more > 0 && !self.has_more;
        (self.each, self.has_more) = (rejected.into_iter().collect(), more > 0);
        (news, more_is_news.then_some(more))
    }
}

/// Maximum number of claims that are logged one by one.
const MAX_LOGGED_CLAIMS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn frequent_changes_are_debounced() {
        let (changed, mut changes) = watch::channel(());
        let (started, mut pace) = (Instant::now(), Debounce::new());
        for looks in 1..=10 {
            changed.send_replace(());
            pace.next(&mut changes).await;
            assert!(started.elapsed() >= MIN_INTERVAL * looks, "{:?}", started.elapsed());
        }
        assert!(started.elapsed() < POLL_INTERVAL * 10, "and not longer than that");
    }
}

#[cfg(test)]
mod presence_tests {
    use super::*;

    const RESUME_TIMEOUT: Duration = Duration::from_secs(60);

    /// Refuses no claim.
    const FREE: fn(IpAddr, &NodeName) -> bool = |_, _| false;

    /// Returns holders of the addresses 10.0.0.N, each a node of that name.
    fn holders(of: &[(u8, &str)]) -> HashMap<IpAddr, NodeName> {
        of.iter().map(|(last, node)| ([10, 0, 0, *last].into(), node.parse().unwrap())).collect()
    }

    fn intercepted(presence: &InterceptedAddresses) -> Vec<(String, String, bool)> {
        let all = presence.nodes().iter();
        let mut all: Vec<_> =
            all.map(|(ip, at)| (ip.to_string(), at.node.to_string(), at.left.is_some())).collect();
        all.sort();
        all
    }

    fn one(node: &str, left: bool) -> Vec<(String, String, bool)> {
        vec![("10.0.0.7".to_owned(), node.to_owned(), left)]
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_intercepted_until_the_resume_timeout_after_its_nodes_last_link() {
        let (mut presence, holders, started) =
            (InterceptedAddresses::default(), holders(&[(7, "edge7")]), Instant::now());
        let step = |presence: &mut InterceptedAddresses, linked: bool, at: u64| {
            presence.update(&holders, FREE, |_| linked, started + Duration::from_secs(at), RESUME_TIMEOUT)
        };
        assert!(!step(&mut presence, false, 0), "it was never linked");
        assert!(step(&mut presence, true, 1) && !step(&mut presence, true, 2));
        assert_eq!(intercepted(&presence), one("edge7", false));
        assert!(step(&mut presence, false, 10) && !step(&mut presence, false, 69));
        assert_eq!(intercepted(&presence), one("edge7", true));
        // It links again, and its resume timeout starts again.
        assert!(
            step(&mut presence, true, 69)
                && step(&mut presence, false, 70)
                && !step(&mut presence, false, 129)
        );
        assert!(step(&mut presence, false, 130));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_address_of_another_node_now_is_released_at_once() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "old")]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert!(presence.update(
            &holders(&[(7, "new")]),
            FREE,
            |node| node.as_str() == "new",
            now,
            RESUME_TIMEOUT
        ));
        assert_eq!(intercepted(&presence), one("new", false));
        // The other node is not an edge, so traffic is no longer intercepted.
        assert!(presence.update(&holders(&[(7, "cloud")]), FREE, |_| false, now, RESUME_TIMEOUT));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_edges_own_claim_outlives_its_link_but_not_its_withdrawal() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[]), FREE, |_| false, now, RESUME_TIMEOUT);
        assert_eq!(intercepted(&presence), one("edge7", true), "the link has ended, and the claim with it");
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert!(presence.nodes().is_empty(), "the node is linked and no longer claims it");
    }

    #[tokio::test]
    async fn an_address_refused_while_its_node_is_disconnected_is_released_at_once() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        let disconnected = |presence: &mut InterceptedAddresses, refused| {
            presence.update(&holders(&[]), |_, _| refused, |_| false, now, RESUME_TIMEOUT);
            intercepted(presence)
        };
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        assert_eq!(disconnected(&mut presence, false), one("edge7", true));
        assert_eq!(disconnected(&mut presence, true), []);
        // A source with higher priority than the server's node still claims it.
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, RESUME_TIMEOUT);
        presence.update(&holders(&[(7, "edge7")]), |_, _| true, |_| false, now, RESUME_TIMEOUT);
        assert_eq!(intercepted(&presence), one("edge7", true));
    }
}

#[cfg(test)]
mod claim_log_tests {
    use super::*;

    fn rejected(last: u8) -> RejectedClaim {
        let (ip, node) = ([10, 0, 0, last].into(), "edge1".parse().unwrap());
        let why = ClaimRejectReason::NotANodeAddress("this host's");
        RejectedClaim { claim: AddressClaim { ip, node, by: ClaimSource::Edge }, why }
    }

    #[test]
    fn rejected_claims_are_logged_once_in_any_order_and_the_rest_summarised_once() {
        let mut claim_log = ClaimLog::default();
        let mut all: Vec<_> = (0..150).map(rejected).collect();
        let (news, more) = claim_log.update(all.clone());
        assert_eq!((news, more), (all[..100].to_vec(), Some(50)));
        for turn in 1..150 {
            all.rotate_left(turn);
            assert_eq!(claim_log.update(all.clone()), (vec![], None), "{turn}");
        }
    }

    #[test]
    fn a_claim_that_is_rejected_again_is_logged_again() {
        let mut claim_log = ClaimLog::default();
        assert_eq!(claim_log.update(vec![rejected(1), rejected(2)]), (vec![rejected(1), rejected(2)], None));
        assert_eq!(claim_log.update(vec![rejected(2)]), (vec![], None));
        assert_eq!(claim_log.update(vec![rejected(1), rejected(2)]), (vec![rejected(1)], None));
    }
}
