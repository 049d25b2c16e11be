//! Dials links to servers, which are tried in turn, for an edge or a user's program, and keeps the edge's certificate.

pub mod caching_resolver;
pub(crate) mod client_certificate;
pub mod messages;
pub(crate) mod websocket;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::HeaderMap;
use rand::seq::SliceRandom as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig};
use tokio_util::either::Either;
use tracing::info;

use crate::config::SecretString;
use crate::config::edge::ServerAddress;
use crate::uplink::link_dialer::caching_resolver::{CachingResolver, ResolvedServer};
use crate::uplink::link_dialer::client_certificate::EdgeCertificate;
use crate::uplink::link_dialer::websocket::{NO_HTTP_2, WebSocketError, WebSocketUse, reason_of_tls};
use crate::uplink::moves::dial_order;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::{ANSWER_TIMEOUT, LinkDialError};
use tunnel_link::link_reader::LinkReader;
use tunnel_net::dial::{self, dial_in_order};
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::listen::{tune_interactive, tune_link};
use tunnel_net::path_mtu;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::resolver::DnsLookupError;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, Trust};
use tunnel_proto::hello::{EdgeHello, LinkPurpose, UserHello, UserProof, with_websocket};
use tunnel_proto::names::{DeviceName, Host, NodeName, Target, UserName};

/// The dialer of links: resolves a server, connects to it, and proves the node's name or the user.
#[derive(Debug)]
pub(crate) struct LinkDialer {
    /// The edge's node; [`NodeName::none`] of a user's program.
    pub(crate) node: NodeName,
    /// Whether the edge runs with the last good copy of its config. The next link tells when it no longer does.
    pub(crate) is_last_good: Arc<AtomicBool>,
    /// The user; `None` at an edge.
    pub(crate) user: Option<UserIdentity>,
    /// Servers in order of preference, at least one.
    pub(crate) servers: Vec<ServerEndpoint>,
    /// Tokens that may prove the node's name, tried in turn.
    pub(crate) tokens: ReloadedValue<Vec<SecretString>>,
    /// Index of the token to try next. It stays the same while that token is accepted.
    pub(crate) turn: AtomicUsize,
    pub(crate) tls: ReloadedValue<ClientConfig>,
    /// File of the CAs of servers, if they are not those of the system.
    pub(crate) ca: Option<PathBuf>,
    /// Certificate presented in addition to the token, once issued. If a server seems to reject it, only every second
    /// attempt presents it.
    pub(crate) own: Option<EdgeCertificate>,
    pub(crate) proxy: Option<OutboundProxy>,
    /// Resolver of the servers' names, with the addresses known from before.
    pub(crate) known: CachingResolver,
    pub(crate) pool: BufferPool,
    pub(crate) link_context: LinkContext,
}

/// Who a user's program is.
#[derive(Debug)]
pub(crate) struct UserIdentity {
    /// The user of the token; `None` if a certificate names her.
    pub(crate) name: Option<UserName>,
    pub(crate) device: DeviceName,
}

/// A server of the config, as the [`LinkDialer`] dials it.
#[derive(Debug)]
pub(crate) struct ServerEndpoint {
    /// Host and port to dial.
    at: Target,
    /// Name or address that the server's certificate must contain.
    name: ServerName<'static>,
    /// Value of `:authority` in requests.
    authority: String,
    /// Whether the next attempt presents no certificate.
    declined: AtomicBool,
    websocket: WebSocketUse,
    /// File of the CAs of its proxy, which only the TLS around a WebSocket trusts.
    websocket_ca: Option<PathBuf>,
}

/// Why a link could not be dialled.
struct DialFailure {
    /// A fixed label for metrics.
    reason: &'static str,
    error: anyhow::Error,
    /// Why a link may pass inside of a WebSocket.
    websocket: Option<String>,
}

/// Why no server gave a link.
#[derive(Debug, Default, thiserror::Error)]
#[error("{text}")]
pub(crate) struct UplinkFailure {
    /// The errors of all servers.
    pub(crate) text: String,
    /// Whether a server was reached and would also refuse the next attempt.
    pub(crate) is_refused: bool,
    /// Whether a server is stopping, and may soon be back.
    pub(crate) is_stopping: bool,
    /// Whether every server refused the token or certificate, or what it proves.
    pub(crate) is_denied: bool,
    /// Whether another live process uses this node's name.
    pub(crate) is_name_taken: bool,
}

