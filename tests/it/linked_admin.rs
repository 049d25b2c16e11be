//! Requests of the admin API over the links of users: who may send which, and that they never leave their link.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel::enrolment::store::SecretHash;
use tunnel::route::RouteError;
use tunnel::uplink::client::UserUplinks;
use tunnel_base::files::FileLock;
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionCategory, SessionFrame};
use tunnel_proto::hello::{EdgeHello, LinkCaller};
use tunnel_proto::names::{Instance, NodeName, SessionId, Target};

use crate::support::call::Call;
use crate::support::clients::assert_echo;
use crate::support::line::Line;
use crate::support::live::{self, reloaded};
use crate::support::programs::{TOKEN, TestDir, at, edge, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::sessions::assert_session_echo;
use crate::support::users::{
    USER_TOKEN, attempt, granted, hello, link, reset, scripted, server, tables, token,
};
use crate::support::{assert_eventually, pause_time, targets, wait_until};
use crate::words::LogLines;

/// The status and the body of a response.
type Answer = (u16, String);

/// Sends a request, `METHOD PATH`, in a session of its own. Returns the response.
async fn send(links: &UserUplinks, request: &str, body: &str) -> Answer {
    let mut session = ChunkStreamIo::new(links.open_admin().await.unwrap());
    let head =
        format!("{request} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    session.write_all(head.as_bytes()).await.unwrap();
    session.flush().await.unwrap();
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    let read = async {
        // The session is reset once the response is complete.
        while let Ok(read @ 1..) = session.read(&mut piece).await {
            text.extend_from_slice(&piece[..read]);
        }
    };
    assert_eventually("a response", read).await;
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
    let is_whole = head.contains(&format!("content-length: {}\r\n", body.len()));
    assert!(is_whole || request.starts_with("HEAD "), "{text}");
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn json((status, body): Answer) -> Value {
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

fn nodes(answer: Answer) -> Vec<String> {
    let listed = json(answer);
    let counted =
        listed["servers"].as_array().unwrap().iter().map(|server| server["nodes"].as_u64().unwrap());
    let nodes = listed["nodes"].as_array().unwrap();
    assert_eq!(counted.sum::<u64>(), nodes.len() as u64, "the counts reveal no other nodes: {listed}");
    nodes.iter().map(|node| node["name"].as_str().unwrap().to_owned()).collect()
}

fn subject(subject: &str) -> String {
    json!({ "subject": subject, "seconds": 60 }).to_string()
}

#[tokio::test]
async fn an_admin_queries_and_changes_the_cloud_over_her_link() {
    let (lines, _guard) = LogLines::start();
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "admins = [\"alice\"]").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let at_server = [server.server.bound.grpc];
    let alice = link(&place, "alice/laptop", &at_server).await;
    let mut session = alice.open(&at("node1", echo).parse().unwrap()).await.unwrap();
    assert_session_echo(&mut session, "hello").await;
    // Her rules permit node1 alone.
    assert_eq!(nodes(send(&alice, "GET /nodes", "").await), ["node1", "other1"]);
    let status = json(send(&alice, "GET /status", "").await);
    assert_eq!((&status["role"], status["links"].as_array().unwrap().len()), (&"server".into(), 2));
    let users: Vec<_> =
        status["sessions"].as_array().unwrap().iter().map(|one| one["user"].as_str()).collect();
    assert_eq!((users, status["totals"]["sessions"].as_u64()), (vec![Some("alice")], Some(1)), "no request");
    let invited = json(send(&alice, "POST /invitations", &subject("dora/")).await);
    assert!(invited["code"].as_str().unwrap().ends_with(".dora/"), "{invited}");
    json(send(&alice, "POST /invitations", &subject("edge9")).await);
    let all = json(send(&alice, "GET /invitations", "").await).to_string();
    assert!(all.contains("dora") && all.contains("edge9") && all.contains("bob"), "{all}");
    let mut bob = link(&place, "bob/laptop", &at_server).await.open_admin().await.unwrap();
    assert_eq!(send(&alice, "POST /revocations", r#"{"subject":"bob/"}"#).await.0, 200);
    assert_eq!(reset(&mut bob).await, "the access of user bob was revoked");
    let ended = send(&alice, "POST /sessions/end", r#"{"user":"alice"}"#).await;
    assert_eq!(json(ended), json!({ "ended": 1 }));
    assert_eq!(reset(&mut session).await, "ended by operator alice/laptop");
    for (part, count) in [
        ("admin request over a link actor=alice/laptop user=alice device=laptop remote_addr=127.0.0.1:", 7),
        ("path=\"/revocations\" status=200", 1),
        ("invitation created actor=\"alice/laptop\" user=dora", 1),
        ("sessions ended actor=alice/laptop user=\"alice\"", 1),
    ] {
        assert_eq!(lines.count(part), count, "{part}");
    }
    alice.close().await;
    server.assert_idle().await;
}

#[tokio::test]
async fn an_admin_makes_no_admin() {
    let place = TestDir::new();
    let server = server(&place, "admins = [\"alice\", \"bob\"]").await;
    let alice = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    for (path, subject) in [
        ("/invitations", "bob/"),
        ("/invitations", "alice/"),
        ("/revocations", "bob/"),
        ("/revocations", "bob/laptop"),
        ("/revocations", "alice/phone"),
    ] {
        let (status, why) = send(&alice, &format!("POST {path}"), &self::subject(subject)).await;
        let user = subject.split('/').next().unwrap();
        assert!(
            status == 403 && why.starts_with(&format!("user {user} is in admins of")),
            "{subject}: {why}"
        );
    }
    // A node of that name is another matter.
    json(send(&alice, "POST /invitations", &self::subject("bob")).await);
    let known = server.server.enrolment.get().unwrap().known();
    assert!(known.proves_device(&"bob/laptop".parse().unwrap(), &SecretHash::of(USER_TOKEN)));
}

#[tokio::test]
async fn an_admin_grants_only_what_a_file_gives_her_and_her_grants_end_with_that() {
    let place = TestDir::new();
    let target = at("node1", targets::echo().await);
    let with = |admins: &str| place.cloud(&tables(&place, &format!("admins = [{admins}]")));
    let (server, config) = live::server(&place, &with("\"alice\""));
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let at_server = [server.server.bound.grpc];
    let alice = link(&place, "alice/laptop", &at_server).await;
    let bob = link(&place, "bob/laptop", &at_server).await;
    let grant = |user: &str, node: &str, more: &str| {
        format!(r#"{{"user":"{user}","nodes":["{node}"],"with_join_keys":false{more}}}"#)
    };
    // What a grant gives her is not hers to give.
    let own = r#"{"id":"own","user":"alice","nodes":["other1"],"with_join_keys":false,"until":99999999999,"by":"uid=0"}"#;
    let shared = server.server.enrolment.get().unwrap();
    shared.grant(&serde_json::from_str(own).unwrap()).await.unwrap();
    let mut hers = granted(&alice, &target.replace("node1", "other1")).await;
    assert_session_echo(&mut hers, "by the operator").await;
    for (body, part) in [
        (grant("bob", "*", ""), "what its rules give you"),
        (grant("bob", "other1", ""), "what its rules give you"),
        (grant("bob", "node1", ",\"seconds\":43201"), "at most 43200 s over a link"),
        (grant("bob", "node1", ",\"ports\":[]"), "it matches nothing"),
        (grant("alice", "node1", ""), "is in admins"),
    ] {
        let (status, why) = send(&alice, "POST /grants", &body).await;
        assert!([400, 403].contains(&status) && why.contains(part), "{body}: {why}");
        assert_eq!(send(&bob, "POST /grants", &body).await.0, 403);
    }
    let given = json(send(&alice, "POST /grants", &grant("bob", "node1", "")).await);
    let mut session = granted(&bob, &target).await;
    assert_session_echo(&mut session, "by alice").await;
    assert_eq!(nodes(send(&bob, "GET /nodes", "").await), ["node1"]);
    let reach = &json(send(&bob, "GET /whoami", "").await)["reach"];
    assert!(reach[0]["nodes"] == json!(["node1"]) && reach[0]["until"] == given["until"], "{reach}");
    // She may revoke what she could give.
    let near = own.replace("\"own\"", "\"near\"").replace("other1", "node1");
    shared.grant(&serde_json::from_str(&near).unwrap()).await.unwrap();
    let second = json(send(&alice, "POST /grants", &grant("bob", "node1", "")).await);
    for (id, expected) in [("own", 404), ("near", 200), (second["id"].as_str().unwrap(), 200)] {
        let (status, text) = send(&alice, "POST /grants/revoke", &format!(r#"{{"id":"{id}"}}"#)).await;
        assert!(
            status == expected && (status == 200 || text.contains("those that they gave")),
            "{id}: {text}"
        );
    }
    assert_session_echo(&mut hers, "an operator gave it").await;
    let listed = json(send(&alice, "GET /grants", "").await);
    assert_eq!(listed.as_array().unwrap().iter().filter(|one| one["by"] == "alice/laptop").count(), 1);
    std::fs::write(&config, with("")).unwrap();
    let why = reloaded(reset(&mut session)).await;
    assert!(
        why.starts_with(&format!("grant {} no longer covers this", given["id"].as_str().unwrap())),
        "{why}"
    );
}

#[tokio::test]
async fn other_users_only_list_the_nodes_that_their_rules_permit() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "admins = [\"bob\"]").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let at_server = [server.server.bound.grpc];
    let alice = link(&place, "alice/laptop", &at_server).await;
    assert_eq!(nodes(send(&alice, "GET /nodes", "").await), ["node1"]);
    for (request, body) in [
        ("GET /status", ""),
        ("GET /invitations", ""),
        ("POST /invitations", &*subject("carol/")),
        ("POST /revocations", &*subject("bob/")),
        ("POST /sessions/end", r#"{"user":"bob"}"#),
    ] {
        let (status, why) = send(&alice, request, body).await;
        assert!(status == 403 && why.starts_with("user alice is not in admins of"), "{request}: {why}");
    }
    assert_eq!(lines.count("actor=alice/laptop user=alice device=laptop"), 6);
    assert_eq!(lines.count("status=403 reason=\"user alice is not in admins of"), 5);
    for link in [alice, link(&place, "bob/laptop", &at_server).await] {
        for request in [
            "GET /metrics",
            "GET /events",
            "GET /",
            "GET /cloud/healthz",
            "HEAD /nodes",
            "POST /nodes",
            "GET /sessions/end",
            "PUT /debug/flags/v",
            "GET /nodes/",
        ] {
            assert_eq!(send(&link, request, "").await.0, 404, "{request}");
        }
    }
}

#[tokio::test]
async fn each_user_learns_who_she_is_and_removes_no_device_but_her_own() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "admins = [\"bob\"]").await;
    let at_server = [server.server.bound.grpc];
    let [alice, bob] =
        [link(&place, "alice/laptop", &at_server).await, link(&place, "bob/laptop", &at_server).await];
    let who = json(send(&alice, "GET /whoami", "").await);
    assert_eq!(who["reach"], json!([{ "nodes": ["node*"], "ports": [], "with_join_keys": true }]), "{who}");
    assert_eq!(
        (&who["user"], &who["device"], &who["is_admin"]),
        (&json!("alice"), &json!("laptop"), &json!(false))
    );
    let who = json(send(&bob, "GET /whoami", "").await);
    assert_eq!((&who["is_admin"], &who["reach"]), (&json!(true), &json!([])), "no rule of others");
    for request in ["POST /whoami", "GET /leave"] {
        assert_eq!(send(&alice, request, "").await.0, 404, "{request}");
    }
    let known = || server.server.enrolment.get().unwrap().known();
    let is_joined =
        |device: &str| known().proves_device(&device.parse().unwrap(), &SecretHash::of(USER_TOKEN));
    // The grant that she has given is deleted only after the link should end.
    let given = r#"{"id":"given","user":"bob","nodes":["node1"],"with_join_keys":false,"until":99999999999,"by":"alice/laptop"}"#;
    let given = serde_json::from_str(given).unwrap();
    server.server.enrolment.get().unwrap().grant(&given).await.unwrap();
    let held = FileLock::acquire(&place.path().join("enrolled.grants.lock"), Duration::ZERO).unwrap();
    let release = async {
        wait_until("the link should end", || lines.count("link ended: user revoked") == 1).await;
        drop(held);
    };
    let (answer, ()) = tokio::join!(send(&alice, "POST /leave", ""), release);
    assert_eq!(answer, (200, "left\n".to_owned()));
    assert!(!is_joined("alice/laptop") && is_joined("alice/phone") && is_joined("bob/laptop"));
    assert_eq!(
        lines.count("token and open invitations revoked actor=\"alice/laptop\" user=alice device=laptop"),
        1
    );
}

#[tokio::test]
async fn a_flood_of_requests_is_refused_and_makes_few_lines_but_each_change_has_its_own() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = server(&place, "admins = [\"bob\"]").await;
    let at_server = [server.server.bound.grpc];
    let alice = link(&place, "alice/laptop", &at_server).await;
    // Twenty within a second are allowed.
    let flood = async { while send(&alice, "GET /xxx", "").await.0 != 429 {} };
    assert_eventually("too many requests", flood).await;
    let refused = |result| server.server.metrics.sessions.closed("clients", result);
    assert!(refused("bad_request") >= 20 && refused("overloaded") == 1);
    assert_eq!((lines.count("path=\"/xxx\" status=404"), lines.count("status=429")), (10, 1));
    let bob = link(&place, "bob/laptop", &at_server).await;
    for n in 0..15 {
        json(send(&bob, "POST /invitations", &subject(&format!("edge{n}"))).await);
    }
    assert_eq!(lines.count("path=\"/invitations\" status=200"), 15);
}

#[tokio::test]
async fn a_user_is_an_admin_as_long_as_the_config_names_her() {
    let place = TestDir::new();
    let with = |admins: &str| place.cloud(&tables(&place, &format!("admins = [{admins}]")));
    let (server, config) = live::server(&place, &with("\"alice\""));
    let alice = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    json(send(&alice, "GET /status", "").await);
    std::fs::write(&config, with("\"bob\"")).unwrap();
    let refused = async { while send(&alice, "GET /status", "").await.0 != 403 {} };
    assert_eventually("the refusal", Box::pin(reloaded(refused))).await;
}

#[tokio::test]
async fn requests_of_a_user_are_bounded_and_end_in_time() {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let at_server = [server.server.bound.grpc];
    let (laptop, phone) =
        (link(&place, "alice/laptop", &at_server).await, link(&place, "alice/phone", &at_server).await);
    let mut open = Vec::new();
    for number in 0..8 {
        open.push(
            if number % 2 == 0 { laptop.open_admin().await } else { phone.open_admin().await }.unwrap(),
        );
    }
    let error = phone.open_admin().await.unwrap_err();
    let RouteError::Refused { refusal, .. } = error.why else { panic!("{error}") };
    assert_eq!(refusal.code, ErrorCode::Overloaded);
    assert!(refusal.reason.contains("user alice waits for too many answers"), "{refusal}");
    assert_eq!(nodes(send(&link(&place, "bob/laptop", &at_server).await, "GET /nodes", "").await), [""; 0]);
    open.truncate(7);
    wait_until("one is over", || server.server.table.len() == 7).await;
    assert_eq!(send(&phone, &format!("GET /{}", "x".repeat(17_000)), "").await.0, 431);
    // No request is sent over the others.
    pause_time();
    for mut session in open {
        reset(&mut session).await;
    }
    wait_until("the server keeps none", || server.server.table.is_empty()).await;
    assert_eq!(nodes(send(&laptop, "GET /nodes", "").await), [""; 0]);
}

/// Sends the first half of a request.
async fn half_a_request(links: &UserUplinks) -> ChunkStreamIo<Session> {
    let mut session = ChunkStreamIo::new(links.open_admin().await.unwrap());
    session.write_all(b"GET /nodes HTTP/1.1\r\nHost").await.unwrap();
    session.flush().await.unwrap();
    session
}

#[tokio::test]
async fn a_request_ends_with_its_link_while_other_sessions_resume() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let links = link(&place, "alice/laptop", &[line.at]).await;
    let mut other = links.open(&at("node1", echo).parse().unwrap()).await.unwrap();
    let mut session = half_a_request(&links).await;
    wait_until("the server has it", || server.server.table.len() == 1).await;
    line.reset();
    let error = assert_eventually("its end", session.read_u8()).await.unwrap_err();
    assert!(error.to_string().contains("it is never resumed"), "{error}");
    wait_until("the server keeps nothing of it", || server.server.table.is_empty()).await;
    assert_session_echo(&mut other, "resumed").await;
    assert_eq!((other.resumed(), session.get_ref().resumed()), (1, 0));
    assert_eq!(nodes(send(&links, "GET /nodes", "").await), ["node1"]);
    // While the server asks for another link, the request stays where it is.
    let mut session = half_a_request(&links).await;
    wait_until("the server has it", || server.server.table.len() == 1).await;
    let stopping = server.server.shutdown(std::future::pending());
    let answered = async {
        session.write_all(b": localhost\r\n\r\n").await.unwrap();
        let mut head = [0; 12];
        assert_eventually("the answer", session.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        drop((session, other));
    };
    tokio::join!(stopping, answered);
}

/// Sends a frame of a session of the category `admin` about `node`.
async fn send_frame(call: &Call, node: &NodeName, id: SessionId, frame: SessionFrame) {
    let body = FrameKind::Session(id, SessionCategory::Admin, frame);
    call.send(to_message(Frame { node: node.clone(), body })).await;
}

fn open(epoch: u64) -> SessionFrame {
    let target: Target = "node1:22".parse().unwrap();
    SessionFrame::Open {
        target,
        limit: 1 << 16,
        epoch,
        client: "me".into(),
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

fn resume(epoch: u64) -> SessionFrame {
    let target: Target = "node1:22".parse().unwrap();
    SessionFrame::Resume {
        received: 0,
        limit: 1 << 16,
        epoch,
        instance: None,
        opener: None,
        target,
        place: None,
    }
}

#[tokio::test]
async fn a_request_is_not_resumed_over_another_link_of_its_device() {
    let place = TestDir::new();
    let server = server(&place, "").await;
    let backup = || {
        let mut headers = hello(token("alice", USER_TOKEN)).request();
        headers.insert("tunnel-link", "backup".parse().unwrap());
        headers
    };
    let mut first = scripted(&place, &server).await;
    let mut second = attempt(&place, &server, None, backup()).await.unwrap();
    let (id, none) = (SessionId::random(), NodeName::none());
    send_frame(&first, &none, id, open(1)).await;
    let SessionFrame::Opened { instance, .. } = first.next_session_frame().await.1 else { panic!() };
    assert_eq!(instance, Some(server.server.table.instance()));
    for category in [SessionCategory::Admin, SessionCategory::Ssh] {
        let body = FrameKind::Session(id, category, resume(9));
        second.send(to_message(Frame { node: none.clone(), body })).await;
        assert_eq!(second.refusal(id).await.code, ErrorCode::UnknownSession, "{category:?}");
    }
    // Nor is one that this server does not know.
    let unknown = SessionId::random();
    send_frame(&second, &none, unknown, resume(9)).await;
    assert_eq!(second.refusal(unknown).await.code, ErrorCode::UnknownSession);
    assert_eq!(server.server.table.len(), 1, "it is still there");
    drop(first);
    wait_until("it ends with its link", || server.server.table.is_empty()).await;
}

#[tokio::test]
async fn an_edge_a_peer_and_a_server_open_no_session_of_operators() {
    let place = TestDir::new();
    let server = server(&place, "admins = [\"alice\"]").await;
    let node: NodeName = "node1".parse().unwrap();
    let edge = EdgeHello::edge_request(&node, TOKEN, Instance::from_bits(8));
    let peer = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let mut calls = [
        attempt(&place, &server, None, edge).await.unwrap(),
        attempt(&place, &server, Some(&peer), LinkCaller::peer_request(Instance::from_bits(9)))
            .await
            .unwrap(),
    ];
    let mut scripted = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node2", scripted.at, ""));
    let mut to_edge = scripted.call().await;
    to_edge.answer(Some(Instance::from_bits(7)));
    calls[0].node = node;
    for call in calls.iter_mut().chain([&mut to_edge]) {
        for frame in [open(1), resume(2)] {
            let id = SessionId::random();
            send_frame(call, &call.node.clone(), id, frame).await;
            let why = call.refusal(id).await;
            assert_eq!(why.code, ErrorCode::NotAllowed);
            assert!(why.reason.starts_with("only the program of a user opens sessions"), "{why}");
        }
    }
    assert!(server.server.table.is_empty() && edge.table.is_empty());
    assert_eq!(server.server.table.relayed(), (0, 0));
}

#[tokio::test]
async fn endless_opens_of_a_user_leave_room_for_others() {
    let (place, echo, closed) = (TestDir::new(), targets::echo().await, targets::closed_port().await);
    let server = server(&place, "[server.session]\nbuffer_memory = \"1MiB\"").await;
    let _edge = edge(&place, &server, "node1").await;
    let bad = scripted(&place, &server).await;
    let target: Target = at("node1", closed).parse().unwrap();
    // It does not read the answers meanwhile.
    for number in 0..10_000 {
        let category = [SessionCategory::Admin, SessionCategory::Ssh, SessionCategory::Https][number % 3];
        let (target, opener) = (target.clone(), None);
        let frame = match number % 2 {
            0 => SessionFrame::Open {
                target,
                limit: 1,
                epoch: 1,
                client: "me".into(),
                opener,
                resume_timeout: None,
                boot: None,
            },
            _ => SessionFrame::Resume {
                received: 0,
                limit: 1,
                epoch: 1,
                instance: None,
                opener,
                target,
                place: None,
            },
        };
        let body = FrameKind::Session(SessionId::random(), category, frame);
        bad.send(to_message(Frame { node: NodeName::none(), body })).await;
    }
    assert_eq!(
        nodes(send(&link(&place, "bob/laptop", &[server.server.bound.grpc]).await, "GET /nodes", "").await),
        [""; 0]
    );
    assert_echo(&mut server.open(&at("node1", echo)).await, "hello").await;
    // Requests of the admin API wait for their heads.
    wait_until("the others are refused", || server.server.table.relayed() == (0, 0)).await;
    assert!(server.server.table.len() <= 9, "{}", server.server.table.len());
    drop(bad);
    server.assert_idle().await;
}
