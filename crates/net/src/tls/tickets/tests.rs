use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio_rustls::rustls::client::{Resumption, Tls12Resumption};
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::{ClientConfig, HandshakeKind, ServerConfig, version};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::tls::certificate::EDGE;
use crate::tls::testing::{TestCa, client, server};
use crate::tls::tests::{SetTime, server_at};
use crate::tls::verify::{EdgeCerts, NoVerifier};
use crate::tls::{self, Identity, Trust, roots};

use super::*;

/// Returns a server that has just started with these files.
fn peer_server(identity: &Identity, clients: ClientAuth) -> Arc<ServerConfig> {
    server(identity.clone(), clients).load().config.clone()
}

/// Connects an edge to a server. Returns how they established the session.
pub(crate) async fn meet(edge: &Arc<ClientConfig>, peer_server: &Arc<ServerConfig>) -> HandshakeKind {
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
async fn a_session_of_one_server_is_resumed_at_any_other_and_after_its_restart() {
    let ca = TestCa::new("ca");
    let identity = ca.issue("s", "a.b");
    let edge = client(Trust::Ca(ca.ca()), None).load();
    let fresh = || peer_server(&identity, ClientAuth::Anonymous);
    assert_eq!(meet(&edge, &fresh()).await, HandshakeKind::Full);
    for _ in 0..3 {
        assert_eq!(meet(&edge, &fresh()).await, HandshakeKind::Resumed);
    }
}

#[tokio::test]
async fn a_server_with_other_files_takes_no_ticket() {
    let ca = TestCa::new("ca");
    let identity = ca.issue("s", "a.b");
    let peers = || ClientAuth::Peers(ca.ca(), None);
    let renewed = ca.issue("renewed", "a.b");
    let alone = peer_server(&identity, ClientAuth::Anonymous);
    for other in [peer_server(&renewed, peers()), alone.clone()] {
        let edge = client(Trust::Ca(ca.ca()), None).load();
        assert_eq!(meet(&edge, &peer_server(&identity, peers())).await, HandshakeKind::Full);
        assert_eq!(meet(&edge, &other).await, HandshakeKind::Full);
    }
}

#[tokio::test]
async fn once_another_authority_is_believed_no_ticket_of_before_is_taken() {
    let (ca, one, later) = (TestCa::new("ca"), TestCa::new("one"), TestCa::new("later"));
    let identity = ca.issue("s", "a.b");
    let edge = client(Trust::Ca(ca.ca()), None).load();
    let asks = || peer_server(&identity, ClientAuth::Peers(one.ca(), None));
    assert_eq!(meet(&edge, &asks()).await, HandshakeKind::Full);
    assert_eq!(meet(&edge, &asks()).await, HandshakeKind::Resumed);
    std::fs::copy(later.ca(), one.ca()).unwrap();
    assert_eq!(meet(&edge, &asks()).await, HandshakeKind::Full);
}

#[tokio::test]
async fn where_clients_are_known_by_their_certificates_a_ticket_is_for_the_server_alone_that_gave_it() {
    let ca = TestCa::new("ca");
    let identity = ca.issue("s", "a.b");
    let clients = ClientAuth::Required(ca.ca());
    let edge = client(Trust::Ca(ca.ca()), Some(ca.issue("c", "client"))).load();
    let one = peer_server(&identity, clients.clone());
    assert_eq!(meet(&edge, &one).await, HandshakeKind::Full);
    assert_eq!(meet(&edge, &one).await, HandshakeKind::Resumed);
    assert_eq!(meet(&edge, &peer_server(&identity, clients)).await, HandshakeKind::Full);
}

#[tokio::test]
async fn tickets_of_tls_1_2_are_for_the_server_alone_that_gave_them() {
    let ca = TestCa::new("ca");
    let identity = ca.issue("s", "a.b");
    let provider = Arc::new(aws_lc_rs::default_provider());
    let trust = client(Trust::Ca(ca.ca()), None).load();
    let mut edge = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS12])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(NoVerifier(trust.crypto_provider().clone())))
        .with_no_client_auth();
    edge.alpn_protocols = vec![b"h2".to_vec()];
    let edge = Arc::new(edge);
    let one = peer_server(&identity, ClientAuth::Anonymous);
    assert_eq!(meet(&edge, &one).await, HandshakeKind::Full);
    assert_eq!(meet(&edge, &one).await, HandshakeKind::Resumed);
    assert_eq!(meet(&edge, &peer_server(&identity, ClientAuth::Anonymous)).await, HandshakeKind::Full);
}

