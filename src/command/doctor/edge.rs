//! What an edge needs: the way to its cloud, what proves both to each other, and its targets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{Doctor, Findings, PATIENCE, check_of, page};
use crate::config::edge::{EdgeSettings, Server, Token};
use crate::dialer::{Place, TargetDialer};
use crate::drain::Drain;
use crate::edge::tls_remedy;
use crate::names::{Host, Instance, Target};
use crate::net::dial::dial;
use crate::net::interfaces::LocalAddresses;
use crate::net::pool::Pool;
use crate::net::proxy::Proxy;
use crate::net::resolver::Resolver;
use crate::net::socket::Buffered;
use crate::net::tls::{self, ClientSettings, Fault, Identity, Trust};
use crate::policy::Listening;
use crate::protocol::grpc::{self, DialError, LinkContext};
use crate::protocol::{Dialect, Hello, SessionLimits, SessionTable, Windows};
use crate::telemetry::Metrics;

type Secured = tokio_rustls::client::TlsStream<Buffered<TcpStream>>;

pub(super) async fn look(settings: &EdgeSettings, asked: &Doctor, found: &mut Findings) {
    let client = &settings.client;
    let linked = running(client.log_listen.at, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.bad("dns", why.to_string(), "", "mend /etc/resolv.conf"),
    };
    let url = client.https_proxy.as_ref().map(|url| url.reveal()).unwrap_or_default();
    let proxy = match Proxy::new(url, client.no_proxy.as_deref().unwrap_or_default()) {
        Ok(proxy) => proxy,
        Err(why) => return found.bad("proxy", why.to_string(), "", "correct HTTPS_PROXY, or take it away"),
    };
    for server in &client.servers {
        let proxy = proxy.as_ref().filter(|proxy| proxy.applies_to(&server.at));
        let Some(socket) = reach(server, proxy, &resolver, found).await else { continue };
        let Some(io) = secure(settings, server, socket, found).await else { continue };
        if !linked {
            call(settings, server, io, found).await;
        }
    }
    let dialer = TargetDialer {
        place: Place::Node(client.node.clone()),
        own: LocalAddresses::of_interfaces(settings.own.clone()),
        targets: Arc::new(ArcSwap::from_pointee(settings.targets.clone())),
        listening: Listening::default(),
        resolver,
    };
    for target in &asked.target {
        match dialer.dial(target, PATIENCE).await {
            Ok(_) => found.good("target", format!("{target} answers")),
            Err(why) => {
                let remedy =
                    "start the service, or list the target in mode.edge.allow.targets if that forbids it";
                found.bad(
                    "target",
                    why.refusal.reason,
                    "a target that this edge may dial and that answers",
                    remedy,
                );
            }
        }
    }
}

/// Whether the edge of this machine runs and is linked.
async fn running(at: SocketAddr, found: &mut Findings) -> bool {
    let Some((status, _)) = page(at, "/edge/healthz").await else {
        found.doubt(
            "edge",
            format!("no edge of this machine answers at {at}"),
            "start it: systemctl start tunnel-edge",
        );
        return false;
    };
    let (ready, body) = page(at, "/readyz").await.unwrap_or_default();
    for line in body.lines().filter(|line| *line != "ok") {
        let name = line.starts_with("name:");
        if ready == 200 && !name {
            found.doubt("edge", line, "");
        } else {
            let check = if name { "name" } else { "edge" };
            found.bad(check, line, "", if name { "give each machine its own name" } else { "" });
        }
    }
    if status == 200 {
        found.good("link", "the edge of this machine runs, and is linked");
    }
    status == 200
}

/// A connection to a place of the cloud.
async fn reach(
    server: &Server,
    proxy: Option<&Proxy>,
    resolver: &Resolver,
    found: &mut Findings,
) -> Option<TcpStream> {
    let Some(proxy) = proxy else {
        let addresses = resolve(&server.at, "mode.edge.stream.client.server_name", resolver, found).await?;
        return match dial(&addresses, PATIENCE).await {
            Ok(socket) => {
                found.good("port", format!("{} answers", server.at));
                Some(socket)
            }
            Err(why) => {
                let remedy = "see whether a pod runs there, and let the firewalls between pass this port";
                found.bad("port", why.to_string(), "a pod that listens there", remedy);
                None
            }
        };
    };
    let addresses = resolve(proxy.at(), "HTTPS_PROXY", resolver, found).await?;
    match proxy.connect(&addresses, &server.at, PATIENCE).await {
        Ok(socket) => {
            found.good("proxy", format!("{} is reached through {} (HTTPS_PROXY)", server.at, proxy.at()));
            Some(socket)
        }
        Err(why) => {
            let remedy = "list the cloud's host in NO_PROXY if it is reached without the proxy, or correct HTTPS_PROXY";
            found.bad("proxy", why.to_string(), "a proxy that leads to the cloud", remedy);
            None
        }
    }
}

