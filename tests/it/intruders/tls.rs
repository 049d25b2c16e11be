//! Clients that ask for weak TLS, at each port that terminates it.

use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::rustls::client::Tls12Resumption;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, HandshakeKind};
use tunnel_net::tls::{IdentityFiles, server_name};

use super::{client, handshake, server};
use crate::support::assert_eventually;
use crate::support::programs::{NAME, TestDir, TestServer};

/// Returns the ports that terminate TLS.
fn ports(server: &TestServer) -> [SocketAddr; 3] {
    [server.server.bound.grpc, server.port("egress"), server.port("https")]
}

/// Returns a ClientHello of this version, with these cipher suites and extensions.
fn hello(version: u16, suites: &[u16], extensions: &[u8]) -> Vec<u8> {
    let two = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
    let suites: Vec<u8> = suites.iter().flat_map(|suite| suite.to_be_bytes()).collect();
    let mut body = version.to_be_bytes().to_vec();
    body.extend([7; 32]);
    body.push(0);
    body.extend(two(suites.len()));
    body.extend(suites);
    // No compression.
    body.extend([1, 0]);
    body.extend(two(extensions.len()));
    body.extend(extensions);
    let message = [&[1, 0][..], &two(body.len()), &body].concat();
    [&[22, 3, 1][..], &two(message.len()), &message].concat()
}

/// Extensions of a client of TLS 1.2: the group P-256, uncompressed points, and ECDSA and RSA with SHA-256.
const EXTENSIONS: &[u8] = &[0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 6, 0, 4, 4, 3, 4, 1];

#[tokio::test]
async fn old_versions_and_weak_cipher_suites_get_an_alert() {
    let place = TestDir::new();
    let server = server(&place, "[\"*\"]");
    // ECDHE with AES-GCM, in both kinds of signature.
    let good = [0xc02b, 0xc02f];
    for port in ports(&server) {
        for (what, hello, record) in [
            ("TLS 1.2", hello(0x0303, &good, EXTENSIONS), vec![22, 3, 3]),
            ("SSL 3.0", hello(0x0300, &good, EXTENSIONS), alert(PROTOCOL_VERSION)),
            ("TLS 1.0", hello(0x0301, &good, EXTENSIONS), alert(PROTOCOL_VERSION)),
            ("TLS 1.1", hello(0x0302, &good, EXTENSIONS), alert(PROTOCOL_VERSION)),
            ("CBC", hello(0x0303, &[0xc009, 0xc013, 0xc023, 0xc027], EXTENSIONS), alert(HANDSHAKE_FAILURE)),
            (
                "RSA key exchange",
                hello(0x0303, &[0x009c, 0x002f, 0x0035], EXTENSIONS),
                alert(HANDSHAKE_FAILURE),
            ),
            (
                "3DES, RC4 and no cipher",
                hello(0x0303, &[0xc008, 0xc007, 0xc006], EXTENSIONS),
                alert(HANDSHAKE_FAILURE),
            ),
            ("anonymous", hello(0x0303, &[0xc018, 0x0034, 0x00a6], EXTENSIONS), alert(HANDSHAKE_FAILURE)),
        ] {
            let mut socket = TcpStream::connect(port).await.unwrap();
            socket.write_all(&hello).await.unwrap();
            let mut begin = vec![0; record.len()];
            assert_eventually("a record", socket.read_exact(&mut begin)).await.unwrap();
            // The version of the record's header says nothing.
            begin[2] = record[2];
            assert_eq!(begin, record, "{what} at {port}");
        }
    }
}

/// Returns the record of a fatal alert.
fn alert(description: u8) -> Vec<u8> {
    vec![21, 3, 3, 0, 2, 2, description]
}

const HANDSHAKE_FAILURE: u8 = 40;
const PROTOCOL_VERSION: u8 = 70;

#[tokio::test]
async fn no_port_accepts_bytes_before_its_handshake_has_ended() {
    let place = TestDir::new();
    let server = server(&place, &format!("[\"{NAME}\"]"));
    let shows = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let tried = ports(&server).map(|port| {
        let mut config = ClientConfig::clone(&client(&place, &shows, Tls12Resumption::Disabled, false));
        config.enable_early_data = true;
        async move {
            let config = Arc::new(config);
            assert_eq!(handshake(&config, port).await, Ok(HandshakeKind::Full), "{port}");
            let mut again = ClientConnection::new(config.clone(), server_name(NAME).unwrap()).unwrap();
            assert!(again.early_data().is_none(), "{port}: its ticket allows early data");
            assert_eq!(handshake(&config, port).await, Ok(HandshakeKind::Resumed), "{port}");
        }
    });
    join_all(tried).await;
}
