//! Records in a ConfigMap of Kubernetes that several pods, and people, share; the form is that of SuperEdge's.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::ConfigMap as Object;
use kube::api::PostParams;
use kube::{Api, Error};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{debug, info};

use crate::kubernetes::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};
use crate::kubernetes::members::KnownEndpoints;
use tunnel_base::policy::zone;

/// Our lines in the key `hosts` of a ConfigMap: `<address>    <name>`. Of the rest, only lines of dead pods go.
#[derive(Debug)]
pub struct ConfigMap {
    settings: ConfigMapParams,
    api: Option<Api<Object>>,
    /// Pods that have lines and are not ready, and when they are to be judged.
    gone: HashMap<IpAddr, Instant>,
    /// The pods that had lines when they were last read.
    servers: BTreeSet<IpAddr>,
}

/// A ConfigMap, and what to write there.
#[derive(Debug)]
pub struct ConfigMapParams {
    /// Where it is; it stands in our own namespace.
    pub cluster: Cluster,
    /// Its name. It is made if there is none.
    pub name: String,
    /// The published address.
    pub server: IpAddr,
    /// The pods that there are; `None`: they are not known, and lines of dead pods stay.
    pub endpoints: Option<watch::Receiver<KnownEndpoints>>,
    /// Asked whether a pod that is not ready is alive all the same.
    pub lives: LivenessProbe,
}

/// Finds out whether a pod is alive.
pub struct LivenessProbe(Box<dyn Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync>);

/// Why the ConfigMap could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ConfigMapError {
    /// It, or its cluster, is not to be had.
    #[error("ConfigMap {name}: {cause}")]
    Cluster {
        /// Its name.
        name: String,
        /// What went wrong.
        cause: ClusterError,
    },
    /// More lines than Kubernetes takes. Cure: a store without this limit, or shorter lines.
    #[error(
        "ConfigMap {name} would hold {bytes} bytes and Kubernetes takes {MAX_BYTES}: publish to etcd instead \
         (publish = \"etcd\"), take out what others have put there, or use a shorter zone"
    )]
    Full {
        /// Its name.
        name: String,
        /// What it would hold.
        bytes: usize,
    },
    /// Others were quicker each time. Usual cause: something writes it without a pause.
    #[error(
        "ConfigMap {name}: others have changed it {MAX_TRIES} times while we tried: see who writes it so often"
    )]
    Contended {
        /// Its name.
        name: String,
    },
}

impl LivenessProbe {
    /// To be true only of a pod that has answered: one that is not asked, or not reached, is taken for dead.
    pub fn new(ask: impl Fn(IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static) -> Self {
        Self(Box::new(ask))
    }
}

impl fmt::Debug for LivenessProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lives")
    }
}

impl ConfigMap {
    /// Nothing is asked yet.
    pub fn new(settings: ConfigMapParams) -> Self {
        Self { settings, api: None, gone: HashMap::new(), servers: BTreeSet::new() }
    }

    /// Makes these our only lines, and takes away lines of pods that have been gone for a while. Cancel safe: a write
    /// that was under way may or may not have happened.
    pub async fn write(&mut self, records: &BTreeSet<String>) -> Result<(), ConfigMapError> {
        self.change(records, true).await
    }

    /// Takes our lines away.
    pub async fn withdraw(&mut self) -> Result<(), ConfigMapError> {
        self.change(&BTreeSet::new(), false).await
    }

    /// The addresses that had lines as pods write them when it was last read.
    pub(crate) fn servers(&self) -> BTreeSet<IpAddr> {
        self.servers.clone()
    }

    /// When to look although nothing has changed here.
    pub(crate) fn due(&self) -> Instant {
        let look = Instant::now() + REWRITE_INTERVAL;
        self.gone.values().min().map_or(look, |sweep| look.min(*sweep))
    }

    async fn change(&mut self, records: &BTreeSet<String>, create: bool) -> Result<(), ConfigMapError> {
        let changed = timeout(REQUEST_TIMEOUT, self.try_on(records, create)).await;
        let changed = changed.unwrap_or_else(|_| Err(self.failed(ClusterError::Silent)));
        if matches!(changed, Err(ConfigMapError::Cluster { .. })) {
            // The next try reads the files anew: a certificate or a token may be over.
            self.api = None;
        }
        changed
    }

