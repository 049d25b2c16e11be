//! Tokens that change while links are up.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tunnel::config::Environment;
use tunnel::config::cluster::ClusterSettings;
use tunnel::config::edge::csr::EdgeCsrConfig;
use tunnel::edge::Edge;
use tunnel::edge::config::EdgeConfig;
use tunnel_net::tls::link_auth::LinkCaFiles;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

use crate::certificates::Authority;
use crate::support::clients::{assert_echo, assert_reset, get};
use crate::support::programs::{TOKEN, TestDir, at, edge, start_edge};
use crate::support::{assert_eventually, pause_time, servers, targets, wait_until, wait_within};

#[tokio::test]
async fn a_revoked_token_ends_only_its_links_and_sessions_within_ten_seconds() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.file("token", &format!("node1:{TOKEN}\nnode2:{TOKEN}\n"));
    let servers = servers::start(&place, 2);
    let revoked = edge(&place, &servers[1], "node1").await;
    let _other = edge(&place, &servers[1], "node2").await;
    let mut cut = Vec::new();
    let mut kept = Vec::new();
    for server in &servers {
        cut.push(server.open(&at("node1", echo)).await);
        kept.push(server.open(&at("node2", echo)).await);
    }
    for client in cut.iter_mut().chain(&mut kept) {
        assert_echo(client, "before").await;
    }
    pause_time();
    place.file("token", &format!("node1:another\nnode2:{TOKEN}\n"));
    let started = Instant::now();
    wait_within(Duration::from_secs(10), "its node is not found", || servers[1].link("node1").is_none())
        .await;
    for client in &mut cut {
        assert_reset(client).await;
    }
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
    for server in &servers {
        assert_eq!(server.server.metrics.resets.counted("not_allowed"), 1);
    }
    assert_eq!(revoked.metrics.resets.counted("not_allowed"), 2, "the edge knows the reason");
    for client in &mut kept {
        assert_echo(client, "after").await;
    }
    let log = revoked.bound.log.unwrap();
    assert_eventually("the edge reports that it has no link", async {
        // Time passes only while nothing else is to be done.
        while !get(log, "/readyz").await.body.contains("link: ") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert!(
        servers[1].server.metrics.links_rejected.counted("token") <= 20,
        "the edge does not flood the server"
    );
}

#[tokio::test]
async fn a_token_file_that_is_missing_or_empty_or_holds_nothing_ends_no_link() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let _edge = edge(&place, &servers[0], "node1").await;
    let link = servers[0].link("node1").unwrap().link.id;
    pause_time();
    for text in ["", " \n", "# all removed\n", "default:\n", "garbage"] {
        place.file("token", text);
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    std::fs::remove_file(place.path().join("token")).unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(servers[0].link("node1").map(|linked| linked.link.id), Some(link));
    let _other = edge(&place, &servers[0], "node2").await;
    let _wrong = start_edge(&place.edge("node3", servers[0].server.bound.grpc, "").replace(TOKEN, "new"));
    let rejected = |reason| servers[0].server.metrics.links_rejected.counted(reason);
    wait_until("its token may be in the file", || rejected("unchecked") > 0).await;
    assert_eq!(rejected("token"), 0);
}

#[tokio::test]
async fn an_edge_dials_at_once_after_its_token_file_has_changed() {
    let place = TestDir::new();
    place.file("mine", "old\n");
    let edge = start_edge(&with_token_file(&place, targets::closed_port().await));
    tokio::time::pause();
    let tries = || edge.metrics.link_reconnects.get();
    wait_within(Duration::from_secs(600), "its pauses have grown to 15 s or more", || tries() >= 12).await;
    let (before, started) = (tries(), Instant::now());
    place.file("mine", "new\n");
    wait_within(Duration::from_secs(60), "it dials again", || tries() > before).await;
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_edge_with_two_tokens_uses_the_one_that_the_server_accepts() {
    let place = TestDir::new();
    place.file("token", "node1:old\n");
    place.file("mine", "\nnew\n old \n");
    let servers = servers::start(&place, 1);
    let _edge = start_edge(&with_token_file(&place, servers[0].server.bound.grpc));
    servers[0].wait_for_node("node1").await;
    let link = || servers[0].link("node1").map(|linked| linked.link.id);
    let first = link();
    pause_time();
    place.file("token", "node1:new\n");
    wait_within(Duration::from_secs(15), "it has another link", || link().is_some() && link() != first).await;
    wait_until("it was refused once for each change", || {
        servers[0].server.metrics.links_rejected.counted("token") == 2
    })
    .await;
}

/// Returns the config of node1's edge, with its token in the file `mine`.
fn with_token_file(place: &TestDir, server: SocketAddr) -> String {
    let token_file = format!("token_file = \"{}/mine\"", place.path().display());
    place.edge("node1", server, "").replace(&format!("token = \"{TOKEN}\""), &token_file)
}

#[tokio::test]
async fn a_changed_token_ends_no_session() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.file("token", "node1:old\n");
    place.file("mine", "old\n");
    let servers = servers::start(&place, 2);
    let edge = start_edge(&with_token_file(&place, servers[0].server.bound.grpc));
    servers[0].wait_for_node("node1").await;
    let link = || servers[0].link("node1").map(|linked| linked.link.id);
    let first = link();
    let mut clients = Vec::new();
    for server in &servers {
        clients.push(server.open(&at("node1", echo)).await);
    }
    for client in &mut clients {
        assert_echo(client, "before").await;
    }
    pause_time();
    // The edge's file changes first: until the server knows the token too, the older link stays.
    place.file("mine", "new\n");
    let refusals = || servers[0].server.metrics.links_rejected.counted("token");
    wait_within(Duration::from_secs(60), "the new token is refused", || refusals() > 0).await;
    assert_eq!(link(), first);
    place.file("token", "node1:new previous=old\n");
    wait_within(Duration::from_secs(90), "it has another link", || link().is_some() && link() != first).await;
    for client in &mut clients {
        assert_echo(client, "between").await;
    }
    let closed = || edge.metrics.links_closed.counted("closed_locally");
    wait_within(Duration::from_secs(30), "the edge closes its older link", || closed() == 1).await;
    place.file("token", "node1:new\n");
    let second = link();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(link(), second, "its token is still valid");
    for client in &mut clients {
        assert_echo(client, "after").await;
    }
    assert_eq!(edge.metrics.resets.counted("not_allowed"), 0);
}

#[tokio::test]
async fn a_link_with_the_previous_token_ends_when_that_token_is_removed() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.file("token", &format!("node1:new previous={TOKEN}\nnode2:{TOKEN}\n"));
    let servers = servers::start(&place, 1);
    let _edge = edge(&place, &servers[0], "node1").await;
    let _other = edge(&place, &servers[0], "node2").await;
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "before").await;
    pause_time();
    place.file("token", &format!("node1:new\nnode2:{TOKEN}\n"));
    wait_within(Duration::from_secs(10), "its link is closed", || servers[0].link("node1").is_none()).await;
    assert_reset(&mut client).await;
    assert!(servers[0].link("node2").is_some());
}

