//! The requests to the servers of a cloud, one server after the other until one responds.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;
use rand::seq::SliceRandom as _;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::either::Either;

use crate::command::join::JoinArgs;
use crate::command::output_dir::OutputDir;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use crate::invitations::code::{InvitationCode, pin_of};
use crate::uplink::link_dialer::messages::{for_user, no_connection};
use crate::uplink::link_dialer::websocket::{self, reason_of_tls};
use tunnel_link::grpc::enrol::{EnrolCallError, EnrolOperation, JoinCredentials, call_enrol};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::{OutboundProxy, ProxiedStream};
use tunnel_net::pool::BufferPool;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{HTTP_2, TlsClientConfig, Trust, link_alpn, server_name};
use tunnel_net::websocket::WebSocket;
use tunnel_proto::names::{Host, Target};

/// The request to join, and how to reach the servers.
pub(super) struct JoinClient<'a> {
    args: &'a JoinArgs,
    code: &'a InvitationCode,
    joining: JoinCredentials,
    /// The name in the servers' certificate.
    name: ServerName<'static>,
    folder: OutputDir,
    /// The path of the CA's file within the folder.
    ca_file: &'static str,
    proxy: Option<OutboundProxy>,
    resolver: Resolver,
    /// Whether a proxy on the path passes only WebSockets.
    in_websocket: AtomicBool,
    /// Whether a server may have granted the request.
    was_sent: AtomicBool,
}

/// The error of an attempt at one server.
enum JoinAttemptError {
    /// The server refused.
    Refused(String),
    /// The server belongs to another cloud, its certificate has another name or is not valid now, or it takes no
    /// invitations. Another server may be the right one.
    Foreign(String),
    /// The server did not respond; `sent` is true if the invitation was sent.
    Unanswered { text: String, sent: bool },
    /// A local error.
    Here(CommandError),
}

impl<'a> JoinClient<'a> {
    /// `name` is the node's name, or `USER/DEVICE`.
    pub(crate) fn new(
        args: &'a JoinArgs,
        code: &'a InvitationCode,
        name: String,
        token: &str,
        folder: OutputDir,
        ca_file: &'static str,
        env: &Environment,
    ) -> CommandResult<Self> {
        let joining = JoinCredentials { secret: code.secret(), name, token: token.to_owned() };
        let name = args.tls_server_name.as_ref().unwrap_or(&args.server.host).to_string();
        Ok(Self {
            args,
            code,
            joining,
            name: server_name(&name).map_err(CommandError::usage)?,
            folder,
            ca_file,
            proxy: env.proxy.parse().map_err(|cause| CommandError::unusable(cause.to_string()))?,
            resolver: Resolver::system(),
            in_websocket: AtomicBool::new(false),
            was_sent: AtomicBool::new(false),
        })
    }

    /// Joins, lets `write` write and check the files that name the servers and the name in their certificates, and moves
    /// all files to their final place. An attempt that may have been granted keeps them: the next one uses the same
    /// token. Returns a note about servers that the files do not name.
    pub(crate) async fn join(
        self,
        write: impl FnOnce(&OutputDir, &[Target], Option<&Host>) -> CommandResult<()>,
    ) -> CommandResult<String> {
        let written = async {
            let (authority, others) = self.ask().await?;
            self.folder.write(self.ca_file, &authority)?;
            let JoinArgs { server, tls_server_name, .. } = self.args;
            let mut servers = vec![server.clone()];
            let mut left_out = Vec::new();
            for (other, is_reached) in self.reached(&others).await {
                if is_reached { servers.push(other) } else { left_out.push(other.to_string()) }
            }
            // The address of another server need not be in its certificate.
            let name = tls_server_name.as_ref().or((servers.len() > 1).then_some(&server.host));
            write(&self.folder, &servers, name)?;
            if left_out.is_empty() {
                return Ok(String::new());
            }
            let name = name.unwrap_or(&server.host);
            let left_out = left_out.join(", ");
            Ok(format!(
                "left out {left_out}: this machine does not reach it, or its certificate is not for {name}\n"
            ))
        };
        match written.await {
            Ok(note) => self.folder.finish().map(|()| note),
            Err(failure) => {
                if self.was_sent.load(Relaxed) {
                    self.folder.keep();
                }
                Err(failure)
            }
        }
    }

