//! Ports of nodes that a ConfigMap names: told to whom they concern, and written into the Service that leads to the pods.

mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Error};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::drain::Drain;
use crate::policy::ProxyPorts;
use crate::registry::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};
use crate::registry::follow::{Followed, Take};
use service::{Change, changed};

/// Where ports of nodes are named, and where they are to lead.
#[derive(Debug, Clone)]
pub struct PortParams {
    /// Where all of it is; the Service stands in our own namespace.
    pub cluster: Cluster,
    /// The ConfigMap's namespace.
    pub namespace: String,
    /// Its name.
    pub configmap: String,
    /// The Service whose ports are kept; `None`: none is.
    pub service: Option<String>,
    /// The ports at which this pod listens.
    pub own: BTreeSet<u16>,
    /// The port of this pod at which a request's Host names the port of its node; `None`: there is none.
    pub http: Option<u16>,
    /// The same behind TLS.
    pub https: Option<u16>,
}

/// Follows the ConfigMap. While kube-apiserver does not answer, what was known stands; where there is no ConfigMap, no
/// port beside the kubelet's is named.
pub struct PortWatch {
    params: PortParams,
    ports: watch::Sender<ProxyPorts>,
    report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
    /// What was told last.
    told: Mutex<Option<String>>,
    /// The ConfigMap may have changed.
    news: Notify,
}

impl PortWatch {
    /// Sends no request yet. `report` gets whether all that is named is served, and if not, why; it must be quick.
    pub fn new(params: PortParams, report: impl Fn(Result<(), String>) + Send + Sync + 'static) -> Self {
        let ports = watch::Sender::new(ProxyPorts::default());
        Self { params, ports, report: Box::new(report), told: Mutex::default(), news: Notify::new() }
    }

    /// The ports as they were last read.
    pub fn ports(&self) -> watch::Receiver<ProxyPorts> {
        self.ports.subscribe()
    }

    /// Follows it until draining begins.
    pub async fn follow(self, drain: Drain) {
        let PortParams { cluster, namespace, configmap, .. } = &self.params;
        let what = format!("ConfigMap {namespace}/{configmap}");
        let which = watcher::Config::default().fields(&format!("metadata.name={configmap}"));
        let followed = Followed { cluster, what: &what, which };
        tokio::select! {
            never = followed.follow(|client, _| Api::namespaced(client, namespace), &self) => match never {},
            () = self.keep() => {}
            () = drain.draining() => {}
        }
    }

    /// Reads and writes whenever there are news, and at times without.
    async fn keep(&self) {
        loop {
            let done = timeout(REQUEST_TIMEOUT, self.pass()).await.unwrap_or(Err(ClusterError::Silent));
            self.tell(
                done.map_err(|cause| vec![cause.to_string()])
                    .and_then(|wrong| if wrong.is_empty() { Ok(()) } else { Err(wrong) }),
            );
            tokio::select! {
                () = self.news.notified() => {}
                () = sleep(LOOK_AGAIN) => {}
            }
        }
    }

