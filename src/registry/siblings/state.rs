//! What is known of one other pod: whether it is linked, and which process it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use super::reach::Unreachable;
use super::rendezvous::Member;
use crate::names::Instance;
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
pub(super) struct KnownProcess {
    pod: ArcSwapOption<Instance>,
    /// How often a link to it has failed, so that announcements that were under way may be lost.
    losses: AtomicU64,
}

impl KnownProcess {
    pub(super) fn get(&self) -> Option<Member> {
        let pod = **self.pod.load().as_ref()?;
        Some(Member { pod, generation: self.losses.load(Relaxed), catches: false })
    }

    /// Whether it is that process, as far as anybody knows.
    pub(super) fn may_be(&self, pod: Instance) -> bool {
        self.pod.load().as_deref() == Some(&pod)
    }

    /// Takes the process at the end of a link, or that nobody knows it any more. True if that changes anything. For one
    /// task only.
    pub(super) fn is(&self, link: Option<&LinkSender>) -> bool {
        let (new, old) = (link.and_then(process), self.get().map(|member| member.pod));
        if old.is_some() && new.is_none() {
            self.losses.fetch_add(1, Relaxed);
        }
        if new != old {
            self.pod.store(new.map(Arc::new));
        }
        new != old
    }
}

/// The pod at a link's other end, if it may be a home.
pub(super) fn process(link: &LinkSender) -> Option<Instance> {
    link.instance.filter(|_| link.dialect.has(Dialect::HOMES))
}
