//! Which pods there are: the endpoints of a Service of Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;

use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::Api;
use kube::runtime::watcher::{self, Event, watcher};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::cluster::{Cluster, ClusterError};
use crate::drain::Drain;
use crate::net::backoff::Backoff;

/// The pods of a Service; `None` until they are known.
pub type KnownEndpoints = Option<Endpoints>;

/// Addresses of the pods of a Service, each in one of the two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Clients are led there.
    pub ready: BTreeSet<IpAddr>,
    /// Starting, stopping, in trouble, or on a machine that is lost.
    pub unready: BTreeSet<IpAddr>,
}

/// Follows the endpoints of a Service. While kube-apiserver does not answer, the last ones stand.
#[derive(Debug)]
pub struct EndpointWatch {
    cluster: Cluster,
    service: String,
    /// This pod, and the port on which all pods take links.
    own: SocketAddr,
    endpoints: watch::Sender<KnownEndpoints>,
    siblings: watch::Sender<Vec<SocketAddr>>,
}

/// The slices of a Service: each holds some of its endpoints.
#[derive(Debug, Default)]
struct Slices {
    known: BTreeMap<String, Endpoints>,
    /// Those that a list that has begun has named so far.
    listed: Option<BTreeMap<String, Endpoints>>,
}

impl EndpointWatch {
    /// Nothing is asked yet. `own` is this pod's address, and the port on which all pods take links.
    pub fn new(cluster: Cluster, service: String, own: SocketAddr) -> Self {
        let (endpoints, siblings) = (watch::Sender::new(None), watch::Sender::new(Vec::new()));
        Self { cluster, service, own, endpoints, siblings }
    }

    /// All pods, this one among them.
    pub fn endpoints(&self) -> watch::Receiver<KnownEndpoints> {
        self.endpoints.subscribe()
    }

    /// Where the other pods take links, in order; empty until they are known. Those that are not ready, too: they may
    /// well have nodes and sessions.
    pub fn siblings(&self) -> watch::Receiver<Vec<SocketAddr>> {
        self.siblings.subscribe()
    }

    /// Follows them until draining begins.
    pub async fn follow(self, drain: Drain) {
        tokio::select! {
            () = self.follow_on() => {}
            () = drain.draining() => {}
        }
    }

    async fn follow_on(&self) {
        let mut backoff = Backoff::new();
        let mut told = false;
        loop {
            let cause = match self.list_and_watch(&mut backoff, &mut told).await {
                Ok(never) => match never {},
                Err(cause) => cause,
            };
            if told {
                debug!(service = self.service, "{cause}");
            } else {
                warn!(service = self.service, "the pods' endpoints cannot be followed, trying on: {cause}");
                told = true;
            }
            sleep(backoff.pause(rand::random())).await;
        }
    }

    /// Goes on until something fails; says so when all are known.
    async fn list_and_watch(
        &self,
        backoff: &mut Backoff,
        told: &mut bool,
    ) -> Result<Infallible, ClusterError> {
        let (client, namespace) = self.cluster.connect().await?;
        let slices: Api<EndpointSlice> = Api::namespaced(client, &namespace);
        let of = format!("{SERVICE_LABEL}={}", self.service);
        let config = watcher::Config::default().labels(&of).timeout(WATCH_SECONDS);
        let mut events = pin!(watcher(slices, config));
        let mut slices = Slices::default();
        while let Some(event) = events.next().await {
            let Some(endpoints) = slices.take(event.map_err(failed)?) else { continue };
            *backoff = Backoff::new();
            if std::mem::take(told) {
                info!(service = self.service, "the pods' endpoints are followed again");
            }
            self.tell(endpoints);
        }
        Err(ClusterError::Silent)
    }

    fn tell(&self, endpoints: Endpoints) {
        let own = self.own.ip();
        let all: BTreeSet<_> = endpoints.ready.union(&endpoints.unready).collect();
        let others = all.into_iter().filter(|ip| **ip != own).map(|ip| SocketAddr::new(*ip, self.own.port()));
        let others: Vec<_> = others.collect();
        self.siblings.send_if_modified(|old| {
            let news = *old != others;
            if news {
                debug!(service = self.service, ?others, "other pods");
                *old = others;
            }
            news
        });
        self.endpoints.send_if_modified(|old| {
            let news = old.as_ref() != Some(&endpoints);
            *old = Some(endpoints);
            news
        });
    }
}

