//! The Nodes of a cluster, and whether each is an edge.

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use tokio::sync::watch;

use crate::cluster::{Cluster, ClusterError, StateReport};
use crate::partial::{EDGE_LABELS, has_label};
use crate::watcher::{Event, ObjectWatcher, WatchedObjects, publish};
use tunnel_base::addresses::cluster_state::KnownNodes;
use tunnel_base::drain::Drain;

/// Follows the names and labels of Nodes until draining starts. The last known ones apply while kube-apiserver does not
/// answer. `own` is the edge label from the config, with its value. Calls `report` when the watch works or fails.
pub async fn follow_node_labels(
    cluster: Cluster,
    own: Option<(String, String)>,
    known: watch::Sender<KnownNodes>,
    report: StateReport,
    drain: Drain,
) {
    let labels = edge_labels(own);
    let what = "names and labels of Nodes";
    let followed = ObjectWatcher { cluster: &cluster, what, which: ListParams::default() };
    let mut nodes = WatchedObjects::default();
    let on_event = |event| take(event, &labels, &mut nodes, &known);
    let on_state = |state: Result<(), ClusterError>| report(state.map_err(|cause| cause.to_string()));
    drain.run_until(followed.run(|client, _| Api::all(client), on_event, on_state)).await;
}

/// Publishes which Nodes exist, and which of them are edges.
fn take(
    event: Event<NodeMeta>,
    labels: &[(String, String)],
    nodes: &mut WatchedObjects<bool>,
    known: &watch::Sender<KnownNodes>,
) {
    if nodes.take(event, |node| is_edge(node, labels)) {
        publish(known, nodes.known().cloned());
    }
}

/// The metadata of a Node.
type NodeMeta = PartialObjectMeta<Node>;

/// Returns true if the Node has one of these labels.
fn is_edge(node: &NodeMeta, labels: &[(String, String)]) -> bool {
    labels.iter().any(|(label, value)| has_label(node, label, value))
}

/// Returns the edge labels of the manifests, SuperEdge's and OpenYurt's, and the label from the config.
fn edge_labels(own: Option<(String, String)>) -> Vec<(String, String)> {
    let known = EDGE_LABELS.map(|(label, value)| (label.to_owned(), value.to_owned()));
    known.into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> NodeMeta {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(serde_json::json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    #[test]
    fn nodes_are_known_once_their_list_is_complete_and_follow_each_change() {
        let sender = watch::Sender::default();
        let [mut seen, known] = [(); 2].map(|()| sender.subscribe());
        let mut nodes = WatchedObjects::default();
        let labels = edge_labels(None);
        let mut on_event = |event| take(event, &labels, &mut nodes, &sender);
        let is = |expected: &[(&str, bool)]| {
            let expected = expected.iter().map(|(name, is_edge)| ((*name).to_owned(), *is_edge)).collect();
            assert_eq!(*known.borrow(), Some(expected));
        };
        let superedge = [("superedge.io/node-edge", "enable")];
        for event in [Event::Init, Event::InitApply(node("a", &superedge)), Event::InitApply(node("b", &[]))]
        {
            on_event(event);
            assert!(known.borrow().is_none());
        }
        on_event(Event::InitDone);
        is(&[("a", true), ("b", false)]);
        seen.mark_unchanged();
        on_event(Event::Apply(node("a", &superedge)));
        assert!(!seen.has_changed().unwrap(), "a status update changes nothing");
        on_event(Event::Delete(node("b", &[])));
        on_event(Event::Apply(node("c", &[])));
        is(&[("a", true), ("c", false)]);
        seen.mark_unchanged();
        on_event(Event::Apply(node("a", &[])));
        assert!(seen.has_changed().unwrap(), "the label was removed");
        is(&[("a", false), ("c", false)]);
        on_event(Event::Init);
        is(&[("a", false), ("c", false)]);
        on_event(Event::InitDone);
        is(&[]);
    }

    #[test]
    fn edges_are_recognised_by_the_known_labels_and_the_configured_one() {
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
