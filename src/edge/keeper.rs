//! Keeps the edge linked: dials the cloud, serves the link, and dials again.

mod interactive;
mod network;
mod replaced;

use std::sync::{Arc, Once};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, field, info, info_span, warn};

use super::link_dialer::{AddressHint, LinkDialer, NewLink, is_name_taken};
use super::{LINK, NAME};
use crate::admin::Readiness;
use crate::backend::Backend;
use crate::drain::Drain;
use crate::net::backoff::{Backoff, MAX_PAUSE};
use crate::protocol::grpc::LinkContext;
use crate::protocol::{Code, Event, Link, LinkEnded, Older, Refusal, SecondLink};
use crate::registry::Uplinks;
use crate::route::Route;

/// What the keeper of the link needs.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) dialer: LinkDialer,
    pub(super) ground: LinkContext,
    pub(super) backend: Backend,
    pub(super) sessions: Drain,
    pub(super) readiness: Readiness,
    pub(super) uplinks: Arc<Uplinks>,
    pub(super) route: Route,
    /// Notified when there is a reason to dial at once: a link that was replaced has ended, the network has changed, or a
    /// certificate was issued.
    pub(super) freed: Notify,
    /// Done once the start is over.
    pub(super) started: Once,
}

/// Why a link is not the edge's newest any more.
enum LinkOutcome {
    /// It has ended.
    Ended,
    /// Its pod asks for another one in its place.
    Drained(AddressHint),
    /// There is one to a server that is wanted more.
    FailedBack(Box<NewLink>),
    /// It fell silent, and a second one beside it answered first.
    Outrun(Box<NewLink>),
}

impl Keeper {
    /// Dials the cloud, serves the link, and dials again, until the edge stops.
    pub(super) async fn keep(self: Arc<Self>) {
        let (mut backoff, mut second) = (Backoff::new(), SecondLink::new(self.ground.metrics.clone()));
        let mut said = Said::default();
        let links = self.ground.drain.clone();
        let mut changes = [self.dialer.tokens.changes(), self.dialer.tls.changes()];
        let (mut server, mut hint, mut made) = (0, AddressHint::default(), None);
        loop {
            if made.is_none() {
                let pause = backoff.pause(rand::random());
                tokio::select! {
                    () = links.draining() => return,
                    () = sleep(pause) => {}
                    () = self.reason_to_dial(&mut changes) => {
                        backoff = Backoff::new();
                        continue;
                    }
                }
            }
            let next = match made.take() {
                Some(made) => Ok(made),
                None => self.dialer.connect(server, hint).await,
            };
            match next {
                Ok(next) => {
                    said = Said::default();
                    server = next.server;
                    let begun = Instant::now();
                    let (outcome, carried) = self.run(next, &mut second).await;
                    (hint, made) = match outcome {
                        LinkOutcome::Ended => (AddressHint::default(), None),
                        LinkOutcome::Drained(hint) => (hint, None),
                        LinkOutcome::FailedBack(made) | LinkOutcome::Outrun(made) => {
                            (AddressHint::default(), Some(*made))
                        }
                    };
                    backoff.ended(begun.elapsed(), carried);
                }
                Err(why) => {
                    let text = format!("{why:#}");
                    if !self.uplinks.is_linked() {
                        self.readiness.set(LINK, Err(text.clone()));
                    }
                    if said.is_new(&text) {
                        warn!(error = %text, "cannot link to the cloud; trying again, with pauses that grow to {MAX_PAUSE:?}");
                    }
                    if self.dialer.is_refused(&why) {
                        backoff.refused();
                    }
                    if is_name_taken(&why) {
                        self.leave_name().await;
                    }
                }
            }
            self.ground.metrics.reconnects.inc();
        }
    }

    /// Notes the state of this edge's certificate. A new one is a reason to dial at once.
    pub(super) fn certified(&self, condition: &'static str, state: Result<(), String>) {
        if state.is_ok() && !self.uplinks.is_linked() {
            self.freed.notify_one();
        }
        self.readiness.note(condition, state);
    }