impl Slices {
    /// All endpoints, whenever all slices are known.
    fn take(&mut self, event: Event<EndpointSlice>) -> Option<Endpoints> {
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(slice) => {
                let (name, endpoints) = endpoints(slice);
                self.listed.get_or_insert_default().insert(name, endpoints);
            }
            Event::InitDone => self.known = self.listed.take().unwrap_or_default(),
            Event::Apply(slice) => {
                let (name, endpoints) = endpoints(slice);
                self.known.insert(name, endpoints);
            }
            Event::Delete(slice) => {
                self.known.remove(&endpoints(slice).0);
            }
        }
        if self.listed.is_some() {
            return None;
        }
        let mut all = Endpoints::default();
        for slice in self.known.values() {
            all.ready.extend(&slice.ready);
            all.unready.extend(&slice.unready);
        }
        // While it moves from one slice to another it may be in both.
        all.unready.retain(|pod| !all.ready.contains(pod));
        Some(all)
    }
}

/// A slice's name, and the pods in it. Unknown counts as ready, as Kubernetes wants it.
fn endpoints(slice: EndpointSlice) -> (String, Endpoints) {
    let ready = |endpoint: &Endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    };
    let mut all = Endpoints::default();
    for endpoint in slice.endpoints {
        let set = if ready(&endpoint) { &mut all.ready } else { &mut all.unready };
        set.extend(endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()));
    }
    (slice.metadata.name.unwrap_or_default(), all)
}

fn failed(cause: watcher::Error) -> ClusterError {
    use watcher::Error::{InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed};
    match cause {
        InitialListFailed(cause) | WatchStartFailed(cause) | WatchFailed(cause) => cause.into(),
        WatchError(status) => kube::Error::Api(status).into(),
        cause @ NoResourceVersion => ClusterError::Failed(cause.to_string()),
    }
}

/// The label by which a slice tells whose it is.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// How long one watch lasts: an apiserver that has vanished without a word is noticed not much later.
const WATCH_SECONDS: u32 = 60;

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
    fn all_slices_count_and_a_list_counts_when_it_is_whole() {
        let mut slices = Slices::default();
        assert_eq!(slices.take(Event::Init), None);
        let one = slice("one", &[("10.0.0.1", Some(true)), ("10.0.0.2", Some(false)), ("10.0.0.3", None)]);
        assert_eq!(slices.take(Event::InitApply(one)), None);
        let two = slice("two", &[("fd00::1", Some(true)), ("pod.example.org", Some(true))]);
        assert_eq!(slices.take(Event::InitApply(two)), None);
        assert_eq!(
            slices.take(Event::InitDone),
            Some(pods(&["10.0.0.1", "10.0.0.3", "fd00::1"], &["10.0.0.2"]))
        );
        let moving = slice("two", &[("fd00::1", Some(true)), ("10.0.0.2", Some(true))]);
        assert_eq!(
            slices.take(Event::Apply(moving)),
            Some(pods(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"], &[])),
            "it is in two slices for a moment"
        );
        let two = slice("two", &[("fd00::1", Some(true))]);
        assert!(slices.take(Event::Apply(two)).is_some());
        let less = slice("one", &[("10.0.0.3", Some(true))]);
        assert_eq!(slices.take(Event::Apply(less)), Some(pods(&["10.0.0.3", "fd00::1"], &[])));
        assert_eq!(slices.take(Event::Delete(slice("two", &[]))), Some(pods(&["10.0.0.3"], &[])));
        assert_eq!(slices.take(Event::Init), None, "what was known stands until all is listed anew");
        assert_eq!(slices.take(Event::InitDone), Some(pods(&[], &[])));
    }

    #[test]
    fn siblings_are_the_others_on_our_own_port() {
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let watch = EndpointWatch::new(cluster, "tunnel".to_owned(), "10.0.0.2:9000".parse().unwrap());
        let (mut siblings, endpoints) = (watch.siblings(), watch.endpoints());
        watch.tell(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"]));
        let others: Vec<SocketAddr> =
            vec!["10.0.0.1:9000".parse().unwrap(), "[fd00::1]:9000".parse().unwrap()];
        assert_eq!(*siblings.borrow_and_update(), others);
        assert_eq!(*endpoints.borrow(), Some(pods(&["10.0.0.1", "10.0.0.2"], &["fd00::1"])));
        watch.tell(pods(&["fd00::1"], &["10.0.0.1", "10.0.0.2"]));
        assert!(!siblings.has_changed().unwrap(), "who is not ready may have nodes all the same");
    }
}
