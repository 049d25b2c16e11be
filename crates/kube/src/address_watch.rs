//! Keeps an address book up to date with Kubernetes.

pub(crate) mod disputes;
pub(crate) mod partial_objects;

use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt as _};

use crate::address_watch::disputes::DisputeLogLimiter;
use crate::address_watch::partial_objects::{PartialEndpointSlice, PartialObject, PartialService, sides};
use crate::cluster::{Cluster, ClusterError};
use crate::partial::{PartialNode, PartialPod};
use crate::watcher::{Event, ObjectWatcher, WatchedObjects};
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::Drain;

/// A watch of Nodes, pods, Services, their endpoints, and the Services that operators list by hand. The last known
/// state applies while kube-apiserver does not answer.
#[derive(derive_more::Debug)]
#[debug("AddressBookUpdater({cluster:?})")]
pub struct AddressBookUpdater {
    cluster: Cluster,
    book: Arc<AddressBook>,
    report: Box<StateReporter>,
    disputes: DisputeLogLimiter,
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
        Self { cluster, book, report, disputes: DisputeLogLimiter::default() }
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
                    self.disputes.log_disputed(&self.book, claimed);
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
                self.disputes.log_disputed(&self.book, claimed);
            }
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
