//! Keeps the table true: whose addresses are caught follows the links, at this pod and at others.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use super::pace::Pace;
use super::presence::Presence;
use super::seek::Seeker;
use super::told::Told;
use crate::admin::Readiness;
use crate::cloud::context::PodContext;
use crate::config::cloud::Intercept as Settings;
use crate::frontend::Caught;
use crate::names::NodeName;
use crate::net::intercept::{CatchError, Sets, Table};
use crate::net::interfaces::LocalAddresses;
use crate::policy::is_off_limits;
use crate::registry::{Claim, Claimant, Void, Why};

/// The one task that writes the table.
#[derive(Debug)]
pub(super) struct Keeper {
    table: Table,
    caught: Arc<Caught>,
    settings: Settings,
    grace: Duration,
    /// Addresses of this host.
    own: LocalAddresses,
    shared: PodContext,
    readiness: Readiness,
    presence: Presence,
    seeker: Seeker,
    told: Told,
    /// The ports that are caught.
    ports: BTreeSet<u16>,
    /// When the table was last written, if it is as it should be.
    kept: Option<Instant>,
}

impl Keeper {
    pub(super) fn new(
        table: Table,
        caught: Arc<Caught>,
        settings: Settings,
        grace: Duration,
        own: LocalAddresses,
        shared: PodContext,
        readiness: Readiness,
    ) -> Self {
        let (presence, seeker, told, ports) =
            (Presence::default(), Seeker::new(), Told::default(), BTreeSet::new());
        Self {
            table,
            caught,
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
    pub(super) async fn run(mut self, emptied: oneshot::Sender<()>) {
        let (links, stopping) = (self.shared.ground.drain.clone(), self.shared.stopping.clone());
        let mut changes = self.shared.registry.changes();
        let mut pace = Pace::new();
        while !stopping.is_cancelled() {
            let changed = self.look();
            if changed || self.kept.is_none_or(|at| at.elapsed() >= RENEW) {
                self.caught.set(self.presence.nodes().clone());
                let nodes = self.presence.nodes().keys().copied().collect();
                let kept = self.table.keep(&Sets { nodes, ports: self.ports.clone() }).await;
                self.note(kept);
            }
            tokio::select! {
                () = stopping.cancelled() => {}
                () = pace.next(&mut changes) => {}
            }
        }
        let emptying = self.table.keep(&Sets::default()).await;
        self.note(emptying);
        info!("nothing more is caught");
        // Nobody waits for it in a start that is broken off.
        let _ = emptied.send(());
        links.draining().await;
        self.table.delete().await;
    }

    /// Finds out whose addresses are to be caught. Whether they are others than before.
    fn look(&mut self) -> bool {
        let own = self.own.now().all;
        let siblings = self.shared.siblings.as_ref().map(|siblings| siblings.addresses()).unwrap_or_default();
        let refuses = |ip: IpAddr| {
            let why = [
                (!self.settings.networks.contains(ip), OUTSIDE),
                (is_off_limits(ip), "loopback, link-local, metadata or the like"),
                (own.contains(&ip), HOST),
                (siblings.contains(&ip), SIBLING),
            ];
            why.into_iter().find(|(is, _)| *is).map(|(_, why)| why)
        };
        let mut claims = self.shared.proven.claims();
        claims.extend(self.shared.finder.claims());
        let holders = self.shared.addresses.holders(claims, self.settings.trust_edges, refuses);
        // Of what nobody claims any more.
        let refused = |ip: IpAddr, node: &NodeName| {
            let claim = Claim { ip, node: node.clone(), by: Claimant::Edge };
            refuses(ip).or_else(|| self.shared.addresses.refusal(&claim)).is_some()
        };
        let mut knows = HashMap::new();
        for node in holders.nodes.values().chain(self.presence.nodes().values().map(|caught| &caught.node)) {
            if !knows.contains_key(node) {
                knows.insert(node.clone(), self.shared.finder.knows(node));
            }
        }
        let linked = |node: &NodeName| knows.get(node).copied().unwrap_or_default();
        let changed = self.presence.step(&holders.nodes, refused, linked, Instant::now(), self.grace)
            | self.take_ports();
        let unknown = knows.iter().filter(|(_, knows)| !**knows).map(|(node, _)| node.clone()).collect();
        self.seeker.step(&unknown, &self.shared);
        self.tell(holders.void);
        changed
    }

    /// Takes the ports of the settings, and those that a ConfigMap names. Whether they are others than before.
    fn take_ports(&mut self) -> bool {
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
    fn tell(&mut self, void: Vec<Void>) {
        // A cluster has many Nodes that are no edges, some with pods of ours, and they are nobody's slip of the pen.
        let is_usual = |void: &Void| {
            void.by == Claimant::Kubernetes
                && [OUTSIDE, HOST, SIBLING].iter().any(|why| void.why == Why::NotANodes(why))
        };
        let (news, more) = self.told.step(void.into_iter().filter(|void| !is_usual(void)).collect());
        for Void { ip, node, by, why } in news {
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
    fn note(&mut self, kept: Result<(), CatchError>) {
        let trouble = self.readiness.trouble(NAME);
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
                self.readiness.note(NAME, Ok(()));
            }
            Err(cause) => {
                self.kept = None;
                let cause = cause.to_string();
                if trouble.as_ref() != Some(&cause) {
                    error!(%cause, "what is sent to nodes' addresses is not caught as it should be: trying on");
                }
                self.readiness.note(NAME, Err(cause));
            }
        }
    }
}

/// A third of the time after which the kernel forgets the ports.
const RENEW: Duration = Duration::from_secs(10);

/// Why most claims are refused.
const OUTSIDE: &str = "outside of the networks of [mode.cloud.intercept]";

/// Why no edge has some addresses.
const HOST: &str = "this host's";
const SIBLING: &str = "another pod's";

/// Its name in `/readyz`.
const NAME: &str = "intercept";
