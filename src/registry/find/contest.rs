//! A node is linked here and, as another pod announces, there too: which of the two links stays.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::join;

use super::{Finder, PONG_TIMEOUT};
use crate::names::{Instance, NodeName};
use crate::protocol::{Conflict, Found, LinkSender};
use crate::registry;

/// Returns true if a link of the node, which was `found` elsewhere, answers. Closes it otherwise.
async fn closes_unless_it_answers(link: &LinkSender, node: &NodeName, found: &Found) -> bool {
    let same = found.instance == link.instance;
    let patience = if same { patience_with(link) } else { registry::PONG_TIMEOUT };
    let answers = link.answers_within(patience).await;
    if !answers {
        tracing::info!(link = %link.id, %node, "the node is linked to another pod, and its link here does not answer: it is closed");
        link.close();
    }
    answers
}

/// How long the link here may take to answer when its own process has linked elsewhere.
fn patience_with(link: &LinkSender) -> Duration {
    let line = link.line_round_trip().filter(|_| link.silence() >= QUIET);
    line.map_or(PONG_TIMEOUT, |line| PONG_TIMEOUT.min(PROMPT + 2 * line))
}

/// A link that is alive, and on which sessions have run lately, is hardly ever silent for so long: its edge asks every
/// second.
const QUIET: Duration = Duration::from_millis(1400);
/// How long its answer may take beside the line's round trips.
const PROMPT: Duration = Duration::from_millis(250);

impl Finder {
    /// The node is at another pod, the process `at`, as that one or a home of the node has said. Pings each link that the
    /// node has here, the interactive one too, and closes those that do not answer within 1 s, or 2 s if the two processes
    /// differ. A link of the same process has less time, if nothing has come from it for so long that it may have linked
    /// there because it hears nothing from here. If the process here answers and its link is the older one, it keeps the
    /// name, and the other pod gets a Conflict.
    pub async fn contest(&self, at: Instance, node: &NodeName, found: Found) {
        let beside = self.registry.beside(node);
        let asked = beside.iter().map(|link| closes_unless_it_answers(link, node, &found));
        join!(join_all(asked), self.contest_current(at, node, &found));
    }

    async fn contest_current(&self, at: Instance, node: &NodeName, found: &Found) {
        let Some(linked) = self.registry.here(node) else { return };
        // A plain link cannot be pinged.
        if linked.instance.is_none() {
            return;
        }
        let same = found.instance == linked.instance;
        // A pod of version 1 sends no age and does not understand a conflict: then both links stay.
        let older = found.age.is_none_or(|age| age < linked.sender.age());
        if !closes_unless_it_answers(&linked.sender, node, found).await || same || !older {
            return;
        }
        let Some(others) = &self.others else { return };
        let Ok(other) = others.siblings.process(at).await else { return };
        let place = format!("at pod {}", others.siblings.behind(&other));
        let taken = self.registry.keeps(node, &linked, &place);
        self.registry.conflicts.kept(node, found.instance);
        other.conflict(node, linked.instance, taken);
    }

    /// Another pod has sent a Conflict: a process there keeps the node's name, because it is alive and its link is
    /// older.
    ///
    /// Both pods may send this to each other at the same time: if the links' ages differ by less than a frame takes
    /// from pod to pod, each finds its own link the older one. Then the process with the larger number gives way, at
    /// both.
    pub fn gives_way(&self, node: &NodeName, conflict: Conflict) {
        let Some(linked) = self.registry.here(node) else { return };
        let Some(keeper) = conflict.instance.filter(|_| conflict.instance != linked.instance) else { return };
        let smaller = linked.instance.is_some_and(|own| own.to_bytes() < keeper.to_bytes());
        if smaller && self.registry.conflicts.was_kept(node, keeper) {
            return;
        }
        self.registry.loses(node, &linked, conflict.reason);
    }
}
