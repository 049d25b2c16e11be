//! A server without kube-apiserver asks its peers what they know of the cluster. They answer if they have seen more of it.

use std::collections::BTreeMap;
use std::mem::take;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::debug;

use crate::pod_tokens::PodTokens;
use crate::pod_tokens::last_known::{LastKnown, MAX_BYTES};
use crate::watcher::publish;
use tunnel_base::addresses::cluster_state::EdgePod;

/// A question, or a part of the answer.
#[derive(Debug, Deserialize, Serialize)]
struct Message {
    /// Age of what the sender knows; the maximum if it knows nothing.
    age: Duration,
    /// The last Node of the part before; empty for the first part.
    after: String,
    /// The next Nodes with their pods; none at the end. `None` in a question.
    part: Option<LastKnown>,
}

/// The parts of an answer so far.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    nodes: BTreeMap<String, bool>,
    pods: BTreeMap<String, EdgePod>,
    bytes: u64,
}

impl PodTokens {
    /// Returns the question for the part after this Node, unless the pods are followed here.
    pub(crate) fn ask_peers(&self, after: String) -> Option<Vec<u8>> {
        let since = self.pods_age().filter(|_| self.settings.outage)?;
        let age = if self.pods.borrow().is_some() { since } else { Duration::MAX };
        serde_json::to_vec(&Message { age, after, part: None }).ok()
    }

    /// Takes a message, and returns the next one.
    pub(crate) fn answer_peer(&self, said: &[u8]) -> Option<Vec<u8>> {
        let Message { age, after, part } = serde_json::from_slice(said).ok()?;
        match part {
            None => self.part(age, after),
            Some(part) => self.learn(age, &after, part, said.len() as u64),
        }
    }

    /// Returns a part of the answer to a peer with knowledge of that age, unless it knows as much.
    fn part(&self, age: Duration, after: String) -> Option<Vec<u8>> {
        let own = self.pods_age().unwrap_or_default();
        if own + MIN_LEAD > age {
            return None;
        }
        let nodes = self.nodes.borrow();
        let rest = nodes.as_ref()?.range::<str, _>((Excluded(&*after), Unbounded)).take(PART_NODES);
        let nodes: BTreeMap<_, _> = rest.map(|(node, is_edge)| (node.clone(), *is_edge)).collect();
        let pods = self.pods.borrow();
        let is_there = |pod: &EdgePod| pod.node.as_ref().is_some_and(|node| nodes.contains_key(node));
        let pods = pods.as_ref()?.iter().filter(|(_, pod)| is_there(pod)).take(2 * PART_NODES);
        let pods = pods.map(|(name, pod)| (name.clone(), pod.clone())).collect();
        let keys = self.keys.borrow().clone();
        let part = Some(LastKnown { nodes: Some(nodes), pods: Some(pods), keys, age: None });
        serde_json::to_vec(&Message { age: own, after, part }).ok()
    }

    /// Keeps a part of the answer, and returns the question for the next one. After the last part all of it applies.
    fn learn(&self, age: Duration, after: &str, part: LastKnown, bytes: u64) -> Option<Vec<u8>> {
        let LastKnown { nodes: Some(nodes), pods: Some(pods), keys, .. } = part else { return None };
        let mut answer = self.answer.lock();
        if after.is_empty() {
            *answer = Answer::default();
        }
        // Otherwise another peer has told this part, or this one tells too much.
        let is_next = answer.nodes.last_key_value().map_or("", |(last, _)| last) == after;
        answer.bytes += bytes;
        if !is_next || answer.bytes > MAX_BYTES {
            return None;
        }
        let last = nodes.last_key_value().map(|(last, _)| last.clone());
        answer.nodes.extend(nodes);
        answer.pods.extend(pods);
        if let Some(last) = last {
            return self.ask_peers(last);
        }
        let Answer { nodes, pods, .. } = take(&mut *answer);
        drop(answer);
        // A peer may have another cluster, and kube-apiserver may be back.
        let is_same = self.pods.borrow().is_none() || *self.keys.borrow() == keys;
        if is_same && self.pods_age().is_some() {
            debug!(nodes = nodes.len(), pods = pods.len(), "pods of edges learned from a peer");
            self.keys.send_replace(keys);
            publish(&self.nodes, Some(nodes));
            publish(&self.pods, Some(pods));
            self.outage.lock().since = Some(Instant::now().checked_sub(age).unwrap_or_else(Instant::now));
        }
        None
    }
}

/// Time by which a peer must have seen more, so that two of them do not tell each other the same.
const MIN_LEAD: Duration = Duration::from_secs(10);
/// Nodes in a part, with two pods each, as while pods are replaced. With the longest names they fit into a message.
const PART_NODES: usize = 64;
