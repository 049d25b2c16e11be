//! Opening sessions as the settings say, and what carries an open session.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use http::StatusCode;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

use crate::command::client::ClientSettings;
use crate::command::connect::port::ConnectPort;
use crate::command::{CommandError, exit_code};
use crate::listener::denial::Denial;
use crate::session_io::copy::{CopyEnd, Side, close, copy_bidirectional};
use crate::uplink::client::{ClientLinkError, ClientLinks};
use crate::uplink::path_report::{interruption, report_path};
use crate::uplink::proxy::{connect_shared, shared_sockets};
use tunnel_base::names::Target;
use tunnel_link::table::stream::Session;
use tunnel_net::ByteStream;
use tunnel_net::records::RecordStream;
use tunnel_net::socket::{Connection, Socket};

/// Prints a line on the terminal.
pub(crate) type PrintLine = Arc<dyn Fn(&str) + Send + Sync>;

/// Opens sessions: at a CONNECT port, or over links of this process.
pub(crate) enum SessionOpener {
    Port(ConnectPort),
    Links(ClientLinks, PrintLine),
}

impl SessionOpener {
    /// Returns the CONNECT port that the settings name. Links to their servers instead if they name none, unless the
    /// user's proxy does already. `runtime` is `XDG_RUNTIME_DIR`.
    pub(crate) async fn reach(
        settings: ClientSettings,
        runtime: Option<&Path>,
        print_line: PrintLine,
    ) -> Result<Self, CommandError> {
        let Some(links) = settings.links else { return Ok(Self::Port(ConnectPort::new(&settings)?)) };
        for path in shared_sockets(&links, runtime) {
            if connect_shared(&path, |_| {}).await.is_some() {
                return Ok(Self::Port(ConnectPort::of_proxy(path, print_line)));
            }
        }
        Ok(Self::Links(ClientLinks::connect(links).await.map_err(no_link)?, print_line))
    }

    /// Checks early that sessions may be opened.
    pub(super) async fn check(&self) -> Result<(), CommandError> {
        match self {
            Self::Port(port) => port.check_password_path().await,
            Self::Links(..) => Ok(()),
        }
    }

    /// Opens a session to a target. Cancel safe.
    pub(crate) async fn open(&self, target: &Target) -> Result<OpenedSession, CommandError> {
        let (links, print_line) = match self {
            Self::Port(port) => return port.open(target).await,
            Self::Links(links, print_line) => (links, print_line.clone()),
        };
        let session = links.open(target).await.map_err(|error| denied(&Denial::of_user(error.why)))?;
        let (from, trace) = ("the servers".to_owned(), session.id().to_string());
        Ok(OpenedSession { stream: SessionStream::Link(session, target.clone(), print_line), from, trace })
    }

    /// Closes the links of this process.
    pub(super) async fn close(self) {
        if let Self::Links(links, _) = self {
            links.close().await;
        }
    }
}

/// Returns the error of a command that needs links, if there are none.
pub(crate) fn no_link(why: ClientLinkError) -> CommandError {
    let text = format!("cannot link to a server: {why}");
    match why {
        ClientLinkError::Config(_) => CommandError::unusable(text),
        ClientLinkError::Denied(_) => CommandError::refused(text),
        ClientLinkError::Unreachable(_) => CommandError::unavailable(text),
    }
}

/// Returns the error of a session that was not opened over a link.
fn denied(denial: &Denial) -> CommandError {
    let text = format!("{denial}\n  hint: {}", denial.next_step());
    if denial.status() == StatusCode::FORBIDDEN {
        CommandError::refused(text)
    } else {
        CommandError::unavailable(text)
    }
}

/// An open session, made by [`SessionOpener::open`].
pub(crate) struct OpenedSession {
    pub(crate) stream: SessionStream,
    /// Where it was opened.
    pub(crate) from: String,
    /// Identifies the session in the server's access log.
    pub(crate) trace: String,
}

/// What carries a session in this process.
pub(crate) enum SessionStream {
    Tcp(Socket<TcpStream>),
    Unix(Socket<UnixStream>),
    Tls(Box<Socket<TlsStream<TcpStream>>>),
    /// A connection to the user's proxy.
    Proxy(Box<Socket<RecordStream>>),
    /// A session of this process to this target, which is at no single server.
    Link(Session, Target, PrintLine),
}

impl OpenedSession {
    /// Copies bytes between `here`, which is side A, and the session until both have ended. Then closes the connection
    /// that carries it: gracefully only if all bytes were transferred. A dropped call resets the connection.
    pub(crate) async fn carry(&mut self, here: &mut impl ByteStream) -> CopyEnd {
        match &mut self.stream {
            SessionStream::Tcp(socket) => copy_between(here, socket).await,
            SessionStream::Unix(socket) => copy_between(here, socket).await,
            SessionStream::Tls(socket) => copy_between(here, &mut **socket).await,
            SessionStream::Proxy(socket) => copy_between(here, &mut **socket).await,
            SessionStream::Link(session, target, print_line) => {
                let report = report_path(session.path_monitor(), target.clone(), |line| print_line(line));
                let mut reporting = std::pin::pin!(report);
                // Dropping the session resets it, unless both directions have ended.
                let mut copying = std::pin::pin!(copy_bidirectional(here, session));
                tokio::select! {
                    biased;
                    ended = &mut copying => return ended,
                    () = &mut reporting => {}
                }
                copying.await
            }
        }
    }

    /// Returns why the session was interrupted, as far as its client can know. Only the servers know and log the
    /// cause.
    pub(crate) fn interruption_error(&self, kind: ErrorKind) -> CommandError {
        let Self { from, trace, stream } = self;
        let why = match stream {
            SessionStream::Link(session, ..) => interruption(&session.path_monitor()),
            SessionStream::Proxy(socket) => {
                let reason = socket.io().remote_reason().map(str::to_owned);
                Some(reason.unwrap_or_else(|| format!("{from} has ended")))
            }
            _ => None,
        };
        if let Some(why) = why {
            return interrupted(&why);
        }
        let how = match kind {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::NotConnected => {
                "reset the connection".to_owned()
            }
            ErrorKind::UnexpectedEof => "closed the connection without ending TLS".to_owned(),
            kind => format!("was lost: {kind}"),
        };
        interrupted(&format!("server {from} {how}; see its access log (trace={trace}), unless it was killed"))
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
