//! Front ends whose clients are known by their connection: by a certificate, or as users of this machine.

use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::rustls::ServerConfig;
use tracing::{Span, info};

use crate::listener::Denial;
use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol, Proof, WAITING};
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Socket;
use crate::net::tls::handshake::{Acceptor, TlsAccepted, TlsSocket};
use crate::proto::frame::Category;
use crate::session_io::copy::linger;

/// A front end behind TLS. A client that shows a certificate has its names.
#[derive(Debug)]
pub struct Tls<F> {
    front_end: F,
    acceptor: Acceptor,
    pool: Pool,
}

/// A front end on a unix socket. A client is its user on this machine: `uid=0` for root.
#[derive(Debug)]
pub struct Local<F>(pub F);

impl<F> Tls<F> {
    /// Puts a front end behind TLS.
    pub fn new(front_end: F, tls: Reload<ServerConfig>, pool: Pool) -> Self {
        Self { front_end, acceptor: Acceptor::new(tls, pool.clone(), WAITING), pool }
    }
}

impl<F: ListenerProtocol<TlsSocket>> ListenerProtocol<TcpStream> for Tls<F> {
    const NAME: &'static str = F::NAME;
    const CATEGORY: Category = F::CATEGORY;
    type Connection = F::Connection;

    fn span(&self, from: SocketAddr) -> Span {
        self.front_end.span(from)
    }

    /// An alert, the only answer that TLS allows before the handshake.
    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        denial.alert()
    }

    async fn handshake(
        &self,
        socket: TcpStream,
        visit: &mut Admission<'_>,
    ) -> HandshakeOutcome<F::Connection> {
        let Some(slot) = visit.slot() else { return HandshakeOutcome::Failed { cause: "tls", socket: None } };
        let unshaken = match self.acceptor.accept(socket, visit.from(), slot).await {
            Ok(shaken) => {
                // From now on this process waits for the client.
                slot.waits();
                if let Some(names) = shaken.names() {
                    visit.proof = Proof::Certificate(names);
                }
                let TlsAccepted { stream, turn, .. } = shaken;
                drop(turn);
                return self.front_end.handshake(stream, visit).await;
            }
            Err(unshaken) => unshaken,
        };
        let refusals = &visit.context().metrics.refusals;
        if unshaken.socket.is_some() && refusals.may_log(unshaken.cause, visit.from().ip()) {
            info!("{unshaken}");
        }
        if let Some(socket) = unshaken.socket {
            // Closed with care, so that the alert arrives.
            linger(&mut Socket::new(socket, self.pool.clone())).await;
        }
        HandshakeOutcome::Failed { cause: unshaken.cause, socket: None }
    }
}

impl<F: ListenerProtocol<UnixStream>> ListenerProtocol<UnixStream> for Local<F> {
    const NAME: &'static str = F::NAME;
    const CATEGORY: Category = F::CATEGORY;
    type Connection = F::Connection;

    fn span(&self, from: SocketAddr) -> Span {
        self.0.span(from)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        self.0.rejection_bytes(denial, trace)
    }

    async fn handshake(
        &self,
        socket: UnixStream,
        visit: &mut Admission<'_>,
    ) -> HandshakeOutcome<F::Connection> {
        if let Ok(user) = socket.peer_cred() {
            visit.proof = Proof::User(format!("uid={}", user.uid()));
        }
        self.0.handshake(socket, visit).await
    }
}
