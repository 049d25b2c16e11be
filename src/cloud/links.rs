//! The pod's side of links: connections let in, calls judged, links driven until they end.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_rustls::rustls::ServerConfig;
use tracing::{debug, debug_span, field, info, info_span, warn};

use crate::cloud::callers::{CONNECTIONS, Callers};
use crate::cloud::context::PodContext;
use crate::cloud::drive::{make_way, move_from, run};
use crate::cloud::enrol;
use crate::cloud::interactive;
use crate::cloud::proven::Evidence;
use crate::cloud::unshaken::Unshaken;
use crate::names::Instance;
use crate::net::door::{Door, Limits};
use crate::net::entrance::Entrance;
use crate::net::listen::Listener;
use crate::net::reload::Reload;
use crate::net::tls::{Acceptor, HANDSHAKES};
use crate::policy::Networks;
use crate::protocol::grpc::{Arrival, Call, Dismissal};
use crate::protocol::{Caller, Hello, Link, LinkSender, Older};
use crate::registry::Linked;

/// Serves links until the pod stops: those that callers open at the listener (balancers in the networks send a PROXY
/// header), and those that are `made` to other pods.
pub(super) fn spawn(
    listener: Listener,
    proxies: Networks,
    tls: Reload<ServerConfig>,
    made: Option<mpsc::Receiver<Link>>,
    shared: PodContext,
) {
    let links = shared.ground.drain.clone();
    if let Some(made) = made {
        links.spawn(info_span!("siblings"), drive(made, shared.clone()));
    }
    let (arrivals, arrived) = mpsc::channel(HANDSHAKES);
    links.spawn(info_span!("calls"), admit_all(arrived, shared.clone()));
    let metrics = &shared.ground.metrics;
    let door = Door::new(Limits::slots(CONNECTIONS));
    let (refused, refusals) = (metrics.calls_refused.clone(), metrics.refusals.clone());
    let entrance = Entrance { listener, door, proxies, refused, refusals };
    let handshakes = Acceptor::new(tls, shared.pool.clone(), CONNECTIONS);
    let unshaken = Unshaken::default();
    links.spawn(info_span!("handshakes"), unshaken.clone().sum_up(links.clone()));
    let handler = Arc::new(Callers { arrivals, handshakes, unshaken, shared });
    links.spawn(info_span!("grpc"), entrance.run(handler, links.clone()));
}

/// Accepts or refuses calls, each in a task of its own, as pinging an older link takes a while.
async fn admit_all(mut arrivals: mpsc::Receiver<Arrival>, shared: PodContext) {
    let links = shared.ground.drain.clone();
    loop {
        let arrival = tokio::select! {
            biased;
            () = links.draining() => return,
            arrival = arrivals.recv() => arrival,
        };
        let call = match arrival {
            None => return,
            Some(Arrival::Call(call)) => *call,
            Some(Arrival::Petition(petition)) => {
                let span = info_span!("petition", from = %petition.from);
                links.spawn(span, enrol::judge(petition, shared.clone()));
                continue;
            }
        };
        let (span, shared) = match &call.caller {
            // As with the connection's: there are thousands of them.
            Caller::Edge(hello) => {
                (debug_span!("link", node = %hello.node, from = %call.from), shared.clone())
            }
            Caller::Pod { .. } => (info_span!("link", pod = %call.from), shared.clone()),
        };
        links.spawn(span, admit(call, shared));
    }
}

async fn admit(call: Call, shared: PodContext) {
    match call.caller.clone() {
        Caller::Edge(hello) => admit_edge(call, hello, shared).await,
        Caller::Pod { instance, beside, .. } => admit_pod(call, instance, beside, shared).await,
    }
}

async fn admit_edge(call: Call, hello: Hello, shared: PodContext) {
    let refused = &shared.ground.metrics.calls_refused;
    let evidence = Evidence { hello: hello.clone(), agent: call.agent.clone() };
    if let Err(why) = shared.proven.judge(&evidence).await {
        refused.count("token");
        if shared.ground.metrics.refusals.may_log("token", call.from.ip()) {
            warn!(node = %hello.node, from = %call.from, "refused: {why}");
        }
        shared.registry.refused(&hello.node, &why.to_string());
        return call.refuse(Dismissal::Token);
    }
    if shared.stopping.is_cancelled() {
        refused.count("stopping");
        return call.refuse(Dismissal::Stopping);
    }
    if let Err(taken) = shared.registry.admit(&hello.node, hello.instance, call.from).await {
        refused.count("name_taken");
        debug!(%taken, "refused");
        shared
            .registry
            .refused(&hello.node, &format!("another process came as this node, from {}", call.from));
        return call.refuse(Dismissal::NameTaken(taken.to_string()));
    }
    let from = call.from;
    let ips: Arc<[_]> = hello.ips.iter().copied().collect();
    let linked = |sender: &Arc<LinkSender>| Linked {
        sender: sender.clone(),
        instance: hello.instance,
        from,
        ips: ips.clone(),
    };
    if hello.older == Older::Busy {
        return interactive::admit(call, linked, &evidence, &shared).await;
    }
    let link = call.accept();
    let sender = link.sender.clone();
    let edge = hello.instance.map(field::debug);
    info!(link = %sender.id, node = %hello.node, %from, edge, dialect = %hello.dialect, "node is linked");
    shared.proven.begin(&sender, &evidence);
    if let Some(silent) = shared.registry.insert(linked(&sender), hello.older == Older::Silent) {
        // The other one may be as silent.
        if let Some(beside) = silent.stand_beside(None) {
            move_from(&beside, &shared);
        }
        move_from(&silent, &shared);
    }
    shared.finder.gained(&hello.node);
    make_way(shared.ground.table.instance(), hello.node.clone(), None, &shared);
    if shared.stopping.is_cancelled() {
        sender.drain(None);
    }
    let why = run(link, &shared).await;
    shared.registry.ended(&sender, &why.to_string());
    shared.finder.lost(&hello.node);
    shared.proven.end(&sender);
}

async fn admit_pod(call: Call, instance: Instance, beside: bool, shared: PodContext) {
    if instance == shared.ground.table.instance() {
        return call.refuse(Dismissal::Itself);
    }
    let link = call.accept();
    let sender = link.sender.clone();
    info!(link = %sender.id, pod = ?instance, "another pod has linked");
    if let Some(siblings) = &shared.siblings {
        for silent in siblings.joined(&sender, beside) {
            move_from(&silent, &shared);
        }
    }
    run(link, &shared).await;
    if let Some(siblings) = &shared.siblings {
        siblings.left(&sender);
    }
}

/// Drives the links that this pod has dialled to other pods.
async fn drive(mut made: mpsc::Receiver<Link>, shared: PodContext) {
    let links = shared.ground.drain.clone();
    loop {
        let link = tokio::select! {
            biased;
            () = links.draining() => return,
            link = made.recv() => link,
        };
        let Some(link) = link else { return };
        let (span, shared) =
            (info_span!("link", pod = link.sender.instance.map(field::debug)), shared.clone());
        links.spawn(span, async move { drop(run(link, &shared).await) });
    }
}
