//! Programs of users that follow none of the rules: such a link is no edge and no server, answers and announces
//! nothing, opens only what a rule allows, and holds no more than its share.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use tokio::io::AsyncReadExt as _;
use tonic::Code;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::frame::{
    Conflict, ErrorCode, Found, Frame, FrameKind, ListNodes, Load, NodePage, Opener, SessionCategory,
    SessionError, SessionFrame,
};
use tunnel_proto::hello::{EdgeHello, LinkCaller, UserHello, UserProof};
use tunnel_proto::names::{Instance, NodeName, SessionId, Target};

use crate::certificates::Authority;
use crate::support::call::{Call, message};
use crate::support::clients::assert_echo;
use crate::support::programs::{TOKEN, TestDir, at, edge};
use crate::support::raw::{HEADERS, RawHttp2};
use crate::support::sessions::assert_session_echo;
use crate::support::users::{USER_TOKEN, attempt, hello, link, open, scripted, server, token};
use crate::support::{assert_eventually, remote, targets, wait_until};
use crate::words::LogLines;

#[tokio::test]
async fn what_proves_a_user_never_proves_an_edge_or_a_server_nor_the_other_way_round() {
    let place = TestDir::new();
    // The CA of users signs for others too, here even the name of servers.
    let (foreign, dir) = (Authority::new(), place.path().join("foreign"));
    std::fs::create_dir(&dir).unwrap();
    let forged = foreign.write(&dir, &["cloud.test"]);
    let forged = IdentityFiles { cert: forged.cert, key: forged.key };
    let authorities =
        [std::fs::read_to_string(&place.files.ca).unwrap(), foreign.0.cert().to_owned()].concat();
    let users = place.file("users-ca.crt", &authorities);
    let users = format!("client_ca = {users:?}\nnames = [\"alice\", \"cloud.test\"]");
    let server = server(&place, &users).await;
    let alice = place.client("alice");
    let peer = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let certificate = || hello(UserProof::Certificate).request();
    assert!(attempt(&place, &server, Some(&alice), certificate()).await.is_ok());
    assert!(attempt(&place, &server, None, hello(token("alice", USER_TOKEN)).request()).await.is_ok());
    let as_role = |mut headers: HeaderMap, role: &'static str| {
        headers.insert("tunnel-role", HeaderValue::from_static(role));
        headers
    };
    let edge =
        |token: &str| EdgeHello::edge_request(&"alice".parse().unwrap(), token, Instance::from_bits(8));
    let peer_request = || LinkCaller::peer_request(Instance::from_bits(9));
    let user_token = || hello(token("alice", USER_TOKEN)).request();
    let mut plain = user_token();
    plain.remove("tunnel-dialect");
    let tablet = UserHello { device: "tablet".parse().unwrap(), ..hello(token("alice", USER_TOKEN)) };
    for (what, shows, headers, code) in [
        ("no proof", None, certificate(), Code::PermissionDenied),
        ("a server's certificate", Some(&peer), certificate(), Code::PermissionDenied),
        ("the servers' name by the users' CA", Some(&forged), certificate(), Code::Unavailable),
        ("the same as a server", Some(&forged), peer_request(), Code::Unavailable),
        ("an edge's token", None, hello(token("alice", TOKEN)).request(), Code::Unauthenticated),
        ("another user's token", None, hello(token("carol", USER_TOKEN)).request(), Code::Unauthenticated),
        ("an edge's hello as a client", None, as_role(edge(TOKEN), "client"), Code::Unknown),
        ("a user's hello as an edge", None, as_role(user_token(), "edge"), Code::Unknown),
        ("a user's hello as an interactive link", None, as_role(user_token(), "interactive"), Code::Unknown),
        ("a user without our version", None, plain, Code::Unknown),
        ("a device that has not joined", None, tablet.request(), Code::Unauthenticated),
        ("a user's token as an edge", None, edge(USER_TOKEN), Code::Unauthenticated),
        ("a user's certificate as an edge", Some(&alice), edge(USER_TOKEN), Code::Unauthenticated),
        ("a user's certificate as a server", Some(&alice), peer_request(), Code::Unauthenticated),
        ("a user's token as a server", None, as_role(user_token(), "peer"), Code::Unauthenticated),
        ("both", Some(&alice), as_role(user_token(), "peer"), Code::Unauthenticated),
    ] {
        let refused = attempt(&place, &server, shows, headers).await.map(drop);
        assert_eq!(refused, Err(code), "{what}");
    }
    assert_eq!(server.server.registry.nodes().len(), 0, "no attempt is a node");
}

