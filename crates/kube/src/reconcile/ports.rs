//! Reads ports of nodes from a ConfigMap, announces them in this process, and writes them into the Service of the
//! servers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Error};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};
use crate::watcher::{ObjectWatcher, WatchHandler};
use tunnel_base::drain::Drain;
use tunnel_base::policy::ports::ConfigMapPorts;

/// Parameters of a [`PortWatch`]: the ConfigMap that lists node ports, and the Service that gets them.
#[derive(Debug, Clone)]
pub struct PortParams {
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
pub struct PortWatch {
    params: PortParams,
    ports: watch::Sender<ConfigMapPorts>,
    report: Box<dyn Fn(Result<(), String>) + Send + Sync>,
    /// Errors logged last.
    logged: Mutex<Option<String>>,
    /// Notified when the ConfigMap may have changed.
    configmap_changed: Notify,
}

impl PortWatch {
    /// Creates a watch; sends no request. Calls `report` with whether all listed ports are served, and if not, why. It
    /// must not block.
    pub fn new(params: PortParams, report: impl Fn(Result<(), String>) + Send + Sync + 'static) -> Self {
        let ports = watch::Sender::new(ConfigMapPorts::default());
        Self {
            params,
            ports,
            report: Box::new(report),
            logged: Mutex::default(),
            configmap_changed: Notify::new(),
        }
    }

    /// Returns a receiver of the ports in the ConfigMap.
    pub fn ports(&self) -> watch::Receiver<ConfigMapPorts> {
        self.ports.subscribe()
    }

    /// Runs the watch until draining starts.
    pub async fn follow(self, drain: Drain) {
        let PortParams { cluster, namespace, configmap, .. } = &self.params;
        let what = format!("ConfigMap {namespace}/{configmap}");
        let which = watcher::Config::default().fields(&format!("metadata.name={configmap}"));
        let followed = ObjectWatcher { cluster, what: &what, which };
        tokio::select! {
            never = followed.run(|client, _| Api::namespaced(client, namespace), &self) => match never {},
            () = self.keep() => {}
            () = drain.draining() => {}
        }
    }

    /// Reconciles after each change, and periodically.
    async fn keep(&self) {
        loop {
            let done = timeout(REQUEST_TIMEOUT, self.reconcile()).await.unwrap_or(Err(ClusterError::Silent));
            self.report_state(
                done.map_err(|cause| vec![cause.to_string()])
                    .and_then(|wrong| if wrong.is_empty() { Ok(()) } else { Err(wrong) }),
            );
            tokio::select! {
                () = self.configmap_changed.notified() => {}
                () = sleep(CHECK_INTERVAL) => {}
            }
        }
    }

    /// Reads the ConfigMap, announces its ports and reconciles the Service. Returns the errors in either, each as a
    /// sentence.
    ///
    /// Both are read again each time: a server that learns of a change late must not undo the writes of others.
    async fn reconcile(&self) -> Result<Vec<String>, ClusterError> {
        let PortParams { cluster, namespace, configmap, service, own, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let map = Api::<ConfigMap>::namespaced(client.clone(), namespace).get_opt(configmap).await?;
        let data = map.and_then(|map| map.data).unwrap_or_default();
        let (ports, wrong) = ConfigMapPorts::parse(&data, own);
        let mut wrong: Vec<_> =
            wrong.iter().map(|wrong| format!("ConfigMap {namespace}/{configmap}: {wrong}")).collect();
        self.publish(&ports);
        if let Some(service) = service {
            wrong.extend(self.write(client, &home, service, &ports).await?);
        }
        Ok(wrong)
    }

    fn publish(&self, ports: &ConfigMapPorts) {
        self.ports.send_if_modified(|old| {
            let is_changed = old != ports;
            if is_changed {
                let ConfigMapPorts { http, https, loopback } = ports;
                info!(?http, ?https, ?loopback, "node ports changed");
                old.clone_from(ports);
            }
            is_changed
        });
    }

    /// Reconciles the ports of the Service if it is managed.
    async fn write(
        &self,
        client: Client,
        namespace: &str,
        name: &str,
        ports: &ConfigMapPorts,
    ) -> Result<Vec<String>, ClusterError> {
        let api = Api::<Service>::namespaced(client, namespace);
        let (required, mut wrong) = self.required_ports(ports);
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
            match api.replace(name, &PostParams::default(), &object).await {
                Ok(_) => {
                    info!(service = name, ?added, ?removed, ?moved, "ports of Service updated");
                    return Ok(wrong);
                }
                // The Service was changed or deleted meanwhile.
                Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {
                    debug!(tries, "Service changed by another writer, retrying");
                    wrong.truncate(wrong.len() - taken.len());
                }
                Err(cause) => return Err(cause.into()),
            }
        }
        wrong.push(format!("Service {namespace}/{name} is changed too often by another writer"));
        Ok(wrong)
    }

