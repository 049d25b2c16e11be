//! Grants: users reach nodes by a command, without a change of a config or a restart, until they end.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use tonic::Code;
use tunnel::config::edge::ServerAddress;
use tunnel::uplink::client::{UserLinkConfig, UserUplinks};
use tunnel_base::policy::grants::FOR_EVER;

use crate::enrol::{join_as_user, run};
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::sessions::assert_session_echo;
use crate::support::users::{USER_TOKEN, attempt, granted, hello, link, open, reset, server, tables, token};
use crate::support::{assert_eventually, servers, targets, wait_until};
use crate::words::LogLines;

/// Starts two servers with one store and without a table of users, the first with an admin socket.
fn cloud(place: &TestDir) -> (Vec<TestServer>, PathBuf) {
    let all = servers::addresses(2);
    let socket = place.path().join("server.sock");
    let file = place.path().join("enrolled");
    let store = format!("[server.invitations]\nstore = \"file\"\nfile = {file:?}\n");
    let admin = [format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display()), String::new()];
    let text = |(at, admin): (_, &String)| {
        servers::config(place, at, &format!("{}\n{store}{admin}", servers::peers(&all)))
    };
    let texts: Vec<_> = all.iter().copied().zip(&admin).map(text).collect();
    (texts.iter().map(|text| TestServer::from_text(text)).collect(), socket)
}

/// Links, once the server has read what the user needs for it.
async fn linked(links: &UserLinkConfig, server: &TestServer) -> UserUplinks {
    let servers = vec![ServerAddress { at: server.server.bound.grpc.into(), ..links.servers[0].clone() }];
    let links = UserLinkConfig { servers, ..links.clone() };
    let linked = async {
        loop {
            if let Ok(linked) = UserUplinks::connect(links.clone()).await {
                return linked;
            }
        }
    };
    assert_eventually("a link", linked).await
}

#[tokio::test]
async fn a_colleague_is_admitted_by_one_command_and_loses_all_by_one_at_every_server() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let echo = targets::echo().await;
    let other = targets::echo().await;
    let (servers, socket) = cloud(&place);
    let _edges = [edge(&place, &servers[0], "shop-1").await, edge(&place, &servers[1], "web-1").await];
    let short = run(&socket, "invite --user fay --nodes shop-* --for 30s").await.unwrap_err();
    assert!(short.to_string().contains("30 s: a grant lasts at least 60 s"), "{short}");
    assert!(!run(&socket, "invitations list").await.unwrap().contains("fay"), "nobody has that invitation");
    let invite = format!("invite --user alice --nodes shop-* --ports {}", echo.port());
    let output = run(&socket, &invite).await.unwrap();
    assert!(
        output.contains(" shop-* ") && (output.contains(" 90d0h ") || output.contains(" 89d23h ")),
        "{output}"
    );
    let command = output.lines().find(|line| line.contains("echo ")).unwrap().trim();
    let code = command.strip_prefix("echo ").unwrap().split_once(" | ").unwrap().0;
    let device = join_as_user(&place, servers[0].server.bound.grpc, code, "laptop").await.unwrap();
    let links = [linked(&device, &servers[0]).await, linked(&device, &servers[1]).await];
    let mut sessions = Vec::new();
    for links in &links {
        let mut session = open(links, &at("shop-1", echo)).await.unwrap();
        assert_session_echo(&mut session, "granted").await;
        sessions.push(session);
        for (node, target) in [("shop-1", other), ("web-1", echo)] {
            let why = open(links, &at(node, target)).await.unwrap_err();
            assert!(why.contains("no rule lets alice reach port"), "{why}");
        }
    }
    let listed: serde_json::Value =
        serde_json::from_str(&run(&socket, "grants -o json").await.unwrap()).unwrap();
    let id = listed[0]["id"].as_str().unwrap();
    assert_eq!(listed[0]["by"], format!("uid={}", rustix::process::getuid().as_raw()), "{listed}");
    assert!(run(&socket, "grants").await.unwrap().contains(id));

    let revoked = run(&socket, "invitations revoke --user alice").await.unwrap();
    assert!(revoked.contains("with the grants that alice has"), "{revoked}");
    for session in &mut sessions {
        // Whatever comes first: that the session has no grant, the link none, or the user no device.
        let why = reset(session).await;
        assert!(why.contains("was revoked"), "{why}");
    }
    wait_until("both links have ended", || links.iter().all(|links| links.links() == 0)).await;
    assert_eq!(run(&socket, "grants -o json").await.unwrap(), "[]");
    for part in ["grant given actor=\"uid=", "grants revoked actor=\"uid="] {
        assert!(lines.count(part) > 0, "{part}: {}", lines.text());
    }
    let own =
        |line: &&str| line.contains("listener=\"clients\"") && line.contains(&format!("grant=\"{id}\""));
    wait_until("each session has its line", || lines.text().lines().filter(own).count() == 2).await;
}

