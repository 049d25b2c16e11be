//! A session belongs to its opener: no other party that knows its ID can take it over, at any server.

use std::net::SocketAddr;

use tokio::io::AsyncReadExt;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, Opener, SessionCategory, SessionFrame};
use tunnel_proto::names::{Instance, NodeName, SessionId};

use crate::support::call::Call;
use crate::support::programs::{TestDir, TestServer, edge, start_edge};
use crate::support::remote::{self, ScriptedServer};
use crate::support::{assert_eventually, servers, targets};

/// Starts `count` servers, through which edges reach one another and targets on loopback.
fn start(place: &TestDir, count: u8) -> Vec<TestServer> {
    let all = servers::addresses(count);
    let allow = "[server.edge_access]\nnodes = [\"*\"]\ntargets = [\"127.0.0.0/8:*\"]\n";
    let text = |at: &SocketAddr| servers::config(place, *at, &format!("{}\n{allow}", servers::peers(&all)));
    all.iter().map(|at| TestServer::from_text(&text(at))).collect()
}

async fn link(place: &TestDir, server: &TestServer, node: &str, instance: u128) -> Call {
    remote::link(place, server, node, Some(Instance::from_bits(instance))).await
}

/// Sends a frame about a session with another node.
async fn send_session_frame(call: &Call, node: &str, id: SessionId, frame: SessionFrame) {
    let node: NodeName = node.parse().unwrap();
    call.send(to_message(Frame { node, body: FrameKind::Session(id, SessionCategory::Ssh, frame) })).await;
}

fn open(target: SocketAddr, opener: Option<Opener>) -> SessionFrame {
    SessionFrame::Open {
        target: target.into(),
        limit: 1000,
        epoch: 1,
        client: String::new(),
        opener,
        resume_timeout: None,
        boot: None,
    }
}

fn resume(
    target: SocketAddr,
    epoch: u64,
    instance: Option<Instance>,
    opener: Option<Opener>,
) -> SessionFrame {
    let target = target.into();
    SessionFrame::Resume { received: 0, limit: 1000, epoch, instance, opener, target, place: None }
}

fn server(number: u128) -> Option<Opener> {
    Some(Opener::Server(Instance::from_bits(number)))
}

/// Waits for the answer to an Open, and returns the process that has accepted it.
async fn opened(call: &mut Call, id: SessionId) -> Option<Instance> {
    let (answered, frame) = call.next_session_frame().await;
    let SessionFrame::Opened { instance, .. } = frame else { panic!("{frame:?}") };
    assert_eq!(answered, id);
    instance
}

/// Checks that the Open or Resume is answered like one for an unknown session.
async fn assert_unknown_session(call: &mut Call, attempt: u64) {
    let (_, frame) = call.next_session_frame().await;
    let (SessionFrame::Reset { epoch, refusal } | SessionFrame::Refused { epoch, refusal }) = frame else {
        panic!("{frame:?}")
    };
    assert_eq!((epoch, refusal.code), (attempt, ErrorCode::UnknownSession), "{refusal}");
}

/// Checks that the Resume is accepted.
async fn assert_resumed(call: &mut Call, attempt: u64) {
    let (_, frame) = call.next_session_frame().await;
    assert!(matches!(frame, SessionFrame::Resumed { epoch, .. } if epoch == attempt), "{frame:?}");
}

/// Checks that the opener's bytes come back from the target.
async fn assert_session_echo(call: &mut Call, id: SessionId, text: &'static str) {
    call.send_session(id, SessionFrame::Data(text.into())).await;
    assert_eq!(call.next_session_frame().await, (id, SessionFrame::Data(text.into())));
}

#[tokio::test]
async fn a_session_of_two_edges_cannot_be_taken_over_by_a_third() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = start(&place, 3);
    let _acceptor = edge(&place, &servers[1], "acceptor").await;
    let mut opener = link(&place, &servers[0], "opener", 1).await;
    let id = SessionId::random();
    send_session_frame(&opener, "acceptor", id, open(echo, None)).await;
    let acceptor = opened(&mut opener, id).await;
    assert_session_echo(&mut opener, id, "before").await;
    for (n, server) in servers.iter().enumerate() {
        let mut stranger = link(&place, server, &format!("stranger{n}"), 9).await;
        let forged = Some(Opener::Node("opener".parse().unwrap()));
        send_session_frame(&stranger, "acceptor", id, resume(echo, 50, acceptor, forged)).await;
        assert_unknown_session(&mut stranger, 50).await;
        assert_session_echo(&mut opener, id, "undisturbed").await;
    }
    // The opener itself moves, with its session.
    for (server, epoch) in [(&servers[2], 2), (&servers[1], 3)] {
        opener = link(&place, server, "opener", 1).await;
        let received = u64::try_from("before".len() + 3 * "undisturbed".len()).unwrap();
        let resume = SessionFrame::Resume {
            received,
            limit: 1000,
            epoch,
            instance: acceptor,
            opener: None,
            target: echo.into(),
            place: None,
        };
        send_session_frame(&opener, "acceptor", id, resume).await;
        assert_resumed(&mut opener, epoch).await;
    }
    assert_session_echo(&mut opener, id, "after").await;
}

