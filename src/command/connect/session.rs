//! An open session of `tunnel connect`: what carries it, copying its bytes, and why it was interrupted.

use std::io::ErrorKind;

use crate::command::{CommandError, exit_code};
use crate::session_io::copy::close::close;
use crate::session_io::copy::{CopyEnd, Side, copy_bidirectional};
use crate::uplink::path_report::PathReport;
use tunnel_link::table::handles::Session;
use tunnel_net::ChunkStream;
use tunnel_net::socket::{AnyConnection, Connection as _, Socket};

/// An open session.
pub(crate) struct ConnectSession {
    pub(crate) stream: ConnectStream,
    /// Where it was opened.
    pub(crate) from: String,
    /// Identifies the session in the server's access log.
    pub(crate) trace: String,
}

/// What carries a session in this process.
pub(crate) enum ConnectStream {
    Server(Socket<AnyConnection>),
    /// A session of this process, which is at no single server.
    Link(Session, PathReport),
}

impl ConnectSession {
    /// Copies bytes between `here`, which is side A, and the session until both have ended. Then closes the connection
    /// that carries it: gracefully only if all bytes were transferred. A dropped call resets the connection.
    pub(crate) async fn carry(&mut self, here: &mut dyn ChunkStream) -> CopyEnd {
        match &mut self.stream {
            ConnectStream::Server(socket) => {
                // Set in advance in case this process is killed: a truncated upload must not look complete to the
                // target.
                socket.io.set_reset_on_drop(true);
                let ended = copy_bidirectional(here, socket).await;
                close(socket, Side::B, ended).await;
                ended
            }
            ConnectStream::Link(session, report) => {
                let report = report.run(session.path_monitor());
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
        if let ConnectStream::Link(session, report) = stream
            && let Some(why) = report.interruption(&session.path_monitor())
        {
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
