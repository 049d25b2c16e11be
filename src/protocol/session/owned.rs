//! A session as its owner holds it: dropping it resets the session.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::names::SessionId;
use crate::protocol::session::SessionCore;
use crate::protocol::session::state::SessionState;
use crate::protocol::wire::frame::{Code, Refusal};

/// Resets the session when dropped.
#[derive(Debug)]
pub(super) struct ResetOnDrop {
    pub(super) shared: Option<Arc<SessionCore>>,
}

impl ResetOnDrop {
    pub(super) fn new(shared: Arc<SessionCore>) -> Self {
        Self { shared: Some(shared) }
    }

    pub(super) fn id(&self) -> SessionId {
        self.shared.as_ref().map_or(SessionId::from_bits(0), |s| s.key.id)
    }

    pub(super) fn with(&self, step: impl FnOnce(&Arc<SessionCore>)) {
        if let Some(shared) = &self.shared {
            step(shared);
        }
    }

    pub(super) fn watch<T>(
        &self,
        cx: &Context<'_>,
        ready: impl FnOnce(&SessionState) -> Option<T>,
    ) -> Poll<T> {
        match &self.shared {
            Some(shared) => watch(shared, cx, ready),
            None => Poll::Pending,
        }
    }
}

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            shared.reset(given_up());
        }
    }
}

/// Polls `ready`; while it is pending, the task is woken at each change.
pub(super) fn watch<T>(
    shared: &Arc<SessionCore>,
    cx: &Context<'_>,
    ready: impl FnOnce(&SessionState) -> Option<T>,
) -> Poll<T> {
    let mut inner = shared.lock();
    match ready(&inner.state) {
        Some(ready) => Poll::Ready(ready),
        None => {
            keep(&mut inner.watcher, cx);
            Poll::Pending
        }
    }
}

/// Stores the task's waker.
pub(super) fn keep(slot: &mut Option<std::task::Waker>, cx: &Context<'_>) {
    if !slot.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
        *slot = Some(cx.waker().clone());
    }
}

/// The refusal of a session whose owner dropped it without a reason.
pub(super) fn given_up() -> Refusal {
    Refusal::new(Code::GivenUp, "given up by its owner")
}
