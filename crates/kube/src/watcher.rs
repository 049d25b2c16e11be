//! Watches of Kubernetes objects: lists them in pages, then watches them, and restarts with backoff after an error.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
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
    pub(crate) which: ListParams,
}

/// What an [`ObjectWatcher`] has learnt.
#[derive(Debug)]
pub(crate) enum Event<K> {
    /// A list of all objects has started.
    Init,
    /// An object of the list.
    InitApply(K),
    /// The list is complete: objects that were not in it are deleted.
    InitDone,
    /// An object was added or modified.
    Apply(K),
    /// An object was deleted.
    Delete(K),
}

/// The objects that a watch has reported, by name. While they are listed again, those of the last list stay.
#[derive(Debug)]
pub(crate) struct WatchedObjects<V> {
    /// Objects of the last complete list, and the changes since.
    known: Option<BTreeMap<String, V>>,
    /// Objects received so far of a list in progress.
    listing: BTreeMap<String, V>,
}

impl<V: PartialEq> WatchedObjects<V> {
    /// Applies an event; `value` returns what is kept of an object. Returns true if a list was completed, or a known
    /// object has changed since.
    pub(crate) fn take<K: Resource>(&mut self, event: Event<K>, value: impl Fn(&K) -> V) -> bool {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(object) => drop(self.listing.insert(object.name_any(), value(&object))),
            Event::InitDone => {
                self.known = Some(std::mem::take(&mut self.listing));
                return true;
            }
            Event::Apply(object) => {
                let value = value(&object);
                let known = self.known.get_or_insert_default();
                let is_changed = known.get(&object.name_any()) != Some(&value);
                known.insert(object.name_any(), value);
                return is_changed;
            }
            Event::Delete(object) => {
                return self.known.as_mut().is_some_and(|known| known.remove(&object.name_any()).is_some());
            }
        }
        false
    }

    /// Returns the objects, or `None` until they are listed.
    pub(crate) fn known(&self) -> Option<&BTreeMap<String, V>> {
        self.known.as_ref()
    }
}

impl<V> Default for WatchedObjects<V> {
    fn default() -> Self {
        Self { known: None, listing: BTreeMap::new() }
    }
}

impl ObjectWatcher<'_> {
    /// Passes each event to `on_event` until this future is dropped. `api` builds the interface to the objects from a
    /// client and the cluster's namespace. Calls `on_state` after each complete list, and when the watch fails: then no
    /// events follow until the whole list is sent again, and the known objects remain valid.
    pub(crate) async fn run<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        mut on_event: impl FnMut(Event<K>),
        on_state: impl Fn(Result<(), ClusterError>),
    ) -> Infallible
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut backoff = Backoff::new();
        let mut has_failed = false;
        loop {
            let watching = self.list_and_watch(&api, &mut on_event, &on_state, &mut backoff, &mut has_failed);
            let cause = match watching.await {
                Ok(never) => match never {},
                Err(cause) => cause,
            };
            has_failed = true;
            if CAUSES.is_news(&cause) {
                warn!(objects = self.what, error = %cause, "watch failed, retrying");
            } else {
                debug!(objects = self.what, error = %cause, "watch failed again");
            }
            on_state(Err(cause));
            sleep(backoff.pause(rand::random()).min(MAX_PAUSE)).await;
        }
    }

    /// Lists and watches until an error occurs. Creates a new client each time, because a certificate or token may have
    /// expired.
    async fn list_and_watch<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        on_event: &mut impl FnMut(Event<K>),
        on_state: &impl Fn(Result<(), ClusterError>),
        backoff: &mut Backoff,
        has_failed: &mut bool,
    ) -> Result<Infallible, ClusterError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (client, namespace) = self.cluster.connect().await?;
        let api = api(client, &namespace);
        // All objects, page by page. Each page but the last names the next one.
        let mut page = self.which.clone().limit(PAGE);
        on_event(Event::Init);
        let listed = loop {
            let list = api.list(&page).await?;
            for object in list.items {
                on_event(Event::InitApply(object));
            }
            page.continue_token = list.metadata.continue_.filter(|next| !next.is_empty());
            if page.continue_token.is_none() {
                break list.metadata.resource_version;
            }
        };
        let mut version = listed.ok_or_else(|| ClusterError::Failed(NO_VERSION.to_owned()))?;
        on_event(Event::InitDone);
        on_state(Ok(()));
        // The changes since. Each watch ends after a while, and the next one continues where it ended.
        let ListParams { label_selector, field_selector, .. } = page;
        let which =
            WatchParams { label_selector, field_selector, ..WatchParams::default() }.timeout(WATCH_SECONDS);
        loop {
            let began = Instant::now();
            let mut changes = pin!(api.watch(&which, &version).await?);
            // Only now: after a watch that fails although objects can be listed, the pauses continue to grow.
            *backoff = Backoff::new();
            if std::mem::take(has_failed) && CAUSES.clear() {
                info!(objects = self.what, "watch restored");
            }
            while let Ok(Some(change)) = timeout(WATCH_SILENCE, changes.next()).await {
                let (at, event) = match change? {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        (object.resource_version(), Some(Event::Apply(object)))
                    }
                    WatchEvent::Deleted(object) => (object.resource_version(), Some(Event::Delete(object))),
                    WatchEvent::Bookmark(mark) => (Some(mark.metadata.resource_version), None),
                    WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
                };
                version = at.ok_or_else(|| ClusterError::Failed(NO_VERSION.to_owned()))?;
                if let Some(event) = event {
                    on_event(event);
                }
            }
            // A proxy may end each watch at once.
            sleep_until(began + MIN_WATCH).await;
        }
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

