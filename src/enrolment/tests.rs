use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::enrolment::shared_text::FileTextStore;
use tunnel_base::drain::Drain;
use tunnel_base::policy::grants::{FOR_EVER, Grant, UserGrants};
use tunnel_base::stores::{StoreFuture, VersionedText};
use tunnel_net::pki::CertificateAuthority;
use tunnel_proto::names::NodeName;

use super::*;

/// Servers that share a file.
pub(crate) fn servers(place: &std::path::Path, count: usize) -> Vec<Arc<SharedEnrolments>> {
    let authority = CertificateAuthority::new("ours", Duration::from_secs(3600)).unwrap();
    let (ca, cert, key) = (place.join("ca.crt"), place.join("cloud.crt"), place.join("cloud.key"));
    let other = CertificateAuthority::new("other", Duration::from_secs(3600)).unwrap();
    std::fs::write(&ca, format!("{}{}", other.cert(), authority.cert())).unwrap();
    authority.server(&["cloud.test"]).unwrap().write(&cert, &key).unwrap();
    let server = || {
        let authority = AdvertisedCa::load(ca.clone(), cert.clone()).unwrap();
        SharedEnrolments::new(
            Box::new(FileTextStore::new(place.join("enrolled"))),
            (
                ["enrolled.grants", "enrolled.seen"]
                    .map(|name| Box::new(FileTextStore::new(place.join(name))) as _),
                2,
            ),
            authority,
            RefusalLog::default(),
        )
    };
    (0..count).map(|_| server()).collect()
}

/// Stores of grants and of seen machines of its own.
fn no_grants() -> ([Box<dyn TextStore>; 2], usize) {
    ([Box::new(LossyStore::default()), Box::new(LossyStore::default())], 0)
}

/// How a write to a [`LossyStore`] ends.
#[derive(Debug, Clone, Copy)]
enum WriteEnd {
    /// The text was written, and the response says that another server changed it, as after a retry.
    Conflict,
    /// The text was written, and the response was lost.
    Error,
}

/// A store in memory that counts reads. Its next write may end in an ambiguous way.
#[derive(Debug, Clone, Default, derive_more::Display)]
#[display("memory")]
struct LossyStore(Arc<Mutex<(Vec<u8>, Option<WriteEnd>)>>, Arc<AtomicU64>);

impl LossyStore {
    fn reads(&self) -> u64 {
        self.1.load(Relaxed)
    }
}

impl TextStore for LossyStore {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        self.1.fetch_add(1, Relaxed);
        let text = self.0.lock().0.clone();
        Box::pin(async { Ok(VersionedText { text, ..VersionedText::default() }) })
    }

    fn write<'a>(&'a mut self, _: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        let mut store = self.0.lock();
        store.0 = text;
        let written = match store.1.take() {
            None => Ok(true),
            Some(WriteEnd::Conflict) => Ok(false),
            Some(WriteEnd::Error) => Err("no response in time".into()),
        };
        Box::pin(async { written })
    }
}

/// A store of several servers that takes its time, as kube-apiserver does.
#[derive(Debug, Clone, Default, derive_more::Display)]
#[display("memory")]
struct SlowStore(Arc<Mutex<Vec<u8>>>);

impl TextStore for SlowStore {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        Box::pin(async {
            sleep(Duration::from_millis(50)).await;
            Ok(VersionedText { text: self.0.lock().clone(), ..VersionedText::default() })
        })
    }

    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            sleep(Duration::from_millis(50)).await;
            let mut stored = self.0.lock();
            let is_same = *stored == seen.text;
            if is_same {
                *stored = text;
            }
            Ok(is_same)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn machines_that_join_at_once_at_two_servers_with_a_slow_store_all_join_before_they_give_up() {
    let (place, store) = (tempfile::tempdir().unwrap(), SlowStore::default());
    let authority = servers(place.path(), 1).remove(0).authority.clone();
    let servers = [0, 1].map(|_| {
        SharedEnrolments::new(Box::new(store.clone()), no_grants(), authority.clone(), RefusalLog::default())
    });
    let pattern = "shop-*".parse().unwrap();
    let code = servers[0].invite(&pattern, Some(500), HOUR, false, "test").await.unwrap().code;
    let (secret, started) = (code.secret(), Instant::now());
    let joins = (0..500).map(|n| {
        let (server, secret) = (&servers[n % 2], &secret);
        async move { join(server, secret, &format!("shop-{n}"), &token(n)).await }
    });
    for joined in futures_util::future::join_all(joins).await {
        joined.unwrap();
    }
    // A machine waits for 20 s.
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(Enrolments::parse(&store.0.lock()).unwrap().joined().len(), 500);
}

