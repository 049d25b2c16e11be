//! Reads ports of nodes from a ConfigMap, announces them in this process, and writes them into the Service of the
//! servers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT, StateReport, write};
use crate::reconcile::service_ports::{NOT_OURS, ServicePortChange, changed, is_ours};
use crate::watcher::{Event, ObjectWatcher, publish};
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_base::silence::unless_silent;

/// Parameters of a [`PortWatch`]: the ConfigMap that lists node ports, and the Service that gets them.
#[derive(Debug, Clone)]
pub struct PortWatchParams {
    /// Cluster with all the objects. The Service is in the server's namespace.
    pub cluster: Cluster,
    /// Namespace of the ConfigMap.
    pub namespace: String,
    /// Name of the ConfigMap.
    pub configmap: String,
    /// Service whose ports are reconciled; `None` disables that.
    pub service: Option<String>,
    /// Ports on which this server listens; the ConfigMap cannot list them as node ports.
    pub own: BTreeSet<u16>,
    /// Port of this server that forwards to the node's port in a request's Host, if any.
    pub http: Option<u16>,
    /// The same port with TLS, if any.
    pub https: Option<u16>,
}

/// A watch of the ConfigMap. The last known ports apply while kube-apiserver does not answer. Without a ConfigMap, only
/// the kubelet's port is served.
#[derive(derive_more::Debug)]
#[debug("PortWatch({params:?})")]
pub struct PortWatch {
    params: PortWatchParams,
    /// The ports in the ConfigMap.
    ports: watch::Sender<ConfigMapPorts>,
    report: StateReport,
    /// Notified when the ConfigMap may have changed.
    configmap_changed: Notify,
}

impl PortWatch {
    /// Creates a watch; sends no request. Sends the ports in the ConfigMap to `ports`. Calls `report` with whether all
    /// listed ports are served, and if not, why.
    pub fn new(params: PortWatchParams, ports: watch::Sender<ConfigMapPorts>, report: StateReport) -> Self {
        Self { params, ports, report, configmap_changed: Notify::new() }
    }

    /// Runs the watch until draining starts.
    pub async fn follow(self, drain: Drain) {
        let PortWatchParams { cluster, namespace, configmap, .. } = &self.params;
        let what = format!("ConfigMap {namespace}/{configmap}");
        let which = ListParams::default().fields(&format!("metadata.name={configmap}"));
        let followed = ObjectWatcher { cluster, what: &what, which };
        let on_event = |event: Event<ConfigMap>| {
            if !matches!(event, Event::Init | Event::InitApply(_)) {
                self.configmap_changed.notify_one();
            }
        };
        tokio::select! {
            never = followed.run(|client, _| Api::namespaced(client, namespace), on_event, drop) => match never {},
            () = self.keep() => {}
            () = drain.draining() => {}
        }
    }

    /// Reconciles after each change, and periodically. Reports the state, and logs it if it has changed.
    async fn keep(&self) {
        let mut logged = None;
        loop {
            let done =
                unless_silent(REQUEST_TIMEOUT, self.reconcile()).await.unwrap_or(Err(ClusterError::Silent));
            let wrong = done.unwrap_or_else(|cause| vec![cause.to_string()]);
            let wrong = (!wrong.is_empty()).then(|| wrong.join("; "));
            if logged != wrong {
                match &wrong {
                    None => info!("all node ports are served"),
                    Some(errors) => warn!(errors, "cannot serve all node ports"),
                }
                logged.clone_from(&wrong);
            }
            (self.report)(wrong.map_or(Ok(()), Err));
            let _ = timeout(CHECK_INTERVAL, self.configmap_changed.notified()).await;
        }
    }

    /// Reads the ConfigMap, announces its ports and reconciles the Service. Returns the errors in either, each as a
    /// sentence.
    ///
    /// Both are read again each time: a server that learns of a change late must not undo the writes of others.
    async fn reconcile(&self) -> Result<Vec<String>, ClusterError> {
        let PortWatchParams { cluster, namespace, configmap, service, own, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let map = Api::<ConfigMap>::namespaced(client.clone(), namespace).get_opt(configmap).await?;
        let data = map.and_then(|map| map.data).unwrap_or_default();
        let (ports, wrong) = ConfigMapPorts::parse(&data, own);
        let mut wrong: Vec<_> =
            wrong.iter().map(|wrong| format!("ConfigMap {namespace}/{configmap}: {wrong}")).collect();
        if publish(&self.ports, ports.clone()) {
            let ConfigMapPorts { http, https, loopback } = &ports;
            info!(?http, ?https, ?loopback, "node ports changed");
        }
        if let Some(service) = service {
            wrong.extend(self.update_service(client, &home, service, &ports).await?);
        }
        Ok(wrong)
    }

    /// Reconciles the ports of the Service if it is managed.
    async fn update_service(
        &self,
        client: Client,
        namespace: &str,
        name: &str,
        ports: &ConfigMapPorts,
    ) -> Result<Vec<String>, ClusterError> {
        let api = Api::<Service>::namespaced(client, namespace);
        let (required, mut wrong) = self.required_ports(ports);
        // All servers write this Service. After a conflict it is read again, so that no change of another writer is
        // lost.
        for tries in 1..=MAX_TRIES {
            let Some(mut object) = api.get_opt(name).await? else {
                wrong.push(format!("Service {namespace}/{name} for node ports does not exist"));
                return Ok(wrong);
            };
            if !is_ours(&object) {
                wrong.push(format!("Service {namespace}/{name} is not changed: {}", NOT_OURS));
                return Ok(wrong);
            }
            let old = object.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
            let ServicePortChange { ports, added, removed, moved, taken } = changed(old, &required);
            wrong.extend(taken.iter().map(|port| {
                format!("Service {namespace}/{name} has a foreign port {port}, which is not changed")
            }));
            if added.is_empty() && removed.is_empty() && moved.is_empty() {
                return Ok(wrong);
            }
            object.spec.get_or_insert_default().ports = Some(ports);
            if write(&api, name, &object, true).await? {
                info!(service = name, ?added, ?removed, ?moved, "ports of Service updated");
                return Ok(wrong);
            }
            debug!(tries, "Service changed by another writer, retrying");
            // The next attempt finds the foreign ports again.
            wrong.truncate(wrong.len() - taken.len());
        }
        wrong.push(format!("Service {namespace}/{name} is changed too often by another writer"));
        Ok(wrong)
    }

    /// Returns the target port of the Service for each node port, and errors for kinds that have no target.
    fn required_ports(&self, ports: &ConfigMapPorts) -> (BTreeMap<u16, u16>, Vec<String>) {
        let mut required = BTreeMap::new();
        let mut wrong = Vec::new();
        let kinds = [("http", self.params.http, &ports.http), ("https", self.params.https, &ports.https)];
        for (kind, front, all) in kinds {
            match front {
                Some(front) => required.extend(all.iter().map(|port| (*port, front))),
                None if all.is_empty() => {}
                None => wrong.push(format!(
                    "{kind}-proxy-ports have no target; set a port in ports of [server.{kind}] to \"host\""
                )),
            }
        }
        (required, wrong)
    }
}

/// Time between two checks of the Service without changes of the ConfigMap.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Maximum number of immediate attempts after conflicting writes.
const MAX_TRIES: u32 = 10;
