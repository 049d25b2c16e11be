//! Asks a program of this machine: a pod or an edge over its admin socket, another at its port.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::Failure;
use crate::config::Environment;
use crate::startup::SocketDirs;

/// A socket to ask.
pub(super) struct Socket {
    pub(super) path: PathBuf,
    /// The sockets of other programs that run on this machine.
    others: Vec<PathBuf>,
}

impl Socket {
    /// Names the socket that was chosen among several, and the others; empty if there is only one.
    pub(super) fn choice(&self) -> String {
        if self.others.is_empty() {
            return String::new();
        }
        let others: Vec<_> = self.others.iter().map(|path| format!("--socket={}", path.display())).collect();
        format!("asked {}; others on this machine: {}\n", self.path.display(), others.join(" "))
    }
}

/// The socket to ask: the named one, otherwise the first that a program with one of these names has by default. A
/// program that answers is preferred to one that this user may not ask, and that to one that has ended.
///
/// # Errors
///
/// No socket is named, and none is found.
pub(super) async fn socket(
    named: Option<PathBuf>,
    names: &[&str],
    env: &Environment,
) -> Result<Socket, Failure> {
    if let Some(path) = named {
        return Ok(Socket { path, others: Vec::new() });
    }
    let mut found = Vec::new();
    for path in SocketDirs::of_user(env.runtime_dir.as_deref()).sockets(names) {
        let state = match UnixStream::connect(&path).await.map_err(|cause| cause.kind()) {
            Ok(_) => State::Answers,
            Err(io::ErrorKind::PermissionDenied) => State::Denied,
            Err(_) => State::Ended,
        };
        found.push((state, path));
    }
    found.sort_by_key(|(state, _)| *state);
    let mut running = found.iter().filter(|(state, _)| *state != State::Ended);
    let first = running.next().or(found.first()).map(|(_, path)| path.clone());
    let others = running.map(|(_, path)| path.clone()).collect();
    first.map(|path| Socket { path, others }).ok_or_else(|| {
        let text = "no server or edge of this user has its socket at a usual place: is one running here? Its log says at the \
                    start where its socket is; name that with --socket=PATH, or ask as the user that runs it";
        Failure::unavailable(text)
    })
}

/// What comes of connecting to a socket, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Answers,
    Denied,
    Ended,
}

/// Sends one request with a body, which may be empty; gives HTTP status and body of the answer. Not cancel safe: the request
/// may have been done.
///
/// # Errors
///
/// Nobody answers there, or this user may not ask.
pub(super) async fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: impl Into<Bytes>,
) -> Result<(u16, Bytes), Failure> {
    let failed = |cause: &dyn std::fmt::Display| {
        Failure::unavailable(format!("{} does not answer: {cause}", socket.display()))
    };
    let stream = UnixStream::connect(socket).await.map_err(|cause| match cause.kind() {
        io::ErrorKind::PermissionDenied => Failure {
            code: NOT_PERMITTED,
            text: format!(
                "this user may not open {}: only the user that runs the program there may, and root (sudo)",
                socket.display()
            ),
        },
        io::ErrorKind::ConnectionRefused => {
            failed(&"its program has ended; start it, or name another with --socket")
        }
        io::ErrorKind::NotFound => failed(&"there is none; start its program, or name another with --socket"),
        _ => failed(&cause),
    })?;
    exchange(stream, method, path, body.into()).await.map_err(|cause| failed(&cause))
}

/// One request over a stream, and its answer, as [`ask`]; else why there is none.
pub(super) async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(u16, Bytes), String> {
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = http::Uri::try_from(path).unwrap_or_default();
        request.headers_mut().insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
        // It takes the sender with it: the connection ends where nobody can ask more.
        let answer = async move {
            let answer = sender.send_request(request).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MOST_BYTES).collect().await;
            Ok::<_, hyper::Error>((head.status.as_u16(), body.map(|body| body.to_bytes())))
        };
        // The connection is driven beside it; where that ends first, the sender tells why.
        let (answer, _) = tokio::join!(answer, connection);
        answer
    };
    match timeout(PATIENCE, exchange).await {
        Ok(Ok((status, Ok(body)))) => Ok((status, body)),
        Ok(Ok((_, Err(cause)))) => Err(cause.to_string()),
        Ok(Err(cause)) => Err(cause.to_string()),
        Err(_) => Err(format!("no answer within {PATIENCE:?}")),
    }
}

/// For a whole answer; a pod with 20,000 nodes takes a moment to list them.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest answer: some 100,000 nodes.
const MOST_BYTES: usize = 64 << 20;
/// Exit code where this user may not ask, as in sysexits.h.
const NOT_PERMITTED: u8 = 77;
