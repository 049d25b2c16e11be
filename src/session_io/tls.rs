//! TLS handshakes of listeners that close a failed connection themselves.

use std::net::SocketAddr;

use tokio::net::TcpStream;

use crate::session_io::copy::close::close_gracefully;
use tunnel_base::limited;
use tunnel_base::refusal_log::RefusalLog;
use tunnel_net::limiter::{FairLimiter, Permit};
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::Socket;
use tunnel_net::tls::client_certificate::{ClientCertificate, ServerTls};
use tunnel_net::tls::handshake::{TlsAccepted, TlsHandshaker, TlsSocket};

/// Accepts TLS connections of a port.
#[derive(Debug)]
pub(crate) struct TlsPort {
    handshaker: TlsHandshaker,
    pool: BufferPool,
}

impl TlsPort {
    /// Creates it with the limiter of [`TlsHandshaker::new`].
    pub(crate) fn new(tls: ReloadedValue<ServerTls>, pool: BufferPool, handshakes: FairLimiter) -> Self {
        Self { handshaker: TlsHandshaker::new(tls, pool.clone(), handshakes), pool }
    }

    /// Accepts TLS on a connection. Also returns the client's certificate, if it presents one. From then on `permit` is
    /// idle, because this process waits for the client. Cancel safe.
    ///
    /// # Errors
    ///
    /// Returns a fixed label for metrics. The reason is logged, and the connection closed.
    pub(crate) async fn accept(
        &self,
        socket: TcpStream,
        from: SocketAddr,
        permit: &Permit,
        refusals: &RefusalLog,
    ) -> Result<(TlsSocket, Option<ClientCertificate>), &'static str> {
        let failure = match self.handshaker.accept(socket, from, permit).await {
            Ok(accepted) => {
                permit.mark_idle();
                let certificate = self.handshaker.certificate(&accepted);
                let TlsAccepted { stream, permit: turn, .. } = accepted;
                drop(turn);
                return Ok((stream, certificate));
            }
            Err(failure) => failure,
        };
        limited!(
            failure.socket.is_some() && refusals.may_log(failure.reason, from.ip()) => info,
            reason = failure.reason, error = %failure, "TLS handshake failed"
        );
        if let Some(socket) = failure.socket {
            // Close gracefully, so that the alert arrives.
            close_gracefully(&mut Socket::new(socket, self.pool.clone())).await;
        }
        Err(failure.reason)
    }
}
