//! The stream of a session: its end here or a direct connection, and TLS over either.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use tunnel_link::table::handles::Session;
use tunnel_net::ChunkStream;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{Connection, Socket};
use tunnel_proto::frame::SessionError;
use tunnel_proto::names::SessionId;

/// The stream to the remote of a session: to the client's target or, at the acceptor, to the client. Dropping it aborts
/// it, unless both directions have ended.
#[derive(Debug)]
pub enum SessionStream {
    /// This end of the session.
    Session(Session),
    /// A connection to the target, dialled by this process, in place of a session.
    Direct(Socket<TcpStream>),
    /// Either of the other two, with TLS between this process and the target.
    Tls(Box<TlsOverTarget>),
}

/// TLS over a stream to a target.
type TlsOverTarget = Socket<TlsStream<ChunkStreamIo<SessionStream>>>;

impl SessionStream {
    /// Wraps a connection dialled by this process. Dropping it resets the connection.
    pub fn direct(connection: TcpStream, pool: BufferPool) -> Self {
        connection.set_reset_on_drop(true);
        Self::Direct(Socket::new(connection, pool))
    }

    /// Performs a TLS handshake with the target under this name. Not cancel safe: a dropped call aborts the stream.
    ///
    /// # Errors
    ///
    /// TLS failed; the stream is aborted.
    pub async fn encrypted(
        self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        pool: BufferPool,
    ) -> io::Result<Self> {
        let stream = TlsConnector::from(config).connect(name, ChunkStreamIo::new(self)).await?;
        Ok(Self::Tls(Box::new(Socket::new(stream, pool))))
    }

    /// Returns the session's id, or `None` for a direct connection.
    pub fn id(&self) -> Option<SessionId> {
        self.session().map(Session::id)
    }

    /// Returns how often the session was resumed on another path.
    pub fn resumed(&self) -> u32 {
        self.session().map_or(0, Session::resumed)
    }

    /// Returns why the session ended, or `None` if it ended cleanly.
    pub fn ended(&self) -> Option<SessionError> {
        self.session().and_then(Session::ended)
    }

    /// Ends the stream at once. What was not delivered is dropped.
    pub fn reset(self, why: SessionError) {
        if let Some(session) = self.into_session() {
            session.reset(why);
        }
    }

    /// Ends the stream like a failed connection.
    pub fn break_off(self, why: SessionError) {
        if let Some(session) = self.into_session() {
            session.break_off(why);
        }
    }

    /// Returns the session that carries the bytes, or `None` for a direct connection.
    fn session(&self) -> Option<&Session> {
        match self {
            Self::Session(session) => Some(session),
            Self::Direct(_) => None,
            Self::Tls(over) => transport_below_tls(over).session(),
        }
    }

    /// Like [`Self::session`], for its end. A direct connection is dropped.
    fn into_session(self) -> Option<Session> {
        match self {
            Self::Session(session) => Some(session),
            Self::Direct(_) => None,
            Self::Tls(over) => over.io.into_inner().0.into_parts().0.into_session(),
        }
    }

    fn stream(&mut self) -> &mut dyn ChunkStream {
        match self {
            Self::Session(session) => session,
            Self::Direct(connection) => connection,
            Self::Tls(over) => &mut **over,
        }
    }

    /// Marks both directions as finished, so that dropping the stream still delivers bytes in flight.
    pub fn mark_finished(&self) {
        match self {
            Self::Session(_) => {}
            Self::Direct(connection) => connection.io.set_reset_on_drop(false),
            Self::Tls(over) => transport_below_tls(over).mark_finished(),
        }
    }
}

/// Returns the transport below TLS.
fn transport_below_tls(over: &TlsOverTarget) -> &SessionStream {
    over.io.get_ref().0.get_ref()
}

impl From<Session> for SessionStream {
    fn from(session: Session) -> Self {
        Self::Session(session)
    }
}

impl ChunkStream for SessionStream {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        self.stream().poll_read_chunk(cx)
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        self.stream().poll_write_chunk(cx, bytes)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_finish(cx)
    }

    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            Self::Session(session) => session.poll_lost(cx),
            Self::Direct(connection) => connection.poll_lost(cx),
            Self::Tls(over) => over.io.get_mut().0.get_mut().poll_lost(cx),
        }
    }

    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Session(_) => None,
            Self::Direct(connection) => connection.tcp(),
            Self::Tls(over) => transport_below_tls(over).tcp(),
        }
    }
}