/// Error of an answer from which no watch can continue.
const NO_VERSION: &str = "no metadata.resourceVersion in watch result (does resource support watch?)";

/// Duration of one watch. It bounds the time until a vanished kube-apiserver is noticed.
const WATCH_SECONDS: u32 = 60;

/// Silence after which a watch is taken for ended: kube-apiserver did not end it, or its end was lost.
const WATCH_SILENCE: Duration = Duration::from_secs(65);

/// Shortest time between the starts of two watches.
const MIN_WATCH: Duration = Duration::from_secs(1);

/// Maximum pause between two attempts: a watch is back soon after kube-apiserver, however long that was away.
const MAX_PAUSE: Duration = Duration::from_secs(20);

/// Objects per page of a list. Each page is in memory twice while it is read, and a pod often has about 10 KiB.
const PAGE: u32 = 50;

#[cfg(test)]
mod tests {
    use std::future::pending;

    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;

    /// Watches Nodes, and sends each event, with the object's name.
    async fn watched(cluster: &Cluster, sender: mpsc::Sender<String>) -> Infallible {
        let on_event = |event| {
            let event = match event {
                Event::Init => "list".to_owned(),
                Event::InitApply(node) => format!("has {}", Node::name_any(&node)),
                Event::InitDone => "listed".to_owned(),
                Event::Apply(node) => format!("changed {}", node.name_any()),
                Event::Delete(node) => format!("deleted {}", node.name_any()),
            };
            sender.try_send(event).unwrap();
        };
        let on_state = |state: Result<(), ClusterError>| {
            state.unwrap_or_else(|cause| sender.try_send(cause.to_string()).unwrap());
        };
        let watcher = ObjectWatcher { cluster, what: "nodes", which: ListParams::default() };
        watcher.run(|client, _| Api::all(client), on_event, on_state).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_lists_in_pages_and_continues_where_the_last_one_ended() {
        let node = |name: &str, version: &str| {
            json!({"metadata": {"name": name, "resourceVersion": version}}).to_string()
        };
        let page = |node: &str, meta: &str| {
            format!(r#"{{"kind":"NodeList","apiVersion":"v1","metadata":{meta},"items":[{node}]}}"#)
        };
        let change = |kind: &str, object: &str| format!(r#"{{"type":"{kind}","object":{object}}}"#) + "\n";
        let bookmark =
            r#"{"apiVersion":"v1","kind":"Node","metadata":{"resourceVersion":"7","annotations":{}}}"#;
        let gone = r#"{"status":"Failure","message":"too old","reason":"Expired","code":410}"#;
        // What each request asks for, and the answer.
        let answers = [
            ("&limit=50 ", page(&node("a", "3"), r#"{"resourceVersion":"5","continue":"next"}"#)),
            ("&limit=50&continue=next ", page(&node("b", "4"), r#"{"resourceVersion":"5"}"#)),
            ("&resourceVersion=5 ", change("MODIFIED", &node("a", "6")) + &change("BOOKMARK", bookmark)),
            ("&resourceVersion=7 ", change("DELETED", &node("b", "8"))),
            ("&resourceVersion=8 ", change("ERROR", gone)),
            ("&limit=50 ", page(&node("a", "6"), r#"{"resourceVersion":"9"}"#)),
        ];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::of_test(&dir, &format!("server: 'http://{}'", listener.local_addr().unwrap()));
        let serve = async {
            for (asked, body) in answers {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut head = vec![0; 4096];
                let read = socket.read(&mut head).await.unwrap();
                let line = String::from_utf8_lossy(&head[..read]).lines().next().unwrap().to_owned();
                assert!(line.contains(asked), "{line}, not {asked}");
                let length = body.len();
                let head =
                    format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
                socket.write_all((head + &body).as_bytes()).await.unwrap();
            }
            pending::<Infallible>().await
        };
        let (sender, mut events) = mpsc::channel(100);
        let seen = async {
            let mut seen = Vec::new();
            while seen.iter().filter(|event| *event == "listed").count() < 2 {
                seen.push(events.recv().await.unwrap());
            }
            seen
        };
        let seen = tokio::select! {
            seen = seen => seen,
            never = watched(&cluster, sender) => match never {},
            never = serve => match never {},
        };
        let failed = "kube-apiserver: 410 too old";
        let first = ["list", "has a", "has b", "listed", "changed a", "deleted b", failed];
        assert_eq!(seen, [&first[..], &["list", "has a", "listed"]].concat());
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_fails_or_ends_at_once_is_not_repeated_in_a_loop() {
        let denied =
            r#"{"kind":"Status","status":"Failure","message":"no watch","reason":"Forbidden","code":403}"#;
        for (status, body) in [("403 Forbidden", denied), ("200 OK", "")] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let dir = tempfile::tempdir().unwrap();
            let server = format!("server: 'http://{}'", listener.local_addr().unwrap());
            let cluster = Cluster::of_test(&dir, &server);
            let mut watches = 0;
            let serve = async {
                loop {
                    let (mut socket, _) = listener.accept().await.unwrap();
                    let mut head = vec![0; 4096];
                    let read = socket.read(&mut head).await.unwrap();
                    let is_watch = String::from_utf8_lossy(&head[..read]).contains("watch=true");
                    watches += u32::from(is_watch);
                    let list = r#"{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[]}"#;
                    let (status, body) = if is_watch { (status, body) } else { ("200 OK", list) };
                    let length = body.len();
                    let head =
                        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
                    socket.write_all((head + body).as_bytes()).await.unwrap();
                }
            };
            let (sender, mut events) = mpsc::channel(1000);
            tokio::select! {
                never = watched(&cluster, sender) => match never {},
                never = serve => match never {},
                () = sleep(Duration::from_secs(60)) => {}
            }
            events.close();
            assert!((5..=60).contains(&watches), "{watches} watches in a minute after {status}");
        }
    }

    #[test]
    fn an_outage_of_several_watches_is_one_line_for_each_cause() {
        let logged = LoggedCauses(Mutex::new(BTreeSet::new()));
        let causes = ["a", "a", "b", "a"].map(|cause| ClusterError::Failed(cause.to_owned()));
        assert_eq!(causes.each_ref().map(|cause| logged.is_news(cause)), [true, false, true, false]);
        assert_eq!([logged.clear(), logged.clear(), logged.is_news(&causes[0])], [true, false, true]);
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
            // The lists and failures of the watch.
            let log = watch::Sender::new(Vec::new());
            let on_state = |state: Result<(), ClusterError>| {
                let state = state.map_or_else(|cause| cause.to_string(), |()| "listed".to_owned());
                log.send_modify(|log| log.push((state, start.elapsed())));
            };
            let mut seen = log.subscribe();
            let watcher = ObjectWatcher { cluster: &cluster, what: "nodes", which: ListParams::default() };
            let listed = async {
                let seen = seen.wait_for(|log| log.iter().any(|(what, _)| what == "listed")).await.unwrap();
                seen.clone()
            };
            let log = tokio::select! {
                log = listed => log,
                never = watcher.run(|client, _| Api::<Node>::all(client), drop, on_state) => match never {},
                () = serve => unreachable!(),
            };
            let (first, after) = log.first().unwrap();
            assert!(first.contains(&status[..3]) && after.as_secs() < 10, "{status}: {log:?}");
            let (_, back) = log.last().unwrap();
            assert!((away..away + 30).contains(&back.as_secs()), "{status}: {log:?}");
        }
    }
}
