//! Questions to peers, and the callers that wait for their answers.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::registry::peers::announcements::UNSOLICITED;
use tunnel_link::link::Link;
use tunnel_proto::state::LinkId;

/// The questions of one kind that wait for an answer, by number and link: an answer is only accepted from the link over
/// which it was requested.
#[derive(Debug, educe::Educe)]
#[educe(Default)]
pub(crate) struct Questions<A> {
    #[educe(Default = AtomicU64::new(UNSOLICITED + 1))]
    next: AtomicU64,
    pub(super) pending: Mutex<HashMap<(u64, LinkId), oneshot::Sender<A>>>,
}

impl<A> Questions<A> {
    /// Asks the peer at the remote end of a link. `send` sends the question of this number, and returns false if the
    /// link has no room. Returns `None` if the peer does not answer in time. Cancel safe.
    pub(crate) async fn ask(&self, link: &Link, time: Duration, send: impl FnOnce(u64) -> bool) -> Option<A> {
        let question = self.next.fetch_add(1, Relaxed);
        let (answer, answered) = oneshot::channel();
        // Inserted before sending, because the answer may arrive on another thread before `send` returns. The guard
        // below removes it, whether it was answered, timed out or cancelled.
        self.pending.lock().insert((question, link.id), answer);
        let _pending = QuestionGuard { questions: self, key: (question, link.id) };
        if !send(question) {
            return None;
        }
        tokio::select! {
            answer = timeout(time, answered) => answer.ok()?.ok(),
            () = link.closed() => None,
        }
    }

    /// Delivers an answer. One for which no caller waits is dropped.
    pub(crate) fn answer(&self, question: u64, from: &Link, answer: A) {
        let waiter = self.pending.lock().remove(&(question, from.id));
        if let Some(waiter) = waiter {
            // This fails only if the caller has just left.
            let _ = waiter.send(answer);
        }
    }
}

/// A guard that removes a question when its caller leaves.
struct QuestionGuard<'a, A> {
    questions: &'a Questions<A>,
    key: (u64, LinkId),
}

impl<A> Drop for QuestionGuard<'_, A> {
    fn drop(&mut self) {
        self.questions.pending.lock().remove(&self.key);
    }
}
