//! Links between servers, and searches for nodes over them.

use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_rustls::TlsConnector;
use tunnel::registry::Registry;
use tunnel::registry::peers::Peers;
use tunnel::registry::peers::peer_dialer::TlsPeerDialer;
use tunnel_base::drain::{Drain, Drained};
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::dial_peer;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::pool::BufferPool;
use tunnel_net::tls::peer::PeerTlsConfig;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, server_name};
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::frame::{ErrorCode, Found, Frame, FrameKind, Remote, SessionError, SessionFrame};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, SessionId};

use crate::support::clients::{assert_echo, assert_reset};
use crate::support::peer::{
    accept_open, announce_node, next_find, open_frame, scripted_server, send_found, send_session_frame,
    sync_with_server,
};
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::remote::ScriptedServer;
use crate::support::servers::{self, Dns, DnsScript};
use crate::support::{
    Stopwatch, assert_eventually, pause_time, remote, spawn, targets, wait_until, wait_within,
};

/// Returns the number of links of a server, to edges and to peers.
fn links(server: &TestServer) -> i64 {
    server.server.metrics.links.all()
}

#[tokio::test]
async fn a_link_between_servers_is_made_once_and_kept() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[1], "node1").await;
    // Each server has dialled the other at its start.
    wait_until("the servers are linked", || (links(&servers[0]), links(&servers[1])) == (2, 3)).await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(servers[0].open(&at("node1", echo)).await);
    }
    pause_time();
    tokio::time::sleep(Duration::from_secs(180)).await;
    for client in &mut clients {
        assert_echo(client, "still there").await;
    }
    assert_eq!(
        (links(&servers[0]), links(&servers[1])),
        (2, 3),
        "no more links are made, and none is closed"
    );
}

#[tokio::test]
async fn a_server_never_links_to_itself() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    for _ in 0..3 {
        let answer = servers[0].request_connect("node1:22").await;
        assert!(!answer.body.contains("peer"), "{answer:?}");
    }
    let _edge = edge(&place, &servers[0], "node1").await;
    assert_eq!(links(&servers[0]), 1);
}

#[tokio::test]
async fn an_unresponsive_peer_delays_only_the_first_search_by_a_second() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let all = servers::addresses(2);
    let list = servers::peers(&[all[0], all[1], silent.local_addr().unwrap()]);
    let first = TestServer::from_text(&servers::config(&place, all[0], &list));
    let second = TestServer::from_text(&servers::config(&place, all[1], &servers::peers(&all)));
    let started = Stopwatch::start();
    let answer = first.request_connect("node9:22").await;
    assert!(answer.body.contains("not at 1 peer"), "{answer:?}");
    assert!(answer.body.contains("cannot be reached"), "{answer:?}");
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
    let started = Stopwatch::start();
    first.request_connect("node9:22").await;
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
    // The search ends as soon as the server that has the node answers.
    let _edge = edge(&place, &second, "node1").await;
    let mut client = first.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn a_server_in_dns_that_speaks_plain_is_named_in_the_error() {
    let place = TestDir::new();
    let mut other = ScriptedServer::start(&place).await;
    let dns = Dns::start(DnsScript::At([127, 0, 0, 1].into())).await;
    let at = servers::addresses(1)[0];
    // The list contains the other server, so that it is found at its own port.
    let lines = format!(
        "[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"\n{}",
        dns.at,
        servers::peers(&[other.at])
    );
    let server = TestServer::from_text(&servers::config(&place, at, &lines));
    let answering = spawn(async move {
        let mut call = other.call().await;
        call.answer(None);
        call.wait_for_end().await;
    });
    let answer = server.request_connect("node1:22").await;
    assert_eq!(answer.status, 502);
    assert!(answer.body.contains("is no server of this program"), "{answer:?}");
    assert_eventually("the end of the call", answering).await.unwrap();
}

