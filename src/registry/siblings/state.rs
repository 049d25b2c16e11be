//! What is known of one other pod: whether it is linked, and which process it is.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use super::reach::Unreachable;
use super::rendezvous::Member;
use crate::protocol::{Dialect, LinkSender};

#[derive(Debug, Clone)]
pub(super) enum State {
    /// No link, and none is wanted.
    Away,
    /// A link is being made since then.
    Dialling(Instant),
    /// The last try failed; the next one begins no earlier than that time.
    Failed(Instant, Unreachable),
    Up(Arc<LinkSender>),
    /// Its keeper has ended, or the address is this pod's own.
    Never(Unreachable),
}

/// The process that a pod was when it was linked last, if it may be a home; none once nobody can say whether it lives.
#[derive(Debug, Default)]
pub(super) struct KnownProcess(ArcSwapOption<Member>);

impl KnownProcess {
    pub(super) fn get(&self) -> Option<Member> {
        self.0.load().as_deref().copied()
    }

    /// Takes the process at the end of a link, or that nobody knows it any more. True if it is another one: also after
    /// the link failed and was made anew, as announcements that were under way may be lost. For one task only.
    pub(super) fn is(&self, link: Option<&LinkSender>) -> bool {
        let new = link.and_then(member);
        let changed = self.get().map(|member| member.pod) != new.map(|member| member.pod);
        if changed {
            self.0.store(new.map(Arc::new));
        }
        changed
    }
}

/// The pod at a link's other end, if it may be a home.
pub(super) fn member(link: &LinkSender) -> Option<Member> {
    let pod = link.instance.filter(|_| link.dialect.has(Dialect::HOMES))?;
    Some(Member { pod, generation: link.id.0 })
}
