//! Links to servers, as an edge or a user's program makes them: DNS, proxy, connection, TLS, whether the server accepts
//! the caller, and whether large packets arrive. Targets of an edge.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_util::either::Either;

use crate::command::doctor::{DoctorFindings, Finding, TIMEOUT, Tested, check_of};
use crate::config::ProxyVariables;
use crate::config::edge::ServerAddress;
use crate::uplink::link_dialer::messages::{connection_hint, hint as tls_remedy, refusal_hint, user_hint};
use crate::uplink::link_dialer::websocket::{self, FORCED, NO_HTTP_2, reason_of_call, reason_of_tls};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::{OutboundProxy, ProxiedStream, ProxyError};
use tunnel_net::path_mtu::{self, REMEDY};
use tunnel_net::pool::BufferPool;
use tunnel_net::resolver::Resolver;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, Trust};
use tunnel_net::websocket::WebSocket;
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Host, Instance, NodeName, Target};

/// The edge or the user's program that would link.
pub(super) struct Caller {
    /// Its servers, and the key that has them.
    pub(super) servers: (Vec<ServerAddress>, &'static str),
    pub(super) proxy: ProxyVariables,
    /// Its TLS with servers.
    pub(super) tls: Arc<ClientConfig>,
    /// File of the CAs of servers, if they are not those of the system.
    pub(super) ca: Option<PathBuf>,
    /// The key of the CAs that sign the servers' certificates.
    pub(super) ca_key: &'static str,
    /// Its node, or no node of a user's program.
    pub(super) node: NodeName,
    /// Its name in the findings.
    pub(super) name: String,
    /// Its instance and the metadata that prove it. `None` while the edge of this node is linked: for the servers, this
    /// command is another process with the node's name, so it proves nothing.
    pub(super) hello: Option<(Instance, HeaderMap)>,
}

/// Checks that each server can be reached, and accepts the caller.
pub(super) async fn check_servers(
    caller: &Caller,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) -> Tested {
    let proxy = caller.proxy.parse();
    let proxy = proxy.map_err(|why| Finding::error("proxy", why, "", "correct HTTPS_PROXY, or unset it"))?;
    for server in &caller.servers.0 {
        let proxy = proxy.as_ref().filter(|proxy| proxy.applies_to(&server.at));
        found.test(async |found| check_server(caller, server, proxy, resolver, found).await).await;
    }
    Ok(())
}

/// Connects to a server, through the proxy if there is one, and makes the handshakes.
async fn check_server(
    caller: &Caller,
    server: &ServerAddress,
    proxy: Option<&OutboundProxy>,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) -> Tested {
    let (to, key) = proxy.map_or((&server.at, caller.servers.1), |proxy| (proxy.at(), "HTTPS_PROXY"));
    let addresses = resolver.lookup_target(to).await.map_err(|why| {
        let hint = format!("check {key}, and the DNS servers of this machine");
        Finding::error("dns", format!("{}: {why}", to.host), "an address", &hint)
    })?;
    if let Host::Name(name) = &to.host {
        let shown: Vec<_> = addresses.iter().map(|at| at.ip().to_string()).collect();
        found.add_ok("dns", format!("{name} resolves to {}", shown.join(", ")));
    }
    let (check, reached) = match proxy {
        Some(proxy) => ("proxy", format!("{} is reached through {} (HTTPS_PROXY)", server.at, proxy.at())),
        None => ("port", format!("{} accepts connections", server.at)),
    };
    let connect = async |again: Option<SocketAddr>| {
        let addresses = again.map_or_else(|| addresses.clone(), |at| vec![at]);
        let Some(proxy) = proxy else {
            return dial(&server.at.host, &addresses, TIMEOUT).await.map_err(|why| {
                let hint = connection_hint(why.first());
                DoctorFindings(vec![Finding::error(check, why, "a server that listens there", hint)])
            });
        };
        let connected = proxy.connect(&addresses, &server.at, TIMEOUT).await;
        connected.map_err(|why| DoctorFindings(vec![not_proxied(why)]))
    };
    // Each attempt has its own findings: of those that run at once, only one counts.
    let last = Cell::new(None);
    let before: &DoctorFindings = found;
    // Why a WebSocket may pass where HTTP/2 does not.
    let reason = Cell::new(None);
    let attempt = async |in_websocket: bool| {
        let shake = async |socket: TcpStream, _| {
            last.set(socket.peer_addr().ok());
            let mut made = DoctorFindings::default();
            made.add_ok(check, &reached);
            let linking = async |made: &mut _| {
                let trust = Trust::Public(caller.ca.iter().cloned().collect());
                let socket = OutboundProxy::encrypted(proxy, socket, &server.at, trust, TIMEOUT).await;
                let socket = socket.map_err(not_proxied)?;
                let io = secure(caller, server, socket, in_websocket, &reason).await?;
                link(caller, server, io, &reason, before, made).await
            };
            match made.test(linking).await {
                Some(()) => Ok(made),
                None => Err(made),
            }
        };
        let (Ok(made) | Err(made)) = path_mtu::handshake(&connect, shake).await;
        made
    };
    let mut made = attempt(server.is_websocket).await;
    let mut why = server.is_websocket.then(|| FORCED.to_owned());
    if let Some(doubt) = reason.take().filter(|_| !server.is_websocket) {
        let again = attempt(true).await;
        match again.0.iter().find(|finding| [WEBSOCKET, WEBSOCKET_TLS].contains(&finding.check)) {
            // Then the first error is the reason.
            Some(failed) if failed.check == WEBSOCKET_TLS => {}
            Some(_) => made.0.extend(again.0),
            None => (made, why) = (again, Some(doubt)),
        }
    }
    if let Some(why) = why.filter(|_| made.is_well()) {
        let text = format!("{} is reached through a WebSocket, because {why}", server.at);
        made.add_warning("path", text, WEBSOCKET_HINT);
    }
    let answered = made.is_well();
    found.0.extend(made.0);
    let Some(ip) = last.get().map(|at| at.ip()) else { return Ok(()) };
    match path_mtu::packet_loss(ip) {
        Some(loss) => found.add_error("packets", loss, "a path for packets of any size", REMEDY),
        None if path_mtu::is_suspected(ip) => {
            let text = format!("{} answered only the second connection, which used small packets", server.at);
            let hint = "run this again; if it says the same, large packets may be lost (MTU)";
            found.add_warning("packets", text, hint);
        }
        None if answered => found.add_ok("packets", format!("large packets to {} arrive", server.at)),
        None => {}
    }
    Ok(())
}

fn not_proxied(why: ProxyError) -> Finding {
    let hint =
        "add the server's host to NO_PROXY if it is reachable without the proxy, or correct HTTPS_PROXY";
    Finding::error("proxy", why, "a proxy that connects to the server", hint)
}

/// Makes the handshake of TLS as the caller does: most errors of certificates show here. A failure may be a `reason` for
/// a WebSocket.
async fn secure(
    caller: &Caller,
    server: &ServerAddress,
    socket: ProxiedStream,
    in_websocket: bool,
    reason: &Cell<Option<String>>,
) -> Tested<Secured> {
    let at = &server.at;
    let name = tls::server_name(&server.dns.to_string());
    let name = name.map_err(|why| Finding::error("tls", why, "a name", ""))?;
    let socket = if in_websocket {
        let trust = Trust::Public(caller.ca.iter().chain(&server.websocket_ca).cloned().collect());
        let connecting = websocket::connect(socket, at, trust, BufferPool::new());
        let connected = timeout(TIMEOUT, connecting).await.map_err(|_| {
            Finding::error(WEBSOCKET, format!("no WebSocket to {at} within {TIMEOUT:?}"), "", WEBSOCKET_HINT)
        })?;
        Either::Right(connected.map_err(|why| {
            let check = if why.is_tls { WEBSOCKET_TLS } else { WEBSOCKET };
            Finding::error(check, &why, "", WEBSOCKET_HINT)
        })?)
    } else {
        Either::Left(socket)
    };
    let socket = Buffered::new(socket, BufferPool::new());
    let secured = TlsConnector::from(Arc::clone(&caller.tls)).connect(name, socket);
    let secured = timeout(TIMEOUT, secured).await.map_err(|_| {
        let hint = "check that the program that listens there is a server, and not stopped or overloaded";
        Finding::error("tls", format!("{at}: no TLS handshake within {TIMEOUT:?}"), "", hint)
    })?;
    let io = secured.map_err(|error| {
        let fault = TlsHandshakeError::of(&error);
        reason.set(reason_of_tls(&fault));
        let expectation = format!("a certificate for {}, signed by {}", server.dns, caller.ca_key);
        Finding::error(check_of(&fault), format!("{at}: {fault}"), &expectation, tls_remedy(&fault))
    })?;
    if io.get_ref().1.alpn_protocol().is_some_and(|alpn| alpn != tls::HTTP_2) {
        reason.set(Some(NO_HTTP_2.to_owned()));
        return Err(Finding::error("tls", format!("{at}: {NO_HTTP_2}"), "HTTP/2", WEBSOCKET_HINT));
    }
    Ok(io)
}

/// Opens a link as the caller does, and closes it at once. Only this tests whether token, name and version are accepted.
/// `before` are the findings of earlier checks. Fails if the server has not answered, which may be a `reason` for a
/// WebSocket.
async fn link(
    caller: &Caller,
    server: &ServerAddress,
    io: Secured,
    reason: &Cell<Option<String>>,
    before: &DoctorFindings,
    found: &mut DoctorFindings,
) -> Tested {
    let at = &server.at;
    found.add_ok("tls", format!("{at} presents a certificate for {} from our CA", server.dns));
    // The call for a link, by a process that keeps no session.
    let metrics = Metrics::edge();
    let limits = SessionLimits {
        windows: WindowLimits { start: 32 * 1024, max: 32 * 1024 },
        memory: 1 << 20,
        sessions: 1,
        resume_timeout: Duration::ZERO,
        max_resume_timeout: Duration::ZERO,
    };
    let (instance, metadata) = caller.hello.clone().unwrap_or_else(|| (Instance::random(), HeaderMap::new()));
    let table = SessionTable::new(instance, limits, metrics.clone());
    let link_context = LinkContext::new(table, metrics, Drain::new());
    let authority = Target { host: server.dns.clone(), port: at.port }.to_string();
    let io = Box::new(io);
    let why = match tunnel_link::grpc::dial::dial(io, &authority, &caller.node, metadata, &link_context).await
    {
        Ok(reader) => {
            found.add_ok("token", format!("{at} accepts it for {}", caller.name));
            if reader.link.abilities.resumes {
                found.add_ok("dialect", reader.link.generation());
            } else {
                let text = "the server is a program of SuperEdge, so a session ends with its link";
                found.add_warning("dialect", text, "run this program as the server too");
            }
            reader.link.close();
            return Ok(());
        }
        Err(why) => why,
    };
    reason.set(reason_of_call(&why));
    // A refusal is an answer too: it shows that large packets arrive.
    let is_refused = matches!(why, LinkDialError::Refused { .. });
    let failure = if is_refused && caller.hello.is_none() {
        return Ok(());
    } else if is_refused && caller.node == NodeName::none() {
        let check = if why.is_denied() { "token" } else { "link" };
        let hint = user_hint(&why).unwrap_or("ask the operator, who finds the reason in the server's log");
        Finding::error(check, &why, "a server that permits links of this user", hint)
    } else if why.is_token_refused() {
        // A running edge has reported the same error with its hint.
        let is_new = |hint: &&str| !before.0.iter().any(|finding| finding.found.contains(*hint));
        Finding::token(&why, refusal_hint(&why).filter(is_new))
    } else if why.is_name_taken() {
        let hint = "give each machine its own name (node, or NODE_NAME)";
        Finding::error("name", &why, "a name that no other machine has", hint)
    } else {
        Finding::error("link", &why, "a link", refusal_hint(&why).unwrap_or("see the server's log"))
    };
    if !is_refused && !matches!(why, LinkDialError::OtherVersion(_)) {
        return Err(failure);
    }
    found.0.push(failure);
    Ok(())
}

/// The connection of a link.
type Secured = TlsStream<Buffered<Either<ProxiedStream, WebSocket>>>;

/// The checks of WebSockets, and of the TLS below them.
const WEBSOCKET: &str = "websocket";
const WEBSOCKET_TLS: &str = "websocket tls";
const WEBSOCKET_HINT: &str = "let the proxy pass HTTP/2 (gRPC) or TLS to the server: links are faster then; otherwise let it pass WebSockets";
