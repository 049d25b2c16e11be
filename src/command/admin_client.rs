//! Requests of the admin API: to a program on this machine over its admin socket, to a server over a link, to others at
//! their port.

use std::fmt;
use std::path::PathBuf;

use http::Method;
use serde::de::DeserializeOwned;

use crate::command::admin_sockets::{AdminSocket, AdminSocketState, ask, exchange, no_socket, sockets};
use crate::command::connect::opener::no_link;
use crate::command::{CommandError, CommandResult, client};
use crate::config::Environment;
use crate::route::RouteError;
use crate::uplink::client::UserUplinks;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_proto::frame::ErrorCode;
use tunnel_proto::printable::one_line as clean;

/// Where a command sends its requests.
#[derive(derive_more::Display)]
#[display("{at}")]
pub(crate) struct AdminClient {
    at: AdminApiEndpoint,
    /// Names the process that was chosen among several, and the others, on a line. Empty if there is only one.
    pub(crate) choice: String,
}

#[derive(derive_more::Display)]
enum AdminApiEndpoint {
    /// The admin socket of a process on this machine.
    #[display("{}", _0.display())]
    Socket(PathBuf),
    /// The server of a link of `client.toml`.
    #[display("{LINK}")]
    Link(Box<UserUplinks>),
}

/// Runs `work` with the API of the process that a command queries: that of the `named` socket, otherwise of a program
/// on this machine with one of these names, if this user may open its socket. Otherwise that of the server of a link,
/// if `client.toml` has links.
///
/// # Errors
///
/// Returns the error of `work`, or that there is no such process.
pub(crate) async fn query<T>(
    named: Option<PathBuf>,
    names: &[&str],
    env: &Environment,
    work: impl AsyncFnOnce(&AdminClient) -> CommandResult<T>,
) -> CommandResult<T> {
    let api = AdminClient::find(named, names, env).await?;
    let done = work(&api).await;
    if let AdminApiEndpoint::Link(links) = api.at {
        links.close().await;
    }
    done
}

impl AdminClient {
    async fn find(named: Option<PathBuf>, names: &[&str], env: &Environment) -> CommandResult<Self> {
        let mut sockets = sockets(named, names, env).await.into_iter().peekable();
        let is_open = sockets.peek().is_some_and(|(state, _)| *state == AdminSocketState::Answers);
        if !is_open && let Some(links) = client::links_if_readable(env)? {
            let links = UserUplinks::connect(links).await.map_err(|why| no_link(&why))?;
            return Ok(Self { choice: choice(LINK, sockets), at: AdminApiEndpoint::Link(Box::new(links)) });
        }
        let Some((_, socket)) = sockets.next() else {
            return Err(no_socket(names));
        };
        let choice = choice(&socket.display().to_string(), sockets);
        Ok(Self { choice, at: AdminApiEndpoint::Socket(socket) })
    }

    /// Requests a path. Returns the body of the response.
    pub(crate) async fn get(&self, path: &str) -> CommandResult {
        self.send(Method::GET, path, String::new()).await
    }

    /// Sends one request with a body. Returns the body of the response.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the request may have been executed.
    pub(crate) async fn post(&self, path: &str, body: String) -> CommandResult {
        self.send(Method::POST, path, body).await
    }

    async fn send(&self, method: Method, path: &str, body: String) -> CommandResult {
        let (code, body) = self.ask(method, path, body).await?;
        if code == 200 {
            return Ok(body);
        }
        let text = format!("{self}: {}", clean(body.trim_end()));
        // Below 500 the program has refused the request; a retry would get the same response.
        Err(if (400..500).contains(&code) {
            CommandError::refused(text)
        } else {
            CommandError::unavailable(text)
        })
    }

    async fn ask(&self, method: Method, path: &str, body: String) -> CommandResult<(u16, String)> {
        let links = match &self.at {
            AdminApiEndpoint::Socket(socket) => return ask(socket, method, path, body).await,
            AdminApiEndpoint::Link(links) => links,
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
        let answer = exchange(ChunkStreamIo::new(session), method, path, body.into()).await;
        answer.map_err(|cause| failed(&cause))
    }

    /// Parses a response. Its texts are cleaned where they are printed, as JSON can escape any character.
    pub(crate) fn parse<T: DeserializeOwned>(&self, body: &str) -> CommandResult<T> {
        serde_json::from_str(body).map_err(|cause| self.incompatible(&cause))
    }

    /// Returns the error of a response that this version does not understand.
    pub(crate) fn incompatible(&self, cause: &dyn fmt::Display) -> CommandError {
        let cause = clean(&cause.to_string());
        CommandError::unavailable(format!("incompatible version at {self}: {cause}"))
    }
}

/// Names the chosen socket, and the others of running processes on this machine. Empty if there are no others.
fn choice(chosen: &str, others: impl Iterator<Item = AdminSocket>) -> String {
    let running = others.filter(|(state, _)| *state != AdminSocketState::Ended);
    let others: Vec<_> = running.map(|(_, path)| format!("--socket={}", path.display())).collect();
    if others.is_empty() {
        return String::new();
    }
    format!("queried {chosen}; others on this machine: {}\n", others.join(" "))
}

/// How texts name the server of a link.
const LINK: &str = "the server of your link (client.toml)";