#[tokio::test]
async fn a_grant_ends_with_time_or_by_its_id_and_one_of_a_newer_server_gives_nothing_and_is_kept() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let echo = targets::echo().await;
    let socket = place.path().join("server.sock");
    let grant = |id: &str, node: &str, until: u64, more: &str| {
        format!(
            r#"{{"id":"{id}","user":"bob","nodes":["{node}"],"with_join_keys":false,"until":{until},"by":"uid=0"{more}}}"#
        )
    };
    let newer = grant("newer", "node2", FOR_EVER, r#","only":"monday""#);
    let text = |until: u64| {
        format!("{{\"tokens\":{{}},\"grants\":[{},{newer}]}}", grant("brief", "node1", until, ""))
    };
    let store = place.file("enrolled.grants", &text(FOR_EVER));
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"", socket.display());
    let server = server(&place, &admin).await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "node2").await];
    let bob = link(&place, "bob/laptop", &[server.server.bound.grpc]).await;
    let mut first = granted(&bob, &at("node1", echo)).await;
    assert!(open(&bob, &at("node2", echo)).await.is_err(), "by the one of a newer server");
    let given = run(&socket, "grant bob --nodes node2 --for ever").await.unwrap();
    assert!(!given.contains("note:"), "{given}");
    let (given, id) = given.trim().rsplit_once("to revoke this: tunnel grants revoke ").unwrap();
    assert!(given.contains(" for ever "), "{given}");
    let mut second = granted(&bob, &at("node2", echo)).await;
    let brief = run(&socket, "grant bob --nodes node2 --for 1h").await.unwrap();
    let brief = brief.trim().rsplit_once("grants revoke ").unwrap().1;
    // Another server may write its end, which then comes by itself.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let kept = std::fs::read_to_string(&store).unwrap();
    std::fs::write(&store, kept.replacen(&FOR_EVER.to_string(), &(now + 2).to_string(), 1)).unwrap();
    assert_eq!(reset(&mut first).await, "grant brief has expired");
    assert_session_echo(&mut second, "has its own grant").await;
    let listed = run(&socket, "grants").await.unwrap();
    assert!(listed.contains("for ever") && listed.contains("gives nothing here"), "{listed}");
    let unknown = run(&socket, "grant bop --nodes node2,shop-* --for 1h").await.unwrap();
    let note = "note: bop has no device and no invitation; no known node matches shop-*";
    assert!(unknown.lines().any(|line| line == note), "{unknown}");
    assert_eq!(run(&socket, &format!("grants revoke {id}")).await.unwrap(), "grants revoked: 1");
    let by = |id: &str, result: &str| {
        let text = lines.text();
        text.lines().any(|line| line.contains(&format!("grant=\"{id}\"")) && line.contains(result))
    };
    // Until all are judged without it.
    while !by(brief, "") {
        drop(granted(&bob, &at("node2", echo)).await);
    }
    assert_session_echo(&mut second, "has another grant").await;
    assert_eq!(run(&socket, &format!("grants revoke {brief}")).await.unwrap(), "grants revoked: 1");
    assert_eq!(reset(&mut second).await, format!("grant {brief} was revoked"));
    wait_until("its line names the grant that it had", || by(brief, "result=\"revoked\"")).await;
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&store).unwrap()).unwrap();
    assert!(kept.to_string().contains(r#""only":"monday""#), "{kept}");
    let of_bop = run(&socket, "grants revoke --user bop").await.unwrap();
    assert!(
        of_bop.starts_with("grants revoked: 1\nrules of the servers' config that name bop remain"),
        "{of_bop}"
    );
    let none = run(&socket, "grants revoke --by alice").await.unwrap_err();
    assert!(none.text.contains("there is no such grant"), "{none}");
}

#[tokio::test]
async fn a_server_that_has_not_read_its_grants_refuses_no_user_for_good() {
    let place = TestDir::new();
    let grants = place.file("enrolled.grants", "{");
    let all = tables(&place, "");
    let without_users = all.split("[server.clients]").next().unwrap();
    let server = TestServer::with(&place, without_users);
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    let request = || hello(token("bob", USER_TOKEN)).request();
    assert_eq!(attempt(&place, &server, None, request()).await.err(), Some(Code::Unavailable));
    let text = r#"{"tokens":{},"grants":[{"id":"1","user":"bob","nodes":["*"],"with_join_keys":false,"until":253402300799,"by":"uid=0"}]}"#;
    std::fs::write(&grants, text).unwrap();
    let linked = async { while attempt(&place, &server, None, request()).await.is_err() {} };
    Box::pin(assert_eventually("a link", linked)).await;
}