/// A link that the [`LinkDialer`] has just made, and the server at its remote end.
pub(crate) struct NewLink {
    pub(crate) reader: LinkReader,
    /// Index of its server.
    pub(crate) server: usize,
    /// The dialled address; `None` through a proxy.
    pub(crate) at: Option<SocketAddr>,
    /// Notified of changes since it was dialled: [`LinkDialer::proof_changes`].
    pub(crate) proof_changes: watch::Receiver<()>,
}

/// What a link is dialled for, and which addresses of its server are dialled first and last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DialRequest {
    pub(crate) purpose: LinkPurpose,
    /// The address to try first.
    pub(crate) to: Option<SocketAddr>,
    /// The address of the server that it leaves, to be tried last.
    pub(crate) exclude: Option<SocketAddr>,
}

impl ServerEndpoint {
    /// Creates the endpoint of a configured server.
    ///
    /// # Errors
    ///
    /// Returns an error if the name expected in the server's certificate is invalid.
    pub(crate) fn new(server: ServerAddress) -> Result<Self, String> {
        let ServerAddress { at, dns, is_websocket, websocket_ca } = server;
        let name = tls::server_name(&dns.to_string())?;
        // `:authority` contains the name in the certificate, as Go's edges send it.
        let authority = Target { host: dns, port: at.port }.to_string();
        let websocket = WebSocketUse::new(is_websocket);
        Ok(Self { at, name, authority, declined: AtomicBool::new(false), websocket, websocket_ca })
    }
}

impl DialRequest {
    /// Creates a request without preference.
    pub(crate) fn new(purpose: LinkPurpose) -> Self {
        Self { purpose, to: None, exclude: None }
    }

    /// Returns the place of an address among those of a server: the lowest is dialled first.
    pub(crate) fn rank(self, at: SocketAddr) -> u8 {
        if Some(at) == self.to { 0 } else { 1 + u8::from(Some(at) == self.exclude) }
    }
}

impl LinkDialer {
    /// Dials the servers, starting with index `first` and wrapping around, and returns the first link. The next server
    /// is dialled after a failure or [`NEXT_SERVER_DELAY`], as addresses are (RFC 8305).
    ///
    /// # Errors
    ///
    /// Returns the errors of all servers tried. A server that reports that another process uses this node's name is the
    /// last one tried.
    pub(crate) async fn connect(&self, first: usize, request: DialRequest) -> Result<NewLink, UplinkFailure> {
        let mut failed = UplinkFailure { is_denied: true, ..UplinkFailure::default() };
        let mut order = dial_order(first, self.servers.len());
        let mut attempts = FuturesUnordered::new();
        loop {
            if let Some(server) = order.next() {
                let attempt = self.connect_to(server, request);
                attempts.push(async move { (server, attempt.await) });
            }
            let (server, made) = tokio::select! {
                Some(ended) = attempts.next() => ended,
                // A program that hangs still accepts connections.
                () = sleep(NEXT_SERVER_DELAY), if order.len() > 0 => continue,
                else => return Err(failed),
            };
            let why = match made {
                Ok(made) => return Ok(made),
                Err(why) if self.servers.len() == 1 => why,
                Err(why) => why.context(format!("{}", self.servers[server].at)),
            };
            failed.is_refused |= self.is_refused(&why);
            failed.is_stopping |= matches!(why.downcast_ref(), Some(LinkDialError::Stopping));
            failed.is_denied &= why.downcast_ref().is_some_and(LinkDialError::is_denied);
            failed.is_name_taken = why.downcast_ref().is_some_and(LinkDialError::is_name_taken);
            if failed.is_name_taken {
                failed.text = self.no_link(&why);
                return Err(failed);
            }
            let between = if failed.text.is_empty() { "" } else { "; " };
            failed.text += &format!("{between}{}", self.no_link(&why));
        }
    }

    /// Returns the index of the server whose name has that address.
    pub(crate) async fn server_at(&self, at: SocketAddr) -> Option<usize> {
        for (index, server) in self.servers.iter().enumerate() {
            if self.resolve(&server.at).await.is_ok_and(|(addresses, _)| addresses.contains(&at)) {
                return Some(index);
            }
        }
        None
    }

    /// Returns true if the whole list is one address: that of the only server, or of a load balancer.
    pub(crate) async fn has_one_address(&self) -> bool {
        let [server] = &self.servers[..] else { return false };
        self.resolve(&server.at).await.is_ok_and(|(addresses, _)| addresses.len() == 1)
    }