#[tokio::test(start_paused = true)]
async fn a_join_whose_response_was_lost_is_the_first_use_of_its_key() {
    for end in [WriteEnd::Conflict, WriteEnd::Error] {
        let place = tempfile::tempdir().unwrap();
        let (store, servers) = (LossyStore::default(), servers(place.path(), 1));
        let server = SharedEnrolments::new(
            Box::new(store.clone()),
            no_grants(),
            servers[0].authority.clone(),
            RefusalLog::default(),
        );
        let invited = server.invite(&"shop-*".parse().unwrap(), Some(1), HOUR, false, "test").await.unwrap();
        store.0.lock().1 = Some(end);
        let code = invited.code;
        let first = server
            .join_with_others(SecretHash::of(&code.secret()), "shop-1".parse().unwrap(), SecretHash::of("t"))
            .await;
        assert!(first.unwrap(), "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_revocation_whose_response_was_lost_is_not_reported_as_without_effect() {
    for end in [WriteEnd::Conflict, WriteEnd::Error] {
        let place = tempfile::tempdir().unwrap();
        let (store, servers) = (LossyStore::default(), servers(place.path(), 1));
        let server = SharedEnrolments::new(
            Box::new(store.clone()),
            no_grants(),
            servers[0].authority.clone(),
            RefusalLog::default(),
        );
        server.invite(&node(), None, HOUR, false, "test").await.unwrap();
        store.0.lock().1 = Some(end);
        assert!(server.revoke(&node(), "test").await.unwrap(), "{end:?}");
        assert!(!server.revoke(&node(), "test").await.unwrap(), "it was revoked before");
    }
}

fn node() -> Invitee {
    "edge7".parse().unwrap()
}

fn name() -> NodeName {
    "edge7".parse().unwrap()
}

pub(crate) fn token(n: usize) -> String {
    format!("{n:032x}")
}

/// Joins as a machine whose node has no line in the token file.
pub(crate) async fn join(
    server: &SharedEnrolments,
    secret: &str,
    name: &str,
    token: &str,
) -> Result<(), JoinRefusal> {
    let params =
        JoinCredentials { secret: secret.to_owned(), name: name.to_owned(), token: token.to_owned() };
    server.join(FROM, &params, |_| false).await
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
const FROM: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

#[tokio::test]
async fn exactly_one_of_ten_concurrent_joins_with_one_invitation_succeeds() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 3);
    let invited = servers[0].invite(&node(), None, HOUR, false, "test").await.unwrap();
    let secret = invited.code.secret();
    let joins = (0..10).map(|n| {
        let (server, secret) = (servers[n % 3].clone(), secret.clone());
        async move { join(&server, &secret, "edge7", &token(n)).await }
    });
    let joined = futures_util::future::join_all(joins).await;
    let winners: Vec<_> = (0..10).filter(|n| joined[*n].is_ok()).collect();
    assert_eq!(winners.len(), 1, "{joined:?}");
    for lost in joined.iter().filter_map(|joined| joined.as_ref().err()) {
        assert!(matches!(lost, JoinRefusal::Uninvited(InvitationError::Used)), "{lost}");
    }
    for server in &servers {
        server.read_store().await.unwrap();
        assert_eq!(server.known().proves(&name(), &token(winners[0])), Some(true));
        // A node that lost the response repeats its request at any server.
        join(server, &secret, "edge7", &token(winners[0])).await.unwrap();
    }
}

#[tokio::test]
async fn an_invitation_contains_the_pin_of_the_signing_ca_and_a_host_name() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 1);
    let invited = servers[0].invite(&node(), None, HOUR, false, "test").await.unwrap();
    let certificates = servers[0].certificates();
    let all: Vec<_> = rustls_pemfile::certs(&mut certificates.as_bytes()).map(Result::unwrap).collect();
    assert_eq!(invited.code.pin(), pin_of(&all[1]));
    assert_ne!(invited.code.pin(), pin_of(&all[0]));
    assert_eq!(invited.host, Some("cloud.test".parse().unwrap()));
}

