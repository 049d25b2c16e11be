//! Listeners that identify clients by their connection: by a client certificate, or as a local user.

use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::rustls::ServerConfig;
use tracing::{Span, info};

use crate::listener::Denial;
use crate::listener::admission::{Admission, ClientIdentity, HandshakeOutcome, ListenerProtocol, WAITING};
use crate::session_io::copy::close_gracefully;
use tunnel_net::pool::Pool;
use tunnel_net::reload::Reload;
use tunnel_net::socket::Socket;
use tunnel_net::tls::handshake::{TlsAccepted, TlsHandshaker, TlsSocket};
use tunnel_proto::frame::Category;

/// A listener over TLS. A client that presents a certificate is identified by its names.
#[derive(Debug)]
pub struct OverTls<F> {
    protocol: F,
    acceptor: TlsHandshaker,
    pool: Pool,
}

/// A listener on a unix socket. A client is identified as its local user: `uid=0` for root.
#[derive(Debug)]
pub struct OverUnix<F>(pub F);

impl<F> OverTls<F> {
    /// Wraps a listener in TLS.
    pub fn new(protocol: F, tls: Reload<ServerConfig>, pool: Pool) -> Self {
        Self { protocol, acceptor: TlsHandshaker::new(tls, pool.clone(), WAITING), pool }
    }
}

impl<F: ListenerProtocol<TlsSocket>> ListenerProtocol<TcpStream> for OverTls<F> {
    const NAME: &'static str = F::NAME;
    const CATEGORY: Category = F::CATEGORY;
    type Connection = F::Connection;

    fn span(&self, from: SocketAddr) -> Span {
        self.protocol.span(from)
    }

    /// Returns an alert, the only response that TLS allows before the handshake.
    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        denial.alert()
    }

    async fn handshake(
        &self,
        socket: TcpStream,
        admission: &mut Admission,
    ) -> HandshakeOutcome<F::Connection> {
        let Some(permit) = admission.permit() else {
            return HandshakeOutcome::Failed { reason: "tls", socket: None };
        };
        let failure = match self.acceptor.accept(socket, admission.from(), permit).await {
            Ok(accepted) => {
                // The permit is idle: from now on this process waits for the client.
                permit.mark_idle();
                if let Some(names) = accepted.names() {
                    admission.proof = ClientIdentity::Certificate(names);
                }
                let TlsAccepted { stream, permit: turn, .. } = accepted;
                drop(turn);
                return self.protocol.handshake(stream, admission).await;
            }
            Err(failure) => failure,
        };
        let refusals = &admission.context().metrics.refusals;
        if failure.socket.is_some() && refusals.may_log(failure.reason, admission.from().ip()) {
            info!(reason = failure.reason, error = %failure, "TLS handshake failed");
        }
        if let Some(socket) = failure.socket {
            // Close gracefully, so that the alert arrives.
            close_gracefully(&mut Socket::new(socket, self.pool.clone())).await;
        }
        HandshakeOutcome::Failed { reason: failure.reason, socket: None }
    }
}

impl<F: ListenerProtocol<UnixStream>> ListenerProtocol<UnixStream> for OverUnix<F> {
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
        admission: &mut Admission,
    ) -> HandshakeOutcome<F::Connection> {
        if let Ok(user) = socket.peer_cred() {
            admission.proof = ClientIdentity::User(format!("uid={}", user.uid()));
        }
        self.0.handshake(socket, admission).await
    }
}
