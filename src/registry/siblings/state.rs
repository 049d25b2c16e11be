//! What is known of one other pod: whether it is linked, and which process it is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::homes::Keeper;
use super::reach::Unreachable;
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

/// The process that a pod was when it was linked last, if it keeps places; none once nobody can say whether it lives.
#[derive(Debug, Default)]
pub(super) struct KnownProcess(Mutex<Option<Keeper>>);

impl KnownProcess {
    pub(super) fn get(&self) -> Option<Keeper> {
        *self.lock()
    }

    /// Takes the process at the end of a link, or that nobody knows it any more. True if it is another one: also after
    /// the link failed and was made anew, as announcements that were under way may be lost.
    pub(super) fn is(&self, link: Option<&LinkSender>) -> bool {
        let keeps = link.filter(|link| link.dialect.has(Dialect::HOMES));
        let new = keeps.and_then(|link| Some(Keeper { pod: link.instance?, since: link.id.0 }));
        let mut known = self.lock();
        let changed = known.map(|keeper| keeper.pod) != new.map(|keeper| keeper.pod);
        if changed {
            *known = new;
        }
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Option<Keeper>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