#[tokio::test(start_paused = true)]
async fn wrong_codes_read_the_store_once_a_second_and_exclude_no_right_one() {
    let place = tempfile::tempdir().unwrap();
    let (store, servers) = (LossyStore::default(), servers(place.path(), 1));
    let server = || {
        let authority = servers[0].authority.clone();
        SharedEnrolments::new(Box::new(store.clone()), no_grants(), authority, RefusalLog::default())
    };
    let (here, peer, started) = (server(), server(), Instant::now());
    let guess = async |n: usize| join(&here, &n.to_string(), "edge7", &token(1)).await;
    for n in 0..40 {
        let guesses = futures_util::future::join_all((0..25).map(|_| guess(n))).await;
        let unknown = |outcome: &_| matches!(outcome, Err(JoinRefusal::Uninvited(InvitationError::Unknown)));
        assert!(guesses.iter().all(unknown), "{guesses:?}");
        // A peer has just created this one.
        let code = peer.invite(&node(), None, HOUR, false, "test").await.unwrap().code.secret();
        let right = token(2);
        let (joined, _) = tokio::join!(join(&here, &code, "edge7", &right), guess(n));
        joined.unwrap();
        let used = join(&here, &code, "edge7", &token(3)).await.unwrap_err();
        assert!(matches!(used, JoinRefusal::Uninvited(InvitationError::Used)), "{used}");
    }
    let seconds = started.elapsed().as_secs();
    let changes = 2 * 40;
    assert!(store.reads() <= changes + seconds + 1, "{} reads in {seconds} s", store.reads());
}

#[tokio::test]
async fn malformed_joins_and_unusable_stores_have_different_errors() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 1);
    for (node, token) in [
        ("a b", token(1)),
        ("alice/", token(1)),
        ("alice/b/c", token(1)),
        ("edge7", "short".to_owned()),
        ("edge7", "a:".repeat(20)),
    ] {
        let outcome = join(&servers[0], "secret", node, &token).await.unwrap_err();
        assert!(matches!(outcome, JoinRefusal::Malformed(_)), "{outcome}");
    }
    std::fs::write(place.path().join("enrolled"), "10.0.0.1 somebody's hosts").unwrap();
    let outcome = join(&servers[0], "secret", "edge7", &token(1)).await.unwrap_err();
    assert!(matches!(outcome, JoinRefusal::Later(_)), "{outcome}");
    let outcome = servers[0].invite(&node(), None, HOUR, false, "test").await.unwrap_err().to_string();
    assert!(outcome.contains("name another store"), "{outcome}");
    assert_eq!(std::fs::read_to_string(place.path().join("enrolled")).unwrap(), "10.0.0.1 somebody's hosts");
}

#[tokio::test]
async fn an_emptied_store_revokes_no_node_and_accepts_no_invitation() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 1);
    let invited = servers[0].invite(&node(), None, HOUR, false, "test").await.unwrap();
    join(&servers[0], &invited.code.secret(), "edge7", &token(1)).await.unwrap();
    std::fs::remove_file(place.path().join("enrolled")).unwrap();
    assert!(servers[0].read_store().await.unwrap_err().to_string().contains("the store is empty"));
    assert!(servers[0].invite(&node(), None, HOUR, false, "test").await.is_err());
    assert_eq!(servers[0].known().proves(&name(), &token(1)), Some(true));
}

/// A link's judge asks it, so a device that is revoked between the check of its token and the listing of its link gets
/// no link.
#[tokio::test]
async fn a_device_is_joined_with_its_token_until_it_is_revoked() {
    let place = tempfile::tempdir().unwrap();
    let server = servers(place.path(), 1).remove(0);
    let code = server.invite(&"alice/".parse().unwrap(), None, HOUR, false, "test").await.unwrap().code;
    let [laptop, other] = [1, 2].map(|n| server.device("alice/laptop".parse().unwrap(), &token(n)));
    assert!(laptop.check().is_err());
    join(&server, &code.secret(), "alice/laptop", &token(1)).await.unwrap();
    assert!(laptop.check().is_ok() && other.check().is_err());
    let changes = server.changes();
    assert!(server.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap());
    assert!(
        laptop.check().is_err() && changes.has_changed().unwrap(),
        "and what depends on it is judged again"
    );
}

