//! Watches of Kubernetes objects: lists them in pages, then watches them, and restarts with backoff after an error.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::pin::pin;

use futures_util::StreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::cluster::{Cluster, ClusterError};
use tunnel_base::backoff::Backoff;

/// A watch of objects of one kind.
#[derive(Debug)]
pub(crate) struct ObjectWatcher<'a> {
    /// Cluster that is watched.
    pub(crate) cluster: &'a Cluster,
    /// Name of the objects in the log.
    pub(crate) what: &'a str,
    /// Label and field selectors.
    pub(crate) which: watcher::Config,
}

/// A consumer of the events of an [`ObjectWatcher`].
pub(crate) trait WatchHandler<K> {
    /// Handles an event. Returns true if all objects are known now.
    fn on_event(&mut self, event: Event<K>) -> bool;

    /// Called when the watch fails. No events follow until it has restarted; the known objects remain valid.
    fn on_watch_failed(&mut self, _cause: &ClusterError) {}
}

/// The objects that a watch has reported, by name. While they are listed again, those of the last list stay.
#[derive(Debug)]
pub(crate) struct WatchedObjects<V> {
    known: BTreeMap<String, V>,
    /// Objects received so far of a list in progress.
    listing: Option<BTreeMap<String, V>>,
    /// Whether a list was completed.
    listed: bool,
}

impl<V: PartialEq> WatchedObjects<V> {
    /// Applies an event; `value` returns what is kept of an object. Returns true if a list was completed, or a known
    /// object has changed since.
    pub(crate) fn take<K: Resource>(&mut self, event: Event<K>, value: impl Fn(&K) -> V) -> bool {
        match event {
            Event::Init => self.listing = Some(BTreeMap::new()),
            Event::InitApply(object) => {
                self.listing.get_or_insert_default().insert(object.name_any(), value(&object));
            }
            Event::InitDone => {
                self.known = self.listing.take().unwrap_or_default();
                self.listed = true;
                return true;
            }
            Event::Apply(object) => {
                let name = object.name_any();
                let value = value(&object);
                let is_changed = self.known.get(&name) != Some(&value);
                self.known.insert(name, value);
                return is_changed;
            }
            Event::Delete(object) => return self.known.remove(&object.name_any()).is_some(),
        }
        false
    }

    /// Returns the objects, or `None` until they are listed.
    pub(crate) fn known(&self) -> Option<&BTreeMap<String, V>> {
        self.listed.then_some(&self.known)
    }

    /// Returns true if all objects are known and no list is in progress, which could still fail.
    pub(crate) fn are_followed(&self) -> bool {
        self.listed && self.listing.is_none()
    }
}

impl<V> Default for WatchedObjects<V> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), listing: None, listed: false }
    }
}

impl ObjectWatcher<'_> {
    /// Passes each event to `handler` until this future is dropped. `api` builds the interface to the objects from a
    /// client and the cluster's namespace. No events arrive while kube-apiserver does not answer; afterwards the whole
    /// list is sent again.
    pub(crate) async fn run<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        mut handler: impl WatchHandler<K>,
    ) -> Infallible
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let what = self.what;
        let mut backoff = Backoff::new();
        let mut warned = false;
        loop {
            let cause = match self.list_and_watch(&api, &mut handler, &mut backoff, &mut warned).await {
                Ok(never) => match never {},
                Err(cause) => cause,
            };
            if warned {
                debug!(objects = what, error = %cause, "watch failed again");
            } else {
                warn!(objects = what, error = %cause, "watch failed, retrying");
                warned = true;
            }
            handler.on_watch_failed(&cause);
            sleep(backoff.pause(rand::random())).await;
        }
    }

    /// Lists and watches until an error occurs. Creates a new client each time, because a certificate or token may have
    /// expired.
    async fn list_and_watch<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        handler: &mut impl WatchHandler<K>,
        backoff: &mut Backoff,
        warned: &mut bool,
    ) -> Result<Infallible, ClusterError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (client, namespace) = self.cluster.connect().await?;
        let which = self.which.clone().timeout(WATCH_SECONDS).page_size(PAGE);
        let mut events = pin!(watcher(api(client, &namespace), which));
        while let Some(event) = events.next().await {
            if handler.on_event(event.map_err(failed)?) {
                *backoff = Backoff::new();
                if std::mem::take(warned) {
                    info!(objects = self.what, "watch restored");
                }
            }
        }
        Err(ClusterError::Silent)
    }
}

/// Publishes a value, unless it is the published one. Returns true if it was published.
pub(crate) fn publish<T: PartialEq>(to: &watch::Sender<T>, value: T) -> bool {
    to.send_if_modified(|published| {
        let is_changed = *published != value;
        *published = value;
        is_changed
    })
}

fn failed(cause: watcher::Error) -> ClusterError {
    use watcher::Error::{InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed};
    match cause {
        InitialListFailed(cause) | WatchStartFailed(cause) | WatchFailed(cause) => cause.into(),
        WatchError(status) => kube::Error::Api(status).into(),
        cause @ NoResourceVersion => ClusterError::Failed(cause.to_string()),
    }
}

/// Duration of one watch. It bounds the time until a vanished kube-apiserver is noticed.
const WATCH_SECONDS: u32 = 60;

/// Objects per page of a list. Each page is in memory twice while it is read, and a pod often has about 10 KiB.
const PAGE: u32 = 50;

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;

    use super::*;

    #[test]
    fn objects_are_followed_only_while_their_list_is_complete() {
        let mut nodes = WatchedObjects::default();
        let events =
            [(Event::Init, false), (Event::InitDone, true), (Event::Init, false), (Event::InitDone, true)];
        for (event, followed) in events {
            nodes.take(event, |_: &Node| ());
            assert_eq!(nodes.are_followed(), followed);
        }
    }
}