    /// Dials a link to that server only, and counts a failure. Cancel safe: dropping the future leaves no link.
    pub(crate) async fn connect_to(&self, server: usize, request: DialRequest) -> anyhow::Result<NewLink> {
        self.try_connect(server, request).await.map_err(|DialFailure { reason, error, .. }| {
            self.link_context.metrics.link_dial_failures.count(reason);
            error
        })
    }

    async fn try_connect(&self, server: usize, request: DialRequest) -> Result<NewLink, DialFailure> {
        let purpose = request.purpose;
        let proof_changes = self.proof_changes();
        let to = self.servers.get(server).context("unknown server").map_err(failed("internal"))?;
        let shown = self.certificate(to).await.map_err(failed("credentials_missing"))?;
        let connect = async |again: Option<SocketAddr>| {
            let request = DialRequest { to: again.or(request.to), ..request };
            let dialled = timeout(CONNECT_TIMEOUT, self.dial(to, request)).await;
            let late = |_| anyhow!(messages::no_connection_within(CONNECT_TIMEOUT));
            let socket = dialled.map_err(late).map_err(failed("timeout"))??;
            let tuned = tune_link(&socket, self.link_context.congestion.as_deref());
            tuned.context("connection closed immediately").map_err(failed("closed_by_remote"))?;
            if purpose == LinkPurpose::Interactive {
                tune_interactive(&socket);
            }
            Ok(socket)
        };
        let attempt = async |websocket: Option<&str>| {
            let shake = |socket, is_again| {
                // The server may accept both attempts, and must not close the link that this edge keeps.
                let is_primary = purpose == LinkPurpose::Primary;
                let purpose = if is_again && is_primary { LinkPurpose::Backup } else { purpose };
                self.link(to, purpose, socket, shown.clone(), websocket)
            };
            path_mtu::handshake(connect, shake).await
        };
        let mut websocket = to.websocket.reason();
        let mut made = attempt(websocket.as_deref()).await;
        if let Err(DialFailure { websocket: reason @ Some(_), .. }) = &mut made {
            websocket = reason.take();
            let again = attempt(websocket.as_deref()).await;
            made = again.map_err(|again| match (made, again.error.downcast_ref()) {
                // Without a WebSocket, the reason for it is the error.
                (Err(first), Some(WebSocketError { is_tls: true, .. })) => first,
                (Err(DialFailure { error, reason, .. }), Some(why)) => {
                    failed(reason)(anyhow!("{error:#}; {why}"))
                }
                _ => again,
            });
        }
        let is_answered = made.as_ref().map_or_else(|failure| failure.error.is::<LinkDialError>(), |_| true);
        to.websocket.tried(websocket, is_answered, made.is_ok());
        let shows = shown.is_some();
        let reader = made.map_err(|failure| {
            // A server that accepts no client certificates, or not this one, closes the connection.
            to.declined.store(shows && is_broken(&failure.error), Relaxed);
            let context = |error: anyhow::Error| error.context(messages::CERTIFICATE_PRESENTED);
            DialFailure { error: if shows { context(failure.error) } else { failure.error }, ..failure }
        })?;
        let is_proxied = self.proxy.as_ref().is_some_and(|proxy| proxy.applies_to(&to.at));
        let at = reader.link.ends().and_then(|ends| ends.remote).filter(|_| !is_proxied);
        Ok(NewLink { reader, server, at, proof_changes })
    }

    /// Returns a receiver that is notified of changes of what proves the name: of the tokens, or of a user's certificate
    /// and the CAs of servers.
    fn proof_changes(&self) -> watch::Receiver<()> {
        match &self.user {
            Some(UserIdentity { name: None, .. }) => self.tls.changes(),
            _ => self.tokens.changes(),
        }
    }

    /// Returns the TLS config that presents the certificate to that server. Returns `None` if there is no certificate
    /// or the server seems to have rejected it.
    ///
    /// # Errors
    ///
    /// Returns an error if there is neither a certificate nor a token.
    async fn certificate(&self, to: &ServerEndpoint) -> anyhow::Result<Option<Arc<ClientConfig>>> {
        let alone = self.tokens.load().is_empty();
        let shown = match &self.own {
            Some(own) if alone || !to.declined.swap(false, Relaxed) => own.tls().await,
            _ => None,
        };
        anyhow::ensure!(shown.is_some() || !alone || self.user.is_some(), messages::NO_CREDENTIALS);
        Ok(shown)
    }

