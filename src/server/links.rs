//! The server's side of links: connections are accepted, calls authorized, and links driven until they end.

use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{Instrument as _, Span, debug, debug_span, field, info_span};

use crate::invitations::invitee::Invitee;
use crate::registry::LinkedNode;
use crate::server::edge_links::{
    EdgeAuthenticator, EdgeCredentials, MAX_RESET_FLUSH, POLL_INTERVAL, close_links,
};
use crate::server::interactive_links::admit_secondary;
use crate::server::link_denial::LinkDenial;
use crate::server::link_events::{leave_link, on_node_moved, run_link};
use crate::server::{ServerContext, invitations, user_links};
use tunnel_base::limited;
use tunnel_base::metrics::{Door, Metrics};
use tunnel_base::policy::Networks;
use tunnel_link::grpc::accept::{
    CallRejection, CallerCertificate, IncomingCall, LinkCall, PendingConnection, serve,
};
use tunnel_link::link::Link;
use tunnel_net::accept_loop::{self, AcceptSettings, Accepted, ConnectionHandler, ConnectionRejection};
use tunnel_net::limiter::Source;
use tunnel_net::listen::{TcpListenSocket, tune_link};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::handshake::{MAX_HANDSHAKES, TlsAcceptError, TlsAccepted, TlsHandshaker};
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::{EdgeHello, LinkCaller, LinkPurpose, UserHello};
use tunnel_proto::names::{Instance, UserDevice};

/// Serves the links that callers open at the listener, until the server stops. Load balancers in the networks of `proxies` send a PROXY header, those in `http_proxies` X-Forwarded-For.
pub(crate) fn spawn(
    listener: TcpListenSocket,
    proxies: Networks,
    http_proxies: Networks,
    shared: Arc<ServerContext>,
) {
    let links = shared.link_context.drain.clone();
    let (arrivals, arrived) = mpsc::channel(MAX_HANDSHAKES);
    links.spawn(info_span!("calls"), accept_calls(arrived, shared.clone()));
    let clients = &shared.clients;
    let limiter = clients.pending.waiting.clone();
    let metrics = shared.link_context.metrics.clone();
    let limits = AcceptSettings { limiter, proxies, metrics, door: Door::Links, for_operators: false };
    let handshakes =
        TlsHandshaker::new(shared.tls.clone(), clients.pool.clone(), clients.pending.handshakes.clone());
    let handler = LinkConnectionHandler { arrivals, handshakes, http_proxies, shared };
    links.spawn(info_span!("grpc"), accept_loop::run(listener, limits, handler, links.clone()));
}

/// Accepts or refuses calls, each in its own task, because pinging an older link takes a while.
async fn accept_calls(mut arrivals: mpsc::Receiver<IncomingCall>, shared: Arc<ServerContext>) {
    let links = shared.link_context.drain.clone();
    while let Some(Some(arrival)) = links.run_until(arrivals.recv()).await {
        let call = match arrival {
            IncomingCall::Link(call) => call,
            IncomingCall::Enrol(enrol_request) => {
                invitations::spawn(enrol_request, shared.clone());
                continue;
            }
        };
        let span = match &call.caller {
            // Only for debugging, like the span of the connection: there are thousands of edges.
            LinkCaller::Edge(hello) => debug_span!("link", node = %hello.node, remote_addr = %call.from),
            LinkCaller::User(hello) => {
                debug_span!("link", device = %hello.device, remote_addr = %call.from)
            }
            LinkCaller::Peer { .. } => info_span!("link", peer = %call.from),
        };
        links.spawn(span, admit_call(call, shared.clone()));
    }
}

/// Serves a call until its link ends. The links of ten thousand edges each keep this future, so what is rare is boxed.
async fn admit_call(call: Box<LinkCall>, shared: Arc<ServerContext>) {
    match call.caller.clone() {
        LinkCaller::Edge(hello) => admit_edge(call, hello, shared).await,
        LinkCaller::User(hello) => Box::pin(admit_user(call, hello, shared)).await,
        LinkCaller::Peer { instance, backup: is_backup, .. } => {
            Box::pin(admit_peer(call, instance, is_backup, shared)).await
        }
    }
}