#[tokio::test]
async fn an_edge_reaches_only_the_nodes_that_it_may_reach() {
    let place = TestDir::new();
    let all = servers::addresses(2);
    let list = format!("{}\n[server.edge_access]\nnodes = [\"node*\"]", servers::peers(&all));
    let text: Vec<_> = all.iter().map(|at| servers::config(&place, *at, &list)).collect();
    let (first, second) = (TestServer::from_text(&text[0]), TestServer::from_text(&text[1]));
    let mut one = remote::link(&place, &first, "node1", Some(Instance::from_bits(1))).await;
    let mut two = remote::link(&place, &second, "node2", Some(Instance::from_bits(2))).await;
    let id = SessionId::random();
    send_session_frame(&one, "node2", id, open_frame(1)).await;
    let open: StreamMsg = two.next_session_message().await;
    assert_eq!((open.r#type.as_str(), open.node.as_str()), ("connecting", "node2"));
    assert_eq!(open.category, "httpProxy", "an edge does not get the rights of another listener");
    two.send_session(
        id,
        SessionFrame::Opened {
            limit: 1000,
            epoch: 1,
            instance: Some(Instance::from_bits(2)),
            place: None,
            resume_timeout: None,
        },
    )
    .await;
    let (answered, frame) = one.next_session_frame().await;
    assert_eq!((answered, matches!(frame, SessionFrame::Opened { epoch: 1, .. })), (id, true));

    // Its own name means the cloud, which dials nothing here.
    for (node, code) in [
        ("other", ErrorCode::NodeNotAllowed),
        ("node3", ErrorCode::TargetUnreachable),
        ("node1", ErrorCode::NotAllowed),
    ] {
        let id = SessionId::random();
        send_session_frame(&one, node, id, open_frame(1)).await;
        let (answered, frame) = one.next_session_frame().await;
        let SessionFrame::Refused { refusal, .. } = frame else { panic!("{node}: {frame:?}") };
        assert_eq!((answered, refusal.code), (id, code), "{node}: {refusal}");
    }
}

#[tokio::test]
async fn edges_reach_no_node_unless_the_config_allows_it() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut one = remote::link(&place, &server, "node1", Some(Instance::from_bits(1))).await;
    let _two = remote::link(&place, &server, "node2", Some(Instance::from_bits(2))).await;
    send_session_frame(&one, "node2", SessionId::random(), open_frame(1)).await;
    let (_, frame) = one.next_session_frame().await;
    let SessionFrame::Refused { refusal, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::NodeNotAllowed);
}

#[tokio::test]
async fn an_open_that_gets_no_answer_on_one_path_is_repeated_on_another() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let instance = Some(Instance::from_bits(1));
    let mut near = remote::link(&place, &servers[0], "node1", instance).await;
    let mut far = remote::link(&place, &servers[1], "node1", instance).await;
    let (started, watch) = (Instant::now(), Stopwatch::start());
    let (open_sender, open_receiver) = tokio::sync::oneshot::channel();
    let silent = async {
        // Alive, but it does not answer the Open.
        let (id, frame) = near.next_session_frame().await;
        assert!(matches!(frame, SessionFrame::Open { epoch: 1, .. }), "{frame:?}");
        open_sender.send(id).unwrap();
        let (_, frame) = near.next_session_frame().await;
        assert!(matches!(frame, SessionFrame::PathLost { epoch: 1 }), "{frame:?}");
    };
    let answers = async {
        let (id, frame) = far.next_session_frame().await;
        assert!(matches!(frame, SessionFrame::Open { epoch: 2, .. }), "{frame:?}");
        assert_eq!(open_receiver.await, Ok(id));
        far.send_session(
            id,
            SessionFrame::Opened { limit: 1000, epoch: 2, instance, place: None, resume_timeout: None },
        )
        .await;
    };
    let (_client, (), ()) = tokio::join!(servers[0].open("node1:22"), silent, answers);
    let (took, worked) = (started.elapsed(), watch.elapsed());
    assert!(took >= Duration::from_secs(3) && worked < Duration::from_secs(5), "{took:?}, {worked:?}");
}

