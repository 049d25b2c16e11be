//! Access rules follow the config while the programs run, and no session is aborted.

use std::path::Path;

use tokio::time::{Instant, sleep};
use tunnel::config::Environment;
use tunnel::config::live::ConfigFile;
use tunnel::edge::Edge;
use tunnel::edge::config::EdgeConfig;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_net::reload::reload_now;

use crate::support::TIMEOUT;
use crate::support::clients::{echoed, get};
use crate::support::programs::{TestDir, TestServer, at};
use crate::support::targets;

fn file(path: &Path, text: &str) -> ConfigFile {
    ConfigFile { path: path.into(), text: text.to_owned(), environment: Environment::default() }
}

/// Writes this to the file, and waits until new requests get that response.
async fn comes_to(path: &Path, text: &str, server: &TestServer, target: &str, phrase: &str) {
    std::fs::write(path, text).unwrap();
    let started = Instant::now();
    loop {
        reload_now();
        let said = server.ask(target).await.phrase;
        if said.contains(phrase) {
            return;
        }
        assert!(started.elapsed() < TIMEOUT, "expected {phrase:?}, got {said:?}");
        sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn access_rules_follow_the_config_and_no_session_is_aborted() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let nothing = targets::nothing().await;
    let text = place.cloud("");
    let cloud = place.file("cloud.toml", &text);
    let server = Server::start(ServerConfig::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    server.watch_config(file(&cloud, &text));
    let server = TestServer::from(server);
    let edge_text = place.edge("node1", server.server.bound.grpc, "");
    let edge_file = place.file("edge.toml", &edge_text);
    let edge = Edge::start(EdgeConfig::read(&edge_text, &Environment::default()).unwrap().0, None).unwrap();
    edge.watch_config(file(&edge_file, &edge_text));
    server.has("node1").await;
    let mut stays = server.open(&at("node1", echo)).await;
    let gone = at("node1", nothing);

    let ruled = place.cloud(&format!("rules = [{{ ports = [{}] }}]", echo.port()));
    comes_to(&cloud, &ruled, &server, &gone, "no rule lets you reach").await;
    // A config with an error is ignored.
    std::fs::write(&cloud, place.cloud("allow_from = [\"nobody\"]")).unwrap();
    reload_now();
    let elsewhere = place.cloud("allow_from = [\"10.0.0.0/8\"]");
    comes_to(&cloud, &elsewhere, &server, &gone, "your address 127.0.0.1 is not allowed here").await;
    comes_to(&cloud, &text, &server, &gone, "refused the connection").await;

    let more = format!("[edge.allow]\ntargets = [\"127.0.0.0/8:{}\"]", echo.port());
    let allow = place.edge("node1", server.server.bound.grpc, &more);
    comes_to(&edge_file, &allow, &server, &gone, "this edge may not dial").await;
    echoed(&mut stays, "still here").await;
    echoed(&mut server.open(&at("node1", echo)).await, "and so are others").await;
}

#[tokio::test]
async fn an_edit_with_an_error_is_a_condition_until_it_is_fixed() {
    let place = TestDir::new();
    let text = place.cloud("");
    let cloud = place.file("cloud.toml", &text);
    let server = Server::start(ServerConfig::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    server.watch_config(file(&cloud, &text));
    let edge_text = place.edge("node1", server.bound.grpc, "");
    let edge_file = place.file("edge.toml", &edge_text);
    let edge = Edge::start(EdgeConfig::read(&edge_text, &Environment::default()).unwrap().0, None).unwrap();
    edge.watch_config(file(&edge_file, &edge_text));
    let comes_to = async |path: &Path, text: &str, at, expected: &str| {
        std::fs::write(path, text).unwrap();
        let started = Instant::now();
        loop {
            reload_now();
            let page = get(at, "/readyz").await;
            if page.status == 200 && page.body.contains(expected) && (expected != "ok" || page.body == "ok\n")
            {
                return;
            }
            assert!(started.elapsed() < TIMEOUT, "expected {expected:?}, got {page:?}");
            sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    for (path, good, at) in
        [(&cloud, &text, server.bound.log), (&edge_file, &edge_text, edge.bound.log.unwrap())]
    {
        comes_to(path, &format!("{good}\n[unknown]\n"), at, "config: ").await;
        comes_to(path, "", at, "is empty").await;
        comes_to(path, good, at, "ok").await;
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
    let open = with("");
    let cloud = place.file("cloud.toml", &open);
    let server = Server::start(ServerConfig::read(&open, &Environment::default()).unwrap().0, None).unwrap();
    server.watch_config(file(&cloud, &open));
    let server = TestServer::from(server);
    let asks = async |front: &str| {
        let request = format!("CONNECT node1:{} HTTP/1.1\r\n\r\n", echo.port());
        crate::support::clients::ask(server.port(front), &request).await.phrase
    };
    assert_eq!(asks("http_proxy").await, "node node1 is not connected");
    std::fs::write(&cloud, with("allow_from = [\"10.0.0.0/8\"]")).unwrap();
    let started = Instant::now();
    while asks("http_proxy").await != "your address 127.0.0.1 is not allowed here" {
        reload_now();
        assert!(started.elapsed() < TIMEOUT, "the proxy's access policy was not reloaded");
        sleep(std::time::Duration::from_millis(50)).await;
    }
    // The ports of one config change together.
    let mut closed = server.client("tcp").await;
    assert_eq!(crate::support::clients::rest(&mut closed).await, b"");
    assert_eq!(
        server.ask(&at("node1", echo)).await.phrase,
        "node node1 is not connected",
        "its table has no access rules"
    );
}