async fn admit_edge(call: Box<LinkCall>, hello: EdgeHello, shared: Arc<ServerContext>) {
    let certificate_node =
        if let CallerCertificate::Edge(node) = &call.certificate { node.clone() } else { None };
    let mut credentials = EdgeCredentials { hello: hello.clone(), certificate_node, pod: None };
    if let Err(denial) = Box::pin(check_edge(&mut credentials, call.from, &shared)).await {
        return Box::pin(denial.send(call, &shared)).await;
    }
    let from = call.from;
    let linked = |link: &Arc<Link>| LinkedNode { link: link.clone(), from };
    // Nothing below applies to these links: their node is neither found nor announced by them.
    if matches!(hello.purpose, LinkPurpose::Interactive | LinkPurpose::Opener) {
        return Box::pin(admit_secondary(call, linked, &credentials, &shared)).await;
    }
    let mut reader = call.accept(Remote::Edge(hello.node.clone()));
    let link = reader.link.clone();
    let edge = hello.instance.map(field::debug);
    let refusals = &shared.link_context.metrics.refusals;
    limited!(
        refusals.may_log_about("node_linked", &hello.node) => info,
        link = %link.id, node = %hello.node, remote_addr = %from, edge, dialect = link.generation(),
        websocket = link.websocket(), "node is linked"
    );
    // The sessions of an unresponsive link move at once. The edge's choice between the links would come an RTT later.
    if let Some(silent) = shared.registry.insert(linked(&link), hello.purpose == LinkPurpose::Backup) {
        // The interactive link may also be unresponsive.
        if let Some(interactive_link) = silent.set_interactive(None) {
            leave_link(&interactive_link, &shared);
        }
        leave_link(&silent, &shared);
    }
    // Tracked before the node is announced, so that the link cannot outlive its token.
    shared.edge_links.track(&link, &credentials);
    shared.edge_links.end_previous_token(&hello, &shared.link_context.drain);
    let _linked = shared.enrolment.get().map(|all| all.linked(Invitee::Node(hello.node.clone()).key()));
    shared.finder.on_linked(&hello.node);
    on_node_moved(shared.link_context.table.instance(), hello.node.clone(), None, &shared);
    // The server may have begun to stop during the checks, and has sent Drain to the links of that moment.
    if shared.stopping.is_cancelled() {
        link.drain();
    }
    let why = run_link(&mut reader, &shared).await;
    shared.registry.ended(&link, &why.to_string());
    shared.finder.on_unlinked(&hello.node);
    shared.edge_links.untrack(&link);
}

async fn admit_user(call: Box<LinkCall>, hello: UserHello, shared: Arc<ServerContext>) {
    let (user, _permit) = match user_links::authenticate(&call, &hello, &shared).await {
        Ok(admitted) => admitted,
        Err(denial) => return denial.send(call, &shared).await,
    };
    let mut reader = call.accept(Remote::User(user.device.clone()));
    let users = &shared.user_links;
    let link = reader.link.clone();
    // Only for debugging: each command of a user has a link. The access log has her sessions.
    debug!(link = %link.id, user = %user.device, remote_addr = %user.from, "user is linked");
    users.add(&link, &user, &hello);
    let _linked = shared.enrolment.get().map(|all| all.linked(user.device.to_string()));
    if shared.stopping.is_cancelled() {
        link.drain();
    }
    let mut running = pin!(run_link(&mut reader, &shared));
    tokio::select! {
        _ = &mut running => {}
        why = user_links::revoked(&user, &shared) => {
            let UserDevice { user: name, device } = &user.device;
            limited!(
                shared.link_context.metrics.refusals.may_log_about("user_revoked", name) => info,
                link = %link.id, user = %name, %device, reason = why, "link ended: user revoked"
            );
            // Before the sessions are reset, so that no new one takes their place.
            users.remove(&link);
            let closing = async {
                // The answer to the request that has revoked the device goes out first. Other sessions end on their own.
                let answering = async {
                    while user.leaves.load(Relaxed) && link.sessions() > 0 {
                        sleep(POLL_INTERVAL).await;
                    }
                };
                let _ = timeout(MAX_RESET_FLUSH, answering).await;
                close_links(vec![(link.clone(), why)], shared.link_context.table.clone()).await;
            };
            let _ = tokio::join!(running, closing);
        }
    }
    users.remove(&link);
}

