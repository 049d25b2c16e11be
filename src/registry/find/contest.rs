//! A node that is linked here is said to be linked to another pod too: which of the two links is the node's.

use std::sync::Arc;

use super::{Finder, PONG_TIMEOUT};
use crate::names::NodeName;
use crate::protocol::{Conflict, Found, LinkSender};
use crate::registry;

impl Finder {
    /// Another pod has said unasked that the node is there. An older link of it here is asked for a sign of life, and
    /// closed if there is none within 1 s. Another process of that name has 2 s; if it answers, and its link is the
    /// older one, it keeps the name, and the other pod is told.
    pub async fn contest(&self, other: &Arc<LinkSender>, node: &NodeName, found: Found) {
        let Some(linked) = self.registry.here(node) else { return };
        // A plain link cannot be asked.
        if linked.instance.is_none() {
            return;
        }
        let same = found.instance == linked.instance;
        // A pod of version 1 says no age, and cannot be told: there both links stay.
        let older = found.age.is_none_or(|age| age < linked.sender.age());
        let patience = if same { PONG_TIMEOUT } else { registry::PONG_TIMEOUT };
        if !linked.sender.answers_within(patience).await {
            tracing::info!(%node, "linked to another pod, and silent here: its old link is closed");
            return linked.sender.close();
        }
        if same || !older {
            return;
        }
        let Some(others) = &self.others else { return };
        let place = format!("at pod {}", others.siblings.behind(other));
        let taken = self.registry.keeps(node, &linked, &place);
        self.registry.conflicts.kept(node, found.instance);
        other.conflict(node, linked.instance, taken);
    }

    /// Another pod says that a node keeps its name there, as it is alive and its link older. Of two pods that both say so,
    /// as ages that differ by less than a word's way between them look to each, the one whose process has the larger
    /// number gives way.
    pub fn gives_way(&self, node: &NodeName, said: Conflict) {
        let Some(linked) = self.registry.here(node) else { return };
        let Some(keeper) = said.instance.filter(|_| said.instance != linked.instance) else { return };
        let smaller = linked.instance.is_some_and(|own| own.to_bytes() < keeper.to_bytes());
        if smaller && self.registry.conflicts.was_kept(node, keeper) {
            return;
        }
        self.registry.loses(node, &linked, said.reason);
    }
}
