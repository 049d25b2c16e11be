//! What `[mode.cloud.intercept]` catches: whose addresses, from when until when, and the task that keeps the table true.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, info_span, warn};

use crate::admin::readiness::Readiness;
use crate::config::server::ServerConfig;
use crate::config::server::intercept::InterceptConfig as Settings;
use crate::intercept::{InterceptError, InterceptRules, NftTable, Sets};
use crate::listener::intercept::{Intercept, InterceptTable, InterceptedNode};
use crate::server::{ClientListener, ServerContext, ServerCore};
use crate::startup::access::AccessPolicies;
use crate::startup::{Startup, StartupErrorKind};
use tunnel_base::addresses::{AddressClaim, ClaimSource, RejectReason, RejectedClaim};
use tunnel_base::names::NodeName;
use tunnel_base::policy::targets::is_off_limits;
use tunnel_net::dial;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::listen::TcpAccept;

/// What is to be caught, and the listeners' knowledge of it.
#[derive(Debug)]
pub(crate) struct PreparedIntercept {
    table: NftTable,
    intercepted: Arc<InterceptTable>,
    settings: Settings,
}

/// Where what is caught is led.
struct InterceptListeners {
    v4: TcpAccept,
    /// `None`: this host has no IPv6.
    v6: Option<TcpAccept>,
    /// For what other machines send through this one.
    forwarded: Option<TcpAccept>,
}

/// Binds the listeners and takes the table; outer `None`: there are faults, which `startup` has noted; inner: nothing is to
/// be caught.
pub(crate) fn prepare(
    settings: &ServerConfig,
    gates: &mut AccessPolicies,
    startup: &mut Startup,
) -> Option<(Vec<ClientListener>, Option<PreparedIntercept>)> {
    let Some(settings) = settings.intercept.clone() else { return Some((Vec::new(), None)) };
    let guard = gates.prepare(KEY, &settings.access, startup);
    let is_on_host = check_host_network(settings.host_ip, startup);
    let listeners = InterceptListeners::bind(&settings, startup);
    let (listeners, guard) = listeners.zip(guard).filter(|_| is_on_host)?;
    let table = match NftTable::claim(listeners.rules(&settings)) {
        Ok(table) => table,
        Err(why) => {
            startup.error(kind(&why), KEY, why.to_string());
            return None;
        }
    };
    let intercepted = Arc::new(InterceptTable::default());
    let all = [Some(listeners.v4), listeners.v6, listeners.forwarded].into_iter().flatten();
    let ports = all.map(|listener| {
        let intercepted = intercepted.clone();
        ClientListener::tcp(listener, guard.clone(), move |core| {
            let ports = core.context.ports.clone();
            Intercept { intercepted, ports }
        })
    });
    Some((ports.collect(), Some(PreparedIntercept { table, intercepted: intercepted.clone(), settings })))
}

impl PreparedIntercept {
    /// Has the mark on all that this process sends from now on: to be called before it sends anything.
    pub(crate) fn mark_sockets(&self) {
        dial::set(self.settings.mark.mark);
    }

    /// Catches from now on, until the pod begins to stop. The receiver hears once nothing is caught any more.
    pub(crate) fn spawn(self, core: &ServerCore, cloud: &ServerConfig) -> oneshot::Receiver<()> {
        let Self { table, intercepted, settings } = self;
        if cloud.addresses.cluster.is_none() && !settings.trust_edges {
            info!(
                "what edges say of their own addresses counts for nothing, as no Kubernetes is asked that could contradict \
                 them: give their addresses in the token file, or set {KEY}.trust_edges = true"
            );
        }
        let (done, emptied) = oneshot::channel();
        let shared = core.context.clone();
        let drain = shared.link_context.drain.clone();
        let own = LocalAddresses::of_interfaces(settings.host_ip.into_iter().chain(cloud.pod_ip).collect());
        let (grace, readiness) = (cloud.session.grace, core.readiness.clone());
        let keeper = Reconciler::new(table, intercepted, settings, grace, own, shared, readiness);
        drain.spawn(info_span!("intercept"), keeper.run(done));
        emptied
    }
}

