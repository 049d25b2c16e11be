//! `tunnel connect`: a session through a server, for stdin and stdout or for a local port.

use std::fmt;
use std::fs::File;
use std::future::poll_fn;
use std::io::{self, ErrorKind, IsTerminal as _};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Args;
use http::header::{HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::{Method, Request, Response, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::ext::ReasonPhrase;
use hyper_util::rt::TokioIo;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tracing::Span;

use crate::command::client::{ClientArgs, ClientSettings, Setting};
use crate::command::{CommandError, exit_code};
use crate::listener::denial::Denial;
use crate::route::{OpenError, RouteError};
use crate::session_io::copy::close;
use crate::session_io::copy::{CopyEnd, EndKind, Side, copy_bidirectional};
use crate::uplink::client::ClientLinks;
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_base::logging::{one_line, printable};
use tunnel_base::names::{Host, NameError, Target};
use tunnel_base::policy::canonical_ip;
use tunnel_link::table::stream::Session;
use tunnel_net::ByteStream;
use tunnel_net::dial::dial;
use tunnel_net::listen::TcpAccept;
use tunnel_net::pool::BufferPool;
use tunnel_net::resolver::Resolver;
use tunnel_net::socket::{Connection, Socket};
use tunnel_net::tls::error::HandshakeError;
use tunnel_net::tls::{self, Identity, TlsClientConfig, Trust};
use tunnel_proto::frame::ErrorCode;

/// Arguments of `tunnel connect`.
#[derive(Debug, Clone, Args)]
pub struct ConnectArgs {
    /// Target as NODE:PORT, as clients of a server name it; or NODE, followed by PORT.
    #[arg(value_name = "NODE:PORT")]
    pub target: String,
    /// Port, if separate, as in ssh's `%h %p`.
    #[arg(value_name = "PORT")]
    pub port: Option<u16>,
    /// The server, and how to log in there.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Local address (IP:PORT, or PORT on 127.0.0.1) to listen on, with a session for each connection, until Ctrl-C.
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<String>,
}

/// Connects stdin and stdout to a target until both directions have ended, or serves a local port until `stop`
/// completes. `variable` returns environment variables by name. `print_line` prints a line on the terminal.
///
/// # Errors
///
/// Returns an error if the server refused the session, with its reason, or if the session was interrupted.
pub async fn connect(
    args: &ConnectArgs,
    variable: impl Fn(&str) -> Option<String>,
    stop: impl Future<Output = ()>,
    print_line: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<String, CommandError> {
    let target = target(args)?;
    let server = Arc::new(ConnectEndpoint::reach(ClientSettings::find(&args.client, variable)?).await?);
    let done = match &args.listen {
        None => async { carry(server.open(&target).await?).await }.await,
        Some(at) => {
            server.check_password_path().await?;
            listen(local(at)?, server.clone(), target, stop, print_line).await
        }
    };
    if let Some(ConnectEndpoint { place: ConnectAddress::Links(links), .. }) = Arc::into_inner(server) {
        links.close().await;
    }
    done.map(|()| String::new())
}

fn target(args: &ConnectArgs) -> Result<Target, CommandError> {
    let text = match args.port {
        None => args.target.clone(),
        // ssh passes IPv6 addresses without brackets.
        Some(port) if args.target.contains(':') && !args.target.starts_with('[') => {
            format!("[{}]:{port}", args.target)
        }
        Some(port) => format!("{}:{port}", args.target),
    };
    text.parse().map_err(|cause: NameError| CommandError::usage(cause.to_string()))
}

fn local(text: &str) -> Result<SocketAddr, CommandError> {
    let port = text.parse::<u16>().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    port.or_else(|_| text.parse()).map_err(|_| {
        CommandError::usage(format!(
            "--listen={text}: expected IP:PORT, for example 127.0.0.1:8022, or a port"
        ))
    })
}

async fn listen(
    at: SocketAddr,
    server: Arc<ConnectEndpoint>,
    target: Target,
    stop: impl Future<Output = ()>,
    print_line: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<(), CommandError> {
    let listener = TcpAccept::bind(at).map_err(|cause| CommandError::unavailable(cause.to_string()))?;
    print_line(&format!("{} forwards to {target}; press Ctrl-C to stop", listener.at()));
    if !at.ip().is_loopback() {
        print_line("anyone who reaches that address can reach the target, with your rights at the server");
    }
    let (drain, room, pool) = (Drain::new(), Arc::new(Semaphore::new(MAX_CONNECTIONS)), BufferPool::new());
    let serving = async {
        loop {
            // Only this function owns the semaphore, and never closes it.
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let (client, _) = listener.accept().await;
            let client = Socket::new(client, pool.clone());
            let (server, target, print_line) = (server.clone(), target.clone(), print_line.clone());
            drain.spawn(Span::none(), async move {
                if let Err(why) = serve(client, &server, &target).await {
                    print_line(&format!("tunnel: {why}"));
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = serving => {}
        () = stop => {}
    }
    drain.finish(std::time::Duration::ZERO, std::future::ready(())).await;
    Ok(())
}

/// Serves one client of the local port. Its connection is reset unless all bytes were transferred.
async fn serve(
    mut client: Socket<TcpStream>,
    server: &ConnectEndpoint,
    target: &Target,
) -> Result<(), CommandError> {
    client.io().set_reset_on_drop(true);
    let mut session = server.open(target).await?;
    let ended = session.carry(&mut client).await;
    close(&mut client, Side::A, ended).await;
    match ended {
        CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) } => {
            Err(session.interruption_error(kind))
        }
        // A client whose own connection failed already knows.
        _ => Ok(()),
    }
}

/// Maximum number of concurrent connections; more wait to be accepted.
const MAX_CONNECTIONS: usize = 1000;

// The server's CONNECT port, and opening a session through it.

/// The CONNECT port of a server, of the client's settings: how to reach it, and how to log in there. Or links to servers,
/// where the user is proved.
pub(crate) struct ConnectEndpoint {
    /// Where it listens.
    place: ConnectAddress,
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

/// Where the CONNECT port of a server listens: at a TCP address, or at a Unix socket of this machine. Or links instead.
enum ConnectAddress {
    At(Target),
    Socket(PathBuf),
    Links(ClientLinks),
}

impl ConnectEndpoint {
    /// Links to one of the settings' servers, or returns the server to connect to.
    pub(crate) async fn reach(settings: ClientSettings) -> Result<Self, CommandError> {
        let Some(links) = settings.links else { return Self::new(&settings) };
        let linked = ClientLinks::connect(links).await;
        let links =
            linked.map_err(|why| CommandError::unavailable(format!("cannot link to a server: {why}")))?;
        let (tls, authorization, login_hint) = (None, None, String::new());
        let place = ConnectAddress::Links(links);
        Ok(Self { place, tls, authorization, only_loopback: false, login_hint, pool: BufferPool::new() })
    }

    /// Reads the files that the settings name.
    pub(crate) fn new(settings: &ClientSettings) -> Result<Self, CommandError> {
        let ClientSettings { server: Setting { value: url, source }, .. } = settings;
        let wrong = |why: &str| {
            let expected = "expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH";
            CommandError::usage(format!("{source} {url:?}: {why}; {expected}"))
        };
        let (place, tls) = if let Some(path) = url.strip_prefix("unix:") {
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
        let certificate = settings.identity.as_ref().map(|(cert, _)| cert);
        if tls.is_none()
            && [&settings.ca.as_ref(), &certificate].iter().any(|file| file.is_some_and(Setting::is_flag))
        {
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
        Ok(Self { place, tls, authorization, only_loopback, login_hint, pool: BufferPool::new() })
    }

    /// Checks early that the password may be sent to the server. A name that cannot be resolved now is no error: each
    /// session resolves it again.
    async fn check_password_path(&self) -> Result<(), CommandError> {
        let ConnectAddress::At(at) = &self.place else { return Ok(()) };
        let Ok(addresses) = resolve(at).await else { return Ok(()) };
        self.check_password_to(&addresses)
    }

    /// Returns an error if the password would cross a network unencrypted.
    fn check_password_to(&self, addresses: &[SocketAddr]) -> Result<(), CommandError> {
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
    pub(crate) async fn open(&self, target: &Target) -> Result<ConnectStream, CommandError> {
        let failed =
            |why: &dyn fmt::Display| CommandError::unavailable(format!("cannot connect to {self}: {why}"));
        let unreached = |why: &dyn fmt::Display| failed(&format_args!("{why}\n  hint: {NO_SERVER}"));
        let trace = format!("{:08x}", rand::random::<u32>());
        let request = self.request(target, &trace)?;
        let opening = async {
            match &self.place {
                ConnectAddress::Links(links) => {
                    let opened = links.open(target).await;
                    Ok(Carrier::Link(opened.map_err(refused_session)?))
                }
                ConnectAddress::Socket(path) => {
                    let stream = UnixStream::connect(path).await.map_err(|cause| unreached(&cause))?;
                    Ok(Carrier::Unix(self.ask(stream, request).await?))
                }
                ConnectAddress::At(at) => {
                    let addresses = resolve(at).await.map_err(|why| unreached(&why))?;
                    self.check_password_to(&addresses)?;
                    let stream = dial(&at.host, &addresses, DIAL_TIMEOUT)
                        .await
                        .map_err(|why| unreached(&why.after(at)))?;
                    match &self.tls {
                        None => Ok(Carrier::Tcp(self.ask(stream, request).await?)),
                        Some((tls, name)) => {
                            let stream = tls.connect(name.clone(), stream).await;
                            let stream = stream.map_err(|cause| match HandshakeError::of(&cause) {
                                HandshakeError::Protocol | HandshakeError::NotTls => self.no_connect_port(),
                                _ => failed(&format_args!(
                                    "TLS failed: {cause}; check --ca (without it, the CAs of this system are trusted), and that the \
                                     server's certificate contains {}",
                                    name.to_str()
                                )),
                            })?;
                            Ok(Carrier::Tls(Box::new(self.ask(stream, request).await?)))
                        }
                    }
                }
            }
        };
        let opened = timeout(OPEN_TIMEOUT, opening).await;
        let carrier = opened.map_err(|_| failed(&format_args!("no response within {OPEN_TIMEOUT:?}")))??;
        let trace = if let Carrier::Link(session) = &carrier { session.id().to_string() } else { trace };
        Ok(ConnectStream { carrier, server: self.to_string(), trace })
    }

    /// Sends CONNECT, and takes the stream back from HTTP once the server has accepted.
    async fn ask<C: Connection>(
        &self,
        stream: C,
        request: Request<Empty<Bytes>>,
    ) -> Result<Socket<C>, CommandError> {
        let broken = |cause: hyper::Error| {
            if cause.is_parse() {
                self.no_connect_port()
            } else {
                CommandError::unavailable(format!("server {self} did not respond: {cause}"))
            }
        };
        let (mut sender, mut connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let mut answer = std::pin::pin!(async {
            let answer = sender.send_request(request).await?;
            Ok::<_, hyper::Error>(if answer.status().is_success() {
                None
            } else {
                Some(refusal(answer, &self.login_hint).await)
            })
        });
        let mut over = false;
        let refused = loop {
            tokio::select! {
                biased;
                refused = &mut answer => break refused.map_err(broken)?,
                // Its error reaches the request too.
                _ = poll_fn(|cx| connection.poll_without_shutdown(cx)), if !over => over = true,
            }
        };
        if let Some(refused) = refused {
            return Err(refused);
        }
        let parts = connection.into_parts();
        Ok(Socket::with_early(parts.io.into_inner(), self.pool.clone(), parts.read_buf))
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

    fn request(&self, target: &Target, trace: &str) -> Result<Request<Empty<Bytes>>, CommandError> {
        let text = target.to_string();
        let wrong = |_| CommandError::usage(format!("{text:?} cannot be requested over HTTP"));
        let mut request = Request::new(Empty::new());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = Uri::try_from(&*text).map_err(wrong)?;
        for (name, value) in [(HOST, &*text), (TRACE, trace)] {
            if let Ok(value) = HeaderValue::from_str(value) {
                request.headers_mut().insert(name, value);
            }
        }
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(PROXY_AUTHORIZATION, authorization.clone());
        }
        Ok(request)
    }
}

/// What to do if no server is reached.
const NO_SERVER: &str = "check that a server listens there, at listen of its [server.connect] or [server.egress], or name another with \
     --server. The config that tunnel init writes opens it for its own machine only";

impl fmt::Display for ConnectEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            ConnectAddress::At(at) => at.fmt(f),
            ConnectAddress::Socket(path) => path.display().fmt(f),
            ConnectAddress::Links(_) => f.write_str("the user's servers"),
        }
    }
}

/// The hint if a target was not reached over a link.
const NO_NODE: &str =
    "check that `tunnel edge` runs on that node, and that the node can resolve and reach the target";

/// Converts the reason why a session was not opened over a link.
fn refused_session(error: OpenError) -> CommandError {
    match error.why {
        RouteError::Refused { refusal, .. } if refusal.code == ErrorCode::NotAllowed => {
            CommandError::refused(refusal.reason)
        }
        why => {
            // Also the code for a node that no server has.
            let is_unreachable = matches!(
                &why, RouteError::Refused { refusal, .. } if refusal.code == ErrorCode::TargetUnreachable
            );
            let denial = Denial::from(why);
            let hint = if is_unreachable { NO_NODE } else { denial.next_step() };
            CommandError::unavailable(format!("{denial}\n  hint: {hint}"))
        }
    }
}

/// Converts a refusal: the reason and the hints in its body. The reason phrase, which is cut, replaces an empty body. If
/// the server requires credentials, `login_hint` replaces its hint, which is for other clients.
async fn refusal(answer: Response<Incoming>, login_hint: &str) -> CommandError {
    let status = answer.status();
    let phrase = answer
        .extensions()
        .get::<ReasonPhrase>()
        .map(|reason| String::from_utf8_lossy(reason.as_bytes()).into_owned());
    let phrase = phrase.unwrap_or_else(|| status.canonical_reason().unwrap_or_default().to_owned());
    let body = Limited::new(answer.into_body(), MAX_BODY)
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
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

fn encryption(
    settings: &ClientSettings,
    at: &Target,
) -> Result<(TlsConnector, ServerName<'static>), CommandError> {
    let trust = settings.ca.as_ref().map_or(Trust::System, |ca| Trust::Ca(ca.value.clone()));
    let identity = settings.identity.clone();
    let identity = identity.map(|(cert, key)| Identity { cert: cert.value, key: key.value });
    let settings = TlsClientConfig { trust, identity, alpn: vec![b"http/1.1".to_vec()] };
    let config = settings.load().map_err(|cause| CommandError::unusable(cause.to_string()))?;
    let name =
        tls::server_name(&at.host.to_string()).map_err(|cause| CommandError::usage(cause.to_string()))?;
    Ok((TlsConnector::from(config.load()), name))
}

fn authorization(settings: &ClientSettings) -> Result<Option<HeaderValue>, CommandError> {
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
    let plain = format!("{user}:{}", password.trim_end_matches(['\r', '\n']));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(plain)))
        .map_err(|cause| CommandError::usage(cause.to_string()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

async fn resolve(at: &Target) -> Result<Vec<SocketAddr>, String> {
    let found = match &at.host {
        Host::Ip(ip) => vec![*ip],
        Host::Name(name) => {
            let resolver = Resolver::system().map_err(|cause| cause.to_string())?;
            resolver.lookup(name).await.map_err(|cause| cause.to_string())?
        }
    };
    Ok(found.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
}

/// Identifies the request in the server's log.
const TRACE: HeaderName = HeaderName::from_static("traceid");
/// Timeout for the connection to the server.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for opening the session; longer than a server waits for a target.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a refusal's text.
const MAX_BODY: usize = 16 * 1024;

// A session's bytes over stdin and stdout.

/// Copies stdin to the session and the session to stdout until both have ended. Each end is passed on at once: the
/// session is notified when stdin ends, and stdout is closed when the session ends its direction. A terminal ends then,
/// too: its user cannot know that the target has closed.
///
/// # Errors
///
/// Returns an error if the session, stdin or stdout failed.
pub(crate) async fn carry(session: ConnectStream) -> Result<(), CommandError> {
    let failed = |cause: io::Error| interrupted(&cause.to_string());
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let stdio = Stdio {
        is_terminal: stdin.is_terminal(),
        input: tokio::fs::File::from_std(stdin.into()),
        ended: false,
        output: Some(stdout().map_err(failed)?),
        failed: None,
        reader: None,
    };
    tokio::select! {
        copied = copy(stdio, session) => copied,
        () = wait_hangup() => Err(interrupted("SIGHUP before both directions ended")),
    }
}

/// Copies both ways.
async fn copy(stdio: Stdio, mut session: ConnectStream) -> Result<(), CommandError> {
    let mut here = Socket::new(stdio, BufferPool::new());
    let ended = session.carry(&mut here).await;
    // Bytes received before a failure are still written.
    let flushed = poll_fn(|cx| here.poll_flush(cx)).await.map_err(|cause| stdout_error(cause.kind()));
    match ended {
        CopyEnd { how: EndKind::Finished, .. } => flushed,
        CopyEnd { by: Side::A, how: EndKind::ReadFailed(kind) } => {
            Err(interrupted(&format!("cannot read stdin: {kind}")))
        }
        CopyEnd { by: Side::A, how: EndKind::WriteFailed(kind) } => Err(stdout_error(kind)),
        CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) } => {
            Err(session.interruption_error(kind))
        }
    }
}

fn stdout_error(kind: io::ErrorKind) -> CommandError {
    interrupted(&format!("cannot write to stdout: {kind}"))
}

/// Completes some time after SIGHUP. ssh sends SIGHUP to its ProxyCommand as soon as it has closed both pipes, and the
/// end of its input must reach the server first. A program that ignores SIGHUP, as under nohup, continues to ignore it.
async fn wait_hangup() {
    if !ignores_hangup()
        && let Ok(mut hangups) = signal(SignalKind::hangup())
    {
        hangups.recv().await;
        return sleep(HANGUP_GRACE).await;
    }
    std::future::pending().await
}

/// Returns true if the parent has made this process ignore SIGHUP (proc(5), SigIgn).
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// Stdin and stdout of `tunnel connect` as one byte stream, to be copied to and from the session.
struct Stdio {
    input: tokio::fs::File,
    /// Whether stdin was read to its end.
    ended: bool,
    /// Stdout; `None` once its direction has ended. It is closed then, so that its reader notices.
    output: Option<tokio::fs::File>,
    /// The error of a failed write. Nothing is read after it, because the caller has disconnected.
    failed: Option<io::ErrorKind>,
    /// Whether stdin is a terminal, which ends with `output`.
    is_terminal: bool,
    /// Wakes the reader of a terminal when `output` ends.
    reader: Option<Waker>,
}

impl Connection for Stdio {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }

    async fn remote_reset(&self) {
        // As long as stdin is open, its bytes are needed, even if no process reads stdout.
        let closed = self.ended && self.output.as_ref().is_some_and(has_no_reader);
        if !closed {
            std::future::pending().await
        }
    }
}

/// Returns true if this is a pipe or a socket that no process can read.
fn has_no_reader(output: &tokio::fs::File) -> bool {
    let mut polled = [PollFd::new(output, PollFlags::empty())];
    let ready = rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok();
    ready && polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

impl Stdio {
    fn poll_output<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut tokio::fs::File>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let Some(output) = &mut self.output else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let polled = poll(Pin::new(output));
        if let Poll::Ready(Err(cause)) = &polled {
            self.failed = Some(cause.kind());
        }
        polled
    }
}

impl AsyncRead for Stdio {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(kind) = self.failed {
            return Poll::Ready(Err(kind.into()));
        }
        if self.is_terminal {
            if self.output.is_none() {
                return Poll::Ready(Ok(()));
            }
            self.reader = Some(cx.waker().clone());
        }
        let before = out.filled().len();
        let read = ready!(Pin::new(&mut self.input).poll_read(cx, out));
        self.ended = out.filled().len() == before;
        Poll::Ready(read)
    }
}

impl AsyncWrite for Stdio {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_output(|output| output.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.output {
            Some(_) => self.poll_output(|output| output.poll_flush(cx)),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(self.as_mut().poll_flush(cx));
        self.output = None;
        self.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(flushed)
    }
}

/// Returns stdout as a separate file; file descriptor 1 then points to /dev/null.
fn stdout() -> io::Result<tokio::fs::File> {
    let own = std::io::stdout().as_fd().try_clone_to_owned()?;
    let nowhere = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(tokio::fs::File::from_std(own.into()))
}

/// Time after SIGHUP for the ends of both directions to be passed on.
const HANGUP_GRACE: Duration = Duration::from_secs(1);

// An open session through a server: copying its bytes, and errors.

/// An open session through a server, made by [`ConnectEndpoint::open`].
pub(crate) struct ConnectStream {
    pub(crate) carrier: Carrier,
    /// The address of its server.
    pub(crate) server: String,
    /// Identifies the session in the server's access log.
    pub(crate) trace: String,
}

/// The connection to the server that carries a session.
pub(crate) enum Carrier {
    Tcp(Socket<TcpStream>),
    Unix(Socket<UnixStream>),
    Tls(Box<Socket<TlsStream<TcpStream>>>),
    /// A session of this process, which is at no single server.
    Link(Session),
}

impl ConnectStream {
    /// Copies bytes between `here`, which is side A, and the session until both have ended. Then closes the connection
    /// to the server: gracefully only if all bytes were transferred. A dropped call resets the connection.
    pub(crate) async fn carry(&mut self, here: &mut impl ByteStream) -> CopyEnd {
        match &mut self.carrier {
            Carrier::Tcp(socket) => copy_between(here, socket).await,
            Carrier::Unix(socket) => copy_between(here, socket).await,
            Carrier::Tls(socket) => copy_between(here, &mut **socket).await,
            // Dropping the session resets it, unless both directions have ended.
            Carrier::Link(session) => copy_bidirectional(here, session).await,
        }
    }

    /// Returns why the session was interrupted, as far as its client can know. Only the server knows and logs the
    /// cause.
    pub(crate) fn interruption_error(&self, kind: ErrorKind) -> CommandError {
        let Self { server, trace, .. } = self;
        if let Carrier::Link(session) = &self.carrier {
            let why = session.ended().map_or_else(|| kind.to_string(), |why| why.reason);
            return interrupted(&format!("{why}; see the servers' access logs (session={trace})"));
        }
        let how = match kind {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::NotConnected => {
                "reset the connection".to_owned()
            }
            ErrorKind::UnexpectedEof => "closed the connection without ending TLS".to_owned(),
            kind => format!("was lost: {kind}"),
        };
        interrupted(&format!(
            "server {server} {how}; see its access log (trace={trace}), unless it was killed"
        ))
    }
}

/// Returns the error of an interrupted session.
pub(crate) fn interrupted(why: &str) -> CommandError {
    CommandError { code: exit_code::IO_ERROR, text: format!("session interrupted: {why}") }
}

async fn copy_between<C: Connection>(here: &mut impl ByteStream, server: &mut Socket<C>) -> CopyEnd {
    // Set in advance in case this process is killed: a truncated upload must not look complete to the target.
    server.io().set_reset_on_drop(true);
    let ended = copy_bidirectional(here, server).await;
    close(server, Side::B, ended).await;
    ended
}

#[cfg(test)]
mod tests;