    /// Makes the TLS and link handshakes over a connection. `shown` is the TLS config that presents a certificate,
    /// `websocket` why they are inside of a WebSocket.
    async fn link(
        &self,
        to: &ServerEndpoint,
        purpose: LinkPurpose,
        socket: TcpStream,
        shown: Option<Arc<ClientConfig>>,
        websocket: Option<&str>,
    ) -> Result<LinkReader, DialFailure> {
        let shows = shown.is_some();
        let tls = TlsConnector::from(shown.unwrap_or_else(|| self.tls.load()));
        let silent = |patience| anyhow!(messages::no_answer_within(&to.at, patience));
        let late = |_| failed("tls_timeout")(silent(CONNECT_TIMEOUT));
        let trust = Trust::Public(self.ca.iter().cloned().collect());
        let proxy = self.proxy.as_ref();
        let socket = OutboundProxy::encrypted(proxy, socket, &to.at, trust, CONNECT_TIMEOUT);
        let socket = Box::pin(socket).await.map_err(failed("proxy"))?;
        let socket = if websocket.is_some() {
            let trust = Trust::Public(self.ca.iter().chain(&to.websocket_ca).cloned().collect());
            let connecting = websocket::connect(socket, &to.at, trust, self.pool.clone());
            let connected = timeout(CONNECT_TIMEOUT, Box::pin(connecting)).await.map_err(late)?;
            Either::Right(connected.map_err(failed("websocket"))?)
        } else {
            Either::Left(socket)
        };
        let io =
            timeout(CONNECT_TIMEOUT, tls.connect(to.name.clone(), Buffered::new(socket, self.pool.clone())));
        let io = io.await.map_err(late)?.map_err(|e| match TlsHandshakeError::of(&e) {
            TlsHandshakeError::Stopping => failed(LinkDialError::Stopping.reason())(LinkDialError::Stopping),
            fault => {
                let failure = failed("tls")(anyhow!(messages::no_tls(&e, &to.at, &to.name.to_str(), shows)));
                DialFailure { websocket: reason_of_tls(&fault).filter(|_| websocket.is_none()), ..failure }
            }
        })?;
        // A balancer that ends TLS may pass HTTP/2 without ALPN.
        let alpn = io.get_ref().1.alpn_protocol();
        let is_offered = alpn.is_some();
        if alpn.is_some_and(|alpn| alpn != tls::HTTP_2) {
            let error = io::Error::other(rustls::Error::NoApplicationProtocol);
            let failure = failed("tls")(anyhow!(messages::no_tls(&error, &to.at, &to.name.to_str(), shows)));
            return Err(DialFailure { websocket: Some(NO_HTTP_2.to_owned()), ..failure });
        }
        let tokens = self.tokens.load();
        let turn = self.turn.load(Relaxed);
        let token = tokens.get(turn % tokens.len().max(1)).map_or("", SecretString::reveal);
        let mut metadata = self.hello(purpose, token);
        if let Some(why) = websocket {
            with_websocket(&mut metadata, why);
        }
        let context = &self.link_context;
        let dialled =
            tunnel_link::grpc::dial::dial(Box::new(io), &to.authority, &self.node, metadata, context).await;
        if dialled.as_ref().is_err_and(LinkDialError::is_token_refused) {
            self.turn.store(turn.wrapping_add(1), Relaxed);
        }
        dialled.map_err(|error| {
            let is_sure = !is_offered || self.user.is_some();
            let reason = to.websocket.reason_after(&error, is_sure, shows).filter(|_| websocket.is_none());
            let failure = match error {
                LinkDialError::Timeout => failed(error.reason())(silent(ANSWER_TIMEOUT)),
                error => failed(error.reason())(error),
            };
            DialFailure { websocket: reason, ..failure }
        })
    }

    /// Returns the metadata of the call for a link.
    fn hello(&self, purpose: LinkPurpose, token: &str) -> HeaderMap {
        let instance = self.link_context.table.instance();
        let Some(UserIdentity { name, device }) = &self.user else {
            let mut metadata = EdgeHello::edge_request(&self.node, token, instance);
            EdgeHello::with_purpose(&mut metadata, purpose);
            if self.is_last_good.load(Relaxed) {
                EdgeHello::with_last_good_config(&mut metadata);
            }
            return metadata;
        };
        let proof = match name.clone() {
            Some(user) => UserProof::Token { user, token: token.to_owned() },
            None => UserProof::Certificate,
        };
        let device = device.clone();
        let is_backup = purpose == LinkPurpose::Backup;
        UserHello { proof, device, instance, is_backup }.request()
    }

    /// Returns the error text of a failed attempt to link, with a hint for the operator of the edge, or for the user.
    pub(crate) fn no_link(&self, why: &anyhow::Error) -> String {
        messages::no_link(why, self.user.is_some())
    }