/// Checks whether an edge may link.
async fn check_edge(
    credentials: &mut EdgeCredentials,
    from: SocketAddr,
    shared: &Arc<ServerContext>,
) -> Result<(), LinkDenial> {
    let registry = &shared.registry;
    if let Err(why) = shared.edge_links.authenticate_caller(credentials, from.ip()).await {
        registry.refused(&credentials.hello.node, &why.to_string());
        return Err(LinkDenial::token(&why));
    }
    let EdgeHello { node, instance, .. } = &credentials.hello;
    if shared.stopping.is_cancelled() {
        return Err(LinkDenial::new("stopping", CallRejection::Stopping));
    }
    if let Err(taken) = registry.check_name(node, *instance, from).await {
        registry.refused(node, &format!("another process tried to link as this node from {from}"));
        // The process that is linked may have the node's previous token.
        shared.edge_links.end_previous_token(&credentials.hello, &shared.link_context.drain);
        let answer = CallRejection::NameTaken(taken.to_string());
        return Err(LinkDenial::new("name_in_use", answer).logged());
    }
    if !shared.link_rates.allows(node) {
        let answer = CallRejection::TooManyLinks { node: node.clone(), links: MAX_LINKS };
        registry.refused(node, &answer.to_string());
        return Err(LinkDenial::new("too_many_links", answer).logged());
    }
    // The last check, so that no other edge is admitted in between. A linked node may replace its link.
    if registry.link_of(node).is_none() { shared.check_room() } else { Ok(()) }
}

async fn admit_peer(call: Box<LinkCall>, instance: Instance, is_backup: bool, shared: Arc<ServerContext>) {
    // A balancer, or a list of peers with this server in it, leads back here.
    if instance == shared.link_context.table.instance() {
        return call.refuse(CallRejection::SelfDial);
    }
    let mut reader = call.accept(Remote::Peer);
    let link = reader.link.clone();
    let refusals = &shared.link_context.metrics.refusals;
    limited!(
        refusals.may_log_about("peer_linked", format_args!("{instance:?}")) => info,
        link = %link.id, peer = ?instance, "peer is linked"
    );
    let peers = shared.finder.first_peers();
    if let Some(peers) = peers {
        for silent in peers.add_incoming(&link, is_backup) {
            leave_link(&silent, &shared);
        }
    }
    run_link(&mut reader, &shared).await;
    if let Some(peers) = peers {
        peers.remove(&link);
    }
    shared.finder.peer_link_ended(&link);
}

/// The handler of connections to the gRPC port.
#[derive(Debug)]
pub(crate) struct LinkConnectionHandler {
    pub(crate) arrivals: mpsc::Sender<IncomingCall>,
    /// Limits concurrent handshakes and calls. When thousands of edges link again at once they queue here: a rejected
    /// edge would only dial again later.
    pub(crate) handshakes: TlsHandshaker,
    /// The networks of proxies that name the client in X-Forwarded-For.
    pub(crate) http_proxies: Networks,
    pub(crate) shared: Arc<ServerContext>,
}

impl ConnectionHandler for LinkConnectionHandler {
    /// Only for debugging: a span costs memory and time while the link lives, which may be idle for days.
    fn span(&self, from: SocketAddr) -> Span {
        debug_span!("link", remote_addr = %from)
    }

    /// While the server stops, edges are refused before they cost a TLS handshake. Peers may still reach its sessions.
    fn admits(&self, from: SocketAddr) -> Result<(), ConnectionRejection> {
        if self.shared.stopping.is_cancelled()
            && !self.shared.finder.peers().is_some_and(|peers| peers.is_at(from.ip()))
        {
            Err(ConnectionRejection::Stopping)
        } else {
            Ok(())
        }
    }

    fn rejection_bytes(&self, _from: SocketAddr, why: ConnectionRejection) -> Bytes {
        if why == ConnectionRejection::Stopping { Bytes::from_static(&STOPPING_ALERT) } else { Bytes::new() }
    }

