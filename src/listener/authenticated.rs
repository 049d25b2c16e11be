//! Listeners over TLS, which identify clients by a client certificate.

use bytes::Bytes;
use tokio::net::TcpStream;

use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::{Admission, AdmissionOutcome, ListenerContext, ListenerProtocol};
use crate::session_io::tls::TlsPort;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::handshake::TlsSocket;

/// A listener over TLS. A client that presents a certificate is identified by its names.
#[derive(Debug)]
pub struct TlsListenerProtocol<F> {
    protocol: F,
    port: TlsPort,
}

impl<F> TlsListenerProtocol<F> {
    /// Wraps a listener in TLS.
    pub fn new(protocol: F, tls: ReloadedValue<ServerTls>, context: &ListenerContext) -> Self {
        Self { protocol, port: TlsPort::new(tls, context.pool.clone(), context.pending.handshakes.clone()) }
    }
}

impl<F: ListenerProtocol<TlsSocket>> ListenerProtocol<TcpStream> for TlsListenerProtocol<F> {
    /// Returns an alert, the only response that TLS allows before the handshake.
    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        denial.alert()
    }

    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> AdmissionOutcome {
        let Some(permit) = admission.permit() else {
            return AdmissionOutcome::Failed { reason: "tls", socket: None };
        };
        let refusals = &admission.context.metrics.refusals;
        match self.port.accept(socket, admission.client.from, permit, refusals).await {
            Ok((stream, certificate)) => {
                if let Some(certificate) = certificate {
                    admission.client.proof = ClientIdentity::Certificate(certificate);
                }
                admission.client.server_name = stream.get_ref().1.server_name().map(str::to_owned);
                self.protocol.handshake(stream, admission).await
            }
            Err(reason) => AdmissionOutcome::Failed { reason, socket: None },
        }
    }
}
