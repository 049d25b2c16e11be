use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::time_provider::TimeProvider;

use crate::pool::BufferPool;
use crate::socket::Buffered;
use crate::tls::testing::{TestCa, client, server};
use tunnel_base::drain::Drain;

use super::*;
use crate::reload::FileWatcher;
use crate::tls::peer::PeerTlsConfig;

/// A clock that a test sets, in seconds since 1970.
#[derive(Debug, Clone)]
pub(crate) struct TestClock(pub(crate) Arc<AtomicU64>);

impl TimeProvider for TestClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.load(Relaxed))))
    }
}

/// Like [`server`], but a fixed config with a clock that the test sets.
pub(crate) fn server_at(identity: IdentityFiles, clients: ClientAuth, clock: &TestClock) -> ServerTls {
    let read = |file: &PathBuf| std::fs::read(file).unwrap();
    let (cert, key) = (read(&identity.cert), read(&identity.key));
    let cas: Vec<_> = clients.files().iter().map(read).collect();
    let settings = TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: Vec::new() };
    let mut tls = settings.config(&cert, &key, &cas).unwrap();
    let config = Arc::get_mut(&mut tls.config).unwrap();
    config.time_provider = Arc::new(clock.clone());
    let chain = certs(&settings.identity.cert, &cert).unwrap();
    config.ticketer = Arc::new(Tickets::new(&chain, Arc::new(clock.clone())).unwrap());
    tls
}

/// Handshakes and sends a byte, because the client notices a rejected certificate only when it reads.
async fn do_handshake(
    server: &ReloadedValue<ServerTls>,
    client: &ReloadedValue<ClientConfig>,
    name: &str,
) -> io::Result<()> {
    let (near, far) = duplex(1 << 16);
    let accept = async {
        let mut tls = server.load().acceptor().accept(Buffered::new(far, BufferPool::new())).await?;
        tls.write_all(b"x").await?;
        tls.shutdown().await
    };
    let connect = async {
        let mut tls = TlsConnector::from(client.load()).connect(server_name(name).unwrap(), near).await?;
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        tls.read_u8().await
    };
    let (accepted, connected) = tokio::join!(accept, connect);
    connected.and(accepted)
}

#[tokio::test]
async fn names_and_addresses_are_checked_against_the_certificate() {
    let ca = TestCa::new("one");
    let trust = client(Trust::Ca(ca.ca()), None);
    let by_name = server(ca.issue("name", "tunnel.cloud.io"), ClientAuth::Anonymous);
    let by_address = server(ca.issue("address", "127.0.0.1"), ClientAuth::Anonymous);
    do_handshake(&by_name, &trust, "tunnel.cloud.io").await.unwrap();
    do_handshake(&by_address, &trust, "127.0.0.1").await.unwrap();
    assert!(do_handshake(&by_name, &trust, "127.0.0.1").await.is_err());
    assert!(do_handshake(&by_address, &trust, "tunnel.cloud.io").await.is_err());
    do_handshake(&by_name, &client(Trust::NoVerify, None), "127.0.0.1").await.unwrap();
    assert!(server_name("no name").unwrap_err().contains("neither a DNS name"));
    assert!(server_name("[::1]").is_ok());
}

#[tokio::test]
async fn a_ca_file_may_hold_several_cas_and_others_are_not_trusted() {
    let (one, two) = (TestCa::new("one"), TestCa::new("two"));
    let served = server(two.issue("s", "a.b"), ClientAuth::Anonymous);
    assert!(do_handshake(&served, &client(Trust::Ca(one.ca()), None), "a.b").await.is_err());
    let both = [std::fs::read(one.ca()).unwrap(), std::fs::read(two.ca()).unwrap()].concat();
    std::fs::write(one.ca(), both).unwrap();
    do_handshake(&served, &client(Trust::Ca(one.ca()), None), "a.b").await.unwrap();
}

