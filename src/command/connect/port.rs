//! A CONNECT port: how it is reached, logging in there, and its refusals.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::{Request, Response};
use http_body_util::Full;
use hyper::ext::ReasonPhrase;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::AlertDescription;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::command::client::{ClientSettings, SourcedValue};
use crate::command::connect::session::{ConnectSession, ConnectStream};
use crate::command::http_request::{self, ReadBody};
use crate::command::{CommandError, CommandResult};
use tunnel_base::files;
use tunnel_base::policy::canonical_ip;
use tunnel_net::dial::dial;
use tunnel_net::pool::BufferPool;
use tunnel_net::resolver::Resolver;
use tunnel_net::socket::{AnyConnection, Connection, Socket};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, TlsClientConfig};
use tunnel_proto::names::{Host, Target};
use tunnel_proto::printable::{one_line, printable};

/// A CONNECT port: how to reach it, and how to log in there.
#[derive(derive_more::Display)]
#[display("{address}")]
pub(crate) struct ConnectPortClient {
    /// Where it listens.
    address: ConnectAddress,
    /// The TLS connector, and the name that the server's certificate must contain.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The value of `Proxy-Authorization`.
    authorization: Option<HeaderValue>,
    /// Whether that may be sent only to this machine, because it would cross a network unencrypted.
    only_loopback: bool,
    /// What to do if the server requires other credentials.
    login_hint: String,
    pool: BufferPool,
}

/// Where a CONNECT port listens.
#[derive(derive_more::Display)]
enum ConnectAddress {
    /// The TCP address of a server.
    At(Target),
    /// A server's Unix socket on this machine.
    #[display("{}", _0.display())]
    Socket(PathBuf),
}

impl ConnectPortClient {
    /// Reads the files that the settings name.
    pub(super) fn new(settings: &ClientSettings) -> CommandResult<Self> {
        let ClientSettings { server: SourcedValue { value: url, source }, .. } = settings;
        let wrong = |why: &str| {
            let expected = "expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH";
            CommandError::usage(format!("{source} {url:?}: {why}; {expected}"))
        };
        let (address, tls) = if let Some(path) = url.strip_prefix("unix:") {
            if !path.starts_with('/') {
                return Err(wrong("the path must begin with /"));
            }
            (ConnectAddress::Socket(path.into()), None)
        } else if url.contains('@') {
            // The value may contain a password, so the error does not.
            return Err(CommandError::usage(format!(
                "{source}: contains @; name the user with --user, and the password's file with --password-file"
            )));
        } else {
            let (secure, at) = match url.split_once("://") {
                None => (false, url.as_str()),
                Some(("http", rest)) => (false, rest),
                Some(("https", rest)) => (true, rest),
                Some(_) => return Err(wrong("unsupported URL")),
            };
            let at =
                at.trim_end_matches('/').parse::<Target>().map_err(|_| wrong("invalid host and port"))?;
            let tls = if secure { Some(encryption(settings, &at)?) } else { None };
            (ConnectAddress::At(at), tls)
        };
        // Otherwise these flags would be ignored, and the session unencrypted against the user's intention.
        if tls.is_none() && settings.requires_tls {
            return Err(CommandError::usage(format!(
                "--ca and --cert require TLS; use https:// in {source}"
            )));
        }
        let authorization = authorization(settings)?;
        let login_hint = match settings.user.as_ref().zip(settings.password_file.as_ref()) {
            None => "set --user and --password-file, or TUNNEL_USER and TUNNEL_PASSWORD_FILE".to_owned(),
            Some((user, file)) => format!(
                "check user {} ({}) and the password in {} ({})",
                printable(&user.value),
                user.source,
                file.value.display(),
                file.source
            ),
        };
        let only_loopback = authorization.is_some() && tls.is_none() && !settings.insecure;
        Ok(Self { address, tls, authorization, only_loopback, login_hint, pool: BufferPool::new() })
    }

    /// Checks early that the password may be sent to the server. A name that cannot be resolved now is no error: each
    /// session resolves it again.
    pub(super) async fn check_password_path(&self) -> CommandResult<()> {
        let ConnectAddress::At(at) = &self.address else { return Ok(()) };
        let Ok(addresses) = resolve(at).await else { return Ok(()) };
        self.check_password_to(&addresses)
    }