/// Starts an edge that presents a certificate of a CA that no server knows, in addition to its token.
fn start_with_certificate(place: &TestDir, server: SocketAddr) -> Edge {
    let file = place.path().join("agent.pem");
    Authority::new().0.client("tunnel-agent-client").unwrap().write_together(&file).unwrap();
    let (mut settings, _) =
        EdgeConfig::read(&place.edge("node1", server, ""), &Environment::default()).unwrap();
    // Without a kube-apiserver it is never renewed.
    let kubeconfig = Some(place.path().join("none"));
    let cluster = ClusterSettings { kubeconfig, namespace: None };
    let file = file.into();
    settings.csr = Some(EdgeCsrConfig { enabled: true, cluster, file, ..EdgeCsrConfig::default() });
    Edge::start(settings, None).unwrap()
}

#[tokio::test]
async fn an_edge_with_a_rejected_certificate_links_by_its_token() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let _edge = start_with_certificate(&place, servers[0].server.bound.grpc);
    servers[0].wait_for_node("node1").await;
}

#[tokio::test]
async fn a_rejected_certificate_is_sent_at_every_second_try_and_reported() {
    let place = TestDir::new();
    let identity =
        IdentityFiles { cert: place.path().join("cloud.crt"), key: place.path().join("cloud.key") };
    let clients = LinkCaFiles { peers: Some(place.files.ca.clone()), ..LinkCaFiles::default() };
    let clients = ClientAuth::Links(clients);
    let server =
        TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: vec![b"h2".to_vec()] };
    let acceptor = server.load().unwrap().load().acceptor();
    let (sender, mut attempts) = mpsc::channel(9);
    let cloud = targets::serve(move |socket| {
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        async move {
            let is_shown = acceptor.accept(socket).await.is_err();
            let _ = sender.send(is_shown).await;
        }
    })
    .await;
    let edge = start_with_certificate(&place, cloud);
    for is_shown in [true, false, true, false, true] {
        assert_eq!(assert_eventually("an attempt", attempts.recv()).await, Some(is_shown));
    }
    let log = edge.bound.log.unwrap();
    assert_eventually("the reason in /readyz", async {
        while !get(log, "/readyz").await.body.contains("edge_ca of their server.csr") {}
    })
    .await;
}
