//! Publishes in DNS which nodes are connected to this server; files that several processes share.

pub mod etcd;
pub mod hosts;
pub mod record_filter;
pub mod shared_file;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{info, warn};

use crate::publish::record_filter::RecordFilter;
use crate::registry::Registry;
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::zone::NodeZone;
use tunnel_base::stores::RecordStore;

/// The task that publishes which nodes are connected here. It never affects a link or a session.
#[derive(derive_more::Debug)]
#[debug("Publisher({store:?}, {zone:?})")]
pub struct Publisher {
    /// Registry of the nodes.
    pub registry: Arc<Registry>,
    /// Where records are written.
    pub store: Box<dyn RecordStore>,
    /// Which nodes are published, and under which names.
    pub zone: Arc<NodeZone>,
    /// Policy that rejects names which may belong to other hosts.
    pub vet: RecordFilter,
    /// Metrics of records and failures.
    pub metrics: Metrics,
    /// Callback after each attempt: whether the records are written, and if not, why.
    pub report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
}

/// The records of connected and recently disconnected nodes.
#[derive(Debug, Default)]
struct DesiredRecords(HashMap<String, Option<Instant>>);

impl Publisher {
    /// Publishes until draining starts, then withdraws the records.
    pub async fn run(mut self, drain: Drain) {
        let mut changes = self.registry.subscribe();
        let mut desired = DesiredRecords::default();
        let mut backoff = Backoff::new();
        let mut failing = false;
        while !drain.is_draining() {
            // Before the nodes are read, so that a change during the write wakes the next wait.
            changes.mark_unchanged();
            let nodes = self.registry.nodes();
            let records = self.vet.records(nodes, &self.zone, &self.store.servers().await).await;
            desired.follow(records.into_iter(), Instant::now());
            let records = desired.records();
            let written = self.store.write(&records).await;
            if let Err(cause) = written {
                self.metrics.dns_publish_failures.inc();
                // One line for an outage, however long it lasts; the metric counts the attempts.
                if !failing {
                    warn!(error = %cause, "cannot publish records, retrying");
                }
                failing = true;
                (self.report)(Err(cause.to_string()));
                let again = Instant::now() + backoff.pause(rand::random());
                // Changes do not end this wait: a store that is down must not be tried for each node that connects.
                drain.run_until(sleep_until(again)).await;
                continue;
            }
            if failing {
                info!(records = records.len(), "records published again");
            }
            failing = false;
            backoff = Backoff::new();
            self.metrics.dns_records.set(i64::try_from(records.len()).unwrap_or(i64::MAX));
            (self.report)(Ok(()));
            // A write is due without changes, too: leases expire, and other programs rewrite files.
            let due = self.store.due();
            let next = desired.next().map_or(due, |next| next.min(due));
            let changed = debounce(&mut changes, self.store.debounce_time());
            drain.run_until(timeout_at(next, changed)).await;
        }
        // DNS must not send clients to a server that stops.
        match timeout(WITHDRAW_TIMEOUT, self.store.withdraw()).await {
            Ok(Ok(())) => {
                self.metrics.dns_records.set(0);
                info!("records withdrawn");
            }
            Ok(Err(cause)) => warn!(error = %cause, "cannot withdraw records"),
            Err(_) => warn!(timeout = ?WITHDRAW_TIMEOUT, "withdrawing records timed out"),
        }
    }
}

impl DesiredRecords {
    /// Updates the records: new nodes immediately, missing nodes after [`WITHDRAW_DELAY`].
    fn follow(&mut self, here: impl Iterator<Item = String>, now: Instant) {
        let here: BTreeSet<String> = here.collect();
        for (record, left) in &mut self.0 {
            if !here.contains(record) {
                left.get_or_insert(now);
            }
        }
        self.0.extend(here.into_iter().map(|record| (record, None)));
        self.0.retain(|_, left| left.is_none_or(|left| now < left + WITHDRAW_DELAY));
    }

    /// Returns the time of the next removal.
    fn next(&self) -> Option<Instant> {
        self.0.values().flatten().min().map(|left| *left + WITHDRAW_DELAY)
    }

    fn records(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }
}

/// Waits for a change, and then for further changes during `time`. Cancel safe.
async fn debounce(changes: &mut watch::Receiver<()>, time: Duration) {
    // The sender is part of the registry, which the publisher holds.
    let _ = changes.changed().await;
    sleep(time).await;
}

/// Time between a node's disconnection and the removal of its record; short interruptions must not change DNS.
const WITHDRAW_DELAY: Duration = Duration::from_secs(2);

/// Timeout for withdrawing the records; the process must end well before it is killed.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