    /// Returns an error if the password would cross a network unencrypted.
    fn check_password_to(&self, addresses: &[SocketAddr]) -> CommandResult<()> {
        let is_local = |at: &SocketAddr| canonical_ip(at.ip()).is_loopback();
        if !self.only_loopback || addresses.iter().all(is_local) {
            return Ok(());
        }
        Err(CommandError::usage(format!(
            "the password would cross the network to {self} unencrypted\n  hint: use --server=https://HOST:PORT, with a \
             port that has a cert in its table; or send the password anyway, with --insecure"
        )))
    }

    /// Opens a session to a target. Cancel safe.
    pub(super) async fn open(&self, target: &Target) -> CommandResult<ConnectSession> {
        let failed =
            |why: &dyn fmt::Display| CommandError::unavailable(format!("cannot connect to {self}: {why}"));
        let unreached = |why: &dyn fmt::Display| failed(&format_args!("{why}\n  hint: {NO_SERVER}"));
        let trace = format!("{:08x}", rand::random::<u32>());
        let request = self.request(target, &trace)?;
        let opening = async {
            match &self.address {
                ConnectAddress::Socket(path) => {
                    let stream = UnixStream::connect(path).await.map_err(|cause| unreached(&cause))?;
                    self.ask(stream, request).await
                }
                ConnectAddress::At(at) => {
                    let addresses = resolve(at).await.map_err(|why| unreached(&why))?;
                    // The name is resolved by now: only addresses tell whether the password would leave this machine.
                    self.check_password_to(&addresses)?;
                    let stream = dial(&at.host, &addresses, DIAL_TIMEOUT)
                        .await
                        .map_err(|why| unreached(&why.after(at)))?;
                    match &self.tls {
                        None => self.ask(stream, request).await,
                        Some((tls, name)) => {
                            let stream = tls.connect(name.clone(), stream).await;
                            let stream = stream.map_err(|cause| match TlsHandshakeError::of(&cause) {
                                TlsHandshakeError::Protocol | TlsHandshakeError::NotTls => self.no_connect_port(),
                                TlsHandshakeError::AlertReceived(AlertDescription::AccessDenied) => failed(&format_args!(
                                    "the server does not accept connections from this address (TLS alert access_denied, \
                                     403 without TLS); its allow_from lists those that it accepts"
                                )),
                                why => failed(&format_args!(
                                    "TLS failed: {why}; check --ca (without it, the CAs of this system are trusted), and that the \
                                     server's certificate contains {}",
                                    name.to_str()
                                )),
                            })?;
                            self.ask(stream, request).await
                        }
                    }
                }
            }
        };
        let opened = timeout(OPEN_TIMEOUT, opening).await;
        let stream = opened.map_err(|_| failed(&format_args!("no response within {OPEN_TIMEOUT:?}")))??;
        Ok(ConnectSession { stream, from: self.to_string(), trace })
    }

    /// Sends CONNECT, and takes the stream back from HTTP once the server has accepted.
    async fn ask<C: Connection + 'static>(
        &self,
        stream: C,
        request: Request<Full<Bytes>>,
    ) -> CommandResult<ConnectStream> {
        let broken = |cause: hyper::Error| {
            if cause.is_parse() {
                self.no_connect_port()
            } else {
                CommandError::unavailable(format!("{self} did not respond: {cause}"))
            }
        };
        let answer = http_request::send(stream, request, MAX_BODY).await.map_err(broken)?;
        // After 204 hyper returns no stream, even for CONNECT.
        if !answer.status().is_success() || answer.extensions().get::<OnUpgrade>().is_none() {
            return Err(refusal(answer, &self.login_hint));
        }
        let accepted = hyper::upgrade::on(answer).await.map_err(broken)?;
        let parts = accepted.downcast::<TokioIo<C>>().map_err(|_| self.no_connect_port())?;
        let stream: AnyConnection = Box::new(parts.io.into_inner());
        Ok(ConnectStream::Server(Socket::with_early(stream, self.pool.clone(), parts.read_buf)))
    }

    fn no_connect_port(&self) -> CommandError {
        let (spoken, other) = if self.tls.is_some() {
            ("over", "http:// if it has none")
        } else {
            ("without", "https:// if it has one")
        };
        CommandError::unavailable(format!(
            "{self} does not speak HTTP {spoken} TLS; check the cert of [server.connect] there and use {other}; use the port \
             of server.connect.listen, not the one to which nodes link (server.links.listen)"
        ))
    }

    fn request(&self, target: &Target, trace: &str) -> CommandResult<Request<Full<Bytes>>> {
        let text = target.to_string();
        let mut request = Request::connect(&*text).header(HOST, &*text).header(TRACE, trace);
        if let Some(authorization) = &self.authorization {
            request = request.header(PROXY_AUTHORIZATION, authorization);
        }
        let wrong = |_| CommandError::usage(format!("{text:?} cannot be requested over HTTP"));
        request.body(Full::default()).map_err(wrong)
    }
}