    /// Returns the target port of the Service for each node port, and errors for kinds that have no target.
    fn required_ports(&self, ports: &ConfigMapPorts) -> (BTreeMap<u16, u16>, Vec<String>) {
        let (mut required, mut wrong) = (BTreeMap::new(), Vec::new());
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

    /// Logs the state if it has changed, and reports it.
    fn report_state(&self, state: Result<(), Vec<String>>) {
        let state = state.map_err(|all| all.join("; "));
        let mut logged = self.logged.lock();
        if *logged != state.as_ref().err().cloned() {
            match &state {
                Ok(()) => info!("all node ports are served"),
                Err(wrong) => warn!(errors = wrong, "cannot serve all node ports"),
            }
            *logged = state.clone().err();
        }
        drop(logged);
        (self.report)(state);
    }
}

impl WatchHandler<ConfigMap> for &PortWatch {
    fn on_event(&mut self, event: Event<ConfigMap>) -> bool {
        let listing = matches!(event, Event::Init | Event::InitApply(_));
        if !listing {
            self.configmap_changed.notify_one();
        }
        !listing
    }
}

impl std::fmt::Debug for PortWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortWatch").field("params", &self.params).finish_non_exhaustive()
    }
}

/// Time between two checks of the Service without changes of the ConfigMap.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Maximum number of immediate attempts after conflicting writes.
const MAX_TRIES: u32 = 10;

// The change of a Service's managed ports.

/// The ports that a Service should have, and what changes.
#[derive(Debug, PartialEq)]
pub(crate) struct ServicePortChange {
    /// All ports: first foreign ones, unchanged, then managed ones.
    pub(crate) ports: Vec<ServicePort>,
    pub(crate) added: Vec<u16>,
    pub(crate) removed: Vec<u16>,
    /// Ports with a new target port.
    pub(crate) moved: Vec<u16>,
    /// Wanted ports that are foreign.
    pub(crate) taken: Vec<u16>,
}

/// Returns the change that makes a Service forward each node port to the right port of this server.
pub(crate) fn changed(old: &[ServicePort], required: &BTreeMap<u16, u16>) -> ServicePortChange {
    let (ours, others): (Vec<_>, Vec<_>) = old.iter().cloned().partition(is_port_of_ours);
    let taken: BTreeSet<_> = others.iter().filter(|port| is_tcp(port)).filter_map(number).collect();
    let before: BTreeMap<u16, ServicePort> =
        ours.into_iter().filter_map(|port| Some((number(&port)?, port))).collect();
    let mut change = ServicePortChange {
        ports: others,
        added: Vec::new(),
        removed: before.keys().filter(|port| !required.contains_key(port)).copied().collect(),
        moved: Vec::new(),
        taken: Vec::new(),
    };
    for (port, front) in required {
        let known = before.get(port);
        if taken.contains(port) {
            change.taken.push(*port);
            change.removed.extend(known.map(|_| *port));
            continue;
        }
        let entry = ServicePort {
            name: Some(format!("{PREFIX}{port}")),
            port: i32::from(*port),
            protocol: Some(TCP.to_owned()),
            target_port: Some(IntOrString::Int(i32::from(*front))),
            // Values that Kubernetes has assigned are kept.
            ..known.cloned().unwrap_or_default()
        };
        match known {
            None => change.added.push(*port),
            Some(known) if *known != entry => change.moved.push(*port),
            Some(_) => {}
        }
        change.ports.push(entry);
    }
    change
}

/// Returns true if the Service's annotation permits changes of its ports.
pub(crate) fn is_ours(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(ANNOTATION)).is_some_and(|value| value == MANAGED)
}

/// The reason why a Service is not changed.
pub(crate) const NOT_OURS: &str = "it has no annotation tunnel.cloud.io/ports: managed";

const ANNOTATION: &str = "tunnel.cloud.io/ports";
const MANAGED: &str = "managed";

