//! Keeps an address book up to date with Kubernetes.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::{Client, Resource, ResourceExt as _};

use super::AddressBook;
use super::disputes::Disputes;
use super::objects::{Cache, NodePart, Partial, PodPart, ServicePart, SlicePart};
use crate::drain::Drain;
use crate::registry::cluster::{Cluster, ClusterError};
use crate::registry::follow::{Followed, Take};

/// Follows nodes, pods, Services, their endpoints, and what is written of Services by hand. While kube-apiserver does
/// not answer, what was known stands.
pub struct AddressWatch {
    cluster: Cluster,
    book: Arc<AddressBook>,
    report: Report,
    disputes: Disputes,
}

/// Takes the state of each kind of object: complete, or why not.
type Report = Arc<dyn Fn(&'static str, Result<(), String>) + Send + Sync>;

impl AddressWatch {
    /// Sends no request yet. `tell` gets the state of each kind now, and whenever it changes; it must be quick.
    pub fn new(
        cluster: Cluster,
        book: Arc<AddressBook>,
        report: impl Fn(&'static str, Result<(), String>) + Send + Sync + 'static,
    ) -> Self {
        for what in [NODES, PODS, SERVICES, ENDPOINTS, CACHE_WORDS] {
            report(what, Err("not known yet".to_owned()));
        }
        Self { cluster, book, report: Arc::new(report), disputes: Disputes::default() }
    }

    /// Follows them until draining begins.
    pub async fn follow(self, drain: Drain) {
        let all = async {
            tokio::join!(
                self.kind::<NodePart>(NODES, Api::all),
                self.kind::<PodPart>(PODS, Api::all),
                self.kind::<ServicePart>(SERVICES, Api::all),
                self.kind::<SlicePart>(ENDPOINTS, Api::all),
                self.by_hand(),
            );
        };
        tokio::select! {
            () = all => {}
            () = drain.draining() => {}
        }
    }

    async fn kind<K>(&self, what: &'static str, api: fn(Client) -> Api<K>)
    where
        K: Partial + Resource<DynamicType = ()>,
    {
        let taker = KindTaker::<K> { watch: self, what, listed: false, kind: PhantomData };
        let followed = Followed { cluster: &self.cluster, what, which: watcher::Config::default() };
        match followed.follow(|client, _| api(client), taker).await {}
    }

    async fn by_hand(&self) {
        let which = watcher::Config::default().fields(&format!("metadata.name={CACHE}"));
        let followed = Followed { cluster: &self.cluster, what: CACHE_WORDS, which };
        match followed.follow(Api::namespaced, ByHand { watch: self, found: false, listed: false }).await {}
    }
}

/// Objects of one kind.
struct KindTaker<'a, K> {
    watch: &'a AddressWatch,
    what: &'static str,
    listed: bool,
    kind: PhantomData<fn(K)>,
}

impl<K: Partial> KindTaker<'_, K> {
    fn report(&self, state: Result<(), String>) {
        (self.watch.report)(self.what, state);
    }
}

impl<K: Partial + Resource<DynamicType = ()>> Take<K> for KindTaker<'_, K> {
    fn take(&mut self, event: Event<K>) -> bool {
        match event {
            Event::Init => {
                self.listed = false;
                self.watch.book.change(|facts| K::table(facts).begin());
            }
            Event::InitApply(object) | Event::Apply(object) => {
                let (name, kept) = (name(&object), object.facts());
                let claimed = self.watch.book.change(|facts| match kept {
                    Some(kept) => K::table(facts).put(&name, kept),
                    None => {
                        K::table(facts).remove(&name);
                        Vec::new()
                    }
                });
                // A list names objects one by one beside older ones, which may be deleted by now.
                if self.listed {
                    self.watch.disputes.tell(&self.watch.book, claimed);
                }
            }
            Event::Delete(object) => self.watch.book.change(|facts| K::table(facts).remove(&name(&object))),
            Event::InitDone => {
                self.listed = true;
                let claimed = self.watch.book.change(|facts| {
                    K::table(facts).finish();
                    K::table(facts).addresses()
                });
                self.watch.disputes.tell(&self.watch.book, claimed);
                self.report(Ok(()));
            }
        }
        self.listed
    }

    fn is_cut_off(&mut self, cause: &ClusterError) {
        self.report(Err(cause.to_string()));
    }
}

/// What people write of Services.
struct ByHand<'a> {
    watch: &'a AddressWatch,
    /// The list under way has it.
    found: bool,
    listed: bool,
}

impl Take<Cache> for ByHand<'_> {
    fn take(&mut self, event: Event<Cache>) -> bool {
        let sides = match event {
            Event::Init => {
                (self.found, self.listed) = (false, false);
                None
            }
            Event::InitApply(cache) | Event::Apply(cache) => {
                self.found = true;
                Some(cache.sides())
            }
            Event::Delete(_) => Some(Default::default()),
            Event::InitDone => {
                self.listed = true;
                (self.watch.report)(CACHE_WORDS, Ok(()));
                (!self.found).then(Default::default)
            }
        };
        if let Some(sides) = sides {
            self.watch.book.change(|facts| facts.sides = sides);
        }
        self.listed
    }

    fn is_cut_off(&mut self, cause: &ClusterError) {
        (self.watch.report)(CACHE_WORDS, Err(cause.to_string()));
    }
}

impl fmt::Debug for AddressWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressWatch").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// As the tables have it: `namespace/name`, of a node its name alone.
fn name<K: Partial + Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// The ConfigMap of our own namespace in which SuperEdge keeps its routes.
const CACHE: &str = "tunnel-cache";

// What each kind is called in the log and in `/readyz`.
const NODES: &str = "nodes";
const PODS: &str = "pods";
const SERVICES: &str = "Services";
const ENDPOINTS: &str = "endpoints of Services";
const CACHE_WORDS: &str = "Services in ConfigMap tunnel-cache";
