//! The admin sockets of this machine.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::{Method, Request};
use http_body_util::Full;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use crate::command::{CommandError, CommandResult, http_request};
use crate::config::Environment;
use crate::startup::admin_socket::SocketDirs;
use tunnel_base::silence::unless_silent;
use tunnel_proto::printable::plain_text;

/// An admin socket, and whether its process answers.
pub(crate) type AdminSocket = (AdminSocketState, PathBuf);

/// Returns the sockets to query, the best first: the named one, otherwise the default sockets of programs with one of
/// these names. Programs that respond come first, then programs that this user may not query, then programs that have
/// ended.
pub(crate) async fn sockets(named: Option<PathBuf>, names: &[&str], env: &Environment) -> Vec<AdminSocket> {
    // A named socket is queried whether it answers or not.
    if let Some(path) = named {
        return vec![(AdminSocketState::Answers, path)];
    }
    let mut found = Vec::new();
    for path in SocketDirs::of_user(env.runtime_dir.as_deref()).sockets(names) {
        let state = match UnixStream::connect(&path).await.map_err(|cause| cause.kind()) {
            Ok(_) => AdminSocketState::Answers,
            Err(io::ErrorKind::PermissionDenied) => AdminSocketState::Denied,
            Err(_) => AdminSocketState::Ended,
        };
        found.push((state, path));
    }
    found.sort_by_key(|(state, _)| *state);
    found
}

/// Returns the error of a command that finds no socket of a program with one of these names.
pub(crate) fn no_socket(names: &[&str]) -> CommandError {
    CommandError::unavailable(format!(
        "no admin socket of {} found at the default paths; check that one of this user is running on this machine. Its log at \
         the start contains the socket's path; set it with --socket=PATH, run this as the user of the program, or link \
         as a user: tunnel join --user",
        if names.contains(&"edge") { "a server or edge" } else { "a server" },
    ))
}

/// Whether the process at an admin socket answers. The best state comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AdminSocketState {
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
) -> CommandResult<(u16, String)> {
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
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(u16, String), String> {
    let request = Request::builder().method(method).uri(path).header(HOST, "localhost");
    let request = request.body(Full::new(body)).map_err(|cause| cause.to_string())?;
    let answer = unless_silent(TIMEOUT, http_request::send(stream, request, MAX_BYTES)).await.ok_or_else(|| {
        format!(
            "no response within {TIMEOUT:?}; the process is stopped or overloaded: check its state and its log"
        )
    })?;
    let (head, body) = answer.map_err(|cause| cause.to_string())?.into_parts();
    let body = body.map_err(|cause| cause.to_string())?;
    Ok((head.status.as_u16(), plain_text(&String::from_utf8_lossy(&body))))
}

/// Maximum time without a byte: longer than a server takes to collect the nodes of its peers.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a response, for some 100,000 nodes.
const MAX_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_response_may_take_long_while_bytes_arrive() {
        for (silence, is_read) in [(TIMEOUT - Duration::from_secs(1), true), (TIMEOUT * 2, false)] {
            let (stream, mut server) = duplex(1024);
            let answer = async {
                server.read_u8().await.unwrap();
                for part in ["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", "1", "2", "3", "4"] {
                    sleep(silence).await;
                    // Fails once the client has given up.
                    let _ = server.write_all(part.as_bytes()).await;
                }
            };
            let (read, ()) = tokio::join!(exchange(stream, Method::GET, "/nodes", Bytes::new()), answer);
            assert_eq!(read.is_ok_and(|read| read == (200, "1234".to_owned())), is_read, "{silence:?}");
        }
    }
}