fn is_port_of_ours(port: &ServicePort) -> bool {
    port.name.as_ref().is_some_and(|name| name.starts_with(PREFIX))
}

fn is_tcp(port: &ServicePort) -> bool {
    port.protocol.as_ref().is_none_or(|protocol| protocol == TCP)
}

fn number(port: &ServicePort) -> Option<u16> {
    u16::try_from(port.port).ok()
}

/// The prefix of the names of managed ports.
const PREFIX: &str = "dnat-";

const TCP: &str = "TCP";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn port(name: &str, number: u16, target: u16) -> ServicePort {
        ServicePort {
            name: Some(name.to_owned()),
            port: number.into(),
            protocol: Some(TCP.to_owned()),
            target_port: Some(IntOrString::Int(target.into())),
            ..ServicePort::default()
        }
    }

    fn required(ports: &[(u16, u16)]) -> BTreeMap<u16, u16> {
        ports.iter().copied().collect()
    }

    #[test]
    fn ports_are_added_removed_and_moved_and_foreign_ones_stay() {
        let base = [port("https", 10250, 10263), port("http", 10255, 10264)];
        let first = changed(&base, &required(&[(9051, 10264), (9443, 10263)]));
        assert_eq!(first.ports[..2], base);
        assert_eq!(first.ports[2..], [port("dnat-9051", 9051, 10264), port("dnat-9443", 9443, 10263)]);
        assert_eq!((first.added, first.removed, first.moved), (vec![9051, 9443], vec![], vec![]));
        let mut given = first.ports;
        given[2].node_port = Some(31_000);
        let same = changed(&given, &required(&[(9051, 10264), (9443, 10263)]));
        assert_eq!((&same.ports, same.added, same.removed, same.moved), (&given, vec![], vec![], vec![]));
        let next = changed(&given, &required(&[(9051, 10263), (9052, 10264)]));
        assert_eq!((next.added, next.removed, next.moved), (vec![9052], vec![9443], vec![9051]));
        assert_eq!(next.ports[2].node_port, Some(31_000), "values assigned by Kubernetes are kept");
    }

    #[test]
    fn a_port_of_another_owner_is_not_replaced() {
        let theirs = port("metrics", 9051, 1);
        let change = changed(std::slice::from_ref(&theirs), &required(&[(9051, 10264)]));
        assert_eq!((change.ports, change.taken), (vec![theirs], vec![9051]));
        let udp = ServicePort { protocol: Some("UDP".to_owned()), ..port("dns", 9051, 1) };
        assert_eq!(changed(&[udp], &required(&[(9051, 10264)])).added, [9051]);
    }

    #[test]
    fn a_service_is_ours_only_with_the_annotation() {
        let mut service = Service::default();
        assert!(!is_ours(&service));
        let mut with_annotation = |value: &str| {
            service.metadata.annotations = Some([(ANNOTATION.to_owned(), value.to_owned())].into());
            is_ours(&service)
        };
        assert!(with_annotation(MANAGED) && !with_annotation("yes"));
        assert!(NOT_OURS.contains(ANNOTATION) && NOT_OURS.contains(MANAGED));
    }

    proptest! {
        #[test]
        fn a_change_leaves_each_required_port_once_and_a_second_change_is_empty(
            old in proptest::collection::vec((any::<bool>(), 1_u16..30, 1_u16..4), 0..20),
            required in proptest::collection::btree_map(1_u16..30, 1_u16..4, 0..20),
        ) {
            let named = |ours: bool, number: u16| if ours { format!("dnat-{number}") } else { format!("x-{number}") };
            let mut seen = BTreeSet::new();
            let old = old.into_iter().filter(|(_, number, _)| seen.insert(*number));
            let old: Vec<_> = old.map(|(ours, number, target)| port(&named(ours, number), number, target)).collect();
            let change = changed(&old, &required);
            let others: Vec<_> = old.iter().filter(|port| !is_port_of_ours(port)).cloned().collect();
            prop_assert_eq!(&change.ports[..others.len()], &others[..]);
            let numbers: Vec<_> = change.ports.iter().filter_map(number).collect();
            let once: BTreeSet<_> = numbers.iter().copied().collect();
            prop_assert_eq!(once.len(), numbers.len());
            prop_assert!(required.keys().all(|port| once.contains(port)));
            let again = changed(&change.ports, &required);
            prop_assert!(again.added.is_empty() && again.removed.is_empty() && again.moved.is_empty());
        }
    }
}
