//! Which Nodes a cluster has.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;

use super::cluster::Cluster;
use super::follow::{Followed, Take};
use crate::drain::Drain;

/// The names of all Nodes; `None` until they are known.
pub type KnownNodes = Option<BTreeSet<String>>;

/// Follows the names of Nodes. While kube-apiserver does not answer, the last ones stand.
#[derive(Debug)]
pub struct NodeWatch {
    cluster: Cluster,
    known: watch::Sender<KnownNodes>,
}

impl NodeWatch {
    /// Asks nothing yet.
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, known: watch::Sender::new(None) }
    }

    /// A receiver of what is known, now and later.
    pub fn known(&self) -> watch::Receiver<KnownNodes> {
        self.known.subscribe()
    }

    /// Follows them until draining begins.
    pub async fn follow(self, drain: Drain) {
        let followed = Followed {
            cluster: &self.cluster,
            what: "the names of Nodes",
            which: watcher::Config::default(),
        };
        let taker = Names { known: &self.known, listed: BTreeSet::new(), listing: false };
        tokio::select! {
            never = followed.follow(|client, _| Api::all(client), taker) => match never {},
            () = drain.draining() => {}
        }
    }
}

/// Of each Node its name alone.
type Named = PartialObjectMeta<Node>;

struct Names<'a> {
    known: &'a watch::Sender<KnownNodes>,
    /// What a list under way has had so far.
    listed: BTreeSet<String>,
    listing: bool,
}

impl Take<Named> for Names<'_> {
    fn take(&mut self, event: Event<Named>) -> bool {
        match event {
            Event::Init => (self.listed, self.listing) = (BTreeSet::new(), true),
            Event::InitApply(node) => {
                self.listed.insert(node.name_any());
            }
            Event::InitDone => {
                self.listing = false;
                let listed = std::mem::take(&mut self.listed);
                self.known.send_if_modified(|known| {
                    let news = known.as_ref() != Some(&listed);
                    *known = Some(listed);
                    news
                });
            }
            Event::Apply(node) => self.change(|known| known.insert(node.name_any())),
            Event::Delete(node) => self.change(|known| known.remove(&node.name_any())),
        }
        !self.listing
    }
}

impl Names<'_> {
    fn change(&self, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        self.known.send_if_modified(|known| change(known.get_or_insert_default()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> Named {
        let mut node: Named = serde_json::from_value(serde_json::json!({"metadata": {}})).unwrap();
        node.metadata.name = Some(name.to_owned());
        node
    }

    #[test]
    fn a_list_counts_when_it_is_whole_and_then_each_change() {
        let known = watch::Sender::new(None);
        let mut seen = known.subscribe();
        let mut names = Names { known: &known, listed: BTreeSet::new(), listing: false };
        let is = |wanted: &[&str]| {
            assert_eq!(*known.borrow(), Some(wanted.iter().map(|name| (*name).to_owned()).collect()));
        };
        for event in [Event::Init, Event::InitApply(node("a")), Event::InitApply(node("b"))] {
            assert!(!names.take(event) && known.borrow().is_none());
        }
        assert!(names.take(Event::InitDone));
        is(&["a", "b"]);
        seen.mark_unchanged();
        names.take(Event::Apply(node("a")));
        assert!(!seen.has_changed().unwrap(), "a node that only says how it is changes nothing");
        names.take(Event::Delete(node("a")));
        names.take(Event::Apply(node("c")));
        is(&["b", "c"]);
        names.take(Event::Init);
        is(&["b", "c"]);
        names.take(Event::InitDone);
        is(&[]);
    }
}