#[tokio::test]
async fn a_session_stays_on_its_only_path_during_a_slow_dial() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let instance = Some(Instance::from_bits(1));
    let mut far = remote::link(&place, &servers[1], "node1", instance).await;
    let answers = async {
        let (id, frame) = far.next_session_frame().await;
        assert!(matches!(frame, SessionFrame::Open { epoch: 1, .. }), "{frame:?}");
        let more = tokio::time::timeout(Duration::from_secs(5), far.next_session_frame()).await;
        assert!(more.is_err(), "{more:?}");
        far.send_session(
            id,
            SessionFrame::Opened { limit: 1000, epoch: 1, instance, place: None, resume_timeout: None },
        )
        .await;
    };
    let (_client, ()) = tokio::join!(servers[0].open("node1:22"), answers);
}

#[tokio::test]
async fn two_hundred_nodes_are_announced_over_one_link_to_each_server() {
    let place = TestDir::new();
    let servers = servers::start(&place, 3);
    let linking = (0..200).map(|n| {
        let (place, server) = (&place, &servers[1]);
        async move { remote::link(place, server, &format!("node{n}"), Some(Instance::from_bits(n))).await }
    });
    let mut edges = futures_util::future::join_all(linking).await;
    // Each server has dialled the others at its start.
    wait_until("all links are up", || [0, 1, 2].map(|n| links(&servers[n])) == [4, 204, 4]).await;
    for n in [0, 77, 199] {
        let answers = async {
            let edge = &mut edges[n];
            let (id, frame) = edge.next_session_frame().await;
            let SessionFrame::Open { epoch, .. } = frame else { panic!("{frame:?}") };
            let instance = Some(Instance::from_bits(n as u128));
            edge.send_session(
                id,
                SessionFrame::Opened { limit: 1000, epoch, instance, place: None, resume_timeout: None },
            )
            .await;
        };
        let target = format!("node{n}:22");
        let _clients = tokio::join!(servers[2].open(&target), answers);
    }
}

#[tokio::test]
async fn a_server_stops_without_waiting_for_its_peers() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut servers = servers::start(&place, 2);
    let _edge = edge(&place, &servers[0], "node1").await;
    drop(servers[1].open(&at("node1", echo)).await);
    let last = servers.pop().unwrap();
    assert!(links(&last) > 0);
    last.assert_idle().await;
    let started = Stopwatch::start();
    let drained = last.server.shutdown(std::future::pending()).await;
    assert_eq!(drained, Drained::Finished);
    // The server still accepts clients for two seconds.
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    let mut client = servers[0].open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn sessions_end_soon_after_their_node_has_restarted() {
    let place = TestDir::new();
    let servers = servers::start(&place, 2);
    let instance = Some(Instance::from_bits(1));
    let mut old = remote::link(&place, &servers[1], "node1", instance).await;
    let accept = async {
        let (id, _) = old.next_session_frame().await;
        old.send_session(
            id,
            SessionFrame::Opened { limit: 1000, epoch: 1, instance, place: None, resume_timeout: None },
        )
        .await;
    };
    let (mut client, ()) = tokio::join!(servers[0].open("node1:22"), accept);
    drop(old);
    wait_until("the old link is closed", || servers[1].link("node1").is_none()).await;
    let _new = remote::link(&place, &servers[1], "node1", Some(Instance::from_bits(9))).await;
    let started = Stopwatch::start();
    assert_reset(&mut client).await;
    assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
}

