//! Waiting for a link to another pod.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{Sibling, State, Unreachable};
use crate::protocol::LinkSender;

impl Sibling {
    /// The link, made if there is none. Waits at most 1 s for one; a later call waits only what is left of it, and for
    /// a while after a failure nobody waits at all. Cancel safe.
    pub(in crate::registry::siblings) async fn link(&self) -> Result<Arc<LinkSender>, Unreachable> {
        let mut state = self.state.subscribe();
        let begun = Instant::now();
        loop {
            let known = state.borrow_and_update().clone();
            let since = match known {
                State::Up(sender) if !sender.is_closed() => {
                    self.touch();
                    return Ok(sender);
                }
                State::Never(why) => return Err(why),
                State::Failed(until, why) if Instant::now() < until => return Err(why),
                State::Dialling(since) => since,
                State::Up(_) | State::Away | State::Failed(..) => {
                    self.wanted.notify_one();
                    begun
                }
            };
            let left = LOOK_UP.saturating_sub(since.elapsed());
            if !matches!(timeout(left, state.changed()).await, Ok(Ok(()))) {
                let cause = format!("no link within {LOOK_UP:?}");
                return Err(Unreachable::NoLink { at: self.at, cause });
            }
        }
    }
}

/// How long a search waits for a link; other pods are asked at the same time.
const LOOK_UP: Duration = Duration::from_secs(1);