    /// Waits for a reason to dial at once: a pod is gone for good, so what takes its place is there, or about to be; or a
    /// token or the authority has changed, which may have kept the link from coming. Cancel safe.
    async fn reason_to_dial(&self, [tokens, authority]: &mut [watch::Receiver<()>; 2]) {
        tokio::select! {
            () = self.freed.notified() => {}
            _ = tokens.changed() => {}
            _ = authority.changed() => {}
        }
    }

    /// Serves a link until it ends or is to be replaced. With whether it carried a session.
    async fn run(self: &Arc<Self>, made: NewLink, second: &mut SecondLink) -> (LinkOutcome, bool) {
        let NewLink { mut link, server, at } = made;
        let pod = link.sender.instance.map(field::debug);
        info!(link = %link.sender.id, cloud = self.dialer.named(server), pod, dialect = %link.sender.dialect, "linked");
        self.readiness.set(LINK, Ok(()));
        self.ground.metrics.links.inc();
        self.uplinks.add(link.sender.clone());
        self.started.call_once(give_back);
        let mut fail_back = Box::pin(self.fail_back(server));
        // The same pod, if it can be reached: there sessions go on at once.
        let hint = AddressHint { to: at, not: None };
        let sender = link.sender.clone();
        let mut outrun =
            Box::pin(second.beside(&sender, || self.dialer.connect_to(server, hint, Older::Silent)));
        let mut interactive = Box::pin(self.keep_interactive(&sender, server, at));
        let why = loop {
            let outcome = tokio::select! {
                biased;
                event = link.next() => match event {
                    Ok(Event::Drain(to)) => {
                        info!("the pod asks for a link to another one in its place");
                        LinkOutcome::Drained(AddressHint { to, not: at })
                    }
                    Ok(event) => {
                        self.take(event);
                        continue;
                    }
                    Err(why) => break why,
                },
                made = &mut fail_back => {
                    info!(cloud = self.dialer.named(made.server), "the cloud answers again where it is wanted more");
                    LinkOutcome::FailedBack(Box::new(made))
                }
                made = &mut outrun => LinkOutcome::Outrun(Box::new(made)),
                () = &mut interactive => continue,
            };
            let keeper = self.clone();
            let span = info_span!("old link", pod = link.sender.instance.map(field::debug));
            let carried = link.sender.has_carried();
            let is_outrun = matches!(outcome, LinkOutcome::Outrun(_));
            self.ground.drain.spawn(span, async move {
                let next = keeper.uplinks.newer(link.sender.id);
                if is_outrun { keeper.give_up(link).await } else { keeper.hand_over(link, next).await }
            });
            return (outcome, carried);
        };
        let carried = link.sender.has_carried();
        self.ended(&link, &why);
        if let LinkEnded::NameTaken(why) = why {
            warn!("{why}");
            self.leave_name().await;
        }
        (LinkOutcome::Ended, carried)
    }

    /// A link to a server that is wanted more than number `server`, once one of them answers; never for the first.
    async fn fail_back(&self, server: usize) -> NewLink {
        if server == 0 {
            std::future::pending::<()>().await;
        }
        loop {
            sleep(FAIL_BACK_EVERY.mul_f64(0.5 + rand::random::<f64>())).await;
            for wanted in 0..server {
                match self.dialer.connect_to(wanted, AddressHint::default(), Older::Closed).await {
                    Ok(made) => return made,
                    Err(why) => {
                        debug!(cloud = self.dialer.named(wanted), error = %format_args!("{why:#}"), "still away")
                    }
                }
            }
        }
    }

    /// Another process of our name is alive: dialling soon again is of no use.
    async fn leave_name(&self) {
        tokio::select! {
            () = self.ground.drain.draining() => {}
            () = sleep(NAME_TAKEN) => {}
        }
    }

