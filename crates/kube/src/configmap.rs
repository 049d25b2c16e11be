//! Records in a ConfigMap that several servers and people share, in the form of SuperEdge.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::ready;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::ConfigMap as Object;
use kube::Api;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT, write};
use tunnel_base::addresses::cluster_state::ServiceEndpoints;
use tunnel_base::policy::hosts_lines;
use tunnel_base::silence::unless_silent;
use tunnel_base::stores::{RecordStore, StoreFuture};

/// Our lines in the key `hosts` of a ConfigMap: `<address>    <name>`. Of other lines, only those of dead servers are
/// removed.
#[derive(Debug)]
pub struct ConfigMapRecords {
    settings: ConfigMapParams,
    api: Option<Api<Object>>,
    /// Servers that have lines but are not ready, and when to check them.
    sweeps: HashMap<IpAddr, Instant>,
    /// Servers that had lines when they were last read.
    servers: BTreeSet<IpAddr>,
}

/// A ConfigMap, and what to write there.
#[derive(derive_more::Debug)]
pub struct ConfigMapParams {
    /// Cluster with the ConfigMap, which is in the server's namespace.
    pub cluster: Cluster,
    /// Name of the ConfigMap. It is created if it does not exist.
    pub name: String,
    /// The published address.
    pub server: IpAddr,
    /// Endpoints of all servers. Without them, lines of dead servers remain.
    pub endpoints: Option<watch::Receiver<ServiceEndpoints>>,
    /// Tells whether a server that is not ready lives. It must return true only for a server that has answered: one that
    /// was not reached is considered dead.
    #[debug(skip)]
    pub liveness: Box<ServerLivenessProbe>,
}

/// A probe that determines whether a server is alive.
pub type ServerLivenessProbe = dyn Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync;

impl RecordStore for ConfigMapRecords {
    /// Also removes lines of servers that have been absent for a while. Cancel safe.
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> StoreFuture<'a, ()> {
        Box::pin(async { Ok(self.change(records, true).await?) })
    }

    fn withdraw(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(self.change(&BTreeSet::new(), false).await?) })
    }

    /// Returns those that had lines in the servers' form when the ConfigMap was last read.
    fn servers(&self) -> BoxFuture<'_, BTreeSet<IpAddr>> {
        Box::pin(ready(self.servers.clone()))
    }

    fn due(&self) -> Instant {
        let next_check = Instant::now() + REWRITE_INTERVAL;
        self.sweeps.values().min().map_or(next_check, |sweep| next_check.min(*sweep))
    }

    fn debounce_time(&self) -> Duration {
        DEBOUNCE
    }
}

impl ConfigMapRecords {
    /// Creates the store; sends no request.
    pub fn new(settings: ConfigMapParams) -> Self {
        Self { settings, api: None, sweeps: HashMap::new(), servers: BTreeSet::new() }
    }

    async fn change(&mut self, records: &BTreeSet<String>, create: bool) -> Result<(), String> {
        let changed = unless_silent(REQUEST_TIMEOUT, self.try_write(records, create)).await;
        changed.unwrap_or(Err(ClusterError::Silent)).unwrap_or_else(|cause| {
            // The next attempt reads the files again: a certificate or token may have expired.
            self.api = None;
            let cause = cause.needing("get, create and update on configmaps");
            Err(format!("ConfigMap {}: {cause}", self.settings.name))
        })
    }

    /// Writes the ConfigMap. After a conflict, the new object is tried immediately. The inner error is that it is too
    /// long, or that others write it all the time.
    async fn try_write(
        &mut self,
        records: &BTreeSet<String>,
        create: bool,
    ) -> Result<Result<(), String>, ClusterError> {
        let api = self.connected().await?;
        for tries in 1..=MAX_TRIES {
            let old = api.get_opt(&self.settings.name).await?;
            if old.is_none() && !create {
                return Ok(Ok(()));
            }
            let text =
                old.as_ref().and_then(|old| old.data.as_ref()?.get(HOSTS_KEY)).map_or("", String::as_str);
            self.servers = hosts_lines::servers(text.as_bytes());
            // The conflicting writer may be one of the servers to check, so later attempts check none; their turn comes
            // again soon. A server that stops has no time to check others either.
            let checks_servers = create && tries == 1;
            let stopped = if checks_servers {
                self.servers_to_remove(text, Instant::now()).await
            } else {
                BTreeSet::new()
            };
            let new = updated_hosts(text, self.settings.server, records, &stopped);
            if old.is_some() && new == text {
                return Ok(Ok(()));
            }
            let exists = old.is_some();
            let object = match self.object(old, new) {
                Ok(object) => object,
                Err(too_long) => return Ok(Err(too_long)),
            };
            if write(&api, &self.settings.name, &object, exists).await? {
                self.sweeps.retain(|server, _| !stopped.contains(server));
                if !stopped.is_empty() {
                    info!(servers = ?stopped, "removed lines of stopped servers");
                }
                return Ok(Ok(()));
            }
            debug!(tries, "ConfigMap changed by another writer, retrying");
        }
        // The usual cause is a program that writes it continuously.
        Ok(Err(format!(
            "ConfigMap {}: {MAX_TRIES} conflicting updates by other writers; find out which program writes it so often",
            self.settings.name
        )))
    }