impl InterceptListeners {
    fn bind(settings: &Settings, startup: &mut Startup) -> Option<Self> {
        let key = format!("{KEY}.networks");
        let mut bind = |ip: IpAddr| startup.bind(&key, SocketAddr::new(ip, settings.port));
        let v4 = bind(Ipv4Addr::LOCALHOST.into());
        let v6 = has_v6().then(|| bind(Ipv6Addr::LOCALHOST.into()));
        // Port by port: where one is given, it is taken on loopback already.
        let any: IpAddr = if has_v6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let at = SocketAddr::new(any, settings.port.checked_add(u16::from(settings.port > 0))?);
        let forwarded = (!settings.forwarded.is_empty()).then(|| startup.bind(&key, at));
        Some(Self { v4: v4?, v6: require_if_wanted(v6)?, forwarded: require_if_wanted(forwarded)? })
    }

    fn rules(&self, settings: &Settings) -> InterceptRules {
        let port = |listener: &TcpAccept| listener.at().port();
        InterceptRules {
            table: settings.table.clone(),
            mark: settings.mark.mark,
            mask: settings.mark.mask,
            v4: Some(port(&self.v4)),
            v6: self.v6.as_ref().map(port),
            forwarded: self.forwarded.as_ref().map(|listener| (settings.forwarded.clone(), port(listener))),
        }
    }
}

/// Outer `None`: it was wanted, and cannot be had.
fn require_if_wanted<T>(wanted: Option<Option<T>>) -> Option<Option<T>> {
    match wanted {
        None => Some(None),
        Some(had) => had.map(Some),
    }
}

