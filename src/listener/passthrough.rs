//! The passthrough listener: TLS for a target at the node that the ClientHello names. Only the ClientHello is read;
//! TLS stays between client and target.

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::debug;

use crate::admission::denial::Denial;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol};

use tunnel_net::socket::Connection as _;
use tunnel_net::tls::client_hello::{ClientHello, NotTls};
use tunnel_proto::names::{Host, NodeName, Target};

/// A port of `[server.https.ports]` that passes TLS through.
#[derive(Debug)]
pub struct Passthrough {
    /// The target that the named node dials.
    pub target: Target,
}

impl ListenerProtocol<TcpStream> for Passthrough {
    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        denial.alert()
    }

    async fn handshake(&self, mut socket: TcpStream, admission: &mut Admission) -> AdmissionOutcome {
        let (name, buffered) = match read_hello(&mut socket).await {
            Ok(hello) => hello,
            Err(reason) => {
                debug!(reason, "no TLS ClientHello");
                return AdmissionOutcome::Failed { reason, socket: Some(Box::new(socket)) };
            }
        };
        let Some(opened) = admission.open_at(socket.remote_reset(), node(name), &self.target).await else {
            return AdmissionOutcome::Failed { reason: "reset_while_opening", socket: None };
        };
        match opened {
            Ok(session) => AdmissionOutcome::Opened { session, socket: Box::new(socket), buffered },
            Err(denied) => match socket.write_all(&denied.denial.alert()).await {
                Ok(()) => AdmissionOutcome::Closed(Some(Box::new(socket))),
                Err(_) => AdmissionOutcome::Failed { reason: "reset", socket: None },
            },
        }
    }
}

/// Reads until the ClientHello is complete. Returns the name in its SNI, and all bytes read, to be sent to the target.
/// The error is a fixed label for metrics.
async fn read_hello(socket: &mut TcpStream) -> Result<(Option<String>, Bytes), &'static str> {
    let mut bytes = BytesMut::with_capacity(FIRST_READ);
    loop {
        let room = HELLO_BYTES - bytes.len();
        match (&mut *socket).take(room as u64).read_buf(&mut bytes).await {
            Ok(0) if room == 0 => return Err("client_hello_too_large"),
            Ok(0) => return Err("client_hello_missing"),
            Ok(_) => {}
            Err(_) => return Err("reset"),
        }
        if let Some(hello) = ClientHello::parse(&bytes).map_err(|NotTls| "not_tls")? {
            return Ok((hello.server_name, bytes.freeze()));
        }
    }
}

/// Returns the node that a server name identifies.
fn node(name: Option<String>) -> Result<NodeName, Denial> {
    let host: Host = name.ok_or(Denial::NoServerName)?.parse()?;
    host.node().ok_or(Denial::NoServerName)
}

/// Maximum length of a ClientHello in bytes. Those of browsers and Go are below 2 KiB; one with many tickets fits too.
const HELLO_BYTES: usize = 16 * 1024;

/// Size of the first read in bytes, enough for nearly every ClientHello.
const FIRST_READ: usize = 2048;

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Sends these bytes in pieces, closes the connection, and returns the result of reading the ClientHello.
    async fn read(bytes: &[u8], piece: usize) -> Result<(Option<String>, Bytes), &'static str> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, accepted) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let (mut client, mut server) = (client.unwrap(), accepted.unwrap().0);
        client.set_nodelay(true).unwrap();
        let send = async {
            for piece in bytes.chunks(piece) {
                if client.write_all(piece).await.is_err() {
                    break;
                }
            }
            let _ = client.shutdown().await;
        };
        tokio::join!(read_hello(&mut server), send).0
    }

    #[tokio::test]
    async fn input_without_a_client_hello_is_rejected_with_its_reason() {
        // Records of a handshake message of 65,535 bytes, which is never completed.
        let mut long = Vec::new();
        for n in 0..20 {
            let head: &[u8] = if n == 0 { &[1, 0, 0xff, 0xff] } else { &[0; 4] };
            long.extend([&[22, 3, 1, 4, 0], head, &[0; 1020]].concat());
        }
        for (bytes, reason) in [
            (&b""[..], "client_hello_missing"),
            (&long[..100], "client_hello_missing"),
            (b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n", "not_tls"),
            (b"SSH-2.0-client\r\n", "not_tls"),
            (&[22, 3, 1, 0, 4, 2, 0, 0, 0], "not_tls"),
            (&long, "client_hello_too_large"),
        ] {
            assert_eq!(read(bytes, 1000).await.unwrap_err(), reason, "{reason}");
        }
    }

    #[test]
    fn a_server_name_is_the_node_of_that_name_in_any_spelling() {
        for (name, meant) in
            [("Node1.example.org.", "node1.example.org"), ("7.9", "7.9"), ("192.0.2.1", "192.0.2.1")]
        {
            assert_eq!(node(Some(name.to_owned())).unwrap().as_str(), meant);
        }
        for (name, status) in [(None, 421), (Some("pod"), 421), (Some("127.0.0.1"), 421), (Some("a b"), 400)]
        {
            assert_eq!(node(name.map(str::to_owned)).unwrap_err().status(), status, "{name:?}");
        }
    }
}
