//! Requests of the admin API: to a program on this machine over its admin socket, to a server over a link, to others at
//! their port.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::command::connect::opener::no_link;
use crate::command::{CommandError, client};
use crate::config::Environment;
use crate::route::RouteError;
use crate::startup::admin_socket::SocketDirs;
use crate::uplink::client::ClientLinks;
use tunnel_base::logging::{one_line as clean, plain_text};
use tunnel_net::socket::ByteStreamIo;
use tunnel_proto::frame::ErrorCode;

/// Where a command sends its requests.
pub(crate) struct AdminApi {
    at: ApiEndpoint,
    choice: String,
}

enum ApiEndpoint {
    /// The admin socket of a process on this machine.
    Socket(PathBuf),
    /// The server of a link of `client.toml`.
    Link(Box<ClientLinks>),
}

/// Runs `work` with the API of the process that a command queries: that of the `named` socket, otherwise of a program on
/// this machine with one of these names, if this user may open its socket. Otherwise that of the server of a link, if
/// `client.toml` has links.
///
/// # Errors
///
/// Returns the error of `work`, or that there is no such process.
pub(crate) async fn query<T>(
    named: Option<PathBuf>,
    names: &[&str],
    env: &Environment,
    work: impl AsyncFnOnce(&AdminApi) -> Result<T, CommandError>,
) -> Result<T, CommandError> {
    let api = AdminApi::find(named, names, env).await?;
    let done = work(&api).await;
    if let ApiEndpoint::Link(links) = api.at {
        links.close().await;
    }
    done
}

impl AdminApi {
    async fn find(named: Option<PathBuf>, names: &[&str], env: &Environment) -> Result<Self, CommandError> {
        let socket = socket(named, names, env).await;
        if !matches!(&socket, Ok(socket) if socket.is_open)
            && let Some(links) = client::links_of(env)?
        {
            let links = ClientLinks::connect(links).await.map_err(|why| no_link(&why))?;
            let running: Vec<_> = socket.iter().flat_map(Socket::running).collect();
            return Ok(Self { choice: choice(LINK, &running), at: ApiEndpoint::Link(Box::new(links)) });
        }
        let or_link = |error: CommandError| CommandError {
            text: format!("{}; or link as a user: tunnel join --user", error.text),
            ..error
        };
        let socket = socket.map_err(or_link)?;
        let others: Vec<_> = socket.others.iter().collect();
        let choice = choice(&socket.path.display().to_string(), &others);
        Ok(Self { choice, at: ApiEndpoint::Socket(socket.path) })
    }

    /// Names the process that was chosen among several, and the others, on a line. Empty if there is only one.
    pub(crate) fn choice(&self) -> &str {
        &self.choice
    }

    /// Requests a path. Returns the body of the response.
    pub(crate) async fn get(&self, path: &str) -> Result<String, CommandError> {
        self.send(Method::GET, path, String::new()).await
    }

    /// Sends one request with a body. Returns the body of the response.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the request may have been executed.
    pub(crate) async fn post(&self, path: &str, body: String) -> Result<String, CommandError> {
        self.send(Method::POST, path, body).await
    }

    async fn send(&self, method: Method, path: &str, body: String) -> Result<String, CommandError> {
        let (code, body) = self.ask(method, path, body).await?;
        let text = || format!("{self}: {}", clean(body.trim_end()));
        // Below 500 the program has refused the request; a retry would get the same response.
        match code {
            200 => Ok(body),
            400..500 => Err(CommandError::refused(text())),
            _ => Err(CommandError::unavailable(text())),
        }
    }

    async fn ask(&self, method: Method, path: &str, body: String) -> Result<(u16, String), CommandError> {
        let links = match &self.at {
            ApiEndpoint::Socket(socket) => return ask(socket, method, path, body).await,
            ApiEndpoint::Link(links) => links,
        };
        let failed =
            |cause: &dyn fmt::Display| CommandError::unavailable(format!("{self} does not respond: {cause}"));
        let session = links.open_admin().await.map_err(|error| match error.why {
            RouteError::Refused { refusal, .. } if refusal.code == ErrorCode::NotAllowed => {
                CommandError::refused(format!("{self}: {refusal}"))
            }
            RouteError::Refused { refusal, .. } => CommandError::unavailable(format!("{self}: {refusal}")),
            why => failed(&why),
        })?;
        let answer = exchange(ByteStreamIo::new(session), method, path, body.into()).await;
        answer.map_err(|cause| failed(&cause))
    }

    /// Parses a response. Its texts are cleaned where they are printed, as JSON can escape any character.
    pub(crate) fn parse<T: DeserializeOwned>(&self, body: &str) -> Result<T, CommandError> {
        serde_json::from_str(body).map_err(|cause| self.incompatible(&cause))
    }

    /// Returns the error of a response that this version does not understand.
    pub(crate) fn incompatible(&self, cause: &dyn fmt::Display) -> CommandError {
        let cause = clean(&cause.to_string());
        CommandError::unavailable(format!("incompatible version at {self}: {cause}"))
    }
}

impl fmt::Display for AdminApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            ApiEndpoint::Socket(path) => path.display().fmt(f),
            ApiEndpoint::Link(_) => f.write_str(LINK),
        }
    }
}