fn has_v6() -> bool {
    UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

/// Whether this pod is on its host's network, as far as Kubernetes has told; if not, that is noted.
fn check_host_network(host: Option<IpAddr>, startup: &mut Startup) -> bool {
    let Some(host) = host else { return true };
    let own = LocalAddresses::of_interfaces(Vec::new()).now().all;
    if own.contains(&host) {
        return true;
    }
    let why = format!(
        "this pod is not on its host's network (HOST_IP is {host}, which is no address here), so nothing of the host passes \
         through its tables: set hostNetwork: true in its manifest"
    );
    startup.error(StartupErrorKind::Permission, KEY, why);
    false
}

fn kind(why: &InterceptError) -> StartupErrorKind {
    match why {
        InterceptError::Denied => StartupErrorKind::Permission,
        InterceptError::Owned(_) => StartupErrorKind::Port,
        InterceptError::Foreign(_) => StartupErrorKind::Config,
        InterceptError::Program(_)
        | InterceptError::KernelTooOld
        | InterceptError::Timeout
        | InterceptError::Failed(_) => StartupErrorKind::System,
    }
}

const KEY: &str = "mode.cloud.intercept";

// Keeps the table true: whose addresses are caught follows the links, at this pod and at others.

/// The one task that writes the table.
#[derive(Debug)]
pub(crate) struct Reconciler {
    table: NftTable,
    intercepted: Arc<InterceptTable>,
    settings: Settings,
    grace: Duration,
    /// Addresses of this host.
    own: LocalAddresses,
    shared: ServerContext,
    readiness: Readiness,
    presence: InterceptedAddresses,
    seeker: NodeDiscovery,
    told: ClaimLog,
    /// The ports that are caught.
    ports: BTreeSet<u16>,
    /// When the table was last written, if it is as it should be.
    kept: Option<Instant>,
}

impl Reconciler {
    pub(crate) fn new(
        table: NftTable,
        intercepted: Arc<InterceptTable>,
        settings: Settings,
        grace: Duration,
        own: LocalAddresses,
        shared: ServerContext,
        readiness: Readiness,
    ) -> Self {
        let (presence, seeker, told, ports) =
            (InterceptedAddresses::default(), NodeDiscovery::new(), ClaimLog::default(), BTreeSet::new());
        Self {
            table,
            intercepted,
            settings,
            grace,
            own,
            shared,
            readiness,
            presence,
            seeker,
            told,
            ports,
            kept: None,
        }
    }

    /// Catches until the pod begins to stop; then nothing more, which it says to `emptied`. The table goes once no session
    /// needs it.
    pub(crate) async fn run(mut self, emptied: oneshot::Sender<()>) {
        let (links, stopping) = (self.shared.link_context.drain.clone(), self.shared.stopping.clone());
        let mut changes = self.shared.registry.subscribe();
        let mut pace = Debounce::new();
        while !stopping.is_cancelled() {
            let changed = self.refresh_addresses();
            if changed || self.kept.is_none_or(|at| at.elapsed() >= PORT_REFRESH_INTERVAL) {
                self.intercepted.set(self.presence.nodes().clone());
                let nodes = self.presence.nodes().keys().copied().collect();
                let kept = self.table.sync(&Sets { nodes, ports: self.ports.clone() }).await;
                self.record_result(kept);
            }
            tokio::select! {
                () = stopping.cancelled() => {}
                () = pace.next(&mut changes) => {}
            }
        }
        let emptying = self.table.sync(&Sets::default()).await;
        self.record_result(emptying);
        info!("nothing more is caught");
        // Nobody waits for it in a start that is broken off.
        let _ = emptied.send(());
        links.draining().await;
        self.table.delete().await;
    }

    /// Finds out whose addresses are to be caught. Whether they are others than before.
    fn refresh_addresses(&mut self) -> bool {
        let own = self.own.now().all;
        let peers = self.shared.peers.as_ref().map(|peers| peers.addresses()).unwrap_or_default();
        let refuses = |ip: IpAddr| {
            let why = [
                (!self.settings.networks.contains(ip), REASON_OUTSIDE_NETWORKS),
                (is_off_limits(ip), "loopback, link-local, metadata or the like"),
                (own.contains(&ip), REASON_HOST_ADDRESS),
                (peers.contains(&ip), REASON_PEER_ADDRESS),
            ];
            why.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
        };
        let mut claims = self.shared.proven.address_claims();
        claims.extend(self.shared.finder.claims());
        let holders = self.shared.addresses.holders(claims, self.settings.trust_edges, refuses);
        // Of what nobody claims any more.
        let refused = |ip: IpAddr, node: &NodeName| {
            let claim = AddressClaim { ip, node: node.clone(), by: ClaimSource::Edge };
            refuses(ip).or_else(|| self.shared.addresses.refusal(&claim)).is_some()
        };
        let mut knows = HashMap::new();
        for node in
            holders.nodes.values().chain(self.presence.nodes().values().map(|intercepted| &intercepted.node))
        {
            if !knows.contains_key(node) {
                knows.insert(node.clone(), self.shared.finder.knows(node));
            }
        }
        let linked = |node: &NodeName| knows.get(node).copied().unwrap_or_default();
        let changed = self.presence.update(&holders.nodes, refused, linked, Instant::now(), self.grace)
            | self.refresh_ports();
        let unknown = knows.iter().filter(|(_, knows)| !**knows).map(|(node, _)| node.clone()).collect();
        self.seeker.query_unknown(&unknown, &self.shared);
        self.log_rejected_claims(holders.void);
        changed
    }

    /// Takes the ports of the settings, and those that a ConfigMap names. Whether they are others than before.
    fn refresh_ports(&mut self) -> bool {
        let mut ports = self.settings.ports.clone();
        let named = self.shared.ports.borrow();
        ports.extend(named.http.iter().chain(&named.https));
        let changed = self.ports != ports;
        drop(named);
        if changed {
            info!(?ports, "these ports of nodes are caught");
            self.ports = ports;
        }
        changed
    }

    /// Logs the claims that count for nothing, each once for as long as it does.
    fn log_rejected_claims(&mut self, void: Vec<RejectedClaim>) {
        // A cluster has many Nodes that are no edges, some with pods of ours, and they are nobody's slip of the pen.
        let is_usual = |void: &RejectedClaim| {
            void.by == ClaimSource::Kubernetes
                && [REASON_OUTSIDE_NETWORKS, REASON_HOST_ADDRESS, REASON_PEER_ADDRESS]
                    .iter()
                    .any(|why| void.why == RejectReason::NotANodeAddress(why))
        };
        let (news, more) = self.told.update(void.into_iter().filter(|void| !is_usual(void)).collect());
        for RejectedClaim { ip, node, by, why } in news {
            warn!(
                %ip,
                %node,
                "{ip} is not caught for {node}, as {by} has it: {why}; correct what says so"
            );
        }
        if let Some(more) = more {
            warn!(
                "{more} more claims to addresses count for nothing: they are told of as those before them end"
            );
        }
    }

    /// Takes in what came of writing the table.
    fn record_result(&mut self, kept: Result<(), InterceptError>) {
        let trouble = self.readiness.trouble(INTERCEPT_CONDITION);
        match kept {
            Ok(()) => {
                if trouble.is_some() || self.kept.is_none() {
                    info!(
                        addresses = self.presence.nodes().len(),
                        "what is sent to nodes' addresses is caught"
                    );
                }
                debug!(addresses = self.presence.nodes().len(), "the table is as it should be");
                self.kept = Some(Instant::now());
                self.readiness.set_degraded(INTERCEPT_CONDITION, Ok(()));
            }
            Err(cause) => {
                self.kept = None;
                let cause = cause.to_string();
                if trouble.as_ref() != Some(&cause) {
                    error!(%cause, "what is sent to nodes' addresses is not caught as it should be: trying on");
                }
                self.readiness.set_degraded(INTERCEPT_CONDITION, Err(cause));
            }
        }
    }
}

/// A third of the time after which the kernel forgets the ports.
const PORT_REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// Why most claims are refused.
const REASON_OUTSIDE_NETWORKS: &str = "outside of the networks of [mode.cloud.intercept]";

/// Why no edge has some addresses.
const REASON_HOST_ADDRESS: &str = "this host's";
const REASON_PEER_ADDRESS: &str = "another pod's";

/// Its name in `/readyz`.
const INTERCEPT_CONDITION: &str = "intercept";

// When it is looked whose addresses are to be caught.

/// A look at each change and at each tick, and some time between any two.
#[derive(Debug)]
pub(crate) struct Debounce {
    ticks: Interval,
    looked: Instant,
}

impl Debounce {
    /// The first look is now.
    pub(crate) fn new() -> Self {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, looked: Instant::now() }
    }

    /// Waits for the next look. Dropped early, no change is lost.
    pub(crate) async fn next(&mut self, changes: &mut watch::Receiver<()>) {
        sleep_until(self.looked + MIN_INTERVAL).await;
        tokio::select! {
            // It never ends: the registry holds the sender.
            _ = changes.changed() => {}
            _ = self.ticks.tick() => {}
        }
        self.looked = Instant::now();
    }
}