#[tokio::test]
async fn a_users_link_answers_nothing_announces_nothing_and_is_never_a_node() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let victim = link(&place, "alice/phone", &[server.server.bound.grpc]).await;
    let mut session = open(&victim, &at("node1", echo)).await.unwrap();
    assert_session_echo(&mut session, "before").await;
    let mut call = scripted(&place, &server).await;
    let node: NodeName = "node1".parse().unwrap();
    // The id of another's session is known to the attacker here; usually it is not.
    for id in [session.id(), SessionId::random()] {
        for frame in forged() {
            call.send_session(id, frame).await;
        }
    }
    let found = Found { here: true, instance: Some(Instance::from_bits(7)), ..Found::not_here(0) };
    let conflict = Conflict { instance: None, reason: "forged".into() };
    for body in [
        FrameKind::Found(found),
        FrameKind::Find(1),
        FrameKind::Load(Load { nodes: 0, stopping: true, problems: String::new() }),
        FrameKind::Conflict(conflict),
        FrameKind::ListNodes(ListNodes { question: 1, after: None }),
        FrameKind::NodePage(NodePage { question: 1, nodes: Vec::new(), more: true }),
        FrameKind::Cluster(Bytes::from_static(b"{}")),
    ] {
        call.send(to_message(Frame { node: node.clone(), body })).await;
    }
    // A signal about another's node, and of the sessions of a node.
    call.send(to_message(Frame { node: node.clone(), body: FrameKind::Drain(None) })).await;
    call.send(message(&node, session.id(), SessionFrame::Fin { total: 0 })).await;
    let dropped = |reason| server.server.metrics.frames_dropped.counted(reason);
    wait_until("all signals are dropped", || dropped("unknown_type") == 7).await;
    wait_until("all frames of sessions are dropped", || dropped("unknown_session") == 18).await;
    wait_until("frames about a node are dropped", || dropped("wrong_node") == 2).await;
    // Neither the id nor a forged opener takes over the session of another device.
    let opener = Some(Opener::User("alice/phone".parse().unwrap()));
    let resume = resume_frame(&at("node1", echo), None, opener);
    let why = refused(&mut call, (session.id(), SessionCategory::Ssh), &node, resume).await;
    assert_eq!(why.code, ErrorCode::UnknownSession);
    assert_session_echo(&mut session, "undisturbed").await;
    assert!(server.link("alice").is_none() && server.link("node1").is_some());
}

/// Returns the frames that only the other end of a session, or the opener of another one, may send.
fn forged() -> Vec<SessionFrame> {
    let refusal = || SessionError::new(ErrorCode::NotAllowed, "forged");
    vec![
        SessionFrame::Opened {
            limit: 9,
            epoch: 1,
            instance: Some(Instance::from_bits(7)),
            place: None,
            resume_timeout: None,
        },
        SessionFrame::Resumed { received: 0, limit: 9, epoch: 9 },
        SessionFrame::Refused { epoch: 9, refusal: refusal() },
        SessionFrame::Reset { epoch: 9, refusal: refusal() },
        SessionFrame::ResetAt { total: 0, refusal: refusal() },
        SessionFrame::PathLost { epoch: 9 },
        SessionFrame::Data("forged".into()),
        SessionFrame::Credit { received: 1 << 40, limit: 1 << 41 },
        SessionFrame::Fin { total: 0 },
    ]
}

