//! Who may reach what follows the config while the programs run, and nobody who is there is cut.

use std::path::Path;

use tokio::time::{Instant, sleep};
use tunnel::config::Environment;
use tunnel::config::edge::EdgeConfig;
use tunnel::config::live::ConfigFile;
use tunnel::config::server::Cloud;
use tunnel::edge::Edge;
use tunnel::net::reload::look_now;
use tunnel::server::Pod;

use crate::support::PATIENCE;
use crate::support::clients::echoed;
use crate::support::programs::{TestDir, TestServer, at};
use crate::support::targets;

fn file(path: &Path, text: &str) -> ConfigFile {
    ConfigFile { path: path.into(), text: text.to_owned(), environment: Environment::default() }
}

/// Has the file say this, and waits until who comes is answered so.
async fn comes_to(path: &Path, text: &str, pod: &TestServer, target: &str, phrase: &str) {
    std::fs::write(path, text).unwrap();
    let begun = Instant::now();
    loop {
        look_now();
        let said = pod.ask(target).await.phrase;
        if said.contains(phrase) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "want {phrase:?}, is {said:?}");
        sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn who_may_reach_what_follows_the_config_and_nobody_is_cut() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let nothing = targets::nothing().await;
    let text = place.cloud("");
    let cloud = place.file("cloud.toml", &text);
    let pod = Pod::start(Cloud::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    pod.follow(file(&cloud, &text));
    let pod = TestServer::from(pod);
    let edge_text = place.edge("node1", pod.pod.bound.grpc, "");
    let edge_file = place.file("edge.toml", &edge_text);
    let edge = Edge::start(EdgeConfig::read(&edge_text, &Environment::default()).unwrap().0, None).unwrap();
    edge.follow(file(&edge_file, &edge_text));
    pod.has("node1").await;
    let mut stays = pod.open(&at("node1", echo)).await;
    let gone = at("node1", nothing);

    let ruled = place.cloud(&format!("rules = [{{ ports = [{}] }}]", echo.port()));
    comes_to(&cloud, &ruled, &pod, &gone, "no rule lets you reach").await;
    // With a fault in it, it counts for nothing.
    std::fs::write(&cloud, place.cloud("allow_from = [\"nobody\"]")).unwrap();
    look_now();
    let elsewhere = place.cloud("allow_from = [\"10.0.0.0/8\"]");
    comes_to(&cloud, &elsewhere, &pod, &gone, "your address 127.0.0.1 is not allowed here").await;
    comes_to(&cloud, &text, &pod, &gone, "refused the connection").await;

    let more = format!("[mode.edge.allow]\ntargets = [\"127.0.0.0/8:{}\"]", echo.port());
    let allow = place.edge("node1", pod.pod.bound.grpc, &more);
    comes_to(&edge_file, &allow, &pod, &gone, "this edge may not dial").await;
    echoed(&mut stays, "still here").await;
    echoed(&mut pod.open(&at("node1", echo)).await, "and so are others").await;
}

#[tokio::test]
async fn the_doors_of_all_modules_and_what_edges_may_reach_follow_it_too() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let with = |door: &str| {
        let proxy = format!("[mode.cloud.http_proxy]\nlisten = \"127.0.0.1:0\"\n{door}\n");
        place.cloud(&format!("{proxy}[mode.cloud.tcp.\"127.0.0.1:0\"]\nto = \"node1/127.0.0.1:1\"\n{door}\n"))
    };
    let open = with("");
    let cloud = place.file("cloud.toml", &open);
    let pod = Pod::start(Cloud::read(&open, &Environment::default()).unwrap().0, None).unwrap();
    pod.follow(file(&cloud, &open));
    let pod = TestServer::from(pod);
    let asks = async |front: &str| {
        let request = format!("CONNECT node1:{} HTTP/1.1\r\n\r\n", echo.port());
        crate::support::clients::ask(pod.port(front), &request).await.phrase
    };
    assert_eq!(asks("http_proxy").await, "node node1 is not connected");
    std::fs::write(&cloud, with("allow_from = [\"10.0.0.0/8\"]")).unwrap();
    let begun = Instant::now();
    while asks("http_proxy").await != "your address 127.0.0.1 is not allowed here" {
        look_now();
        assert!(begun.elapsed() < PATIENCE, "the proxy's door has not followed");
        sleep(std::time::Duration::from_millis(50)).await;
    }
    // The ports of one config change together.
    let mut closed = pod.client("tcp").await;
    assert_eq!(crate::support::clients::rest(&mut closed).await, b"");
    assert_eq!(
        pod.ask(&at("node1", echo)).await.phrase,
        "node node1 is not connected",
        "its table says nothing"
    );
}