/// Returns a client of TLS 1.2 with that certificate and these kinds of resumption.
fn client_of_tls12(ca: &TestCa, shows: &Identity, ways: Tls12Resumption) -> Arc<ClientConfig> {
    let read = |path: &std::path::Path| std::fs::read(path).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&version::TLS12])
        .unwrap()
        .with_root_certificates(roots(&ca.ca(), &read(&ca.ca())).unwrap())
        .with_client_auth_cert(
            tls::certs(&shows.cert, &read(&shows.cert)).unwrap(),
            tls::private_key(&shows.key, &read(&shows.key)).unwrap(),
        );
    let mut config = config.unwrap();
    config.resumption = Resumption::in_memory_sessions(9).tls12_resumption(ways);
    Arc::new(config)
}

/// Like [`meet`], but returns `None` if the server rejects the client.
async fn is_met(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> Option<HandshakeKind> {
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
async fn an_expired_certificate_gets_in_by_no_session_of_before_neither_by_ticket_nor_by_id() {
    let (ca, cluster) = (TestCa::new("ca"), TestCa::new("cluster"));
    let identity = ca.issue("s", "a.b");
    let edges = {
        let mut params = rcgen::CertificateParams::new(["node1".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, EDGE.0);
        params.distinguished_name.push(rcgen::DnType::OrganizationName, EDGE.1);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        cluster.issue_as("edge", params, 2020..2030)
    };
    let peers = || ClientAuth::Peers(ca.ca(), None);
    let agents = ClientAuth::Edges(EdgeCerts { ca: cluster.ca() }, Box::new(peers()));
    for (port, clients, shows) in [
        ("egress, HTTPS", ClientAuth::Required(ca.ca()), ca.issue_for("c", "client", 2020..2030)),
        ("links of peers", peers(), ca.issue_for("p", "a.b", 2020..2030)),
        ("links of edges", agents, edges),
    ] {
        for (ways, again) in [
            (Tls12Resumption::SessionIdOnly, HandshakeKind::Full),
            (Tls12Resumption::SessionIdOrTickets, HandshakeKind::Resumed),
        ] {
            let clock = SetTime(Arc::new(AtomicU64::new(YEAR_2029)));
            let server = server_at(identity.clone(), clients.clone(), &clock).config;
            let client = client_of_tls12(&ca, &shows, ways);
            assert_eq!(is_met(&client, &server).await, Some(HandshakeKind::Full), "{port}, {ways:?}");
            assert_eq!(is_met(&client, &server).await, Some(again), "{port}, {ways:?}");
            clock.0.store(YEAR_2029 + 2 * 366 * DAY, Relaxed);
            for _ in 0..2 {
                assert_eq!(is_met(&client, &server).await, None, "{port}, {ways:?}");
            }
        }
    }
}

/// The middle of 2029.
const YEAR_2029: u64 = 1_877_000_000;

/// A session in the library's format, up to the last field that is parsed.
const SESSION: &[u8] = &[1, 3, b'a', b'.', b'b', 3, 4, 9, 9, 2, 8, 8, 1, 0, 7];

fn tickets(key: &[u8], until: u64, clock: &SetTime) -> Tickets {
    let scope = TicketScope { key, parts: vec![b"certificate", b"ca"] };
    let shared = Some(Shared::new(&scope, clock.0.load(Relaxed)).unwrap());
    let own = aws_lc_rs::Ticketer::new().unwrap();
    Tickets { until, clock: Arc::new(clock.clone()), shared, own }
}

fn clock() -> SetTime {
    SetTime(Arc::new(AtomicU64::new(1000 * DAY + 7)))
}

#[test]
fn a_ticket_is_taken_for_a_week_also_where_clocks_differ() {
    let clock = clock();
    let made = tickets(b"key", u64::MAX, &clock).encrypt(SESSION).unwrap();
    let after = |seconds: i64| {
        let clock = SetTime(Arc::new(AtomicU64::new(clock.0.load(Relaxed).saturating_add_signed(seconds))));
        tickets(b"key", u64::MAX, &clock).decrypt(&made)
    };
    let day = i64::try_from(DAY).unwrap();
    for ahead in [-day, -8, 0, day, 7 * day] {
        assert_eq!(after(ahead).as_deref(), Some(SESSION), "{ahead}");
    }
    assert_eq!((after(8 * day), after(-2 * day)), (None, None));
}

#[test]
fn a_process_that_runs_for_days_goes_on_giving_tickets_that_others_take() {
    let clock = clock();
    let (one, other) = (tickets(b"key", u64::MAX, &clock), tickets(b"key", u64::MAX, &clock));
    for _ in 0..20 {
        assert_eq!(other.decrypt(&one.encrypt(SESSION).unwrap()).as_deref(), Some(SESSION));
        clock.0.fetch_add(DAY, Relaxed);
    }
}

#[test]
fn no_ticket_outlives_the_certificate() {
    let clock = clock();
    let end = clock.0.load(Relaxed) + 100;
    let tickets = tickets(b"key", end, &clock);
    let made = tickets.encrypt(SESSION).unwrap();
    assert_eq!(tickets.lifetime(), 100);
    clock.0.store(end, Relaxed);
    assert_eq!((tickets.encrypt(SESSION), tickets.decrypt(&made), tickets.lifetime()), (None, None, 0));
}

#[test]
fn what_was_sealed_by_another_key_or_changed_on_its_way_is_not_opened() {
    let clock = clock();
    let (one, other) = (tickets(b"key", u64::MAX, &clock), tickets(b"other", u64::MAX, &clock));
    let made = one.encrypt(SESSION).unwrap();
    assert_eq!(other.decrypt(&made), None);
    for at in 0..made.len() {
        let mut changed = made.clone();
        changed[at] ^= 1;
        assert_eq!(one.decrypt(&changed), None, "byte {at}");
        assert_eq!(one.decrypt(&made[..at]), None, "{at} bytes");
    }
    assert_ne!(made, one.encrypt(SESSION).unwrap(), "each ticket has its own nonce");
}

#[test]
fn of_a_session_of_tls_1_2_nobody_else_is_given_a_ticket() {
    let clock = clock();
    let (one, other) = (tickets(b"key", u64::MAX, &clock), tickets(b"key", u64::MAX, &clock));
    let mut session = SESSION.to_vec();
    session[6] = 3;
    let made = one.encrypt(&session).unwrap();
    assert_eq!((one.decrypt(&made), other.decrypt(&made)), (Some(session), None));
}

#[test]
fn of_a_session_its_version_and_the_clients_own_certificate_are_read() {
    let chain = [0, 0, 9, 0, 0, 2, b'm', b'e', 0, 0, 1, b'o', 5];
    for name in [&[0][..], &[1, 0], &[1, 2, b'a', b'b']] {
        for (shown, leaf) in [([&[1][..], &chain].concat(), Some(&b"me"[..])), (vec![0, 5], None)] {
            let text = [name, &[3, 4, 9, 9, 1, 8, 1], &shown].concat();
            assert_eq!(
                TicketSession::read(&text),
                Some(TicketSession { version: ProtocolVersion::TLSv1_3, leaf })
            );
        }
    }
    let whole = [&[0, 3, 4, 9, 9, 0, 1, 1][..], &chain[..12]].concat();
    assert!(TicketSession::read(&whole).is_some());
    for len in 0..whole.len() {
        assert_eq!(TicketSession::read(&whole[..len]), None, "{len} bytes");
    }
    let tickets = tickets(b"key", u64::MAX, &clock());
    assert_eq!(tickets.encrypt(&[2, 3, 4, 9, 9, 0, 1, 0]), None, "unknown format");
    assert_eq!(tickets.encrypt(&whole), None, "an invalid certificate is not valid now");
}