/// Names the chosen process and the others that run on this machine. Empty if there are no others.
fn choice(chosen: &str, others: &[&PathBuf]) -> String {
    if others.is_empty() {
        return String::new();
    }
    let others: Vec<_> = others.iter().map(|path| format!("--socket={}", path.display())).collect();
    format!("queried {chosen}; others on this machine: {}\n", others.join(" "))
}

/// How texts name the server of a link.
const LINK: &str = "the server of your link (client.toml)";

// The admin sockets of this machine.

/// The admin socket of a process on this machine.
pub(crate) struct Socket {
    pub(crate) path: PathBuf,
    /// Whether a process accepts this user's connection.
    is_open: bool,
    /// Whether a process listens there.
    is_running: bool,
    /// The sockets of other programs that run on this machine.
    others: Vec<PathBuf>,
}

impl Socket {
    /// Returns the sockets of all programs that run on this machine.
    fn running(&self) -> impl Iterator<Item = &PathBuf> {
        self.is_running.then_some(&self.path).into_iter().chain(&self.others)
    }
}

/// Chooses the socket to query: the named one, otherwise the first default socket of a program with one of these names.
/// Programs that respond come first, then programs that this user may not query, then programs that have ended.
///
/// # Errors
///
/// Returns an error if no socket is named, and none is found.
pub(crate) async fn socket(
    named: Option<PathBuf>,
    names: &[&str],
    env: &Environment,
) -> Result<Socket, CommandError> {
    if let Some(path) = named {
        return Ok(Socket { path, is_open: true, is_running: true, others: Vec::new() });
    }
    let mut found = Vec::new();
    for path in SocketDirs::of_user(env.runtime_dir.as_deref()).sockets(names) {
        let state = match UnixStream::connect(&path).await.map_err(|cause| cause.kind()) {
            Ok(_) => SocketState::Answers,
            Err(io::ErrorKind::PermissionDenied) => SocketState::Denied,
            Err(_) => SocketState::Ended,
        };
        found.push((state, path));
    }
    found.sort_by_key(|(state, _)| *state);
    let running = found.iter().filter(|(state, _)| *state != SocketState::Ended);
    let others = running.skip(1).map(|(_, path)| path.clone()).collect();
    let first = found.into_iter().next();
    let first = first.map(|(state, path)| Socket {
        path,
        is_open: state == SocketState::Answers,
        is_running: state != SocketState::Ended,
        others,
    });
    first.ok_or_else(|| {
        let text = format!(
            "no admin socket of {} found at the default paths; check that one of this user is running on this machine. Its log at \
             the start contains the socket's path; set it with --socket=PATH, or run this as the user of the program",
            if names.contains(&"edge") { "a server or edge" } else { "a server" },
        );
        CommandError::unavailable(text)
    })
}

/// Whether the process at an admin socket answers. The best state comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SocketState {
    /// A process accepts the connection.
    Answers,
    /// This user may not connect.
    Denied,
    /// No process listens there.
    Ended,
}

/// Sends one request with a body, which may be empty, and returns HTTP status and body of the response.
///
/// # Cancel safety
///
/// Not cancel safe: the request may have been executed.
///
/// # Errors
///
/// Returns an error if there is no response, or this user has no permission.
pub(crate) async fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: impl Into<Bytes>,
) -> Result<(u16, String), CommandError> {
    let failed = |cause: &dyn std::fmt::Display| {
        CommandError::unavailable(format!("{} does not respond: {cause}", socket.display()))
    };
    let stream = UnixStream::connect(socket).await.map_err(|cause| match cause.kind() {
        io::ErrorKind::PermissionDenied => CommandError::refused(format!(
            "permission denied for {}; only the user that runs its program and root (sudo) may open it",
            socket.display()
        )),
        io::ErrorKind::ConnectionRefused => {
            failed(&"its program has ended; start it, or set another --socket")
        }
        io::ErrorKind::NotFound => failed(&"no such socket; start its program, or set another --socket"),
        _ => failed(&cause),
    })?;
    exchange(stream, method, path, body.into()).await.map_err(|cause| failed(&cause))
}

/// Sends one request over a stream, like [`ask`]. Returns the response, or the reason why there is none. The other end
/// may be any program, so its text cannot control a terminal.
pub(crate) async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(u16, String), String> {
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = http::Uri::try_from(path).unwrap_or_default();
        request.headers_mut().insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
        // Owns the sender, so that the connection ends with the response.
        let answer = async move {
            let answer = sender.send_request(request).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_BYTES).collect().await;
            Ok::<_, hyper::Error>((head.status.as_u16(), body.map(|body| body.to_bytes())))
        };
        // The connection is driven at the same time. If it ends first, the sender returns the error.
        let (answer, _) = tokio::join!(answer, connection);
        answer
    };
    match timeout(TIMEOUT, exchange).await {
        Ok(Ok((status, Ok(body)))) => Ok((status, plain_text(&String::from_utf8_lossy(&body)))),
        Ok(Ok((_, Err(cause)))) => Err(cause.to_string()),
        Ok(Err(cause)) => Err(cause.to_string()),
        Err(_) => Err(format!(
            "no response within {TIMEOUT:?}; the process is stopped or overloaded: check its state and its log"
        )),
    }
}

/// Timeout for a complete response. A server with 20,000 nodes needs some time to list them.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response, for some 100,000 nodes.
const MAX_BYTES: usize = 64 << 20;