#[tokio::test]
async fn a_clients_session_cannot_be_taken_over_even_by_its_acceptor() {
    let place = TestDir::new();
    let servers = start(&place, 3);
    let target = ([127, 0, 0, 1], 22).into();
    let mut acceptor = link(&place, &servers[1], "acceptor", 1).await;
    let itself = Some(Instance::from_bits(1));
    let accepts = async {
        let (id, frame) = acceptor.next_session_frame().await;
        let SessionFrame::Open { opener, .. } = frame else { panic!("{frame:?}") };
        assert_eq!(opener, Some(Opener::Server(servers[0].server.table.instance())));
        acceptor
            .send_session(
                id,
                SessionFrame::Opened {
                    limit: 1000,
                    epoch: 1,
                    instance: itself,
                    place: None,
                    resume_timeout: None,
                },
            )
            .await;
        id
    };
    let (mut client, id) = tokio::join!(servers[0].open("acceptor:22"), accepts);
    for (n, server) in servers.iter().enumerate().skip(1) {
        let mut stranger = link(&place, server, &format!("stranger{n}"), 9).await;
        send_session_frame(&stranger, "acceptor", id, resume(target, 50, itself, None)).await;
        assert_unknown_session(&mut stranger, 50).await;
    }
    acceptor.send_session(id, resume(target, 50, Some(Instance::from_bits(9)), None)).await;
    assert_unknown_session(&mut acceptor, 50).await;
    acceptor.send_session(id, SessionFrame::Data("hello".into())).await;
    let mut received = [0; 5];
    assert_eventually("bytes", client.read_exact(&mut received)).await.unwrap();
    assert_eq!(&received, b"hello");
}

#[tokio::test]
async fn a_session_to_the_cloud_cannot_be_taken_over_by_another_edge() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = start(&place, 2);
    let mut opener = link(&place, &servers[0], "opener", 1).await;
    let id = SessionId::random();
    opener.send_session(id, open(echo, None)).await;
    let holder = opened(&mut opener, id).await;
    assert_eq!(holder, Some(servers[0].server.table.instance()));
    for (n, server) in servers.iter().enumerate() {
        let mut stranger = link(&place, server, &format!("stranger{n}"), 9).await;
        stranger.send_session(id, resume(echo, 50, holder, None)).await;
        assert_unknown_session(&mut stranger, 50).await;
    }
    let mut stranger = link(&place, &servers[0], "stranger", 9).await;
    let nowhere = Some(Instance::from_bits(9));
    for another in [resume(echo, 51, nowhere, None), open(echo, None)] {
        stranger.send_session(id, another.clone()).await;
        assert_unknown_session(&mut stranger, another.epoch().unwrap()).await;
    }
    assert_session_echo(&mut opener, id, "undisturbed").await;
}

#[tokio::test]
async fn an_edge_lets_only_the_opener_resume_a_session() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let mut cloud = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", cloud.at, ""));
    let mut call = cloud.call().await;
    call.answer(Some(Instance::from_bits(1)));
    let id = SessionId::random();
    call.send_session(id, open(echo, server(1))).await;
    let acceptor = opened(&mut call, id).await;
    assert_eq!(acceptor, Some(edge.table.instance()));
    call.send_session(id, resume(echo, 2, acceptor, server(2))).await;
    assert_unknown_session(&mut call, 2).await;
    call.send_session(
        id,
        SessionFrame::Open {
            target: echo.into(),
            limit: 9,
            epoch: 2,
            client: String::new(),
            opener: server(2),
            resume_timeout: None,
            boot: None,
        },
    )
    .await;
    assert_unknown_session(&mut call, 2).await;
    assert_session_echo(&mut call, id, "undisturbed").await;
    drop(call);
    let mut call = cloud.call().await;
    call.answer(Some(Instance::from_bits(3)));
    call.send_session(id, resume(echo, 3, acceptor, server(2))).await;
    assert_unknown_session(&mut call, 3).await;
    call.send_session(id, resume(echo, 3, acceptor, server(1))).await;
    assert_resumed(&mut call, 3).await;
}
