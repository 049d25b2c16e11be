//! The handshakes of `tunnel doctor edge` with a server: TLS, the link, and whether large packets arrive.

use std::cell::Cell;
use std::time::Duration;

use http::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::command::doctor::{DoctorFindings, TIMEOUT, check_of};
use crate::config::edge::ServerAddress;
use crate::edge::config::EdgeConfig;
use crate::uplink::link_dialer::messages::hint as tls_remedy;
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::path_mtu::{self, REMEDY};
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, IdentityFiles, TlsClientConfig, Trust};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Host, Instance, Target};

type Secured = tokio_rustls::client::TlsStream<Buffered<TcpStream>>;

/// Makes the handshakes with a server as the edge would, and checks whether large packets arrive.
///
/// While the edge is `linked`, it sends no token: for the servers, this command is another process with its node's
/// name.
pub(super) async fn handshakes(
    settings: &EdgeConfig,
    server: &ServerAddress,
    socket: TcpStream,
    proxy: Option<&OutboundProxy>,
    linked: bool,
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
        let Some(io) = secure(settings, server, socket, &mut made).await else { return Err(made) };
        if call(settings, server, io, linked, before, &mut made).await { Ok(made) } else { Err(made) }
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

/// Performs the TLS handshake as the edge would.
async fn secure(
    settings: &EdgeConfig,
    server: &ServerAddress,
    socket: TcpStream,
    found: &mut DoctorFindings,
) -> Option<Secured> {
    let trust = Trust::Ca(settings.uplink.ca.clone());
    let certificate = settings
        .csr
        .as_ref()
        .filter(|_| settings.uplink.token.is_none() && settings.uplink.token_file.is_none())
        .map(|csr| &csr.file);
    if let Some(file) = certificate.filter(|file| !file.exists()) {
        let hint =
            "check the edge's log and that `tunnel approve` runs: kubectl apply -k deploy/kustomize/approver";
        found.add_error(
            "certificate",
            format!("{} does not exist yet", file.display()),
            "a certificate, or a token",
            hint,
        );
        return None;
    }
    let identity = certificate.map(|file| IdentityFiles { cert: file.clone(), key: file.clone() });
    // Errors of the file or the name were already reported by the config check.
    let config = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().ok()?;
    let name = tls::server_name(&server.dns.to_string()).ok()?;
    let accepted = TlsConnector::from(config.load()).connect(name, Buffered::new(socket, BufferPool::new()));
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
            let expectation = format!("a certificate for {}, signed by edge.uplink.ca", server.dns);
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

/// Opens a link as the edge does, and closes it at once. Only this tests whether token, name and dialect are accepted.
/// `before` are the findings of earlier checks. Returns true if the server has answered.
async fn call(
    settings: &EdgeConfig,
    server: &ServerAddress,
    io: Secured,
    linked: bool,
    before: &DoctorFindings,
    found: &mut DoctorFindings,
) -> bool {
    let client = &settings.uplink;
    let metrics = Metrics::edge();
    let limits = SessionLimits {
        windows: WindowLimits { start: 32 * 1024, max: 32 * 1024 },
        memory: 1 << 20,
        sessions: 1,
        resume_timeout: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::random(), limits, metrics.clone());
    let link_context = LinkContext::new(table, metrics, Drain::new());
    let authority = Target { host: server.dns.clone(), port: server.at.port }.to_string();
    let metadata = match linked {
        true => HeaderMap::new(),
        false => EdgeHello::edge_request(&client.node, &token(settings), link_context.table.instance()),
    };
    match tunnel_link::grpc::dial::dial(io, &authority, &client.node, metadata, &link_context).await {
        Ok(reader) => {
            found.add_ok("token", format!("{} accepts it for {}", server.at, client.node));
            if reader.link.is_plain() {
                let text = "the server speaks SuperEdge's dialect only, so a session ends with its link";
                found.add_warning("dialect", text, "run this program as the server too");
            } else {
                found.add_ok("dialect", reader.link.dialect_name());
            }
            reader.link.close();
        }
        Err(LinkDialError::Refused { .. }) if linked => {}
        Err(why @ LinkDialError::Refused { .. }) if why.is_token_refused() => {
            // A running edge has reported the same error with its hint.
            found.add_token_error(why.to_string(), why.hint().filter(|hint| !before.contains(hint)));
        }
        Err(why) if why.is_name_taken() => {
            let hint = "give each machine its own name (node, or NODE_NAME)";
            found.add_error("name", why.to_string(), "a name that no other machine has", hint);
        }
        Err(why) => {
            found.add_error("link", why.to_string(), "a link", why.hint().unwrap_or("see the server's log"));
            return matches!(why, LinkDialError::Refused { .. } | LinkDialError::OtherVersion(_));
        }
    }
    true
}

/// Returns the edge's first token, or an empty text.
fn token(settings: &EdgeConfig) -> String {
    let text = match (&settings.uplink.token, &settings.uplink.token_file) {
        (Some(token), _) => token.reveal().to_owned(),
        (None, Some(file)) => files::read_text(file).unwrap_or_default(),
        (None, None) => String::new(),
    };
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}