#[tokio::test]
async fn a_client_without_a_certificate_of_the_ca_is_refused() {
    let (ours, theirs) = (TestCa::new("ours"), TestCa::new("theirs"));
    let required = server(ours.issue("s", "a.b"), ClientAuth::Required(ours.ca()));
    let nobody = client(Trust::Ca(ours.ca()), None);
    let known = client(Trust::Ca(ours.ca()), Some(ours.issue("c", "pod")));
    let stranger = client(Trust::Ca(ours.ca()), Some(theirs.issue("c", "pod")));
    do_handshake(&required, &known, "a.b").await.unwrap();
    for refused in [nobody, stranger] {
        assert!(do_handshake(&required, &refused, "a.b").await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn changed_files_are_used_for_the_next_handshake() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let identity = old.issue("s", "a.b");
    let served = server(identity.clone(), ClientAuth::Anonymous);
    let trust = client(Trust::Ca(old.ca()), None);
    do_handshake(&served, &trust, "a.b").await.unwrap();

    let drain = Drain::new();
    let files = FileWatcher::new(&drain);
    files.watch("served", &served);
    files.watch("trust", &trust);
    let fresh = new.issue("s", "a.b");
    for (from, to) in [(new.ca(), old.ca()), (fresh.cert, identity.cert), (fresh.key, identity.key)] {
        std::fs::copy(from, to).unwrap();
    }
    let before = (served.load(), trust.load());
    while Arc::ptr_eq(&before.0, &served.load()) || Arc::ptr_eq(&before.1, &trust.load()) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    do_handshake(&served, &trust, "a.b").await.unwrap();
    assert!(
        do_handshake(&served, &client(Trust::Ca(new.ca()), None), "a.b").await.is_ok(),
        "the certificate is from the new CA"
    );
}

#[test]
fn a_key_of_another_certificate_is_an_error() {
    let ca = TestCa::new("one");
    let (one, two) = (ca.issue("1", "a.b"), ca.issue("2", "a.b"));
    let mixed = IdentityFiles { cert: one.cert, key: two.key };
    let failed = TlsServerConfig {
        identity: mixed,
        clients: ClientAuth::Anonymous,
        params: TlsParams::default(),
        alpn: vec![],
    }
    .load()
    .unwrap_err();
    assert!(failed.to_string().contains("does not belong to"), "{failed}");
}

/// Returns what a server serves with, and what it dials with.
fn peer_server(
    ca: &TestCa,
    identity: IdentityFiles,
    name: Option<&str>,
) -> (ReloadedValue<ServerTls>, PeerTlsConfig) {
    let name = name.map(|name| server_name(name).unwrap());
    let clients = LinkCaFiles { peers: Some(ca.ca()), peer_name: name.clone(), ..LinkCaFiles::default() };
    let served = server(identity.clone(), ClientAuth::Links(clients));
    (served, PeerTlsConfig { identity, ca: ca.ca(), name })
}

fn dialer(mutual: PeerTlsConfig) -> (ReloadedValue<ClientConfig>, String) {
    let dialer = mutual.load().unwrap().load();
    (ReloadedValue::fixed((*dialer.config).clone()), dialer.name.to_str().into_owned())
}

/// Does a handshake. Returns whether the server received a certificate.
async fn do_mutual_handshake(
    server: &ReloadedValue<ServerTls>,
    client: &ReloadedValue<ClientConfig>,
    name: &str,
) -> io::Result<bool> {
    let (near, far) = duplex(1 << 16);
    let accept = async {
        let mut tls = server.load().acceptor().accept(far).await?;
        tls.write_all(b"x").await?;
        Ok::<_, io::Error>(tls.get_ref().1.peer_certificates().is_some())
    };
    let connect = async {
        let mut tls = TlsConnector::from(client.load()).connect(server_name(name).unwrap(), near).await?;
        tls.read_u8().await
    };
    let (accepted, connected) = tokio::join!(accept, connect);
    connected.and(accepted)
}

#[tokio::test]
async fn servers_recognise_peers_by_their_server_certificates() {
    let ca = TestCa::new("ours");
    let (first, _) = peer_server(&ca, ca.issue("1", "cloud.test"), None);
    let (_, second) = peer_server(&ca, ca.issue("2", "cloud.test"), None);
    let (second, name) = dialer(second);
    assert!(do_mutual_handshake(&first, &second, &name).await.unwrap());
    let edge = client(Trust::Ca(ca.ca()), None);
    assert!(
        !do_mutual_handshake(&first, &edge, "cloud.test").await.unwrap(),
        "an edge presents none and is accepted"
    );
}

#[tokio::test]
async fn a_certificate_of_another_ca_or_with_another_name_is_no_peers() {
    let (ours, theirs) = (TestCa::new("ours"), TestCa::new("theirs"));
    let (served, _) = peer_server(&ours, ours.issue("s", "cloud.test"), None);
    let of_theirs = theirs.issue("c", "cloud.test");
    let of_another_name = ours.issue("c", "edge.test");
    for impostor in [of_theirs, of_another_name] {
        let impostor = client(Trust::Ca(ours.ca()), Some(impostor));
        assert!(do_mutual_handshake(&served, &impostor, "cloud.test").await.is_err());
    }
}

#[tokio::test]
async fn a_client_only_certificate_is_no_peers() {
    let ca = TestCa::new("ours");
    let (served, _) = peer_server(&ca, ca.issue("s", "cloud.test"), None);
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(["cloud.test".to_owned()]).unwrap();
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let identity = ca.issue("c", "cloud.test");
    std::fs::write(&identity.cert, params.signed_by(&key, &ca.issuer).unwrap().pem()).unwrap();
    std::fs::write(&identity.key, key.serialize_pem()).unwrap();
    let impostor = client(Trust::Ca(ca.ca()), Some(identity));
    assert!(do_mutual_handshake(&served, &impostor, "cloud.test").await.is_err());
}

#[test]
fn an_own_certificate_that_peers_would_refuse_is_an_error_with_a_remedy() {
    let (ours, theirs) = (TestCa::new("ours"), TestCa::new("theirs"));
    let why = |ca: &TestCa, identity: IdentityFiles, name: Option<&str>| {
        peer_server(ca, identity, name).1.load().unwrap_err().to_string()
    };
    let missing = why(&ours, ours.issue("1", "cloud.test"), Some("tunnel.test"));
    assert!(missing.contains("\"tunnel.test\"") && missing.contains("reissue it"), "{missing}");
    let foreign = why(&ours, theirs.issue("2", "cloud.test"), None);
    assert!(foreign.contains("server.links.peer_ca"), "{foreign}");
    let nameless = why(&ours, ours.issue("3", "127.0.0.1"), None);
    assert!(nameless.contains("no DNS name"), "{nameless}");
}

#[tokio::test]
async fn a_server_that_its_peers_would_refuse_still_serves_edges() {
    let (ours, theirs) = (TestCa::new("ours"), TestCa::new("theirs"));
    let (served, _) = peer_server(&ours, theirs.issue("s", "cloud.test"), None);
    assert!(
        !do_mutual_handshake(&served, &client(Trust::Ca(theirs.ca()), None), "cloud.test").await.unwrap()
    );
}

#[tokio::test]
async fn an_expired_or_not_yet_valid_certificate_is_no_peers() {
    let ca = TestCa::new("ours");
    let (served, _) = peer_server(&ca, ca.issue("s", "cloud.test"), None);
    for (from, to) in [(2000, 2001), (2090, 2091)] {
        let late = client(Trust::Ca(ca.ca()), Some(ca.issue_for("c", "cloud.test", from..to)));
        assert!(do_mutual_handshake(&served, &late, "cloud.test").await.is_err());
    }
}
