//! The pod's side of an interactive link, which an edge makes beside its link that is busy with bulk.

use std::sync::Arc;

use tokio::time::{MissedTickBehavior, interval};
use tracing::info;

use crate::cloud::context::PodContext;
use crate::cloud::drive::{ended, move_from, room, take};
use crate::cloud::proven::Evidence;
use crate::protocol::grpc::{Call, Dismissal};
use crate::protocol::{Event, Link, LinkEnded, LinkSender, Sorting};
use crate::registry::Linked;

/// Puts the link beside its node's current one, and sorts the sessions of both until it ends. A node that is not linked to
/// this pod, as behind a balancer, is refused.
pub(super) async fn admit(
    call: Call,
    linked: impl Fn(&Arc<LinkSender>) -> Linked,
    evidence: &Evidence,
    shared: &PodContext,
) {
    let hello = &evidence.hello;
    if !shared.registry.may_stand_beside(&hello.node, hello.instance) {
        shared.ground.metrics.calls_refused.count("not_beside");
        return call.refuse(Dismissal::NotBeside);
    }
    let link = call.accept();
    let sender = link.sender.clone();
    let Some(busy) = shared.registry.stand_beside(linked(&sender)) else { return };
    shared.proven.begin(&sender, evidence);
    info!(link = %sender.id, node = %hello.node, beside = %busy.id, "an interactive link");
    if shared.stopping.is_cancelled() {
        sender.drain(None);
    }
    run(link, &busy, shared).await;
    shared.registry.remove(&sender);
    shared.proven.end(&sender);
}

async fn run(mut link: Link, busy: &Arc<LinkSender>, shared: &PodContext) {
    shared.ground.metrics.links.inc();
    let room = room(shared);
    // The edge watches the link too, but cannot tell this pod that it is dead: its next try may come to another pod.
    link.watch();
    let sender = link.sender.clone();
    let (mut sorting, mut looks) = (Sorting::default(), interval(Sorting::EVERY));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Nothing is moved there before its edge has said something: a line may pass the hello and nothing more.
    let mut is_new = true;
    let why = loop {
        tokio::select! {
            event = link.next() => match event {
                Ok(Event::Drain(_)) => {
                    is_new = false;
                    busy.leave_beside(&sender);
                    move_from(&sender, shared);
                }
                Ok(event) => take(event, &sender, &room, shared),
                Err(why) => break why,
            },
            () = sender.falls_silent() => {
                info!(link = %sender.id, "the interactive link has fallen silent: it is closed");
                break LinkEnded::ClosedHere;
            }
            _ = looks.tick() => {
                if is_new && sender.traffic().received_messages > 0 && !sender.is_closed() {
                    is_new = false;
                    busy.stand_beside(Some(sender.clone()));
                }
                for parked in shared.ground.table.sort(busy, &mut sorting).parked {
                    shared.route.mend(parked, &shared.ground.drain);
                }
            }
        }
    };
    busy.leave_beside(&sender);
    ended(&link, &why, shared);
}