async fn resolve(
    at: &Target,
    key: &str,
    resolver: &Resolver,
    found: &mut Findings,
) -> Option<Vec<SocketAddr>> {
    let addresses = match &at.host {
        Host::Ip(ip) => vec![*ip],
        Host::Name(name) => match resolver.lookup(name).await {
            Ok(addresses) => {
                let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
                found.good("dns", format!("{name} is {}", shown.join(", ")));
                addresses
            }
            Err(why) => {
                let remedy = format!("check {key}, and the DNS servers of this machine");
                found.bad("dns", format!("{name}: {why}"), "an address", &remedy);
                return None;
            }
        },
    };
    Some(addresses.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
}

/// TLS as the edge wants it.
async fn secure(
    settings: &EdgeSettings,
    server: &Server,
    socket: TcpStream,
    found: &mut Findings,
) -> Option<Secured> {
    let trust = Trust::Ca(settings.client.ca.clone());
    let certificate = settings.csr.as_ref().filter(|_| settings.client.token.is_none()).map(|csr| &csr.file);
    if let Some(file) = certificate.filter(|file| !file.exists()) {
        let remedy =
            "see the edge's log; `tunnel approve` has to run: kubectl apply -k deploy/kustomize/approver";
        found.bad(
            "certificate",
            format!("there is no {} yet", file.display()),
            "a certificate, or a token",
            remedy,
        );
        return None;
    }
    let identity = certificate.map(|file| Identity { cert: file.clone(), key: file.clone() });
    // What is wrong with the file, or the name, was told of the config.
    let config = ClientSettings { trust, identity, alpn: vec![b"h2".to_vec()] }.load().ok()?;
    let name = tls::server_name(&server.dns.to_string()).ok()?;
    let shaken = TlsConnector::from(config.load()).connect(name, Buffered::new(socket, Pool::new()));
    match timeout(PATIENCE, shaken).await {
        Ok(Ok(io)) => {
            found.good(
                "tls",
                format!("{} shows a certificate for {} of our authority", server.at, server.dns),
            );
            Some(io)
        }
        Ok(Err(error)) => {
            let fault = Fault::of(&error);
            let wanted = format!("a certificate for {}, signed by mode.edge.stream.client.cert", server.dns);
            found.bad(check_of(&fault), format!("{}: {fault}", server.at), &wanted, tls_remedy(&fault));
            None
        }
        Err(_) => {
            let remedy = "see whether a pod listens there, or something that only waits";
            found.bad("tls", format!("{}: no handshake within {PATIENCE:?}", server.at), "", remedy);
            None
        }
    }
}

/// A link as the edge makes it, given up at once: only so it shows whether token, name and dialect will do.
async fn call(settings: &EdgeSettings, server: &Server, io: Secured, found: &mut Findings) {
    let client = &settings.client;
    let text = match &client.token {
        None => String::new(),
        Some(Token::Text(token)) => token.reveal().to_owned(),
        Some(Token::File(file)) => std::fs::read_to_string(file).unwrap_or_default(),
    };
    let token = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let metrics = Metrics::edge();
    let limits = SessionLimits {
        windows: Windows { start: 32 * 1024, max: 32 * 1024 },
        memory: 1 << 20,
        sessions: 1,
        grace: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::random(), limits, metrics.clone());
    let ground = LinkContext { table, metrics, drain: Drain::new(), congestion: None };
    let authority = Target { host: server.dns.clone(), port: server.at.port }.to_string();
    let said = Hello::edge_request(&client.node, token, ground.table.instance());
    match grpc::dial(io, &authority, &client.node, said, &ground).await {
        Ok(link) => {
            found.good("token", format!("{} takes it for {}", server.at, client.node));
            if link.sender.dialect == Dialect::Plain {
                let text = "the cloud speaks SuperEdge's dialect only: a session ends with its link";
                found.doubt("dialect", text, "run this program as the cloud, too");
            } else {
                found.good("dialect", link.sender.dialect.to_string());
            }
            link.sender.close();
        }
        Err(why @ DialError::Refused { .. }) if why.is_token_refused() => {
            let remedy = "compare token or token_file here with this node's line in the cloud's tokenfile, and see that a Node of \
                          this name has an edge label; the pod's log says more";
            found.bad("token", why.to_string(), "proof of this node that the cloud takes", remedy);
        }
        Err(why) if why.is_name_taken() => {
            let remedy = "give each machine its own name (node, or NODE_NAME)";
            found.bad("name", why.to_string(), "a name that no other machine has", remedy);
        }
        Err(why) => found.bad("link", why.to_string(), "a link", "see the pod's log"),
    }
}
