//! Discovery of servers through the endpoints of a Kubernetes Service.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::Api;
use kube::api::ListParams;
use tokio::sync::watch;
use tracing::debug;

use crate::cluster::{Cluster, ClusterError};
use crate::watcher::{Event, ObjectWatcher, WatchedObjects, publish};
use tunnel_base::addresses::cluster_state::{Endpoints, ServiceEndpoints};
use tunnel_base::drain::Drain;

/// A watch of the endpoints of a Service. The last known endpoints apply while kube-apiserver does not answer.
#[derive(Debug)]
pub struct EndpointWatch {
    cluster: Cluster,
    service: String,
    /// Address of this server, with the port on which all servers accept links.
    own: SocketAddr,
    /// The endpoints of all servers, including this one.
    pub endpoints: watch::Sender<ServiceEndpoints>,
    /// The addresses at which peers accept links, sorted; empty until they are known. Unready peers are included, because
    /// they may have nodes and sessions.
    pub peers: watch::Sender<Vec<SocketAddr>>,
    /// The reason why the endpoints cannot be watched; `None` while they are, and before the first answer.
    pub unwatched: watch::Sender<Option<String>>,
}

impl EndpointWatch {
    /// Creates a watch; sends no request. `own` is this server's address, with the port on which all servers accept
    /// links.
    pub fn new(cluster: Cluster, service: String, own: SocketAddr) -> Self {
        let endpoints = watch::Sender::new(None);
        let peers = watch::Sender::new(Vec::new());
        Self { cluster, service, own, endpoints, peers, unwatched: watch::Sender::new(None) }
    }

    /// Runs the watch until draining starts.
    pub async fn follow(self, drain: Drain) {
        let of = format!("{SERVICE_LABEL}={}", self.service);
        let what = format!("the endpoints of Service {}", self.service);
        let followed =
            ObjectWatcher { cluster: &self.cluster, what: &what, which: ListParams::default().labels(&of) };
        let mut slices = WatchedObjects::default();
        let on_event = |event| self.on_event(event, &mut slices);
        drain.run_until(followed.run(Api::namespaced, on_event, |state| self.on_state(state))).await;
    }

    fn on_event(&self, event: Event<EndpointSlice>, slices: &mut WatchedObjects<Endpoints>) {
        if slices.take(event, endpoints) {
            self.set(all(slices));
        }
    }

    fn set(&self, endpoints: Endpoints) {
        let own = self.own.ip();
        let others = endpoints.ready.union(&endpoints.unready).filter(|ip| **ip != own);
        let others: Vec<_> = others.map(|ip| SocketAddr::new(*ip, self.own.port())).collect();
        if publish(&self.peers, others.clone()) {
            debug!(service = self.service, peers = ?others, "peers changed");
        }
        publish(&self.endpoints, Some(endpoints));
    }

    fn on_state(&self, state: Result<(), ClusterError>) {
        let is_known = self.endpoints.borrow().is_some();
        let lost = if is_known { "are no longer watched" } else { "are not known" };
        let why = |cause| format!("the endpoints of Service {} {lost}: {cause}", self.service);
        publish(&self.unwatched, state.err().map(why));
    }
}

/// Returns the endpoints in all slices; each has some of them.
fn all(slices: &WatchedObjects<Endpoints>) -> Endpoints {
    let mut all = Endpoints::default();
    for slice in slices.known().into_iter().flatten().map(|(_, slice)| slice) {
        all.ready.extend(&slice.ready);
        all.unready.extend(&slice.unready);
    }
    // An endpoint that moves between slices may be in both for a moment.
    all.unready.retain(|pod| !all.ready.contains(pod));
    all
}

/// Returns a slice's endpoints. An unknown readiness means ready, as Kubernetes specifies.
fn endpoints(slice: &EndpointSlice) -> Endpoints {
    let ready = |endpoint: &Endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    };
    let mut all = Endpoints::default();
    for endpoint in &slice.endpoints {
        let set = if ready(endpoint) { &mut all.ready } else { &mut all.unready };
        set.extend(endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()));
    }
    all
}