    /// A conflict is somebody else's success, and the fresh object is tried at once.
    async fn try_on(&mut self, records: &BTreeSet<String>, create: bool) -> Result<(), ConfigMapError> {
        let api = self.connected().await.map_err(|cause| self.failed(cause))?;
        for tries in 1..=MAX_TRIES {
            let old = api.get_opt(&self.settings.name).await.map_err(|cause| self.failed(cause.into()))?;
            if old.is_none() && !create {
                return Ok(());
            }
            let text =
                old.as_ref().and_then(|old| old.data.as_ref()?.get(HOSTS_KEY)).map_or("", String::as_str);
            self.servers = zone::servers(text.as_bytes());
            // The pod that wrote before us may be one of those to judge, so a second try judges nobody: its turn comes
            // again at once. A pod that leaves has no time to ask either.
            let judges = create && tries == 1;
            let gone = if judges { self.dead(text, Instant::now()).await } else { BTreeSet::new() };
            let new = renewed(text, self.settings.server, records, &gone);
            if old.is_some() && new == text {
                return Ok(());
            }
            let (there, object) = (old.is_some(), self.object(old, new)?);
            let written = if there {
                api.replace(&self.settings.name, &PostParams::default(), &object).await
            } else {
                api.create(&PostParams::default(), &object).await
            };
            match written {
                Ok(_) => {
                    self.gone.retain(|server, _| !gone.contains(server));
                    if !gone.is_empty() {
                        info!(servers = ?gone, "lines of pods that are gone are taken away");
                    }
                    return Ok(());
                }
                // Changed, made or deleted meanwhile.
                Err(Error::Api(status)) if status.code == 409 || there && status.code == 404 => {
                    debug!(tries, "somebody else has written the ConfigMap: once more");
                }
                Err(cause) => return Err(self.failed(cause.into())),
            }
        }
        Err(ConfigMapError::Contended { name: self.settings.name.clone() })
    }

    /// Pods whose lines are to go now: for a while they have been no endpoint of the Service at all, or one that is not
    /// ready; then it must not answer either. One that is alive would only add its lines again.
    async fn dead(&mut self, text: &str, now: Instant) -> BTreeSet<IpAddr> {
        let known = self.settings.endpoints.as_ref().and_then(|known| known.borrow().clone());
        let (server, text) = (self.settings.server, text.as_bytes());
        // Nobody is judged unless we are an endpoint ourselves: it may be the wrong Service.
        let Some(known) =
            known.filter(|known| known.ready.contains(&server) || known.unready.contains(&server))
        else {
            self.gone.clear();
            return BTreeSet::new();
        };
        let mut absent = zone::servers(text);
        // No pod has a loopback address: such a line is somebody else's.
        absent.retain(|ip| !known.ready.contains(ip) && *ip != server && !ip.is_loopback());
        self.gone.retain(|ip, _| absent.contains(ip));
        let later = || now + STALE_AFTER + SPREAD.mul_f64(rand::random());
        for ip in absent {
            self.gone.entry(ip).or_insert_with(later);
        }
        let overdue = self.gone.iter().filter(|(_, judged)| **judged <= now).map(|(ip, _)| *ip);
        let (doubtful, mut dead): (BTreeSet<_>, BTreeSet<_>) =
            overdue.partition(|ip| known.unready.contains(ip));
        let lives = join_all(doubtful.iter().map(|ip| (self.settings.lives.0)(*ip))).await;
        for (ip, lives) in doubtful.into_iter().zip(lives) {
            if lives {
                self.gone.insert(ip, later());
            } else {
                dead.insert(ip);
            }
        }
        dead
    }

    /// The object with another text. Whatever else it holds stays.
    fn object(&self, old: Option<Object>, text: String) -> Result<Object, ConfigMapError> {
        let name = &self.settings.name;
        let mut object = old.unwrap_or_else(|| {
            let mut new = Object::default();
            new.metadata.name = Some(name.clone());
            new
        });
        object.data.get_or_insert_with(BTreeMap::new).insert(HOSTS_KEY.to_owned(), text);
        let texts = object.data.iter().flat_map(BTreeMap::values).map(String::len);
        let blobs = object.binary_data.iter().flat_map(BTreeMap::values).map(|blob| blob.0.len());
        let bytes = texts.chain(blobs).sum();
        if bytes > MAX_BYTES {
            return Err(ConfigMapError::Full { name: name.clone(), bytes });
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

    fn failed(&self, cause: ClusterError) -> ConfigMapError {
        ConfigMapError::Cluster { name: self.settings.name.clone(), cause }
    }
}

fn renewed(text: &str, server: IpAddr, records: &BTreeSet<String>, gone: &BTreeSet<IpAddr>) -> String {
    let mut new = zone::merged(text.as_bytes(), server, records);
    if !gone.is_empty() {
        new = zone::without(&new, gone);
    }
    // Whole lines of a text are taken out and put in, so it stays one.
    String::from_utf8(new).unwrap_or_else(|_| text.to_owned())
}

/// The key that SuperEdge uses, and the name of the file where the ConfigMap is mounted.
const HOSTS_KEY: &str = "hosts";

/// What Kubernetes takes in one ConfigMap.
const MAX_BYTES: usize = 1 << 20;

/// Tries against others who write, at once: of those who write together each try lets at least one through.
const MAX_TRIES: u32 = 50;

/// How often we look whether our lines still stand, and who else has some.
const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

/// How long a pod with lines may be missing among the ready ones before it is judged: a new one is not ready at once.
const STALE_AFTER: Duration = Duration::from_secs(20);

/// Chance added to that absence, so that of many pods one sweeps and the others find it done.
const SPREAD: Duration = Duration::from_secs(10);

/// How long changes are gathered: each write sends the whole text.
pub(crate) const GATHERING: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests;