    /// Returns the other servers, each with whether this machine reaches it and it has the name of the first one. Their
    /// addresses may be private.
    async fn reached(&self, others: &[String]) -> Vec<(Target, bool)> {
        // A proxy is asked for the named server only.
        if self.proxy.as_ref().is_some_and(|proxy| proxy.applies_to(&self.args.server)) {
            return Vec::new();
        }
        let known = &self.addresses().await.unwrap_or_default();
        let trust = &Trust::Ca(self.folder.unfinished().join(self.ca_file));
        let attempts = others.iter().filter_map(|other| other.parse().ok()).map(|other: Target| async move {
            let addresses = self.resolver.lookup_target(&other).await.unwrap_or_default();
            let Some(&at) = addresses.iter().find(|at| !known.contains(at)) else {
                // Known addresses are those of the first server itself.
                return addresses.is_empty().then_some((other, false));
            };
            let is_proved = self.is_proved(&other, at, trust).await;
            Some((other, is_proved))
        });
        join_all(attempts).await.into_iter().flatten().collect()
    }

    /// Returns true if another server answers at this address, and has the name of the first one.
    async fn is_proved(&self, other: &Target, at: SocketAddr, trust: &Trust) -> bool {
        let Ok(socket) = dial(&other.host, &[at], OTHERS_TIMEOUT).await else { return false };
        // Each may be behind another proxy.
        let in_websocket = AtomicBool::new(self.in_websocket.load(Relaxed));
        let proved = timeout(OTHERS_TIMEOUT, self.encrypted(socket, at, trust, &in_websocket)).await;
        proved.is_ok_and(|proved| proved.is_ok())
    }

    /// Returns the CAs (PEM) to trust the servers with, and the other servers. Tries each address several times.
    async fn ask(&self) -> CommandResult<(String, Vec<String>)> {
        let mut foreign = None;
        let mut last = String::new();
        let mut pause = INITIAL_PAUSE;
        let started = Instant::now();
        for round in 0..MAX_ATTEMPTS {
            if round > 0 {
                sleep(pause).await;
                pause *= 2;
            }
            let mut may_mend = false;
            let mut left = self.addresses().await?;
            while !left.is_empty() {
                match self.ask_first(&mut left).await {
                    Ok(granted) => {
                        self.was_sent.store(true, Relaxed);
                        return Ok(granted);
                    }
                    Err(JoinAttemptError::Refused(text)) => {
                        return Err(CommandError::refused(text + self.hint_after()));
                    }
                    Err(JoinAttemptError::Here(failure)) => return Err(failure),
                    Err(JoinAttemptError::Foreign(text)) => foreign = Some(text),
                    Err(JoinAttemptError::Unanswered { text, sent }) => {
                        may_mend = true;
                        // What a server made of the invitation tells more than another one's silence after it.
                        if !self.was_sent.fetch_or(sent, Relaxed) || sent {
                            last = text;
                        }
                    }
                }
            }
            // All servers belong to other clouds, have other names, or this clock is wrong; or a firewall drops all, and the
            // person waits for a word.
            if !may_mend || started.elapsed() > PATIENCE {
                break;
            }
        }
        // An answer is more telling than none.
        let why = foreign.filter(|_| !self.was_sent.load(Relaxed)).unwrap_or(last);
        Err(CommandError::unavailable(format!("{}: {why}{}", self.args.server, self.hint_after())))
    }