#[tokio::test]
async fn of_several_stale_servers_the_one_with_the_freshest_link_is_chosen() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let (mut stale, mut fresher) =
        (scripted_server(&place, &servers[0], 7).await, scripted_server(&place, &servers[0], 8).await);
    let started = Stopwatch::start();
    let answers = async {
        let (one, two) = tokio::join!(next_find(&mut stale), next_find(&mut fresher));
        send_found(&stale, one, true, Duration::from_secs(14)).await;
        send_found(&fresher, two, true, Duration::from_secs(8)).await;
        accept_open(&mut fresher).await;
    };
    let (_client, ()) = tokio::join!(servers[0].open("node1:22"), answers);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_server_with_a_fresh_link_is_used_before_slow_peers_answer() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let (mut slow, mut fresh) =
        (scripted_server(&place, &servers[0], 7).await, scripted_server(&place, &servers[0], 8).await);
    let started = Stopwatch::start();
    let answers = async {
        let (_, question) = tokio::join!(next_find(&mut slow), next_find(&mut fresh));
        send_found(&fresh, question, true, Duration::from_secs(4)).await;
        accept_open(&mut fresh).await;
    };
    let (_client, ()) = tokio::join!(servers[0].open("node1:22"), answers);
    assert!(started.elapsed() < Duration::from_millis(300), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_server_with_a_stale_node_is_not_tried_again_before_another() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let (mut wrong, mut right) =
        (scripted_server(&place, &servers[0], 7).await, scripted_server(&place, &servers[0], 8).await);
    announce_node(&mut wrong, 1).await;
    let answers = async {
        let (id, frame) = wrong.next_session_frame().await;
        let SessionFrame::Open { epoch, .. } = frame else { panic!("{frame:?}") };
        let refusal = SessionError::new(ErrorCode::NodeNotConnected, "the node has disconnected");
        wrong.send_session(id, SessionFrame::Refused { epoch, refusal }).await;
        let (one, two) = tokio::join!(next_find(&mut wrong), next_find(&mut right));
        send_found(&wrong, one, false, Duration::ZERO).await;
        send_found(&right, two, true, Duration::ZERO).await;
        accept_open(&mut right).await;
    };
    let started = Stopwatch::start();
    let (_client, ()) = tokio::join!(servers[0].open("node1:22"), answers);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_session_is_not_resumed_with_another_process_of_its_node() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let (mut impostor, mut right) =
        (scripted_server(&place, &servers[0], 7).await, scripted_server(&place, &servers[0], 8).await);
    announce_node(&mut right, 1).await;
    let (mut client, ()) = tokio::join!(servers[0].open("node1:22"), accept_open(&mut right));
    // The impostor has the same node name, and announces it as well.
    let found = Found { here: true, instance: Some(Instance::from_bits(99)), ..Found::not_here(0) };
    let node = impostor.node.clone();
    impostor.send(to_message(Frame { node, body: FrameKind::Found(found) })).await;
    // The path is lost. Only the server with the right process is asked to resume.
    drop(right);
    let mut right = scripted_server(&place, &servers[0], 9).await;
    send_found(&right, 0, true, Duration::ZERO).await;
    let (id, frame) = right.next_session_frame().await;
    let SessionFrame::Resume { epoch, instance, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(instance, Some(Instance::from_bits(1)));
    right.send_session(id, SessionFrame::Resumed { received: 0, limit: 1000, epoch }).await;
    right.send_session(id, SessionFrame::Data("hello".into())).await;
    let mut back = [0; 5];
    assert_eventually("bytes", client.read_exact(&mut back)).await.unwrap();
    let resumed = tokio::time::timeout(Duration::from_millis(50), impostor.next_session_frame()).await;
    assert!(resumed.is_err(), "{resumed:?}");
}

#[tokio::test]
async fn a_server_that_claims_and_refuses_a_node_does_not_hide_the_right_one() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let (mut wrong, mut right) =
        (scripted_server(&place, &servers[0], 7).await, scripted_server(&place, &servers[0], 8).await);
    let answers = async {
        let lies = async {
            loop {
                let message = wrong.next().await.expect("the stream continues");
                match from_message(message, &Remote::Peer).unwrap().body {
                    FrameKind::Find(question) => send_found(&wrong, question, true, Duration::ZERO).await,
                    FrameKind::Session(id, _, SessionFrame::Open { epoch, .. }) => {
                        let refusal = SessionError::new(ErrorCode::NodeNotConnected, "not here");
                        wrong.send_session(id, SessionFrame::Refused { epoch, refusal }).await;
                    }
                    _ => {}
                }
            }
        };
        let slower = async {
            loop {
                let message = right.next().await.expect("the stream continues");
                match from_message(message, &Remote::Peer).unwrap().body {
                    FrameKind::Find(question) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        send_found(&right, question, true, Duration::ZERO).await;
                    }
                    FrameKind::Session(id, _, SessionFrame::Open { epoch, .. }) => {
                        let instance = Some(Instance::from_bits(1));
                        return right
                            .send_session(
                                id,
                                SessionFrame::Opened {
                                    limit: 1000,
                                    epoch,
                                    instance,
                                    place: None,
                                    resume_timeout: None,
                                },
                            )
                            .await;
                    }
                    _ => {}
                }
            }
        };
        tokio::select! { () = lies => {}, () = slower => {} }
    };
    let started = Stopwatch::start();
    let (_client, ()) = tokio::join!(servers[0].open("node1:22"), answers);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[tokio::test]
