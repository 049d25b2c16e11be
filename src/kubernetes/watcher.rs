//! Following objects of Kubernetes: listed in pages, then watched; begun anew after a pause when anything fails.

use std::convert::Infallible;
use std::fmt::Debug;
use std::net::IpAddr;
use std::pin::pin;

use futures_util::StreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::kubernetes::cluster::{Cluster, ClusterError};
use tunnel_base::backoff::Backoff;

/// What is followed.
#[derive(Debug)]
pub(crate) struct ObjectWatcher<'a> {
    /// Where.
    pub(crate) cluster: &'a Cluster,
    /// What it is called in the log, as the subject of a sentence.
    pub(crate) what: &'a str,
    /// Which objects of their kind: by labels, by fields.
    pub(crate) which: watcher::Config,
}

/// What becomes of an event.
pub(crate) trait WatchHandler<K> {
    /// Takes in an event. True if everything is known now.
    fn on_event(&mut self, event: Event<K>) -> bool;

    /// No events come until the next one, for that cause. What was known stands.
    fn is_cut_off(&mut self, _cause: &ClusterError) {}
}

impl ObjectWatcher<'_> {
    /// Gives each event to `taker`, until it is dropped. `api` makes the interface to the objects from a client and our
    /// own namespace. While kube-apiserver does not answer, no events come; after that the whole list comes anew.
    pub(crate) async fn run<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        mut taker: impl WatchHandler<K>,
    ) -> Infallible
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (what, mut backoff, mut warned) = (self.what, Backoff::new(), false);
        loop {
            let cause = match self.list_and_watch(&api, &mut taker, (&mut backoff, &mut warned)).await {
                Ok(never) => match never {},
                Err(cause) => cause,
            };
            if warned {
                debug!("{what}: {cause}");
            } else {
                warn!("{what} cannot be followed, trying on: {cause}");
                warned = true;
            }
            taker.is_cut_off(&cause);
            sleep(backoff.pause(rand::random())).await;
        }
    }

    /// Goes on until something fails. The client is made anew each time: a certificate or a token may be over.
    async fn list_and_watch<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        taker: &mut impl WatchHandler<K>,
        (backoff, warned): (&mut Backoff, &mut bool),
    ) -> Result<Infallible, ClusterError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (client, namespace) = self.cluster.connect().await?;
        let which = self.which.clone().timeout(WATCH_SECONDS).page_size(PAGE);
        let mut events = pin!(watcher(api(client, &namespace), which));
        while let Some(event) = events.next().await {
            if taker.on_event(event.map_err(failed)?) {
                *backoff = Backoff::new();
                if std::mem::take(warned) {
                    info!("{} are followed again", self.what);
                }
            }
        }
        Err(ClusterError::Silent)
    }
}

fn failed(cause: watcher::Error) -> ClusterError {
    use watcher::Error::{InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed};
    match cause {
        InitialListFailed(cause) | WatchStartFailed(cause) | WatchFailed(cause) => cause.into(),
        WatchError(status) => kube::Error::Api(status).into(),
        cause @ NoResourceVersion => ClusterError::Failed(cause.to_string()),
    }
}

/// How long one watch lasts: an apiserver that has vanished without a word is noticed not much later.
const WATCH_SECONDS: u32 = 60;

/// Objects on one page of a list. The text of each is in memory twice while the page is read, and pods often have some
/// 10 KiB.
const PAGE: u32 = 50;

// Types for parts of Kubernetes' objects.

/// A Node's addresses, as its kubelet says them.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
pub(crate) struct NodeStatus {
    addresses: Vec<NodeAddress>,
}

#[derive(Debug, Clone, Deserialize)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

impl NodeStatus {
    /// Those of these kinds, all of them.
    pub(crate) fn of_kinds<const N: usize>(&self, kinds: [&'static str; N]) -> impl Iterator<Item = &str> {
        let all = self.addresses.iter().filter(move |address| kinds.contains(&address.kind.as_str()));
        all.map(|address| address.address.as_str())
    }

    /// The IP addresses of a kind, the first [`MAX_NODE_ADDRESSES`].
    pub(crate) fn ips<C: FromIterator<IpAddr>>(&self, kind: &'static str) -> C {
        let all = self.of_kinds([kind]).filter_map(|address| address.parse().ok());
        all.take(MAX_NODE_ADDRESSES).collect()
    }
}

/// Of a Node's addresses only so many are kept: its own kubelet writes them, and may be anybody's. Two of each family, and
/// their names, are the most that is usual.
pub(crate) const MAX_NODE_ADDRESSES: usize = 8;

/// Takes over from the whole type what a part of its objects is called. The part has its metadata in a field of that name.
macro_rules! part_of {
    ($part:ident, $whole:ty) => {
        impl Resource for $part {
            type DynamicType = ();
            type Scope = <$whole as Resource>::Scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$whole>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$whole>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$whole>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$whole>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(crate) use part_of;
