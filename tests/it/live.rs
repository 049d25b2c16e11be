//! Access rules follow the config while the programs run.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tunnel_net::pki::CertificateAuthority;
use tunnel_net::reload::reload_now;

use crate::support::TIMEOUT;
use crate::support::clients::{assert_echo, assert_reset, get};
use crate::support::programs::{TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::{live, targets};

/// Writes this to the file, and waits until new requests get that response.
async fn wait_for_phrase(path: &Path, text: &str, server: &TestServer, target: &str, phrase: &str) {
    std::fs::write(path, text).unwrap();
    let started = Instant::now();
    loop {
        reload_now();
        let phrase_now = server.request_connect(target).await.phrase;
        if phrase_now.contains(phrase) {
            return;
        }
        assert!(started.elapsed() < TIMEOUT, "expected {phrase:?}, got {phrase_now:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn access_rules_follow_the_config_and_end_no_allowed_session() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let nothing = targets::closed_port().await;
    let text = place.cloud("");
    let (server, cloud) = live::server(&place, &text);
    let edge_text = place.edge("node1", server.server.bound.grpc, "");
    let (_edge, edge_file) = live::edge(&place, &edge_text);
    server.wait_for_node("node1").await;
    let mut stays = server.open(&at("node1", echo)).await;
    let refusing = at("node1", nothing);

    let ruled = place.cloud(&format!("rules = [{{ ports = [{}] }}]", echo.port()));
    wait_for_phrase(&cloud, &ruled, &server, &refusing, "no rule lets you reach").await;
    // A config with an error is ignored.
    std::fs::write(&cloud, place.cloud("allow_from = [\"nobody\"]")).unwrap();
    reload_now();
    assert_echo(&mut stays, "still here").await;
    let elsewhere = place.cloud("allow_from = [\"10.0.0.0/8\"]");
    wait_for_phrase(&cloud, &elsewhere, &server, &refusing, "your address 127.0.0.1 is not allowed here")
        .await;
    assert_reset(&mut stays).await;
    wait_for_phrase(&cloud, &text, &server, &refusing, "refused the connection").await;
    let mut stays = server.open(&at("node1", echo)).await;

    let more = format!("[edge.allow]\ntargets = [\"127.0.0.0/8:{}\"]", echo.port());
    let allow = place.edge("node1", server.server.bound.grpc, &more);
    wait_for_phrase(&edge_file, &allow, &server, &refusing, "this edge may not dial").await;
    assert_echo(&mut stays, "still here").await;
    assert_echo(&mut server.open(&at("node1", echo)).await, "and so are others").await;
}

#[tokio::test]
async fn an_edit_with_an_error_is_a_condition_until_it_is_fixed() {
    let place = TestDir::new();
    let text = place.cloud("");
    let (server, cloud) = live::server(&place, &text);
    let edge_text = place.edge("node1", server.server.bound.grpc, "");
    let (edge, edge_file) = live::edge(&place, &edge_text);
    for (path, good, at) in
        [(&cloud, &text, server.server.bound.log), (&edge_file, &edge_text, edge.bound.log.unwrap())]
    {
        std::fs::write(path, format!("{good}\n[unknown]\n")).unwrap();
        wait_for_report(at, &format!("files: {}: line ", path.display())).await;
        std::fs::write(path, "").unwrap();
        wait_for_report(at, "is empty").await;
        std::fs::write(path, good).unwrap();
        wait_for_report(at, "ok\n").await;
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_reloaded_is_a_condition_until_it_is_fixed() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let log = server.server.bound.log;
    let _edge = edge(&place, &server, "node1").await;
    let other = CertificateAuthority::new("other", Duration::from_secs(3600)).unwrap();
    let (key, token) = (place.path().join("cloud.key"), place.path().join("token"));
    let (good_key, good_token) =
        (std::fs::read_to_string(&key).unwrap(), std::fs::read_to_string(&token).unwrap());

    wait_for_report(log, "ok\n").await;
    std::fs::write(&key, other.key()).unwrap();
    let page = wait_for_report(log, "cloud.key").await;
    assert_eq!(page.matches("cloud.key").count(), 1, "two values use the key, and have one error: {page}");
    std::fs::write(&token, "# all removed\n").unwrap();
    let page = wait_for_report(log, "has no token").await;
    assert!(page.contains("cloud.key") && page.contains(&token.display().to_string()), "{page}");
    assert!(server.link("node1").is_some());
    std::fs::write(&key, good_key).unwrap();
    std::fs::write(&token, good_token).unwrap();
    wait_for_report(log, "ok\n").await;
}

#[tokio::test]
async fn the_expiry_of_a_new_certificate_is_reported_as_soon_as_it_is_in_use() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let log = server.server.bound.log;
    wait_for_report(log, "ok\n").await;
    let short = place
        .read_authority()
        .signing_for(Duration::from_secs(10 * 24 * 3600 + 60))
        .server(&["127.0.0.1"])
        .unwrap();
    short.write(&place.path().join("cloud.crt"), &place.path().join("cloud.key")).unwrap();
    wait_for_report(log, "certificates: server.links.cert").await;
}

#[tokio::test]
async fn a_changed_token_that_no_server_accepts_is_a_condition_until_one_does() {
    let place = TestDir::new();
    let token = place.file("mine", TOKEN);
    let server = TestServer::start(&place);
    let by_file = format!("token_file = \"{}\"", token.display());
    let text = place.edge("node1", server.server.bound.grpc, "");
    let edge = start_edge(&text.replace(&format!("token = \"{TOKEN}\""), &by_file));
    server.wait_for_node("node1").await;
    std::fs::write(&token, "wrong").unwrap();
    let log = edge.bound.log.unwrap();
    let page = wait_for_report(log, "token: ").await;
    assert!(page.contains("invalid token"), "{page}");
    assert!(server.link("node1").is_some(), "the earlier link stays");
    std::fs::write(&token, TOKEN).unwrap();
    wait_for_report(log, "ok\n").await;
}

/// Waits until a program that stays ready reports this, and returns the report.
async fn wait_for_report(at: SocketAddr, expected: &str) -> String {
    let started = Instant::now();
    loop {
        reload_now();
        let page = get(at, "/readyz").await;
        if page.status == 200 && page.body.contains(expected) && (expected != "ok\n" || page.body == "ok\n") {
            return page.body;
        }
        assert!(started.elapsed() < TIMEOUT, "expected {expected:?}, got {page:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn the_access_policies_of_all_listeners_follow_the_config() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let with = |limiter: &str| {
        let proxy = format!("[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n{limiter}\n");
        place.cloud(&format!(
            "{proxy}[server.tcp.\"127.0.0.1:0\"]\ntarget = \"node1/127.0.0.1:1\"\n{limiter}\n"
        ))
    };
    let (server, cloud) = live::server(&place, &with(""));
    let request_phrase = async |front: &str| {
        let request = format!("CONNECT node1:{} HTTP/1.1\r\n\r\n", echo.port());
        crate::support::clients::send_request(server.port(front), &request).await.phrase
    };
    assert_eq!(request_phrase("http_proxy").await, "node node1 is not connected");
    std::fs::write(&cloud, with("allow_from = [\"10.0.0.0/8\"]")).unwrap();
    let started = Instant::now();
    while request_phrase("http_proxy").await != "your address 127.0.0.1 is not allowed here" {
        reload_now();
        assert!(started.elapsed() < TIMEOUT, "the proxy's access policy was not reloaded");
        sleep(std::time::Duration::from_millis(50)).await;
    }
    // The ports of one config change together.
    let mut closed = server.client("tcp").await;
    assert_eq!(crate::support::clients::rest(&mut closed).await, b"");
    assert_eq!(
        server.request_connect(&at("node1", echo)).await.phrase,
        "node node1 is not connected",
        "its table has no access rules"
    );
}
