use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio_rustls::rustls::client::{Resumption, Tls12Resumption};
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, HandshakeKind, ServerConfig, version};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::tls::certificate::EDGE_SUBJECT;
use crate::tls::link_auth::LinkCaFiles;
use crate::tls::testing::{TestCa, client, server};
use crate::tls::tests::{TestClock, server_at};
use crate::tls::{ClientAuth, IdentityFiles, Trust, pem, roots};

use super::*;

/// Returns a server that has just started with these files.
fn peer_server(identity: &IdentityFiles, clients: ClientAuth) -> Arc<ServerConfig> {
    server(identity.clone(), clients).load().config.clone()
}

/// Returns the certificates of edges and peers that are accepted.
fn links(edges: Option<&TestCa>, peers: &TestCa) -> ClientAuth {
    let (edges, peers) = (edges.map(TestCa::ca), Some(peers.ca()));
    ClientAuth::Links(LinkCaFiles { edges, peers, ..LinkCaFiles::default() })
}

/// Connects an edge to a server. Returns how they established the session.
pub(crate) async fn do_handshake(edge: &Arc<ClientConfig>, peer_server: &Arc<ServerConfig>) -> HandshakeKind {
    let (near, far) = duplex(1 << 16);
    let accept = async {
        let mut tls = TlsAcceptor::from(peer_server.clone()).accept(far).await.unwrap();
        tls.write_all(b"x").await.unwrap();
        tls.shutdown().await.unwrap();
    };
    let connect = async {
        let name = ServerName::try_from("a.b").unwrap();
        let mut tls = TlsConnector::from(edge.clone()).connect(name, near).await.unwrap();
        // Tickets follow the handshake.
        tls.read_u8().await.unwrap();
        tls.get_ref().1.handshake_kind().unwrap()
    };
    tokio::join!(accept, connect).1
}

#[tokio::test]
async fn a_session_is_resumed_only_at_the_process_that_issued_the_ticket() {
    let ca = TestCa::new("ca");
    let identity = ca.issue("s", "a.b");
    for (clients, shown) in [
        (ClientAuth::Anonymous, None),
        (ClientAuth::Required(ca.ca()), Some(ca.issue("c", "client"))),
        (links(None, &ca), Some(identity.clone())),
    ] {
        let client = client(Trust::Ca(ca.ca()), shown).load();
        let [one, other] = [(); 2].map(|()| peer_server(&identity, clients.clone()));
        assert_eq!(do_handshake(&client, &one).await, HandshakeKind::Full);
        assert_eq!(do_handshake(&client, &one).await, HandshakeKind::Resumed);
        assert_eq!(do_handshake(&client, &other).await, HandshakeKind::Full);
    }
}

/// Returns a client of TLS 1.2 with that certificate and these kinds of resumption.
fn client_of_tls12(ca: &TestCa, shows: &IdentityFiles, ways: Tls12Resumption) -> Arc<ClientConfig> {
    let read = |path: &std::path::Path| std::fs::read(path).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&version::TLS12])
        .unwrap()
        .with_root_certificates(roots(&ca.ca(), &read(&ca.ca())).unwrap())
        .with_client_auth_cert(
            pem::certs(&shows.cert, &read(&shows.cert)).unwrap(),
            pem::private_key(&shows.key, &read(&shows.key)).unwrap(),
        );
    let mut config = config.unwrap();
    config.resumption = Resumption::in_memory_sessions(9).tls12_resumption(ways);
    Arc::new(config)
}

