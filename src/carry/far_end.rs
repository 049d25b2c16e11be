//! What was opened for a client: a session, or a connection of this process's own; and TLS over either.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::names::SessionId;
use crate::net::ByteStream;
use crate::net::pool::Pool;
use crate::net::socket::{Connection as _, Socket};
use crate::net::under_tls::UnderTls;
use crate::protocol::{Refusal, Session};

/// The far end of what was opened for a client. Dropping it breaks it off, unless it is over in both directions.
#[derive(Debug)]
pub enum FarEnd {
    /// A session.
    Session(Session),
    /// A connection that this process has dialled itself.
    Direct(Socket<TcpStream>),
    /// One of the two, under TLS that this process speaks with the target.
    Encrypted(Box<Encrypted>),
}

/// TLS over a far end.
type Encrypted = Socket<TlsStream<UnderTls<FarEnd>>>;

impl FarEnd {
    /// A connection of this process's own, which breaks off when it is dropped.
    pub fn direct(connection: TcpStream, pool: Pool) -> Self {
        connection.breaks_off(true);
        Self::Direct(Socket::new(connection, pool))
    }

    /// Shakes hands with the target that is to have this name. Not cancel safe: a dropped call breaks it off.
    ///
    /// # Errors
    ///
    /// TLS has failed; it is broken off.
    pub async fn encrypted(
        self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        pool: Pool,
    ) -> io::Result<Self> {
        let stream = TlsConnector::from(config).connect(name, UnderTls::new(self)).await?;
        Ok(Self::Encrypted(Box::new(Socket::new(stream, pool))))
    }

    /// The session's id, if it is one.
    pub fn id(&self) -> Option<SessionId> {
        match self {
            Self::Session(session) => Some(session.id()),
            Self::Direct(_) => None,
            Self::Encrypted(over) => inside(over).id(),
        }
    }

    /// How often it was resumed on another path.
    pub fn resumed(&self) -> u32 {
        match self {
            Self::Session(session) => session.account().resumed,
            Self::Direct(_) => 0,
            Self::Encrypted(over) => inside(over).resumed(),
        }
    }

    /// Why the session was ended, if it did not end in good order.
    pub fn ended(&self) -> Option<Refusal> {
        match self {
            Self::Session(session) => session.account().ended,
            Self::Direct(_) => None,
            Self::Encrypted(over) => inside(over).ended(),
        }
    }

    /// Ends it like a connection that broke off.
    pub fn break_off(self, why: Refusal) {
        match self {
            Self::Session(session) => session.break_off(why),
            Self::Direct(_) => {}
            Self::Encrypted(over) => over.into_io().into_inner().0.into_inner().break_off(why),
        }
    }

    /// Both directions have been finished: what is still on its way is delivered in the background.
    pub fn is_over(&self) {
        match self {
            Self::Session(_) => {}
            Self::Direct(connection) => connection.io().breaks_off(false),
            Self::Encrypted(over) => inside(over).is_over(),
        }
    }
}

/// What TLS sits on.
fn inside(over: &Encrypted) -> &FarEnd {
    over.io().get_ref().0.get_ref()
}

impl From<Session> for FarEnd {
    fn from(session: Session) -> Self {
        Self::Session(session)
    }
}

impl ByteStream for FarEnd {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        match self {
            Self::Session(session) => session.poll_read_chunk(cx),
            Self::Direct(connection) => connection.poll_read_chunk(cx),
            Self::Encrypted(over) => over.poll_read_chunk(cx),
        }
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_write_chunk(cx, bytes),
            Self::Direct(connection) => connection.poll_write_chunk(cx, bytes),
            Self::Encrypted(over) => over.poll_write_chunk(cx, bytes),
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_flush(cx),
            Self::Direct(connection) => connection.poll_flush(cx),
            Self::Encrypted(over) => over.poll_flush(cx),
        }
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_finish(cx),
            Self::Direct(connection) => connection.poll_finish(cx),
            Self::Encrypted(over) => over.poll_finish(cx),
        }
    }

    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Session(session) => session.poll_lost(cx),
            Self::Direct(connection) => connection.poll_lost(cx),
            Self::Encrypted(over) => inside(over).poll_lost(cx),
        }
    }
}