/// Between two looks at what is not reported: nodes at other pods, claims, how long a node is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The least time between two looks, each of which reads all claims: edges that link again and again cause no more.
const MIN_INTERVAL: Duration = Duration::from_millis(150);

// How long an address is caught: from its node's link to the grace time behind the last one. Pure.

/// The addresses that are caught.
#[derive(Debug, Default)]
pub(crate) struct InterceptedAddresses(HashMap<IpAddr, InterceptedNode>);

impl InterceptedAddresses {
    /// Takes in whose each address is, which ones no node may have on an edge's word, and which nodes are linked to any pod.
    /// Whether that has changed anything.
    pub(crate) fn update(
        &mut self,
        holders: &HashMap<IpAddr, NodeName>,
        refused: impl Fn(IpAddr, &NodeName) -> bool,
        linked: impl Fn(&NodeName) -> bool,
        now: Instant,
        grace: Duration,
    ) -> bool {
        let mut next = HashMap::with_capacity(self.0.len());
        for (ip, node) in holders {
            if linked(node) {
                next.insert(*ip, InterceptedNode { node: node.clone(), left: None });
            }
        }
        for (ip, was) in &self.0 {
            // What an edge itself says ends with its link, so that nobody may say whose the address is. Where somebody says
            // that it is another one's, or it has become no node's, it is given up at once.
            let is_its = match holders.get(ip) {
                Some(node) => *node == was.node,
                None => !refused(*ip, &was.node),
            };
            let stays = is_its && !linked(&was.node);
            let left = was.left.unwrap_or(now);
            if stays && now - left < grace {
                next.insert(*ip, InterceptedNode { left: Some(left), ..was.clone() });
            }
        }
        let changed = self.0 != next;
        self.0 = next;
        changed
    }

