//! Keeps "node is at this pod" where DNS reads it, for as long as it is true.

#[cfg(feature = "kubernetes")]
mod configmap;
mod etcd;
mod hosts;
mod lines;
mod vet;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::{EtcdError, Registry, SharedFileError};
use crate::drain::Drain;
use crate::net::backoff::Backoff;
use crate::policy::Zone;
use crate::telemetry::Metrics;
#[cfg(feature = "kubernetes")]
pub use configmap::{ConfigMap, ConfigMapError, ConfigMapParams, Lives};
pub use etcd::{Etcd, EtcdParams};
pub use hosts::Hosts;
pub use vet::Vet;

/// The task that publishes which nodes are linked here. It never touches a link or a session.
pub struct Publisher {
    /// Whose nodes.
    pub registry: Arc<Registry>,
    /// Where they are published.
    pub store: Store,
    /// Which nodes are published, and under which names.
    pub zone: Arc<Zone>,
    /// Asked before a name is published that may belong to somebody else.
    pub vet: Vet,
    /// Counts records and failures.
    pub metrics: Metrics,
    /// Called after each try with whether the records stand, and if not, why.
    pub report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
}

/// Where records stand.
#[derive(Debug)]
pub enum Store {
    /// In a hosts file.
    Hosts(Hosts),
    /// In etcd.
    Etcd(Box<Etcd>),
    /// In a ConfigMap of Kubernetes.
    #[cfg(feature = "kubernetes")]
    ConfigMap(Box<ConfigMap>),
}

/// Why records could not be written.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The hosts file.
    #[error(transparent)]
    Hosts(#[from] SharedFileError),
    /// etcd.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// The ConfigMap.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    ConfigMap(#[from] ConfigMapError),
}

/// The records of the nodes here, and of those that left a moment ago.
#[derive(Debug, Default)]
struct Wanted(HashMap<String, Option<Instant>>);

impl Publisher {
    /// Publishes until draining begins, then takes the records away.
    pub async fn run(mut self, drain: Drain) {
        let mut changes = self.registry.changes();
        let mut wanted = Wanted::default();
        let mut backoff = Backoff::new();
        let mut failing = false;
        while !drain.is_draining() {
            changes.mark_unchanged();
            let nodes = self.registry.nodes();
            let records = self.vet.records(nodes, &self.zone, &self.store.pods().await).await;
            wanted.follow(records.into_iter(), Instant::now());
            let records = wanted.records();
            let written = self.store.write(&records).await;
            if let Err(cause) = written {
                self.metrics.publish_failures.inc();
                if !failing {
                    warn!("records are not published, trying on: {cause}");
                }
                failing = true;
                (self.report)(Err(cause.to_string()));
                let again = Instant::now() + backoff.pause(rand::random());
                tokio::select! {
                    biased;
                    () = drain.draining() => {}
                    () = sleep_until(again) => {}
                }
                continue;
            }
            if failing {
                info!(records = records.len(), "records are published again");
            }
            failing = false;
            backoff = Backoff::new();
            self.metrics.published.set(i64::try_from(records.len()).unwrap_or(i64::MAX));
            (self.report)(Ok(()));
            let due = self.store.due();
            let next = wanted.next().map_or(due, |next| next.min(due));
            tokio::select! {
                biased;
                () = drain.draining() => {}
                () = gathered(&mut changes, self.store.gathering()) => {}
                () = sleep_until(next) => {}
            }
        }
        match timeout(WITHDRAWAL, self.store.withdraw()).await {
            Ok(Ok(())) => {
                self.metrics.published.set(0);
                info!("records withdrawn");
            }
            Ok(Err(cause)) => warn!("records could not be withdrawn: {cause}"),
            Err(_) => warn!("records could not be withdrawn within {WITHDRAWAL:?}"),
        }
    }
}

impl Store {
    /// Makes these records, and no other ones of ours, stand. Not cancel safe: what is begun goes on.
    async fn write(&mut self, records: &BTreeSet<String>) -> Result<(), PublishError> {
        match self {
            Self::Hosts(hosts) => hosts.write(records.clone()).await?,
            Self::Etcd(etcd) => etcd.write(records).await?,
            #[cfg(feature = "kubernetes")]
            Self::ConfigMap(map) => map.write(records).await?,
        }
        Ok(())
    }

    async fn withdraw(&mut self) -> Result<(), PublishError> {
        match self {
            Self::Hosts(hosts) => hosts.write(BTreeSet::new()).await?,
            Self::Etcd(etcd) => etcd.withdraw().await?,
            #[cfg(feature = "kubernetes")]
            Self::ConfigMap(map) => map.withdraw().await?,
        }
        Ok(())
    }

    /// The addresses of all pods that have records, pods that are gone included; empty if the store does not list them.
    async fn pods(&self) -> BTreeSet<IpAddr> {
        match self {
            Self::Hosts(hosts) => hosts.pods().await,
            Self::Etcd(_) => BTreeSet::new(),
            #[cfg(feature = "kubernetes")]
            Self::ConfigMap(map) => map.pods(),
        }
    }

    /// When to write although nothing has changed.
    fn due(&self) -> Instant {
        match self {
            Self::Hosts(_) => Instant::now() + hosts::REWRITE_INTERVAL,
            Self::Etcd(etcd) => etcd.due(),
            #[cfg(feature = "kubernetes")]
            Self::ConfigMap(map) => map.due(),
        }
    }

    /// How long changes wait for more of them.
    fn gathering(&self) -> Duration {
        match self {
            Self::Hosts(_) | Self::Etcd(_) => Duration::ZERO,
            #[cfg(feature = "kubernetes")]
            Self::ConfigMap(_) => configmap::GATHERING,
        }
    }
}

impl Wanted {
    /// Takes note of who is here now: the new at once, the missing until they have been away for [`BLIP`].
    fn follow(&mut self, here: impl Iterator<Item = String>, now: Instant) {
        let here: BTreeSet<String> = here.collect();
        for (record, left) in &mut self.0 {
            if !here.contains(record) {
                left.get_or_insert(now);
            }
        }
        self.0.extend(here.into_iter().map(|record| (record, None)));
        self.0.retain(|_, left| left.is_none_or(|left| now < left + BLIP));
    }

    /// When the next of them is to go.
    fn next(&self) -> Option<Instant> {
        self.0.values().flatten().min().map(|left| *left + BLIP)
    }

    fn records(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("store", &self.store)
            .field("zone", &self.zone)
            .finish_non_exhaustive()
    }
}

/// Waits for a change, and then for what comes right behind it. Cancel safe.
async fn gathered(changes: &mut watch::Receiver<()>, time: Duration) {
    // The sender is part of the registry that the publisher itself holds.
    let _ = changes.changed().await;
    sleep(time).await;
}

/// How long a node may be away before its record goes: a blip must not flap.
const BLIP: Duration = Duration::from_secs(2);

/// For the records to go at the end; the process must end well before it is killed.
const WITHDRAWAL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