    /// Reads the ConfigMap, tells its ports, and makes the Service so. What is wrong with either, each in a sentence.
    ///
    /// Both are read anew: pods that know it later than others must not undo what those have written.
    async fn pass(&self) -> Result<Vec<String>, ClusterError> {
        let PortParams { cluster, namespace, configmap, service, own, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let map = Api::<ConfigMap>::namespaced(client.clone(), namespace).get_opt(configmap).await?;
        let data = map.and_then(|map| map.data).unwrap_or_default();
        let (ports, wrong) = ProxyPorts::parse(&data, own);
        let mut wrong: Vec<_> =
            wrong.iter().map(|wrong| format!("ConfigMap {namespace}/{configmap}: {wrong}")).collect();
        self.publish(&ports);
        if let Some(service) = service {
            wrong.extend(self.write(client, (&home, service), &ports).await?);
        }
        Ok(wrong)
    }

    fn publish(&self, ports: &ProxyPorts) {
        self.ports.send_if_modified(|old| {
            let news = old != ports;
            if news {
                let ProxyPorts { http, https, loopback } = ports;
                info!(?http, ?https, ?loopback, "ports of nodes that are led here");
                old.clone_from(ports);
            }
            news
        });
    }

    /// Makes the Service have these ports, if it is ours.
    async fn write(
        &self,
        client: Client,
        (namespace, name): (&str, &str),
        ports: &ProxyPorts,
    ) -> Result<Vec<String>, ClusterError> {
        let api = Api::<Service>::namespaced(client, namespace);
        let (wanted, mut wrong) = self.wanted(ports);
        for tries in 1..=MOST_TRIES {
            let Some(mut object) = api.get_opt(name).await? else {
                wrong.push(format!(
                    "there is no Service {namespace}/{name} to lead ports of nodes to the pods"
                ));
                return Ok(wrong);
            };
            if !service::is_ours(&object) {
                wrong.push(format!("Service {namespace}/{name} is left as it is: {}", service::NOT_OURS));
                return Ok(wrong);
            }
            let old = object.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
            let Change { ports, added, removed, moved, taken } = changed(old, &wanted);
            wrong.extend(taken.iter().map(|port| {
                format!(
                    "Service {namespace}/{name} has a port {port} that is not one of ours: it stays as it is"
                )
            }));
            if added.is_empty() && removed.is_empty() && moved.is_empty() {
                return Ok(wrong);
            }
            object.spec.get_or_insert_default().ports = Some(ports);
            match api.replace(name, &PostParams::default(), &object).await {
                Ok(_) => {
                    info!(service = name, ?added, ?removed, ?moved, "ports of the Service have changed");
                    return Ok(wrong);
                }
                // Changed or deleted meanwhile.
                Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {
                    debug!(tries, "somebody else has written the Service: once more");
                    wrong.truncate(wrong.len() - taken.len());
                }
                Err(cause) => return Err(cause.into()),
            }
        }
        wrong.push(format!("Service {namespace}/{name} is written without a pause by somebody else"));
        Ok(wrong)
    }

    /// The Service's port for each port of nodes, and ours behind it; and which have none.
    fn wanted(&self, ports: &ProxyPorts) -> (BTreeMap<u16, u16>, Vec<String>) {
        let (mut wanted, mut wrong) = (BTreeMap::new(), Vec::new());
        let kinds = [("http", self.params.http, &ports.http), ("https", self.params.https, &ports.https)];
        for (kind, front, all) in kinds {
            match front {
                Some(front) => wanted.extend(all.iter().map(|port| (*port, front))),
                None if all.is_empty() => {}
                None => wrong.push(format!(
                    "{kind}-proxy-ports: they lead nowhere, as no port in addr of [mode.cloud.{kind}] is \"host\""
                )),
            }
        }
        (wanted, wrong)
    }

    /// Says what has changed since it last said something.
    fn tell(&self, state: Result<(), Vec<String>>) {
        let state = state.map_err(|all| all.join("; "));
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != state.as_ref().err().cloned() {
            match &state {
                Ok(()) => info!("all ports of nodes that are named are served"),
                Err(wrong) => warn!("ports of nodes: {wrong}"),
            }
            *told = state.clone().err();
        }
        drop(told);
        (self.report)(state);
    }
}

impl Take<ConfigMap> for &PortWatch {
    fn take(&mut self, event: Event<ConfigMap>) -> bool {
        let listing = matches!(event, Event::Init | Event::InitApply(_));
        if !listing {
            self.news.notify_one();
        }
        !listing
    }
}

impl std::fmt::Debug for PortWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortWatch").field("params", &self.params).finish_non_exhaustive()
    }
}

/// How often the Service is looked at although the ConfigMap has not changed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Tries against others who write the Service, at once.
const MOST_TRIES: u32 = 10;
