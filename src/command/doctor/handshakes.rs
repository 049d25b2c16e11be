//! The handshakes of `tunnel doctor` with a server: TLS, the link, and whether large packets arrive.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;

use crate::command::doctor::{DoctorFindings, TIMEOUT, check_of};
use crate::config::edge::ServerAddress;
use crate::uplink::link_dialer::messages::{hint as tls_remedy, refusal_hint, user_hint};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::path_mtu::{self, REMEDY};
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::Buffered;
use tunnel_net::tls;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Host, Instance, NodeName, Target};

type Secured = tokio_rustls::client::TlsStream<Buffered<TcpStream>>;

/// The edge or the user's program that would link.
pub(super) struct Caller {
    /// Its TLS with servers.
    pub(super) tls: Arc<ClientConfig>,
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

/// Makes the handshakes with a server as the caller would, and checks whether large packets arrive.
pub(super) async fn handshakes(
    caller: &Caller,
    server: &ServerAddress,
    socket: TcpStream,
    proxy: Option<&OutboundProxy>,
    found: &mut DoctorFindings,
) {
    let Ok(at) = socket.peer_addr() else { return };
    let first = Cell::new(Some(socket));
    let connect = async |_| match (first.take(), proxy) {
        (Some(socket), _) => Ok(socket),
        (None, Some(proxy)) => {
            proxy.connect(&[at], &server.at, TIMEOUT).await.map_err(|_| DoctorFindings::default())
        }
        (None, None) => dial(&Host::Ip(at.ip()), &[at], TIMEOUT).await.map_err(|_| DoctorFindings::default()),
    };
    let before: &DoctorFindings = found;
    let shake = async |socket, _| {
        let mut made = DoctorFindings::default();
        let Some(io) = secure(caller, server, socket, &mut made).await else { return Err(made) };
        if call(caller, server, io, before, &mut made).await { Ok(made) } else { Err(made) }
    };
    let (Ok(made) | Err(made)) = path_mtu::handshake(connect, shake).await;
    let answered = made.is_well();
    found.0.extend(made.0);
    match path_mtu::packet_loss(at.ip()) {
        Some(loss) => found.add_error("packets", loss.to_string(), "a path for packets of any size", REMEDY),
        None if path_mtu::is_suspected(at.ip()) => {
            let text = format!("{} answered only the second connection, which used small packets", server.at);
            found.add_warning(
                "packets",
                text,
                "run this again; if it says the same, large packets may be lost (MTU)",
            );
        }
        None if answered => found.add_ok("packets", format!("large packets to {} arrive", server.at)),
        None => {}
    }
}

/// Performs the TLS handshake as the caller would.
async fn secure(
    caller: &Caller,
    server: &ServerAddress,
    socket: TcpStream,
    found: &mut DoctorFindings,
) -> Option<Secured> {
    // An error of the name was already reported by the check of the config.
    let name = tls::server_name(&server.dns.to_string()).ok()?;
    let socket = Buffered::new(socket, BufferPool::new());
    let accepted = TlsConnector::from(Arc::clone(&caller.tls)).connect(name, socket);
    match timeout(TIMEOUT, accepted).await {
        Ok(Ok(io)) => {
            found.add_ok(
                "tls",
                format!("{} presents a certificate for {} from our CA", server.at, server.dns),
            );
            Some(io)
        }
        Ok(Err(error)) => {
            let fault = TlsHandshakeError::of(&error);
            let expectation = format!("a certificate for {}, signed by {}", server.dns, caller.ca_key);
            found.add_error(
                check_of(&fault),
                format!("{}: {fault}", server.at),
                &expectation,
                tls_remedy(&fault),
            );
            None
        }
        Err(_) => {
            let hint = "check that the program that listens there is a server, and not stopped or overloaded";
            found.add_error("tls", format!("{}: no TLS handshake within {TIMEOUT:?}", server.at), "", hint);
            None
        }
    }
}

/// Opens a link as the caller does, and closes it at once. Only this tests whether token, name and version are
/// accepted. `before` are the findings of earlier checks. Returns true if the server has answered.
async fn call(
    caller: &Caller,
    server: &ServerAddress,
    io: Secured,
    before: &DoctorFindings,
    found: &mut DoctorFindings,
) -> bool {
    let metrics = Metrics::edge();
    let limits = SessionLimits {
        windows: WindowLimits { start: 32 * 1024, max: 32 * 1024 },
        memory: 1 << 20,
        sessions: 1,
        resume_timeout: Duration::ZERO,
    };
    let (instance, metadata) = caller.hello.clone().unwrap_or_else(|| (Instance::random(), HeaderMap::new()));
    let table = SessionTable::new(instance, limits, metrics.clone());
    let link_context = LinkContext::new(table, metrics, Drain::new());
    let authority = Target { host: server.dns.clone(), port: server.at.port }.to_string();
    let is_user = caller.node == NodeName::none();
    match tunnel_link::grpc::dial::dial(io, &authority, &caller.node, metadata, &link_context).await {
        Ok(reader) => {
            found.add_ok("token", format!("{} accepts it for {}", server.at, caller.name));
            if !reader.link.abilities.resumes {
                let text = "the server is a program of SuperEdge, so a session ends with its link";
                found.add_warning("dialect", text, "run this program as the server too");
            } else {
                found.add_ok("dialect", reader.link.generation());
            }
            reader.link.close();
        }
        Err(LinkDialError::Refused { .. }) if caller.hello.is_none() => {}
        Err(why @ LinkDialError::Refused { .. }) if is_user => {
            let check = if why.is_denied() { "token" } else { "link" };
            let hint =
                user_hint(&why).unwrap_or("ask the operator, who finds the reason in the server's log");
            found.add_error(check, why.to_string(), "a server that permits links of this user", hint);
        }
        Err(why @ LinkDialError::Refused { .. }) if why.is_token_refused() => {
            // A running edge has reported the same error with its hint.
            found.add_token_error(why.to_string(), refusal_hint(&why).filter(|hint| !before.contains(hint)));
        }
        Err(why) if why.is_name_taken() => {
            let hint = "give each machine its own name (node, or NODE_NAME)";
            found.add_error("name", why.to_string(), "a name that no other machine has", hint);
        }
        Err(why) => {
            found.add_error(
                "link",
                why.to_string(),
                "a link",
                refusal_hint(&why).unwrap_or("see the server's log"),
            );
            return matches!(why, LinkDialError::Refused { .. } | LinkDialError::OtherVersion(_));
        }
    }
    true
}
