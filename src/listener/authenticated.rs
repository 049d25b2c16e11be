//! Listeners over TLS, which identify clients by a client certificate.

use std::net::SocketAddr;
use std::path::Path;

use bytes::Bytes;
use tokio::net::TcpStream;
use tracing::Span;

use crate::config::listen_tls::ListenerTlsConfig;
use crate::config::server::{Tls, TlsVersion};
use crate::listener::admission::basis::ClientIdentity;
use crate::listener::admission::{Admission, AdmissionOutcome, ListenerContext, ListenerProtocol};
use crate::listener::denial::Denial;
use crate::listener::{FileKind, NamedFile};
use crate::session_io::tls::TlsPort;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::handshake::TlsSocket;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

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
    ) -> AdmissionOutcome<F::Connection> {
        let Some(permit) = admission.permit() else {
            return AdmissionOutcome::Failed { reason: "tls", socket: None };
        };
        let refusals = &admission.context().metrics.refusals;
        match self.port.accept(socket, admission.from(), permit, refusals).await {
            Ok((stream, certificate)) => {
                if let Some(certificate) = certificate {
                    admission.prove(ClientIdentity::Certificate(certificate));
                }
                admission.set_server_name(stream.get_ref().1.server_name());
                self.protocol.handshake(stream, admission).await
            }
            Err(reason) => AdmissionOutcome::Failed { reason, socket: None },
        }
    }
}

impl ListenerTlsConfig {
    /// Returns the files, with the keys that name them.
    pub(crate) fn files(&self) -> Vec<NamedFile> {
        let file = |name: &str, path: &Path, kind| NamedFile::new(self.key(name), path, kind);
        let own = [
            file("cert", &self.cert, FileKind::ServerCertificate),
            file("key", &self.key, FileKind::PrivateKey),
        ];
        let ca = self.client_ca.iter().map(|ca| file("client_ca", ca, FileKind::Ca));
        own.into_iter().chain(ca).collect()
    }

    /// Returns the TLS of a port for HTTP/1.
    pub(crate) fn load(
        &self,
        tls: &Tls,
        startup: &mut StartupErrorCollector,
    ) -> Result<ReloadedValue<ServerTls>, NotPrepared> {
        let params = tls_params(tls, startup);
        NamedFile::check_all(&self.files(), startup)?;
        let (params, _) = params?;
        let identity = IdentityFiles { cert: self.cert.clone(), key: self.key.clone() };
        let clients = self.client_ca.clone().map_or(ClientAuth::Anonymous, ClientAuth::Required);
        let server = TlsServerConfig { identity, clients, params, alpn: vec![b"http/1.1".to_vec()] };
        startup.collect(StartupErrorKind::Config, &[&self.key("cert"), &self.key("key")], server.load())
    }
}

/// Returns the TLS versions and cipher suites of a server's ports, with warnings about them.
pub(crate) fn tls_params(
    tls: &Tls,
    startup: &mut StartupErrorCollector,
) -> Result<(TlsParams, Vec<String>), NotPrepared> {
    let params = TlsParams::new(tls.min_version == TlsVersion::V13, &tls.cipher_suites);
    startup.collect(StartupErrorKind::Config, &["server.tls.cipher_suites"], params)
}
