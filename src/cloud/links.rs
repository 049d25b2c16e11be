//! The pod's side of links: connections let in, calls judged, links driven until they end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tracing::{debug, error, info, info_span, warn};

use crate::drain::Drain;
use crate::net::listen::{Listener, tune_link};
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::policy::tokens::Tokens;
use crate::registry::{Linked, Registry};
use crate::route::Route;
use crate::tunnel::grpc::{Call, Dismissal, Ground, Waiting, serve};
use crate::tunnel::{Code, Event, Link, Parked, Refusal};

/// What the tasks of a pod share.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) tokens: Reload<Tokens>,
    pub(super) registry: Arc<Registry>,
    pub(super) route: Route,
    pub(super) ground: Ground,
    pub(super) pool: Pool,
    pub(super) clients: Drain,
}

/// Serves links until the pod stops.
pub(super) fn spawn(listener: Listener, tls: Reload<ServerConfig>, shared: Shared) {
    let links = shared.ground.drain.clone();
    let (calls, called) = mpsc::channel(MOST_WAITING);
    links.spawn(info_span!("calls"), admit_calls(called, shared.clone()));
    links.spawn(info_span!("grpc"), accept(listener, tls, calls, shared));
}

/// Takes connections, lets each do its TLS handshake in a task of its own, and hands it to the gRPC layer.
async fn accept(listener: Listener, tls: Reload<ServerConfig>, calls: mpsc::Sender<Call>, shared: Shared) {
    let links = shared.ground.drain.clone();
    let places = Arc::new(Semaphore::new(MOST_WAITING));
    loop {
        // Who finds no place waits in the kernel. Sent away, thousands of edges that come back at once would only dial
        // again, later.
        let next = async { (places.clone().acquire_owned().await, listener.accept().await) };
        let (place, (socket, from)) = tokio::select! {
            biased;
            () = links.draining() => return,
            next = next => next,
        };
        // Fails only if the places were closed, which nobody does.
        let Ok(place) = place else { return };
        let tls = TlsAcceptor::from(tls.load());
        links.spawn(
            info_span!("link", %from),
            encrypted(socket, from, tls, place, calls.clone(), shared.clone()),
        );
    }
}

async fn encrypted(
    socket: TcpStream,
    from: SocketAddr,
    tls: TlsAcceptor,
    place: OwnedSemaphorePermit,
    calls: mpsc::Sender<Call>,
    shared: Shared,
) {
    let until = Instant::now() + LET_IN;
    if let Err(e) = tune_link(&socket) {
        return debug!(error = %e, "connection was gone at once");
    }
    // Boxed, so that a link does not keep the handshake's room.
    let handshake = Box::pin(tls.accept(Buffered::new(socket, shared.pool.clone())));
    let io = match timeout_at(until, handshake).await {
        Ok(Ok(io)) => io,
        Ok(Err(e)) => {
            shared.ground.metrics.calls_refused.count("tls");
            return debug!(error = %e, "TLS handshake failed");
        }
        Err(_) => {
            shared.ground.metrics.calls_refused.count("tls_too_slow");
            return debug!("TLS handshake took too long");
        }
    };
    serve(io, from, calls, shared.ground, Waiting { until, place }).await;
}

/// Lets callers in or sends them away, each in a task of its own, as asking an old link takes a while.
async fn admit_calls(mut calls: mpsc::Receiver<Call>, shared: Shared) {
    let links = shared.ground.drain.clone();
    loop {
        let call = tokio::select! {
            biased;
            () = links.draining() => return,
            call = calls.recv() => call,
        };
        let Some(call) = call else { return };
        let span = info_span!("link", node = %call.hello.node, from = %call.from);
        links.spawn(span, admit(call, shared.clone()));
    }
}

async fn admit(call: Call, shared: Shared) {
    let refused = &shared.ground.metrics.calls_refused;
    if !shared.tokens.load().prove(&call.hello.node, &call.hello.token) {
        refused.count("token");
        warn!("refused: invalid token");
        return call.refuse(Dismissal::Token);
    }
    if shared.clients.is_draining() {
        refused.count("stopping");
        return call.refuse(Dismissal::Stopping);
    }
    if let Err(taken) = shared.registry.admit(&call.hello.node, call.hello.instance).await {
        refused.count("name_taken");
        error!(%taken, "refused");
        return call.refuse(Dismissal::NameTaken(taken.to_string()));
    }
    let (from, instance, dialect) = (call.from, call.hello.instance, call.hello.dialect);
    let link = call.accept();
    info!(?dialect, "node is linked");
    let outbox = link.outbox.clone();
    shared.registry.insert(Linked { outbox: outbox.clone(), instance, from });
    run(link, &shared).await;
    shared.registry.remove(&outbox);
}

/// Drives a link until it ends, then looks for new paths for its sessions.
async fn run(mut link: Link, shared: &Shared) {
    let links = &shared.ground.metrics.links;
    links.inc();
    let why = loop {
        match link.next().await {
            Ok(Event::Offer(offer)) => {
                let why = format!("edges may not reach {} through this pod", offer.target());
                offer.refuse(Refusal::new(Code::NotAllowed, why));
            }
            Ok(Event::Parked(parked)) => seek(parked, shared),
            Ok(Event::Asked(asked)) => asked
                .refuse(Refusal::new(Code::NotAllowed, "edges may not reach other nodes through this pod")),
            Ok(Event::Find(..) | Event::Found(..) | Event::Drain) => {}
            Err(why) => break why,
        }
    };
    links.dec();
    shared.ground.metrics.links_ended.count(why.name());
    let parked = link.end(&why);
    info!(%why, sessions = parked.len(), "link has ended");
    for parked in parked {
        seek(parked, shared);
    }
}

fn seek(parked: Parked, shared: &Shared) {
    let route = shared.route.clone();
    let span = info_span!("seek", session = %parked.id());
    shared.ground.drain.spawn(span, async move { route.seek(parked).await });
}

/// Connections that were not let in yet, and calls that wait to be looked at.
const MOST_WAITING: usize = 1000;
/// From the connection to an accepted call.
const LET_IN: Duration = Duration::from_secs(10);
