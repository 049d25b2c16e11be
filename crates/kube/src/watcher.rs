//! Watches of Kubernetes objects: lists them in pages, then watches them, and restarts with backoff after an error.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::pin::pin;

use std::time::Duration;

use futures_util::StreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
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
        let mut backoff = Backoff::new();
        let mut has_failed = false;
        loop {
            let cause = match self.list_and_watch(&api, &mut handler, &mut backoff, &mut has_failed).await {
                Ok(never) => match never {},
                Err(cause) => cause,
            };
            has_failed = true;
            if CAUSES.is_news(&cause) {
                warn!(objects = self.what, error = %cause, "watch failed, retrying");
            } else {
                debug!(objects = self.what, error = %cause, "watch failed again");
            }
            handler.on_watch_failed(&cause);
            sleep(backoff.pause(rand::random()).min(MAX_PAUSE)).await;
        }
    }

    /// Lists and watches until an error occurs. Creates a new client each time, because a certificate or token may have
    /// expired.
    async fn list_and_watch<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        handler: &mut impl WatchHandler<K>,
        backoff: &mut Backoff,
        has_failed: &mut bool,
    ) -> Result<Infallible, ClusterError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (client, namespace) = self.cluster.connect().await?;
        let which = self.which.clone().timeout(WATCH_SECONDS).page_size(PAGE);
        let mut events = pin!(watcher(api(client, &namespace), which));
        while let Some(event) = events.next().await {
            // A watch that fails again before its list is complete has not recovered, so its pauses continue to grow.
            if handler.on_event(event.map_err(failed)?) {
                *backoff = Backoff::new();
                if std::mem::take(has_failed) && CAUSES.clear() {
                    info!(objects = self.what, "watch restored");
                }
            }
        }
        Err(ClusterError::Silent)
    }
}

/// Causes of failures that were logged since a watch last worked again.
#[derive(Debug)]
struct LoggedCauses(Mutex<BTreeSet<String>>);

impl LoggedCauses {
    /// Returns true if the cause must be logged.
    fn is_news(&self, cause: &ClusterError) -> bool {
        let mut causes = self.0.lock();
        causes.len() < MAX_CAUSES && causes.insert(cause.to_string())
    }

    /// Forgets all causes, because a watch works again. Returns true if there were any.
    fn clear(&self) -> bool {
        !std::mem::take(&mut *self.0.lock()).is_empty()
    }
}

/// One for all watches of this process: an outage of kube-apiserver is one line, not one for each kind of object.
static CAUSES: LoggedCauses = LoggedCauses(Mutex::new(BTreeSet::new()));

/// Maximum number of causes that are logged in one outage.
const MAX_CAUSES: usize = 16;

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

/// Maximum pause between two attempts: a watch is back soon after kube-apiserver, however long that was away.
const MAX_PAUSE: Duration = Duration::from_secs(20);

/// Objects per page of a list. Each page is in memory twice while it is read, and a pod often has about 10 KiB.
const PAGE: u32 = 50;

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::Instant;

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

    #[test]
    fn an_outage_of_several_watches_is_one_line_for_each_cause() {
        let logged = LoggedCauses(Mutex::new(BTreeSet::new()));
        let causes = ["a", "a", "b", "a"].map(|cause| ClusterError::Failed(cause.to_owned()));
        assert_eq!(causes.each_ref().map(|cause| logged.is_news(cause)), [true, false, true, false]);
        assert_eq!([logged.clear(), logged.clear(), logged.is_news(&causes[0])], [true, false, true]);
    }

    /// Counts the lists and failures of a watch.
    struct Log(watch::Sender<Vec<(String, Duration)>>, Instant);

    impl WatchHandler<Node> for Log {
        fn on_event(&mut self, event: Event<Node>) -> bool {
            if matches!(event, Event::InitDone) {
                self.0.send_modify(|log| log.push(("listed".to_owned(), self.1.elapsed())));
            }
            matches!(event, Event::InitDone)
        }

        fn on_watch_failed(&mut self, cause: &ClusterError) {
            self.0.send_modify(|log| log.push((cause.to_string(), self.1.elapsed())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_apiserver_that_answers_503_is_reported_soon_and_listed_soon_after_its_return() {
        for (status, away) in [("503 busy", 60), ("504 late", 150), ("429 later\r\nRetry-After: 100", 400)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let dir = tempfile::tempdir().unwrap();
            let cluster =
                Cluster::of_test(&dir, &format!("server: 'http://{}'", listener.local_addr().unwrap()));
            let start = Instant::now();
            let serve = async {
                loop {
                    let (mut socket, _) = listener.accept().await.unwrap();
                    let _ = socket.read(&mut [0; 4096]).await;
                    let list = r#"{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}"#;
                    let (status, body) =
                        if start.elapsed().as_secs() < away { (status, "") } else { ("200 OK", list) };
                    let head = format!(
                        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                        body.len()
                    );
                    let _ = socket.write_all((head + body).as_bytes()).await;
                }
            };
            let log = watch::Sender::new(Vec::new());
            let mut seen = log.subscribe();
            let watcher =
                ObjectWatcher { cluster: &cluster, what: "nodes", which: watcher::Config::default() };
            let listed = async {
                let seen = seen.wait_for(|log| log.iter().any(|(what, _)| what == "listed")).await.unwrap();
                seen.clone()
            };
            let log = tokio::select! {
                log = listed => log,
                never = watcher.run(|client, _| Api::all(client), Log(log, start)) => match never {},
                () = serve => unreachable!(),
            };
            let (first, after) = log.first().unwrap();
            assert!(first.contains(&status[..3]) && after.as_secs() < 10, "{status}: {log:?}");
            let (_, back) = log.last().unwrap();
            assert!((away..away + 30).contains(&back.as_secs()), "{status}: {log:?}");
        }
    }
}