async fn endless_announcements_of_a_server_do_not_create_endless_tasks() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    // The edge does not answer pings, so each announcement would wait for a second.
    let _silent = remote::link(&place, &servers[0], "node1", Some(Instance::from_bits(1))).await;
    let mut loud = scripted_server(&place, &servers[0], 7).await;
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    for _ in 0..15_000 {
        send_found(&loud, 0, true, Duration::ZERO).await;
    }
    sync_with_server(&mut loud).await;
    let more = tokio::runtime::Handle::current().metrics().num_alive_tasks().saturating_sub(before);
    assert!(more < 11_000, "{more} tasks");
    drop(loud);
}

#[tokio::test]
async fn a_server_that_links_endlessly_keeps_few_links() {
    let place = TestDir::new();
    let servers = servers::start(&place, 1);
    let mut all = Vec::new();
    for _ in 0..30 {
        let mut call = scripted_server(&place, &servers[0], 7).await;
        // It answers pings, so none of its links is taken for dead.
        all.push(spawn(async move { call.wait_for_end().await }));
    }
    let ended = || all.iter().filter(|call| call.is_finished()).count();
    wait_within(Duration::from_secs(5), "the oldest are closed", || ended() >= 26).await;
    assert_eq!((ended(), links(&servers[0])), (26, 4));
}

/// Returns the context of links of a process without sessions.
fn link_context() -> LinkContext {
    let metrics = Metrics::server("", "");
    let windows = WindowLimits { start: 1000, max: 1000 };
    let limits = SessionLimits {
        windows,
        memory: 100_000,
        sessions: 10,
        resume_timeout: Duration::from_secs(60),
        max_resume_timeout: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::random(), limits, metrics.clone());
    LinkContext::new(table, metrics, Drain::new())
}

#[tokio::test]
async fn a_certificate_that_a_peer_rejects_is_not_reported_as_a_broken_connection() {
    // Two CAs of the same name.
    let (place, other) = (TestDir::new(), TestDir::new());
    let server = servers::start(&place, 1).remove(0);
    let identity = Some(IdentityFiles { cert: other.files.cert.clone(), key: other.files.key.clone() });
    let trust = Trust::Ca(place.files.ca.clone());
    let tls = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().unwrap();
    let name = server_name("127.0.0.1").unwrap();
    // In the pause the server closes the connection, so that the caller's first write can fail.
    for pause in [0, 0, 100, 100, 100].map(Duration::from_millis) {
        let socket = TcpStream::connect(server.server.bound.grpc).await.unwrap();
        let io = TlsConnector::from(tls.load()).connect(name.clone(), socket).await.unwrap();
        sleep(pause).await;
        let error = dial_peer(Box::new(io), "a.b", false, &link_context()).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("it rejects the certificate, or requires one (TLS alert DecryptError)"),
            "{text}"
        );
        assert_eq!(error.reason(), "tls");
    }
}

