//! The server's side of links that an edge makes in addition to its primary one: interactive ones, next to one that is busy
//! with bulk data, and those for sessions to nodes that only this server finds.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval};
use tracing::field;

use crate::registry::LinkedNode;
use crate::server::ServerContext;
use crate::server::edge_links::EdgeCredentials;
use crate::server::link_denial::LinkDenial;
use crate::server::link_events::{
    MAX_SEARCHES_PER_EDGE, end_link, handle_event, leave_link, may_log, run_link,
};
use tunnel_base::limited;
use tunnel_link::grpc::accept::{CallRejection, LinkCall};
use tunnel_link::grpc::link_end::LinkEnd;
use tunnel_link::link::Link;
use tunnel_link::link_reader::LinkReader;
use tunnel_link::table::FrameEvent;
use tunnel_link::table::traffic_class::TrafficClassifier;
use tunnel_proto::frame::{Frame, FrameKind, Remote};
use tunnel_proto::hello::LinkPurpose;

/// Serves a link of an edge whose node is not found by it, until it ends: one for sessions that the edge opens here, or an
/// interactive one, which shares the sessions of the node's primary link. An interactive one of a node that is not linked
/// to this server is refused, which happens with a balancer.
pub(crate) async fn admit_secondary(
    call: Box<LinkCall>,
    linked: impl Fn(&Arc<Link>) -> LinkedNode,
    credentials: &EdgeCredentials,
    shared: &Arc<ServerContext>,
) {
    let hello = &credentials.hello;
    let is_interactive = hello.purpose == LinkPurpose::Interactive;
    if is_interactive && !shared.registry.may_add_interactive(&hello.node, hello.instance) {
        let denial = LinkDenial::new("no_primary_link", CallRejection::NoPrimaryLink);
        return denial.send(call, shared).await;
    }
    let mut reader = call.accept(Remote::Edge(hello.node.clone()));
    let link = reader.link.clone();
    let busy = shared.registry.add_secondary(linked(&link), is_interactive);
    // The primary link may have ended since the check.
    if is_interactive && busy.is_none() {
        return;
    }
    shared.edge_links.track(&link, credentials);
    limited!(
        may_log(&link, "secondary_linked", shared) => info,
        link = %link.id, node = %hello.node, primary = busy.as_ref().map(|busy| field::display(busy.id)),
        is_interactive, "secondary link accepted"
    );
    if shared.stopping.is_cancelled() {
        link.drain();
    }
    match busy {
        Some(busy) => run_interactive(&mut reader, &busy, shared).await,
        None => drop(run_link(&mut reader, shared).await),
    }
    shared.registry.remove(&link);
    shared.edge_links.untrack(&link);
}

async fn run_interactive(reader: &mut LinkReader, busy: &Arc<Link>, shared: &Arc<ServerContext>) {
    reader.begin();
    let room = Arc::new(Semaphore::new(MAX_SEARCHES_PER_EDGE));
    let link = reader.link.clone();
    let mut sorting = TrafficClassifier::default();
    let mut looks = interval(TrafficClassifier::SAMPLE_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Nothing is moved there before its edge has sent something: a line may pass the hello and nothing more.
    let mut is_new = true;
    let why = loop {
        tokio::select! {
            event = reader.next() => match event {
                Ok(FrameEvent::Signal(Frame { body: FrameKind::Drain(_), .. })) => {
                    // The edge returns the sessions that it opened. Those that this server opened or relays must return
                    // as well.
                    is_new = false;
                    busy.clear_interactive(&link);
                    leave_link(&link, shared);
                }
                Ok(event) => handle_event(event, &link, &room, shared),
                Err(why) => break why,
            },
            () = link.wait_unresponsive() => {
                limited!(
                    may_log(&link, "interactive_unresponsive", shared) => info,
                    link = %link.id, "unresponsive interactive link closed"
                );
                break LinkEnd::ClosedLocally;
            }
            _ = looks.tick() => {
                if is_new && link.traffic().received_messages > 0 && !link.is_closed() {
                    is_new = false;
                    busy.set_interactive(Some(link.clone()));
                }
                shared.link_context.table.classify(busy, &mut sorting);
            }
        }
    };
    // Before the end is handled, so that no session moves to a link that has ended.
    busy.clear_interactive(&link);
    end_link(reader, &why, shared);
}