/// Waits until the server has handled everything that was sent over this link. Returns its answers until then.
async fn answers(call: &mut Call) -> Vec<StreamMsg> {
    call.send(to_message(Frame { node: NodeName::none(), body: FrameKind::Ping(Some(77)) })).await;
    let mut answers = Vec::new();
    let pong = async {
        loop {
            match call.next().await.expect("the link stays") {
                message if message.r#type == "pong" => return,
                message if message.category == "stream" => {}
                message => answers.push(message),
            }
        }
    };
    assert_eventually("a pong", pong).await;
    answers
}

/// Sends an Open or a Resume, and returns why it is refused.
async fn refused(
    call: &mut Call,
    (id, category): (SessionId, SessionCategory),
    node: &NodeName,
    frame: SessionFrame,
) -> SessionError {
    call.send(to_message(Frame { node: node.clone(), body: FrameKind::Session(id, category, frame) })).await;
    call.refusal(id).await
}

fn open_frame(target: &str, opener: Option<Opener>) -> SessionFrame {
    let (target, client) = (target.parse().unwrap(), "root@10.0.0.1:1".into());
    SessionFrame::Open { target, limit: 1 << 16, epoch: 50, client, opener, resume_timeout: None, boot: None }
}

fn resume_frame(target: &str, instance: Option<Instance>, opener: Option<Opener>) -> SessionFrame {
    let target = target.parse().unwrap();
    SessionFrame::Resume { received: 0, limit: 9, epoch: 50, instance, opener, target, place: None }
}

/// The session of a client of a CONNECT port has its end at the server, and its id is known to the attacker.
#[tokio::test]
async fn a_user_takes_over_no_session_of_a_client_of_the_server() {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let mut node = remote::link(&place, &server, "node2", Some(Instance::random())).await;
    let accepted = async {
        let (id, SessionFrame::Open { epoch, .. }) = node.next_session_frame().await else { panic!() };
        node.send_session(id, SessionFrame::opened(1000, epoch)).await;
        id
    };
    let (mut client, id) = tokio::join!(server.open("node2:22"), accepted);
    let mut call = scripted(&place, &server).await;
    let own = Some(server.server.table.instance());
    let node2: NodeName = "node2".parse().unwrap();
    for category in [SessionCategory::Ssh, SessionCategory::Admin] {
        for frame in [
            open_frame("node2:22", own.map(Opener::Server)),
            resume_frame("node2:22", own, own.map(Opener::Server)),
            resume_frame("node2:22", Some(Instance::random()), own.map(Opener::Server)),
            resume_frame("node2:22", None, None),
        ] {
            let body = FrameKind::Session(id, category, frame);
            call.send(to_message(Frame { node: node2.clone(), body })).await;
        }
    }
    for frame in forged() {
        call.send_session(id, frame).await;
    }
    assert_eq!(answers(&mut call).await, []);
    node.send_session(id, SessionFrame::Data("from the node".into())).await;
    let mut read = [0; 13];
    assert_eventually("the node's bytes", client.read_exact(&mut read)).await.unwrap();
    assert_eq!(&read, b"from the node");
    assert_eq!(server.server.table.relayed(), (0, 0));
}