    /// Returns the servers whose lines must be removed now. For a while they have been no endpoint of the Service, or
    /// one that is not ready and does not answer. A server that is alive would only add its lines again.
    async fn servers_to_remove(&mut self, text: &str, now: Instant) -> BTreeSet<IpAddr> {
        let known = self.settings.endpoints.as_ref().and_then(|known| known.borrow().clone());
        let server = self.settings.server;
        let text = text.as_bytes();
        // No server is checked unless this one is an endpoint: it may be the wrong Service.
        let Some(known) =
            known.filter(|known| known.ready.contains(&server) || known.unready.contains(&server))
        else {
            self.sweeps.clear();
            return BTreeSet::new();
        };
        let mut absent = hosts_lines::servers(text);
        // A line with a loopback address is never a server's.
        absent.retain(|ip| !known.ready.contains(ip) && *ip != server && !ip.is_loopback());
        self.sweeps.retain(|ip, _| absent.contains(ip));
        for ip in absent {
            self.sweeps.entry(ip).or_insert_with(|| sweep_after(now));
        }
        let overdue = self.sweeps.iter().filter(|(_, sweep_at)| **sweep_at <= now).map(|(ip, _)| *ip);
        let (unready, mut dead): (BTreeSet<_>, BTreeSet<_>) =
            overdue.partition(|ip| known.unready.contains(ip));
        let lives = join_all(unready.iter().map(|ip| (self.settings.liveness)(*ip))).await;
        for (ip, lives) in unready.into_iter().zip(lives) {
            if lives {
                self.sweeps.insert(ip, sweep_after(now));
            } else {
                dead.insert(ip);
            }
        }
        dead
    }

    /// Returns the object with another text. All other content remains.
    fn object(&self, old: Option<Object>, text: String) -> Result<Object, String> {
        let name = &self.settings.name;
        let mut object = old.unwrap_or_else(|| {
            let mut new = Object::default();
            new.metadata.name = Some(name.clone());
            new
        });
        object.data.get_or_insert_with(BTreeMap::new).insert(HOSTS_KEY.to_owned(), text);
        let texts = object.data.iter().flat_map(BTreeMap::values).map(String::len);
        let blobs = object.binary_data.iter().flat_map(BTreeMap::values).map(|blob| blob.0.len());
        let bytes: usize = texts.chain(blobs).sum();
        if bytes > MAX_BYTES {
            return Err(format!(
                "ConfigMap {name} would hold {bytes} bytes, more than the limit of {MAX_BYTES}; publish to etcd instead \
                 (publish = \"etcd\"), remove foreign entries, or use a shorter zone"
            ));
        }
        Ok(object)
    }

    async fn connected(&mut self) -> Result<Api<Object>, ClusterError> {
        if let Some(api) = &self.api {
            return Ok(api.clone());
        }
        let (client, namespace) = self.settings.cluster.connect().await?;
        let api = Api::namespaced(client, &namespace);
        Ok(self.api.insert(api).clone())
    }
}

/// Returns when the lines of a server are checked that is missing since `now`.
fn sweep_after(now: Instant) -> Instant {
    now + STALE_AFTER + SPREAD.mul_f64(rand::random())
}

fn updated_hosts(
    text: &str,
    server: IpAddr,
    records: &BTreeSet<String>,
    stopped: &BTreeSet<IpAddr>,
) -> String {
    let mut new = hosts_lines::merged(text.as_bytes(), server, records);
    if !stopped.is_empty() {
        new = hosts_lines::without(&new, stopped);
    }
    // Only whole lines are removed and added, so the text remains valid UTF-8.
    String::from_utf8(new).unwrap_or_else(|_| text.to_owned())
}

/// The key that SuperEdge uses. It is the file's name where the ConfigMap is mounted.
const HOSTS_KEY: &str = "hosts";

/// The size limit of a ConfigMap in Kubernetes.
const MAX_BYTES: usize = 1 << 20;

/// Maximum number of immediate attempts after conflicts. Among concurrent writers, each round lets at least one
/// through.
const MAX_TRIES: u32 = 50;

/// Time between two checks of our lines and those of other servers.
const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Time that a server with lines may be missing from the ready endpoints before it is checked; a new server is not
/// ready immediately.
const STALE_AFTER: Duration = Duration::from_secs(20);

/// Random addition to `STALE_AFTER`, so that one of many servers removes the lines and the others find them removed.
const SPREAD: Duration = Duration::from_secs(10);

/// Debounce time of changes: each write sends the whole text.
const DEBOUNCE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests;