    /// Returns true if a server was reached and would also refuse the next attempt, if that follows soon.
    pub(crate) fn is_refused(&self, why: &anyhow::Error) -> bool {
        let tried_all = self.turn.load(Relaxed).is_multiple_of(self.tokens.load().len().max(1));
        let lasts = |why: &LinkDialError| why.is_refusal() && (tried_all || !why.is_token_refused());
        why.downcast_ref().is_some_and(lasts)
    }

    /// Returns the name of a server for messages.
    pub(crate) fn display_name(&self, server: usize) -> String {
        self.servers.get(server).map(|server| server.at.to_string()).unwrap_or_default()
    }

    async fn dial(&self, to: &ServerEndpoint, request: DialRequest) -> Result<TcpStream, DialFailure> {
        let proxy = self.proxy.as_ref().filter(|proxy| proxy.applies_to(&to.at));
        let resolved = self.resolve(proxy.map_or(&to.at, OutboundProxy::at)).await;
        let (addresses, failure) = resolved.map_err(failed("dns"))?;
        let dialled = async {
            if let Some(proxy) = proxy {
                return proxy.connect(&addresses, &to.at, CONNECT_TIMEOUT).await.map_err(failed("proxy"));
            }
            let mut addresses = dial::in_order(&to.at.host, &addresses);
            addresses.sort_by_key(|at| request.rank(*at));
            dial_in_order(&to.at.host, &addresses, CONNECT_TIMEOUT).await.map_err(|why| {
                let reason = why.reason();
                let named = Some(&to.at).filter(|_| self.servers.len() > 1);
                failed(reason)(anyhow::anyhow!(messages::no_connection(&why, named)))
            })
        };
        dialled.await.map_err(|DialFailure { reason, error, .. }| match failure {
            Some(failure) => {
                failed(reason)(error.context(format!("{failure}; the last known addresses were dialled")))
            }
            None => failed(reason)(error),
        })
    }

    /// Resolves a target. Returns the error with the last known addresses if DNS failed.
    async fn resolve(&self, target: &Target) -> anyhow::Result<(Vec<SocketAddr>, Option<DnsLookupError>)> {
        let (found, failure) = match &target.host {
            Host::Ip(ip) => (vec![*ip], None),
            Host::Name(name) => {
                let ResolvedServer { addresses, failure } = self.known.addresses_of(name).await?;
                (addresses, failure)
            }
        };
        if let Some(error) = &failure {
            info!(%error, addresses = ?found, "DNS failed, dialling the last known addresses");
        }
        let mut addresses: Vec<_> = found.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect();
        // A name may resolve to all servers: edges spread over them randomly and use another one if one is stopping.
        addresses.shuffle(&mut rand::rng());
        Ok((addresses, failure))
    }
}

/// Returns a conversion of errors that adds the reason for metrics.
fn failed<E: Into<anyhow::Error>>(reason: &'static str) -> impl FnOnce(E) -> DialFailure {
    move |error| DialFailure { reason, error: error.into(), websocket: None }
}

/// Returns true if a connection ended during the TLS handshake or before the response to the first request. In TLS 1.3,
/// the server verifies the client's certificate between the two.
fn is_broken(why: &anyhow::Error) -> bool {
    match why.downcast_ref() {
        Some(dialled) => matches!(dialled, LinkDialError::Broken(_) | LinkDialError::CertificateRejected(_)),
        None => !why.is::<Elapsed>() && !why.is::<WebSocketError>(),
    }
}

/// Timeout for each step of connecting to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which the next server is dialled, while the attempt at the one before continues.
const NEXT_SERVER_DELAY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_hint_sorts_the_target_server_first_and_the_sender_last() {
        let at = |last: u8| SocketAddr::from(([10, 0, 0, last], 9000));
        let sorted = |to, not| {
            let mut addresses = [at(1), at(2), at(3), at(4)];
            let request = DialRequest { to, exclude: not, ..DialRequest::new(LinkPurpose::Primary) };
            addresses.sort_by_key(|at| request.rank(*at));
            addresses.map(|at| match at.ip() {
                std::net::IpAddr::V4(ip) => ip.octets()[3],
                std::net::IpAddr::V6(_) => 0,
            })
        };
        assert_eq!(sorted(None, None), [1, 2, 3, 4]);
        assert_eq!(sorted(Some(at(3)), Some(at(1))), [3, 2, 4, 1]);
        assert_eq!(
            sorted(Some(at(9)), Some(at(2))),
            [1, 3, 4, 2],
            "an address that the name does not have is ignored"
        );
    }
}
