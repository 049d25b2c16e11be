//! Two processes with one name: which of them was refused it, and how often that is logged.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{Linked, Registry, Taken};
use crate::names::{Instance, NodeName};

/// Names with a recent conflict; at most [`MOST`] of them.
#[derive(Debug, Default)]
pub(super) struct Conflicts(Mutex<HashMap<NodeName, NameConflict>>);

#[derive(Debug)]
struct NameConflict {
    /// The process at another pod that was refused the name last.
    kept_from: Option<Instance>,
    logged: Instant,
    /// Conflicts since then that were not logged.
    left_out: u64,
}

impl Registry {
    /// A node that is linked here is alive and keeps its name; another process of that name came at `place`. Logs that,
    /// and sends the node a Conflict. Returns the sentence for the other process.
    pub(super) fn keeps(&self, node: &NodeName, linked: &Linked, place: &str) -> Taken {
        let why = format!(
            "another process came as node {node}, {place}, and is kept out while this one is alive: two machines with \
             one name? Give each its own"
        );
        self.log_conflict(node, &why);
        linked.sender.conflict(node, linked.instance, why);
        Taken { node: node.clone(), from: linked.from }
    }

    /// A node that is linked here loses its name to another process: its link is closed with that reason.
    pub(super) fn loses(&self, node: &NodeName, linked: &Linked, why: String) {
        self.log_conflict(node, &why);
        linked.sender.dismiss(why);
    }

    fn log_conflict(&self, node: &NodeName, why: &str) {
        self.metrics.name_conflicts.inc();
        if let Some(more) = self.conflicts.may_log(node) {
            tracing::warn!(%node, left_out = more, "{why}");
        }
    }
}

impl Conflicts {
    /// Counts one more conflict over that name. Some: it is to be logged now, with how many were left out before it.
    /// None: it is left out, so that two machines that take turns do not fill the log.
    pub(super) fn may_log(&self, node: &NodeName) -> Option<u64> {
        let mut all = self.lock();
        let now = Instant::now();
        if let Some(known) = all.get_mut(node) {
            if now - known.logged < LOG_EVERY {
                known.left_out += 1;
                return None;
            }
            known.logged = now;
            return Some(std::mem::take(&mut known.left_out));
        }
        if all.len() >= MOST {
            all.retain(|_, known| now - known.logged < LOG_EVERY);
        }
        if all.len() >= MOST {
            return None;
        }
        all.insert(node.clone(), NameConflict { kept_from: None, logged: now, left_out: 0 });
        Some(0)
    }

    /// Notes that a process at another pod was refused the name.
    pub(super) fn kept(&self, node: &NodeName, from: Option<Instance>) {
        if let Some(known) = self.lock().get_mut(node) {
            known.kept_from = from;
        }
    }

    /// Whether that process was the last to be refused the name.
    pub(super) fn was_kept(&self, node: &NodeName, from: Instance) -> bool {
        self.lock().get(node).is_some_and(|known| known.kept_from == Some(from))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, NameConflict>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that are remembered at once.
const MOST: usize = 1000;
/// Between two lines about one name.
const LOG_EVERY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_name_is_told_of_once_a_minute_and_no_names_make_it_grow() {
        let conflicts = Conflicts::default();
        let node = |n: usize| format!("node{n}").parse::<NodeName>().unwrap();
        assert_eq!(conflicts.may_log(&node(0)), Some(0));
        assert_eq!((conflicts.may_log(&node(0)), conflicts.may_log(&node(0))), (None, None));
        let told = (1..3 * MOST).filter(|n| conflicts.may_log(&node(*n)).is_some()).count();
        assert_eq!((told, conflicts.lock().len()), (MOST - 1, MOST));
        tokio::time::advance(LOG_EVERY).await;
        assert_eq!(conflicts.may_log(&node(0)), Some(2));
        assert_eq!(conflicts.may_log(&node(2 * MOST)), Some(0), "old ones give way");
    }
}