#[tokio::test]
async fn a_server_notices_that_another_one_has_undone_its_change() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 2);
    let invite = async |server: &SharedEnrolments, node: &str| {
        server.invite(&node.parse().unwrap(), None, Duration::from_secs(60), false, "test").await.unwrap();
    };
    invite(&servers[1], "node1").await;
    servers[0].read_store().await.unwrap();
    invite(&servers[0], "node2").await;
    // Now the text is again as the first server has read it.
    assert!(servers[1].revoke(&"node2".parse().unwrap(), "test").await.unwrap());
    servers[0].read_store().await.unwrap();
    assert_eq!(servers[0].known(), servers[1].known());
}

fn grant(id: &str, user: &str, by: &str) -> Grant {
    Grant {
        id: id.to_owned(),
        user: user.parse().unwrap(),
        nodes: vec!["shop-*".parse().unwrap()],
        ports: None,
        with_join_keys: false,
        until: FOR_EVER,
        by: by.to_owned(),
    }
}

#[tokio::test]
async fn grants_are_limited_and_go_with_the_user_or_device_that_has_or_has_given_them() {
    let place = tempfile::tempdir().unwrap();
    let server = servers(place.path(), 1).remove(0);
    let ids = || {
        let ids = server.live_grants().into_iter().map(|one| one["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    server.grant(&grant("a", "alice", "uid=0")).await.unwrap();
    server.grant(&grant("b", "bob", "alice/laptop")).await.unwrap();
    for device in ["alice/laptop", "alice/other"] {
        let too_many = server.grant(&grant("d", "dan", device)).await.unwrap_err();
        assert!(too_many.contains("more than 1 grants of 200 bytes by one admin"), "{too_many}");
    }
    let full = server.grant(&grant("c", "carol", "uid=0")).await.unwrap_err();
    assert!(full.contains("more than 2 grants") && ids() == ["a", "b"], "{full}");
    let nobody = GrantSelection { by: Some("lap".into()), ..GrantSelection::default() };
    assert_eq!(server.revoke_grants(&nobody, |_| true, "test").await, Ok(0));
    assert!(server.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap(), "she had no device");
    assert_eq!(ids(), ["a"], "that device has given it");
    server.grant(&grant("b", "bob", "alice/phone")).await.unwrap();
    assert!(server.revoke(&"alice/".parse().unwrap(), "test").await.unwrap());
    assert!(ids().is_empty(), "nor do those remain that she has given");
    assert!(!server.revoke(&"alice/".parse().unwrap(), "test").await.unwrap());

    // One that has ended takes no room, and a long one takes that of several.
    for id in ["old", "older", "oldest"] {
        server.grant(&Grant { until: 1, ..grant(id, "bob", "uid=0") }).await.unwrap();
    }
    assert!(ids().is_empty());
    let nodes = (0..40).map(|n| format!("shop-{n}-*").parse().unwrap()).collect();
    let long = server.grant(&Grant { nodes, ..grant("long", "bob", "uid=0") }).await.unwrap_err();
    assert!(long.contains("200 bytes"), "{long}");
}

#[tokio::test]
async fn a_server_follows_the_grants_of_others_and_keeps_those_it_knows_without_their_store() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 2);
    for server in &servers {
        server.read_store().await.unwrap();
    }
    let has = |server: &SharedEnrolments| !server.user_grants(&UserGrants::default()).is_empty();
    servers[0].grant(&grant("a", "alice", "uid=0")).await.unwrap();
    servers[1].grants.read_store().await.unwrap();
    assert!(has(&servers[1]));
    let all = GrantSelection { user: Some("alice".into()), ..GrantSelection::default() };
    assert_eq!(servers[1].revoke_grants(&all, |_| true, "test").await, Ok(1));
    servers[0].grants.read_store().await.unwrap();
    assert!(!has(&servers[0]));

    servers[0].grant(&grant("b", "bob", "uid=0")).await.unwrap();
    let file = place.path().join("enrolled.grants");
    let text = std::fs::read_to_string(&file).unwrap();
    for broken in ["", "somebody's text"] {
        std::fs::write(&file, broken).unwrap();
        let why = servers[0].grants.read_store().await.unwrap_err();
        let expected = format!("cannot read grants in {}: ", file.display());
        assert!(why.starts_with(&expected) && why.contains("restore a copy"), "{why}");
        assert!(servers[0].grant(&grant("new", "dora", "uid=0")).await.is_err());
        assert!(has(&servers[0]) && !has(&servers[1]), "{broken}");
    }
    let newer = text.replace("\"by\"", "\"only\":\"monday\",\"by\"").replacen('{', "{\"later\":[1],", 1);
    std::fs::write(&file, &newer).unwrap();
    servers[0].grants.read_store().await.unwrap();
    assert!(!has(&servers[0]), "a field of a newer server");
    servers[0].grant(&grant("c", "carol", "uid=0")).await.unwrap();
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept.contains("\"only\":\"monday\"") && kept.contains("\"later\":[1]"), "{kept}");

    // Without the join keys, known grants remain, and new ones give nothing yet.
    let before = servers[0].user_grants(&UserGrants::default());
    std::fs::write(place.path().join("enrolled"), "{").unwrap();
    servers[0].read_store().await.unwrap_err();
    let bobs = GrantSelection { user: Some("bob".into()), ..GrantSelection::default() };
    assert_eq!(servers[1].revoke_grants(&bobs, |_| true, "test").await, Ok(1));
    servers[1].grant(&grant("d", "dora", "uid=0")).await.unwrap();
    servers[0].grants.read_store().await.unwrap();
    let with_dora = |server: &SharedEnrolments| {
        let grants = server.user_grants(&before);
        ["c", "d"].map(|id| grants.contains(&grant(id, if id == "c" { "carol" } else { "dora" }, "uid=0")))
    };
    assert_eq!(with_dora(&servers[0]), [true, false]);
    std::fs::write(place.path().join("enrolled"), "").unwrap();
    let changes = servers[0].changes();
    servers[0].read_store().await.unwrap();
    assert!(changes.has_changed().unwrap(), "they are judged again");
    assert_eq!(with_dora(&servers[0]), [true, true]);
}

