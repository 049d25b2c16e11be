//! The Nodes of a cluster, and which of them are edges.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;

use super::cluster::Cluster;
use super::follow::{Followed, Take};
use crate::drain::Drain;

/// The names of all Nodes, each with whether it has an edge label; `None` until they are known.
pub type KnownNodes = Option<BTreeMap<String, bool>>;

/// Follows names and labels of Nodes. While kube-apiserver does not answer, the last known ones apply.
#[derive(Debug)]
pub struct NodeWatch {
    cluster: Cluster,
    labels: Vec<(String, String)>,
    known: watch::Sender<KnownNodes>,
}

impl NodeWatch {
    /// Sends no request yet. `own` is an edge label of the settings, with its value.
    pub fn new(cluster: Cluster, own: Option<(String, String)>) -> Self {
        Self { cluster, labels: edge_labels(own), known: watch::Sender::new(None) }
    }

    /// A receiver of what is known, now and later.
    pub fn known(&self) -> watch::Receiver<KnownNodes> {
        self.known.subscribe()
    }

    /// Follows them until draining begins.
    pub async fn follow(self, drain: Drain) {
        let followed = Followed {
            cluster: &self.cluster,
            what: "names and labels of Nodes",
            which: watcher::Config::default(),
        };
        let taker =
            Names { known: &self.known, labels: &self.labels, listed: BTreeMap::new(), listing: false };
        tokio::select! {
            never = followed.follow(|client, _| Api::all(client), taker) => match never {},
            () = drain.draining() => {}
        }
    }
}

/// The metadata of a Node.
type Named = PartialObjectMeta<Node>;

struct Names<'a> {
    known: &'a watch::Sender<KnownNodes>,
    labels: &'a [(String, String)],
    /// The part of a list that has been received so far.
    listed: BTreeMap<String, bool>,
    listing: bool,
}

impl Take<Named> for Names<'_> {
    fn take(&mut self, event: Event<Named>) -> bool {
        match event {
            Event::Init => (self.listed, self.listing) = (BTreeMap::new(), true),
            Event::InitApply(node) => {
                self.listed.insert(node.name_any(), is_edge(&node, self.labels));
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
            Event::Apply(node) => {
                let is_edge = is_edge(&node, self.labels);
                self.change(|known| known.insert(node.name_any(), is_edge) != Some(is_edge));
            }
            Event::Delete(node) => self.change(|known| known.remove(&node.name_any()).is_some()),
        }
        !self.listing
    }
}

impl Names<'_> {
    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, bool>) -> bool) {
        self.known.send_if_modified(|known| change(known.get_or_insert_default()));
    }
}

/// Returns true if the Node has one of these labels.
fn is_edge(node: &Named, labels: &[(String, String)]) -> bool {
    labels.iter().any(|(label, value)| node.labels().get(label) == Some(value))
}

/// The labels that the manifests give to edges, SuperEdge's and OpenYurt's, and the label of the settings.
fn edge_labels(own: Option<(String, String)>) -> Vec<(String, String)> {
    let known = [("superedge.io/node-edge", "enable"), ("openyurt.io/is-edge-worker", "true")];
    known.map(|(label, value)| (label.to_owned(), value.to_owned())).into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> Named {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(serde_json::json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    #[test]
    fn a_list_counts_when_it_is_whole_and_then_each_change() {
        let known = watch::Sender::new(None);
        let mut seen = known.subscribe();
        let labels = edge_labels(None);
        let mut names = Names { known: &known, labels: &labels, listed: BTreeMap::new(), listing: false };
        let is = |wanted: &[(&str, bool)]| {
            let wanted = wanted.iter().map(|(name, is_edge)| ((*name).to_owned(), *is_edge)).collect();
            assert_eq!(*known.borrow(), Some(wanted));
        };
        let superedge = [("superedge.io/node-edge", "enable")];
        for event in [Event::Init, Event::InitApply(node("a", &superedge)), Event::InitApply(node("b", &[]))]
        {
            assert!(!names.take(event) && known.borrow().is_none());
        }
        assert!(names.take(Event::InitDone));
        is(&[("a", true), ("b", false)]);
        seen.mark_unchanged();
        names.take(Event::Apply(node("a", &superedge)));
        assert!(!seen.has_changed().unwrap(), "a node that only says how it is changes nothing");
        names.take(Event::Delete(node("b", &[])));
        names.take(Event::Apply(node("c", &[])));
        is(&[("a", true), ("c", false)]);
        seen.mark_unchanged();
        names.take(Event::Apply(node("a", &[])));
        assert!(seen.has_changed().unwrap(), "its label is gone");
        is(&[("a", false), ("c", false)]);
        names.take(Event::Init);
        is(&[("a", false), ("c", false)]);
        names.take(Event::InitDone);
        is(&[]);
    }

    #[test]
    fn edges_are_known_by_the_labels_of_the_manifests_and_by_the_label_of_the_settings() {
        let own = ("example.org/edge".to_owned(), "yes".to_owned());
        for (label, value, is_one, with_own) in [
            ("superedge.io/node-edge", "enable", true, true),
            ("superedge.io/node-edge", "disable", false, false),
            ("openyurt.io/is-edge-worker", "true", true, true),
            ("openyurt.io/is-edge-worker", "false", false, false),
            ("example.org/edge", "yes", false, true),
            ("node-role.kubernetes.io/control-plane", "", false, false),
        ] {
            let node = node("a", &[(label, value)]);
            assert_eq!(is_edge(&node, &edge_labels(None)), is_one, "{label}={value}");
            assert_eq!(is_edge(&node, &edge_labels(Some(own.clone()))), with_own, "{label}={value}");
        }
    }
}
