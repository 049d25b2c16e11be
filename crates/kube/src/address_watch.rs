//! Keeps an address book up to date with Kubernetes.

pub(crate) mod partial_objects;

use std::future::pending;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt as _};

use crate::address_watch::partial_objects::{PartialEndpointSlice, PartialObject, PartialService, sides};
use crate::cluster::{Cluster, ClusterError};
use crate::partial::{PartialNode, PartialPod};
use crate::watcher::{Event, ObjectWatcher, WatchedObjects};
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_base::refusal_log::RefusalLog;

/// A watch of Nodes, pods, Services, their endpoints, and the Services that operators list by hand. The last known
/// state applies while kube-apiserver does not answer.
#[derive(derive_more::Debug)]
#[debug("AddressBookUpdater({cluster:?})")]
pub struct AddressBookUpdater {
    cluster: Cluster,
    book: Arc<AddressBook>,
    report: Box<StateReporter>,
    disputes: RefusalLog,
}

/// A callback for the state of each kind of object: complete, or why not.
pub type StateReporter = dyn Fn(&'static str, Result<(), String>) + Send + Sync;

impl AddressBookUpdater {
    /// Creates a watch; sends no request. Calls `report` with the state of each kind now and whenever it changes; it
    /// must not block.
    pub fn new(cluster: Cluster, book: Arc<AddressBook>, report: Box<StateReporter>) -> Self {
        for what in [NODES, PODS, SERVICES, ENDPOINTS, CACHE_WORDS] {
            report(what, Err("not known yet".to_owned()));
        }
        Self { cluster, book, report, disputes: RefusalLog::default() }
    }

    /// Runs the watches until draining starts.
    pub async fn follow(self, drain: Drain) {
        let all = async {
            tokio::join!(
                self.kind::<PartialNode>(NODES, Api::all),
                self.kind::<PartialPod>(PODS, Api::all),
                self.kind::<PartialService>(SERVICES, Api::all),
                self.kind::<PartialEndpointSlice>(ENDPOINTS, Api::all),
                self.follow_manual_services(),
                self.disputes.clone().sum_up(pending()),
            );
        };
        drain.run_until(Box::pin(all)).await;
    }

    async fn kind<K>(&self, what: &'static str, api: fn(Client) -> Api<K>)
    where
        K: PartialObject + Resource<DynamicType = ()>,
    {
        let mut listed = false;
        let followed = ObjectWatcher { cluster: &self.cluster, what, which: ListParams::default() };
        let on_event = |event| self.on_event(event, &mut listed);
        match followed.run(|client, _| api(client), on_event, |state| self.on_state(what, state)).await {}
    }

    async fn follow_manual_services(&self) {
        let which = ListParams::default().fields(&format!("metadata.name={CACHE}"));
        let followed = ObjectWatcher { cluster: &self.cluster, what: CACHE_WORDS, which };
        let mut caches = WatchedObjects::default();
        let on_event = |event: Event<ConfigMap>| {
            if caches.take(event, sides) {
                let known = caches.known().and_then(|caches| caches.values().next()).cloned();
                self.book.change(|facts| facts.sides = known.unwrap_or_default());
            }
        };
        match followed.run(Api::namespaced, on_event, |state| self.on_state(CACHE_WORDS, state)).await {}
    }

    fn on_state(&self, what: &'static str, state: Result<(), ClusterError>) {
        (self.report)(what, state.map_err(|cause| cause.to_string()));
    }

    /// Handles an event of one kind of objects. `listed` is whether their list is complete.
    fn on_event<K>(&self, event: Event<K>, listed: &mut bool)
    where
        K: PartialObject + Resource<DynamicType = ()>,
    {
        match event {
            Event::Init => {
                *listed = false;
                self.book.change(|facts| K::table(facts).start());
            }
            Event::InitApply(object) | Event::Apply(object) => {
                let name = name(&object);
                let kept = object.facts();
                let claimed = self.book.change(|facts| match kept {
                    Some(kept) => K::table(facts).put(&name, kept),
                    None => {
                        K::table(facts).remove(&name);
                        Vec::new()
                    }
                });
                // During a list, replaced objects are still in the table and may be deleted by now.
                if *listed {
                    self.log_disputed(claimed);
                }
            }
            Event::Delete(object) => self.book.change(|facts| K::table(facts).remove(&name(&object))),
            // Only now are deleted objects out of the table, so the claims of the whole list are compared here.
            Event::InitDone => {
                *listed = true;
                let claimed = self.book.change(|facts| {
                    K::table(facts).finish();
                    K::table(facts).addresses()
                });
                self.log_disputed(claimed);
            }
        }
    }

    /// Logs which of these addresses are disputed, and by which objects. A kubelet may change its claims as often as it
    /// likes.
    fn log_disputed(&self, ips: impl IntoIterator<Item = IpAddr>) {
        for dispute in ips.into_iter().filter_map(|ip| self.book.dispute(ip)) {
            limited!(
                self.disputes.may_log_about("address_disputed", "Kubernetes") => warn,
                dispute, "address claimed by several objects"
            );
        }
    }
}

/// Returns the key in the tables: `namespace/name`, or just the name for a Node.
fn name<K: PartialObject + Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// The ConfigMap in which SuperEdge keeps its routes; it is in the server's namespace.
const CACHE: &str = "tunnel-cache";

// Names of the kinds in the log and in `/readyz`.
const NODES: &str = "nodes";
const PODS: &str = "pods";
const SERVICES: &str = "Services";
const ENDPOINTS: &str = "endpoints of Services";
const CACHE_WORDS: &str = "Services in ConfigMap tunnel-cache";

#[cfg(test)]
mod tests;

#[cfg(test)]
mod disputes_tests {
    use std::io;
    use std::sync::mpsc;
    use std::time::Duration;

    use tunnel_base::addresses::cluster_state::{KubeNode, KubePod, KubeService};

    use super::*;

    /// Sends each log line.
    struct LineSender(mpsc::Sender<String>);

    impl io::Write for LineSender {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.send(String::from_utf8_lossy(line).into_owned()).unwrap();
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Returns a book in which the config assigns 10.0.0.1 to node1, 10.0.0.2 is a Service's and 10.0.0.3 is node2's.
    /// Node evil claims all of them.
    fn book() -> AddressBook {
        let book = AddressBook::new(vec![(ip(1).into(), "node1".parse().unwrap())], true);
        let node =
            |ips: &[u8]| KubeNode { ips: ips.iter().copied().map(ip).collect(), ..KubeNode::default() };
        book.change(|facts| {
            facts.nodes.put("node1", node(&[1]));
            facts.nodes.put("node2", node(&[3]));
            facts.nodes.put("evil", node(&[2, 3, 4]));
            let pod = KubePod { node: "evil".parse().unwrap(), ips: [ip(1), ip(4)].into() };
            facts.pods.put("shop/pod", pod);
            let none = KubeService {
                ips: [ip(2)].into(),
                outside: Box::default(),
                ports: Box::default(),
                external: None,
            };
            facts.services.put("shop/web", none);
        });
        book
    }

    #[test]
    fn a_dispute_line_names_both_claimants_of_an_address() {
        let book = book();
        let lines: Vec<_> = (1..=5).filter_map(|last| book.dispute(ip(last))).collect();
        let expected = [
            "pod shop/pod at evil claims 10.0.0.1, which [server.addresses] assigns to node node1; the config wins",
            "node evil claims 10.0.0.2, the ClusterIP of Service shop/web; the Service keeps it",
            "10.0.0.3 is claimed by both node evil and node node2; none is reached by it",
        ];
        assert_eq!(lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn dispute_lines_are_rate_limited() {
        let (writer, lines) = mpsc::channel();
        let log = tracing_subscriber::fmt().with_writer(move || LineSender(writer.clone())).finish();
        let _guard = tracing::subscriber::set_default(log);
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let updater = AddressBookUpdater::new(cluster, Arc::new(book()), Box::new(|_, _| ()));
        let logged = |expected: &str| {
            (0..1000).for_each(|_| updater.log_disputed([ip(3)]));
            lines.try_iter().filter(|line: &String| line.contains(expected)).count()
        };
        let claimants = "10.0.0.3 is claimed by both";
        assert_eq!([logged(claimants), logged(claimants)], [10, 0]);
        let disputes = updater.disputes.clone();
        let minute = tokio::time::sleep(Duration::from_secs(61));
        disputes.sum_up(minute).await;
        assert_eq!(logged("suppressed=1990"), 1);
        assert_eq!(logged(claimants), 0);
    }
}