/// What to do if no server is reached.
const NO_SERVER: &str = "check that a server listens there, at listen of its [server.connect] or [server.egress], or name another with \
     --server. The config that tunnel init writes opens it for its own machine only. A user's machine needs no such port: \
     link it with an invitation, tunnel join --user";

/// Converts a refusal: the reason and the hints in its body. The reason phrase, which is cut, replaces an empty body.
/// If the server requires credentials, `login_hint` replaces its hint, which is for other clients.
fn refusal(answer: Response<ReadBody>, login_hint: &str) -> CommandError {
    let status = answer.status();
    let phrase = answer
        .extensions()
        .get::<ReasonPhrase>()
        .map(|reason| String::from_utf8_lossy(reason.as_bytes()).into_owned());
    let phrase = phrase.unwrap_or_else(|| status.canonical_reason().unwrap_or_default().to_owned());
    let body = answer.into_body().unwrap_or_default();
    let body = String::from_utf8_lossy(&body).into_owned();
    let is_login_missing = status.as_u16() == 407;
    let mut lines = body.lines().filter(|line| !line.trim().is_empty());
    let reason = lines.next().map_or_else(|| printable(&phrase), one_line);
    let lines = lines.filter(|line| !(is_login_missing && line.starts_with("hint:")));
    let mut text = format!("{} {reason}", status.as_u16());
    text.extend(lines.map(|line| format!("\n  {}", one_line(line))));
    if is_login_missing {
        text += &format!("\n  hint: {login_hint}");
    }
    if is_login_missing || status.as_u16() == 403 {
        CommandError::refused(text)
    } else {
        CommandError::unavailable(text)
    }
}

fn encryption(settings: &ClientSettings, at: &Target) -> CommandResult<(TlsConnector, ServerName<'static>)> {
    let ClientSettings { trust, identity, .. } = settings.clone();
    let settings = TlsClientConfig { trust, identity, alpn: vec![b"http/1.1".to_vec()] };
    let config = settings.load().map_err(|cause| CommandError::unusable(cause.to_string()))?;
    let name = tls::server_name(&at.host.to_string()).map_err(CommandError::usage)?;
    Ok((TlsConnector::from(config.load()), name))
}

fn authorization(settings: &ClientSettings) -> CommandResult<Option<HeaderValue>> {
    let (user, file) = match (&settings.user, &settings.password_file) {
        (None, None) => return Ok(None),
        (Some(user), Some(file)) => (&user.value, &file.value),
        (Some(user), None) => {
            let text = format!(
                "{} {:?}: a user requires --password-file, or TUNNEL_PASSWORD_FILE",
                user.source, user.value
            );
            return Err(CommandError::usage(text));
        }
        (None, Some(file)) => {
            return Err(CommandError::usage(format!(
                "{} requires a user: --user, or TUNNEL_USER",
                file.source
            )));
        }
    };
    if user.contains(':') {
        return Err(CommandError::usage(
            "--user: contains :, which separates a user from the password; remove it",
        ));
    }
    let password = files::read_text(file)
        .map_err(|cause| CommandError::unusable(format!("cannot read {}: {cause}", file.display())))?;
    // Editors end the file with a line break, which is no part of the password.
    let plain = format!("{user}:{}", password.trim_end_matches(['\r', '\n']));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(plain)))
        .map_err(|cause| CommandError::usage(cause.to_string()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

async fn resolve(at: &Target) -> Result<Vec<SocketAddr>, String> {
    if let Host::Ip(ip) = at.host {
        return Ok(vec![SocketAddr::new(ip, at.port)]);
    }
    Resolver::system().lookup_target(at).await.map_err(|cause| cause.to_string())
}

/// Identifies the request in the server's log.
const TRACE: HeaderName = HeaderName::from_static("traceid");
/// Timeout for the connection to the server.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for opening the session; longer than a server waits for a target.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a refusal's text.
const MAX_BODY: usize = 16 * 1024;