/// Lets users' devices join, as if they were unused for 90 days but for an hour.
async fn devices_unused(place: &std::path::Path, server: &SharedEnrolments, names: &[&str]) {
    let mut machines = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let user = format!("{}/", name.split('/').next().unwrap()).parse().unwrap();
        let code = server.invite(&user, None, HOUR, false, "test").await.unwrap().code;
        join(server, &code.secret(), name, &token(n)).await.unwrap();
        machines.push(format!("{name:?}:{{\"unused\":{}}}", 90 * 86400 - 3600 + n));
    }
    let text =
        format!("{{\"tokens\":{{}},\"seen\":{{\"written\":{NOW},\"machines\":{{{}}}}}}}", machines.join(","));
    std::fs::write(place.join("enrolled.seen"), text).unwrap();
}

const NOW: u64 = 1_800_000_000;

#[tokio::test]
async fn devices_that_no_server_has_seen_end_with_their_grants_and_without_a_store_none() {
    let place = tempfile::tempdir().unwrap();
    let servers = servers(place.path(), 2);
    let all = ["alice/laptop", "alice/phone", "bob/old"];
    devices_unused(place.path(), &servers[0], &all).await;
    let joined = async |server: &SharedEnrolments| {
        let all = server.list().await.unwrap().into_iter();
        all.filter(|one| one.joined)
            .map(|one| format!("{}/{}", one.user.unwrap(), one.device.unwrap()))
            .collect()
    };
    let left: Vec<String> = joined(&servers[0]).await;
    assert_eq!(left, all);
    servers[0].grant(&grant("a", "carol", "bob/old")).await.unwrap();
    // What only one server can note, the other one knows.
    let link = servers[1].linked("alice/phone".into());
    servers[1].note_uses(NOW + 1800).await.unwrap();
    let here = servers[0].linked("alice/laptop".into());
    for broken in ["", "somebody's text"] {
        let text = std::fs::read(place.path().join("enrolled.seen")).unwrap();
        std::fs::write(place.path().join("enrolled.seen"), broken).unwrap();
        servers[0].note_uses(NOW + 3600).await.unwrap_err();
        std::fs::write(place.path().join("enrolled.seen"), text).unwrap();
    }
    std::fs::rename(place.path().join("enrolled"), place.path().join("away")).unwrap();
    servers[0].note_uses(NOW + 3600).await.unwrap_err();
    std::fs::rename(place.path().join("away"), place.path().join("enrolled")).unwrap();
    let left: Vec<String> = joined(&servers[1]).await;
    assert_eq!(left, all, "a server without a store ends none");

    let old = servers[1].device("bob/old".parse().unwrap(), &token(2));
    servers[0].note_uses(NOW + 3600).await.unwrap();
    let left: Vec<String> = joined(&servers[1]).await;
    assert_eq!(left, all[..2]);
    assert_eq!(old.check(), Err("ended at this device, which was unused for 90 days"));
    assert!(servers[0].live_grants().is_empty(), "nor do those remain that it has given");
    drop((link, here));
}