#[tokio::test]
async fn only_a_server_of_the_cloud_passes_the_probe_of_its_address_and_instance() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let (at, port) = (server.server.bound.grpc.ip(), server.server.bound.grpc.port());
    let link_context = link_context();
    let metrics = link_context.metrics.clone();
    let identity = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let tls = PeerTlsConfig { identity, ca: place.files.ca.clone(), name: None }.load().unwrap();
    // A proxy that accepts every connection and looks like a server.
    let proxy = TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 0, 250), port)).await.unwrap();
    let (_addresses, list) = watch::channel(vec![server.server.bound.grpc, proxy.local_addr().unwrap()]);
    let (own, drain) = (link_context.table.instance(), link_context.drain.clone());
    let (dialer, mut made) = TlsPeerDialer::new(tls, BufferPool::new(), link_context);
    let peers = Peers::new(list, Registry::new(metrics), dialer, own, drain);
    spawn(async move {
        while let Some(mut link) = made.recv().await {
            spawn(async move { while link.next().await.is_ok() {} });
        }
    });
    assert!(peers.answers(at, port).await);
    assert!(!peers.answers([127, 0, 0, 250].into(), port).await);
    let link = peers.process(server.server.table.instance()).await.unwrap();
    assert_eq!(link.instance, Some(server.server.table.instance()));
    let trouble = peers.process(Instance::random()).await.unwrap_err();
    assert!(trouble.len() == 1 && trouble[0].to_string().contains("127.0.0.250"), "{trouble:?}");
}

#[tokio::test]
async fn an_edge_that_searches_endlessly_does_not_block_other_searches() {
    let place = TestDir::new();
    let dns = Dns::start(DnsScript::Nothing).await;
    let lines = format!(
        "[server.dns]\nresolvers = [\"{}\"]\nzone = \"nodes.test\"\n[server.edge_access]\nnodes = [\"*\"]",
        dns.at
    );
    let server = TestServer::from_text(&servers::config(&place, servers::addresses(1)[0], &lines));
    let mut bad = remote::link(&place, &server, "bad", Some(Instance::from_bits(1))).await;
    let mut good = remote::link(&place, &server, "node1", Some(Instance::from_bits(2))).await;
    let mut other = remote::link(&place, &server, "node2", Some(Instance::from_bits(3))).await;
    for n in 0..1500 {
        send_session_frame(&bad, &format!("away{n}"), SessionId::random(), open_frame(1)).await;
    }
    let (_, frame) = bad.next_session_frame().await;
    let SessionFrame::Refused { refusal, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::Overloaded);
    // A node that is found at once needs no search, and another edge's search is not delayed by these.
    for edge in [&bad, &good] {
        send_session_frame(edge, "node2", SessionId::random(), open_frame(1)).await;
        let (_, frame) = assert_eventually("the Open at the other edge", other.next_session_frame()).await;
        assert!(matches!(frame, SessionFrame::Open { .. }), "{frame:?}");
    }
    send_session_frame(&good, "away", SessionId::random(), open_frame(1)).await;
    let (_, frame) = good.next_session_frame().await;
    let SessionFrame::Refused { refusal, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(refusal.code, ErrorCode::TargetUnreachable);
}

#[tokio::test]
async fn a_disconnected_server_is_not_reported_as_unresponsive() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let mut disconnected = scripted_server(&place, &server, 7).await;
    send_found(&disconnected, 0, true, Duration::ZERO).await;
    sync_with_server(&mut disconnected).await;
    drop(disconnected);
    wait_until("its link has ended", || links(&server) == 0).await;
    let answer = server.request_connect("node1:22").await;
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(!answer.body.contains("does not answer"), "{answer:?}");
}
