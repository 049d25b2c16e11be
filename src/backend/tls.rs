//! TLS towards targets, for clients whose own TLS has ended at the pod.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tracing::info_span;

use crate::drain::Drain;
use crate::names::{Host, Target};
use crate::net::pool::Pool;
use crate::net::reload::Reload;
use crate::net::socket::Buffered;
use crate::net::tls::{self, Fault};
use crate::policy::plain;
use crate::protocol::{Code, Refusal};

/// An edge's TLS to targets.
#[derive(Debug, Clone)]
pub struct TargetTls {
    /// To those on loopback. Their certificate is not verified, as nobody can stand between.
    pub loopback: Reload<ClientConfig>,
    /// To all others, whose certificate is verified; none: to nobody else.
    pub others: Option<Reload<ClientConfig>>,
}

/// A connection to a target under TLS.
pub(super) type TlsTarget = TlsStream<Buffered<TcpStream>>;

impl TargetTls {
    /// Follows its files until draining begins; connections that stand are not touched.
    pub fn watch(&self, drain: &Drain) {
        for config in std::iter::once(&self.loopback).chain(&self.others) {
            drain.spawn(info_span!("target tls"), config.clone().watch(drain.clone()));
        }
    }

    /// Shakes hands with a target that was dialled. Cancel safe.
    pub(super) async fn connect(
        &self,
        socket: TcpStream,
        target: &Target,
        patience: Duration,
        pool: &Pool,
    ) -> Result<TlsTarget, Refusal> {
        let near = socket.peer_addr().is_ok_and(|at| plain(at.ip()).is_loopback());
        let shaking = self.shake(near, &target.host, Buffered::new(socket, pool.clone()));
        match timeout(patience, shaking).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(why)) => Err(Refusal::new(Code::TargetUnreachable, format!("TLS with {target}: {why}"))),
            Err(_) => {
                Err(Refusal::new(Code::TargetTimeout, format!("{target} did not finish its TLS handshake")))
            }
        }
    }

    async fn shake<S>(&self, near: bool, host: &Host, stream: S) -> Result<TlsStream<S>, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = match &self.others {
            _ if near => self.loopback.load(),
            Some(others) => others.load(),
            None => return Err(format!("its certificate cannot be verified: {REMEDY}")),
        };
        let name = tls::server_name(&host.to_string()).map_err(|why| why.to_string())?;
        TlsConnector::from(config).connect(name, stream).await.map_err(|cause| sentence(&cause))
    }
}

/// What went wrong, with the remedy where it stands in the settings.
fn sentence(cause: &io::Error) -> String {
    match Fault::of(cause) {
        Fault::Authority => format!("its certificate is of another authority: {REMEDY}"),
        fault @ Fault::Name(_) => format!("{fault}: issue one that has it"),
        fault => fault.to_string(),
    }
}

const REMEDY: &str = "name the one that has signed it with ca in [mode.edge.https] of this node";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::Trust;
    use crate::net::tls::tests::Authority;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio_rustls::TlsAcceptor;

    fn client(trust: Trust) -> Reload<ClientConfig> {
        tls::ClientSettings { trust, identity: None, alpn: vec![b"http/1.1".to_vec()] }.load().unwrap()
    }

    /// Who shakes hands with a target whose certificate for `edge-1` an authority has signed.
    async fn shaken(tls: &TargetTls, near: bool, host: &str, by: &Authority) -> Result<(), String> {
        let identity = by.issue("target", "edge-1");
        let clients = tls::ClientCertificates::Anonymous;
        let server =
            tls::ServerSettings { identity, clients, offer: tls::TlsParams::default(), alpn: vec![] }
                .load()
                .unwrap();
        let (socket, far) = duplex(1 << 16);
        let accept = TlsAcceptor::from(server.load()).accept(far);
        let host = host.parse().unwrap();
        let (shaken, _) = tokio::join!(tls.shake(near, &host, socket), accept);
        shaken.map(drop)
    }

    #[tokio::test]
    async fn only_a_target_on_loopback_is_believed_without_proof() {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let unsure = TargetTls { loopback: client(Trust::Anyone), others: None };
        shaken(&unsure, true, "127.0.0.1", &theirs).await.unwrap();
        let why = shaken(&unsure, false, "edge-1", &ours).await.unwrap_err();
        assert!(why.contains("cannot be verified: name") && why.contains("[mode.edge.https]"), "{why}");
        let sure = TargetTls { others: Some(client(Trust::Ca(ours.ca()))), ..unsure };
        shaken(&sure, false, "edge-1", &ours).await.unwrap();
        shaken(&sure, true, "127.0.0.1", &theirs).await.unwrap();
        let why = shaken(&sure, false, "edge-1", &theirs).await.unwrap_err();
        assert!(why.starts_with("its certificate is of another authority: name"), "{why}");
        let why = shaken(&sure, false, "edge-2", &ours).await.unwrap_err();
        assert!(why.starts_with("its certificate is for edge-1, and not for that name: issue"), "{why}");
    }

    #[tokio::test]
    async fn a_target_that_speaks_no_tls_is_told_so() {
        let tls = TargetTls { loopback: client(Trust::Anyone), others: None };
        let (socket, mut far) = duplex(1 << 16);
        let host = "edge-1".parse().unwrap();
        let plain = async {
            far.read_u8().await.unwrap();
            far.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        };
        let (shaken, ()) = tokio::join!(tls.shake(true, &host, socket), plain);
        assert_eq!(shaken.unwrap_err(), "it does not speak TLS");
    }
}
