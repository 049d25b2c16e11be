//! How the tasks of an owner wait.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::table::session::SharedSession;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::state::SessionState;

/// Polls `ready`; while it is pending, the task is woken at each change.
pub(super) fn watch<T>(
    shared: &Arc<SharedSession>,
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
pub(super) fn keep(kept: &mut Option<std::task::Waker>, cx: &Context<'_>) {
    if !kept.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
        *kept = Some(cx.waker().clone());
    }
}

/// Returns the refusal of a session that its owner dropped without a reason.
pub(super) fn given_up() -> SessionError {
    SessionError::new(ErrorCode::Cancelled, "given up by its owner")
}