    /// All of them.
    pub(crate) fn nodes(&self) -> &HashMap<IpAddr, InterceptedNode> {
        &self.0
    }
}

// Looks for nodes whose addresses would be caught, and of which this pod has not heard that any pod has them: it is told of
// every node, but by older pods only of those of which it is a home, and of those that it has asked for.

/// What was sought, and when.
#[derive(Debug)]
pub(crate) struct NodeDiscovery {
    sought: HashMap<NodeName, Instant>,
    /// One permit: a search begins once the one before has ended.
    free: Arc<Semaphore>,
}

impl NodeDiscovery {
    pub(crate) fn new() -> Self {
        Self { sought: HashMap::new(), free: Arc::new(Semaphore::new(1)) }
    }

    /// Asks the other pods for those of the `unknown` nodes for which nobody was asked for a while. What is found shows in
    /// the finder.
    pub(crate) fn query_unknown(&mut self, unknown: &HashSet<NodeName>, shared: &ServerContext) {
        self.sought.retain(|node, at| unknown.contains(node) && at.elapsed() < RETRY_AFTER);
        let due: Vec<_> = unknown.iter().filter(|node| !self.sought.contains_key(*node)).cloned().collect();
        if due.is_empty() || shared.finder.is_alone() {
            return;
        }
        let Ok(permit) = self.free.clone().try_acquire_owned() else { return };
        self.sought.extend(due.iter().map(|node| (node.clone(), Instant::now())));
        let (finder, drain) = (shared.finder.clone(), shared.link_context.drain.clone());
        drain.clone().spawn(info_span!("seek"), async move {
            let all = stream::iter(due).for_each_concurrent(MAX_CONCURRENT_QUERIES, |node| {
                let finder = finder.clone();
                async move { drop(finder.find(&node, None, None).await) }
            });
            tokio::select! {
                () = drain.draining() => {}
                () = all => {}
            }
            drop(permit);
        });
    }
}

/// A node that is nowhere is asked for again after that.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Nodes that are sought at once: each is a question to three pods, and may be one to all.
const MAX_CONCURRENT_QUERIES: usize = 8;

// Which claims without effect the log is told of: each once for as long as it has none, and not too many. Pure.

/// What the log has been told.
#[derive(Debug, Default)]
pub(crate) struct ClaimLog {
    each: HashSet<RejectedClaim>,
    has_more: bool,
}

impl ClaimLog {
    /// Takes in all that count for nothing now; returns those that are news, and how many more there are, if that there are
    /// more is news.
    pub(crate) fn update(&mut self, mut void: Vec<RejectedClaim>) -> (Vec<RejectedClaim>, Option<usize>) {
        // They come in any order, and the same ones are to be told of each time.
        void.sort_by(|a, b| (a.ip, a.node.as_str(), a.by).cmp(&(b.ip, b.node.as_str(), b.by)));
        let more = void.len().saturating_sub(MAX_LOGGED_CLAIMS);
        void.truncate(MAX_LOGGED_CLAIMS);
        let news = void.iter().filter(|void| !self.each.contains(void)).cloned().collect();
        let more_is_news = more > 0 && !self.has_more;
        (self.each, self.has_more) = (void.into_iter().collect(), more > 0);
        (news, more_is_news.then_some(more))
    }
}

/// Claims that are told of one by one.
const MAX_LOGGED_CLAIMS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn however_often_something_changes_some_time_passes_between_two_looks() {
        let (changed, mut changes) = watch::channel(());
        let (started, mut pace) = (Instant::now(), Debounce::new());
        for looks in 1..=10 {
            changed.send_replace(());
            pace.next(&mut changes).await;
            assert!(started.elapsed() >= MIN_INTERVAL * looks, "{:?}", started.elapsed());
        }
        assert!(started.elapsed() < POLL_INTERVAL * 10, "and no more than that");
    }
}