    /// Does what a link asks for.
    fn take(&self, event: Event) {
        match event {
            Event::Offer(offer) if self.sessions.is_draining() => {
                offer.refuse(Refusal::new(Code::Busy, "the edge is stopping"));
            }
            Event::Offer(offer) => self.backend.take(offer),
            Event::Parked(parked) => self.route.mend(parked, &self.ground.drain),
            Event::Conflict(_, said) => {
                self.readiness.note_until(NAME, said.reason, Instant::now() + CONFLICT);
            }
            // A cloud sends an edge none of these, and a second Drain changes nothing.
            Event::RelayRequest(_)
            | Event::Find(..)
            | Event::Found(..)
            | Event::Drain(_)
            | Event::Load(_) => {}
        }
    }

    fn ended(&self, link: &Link, why: &LinkEnded) {
        self.uplinks.remove(&link.sender);
        if !self.uplinks.is_linked() {
            self.readiness.set(LINK, Err(format!("{why}; dialling again")));
        }
        self.ground.metrics.links.dec();
        self.ground.metrics.links_ended.count(why.name());
        for parked in link.end(why) {
            self.route.mend(parked, &self.ground.drain);
        }
        info!(link = %link.sender.id, %why, "link has ended");
    }
}

/// Lets go of what only the start needed, or what was needed for a while. An edge is a small machine, and does nothing most
/// of the time.
pub(super) fn give_back() {
    let _ = (tunnel_pages::trim_heap(), tunnel_pages::forget_stack());
    match tunnel_pages::forget_program() {
        Ok(tunnel_pages::Forgotten { bytes, alone }) => {
            debug!(bytes, alone, "the program's pages are forgotten until they are used again");
        }
        Err(cause) => debug!(%cause, "what is mapped cannot be read, and stays"),
    }
}

/// The errors that were logged last, without times: how long an address is waited for depends on which are tried before
/// it. Two, as tries with a certificate and without may fail by turns.
#[derive(Debug, Default)]
struct Said([String; 2]);

impl Said {
    /// Whether it was not just logged; notes that it is now.
    fn is_new(&mut self, text: &str) -> bool {
        let untimed: Vec<_> = text.split(' ').filter(|word| !is_time(word)).collect();
        let untimed = untimed.join(" ");
        if self.0.contains(&untimed) {
            return false;
        }
        self.0 = [untimed, std::mem::take(&mut self.0[0])];
        true
    }
}

/// Whether it is a time in seconds or milliseconds, as messages have them.
fn is_time(word: &str) -> bool {
    let word = word.trim_end_matches([',', ';', ':']);
    let number = word.strip_suffix("ms").or_else(|| word.strip_suffix('s'));
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

/// Between two tries at servers that are wanted more than the one that is linked to; half of it is chance.
const FAIL_BACK_EVERY: Duration = Duration::from_secs(60);
/// How long to wait when another machine of our name is alive.
const NAME_TAKEN: Duration = Duration::from_secs(30);
/// How long a conflict over our name is shown: the other machine comes again within [`NAME_TAKEN`], if it is still
/// there.
const CONFLICT: Duration = Duration::from_secs(90);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_trouble_is_logged_once_however_long_each_address_was_waited_for() {
        let mut said = Said::default();
        let told = |time: &str| {
            format!("10.0.0.1:9000 did not answer within {time}; 10.0.0.2:9000 refused the connection")
        };
        assert!(said.is_new(&told("10s")));
        assert!(!said.is_new(&told("5s")) && !said.is_new(&told("3.334s")) && !said.is_new(&told("900ms")));
        assert!(said.is_new("10.0.0.1:9000 refused the connection"));
        assert!(!said.is_new(&told("2s")), "by turns");
        assert!(said.is_new("the TLS handshake took too long") && said.is_new("it was 502"));
        assert!(said.is_new(&told("10s")) && said.is_new("it was 503"), "numbers count");
    }
}
