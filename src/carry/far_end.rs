//! What was opened for a client: a session, or a connection of this process's own.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;

use crate::names::SessionId;
use crate::net::ByteStream;
use crate::net::pool::Pool;
use crate::net::socket::{Connection as _, Socket};
use crate::protocol::{Refusal, Session};

/// The far end of what was opened for a client. Dropping it breaks it off, unless it is over in both directions.
#[derive(Debug)]
pub enum FarEnd {
    /// A session.
    Session(Session),
    /// A connection that this process has dialled itself.
    Direct(Socket<TcpStream>),
}

impl FarEnd {
    /// A connection of this process's own, which breaks off when it is dropped.
    pub fn direct(connection: TcpStream, pool: Pool) -> Self {
        connection.breaks_off(true);
        Self::Direct(Socket::new(connection, pool))
    }

    /// The session's id, if it is one.
    pub fn id(&self) -> Option<SessionId> {
        match self {
            Self::Session(session) => Some(session.id()),
            Self::Direct(_) => None,
        }
    }

    /// How often it was resumed on another path.
    pub fn resumed(&self) -> u32 {
        match self {
            Self::Session(session) => session.account().resumed,
            Self::Direct(_) => 0,
        }
    }

    /// Why the session was ended, if it did not end in good order.
    pub fn ended(&self) -> Option<Refusal> {
        match self {
            Self::Session(session) => session.account().ended,
            Self::Direct(_) => None,
        }
    }

    /// Ends it like a connection that broke off.
    pub fn break_off(self, why: Refusal) {
        if let Self::Session(session) = self {
            session.break_off(why);
        }
    }

    /// Both directions have been finished: what is still on its way is delivered in the background.
    pub fn is_over(&self) {
        if let Self::Direct(connection) = self {
            connection.io().breaks_off(false);
        }
    }
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
        }
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_write_chunk(cx, bytes),
            Self::Direct(connection) => connection.poll_write_chunk(cx, bytes),
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_flush(cx),
            Self::Direct(connection) => connection.poll_flush(cx),
        }
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Session(session) => session.poll_finish(cx),
            Self::Direct(connection) => connection.poll_finish(cx),
        }
    }
}