#[cfg(test)]
mod presence_tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    /// No address is refused to any node.
    const FREE: fn(IpAddr, &NodeName) -> bool = |_, _| false;

    /// The addresses 10.0.0.N, each of a node of that name.
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
    async fn an_address_is_intercepted_from_its_nodes_link_to_the_grace_time_behind_the_last() {
        let (mut presence, holders, started) =
            (InterceptedAddresses::default(), holders(&[(7, "edge7")]), Instant::now());
        let step = |presence: &mut InterceptedAddresses, linked: bool, at: u64| {
            presence.update(&holders, FREE, |_| linked, started + Duration::from_secs(at), GRACE)
        };
        assert!(!step(&mut presence, false, 0), "it was never linked");
        assert!(step(&mut presence, true, 1) && !step(&mut presence, true, 2));
        assert_eq!(intercepted(&presence), one("edge7", false));
        assert!(step(&mut presence, false, 10) && !step(&mut presence, false, 69));
        assert_eq!(intercepted(&presence), one("edge7", true));
        // It comes back, and its grace time begins anew.
        assert!(
            step(&mut presence, true, 69)
                && step(&mut presence, false, 70)
                && !step(&mut presence, false, 129)
        );
        assert!(step(&mut presence, false, 130));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn an_address_that_is_anothers_now_is_given_up_at_once() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "old")]), FREE, |_| true, now, GRACE);
        assert!(presence.update(&holders(&[(7, "new")]), FREE, |node| node.as_str() == "new", now, GRACE));
        assert_eq!(intercepted(&presence), one("new", false));
        // The other one is no edge: what is sent there goes there.
        assert!(presence.update(&holders(&[(7, "cloud")]), FREE, |_| false, now, GRACE));
        assert!(presence.nodes().is_empty());
    }

    #[tokio::test]
    async fn what_an_edge_has_said_itself_outlives_its_link_but_not_its_withdrawal() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.update(&holders(&[]), FREE, |_| false, now, GRACE);
        assert_eq!(intercepted(&presence), one("edge7", true), "the link is gone, and the claim with it");
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.update(&holders(&[]), FREE, |_| true, now, GRACE);
        assert!(presence.nodes().is_empty(), "the node is linked, and does not say it any more");
    }

    #[tokio::test]
    async fn what_has_become_no_nodes_while_its_node_was_away_is_given_up_at_once() {
        let now = Instant::now();
        let mut presence = InterceptedAddresses::default();
        let gone = |presence: &mut InterceptedAddresses, refused| {
            presence.update(&holders(&[]), |_, _| refused, |_| false, now, GRACE);
            intercepted(presence)
        };
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        assert_eq!(gone(&mut presence, false), one("edge7", true));
        assert_eq!(gone(&mut presence, true), []);
        // Who is believed more than a pod's node still says it.
        presence.update(&holders(&[(7, "edge7")]), FREE, |_| true, now, GRACE);
        presence.update(&holders(&[(7, "edge7")]), |_, _| true, |_| false, now, GRACE);
        assert_eq!(intercepted(&presence), one("edge7", true));
    }
}

#[cfg(test)]
mod told_tests {
    use tunnel_base::addresses::{ClaimSource, RejectReason};

    use super::*;

    fn void(last: u8) -> RejectedClaim {
        let why = RejectReason::NotANodeAddress("this host's");
        RejectedClaim {
            ip: [10, 0, 0, last].into(),
            node: "edge1".parse().unwrap(),
            by: ClaimSource::Edge,
            why,
        }
    }

    #[test]
    fn each_is_told_once_in_whatever_order_they_come_and_the_rest_is_summed_up_once() {
        let mut told = ClaimLog::default();
        let mut all: Vec<_> = (0..150).map(void).collect();
        let (news, more) = told.update(all.clone());
        assert_eq!((news, more), (all[..100].to_vec(), Some(50)));
        for turn in 1..150 {
            all.rotate_left(turn);
            assert_eq!(told.update(all.clone()), (vec![], None), "{turn}");
        }
    }

    #[test]
    fn what_counts_for_nothing_again_is_told_again() {
        let mut told = ClaimLog::default();
        assert_eq!(told.update(vec![void(1), void(2)]), (vec![void(1), void(2)], None));
        assert_eq!(told.update(vec![void(2)]), (vec![], None));
        assert_eq!(told.update(vec![void(1), void(2)]), (vec![void(1)], None));
    }
}