/// Like [`do_handshake`], but returns `None` if the server rejects the client.
async fn try_handshake(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> Option<HandshakeKind> {
    let (near, far) = duplex(1 << 16);
    let accept = async {
        let mut tls = TlsAcceptor::from(server.clone()).accept(far).await.ok()?;
        tls.write_all(b"x").await.ok()?;
        tls.shutdown().await.ok()?;
        tls.get_ref().1.handshake_kind()
    };
    let connect = async {
        let name = ServerName::try_from("a.b").unwrap();
        if let Ok(mut tls) = TlsConnector::from(client.clone()).connect(name, near).await {
            let _ = tls.read_u8().await;
        }
    };
    tokio::join!(accept, connect).0
}

#[tokio::test]
async fn an_expired_certificate_resumes_no_session_by_ticket_or_id() {
    let (ca, cluster) = (TestCa::new("ca"), TestCa::new("cluster"));
    let identity = ca.issue("s", "a.b");
    let edges = {
        let mut params = rcgen::CertificateParams::new(["node1".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, EDGE_SUBJECT.0);
        params.distinguished_name.push(rcgen::DnType::OrganizationName, EDGE_SUBJECT.1);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        cluster.issue_as("edge", params, 2020..2030)
    };
    for (port, clients, shows) in [
        ("egress, HTTPS", ClientAuth::Required(ca.ca()), ca.issue_for("c", "client", 2020..2030)),
        ("links of peers", links(None, &ca), ca.issue_for("p", "a.b", 2020..2030)),
        ("links of edges", links(Some(&cluster), &ca), edges),
    ] {
        for (ways, again) in [
            (Tls12Resumption::SessionIdOnly, HandshakeKind::Full),
            (Tls12Resumption::SessionIdOrTickets, HandshakeKind::Resumed),
        ] {
            let clock = TestClock(Arc::new(AtomicU64::new(YEAR_2029)));
            let server = server_at(identity.clone(), clients.clone(), &clock).config;
            let client = client_of_tls12(&ca, &shows, ways);
            assert_eq!(try_handshake(&client, &server).await, Some(HandshakeKind::Full), "{port}, {ways:?}");
            assert_eq!(try_handshake(&client, &server).await, Some(again), "{port}, {ways:?}");
            clock.0.store(YEAR_2029 + 2 * 366 * DAY, Relaxed);
            for _ in 0..2 {
                assert_eq!(try_handshake(&client, &server).await, None, "{port}, {ways:?}");
            }
        }
    }
}

/// The middle of 2029.
const YEAR_2029: u64 = 1_877_000_000;

const DAY: u64 = 24 * 3600;

/// A session in the library's format, up to the last field that is parsed.
const SESSION: &[u8] = &[1, 3, b'a', b'.', b'b', 3, 4, 9, 9, 2, 8, 8, 1, 0, 7];

#[test]
fn no_ticket_outlives_the_certificate() {
    let ca = TestCa::new("ca");
    let file = std::fs::read(ca.issue_for("s", "a.b", 2020..2030).cert).unwrap();
    let chain = pem::certs(std::path::Path::new("s"), &file).unwrap();
    let end = *certificate::validity(&chain[0]).unwrap().end();
    let clock = TestClock(Arc::new(AtomicU64::new(end - 100)));
    let tickets = Tickets::new(&chain, Arc::new(clock.clone())).unwrap();
    let made = tickets.encrypt(SESSION).unwrap();
    assert_eq!((tickets.lifetime(), tickets.decrypt(&made).as_deref()), (100, Some(SESSION)));
    assert_eq!(tickets.encrypt(&[2, 3, 4, 9, 9, 0, 1, 0]), None, "unknown format");
    clock.0.store(end, Relaxed);
    assert_eq!((tickets.encrypt(SESSION), tickets.decrypt(&made), tickets.lifetime()), (None, None, 0));
}

#[test]
fn the_clients_certificate_is_read_from_a_session() {
    let chain = [0, 0, 9, 0, 0, 2, b'm', b'e', 0, 0, 1, b'o', 5];
    for name in [&[0][..], &[1, 0], &[1, 2, b'a', b'b']] {
        for (shown, leaf) in [([&[1][..], &chain].concat(), Some(&b"me"[..])), (vec![0, 5], None)] {
            let text = [name, &[3, 4, 9, 9, 1, 8, 1], &shown].concat();
            assert_eq!(client_certificate(&text), Some(leaf));
        }
    }
    let whole = [&[0, 3, 4, 9, 9, 0, 1, 1][..], &chain[..12]].concat();
    assert!(client_certificate(&whole).is_some());
    for len in 0..whole.len() {
        assert_eq!(client_certificate(&whole[..len]), None, "{len} bytes");
    }
}