/// The label of a slice that names its Service.
pub(crate) const SERVICE_LABEL: &str = "kubernetes.io/service-name";

#[cfg(test)]
mod tests {
    use k8s_openapi::api::discovery::v1::EndpointConditions;

    use super::*;

    fn slice(name: &str, endpoints: &[(&str, Option<bool>)]) -> EndpointSlice {
        let endpoint = |(address, ready): &(&str, Option<bool>)| Endpoint {
            addresses: vec![(*address).to_owned()],
            conditions: Some(EndpointConditions { ready: *ready, ..EndpointConditions::default() }),
            ..Endpoint::default()
        };
        let mut slice =
            EndpointSlice { endpoints: endpoints.iter().map(endpoint).collect(), ..EndpointSlice::default() };
        slice.metadata.name = Some(name.to_owned());
        slice
    }

    fn pods(ready: &[&str], unready: &[&str]) -> Endpoints {
        let set = |all: &[&str]| all.iter().map(|address| address.parse().unwrap()).collect();
        Endpoints { ready: set(ready), unready: set(unready) }
    }

    #[test]
    fn endpoints_come_from_all_slices_once_their_list_is_complete() {
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let watch = EndpointWatch::new(cluster, "tunnel".to_owned(), "10.0.0.9:9000".parse().unwrap());
        let mut slices = WatchedObjects::default();
        let mut take = |event| {
            watch.on_event(event, &mut slices);
            watch.endpoints.borrow().clone()
        };
        assert_eq!(take(Event::Init), None);
        let one = slice("one", &[("10.0.0.1", Some(true)), ("10.0.0.2", Some(false)), ("10.0.0.3", None)]);
        assert_eq!(take(Event::InitApply(one)), None);
        let two = slice("two", &[("fd00::1", Some(true)), ("pod.example.org", Some(true))]);
        assert_eq!(take(Event::InitApply(two)), None);
        assert_eq!(take(Event::InitDone), Some(pods(&["10.0.0.1", "10.0.0.3", "fd00::1"], &["10.0.0.2"])));
        let moving = slice("two", &[("fd00::1", Some(true)), ("10.0.0.2", Some(true))]);
        assert_eq!(
            take(Event::Apply(moving)),
            Some(pods(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"], &[])),
            "an endpoint may be in two slices for a moment"
        );
        let two = slice("two", &[("fd00::1", Some(true))]);
        assert_eq!(take(Event::Apply(two)), Some(pods(&["10.0.0.1", "10.0.0.3", "fd00::1"], &["10.0.0.2"])));
        let less = slice("one", &[("10.0.0.3", Some(true))]);
        assert_eq!(take(Event::Apply(less)), Some(pods(&["10.0.0.3", "fd00::1"], &[])));
        assert_eq!(take(Event::Delete(slice("two", &[]))), Some(pods(&["10.0.0.3"], &[])));
        let known = take(Event::Init);
        assert_eq!(known, Some(pods(&["10.0.0.3"], &[])), "they remain until the new list is complete");
        assert_eq!(take(Event::InitDone), Some(pods(&[], &[])));
    }

    #[test]
    fn peers_are_the_other_endpoints_at_our_port() {
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let watch = EndpointWatch::new(cluster, "tunnel".to_owned(), "10.0.0.2:9000".parse().unwrap());
        let mut peers = watch.peers.subscribe();
        let endpoints = watch.endpoints.subscribe();
        watch.set(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"]));
        let others: Vec<SocketAddr> =
            vec!["10.0.0.1:9000".parse().unwrap(), "[fd00::1]:9000".parse().unwrap()];
        assert_eq!(*peers.borrow_and_update(), others);
        assert_eq!(*endpoints.borrow(), Some(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"])));
        watch.set(pods(&["fd00::1"], &["10.0.0.1", "10.0.0.2"]));
        assert!(!peers.has_changed().unwrap(), "unready peers may still have nodes");
    }
}
