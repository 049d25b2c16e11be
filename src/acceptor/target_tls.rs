//! TLS to targets, for clients with TLS that ends at the server.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;

use tunnel_base::policy::canonical_ip;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::socket::Buffered;
use tunnel_net::tls;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::{Host, Target};

/// The TLS configurations of an edge for targets.
#[derive(Debug, Clone)]
pub struct TargetTls {
    /// For targets on loopback. Their certificate is not verified, because no third party is on the path.
    pub loopback: ReloadedValue<ClientConfig>,
    /// For all other targets, with verified certificates. `None`: no TLS to other targets.
    pub others: Option<ReloadedValue<ClientConfig>>,
}

/// A TLS connection to a target.
pub(crate) type TlsTargetStream = TlsStream<Buffered<TcpStream>>;

impl TargetTls {
    /// Reloads the TLS files when they change. Established connections are not affected.
    pub fn watch(&self, files: &FileWatcher) {
        for config in std::iter::once(&self.loopback).chain(&self.others) {
            files.watch("target tls", config);
        }
    }

    /// Performs the TLS handshake with a dialled target. Cancel safe.
    pub(crate) async fn connect(
        &self,
        socket: TcpStream,
        target: &Target,
        until: Instant,
        pool: &BufferPool,
    ) -> Result<TlsTargetStream, SessionError> {
        let near = socket.peer_addr().is_ok_and(|at| canonical_ip(at.ip()).is_loopback());
        let shaking = self.tls_handshake(near, &target.host, Buffered::new(socket, pool.clone()));
        match timeout_at(until, shaking).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(why)) => {
                Err(SessionError::new(ErrorCode::TargetUnreachable, format!("TLS with {target}: {why}")))
            }
            Err(_) => Err(SessionError::new(
                ErrorCode::TargetTimeout,
                format!("{target} did not finish its TLS handshake"),
            )),
        }
    }

    async fn tls_handshake<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        near: bool,
        host: &Host,
        stream: S,
    ) -> Result<TlsStream<S>, String> {
        let config = match &self.others {
            _ if near => self.loopback.load(),
            Some(others) => others.load(),
            None => return Err(format!("its certificate cannot be verified; {REMEDY}")),
        };
        let name = tls::server_name(&host.to_string())?;
        TlsConnector::from(config).connect(name, stream).await.map_err(|cause| tls_error_text(&cause))
    }
}

/// Returns the error text, with a hint if the cause is in the config.
fn tls_error_text(cause: &io::Error) -> String {
    match TlsHandshakeError::of(cause) {
        TlsHandshakeError::UnknownIssuer => format!("its certificate is from another CA; {REMEDY}"),
        error @ TlsHandshakeError::Name(_) => format!("{error}; issue one with that name"),
        error => error.to_string(),
    }
}

const REMEDY: &str = "set ca in [edge.target_tls] of this node to the CA that signed it";

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use tunnel_net::tls::params::TlsParams;
    use tunnel_net::tls::testing::TestCa;
    use tunnel_net::tls::{ClientAuth, TlsClientConfig, TlsServerConfig, Trust};

    use super::*;

    fn client(trust: Trust) -> ReloadedValue<ClientConfig> {
        TlsClientConfig { trust, identity: None, alpn: vec![b"http/1.1".to_vec()] }.load().unwrap()
    }

    /// Performs a handshake with a target that has a certificate for `edge-1` from a CA.
    async fn handshake_with(tls: &TargetTls, near: bool, host: &str, by: &TestCa) -> Result<(), String> {
        let identity = by.issue("target", "edge-1");
        let clients = ClientAuth::Anonymous;
        let server =
            TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: vec![] }.load().unwrap();
        let (socket, far) = duplex(1 << 16);
        let accept = server.load().acceptor().accept(far);
        let host = host.parse().unwrap();
        let (accepted, _) = tokio::join!(tls.tls_handshake(near, &host, socket), accept);
        accepted.map(drop)
    }

    #[tokio::test]
    async fn only_a_loopback_target_is_trusted_without_a_verified_certificate() {
        let (ours, theirs) = (TestCa::new("ours"), TestCa::new("theirs"));
        let unsure = TargetTls { loopback: client(Trust::NoVerify), others: None };
        handshake_with(&unsure, true, "127.0.0.1", &theirs).await.unwrap();
        let why = handshake_with(&unsure, false, "edge-1", &ours).await.unwrap_err();
        assert!(why.contains("cannot be verified; set ca") && why.contains("[edge.target_tls]"), "{why}");
        let sure = TargetTls { others: Some(client(Trust::Ca(ours.ca()))), ..unsure };
        handshake_with(&sure, false, "edge-1", &ours).await.unwrap();
        handshake_with(&sure, true, "127.0.0.1", &theirs).await.unwrap();
        let why = handshake_with(&sure, false, "edge-1", &theirs).await.unwrap_err();
        assert!(why.starts_with("its certificate is from another CA; set ca"), "{why}");
        let why = handshake_with(&sure, false, "edge-2", &ours).await.unwrap_err();
        assert!(why.starts_with("its certificate is for edge-1, and not for that name; issue"), "{why}");
    }

    #[tokio::test]
    async fn a_target_without_tls_is_reported_as_not_speaking_tls() {
        let tls = TargetTls { loopback: client(Trust::NoVerify), others: None };
        let (socket, mut far) = duplex(1 << 16);
        let host = "edge-1".parse().unwrap();
        let plain = async {
            far.read_u8().await.unwrap();
            far.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        };
        let (accepted, ()) = tokio::join!(tls.tls_handshake(true, &host, socket), plain);
        assert_eq!(accepted.unwrap_err(), "it does not speak TLS");
    }
}