    async fn handle(self: Arc<Self>, accepted: Accepted) {
        let Accepted { socket, from, mut permit } = accepted;
        if let Err(e) = tune_link(&socket, self.shared.link_context.congestion.as_deref()) {
            return debug!(error = %e, "connection closed immediately");
        }
        let shaking = self.handshakes.accept_link(socket, from, &permit, &self.http_proxies);
        let (accepted, client) = match shaking.instrument(info_span!("handshake", remote_addr = %from)).await
        {
            Ok(accepted) => accepted,
            Err(failure) => {
                report_failure(&failure, from.ip(), &self.shared.link_context.metrics);
                return debug!("{failure}");
            }
        };
        let metrics = self.shared.link_context.metrics.clone();
        if client.ip() != from.ip() {
            // The connections of all clients of a proxy must not be those of one source.
            let own = self.shared.clients.pending.waiting.try_acquire(&Source::of(client.ip()));
            let Ok(own) = own else { return metrics.count_refusal(Door::Links, "limit_reached") };
            permit = own;
        }
        let lost = permit.revoked();
        let certificate = EdgeAuthenticator::certificate(self.handshakes.certificate(&accepted));
        let TlsAccepted { stream: io, permit: turn, until } = accepted;
        let takes_enrolments = self.shared.enrolment.initialized();
        let waiting =
            PendingConnection { certificate, takes_enrolments, until, waiting_permit: permit, permit: turn };
        let arrivals = self.arrivals.clone();
        let link_context = self.shared.link_context.clone();
        // The handler is not kept for the life of the link, which may be days.
        drop(self);
        tokio::select! {
            biased;
            () = serve(Box::new(io), client, arrivals, link_context, waiting) => {}
            () = lost.cancelled() => metrics.count_refusal(Door::Links, "evicted"),
        }
    }
}

/// Maximum number of links of a node in a minute. A line that breaks every second, with a backup link each time, is
/// below it.
pub(crate) const MAX_LINKS: u32 = 120;

/// A fatal TLS alert, `user_canceled`: the handshake is cancelled for a reason other than a protocol failure (RFC 8446,
/// section 6).
const STOPPING_ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 90];

/// Counts a failed handshake, and logs it if the caller has caused it. Closed connections are not logged, because
/// balancers close theirs after checking that the port is open.
fn report_failure(failure: &TlsAcceptError, from: IpAddr, metrics: &Metrics) {
    match &failure.error {
        None if failure.reason == "websocket" => limited!(
            metrics.refuse(Door::Links, failure.reason, from) => warn,
            remote_addr = %from, reason = failure.why, "request for a WebSocket refused"
        ),
        None | Some(TlsHandshakeError::Closed) => metrics.count_refusal(Door::Links, failure.reason),
        Some(error) => limited!(
            metrics.refuse(Door::Links, failure.reason, from) => warn,
            remote_addr = %from,
            reason = error.name(),
            error = %format_args!("{error}{}", hint(error)),
            "TLS handshake failed"
        ),
    }
}

/// Returns a hint if the reason allows one.
fn hint(error: &TlsHandshakeError) -> &'static str {
    use tokio_rustls::rustls::AlertDescription as Alert;
    match error {
        // The second alert is about a CA that has the right name and another key.
        TlsHandshakeError::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => {
            "; the CA in that edge's edge.uplink.ca has not signed our server.links.cert: add the CA that did"
        }
        TlsHandshakeError::AlertReceived(Alert::CertificateExpired) => {
            "; renew our server.links.cert, or correct that machine's clock"
        }
        // Edges in Go send it for every cause.
        TlsHandshakeError::AlertReceived(Alert::BadCertificate) => {
            "; check that our server.links.cert has the name that the edge dials (its dns, or the \
             host of the address in its servers); an edge of SuperEdge may also lack our CA"
        }
        TlsHandshakeError::AlertReceived(Alert::UnsupportedCertificate | Alert::CertificateUnknown) => {
            "; reissue our server.links.cert as a server certificate"
        }
        TlsHandshakeError::AlertReceived(_) => "; the log of that machine has the cause",
        TlsHandshakeError::NotTls => "; only edges, servers and programs of users can use this port",
        error if error.is_of_the_certificate() => {
            "; an edge (its edge.csr) needs a certificate from a CA in edge_ca of our server.csr, and \
             a server one from server.links.peer_ca"
        }
        _ => "",
    }
}

#[cfg(test)]
mod handshake_failures_tests {
    use tokio_rustls::rustls::AlertDescription;

    use super::*;

    #[test]
    fn the_hint_for_a_tls_alert_names_the_key_of_the_side_that_can_change_it() {
        let hint_for = |alert| hint(&TlsHandshakeError::AlertReceived(alert));
        for alert in [AlertDescription::UnknownCA, AlertDescription::DecryptError] {
            assert!(hint_for(alert).contains("edge.uplink.ca has not signed"), "{alert:?}");
        }
        assert!(hint_for(AlertDescription::UnsupportedCertificate).contains("as a server certificate"));
        assert!(hint_for(AlertDescription::BadCertificate).contains("the name that the edge dials"));
    }
}