    /// Returns the hint after a request that may have been granted although no answer says so. May be empty.
    fn hint_after(&self) -> &'static str {
        match self.was_sent.load(Relaxed) {
            true => "; it may have been granted; run the same command again to continue",
            false => "",
        }
    }

    /// Requests to join at the first server that answers, and removes that from the list; all of them if none does.
    ///
    /// First fetches its CA and compares it with the hash in the invitation. Sends the invitation only after the server
    /// has proved its identity with that CA.
    async fn ask_first(&self, left: &mut Vec<SocketAddr>) -> Result<(String, Vec<String>), JoinAttemptError> {
        let authority = self.args.server.to_string();
        let addresses = std::mem::take(left);
        let socket = self.connect(&addresses).await?;
        let at = socket.peer_addr().map_err(|cause| unanswered(cause.to_string()))?;
        left.extend(addresses.into_iter().filter(|other| *other != at));
        let anyone = self.encrypted(socket, at, &Trust::NoVerify, &self.in_websocket).await?;
        let (shown, _) =
            call_enrol(Box::new(anyone), &authority, EnrolOperation::Ca).await.map_err(|why| {
                // HTTP/2 may break off at a proxy, so the next attempt is made in the other way.
                let is_unanswered = matches!(why, EnrolCallError::Unanswered(_));
                self.in_websocket.fetch_xor(is_unanswered, Relaxed);
                miss(why, false)
            })?;
        // If there are several CAs, only this one is trusted.
        let pin = self.code.pin();
        let fits = |block: &&str| {
            let mut block = block.as_bytes();
            rustls_pemfile::certs(&mut block).any(|der| der.is_ok_and(|der| pin_of(&der) == pin))
        };
        let pinned = shown.split_inclusive(CERTIFICATE_END).find(fits);
        let pinned =
            pinned.ok_or_else(|| JoinAttemptError::Foreign(format!("{} {WRONG_CLOUD}", self.named(at))))?;
        self.folder.write(self.ca_file, pinned).map_err(JoinAttemptError::Here)?;
        let trust = Trust::Ca(self.folder.unfinished().join(self.ca_file));
        let proved = self.encrypted(self.connect(&[at]).await?, at, &trust, &self.in_websocket).await?;
        let wish = EnrolOperation::Join(self.joining.clone());
        call_enrol(Box::new(proved), &authority, wish).await.map_err(|why| miss(why, true))
    }

    /// Connects to the first of these addresses of the servers, or of the proxy for them, that answers.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<TcpStream, JoinAttemptError> {
        let server = &self.args.server;
        match self.proxy.as_ref().filter(|proxy| proxy.applies_to(server)) {
            Some(proxy) => {
                proxy.connect(addresses, server, TIMEOUT).await.map_err(|e| unanswered(e.to_string()))
            }
            None => dial(&server.host, addresses, TIMEOUT).await.map_err(|cause| {
                let text = no_connection(&cause, Some(server)).replace("edge.uplink.servers", "SERVER:PORT");
                unanswered(for_user(text))
            }),
        }
    }

    /// Makes the TLS handshake with a server; inside of a WebSocket if a proxy ends TLS, which it sets `in_websocket` to.
    async fn encrypted(
        &self,
        socket: TcpStream,
        at: SocketAddr,
        trust: &Trust,
        in_websocket: &AtomicBool,
    ) -> Result<TlsStream<Either<ProxiedStream, WebSocket>>, JoinAttemptError> {
        let settings = TlsClientConfig { trust: trust.clone(), identity: None, alpn: link_alpn() };
        let tls = settings.load().map_err(|cause| unanswered(cause.to_string()))?;
        let is_inside = in_websocket.load(Relaxed);
        let made = async {
            let proxy = self.proxy.as_ref();
            let trust = Trust::Public(Vec::new());
            let socket = OutboundProxy::encrypted(proxy, socket, &self.args.server, trust, TIMEOUT);
            let socket = socket.await.map_err(|why| unanswered(why.to_string()))?;
            let socket = if is_inside {
                // A proxy between is not trusted with anything.
                let connected =
                    websocket::connect(socket, &self.args.server, Trust::NoVerify, BufferPool::new()).await;
                Either::Right(connected.map_err(|why| unanswered(why.to_string()))?)
            } else {
                Either::Left(socket)
            };
            Ok(TlsConnector::from(tls.load()).connect(self.name.clone(), socket).await)
        };
        let made = timeout(TIMEOUT, made).await;
        let named = self.named(at);
        let made = made.map_err(|_| unanswered(format!("{named} did not complete the TLS handshake")))??;
        let error = made.as_ref().err().map(TlsHandshakeError::of);
        let has_other = |io: &TlsStream<_>| io.get_ref().1.alpn_protocol().is_some_and(|alpn| alpn != HTTP_2);
        let is_proxied = match (&made, &error) {
            (Ok(io), _) => has_other(io),
            (_, Some(error)) => reason_of_tls(error).is_some(),
            _ => false,
        };
        if is_proxied && !is_inside {
            in_websocket.store(true, Relaxed);
            let again = Box::pin(self.encrypted(self.connect(&[at]).await?, at, trust, in_websocket)).await;
            match (again, &error) {
                // The first error was no proxy's.
                (Err(_), Some(_)) => in_websocket.store(false, Relaxed),
                (again, _) => return again,
            }
        }
        made.map_err(|cause| {
            let error = TlsHandshakeError::of(&cause);
            let name = self.name.to_str();
            let text = format!("TLS handshake as {name:?} with {named} failed: {error}{}", hint(&error));
            use TlsHandshakeError as E;
            let is_final = matches!(error, E::Name(_) | E::Expired(..) | E::NotValidYet(..));
            if is_final { JoinAttemptError::Foreign(text) } else { unanswered(text) }
        })
    }

    /// Returns an address for an error, which begins with the server that the user named.
    fn named(&self, at: SocketAddr) -> String {
        if Target::from(at) == self.args.server { "it".to_owned() } else { at.to_string() }
    }

    /// Returns the addresses of the servers, or of the proxy for them.
    async fn addresses(&self) -> CommandResult<Vec<SocketAddr>> {
        let proxy = self.proxy.as_ref().filter(|proxy| proxy.applies_to(&self.args.server));
        let found = self.resolver.lookup_target(proxy.map_or(&self.args.server, OutboundProxy::at)).await;
        let mut addresses = found.map_err(|cause| {
            CommandError::unavailable(format!(
                "{cause}; check the name and /etc/resolv.conf, or use an address"
            ))
        })?;
        addresses.shuffle(&mut rand::rng());
        Ok(addresses)
    }
}