#[tokio::test(start_paused = true)]
async fn a_device_that_would_end_soon_is_noted_as_soon_as_it_links_and_others_within_an_hour() {
    let place = tempfile::tempdir().unwrap();
    let authority = servers(place.path(), 1).remove(0).authority.clone();
    let [store, grants, seen] = [(); 3].map(|()| SlowStore::default());
    let server = SharedEnrolments::new(
        Box::new(store),
        ([Box::new(grants), Box::new(seen.clone())], 2),
        authority,
        RefusalLog::default(),
    );
    let now = tunnel_base::unix_time::now();
    let device = "alice/laptop";
    let code = server.invite(&"alice/".parse().unwrap(), None, HOUR, false, "test").await.unwrap().code;
    join(&server, &code.secret(), device, &token(1)).await.unwrap();
    let text = |unused: u64| {
        format!(
            r#"{{"tokens":{{}},"seen":{{"written":{now},"machines":{{"{device}":{{"unused":{unused}}}}}}}}}"#
        )
        .into_bytes()
    };
    let noted = async || {
        let started = Instant::now();
        while Enrolments::parse(&seen.0.lock()).unwrap().seen.get(device).seen.is_none() {
            sleep(Duration::from_secs(1)).await;
        }
        started.elapsed()
    };
    for (unused, times) in [(80 * 86400, 0..10), (86400, 3000..4000)] {
        *seen.0.lock() = text(unused);
        let reports = Mutex::new(Vec::new());
        let report = |result: Result<(), String>, ending| reports.lock().push((result, ending));
        let drain = Drain::default();
        let links = async {
            sleep(Duration::from_secs(1)).await;
            let _link = server.linked(device.into());
            assert!(times.contains(&noted().await.as_secs()), "{unused}");
            drain.start();
        };
        tokio::join!(server.follow_uses(report, drain.clone()), links);
        assert_eq!(reports.lock()[0], (Ok(()), usize::from(unused > 76 * 86400)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_server_notes_when_machines_join_and_at_its_end_when_it_has_seen_them() {
    let place = tempfile::tempdir().unwrap();
    let server = servers(place.path(), 1).remove(0);
    let drain = Drain::default();
    let joins = async {
        while !place.path().join("enrolled.seen").exists() {
            sleep(Duration::from_millis(1)).await;
        }
        let code = server.invite(&node(), None, HOUR, false, "test").await.unwrap().code;
        join(&server, &code.secret(), name().as_str(), &token(1)).await.unwrap();
        drop(server.linked(name().to_string()));
        drain.start();
    };
    tokio::join!(server.follow_uses(|_, _| (), drain.clone()), joins);
    let next = servers(place.path(), 1).remove(0);
    let listed = next.list().await.unwrap().remove(0);
    assert!(listed.joined_at.is_some() && listed.last_seen.is_some(), "{listed:?}");
}
