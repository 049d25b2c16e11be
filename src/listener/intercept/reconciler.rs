//! Which addresses are intercepted, for how long, and the task that reconciles the table.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{debug, error, info, info_span};

use crate::intercept::rules::InterceptSets;
use crate::intercept::{InterceptError, NftTable};
use crate::listener::ListenerDeps;
use crate::listener::intercept::InterceptConfig;
use crate::listener::intercept::claim_log::ClaimLog;
use crate::listener::intercept::node_searches::NodeDiscovery;
use crate::listener::intercept::presence::InterceptedAddresses;
use tunnel_base::addresses::owners::{AddressClaim, ClaimRejectReason, ClaimSource, RejectedClaim};
use tunnel_base::limited;
use tunnel_base::policy::off_limits::is_off_limits;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_proto::names::NodeName;

/// Intercepts until the server begins to stop. Holds a token of `deps.redirecting` until nothing is
/// intercepted.
pub(super) fn spawn(
    table: NftTable,
    presence: Arc<InterceptedAddresses>,
    settings: InterceptConfig,
    deps: &ListenerDeps,
) {
    let reconciler = NftReconciler {
        table,
        own: LocalAddresses::of_interfaces(settings.host_ip.into_iter().chain(settings.pod_ip).collect()),
        settings,
        deps: deps.clone(),
        presence,
        seeker: NodeDiscovery::new(),
        claim_log: ClaimLog::default(),
        ports: BTreeSet::new(),
        kept: None,
    };
    deps.links.spawn(info_span!("intercept"), reconciler.run(deps.redirecting.token()));
}

/// The only task that writes the table.
struct NftReconciler {
    table: NftTable,
    settings: InterceptConfig,
    /// The addresses of this host.
    own: LocalAddresses,
    deps: ListenerDeps,
    presence: Arc<InterceptedAddresses>,
    seeker: NodeDiscovery,
    claim_log: ClaimLog,
    /// The intercepted ports.
    ports: BTreeSet<u16>,
    /// When the table was last written, if that succeeded.
    kept: Option<Instant>,
}

impl NftReconciler {
    /// Intercepts until the server begins to stop, then empties the table and drops `redirecting`. Deletes the table
    /// once no session needs it.
    async fn run(mut self, redirecting: TaskTrackerToken) {
        let links = self.deps.links.clone();
        let stopping = self.deps.stopping.clone();
        let mut changes = self.deps.finder.registry.subscribe();
        while !stopping.is_cancelled() {
            let changed = self.refresh_addresses();
            if changed || self.kept.is_none_or(|at| at.elapsed() >= PORT_REFRESH_INTERVAL) {
                let nodes = self.presence.nodes().keys().copied().collect();
                let kept = self.table.sync(&InterceptSets { nodes, ports: self.ports.clone() }).await;
                self.record_result(kept);
            }
            stopping.run_until_cancelled(next_update(&mut changes)).await;
        }
        let emptying = self.table.sync(&InterceptSets::default()).await;
        self.record_result(emptying);
        info!("interception stopped");
        drop(redirecting);
        links.draining().await;
        self.table.delete().await;
    }

    /// Updates the intercepted addresses. Returns true if they have changed.
    fn refresh_addresses(&mut self) -> bool {
        let own = self.own.now().all;
        let peers = self.deps.finder.peers().map(|peers| peers.addresses()).unwrap_or_default();
        // A claim alone must not redirect traffic outside of the operator's networks, or that of this host or a peer,
        // which it would cut off.
        let refuses = |ip: IpAddr| {
            let why = [
                (!self.settings.networks.contains(ip), REASON_OUTSIDE_NETWORKS),
                (is_off_limits(ip), "loopback, link-local, metadata or the like"),
                (own.contains(&ip), REASON_HOST_ADDRESS),
                (peers.contains(&ip), REASON_PEER_ADDRESS),
            ];
            why.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
        };
        let holders = self.deps.context.addresses.owners((self.deps.claims)(), refuses);
        // Each node is looked up once, however many addresses it has.
        let mut knows = HashMap::new();
        let intercepted = self.presence.nodes();
        for node in holders.nodes.values().chain(intercepted.values().map(|intercepted| &intercepted.node)) {
            if !knows.contains_key(node) {
                knows.insert(node.clone(), self.deps.finder.knows(node));
            }
        }
        let linked = |node: &NodeName| knows.get(node).copied().unwrap_or_default();
        let now = Instant::now();
        let resume_timeout = self.deps.context.route.resume_timeout;
        // `|` and not `||`: the ports are read again in any case.
        let changed =
            self.presence.update(&holders.nodes, linked, now, resume_timeout) | self.refresh_ports();
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
        let refusals = &self.deps.context.metrics.refusals;
        for RejectedClaim { claim: AddressClaim { ip, node, by }, why } in news {
            limited!(
                refusals.may_log_about("address_claim", &node) => warn,
                %ip,
                %node,
                source = %by,
                reason = %why,
                hint = "correct the claim at its source",
                "address claim rejected"
            );
        }
        if let Some(more) = more {
            limited!(
                refusals.may_log_once("address_claims", "") => warn,
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

/// Waits until the next update is due: at a change, but not sooner than [`MIN_INTERVAL`], and otherwise after
/// [`POLL_INTERVAL`]. No change is lost if it is dropped early.
async fn next_update(changes: &mut watch::Receiver<()>) {
    sleep(MIN_INTERVAL).await;
    // The channel never closes: the registry holds the sender.
    let _ = timeout(POLL_INTERVAL - MIN_INTERVAL, changes.changed()).await;
}

/// Interval between updates for changes without a notification: nodes at peers, claims, and the time since a
/// disconnect.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum time between two updates, each of which reads all claims; frequent reconnects cause no more than this.
const MIN_INTERVAL: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn frequent_changes_are_debounced() {
        let (changed, mut changes) = watch::channel(());
        let started = Instant::now();
        for looks in 1..=10 {
            changed.send_replace(());
            next_update(&mut changes).await;
            assert!(started.elapsed() >= MIN_INTERVAL * looks, "{:?}", started.elapsed());
        }
        assert!(started.elapsed() < POLL_INTERVAL * 10, "and not longer than that");
    }
}