fn unanswered(text: String) -> JoinAttemptError {
    JoinAttemptError::Unanswered { text, sent: false }
}

/// Returns the hint for a failed handshake. May be empty.
fn hint(error: &TlsHandshakeError) -> &'static str {
    match error {
        TlsHandshakeError::Name(_) => "; set --tls-server-name to a name in the certificate",
        TlsHandshakeError::Expired(..) | TlsHandshakeError::NotValidYet(..) => {
            "; set this machine's clock if it is wrong, or ask the server's operator for another certificate"
        }
        TlsHandshakeError::UnknownIssuer => "; the servers' CA may have changed: request a new invitation",
        TlsHandshakeError::NotTls | TlsHandshakeError::Protocol | TlsHandshakeError::Closed => {
            "; name the server's port for links, listen of its [server.links] (default 9000)"
        }
        _ => "",
    }
}

fn miss(why: EnrolCallError, sent: bool) -> JoinAttemptError {
    match why {
        EnrolCallError::Refused(text) => JoinAttemptError::Refused(text),
        EnrolCallError::Unserved => JoinAttemptError::Foreign(format!("{why}; {NO_STORE_HINT}")),
        EnrolCallError::Unanswered(text) => JoinAttemptError::Unanswered { text, sent },
    }
}

const NO_STORE_HINT: &str = "set store in [server.invitations] of all servers, and update older ones";

/// The error for a server with another CA.
const WRONG_CLOUD: &str = "does not belong to the cloud of this invitation, or its CA has changed; nothing \
                             was revealed to it; check the address, or request a new invitation";

/// The last line of each certificate.
const CERTIFICATE_END: &str = "-----END CERTIFICATE-----";

/// Number of attempts per address, and the first pause between them, which doubles.
const MAX_ATTEMPTS: u32 = 5;
const INITIAL_PAUSE: Duration = Duration::from_millis(500);
/// Time after which no further attempt begins.
const PATIENCE: Duration = Duration::from_secs(15);

/// Timeout for each step.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for each step with another server, which may be out of reach.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(3);
