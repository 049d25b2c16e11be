//! Links that are replaced: one whose pod is to be left, and one that has fallen silent.

use std::pin::pin;
use std::time::Duration;

use super::Keeper;
use crate::protocol::{Link, LinkEnded};

impl Keeper {
    /// Serves a link that is to be replaced: what we opened to nodes moves to another link as soon as there is the `next`
    /// one; the rest may stay until it is over or the pod goes.
    pub(super) async fn hand_over(&self, mut link: Link, next: impl Future<Output = ()>) {
        let mut next = pin!(next);
        let sender = link.sender.clone();
        let mut moved = false;
        let mut look = tokio::time::interval(POLL_INTERVAL);
        let why = loop {
            tokio::select! {
                event = link.next() => match event {
                    Ok(event) => {
                        self.take(event);
                    }
                    Err(why) => break why,
                },
                () = &mut next, if !moved => {
                    moved = true;
                    // What that pod dialled itself ends with it, and no link to another pod leads there as well as this one.
                    let next = self.uplinks.newest(None);
                    let stays = next.is_some_and(|next| next.instance == sender.instance);
                    let moves = |_: &_, end: Option<_>| stays || end.is_none() || end != sender.instance;
                    for parked in self.ground.table.leave(&sender, moves) {
                        self.route.mend(parked, &self.ground.drain);
                    }
                    sender.drain(None);
                }
                // The sessions that have stayed would wait for nothing on a dead link.
                () = sender.falls_silent(), if moved => break LinkEnded::Outrun,
                // The edge stops: nothing moves any more, and what ran here has ended.
                () = self.ground.drain.draining(), if !moved => moved = true,
                _ = look.tick(), if moved => {
                    if sender.sessions() == 0 {
                        sender.close();
                    }
                }
            }
        };
        self.ended(&link, &why);
        self.freed.notify_one();
    }

    /// Ends a silent link as soon as there is the next one: all that ran here goes on there.
    pub(super) async fn give_up(&self, link: Link) {
        self.uplinks.newer(link.sender.id).await;
        self.ended(&link, &LinkEnded::Outrun);
    }
}

/// How often a link that is not wanted any more is looked at: it is closed when no session runs on it.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
