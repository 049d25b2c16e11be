//! Following objects of Kubernetes: listed in pages, then watched; begun anew after a pause when anything fails.

mod part;

use std::convert::Infallible;
use std::fmt::Debug;
use std::pin::pin;

use futures_util::StreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::cluster::{Cluster, ClusterError};
use crate::net::backoff::Backoff;
pub(crate) use part::{MOST_NODE_ADDRESSES, NodeStatus, part_of};

/// What is followed.
#[derive(Debug)]
pub(super) struct Followed<'a> {
    /// Where.
    pub(super) cluster: &'a Cluster,
    /// What it is called in the log, as the subject of a sentence.
    pub(super) what: &'a str,
    /// Which objects of their kind: by labels, by fields.
    pub(super) which: watcher::Config,
}

/// What becomes of an event.
pub(super) trait Take<K> {
    /// Takes in an event. True if everything is known now.
    fn take(&mut self, event: Event<K>) -> bool;

    /// No events come until the next one, for that cause. What was known stands.
    fn is_cut_off(&mut self, _cause: &ClusterError) {}
}

impl Followed<'_> {
    /// Gives each event to `taker`, until it is dropped. `api` makes the interface to the objects from a client and our
    /// own namespace. While kube-apiserver does not answer, no events come; after that the whole list comes anew.
    pub(super) async fn follow<K>(
        &self,
        api: impl Fn(Client, &str) -> Api<K>,
        mut taker: impl Take<K>,
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
        taker: &mut impl Take<K>,
        (backoff, warned): (&mut Backoff, &mut bool),
    ) -> Result<Infallible, ClusterError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (client, namespace) = self.cluster.connect().await?;
        let which = self.which.clone().timeout(WATCH_SECONDS).page_size(PAGE);
        let mut events = pin!(watcher(api(client, &namespace), which));
        while let Some(event) = events.next().await {
            if taker.take(event.map_err(failed)?) {
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