#[tokio::test]
async fn a_request_is_judged_by_its_target_and_its_proof_whatever_else_it_claims() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let mut call = scripted(&place, &server).await;
    let openers = [
        None,
        Some(Opener::User("bob/laptop".parse().unwrap())),
        Some(Opener::Node("other1".parse().unwrap())),
        Some(Opener::Server(server.server.table.instance())),
    ];
    let categories =
        [SessionCategory::Https, SessionCategory::Egress, SessionCategory::Tcp, SessionCategory::HttpProxy];
    let [node1, other1]: [NodeName; 2] = ["node1", "other1"].map(|node| node.parse().unwrap());
    for (opener, category) in openers.into_iter().zip(categories) {
        // The rules permit her node1 alone.
        for node in [&node1, &other1, &NodeName::none(), &NodeName::direct()] {
            for frame in [
                open_frame(&at("other1", echo), opener.clone()),
                resume_frame(&at("other1", echo), None, opener.clone()),
            ] {
                let why = refused(&mut call, (SessionId::random(), category), node, frame).await;
                assert_eq!(why.code, ErrorCode::NotAllowed, "{node}, {category:?}: {why}");
                assert!(why.reason.starts_with("no rule lets alice reach port"), "{why}");
            }
        }
        // The node dials without TLS, as for any user, and so presents no certificate of its own to the target.
        let (id, frame) = (SessionId::random(), open_frame(&at("node1", echo), opener));
        let body = FrameKind::Session(id, category, frame);
        call.send(to_message(Frame { node: other1.clone(), body })).await;
        let (_, answer) = call.next_session_frame().await;
        assert!(matches!(answer, SessionFrame::Opened { .. }), "{category:?}: {answer:?}");
        call.send_session(id, SessionFrame::Data("hello".into())).await;
        let (_, answer) = call.next_session_frame().await;
        assert_eq!(answer, SessionFrame::Data("hello".into()), "{category:?}");
        let refusal = SessionError::new(ErrorCode::Cancelled, "done");
        call.send_session(id, SessionFrame::Reset { epoch: 50, refusal }).await;
    }
    wait_until("the node logs who was there", || lines.count("client=\"alice/laptop@127.0.0.1:") == 4).await;
    assert_eq!((lines.count("root@10.0.0.1"), lines.count("bob")), (0, 0), "{}", lines.text());
}

/// The server reads the node's link on, drops no byte of others, and keeps at most the attacker's share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_never_reads_stalls_only_her_own_sessions() {
    let (place, echo, source) = (TestDir::new(), targets::echo().await, targets::endless_source().await);
    let server = server(&place, "[server.session]\nbuffer_memory = \"32MiB\"").await;
    let _edge = edge(&place, &server, "node1").await;
    let at_server = server.server.bound.grpc;
    let phone = link(&place, "alice/phone", &[at_server]).await;
    let mut session = open(&phone, &at("node1", echo)).await.unwrap();
    let mut raw = RawHttp2::connect(&place, at_server, "node1", 100_000).await;
    raw.call(&hello(token("alice", USER_TOKEN)).request()).await;
    while assert_eventually("an answer to the call", raw.next()).await.unwrap().kind != HEADERS {}
    let open = || {
        let (target, client): (Target, _) = (at("node1", source).parse().unwrap(), String::new());
        let open = SessionFrame::Open {
            target,
            limit: 1 << 40,
            epoch: 1,
            client,
            opener: None,
            resume_timeout: None,
            boot: None,
        };
        message(&NodeName::none(), SessionId::random(), open)
    };
    assert!(raw.send_messages((0..20).map(|_| open())).await);
    let queued = || server.server.table.relayed().1;
    wait_until("her bytes wait at the server", || queued() > 1 << 20).await;
    for _ in 0..50 {
        assert_session_echo(&mut session, "another device").await;
        assert_echo(&mut server.open(&at("node1", echo)).await, "another client").await;
        // A quarter of the memory, and what one frame adds.
        assert!(queued() <= (8 << 20) + (1 << 17), "{}", queued());
    }
    drop(raw);
    drop(session);
    phone.close().await;
    wait_until("nothing of hers is left", || server.server.table.relayed() == (0, 0)).await;
}

#[tokio::test]
async fn a_user_has_a_share_of_the_links_and_her_refusal_is_logged() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "").await;
    let next = async |user| {
        let backup = UserHello { is_backup: true, ..hello(token(user, USER_TOKEN)) };
        attempt(&place, &server, None, backup.request()).await
    };
    let mut held = Vec::new();
    for _ in 0..LINKS {
        held.push(next("alice").await.unwrap());
    }
    assert_eq!(next("alice").await.map(drop), Err(Code::ResourceExhausted));
    assert_eq!(lines.count("user refused user=alice device=laptop"), 1);
    assert_eq!(lines.count("user alice has 128 links to this server"), 1);
    assert!(next("bob").await.is_ok());
    held.pop();
    wait_until("its link has ended", || server.server.metrics.links.all() < LINKS).await;
    assert!(next("alice").await.is_ok());
}

/// Maximum number of links of a user.
const LINKS: i64 = 128;
