//! An interactive link, beside one that is busy with bulk: what is lost or queued there does not hold up what is typed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, info_span};

use super::Keeper;
use crate::edge::link_dialer::AddressHint;
use crate::net::backoff::Backoff;
use crate::protocol::{Dialect, Event, Link, LinkSender, Older, Sorting};

impl Keeper {
    /// Keeps an interactive link beside `busy`, for as long as bulk and other sessions share that. Where that
    /// leads to a pod of an older version, or a near one, there is none. Never returns; dropped, it has the link handed over.
    pub(super) async fn keep_interactive(
        self: &Arc<Self>,
        busy: &Arc<LinkSender>,
        server: usize,
        at: Option<SocketAddr>,
    ) {
        if !busy.dialect.has(Dialect::INTERACTIVE) {
            std::future::pending::<()>().await;
        }
        let (mut sorting, mut backoff) = (Sorting::default(), Backoff::new());
        // After the death of a link the next one is wanted, whatever runs on the busy link: the pod's sessions wait on the
        // dead link until the pod notices, and the next one tells it.
        let mut wanted_until = Instant::now();
        loop {
            while Instant::now() >= wanted_until && !self.is_shared(busy, &mut sorting).await {}
            sleep(backoff.pause(rand::random())).await;
            match self.connect_beside(busy, server, at).await {
                Ok(link) => {
                    let begun = Instant::now();
                    if self.sort_beside(busy, link, &mut sorting).await {
                        wanted_until = Instant::now() + NOTICED;
                    }
                    backoff.ended(begun.elapsed(), false);
                }
                Err(why) => {
                    debug!(link = %busy.id, error = %format_args!("{why:#}"), "no interactive link");
                    backoff.refused();
                }
            }
        }
    }

    /// An interactive link to the pod that holds the busy one; any other refuses.
    async fn connect_beside(
        &self,
        busy: &LinkSender,
        server: usize,
        at: Option<SocketAddr>,
    ) -> anyhow::Result<Link> {
        let hint = AddressHint { to: at, not: None };
        let link = self.dialer.connect_to(server, hint, Older::Busy).await?.link;
        anyhow::ensure!(link.sender.instance == busy.instance, "another pod has taken it");
        Ok(link)
    }

    /// Looks once at what runs on a link, when anything moves there: whether interactive sessions share a long way with
    /// bulk.
    async fn is_shared(&self, busy: &Arc<LinkSender>, sorting: &mut Sorting) -> bool {
        busy.moving().await;
        sleep(Sorting::EVERY).await;
        if !is_long(busy.least_round_trip()) || busy.sessions() < 2 {
            return false;
        }
        let sorted = self.ground.table.sort(busy, sorting);
        sorted.bulk > 0 && sorted.interactive > 0
    }

    /// Sorts the sessions of both links until the one beside ends or is of no use any more. Returns true if it has died:
    /// the pod may not know it yet.
    async fn sort_beside(
        self: &Arc<Self>,
        busy: &Arc<LinkSender>,
        link: Link,
        sorting: &mut Sorting,
    ) -> bool {
        let beside = link.sender.clone();
        info!(link = %beside.id, busy = %busy.id, "an interactive link, beside one that is busy with bulk");
        // Dropped with this future, too.
        let (wanted, unwanted) = oneshot::channel();
        let (keeper, span) = (self.clone(), info_span!("interactive"));
        self.ground.drain.spawn(span, keeper.serve_interactive(link, busy.clone(), unwanted));
        // Nothing is moved there before; the pod waits for the question.
        if !beside.answers_within(FIRST_ANSWER).await {
            info!(link = %beside.id, "the interactive link does not answer: sessions stay where they are");
            beside.close();
            return false;
        }
        busy.stand_beside(Some(beside.clone()));
        if wanted.is_closed() {
            busy.leave_beside(&beside);
        }
        let mut shared = Instant::now();
        let died = loop {
            tokio::select! {
                () = beside.closed() => break true,
                () = beside.falls_silent() => {
                    info!(link = %beside.id, "the interactive link has fallen silent: another one is made");
                    beside.close();
                    break true;
                }
                () = sleep(Sorting::EVERY) => {
                    let sorted = self.ground.table.sort(busy, sorting);
                    for parked in sorted.parked {
                        self.route.mend(parked, &self.ground.drain);
                    }
                    if sorted.bulk > 0 {
                        shared = Instant::now();
                    } else if shared.elapsed() >= UNSHARED {
                        break false;
                    }
                }
            }
        };
        drop(wanted);
        died
    }

    /// Serves an interactive link until it ends, or until it is not wanted any more, or its pod or the link that
    /// it stands beside goes: then its sessions go on over the node's current link.
    async fn serve_interactive(
        self: Arc<Self>,
        mut link: Link,
        busy: Arc<LinkSender>,
        mut unwanted: oneshot::Receiver<()>,
    ) {
        self.ground.metrics.links.inc();
        let why = loop {
            tokio::select! {
                event = link.next() => match event {
                    Ok(Event::Drain(_)) => break None,
                    Ok(event) => {
                        self.take(event);
                    }
                    Err(why) => break Some(why),
                },
                _ = &mut unwanted => break None,
            }
        };
        // Before the look at it that follows `stand_beside`.
        drop(unwanted);
        busy.leave_beside(&link.sender);
        match why {
            Some(why) => self.ended(&link, &why),
            None => self.hand_over(link, self.uplinks.any()).await,
        }
    }
}

/// Whether bulk holds up others on a way with that least round trip; not while that is not known.
fn is_long(least: Option<Duration>) -> bool {
    least.is_some_and(|trip| trip >= LONG)
}

/// On a way that is shorter than this, bulk does not hold up anything for long.
const LONG: Duration = Duration::from_millis(5);
/// How long a new interactive link has to show that both of its directions work.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Time in which every pod notices the death of a link: afterwards its sessions are on the busy link.
const NOTICED: Duration = Duration::from_secs(15);
/// The link is left once no bulk has moved for so long.
const UNSHARED: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_way_gets_no_interactive_link_and_neither_does_one_that_was_not_measured() {
        let trips = [None, Some(0), Some(4_999), Some(5_000), Some(600_000)];
        let long = trips.map(|trip| is_long(trip.map(Duration::from_micros)));
        assert_eq!(long, [false, false, false, true, true]);
    }
}
