//! Machines that join by invitation, at servers that share the invitations.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser as _;
use rcgen::date_time_ymd;
use tokio::time::Instant;
use tunnel::command::client;
use tunnel::command::device;
use tunnel::command::grants;
use tunnel::command::invitations::{self, InvitationsArgs, InvitationsCommand};
use tunnel::command::join::{self, JoinArgs};
use tunnel::command::token::{self, TokenCommand};
use tunnel::command::{Args, Command, CommandError, Format};
use tunnel::config::Environment;
use tunnel::config::edge::ServerAddress;
use tunnel::enrolment::JoinRefusal;
use tunnel::invitations::code::InvitationCode;
use tunnel::registry::history::WhyUnlinked;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig};
use tunnel_link::grpc::enrol::JoinCredentials;

use crate::doctor::certify;
use crate::support::clients::{assert_echo, get};
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, start_edge};
use crate::support::users::server_address;
use crate::support::{assert_eventually, live, pause_time, servers, targets, wait_until, wait_within};
use crate::words::LogLines;

/// Starts servers that share a file of invitations. Their token file admits none of the test's nodes.
pub(crate) fn cloud(place: &TestDir, count: u8) -> Vec<TestServer> {
    configs(place, count).iter().map(|text| TestServer::from_text(text)).collect()
}

/// Returns the configs of such servers.
pub(crate) fn configs(place: &TestDir, count: u8) -> Vec<String> {
    place.file("token", "other:0123456789\n");
    let all = servers::addresses(count);
    let lines = format!(
        "{}\n[server.invitations]\nstore = \"file\"\nfile = {:?}",
        servers::peers(&all),
        place.path().join("enrolled")
    );
    all.iter().map(|at| servers::config(place, *at, &lines)).collect()
}

/// Starts a server with an admin socket. Returns the server, and the path of the socket.
pub(crate) fn with_socket(place: &TestDir) -> (TestServer, PathBuf) {
    place.file("token", "other:0123456789\n");
    let path = place.path().join("server.sock");
    let tables = format!(
        "[server.admin]\nlisten = \"unix:{}\"\n[server.invitations]\nstore = \"file\"\nfile = {:?}",
        path.display(),
        place.path().join("enrolled")
    );
    (TestServer::with(place, &tables), path)
}

/// Runs a command about invitations or grants at an admin socket.
pub(crate) async fn run(socket: &Path, line: &str) -> Result<String, CommandError> {
    let words = ["tunnel"].into_iter().chain(line.split(' ')).chain(["--socket", socket.to_str().unwrap()]);
    match Args::parse_from(words).command {
        Command::Invite(invite_args) => invitations::invite(invite_args, &Environment::default()).await,
        Command::Invitations(more) => invitations::manage(more, &Environment::default()).await,
        Command::Grant(args) => {
            let notes = RefCell::new(String::new());
            let print = |line: &str| *notes.borrow_mut() += &format!("{line}\n");
            let given = grants::grant(args, &Environment::default(), print).await?;
            Ok(notes.take() + &given)
        }
        Command::Grants(more) => grants::manage(more, &Environment::default()).await,
        other => panic!("{other:?}"),
    }
}

/// Returns the code of an invitation for `edge7`, created at a server.
pub(crate) async fn invited(server: &TestServer) -> String {
    let enrolment = server.server.enrolment.get().unwrap();
    let node = "edge7".parse().unwrap();
    enrolment.invite(&node, None, Duration::from_secs(3600), false, "test").await.unwrap().code.to_string()
}

/// Joins with the secret of an invitation, as a server does for a machine.
pub(crate) async fn join_at(
    server: &TestServer,
    secret: &str,
    name: &str,
    token: &str,
) -> Result<(), JoinRefusal> {
    let enrolment = server.server.enrolment.get().unwrap();
    let params = JoinCredentials { secret: secret.into(), name: name.into(), token: token.into() };
    enrolment.join([127, 0, 0, 1].into(), &params, |_| false).await
}

/// Returns the arguments of a command line.
pub(crate) fn line(server: impl std::fmt::Display, code: &str, to: &Path) -> JoinArgs {
    let (server, to) = (server.to_string(), to.to_str().unwrap());
    let line =
        ["tunnel", "join", &server, "--invitation", code, "--tls-server-name", NAME, "--install-dir", to];
    match Args::parse_from(line).command {
        Command::Join(join) => join,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn join(server: SocketAddr, code: &str, to: &Path) -> Result<String, CommandError> {
    join::run(&line(server, code, to), &Environment::default(), std::io::empty()).await
}

/// Joins as a device of a user whose home is that folder's `device`. Returns the links that were written there.
pub(crate) async fn join_as_user(
    place: &TestDir,
    server: SocketAddr,
    code: &str,
    device: &str,
) -> Result<UserLinkConfig, CommandError> {
    let server = server.to_string();
    let line = ["tunnel", "join", "--user", &server, "--tls-server-name", NAME];
    let line = line.into_iter().chain(["--invitation", "-", "--device", device]);
    let Command::Join(join_args) = Args::parse_from(line).command else { panic!("not a join") };
    let home = place.path().join(device).to_str().unwrap().to_owned();
    let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| home.clone());
    let env = Environment::read(variable);
    let output = join::run(&join_args, &env, format!("{code}\n").as_bytes()).await?;
    assert!(output.contains("but keeps its servers until it is restarted"), "{output}");
    Ok(client::links(&env).unwrap().unwrap())
}

/// Returns a user's code, created at a server.
pub(crate) async fn invited_user(server: &TestServer, user: &str, lasting: Duration) -> String {
    let enrolment = server.server.enrolment.get().unwrap();
    let user = format!("{user}/").parse().unwrap();
    enrolment.invite(&user, None, lasting, false, "test").await.unwrap().code.to_string()
}

/// Returns true if the server accepts this proof of a user's device.
fn is_proven(server: &TestServer, client: &str, links: &UserLinkConfig) -> bool {
    let UserCredentials::Token(_, token) = &links.proof else { panic!("{links:?}") };
    let enrolment = server.server.enrolment.get().unwrap();
    enrolment.device(client.parse().unwrap(), token.load()[0].reveal()).check().is_ok()
}

/// Returns the config that was written, with a free log port.
pub(crate) fn settings(to: &Path) -> String {
    let text = std::fs::read_to_string(to.join("edge.toml")).unwrap();
    text.replace("[edge.uplink]\n", "[edge.uplink]\nadmin_listen = \"127.0.0.1:0\"\n")
}

#[tokio::test]
async fn a_machine_joins_at_a_second_server_and_links_to_a_third() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = cloud(&place, 3);
    let code = invited(&servers[0]).await;
    let to = place.path().join("etc");
    let output = join(servers[1].server.bound.grpc, &code, &to).await.unwrap();
    assert!(output.contains("tunnel edge -c ") && output.contains("systemctl enable --now"), "{output}");
    for (path, mode) in
        [("", 0o700), ("edge.toml", 0o600), ("certs", 0o700), ("certs/ca.crt", 0o600), ("token/token", 0o600)]
    {
        let found = std::fs::metadata(to.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{path}");
    }
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), 3, "nothing else is left");
    let third = servers[2].server.bound.grpc.to_string();
    let _edge = start_edge(&settings(&to).replace(&servers[1].server.bound.grpc.to_string(), &third));
    servers[2].wait_for_node("edge7").await;
    let mut client = servers[0].open(&at("edge7", echo)).await;
    assert_echo(&mut client, "hello").await;
}

#[tokio::test]
async fn a_machine_that_joins_knows_the_other_servers_that_it_reaches() {
    let place = TestDir::new();
    let mut configs = configs(&place, 3);
    // The third one is down.
    configs.pop();
    let servers: Vec<_> = configs.iter().map(|text| TestServer::from_text(text)).collect();
    let [first, second] = [0, 1].map(|number| servers[number].server.bound.grpc);
    let to = place.path().join("etc");
    let output = join(second, &invited(&servers[0]).await, &to).await.unwrap();
    assert!(output.contains("left out 127.") && output.contains("does not reach it"), "{output}");
    assert!(settings(&to).contains(&format!("servers = [\"{second}\", \"{first}\"]\n")), "{}", settings(&to));
    let code = invited_user(&servers[0], "alice", Duration::from_secs(60)).await;
    let links = join_as_user(&place, second, &code, "laptop").await.unwrap();
    let named = |at| ServerAddress { dns: NAME.parse().unwrap(), ..server_address(at) };
    assert_eq!(links.servers, [second, first].map(named));
}

/// Runs `tunnel whoami` or `tunnel leave` on the device of [`join_as_user`].
async fn on_device(place: &TestDir, line: &str) -> Result<String, CommandError> {
    let home = place.path().join("laptop").to_str().unwrap().to_owned();
    let env = Environment::read(|name: &str| (name == "XDG_CONFIG_HOME").then(|| home.clone()));
    match Args::parse_from(["tunnel"].into_iter().chain(line.split(' '))).command {
        Command::Whoami(args) => device::whoami(args, &env).await,
        Command::Leave(args) => device::leave(args, &env).await,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_user_sees_what_she_may_reach_and_her_device_leaves_as_it_came() {
    let place = TestDir::new();
    let rule = "{ users = [\"alice\"], nodes = [\"shop-*\", \"node1\"], ports = [22, 80] }";
    let text = format!("{}\n[server.clients]\nrules = [{rule}]\n", configs(&place, 1)[0]);
    let server = TestServer::from_text(&text);
    let at = server.server.bound.grpc;
    let joined = async || {
        let code = invited_user(&server, "alice", Duration::from_secs(60)).await;
        join_as_user(&place, at, &code, "laptop").await.unwrap()
    };
    let links = joined().await;
    let who = on_device(&place, "whoami").await.unwrap();
    let expected = format!(
        "user alice, device laptop\n\n\
         MAY REACH     PORTS  JOIN KEYS  ENDS IN\nshop-* node1  22 80  yes        -\n\nservers: {at}\n"
    );
    assert_eq!(who, expected);
    let who: serde_json::Value =
        serde_json::from_str(&on_device(&place, "whoami -o json").await.unwrap()).unwrap();
    let reach =
        serde_json::json!([{ "nodes": ["shop-*", "node1"], "ports": [22, 80], "with_join_keys": true }]);
    assert_eq!(who["reach"], reach);
    assert_eq!(who["servers"], serde_json::json!([at.to_string()]));
    let file = place.path().join("laptop/tunnel/client.toml");
    assert!(Args::try_parse_from(["tunnel", "leave"]).unwrap_err().to_string().contains("--yes"));
    assert!(file.exists() && is_proven(&server, "alice/laptop", &links));
    let left = on_device(&place, "leave --yes").await.unwrap();
    assert!(
        left.starts_with("the servers no longer accept this device\nclient.toml and ca.crt are removed"),
        "{left}"
    );
    assert!(!is_proven(&server, "alice/laptop", &links));
    assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 0);
    let again = on_device(&place, "leave --yes").await.unwrap_err();
    assert!(again.code == 78 && again.text.contains("tunnel join --user"), "{again}");
    // The servers have revoked it before.
    joined().await;
    let device = "alice/laptop".parse().unwrap();
    server.server.enrolment.get().unwrap().revoke(&device, "test").await.unwrap();
    assert!(on_device(&place, "leave --yes").await.unwrap().contains("no longer accept"));
    // No server is reached: the device keeps its proof, so that it can leave later.
    joined().await;
    server.server.shutdown(std::future::ready(())).await;
    let kept = std::fs::read_to_string(&file).unwrap();
    let failed = on_device(&place, "leave --yes").await.unwrap_err();
    let expected = "no server has confirmed that this device ends: cannot link";
    assert!(failed.code == 69 && failed.text.starts_with(expected), "{failed:?}");
    assert!(failed.text.contains("tunnel invitations revoke --user"), "{failed}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), kept);
    assert!(file.with_file_name("ca.crt").exists());
}

#[tokio::test]
async fn a_server_without_the_shared_store_reports_the_node_that_it_refuses_and_why() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let at = servers[0].server.bound.grpc;
    invited(&servers[0]).await;
    let stranger = start_edge(&place.edge("edge7", at, ""));
    let refused = || servers[0].server.registry.overview(10).disconnected;
    wait_within(Duration::from_secs(20), "it is refused", || !refused().is_empty()).await;
    let one = refused().pop().unwrap();
    let why = one.error.unwrap().why;
    assert_eq!((one.node.as_str(), one.why), ("edge7", WhyUnlinked::Refused));
    assert!(why.contains("has not joined here") && why.contains("one store (server.invitations)"), "{why}");
    drop(stranger);
}

#[tokio::test]
async fn an_invitation_is_read_from_a_file_or_from_stdin() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let at = servers[0].server.bound.grpc;
    let join = |from: &str, stdin: String, to: &str| {
        let join_args = line(at, from, &place.path().join(to));
        async move { join::run(&join_args, &Environment::default(), stdin.as_bytes()).await }
    };
    let output = join("-", invited(&servers[0]).await + "\n", "stdin").await.unwrap();
    assert!(output.starts_with("edge7 has joined"), "{output}");
    let file = place.file("invitation", &invited(&servers[0]).await).display().to_string();
    let output = join(&file, String::new(), "file").await.unwrap();
    assert!(!output.contains("can read an invitation"), "{output}");
    let output = join(&invited(&servers[0]).await, String::new(), "argument").await.unwrap();
    assert!(output.contains("other users of this machine can read an invitation"), "{output}");
    for (from, stdin, expected) in
        [("-", "guess", "stdin: not an invitation"), ("/none", "", "cannot read /none")]
    {
        let refused = join(from, stdin.to_owned(), "none").await.unwrap_err();
        assert!(refused.code == 64 && refused.text.contains(expected), "{refused}");
    }
}

#[tokio::test]
async fn enrolled_nodes_are_listed_and_revoked() {
    let place = TestDir::new();
    let (server, path) = with_socket(&place);
    let run = |command| {
        let command_args = InvitationsArgs { command, socket: Some(path.clone()) };
        async move { invitations::manage(command_args, &Environment::default()).await }
    };
    let code = invited(&server).await;
    let list = || run(InvitationsCommand::List { output: Format::Text });
    let output = list().await.unwrap();
    assert!(output.contains("edge7") && output.contains("no") && output.contains("left"), "{output}");
    join(server.server.bound.grpc, &code, &place.path().join("etc")).await.unwrap();
    let output = run(InvitationsCommand::List { output: Format::Json }).await.unwrap();
    assert_eq!(output.trim(), r#"[{"node":"edge7","joined":true}]"#);
    let revoke = || {
        run(InvitationsCommand::Revoke {
            node: "edge7".parse().ok(),
            user: None,
            device: None,
            key: None,
            with_nodes: false,
        })
    };
    let output = revoke().await.unwrap();
    assert!(output.contains("tunnel invite --node edge7"), "{output}");
    let none = revoke().await.unwrap_err();
    assert!(none.code == 77 && none.text.contains("has not joined by an invitation"), "{none}");
    assert!(!list().await.unwrap().contains("edge7"));
}

#[tokio::test]
async fn a_revoked_node_joins_again_after_the_commands_that_revoke_prints() {
    let place = TestDir::new();
    let (server, path) = with_socket(&place);
    let (at, to) = (server.server.bound.grpc, place.path().join("etc"));
    for _ in 0..2 {
        join(at, &invited(&server).await, &to).await.unwrap();
        let command = InvitationsCommand::Revoke {
            node: "edge7".parse().ok(),
            user: None,
            device: None,
            key: None,
            with_nodes: false,
        };
        let command_args = InvitationsArgs { command, socket: Some(path.clone()) };
        let output = invitations::manage(command_args, &Environment::default()).await.unwrap();
        let clean_up = output.lines().find(|line| line.contains("cd /etc/tunnel")).unwrap();
        let clean_up = clean_up.replace("/etc/tunnel", to.to_str().unwrap());
        let ended = std::process::Command::new("sh").args(["-ec", &clean_up]).status().unwrap();
        assert!(ended.success(), "{clean_up}");
    }
    join(at, &invited(&server).await, &to).await.unwrap();
    let _edge = start_edge(&settings(&to));
    server.wait_for_node("edge7").await;
}

#[tokio::test]
async fn each_command_that_creates_a_node_reports_a_name_that_tls_rejects() {
    let place = TestDir::new();
    let (server, socket) = with_socket(&place);
    for (node, is_rejected) in [("worker-7.9", true), (&"x".repeat(64), true), ("edge7", false)] {
        let line = ["tunnel", "invite", "--node", node, "--socket", socket.to_str().unwrap()];
        let Command::Invite(command_args) = Args::parse_from(line).command else { panic!("{line:?}") };
        let invited = invitations::invite(command_args, &Environment::default()).await.unwrap();
        let code = invited.split_once("echo ").unwrap().1.split(' ').next().unwrap();
        let joined = join(server.server.bound.grpc, code, &place.path().join(node)).await.unwrap();
        let file = Some(place.file("tokens", &format!("{node}:{TOKEN}\n")));
        let listed = token::run(&TokenCommand::List { file, output: Format::Text }).unwrap();
        for output in [invited, joined, listed] {
            let note = format!("note: {node} is no valid server name for TLS");
            assert_eq!(output.contains(&note), is_rejected, "{output}");
        }
    }
}

#[tokio::test]
async fn a_second_use_and_another_name_are_refused_and_leave_no_files() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let code = invited(&servers[0]).await;
    let [to, second] = ["etc", "second"].map(|name| place.path().join(name));
    let other =
        join(servers[1].server.bound.grpc, &code.replace(".edge7", ".edge8"), &second).await.unwrap_err();
    assert!(other.code == 77 && other.text.contains("is for another node"), "{other}");
    join(servers[0].server.bound.grpc, &code, &to).await.unwrap();
    let again = join(servers[1].server.bound.grpc, &code, &second).await.unwrap_err();
    assert!(again.code == 77 && again.text.contains("has been used already"), "{again}");
    assert!(!second.exists());
    let over = join(servers[1].server.bound.grpc, &code, &to).await.unwrap_err();
    assert!(over.code == 73 && over.text.contains("nothing is overwritten"), "{over}");
    assert_eq!(servers[1].server.metrics.links_rejected.counted("invitation"), 2);
}

#[tokio::test]
async fn a_join_with_a_wrong_clock_names_the_clock_and_is_not_repeated() {
    for [from, to] in [[2000, 2001], [2190, 2191]] {
        let place = TestDir::new();
        certify(&place, |params| {
            params.not_before = date_time_ymd(from, 1, 1);
            params.not_after = date_time_ymd(to, 1, 1);
        });
        let servers = cloud(&place, 1);
        let code = invited(&servers[0]).await;
        let etc = place.path().join("etc");
        let began = Instant::now();
        let refused = join(servers[0].server.bound.grpc, &code, &etc).await.unwrap_err();
        // Less than the pauses between attempts.
        assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
        let ends =
            "; set this machine's clock if it is wrong, or ask the server's operator for another certificate";
        assert!(
            refused.text.contains("; the time on this machine is ") && refused.text.ends_with(ends),
            "{refused}"
        );
        assert!(!etc.exists());
    }
}

#[tokio::test]
async fn a_join_without_its_response_is_repeated_with_the_same_token() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let code = invited(&servers[0]).await;
    let to = place.path().join("etc");
    // The state after the server has admitted the machine and died: the token is there, but no CA.
    let token = "a".repeat(64);
    std::fs::create_dir_all(to.join(".unfinished/token")).unwrap();
    std::fs::write(to.join(".unfinished/token/token"), format!("{token}\n")).unwrap();
    let secret = code.parse::<InvitationCode>().unwrap().secret();
    join_at(&servers[0], &secret, "edge7", &token).await.unwrap();
    join(servers[1].server.bound.grpc, &code, &to).await.unwrap();
    assert_eq!(std::fs::read_to_string(to.join("token/token")).unwrap(), format!("{token}\n"));
    let _edge = start_edge(&settings(&to));
    servers[1].wait_for_node("edge7").await;
}

#[tokio::test]
async fn a_join_that_is_refused_after_one_without_an_answer_keeps_its_token() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let (code, store) = (invited(&servers[0]).await, place.path().join("enrolled"));
    // The server knows the invitation, and cannot write that it was used.
    std::fs::remove_file(&store).unwrap();
    std::fs::create_dir(&store).unwrap();
    let to = place.path().join("etc");
    let joining = join(servers[0].server.bound.grpc, &code, &to);
    let rejected = || servers[0].server.metrics.links_rejected.counted("invitation");
    let returning = async {
        wait_until("it was sent", || rejected() > 0).await;
        std::fs::remove_dir(&store).unwrap();
        place.file("enrolled", r#"{"invitations":{},"tokens":{"other":"x"}}"#);
    };
    let (refused, ()) = tokio::join!(joining, returning);
    let refused = refused.unwrap_err();
    assert!(refused.code == 77 && refused.text.contains("run the same command again"), "{refused}");
    assert!(to.join(".unfinished/token/token").exists(), "another server may have granted it");
}

#[tokio::test]
async fn join_sends_no_code_to_another_cloud_and_reports_a_server_without_invitations() {
    let (place, theirs) = (TestDir::new(), TestDir::new());
    let (ours, others) = (cloud(&place, 1), cloud(&theirs, 1));
    let code = invited(&ours[0]).await;
    let to = place.path().join("etc");
    let output = join(others[0].server.bound.grpc, &code, &to).await.unwrap_err();
    assert!(
        output.code == 69 && output.text.contains("does not belong to the cloud of this invitation"),
        "{output}"
    );
    assert_eq!(others[0].server.metrics.links_rejected.counted("invitation"), 0, "the code was not sent");
    let closed = TestServer::start(&place);
    let output = join(closed.server.bound.grpc, &code, &to).await.unwrap_err();
    assert!(output.text.contains("takes no invitations"), "{output}");
    assert!(!to.exists());
}

#[tokio::test]
async fn a_name_that_is_not_in_the_certificate_is_reported_with_a_hint() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let to = place.path().join("etc");
    let mut args = line(servers[0].server.bound.grpc, &invited(&servers[0]).await, &to);
    args.tls_server_name = None;
    let output = join::run(&args, &Environment::default(), std::io::empty()).await.unwrap_err();
    assert!(
        output.code == 69 && output.text.contains("set --tls-server-name to a name in the certificate"),
        "{output}"
    );
    assert!(!to.exists());
}

#[tokio::test]
async fn a_node_that_joins_again_keeps_its_sessions_and_its_token_until_the_new_one_has_linked() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let servers = cloud(&place, 2);
    let at_server = servers[0].server.bound.grpc;
    let [to, again] = ["etc", "again"].map(|name| place.path().join(name));
    join(at_server, &invited(&servers[0]).await, &to).await.unwrap();
    let edge = start_edge(&settings(&to));
    let first = servers[0].wait_for_node("edge7").await.link.id;
    let mut client = servers[1].open(&at("edge7", echo)).await;
    assert_echo(&mut client, "before").await;
    join(at_server, &invited(&servers[1]).await, &again).await.unwrap();
    let store = servers[0].server.enrolment.get().unwrap();
    let node = "edge7".parse().unwrap();
    let proves = |to: &Path| {
        let token = std::fs::read_to_string(to.join("token/token")).unwrap();
        store.known().proves(&node, token.trim())
    };
    pause_time();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!([proves(&to), proves(&again)], [Some(true); 2]);
    assert_eq!(servers[0].link("edge7").map(|linked| linked.link.id), Some(first));
    let old = place.path().join("old");
    std::fs::create_dir(&old).unwrap();
    std::fs::create_dir(old.join("token")).unwrap();
    std::fs::copy(to.join("token/token"), old.join("token/token")).unwrap();
    std::fs::copy(again.join("token/token"), to.join("token/token")).unwrap();
    let is_ended = || proves(&old) == Some(false);
    wait_within(Duration::from_secs(60), "the new token has linked", is_ended).await;
    assert_echo(&mut client, "after").await;
    assert_eq!(proves(&to), Some(true));
    assert_eq!(edge.metrics.resets.counted("not_allowed"), 0);
}

#[tokio::test]
async fn a_first_store_of_invitations_needs_no_restart() {
    let place = TestDir::new();
    place.file("token", "other:0123456789\n");
    let socket = place.path().join("server.sock");
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display());
    let (server, config) = live::server(&place, &place.cloud(&admin));
    assert!(run(&socket, "invite --node edge7").await.unwrap_err().text.contains("server.invitations"));
    let store = place.path().join("enrolled");
    let store = format!("{admin}[server.invitations]\nstore = \"file\"\nfile = {store:?}\n");
    std::fs::write(&config, place.cloud(&store)).unwrap();
    let opened = async { while Box::pin(run(&socket, "invite --node edge7")).await.is_err() {} };
    live::reloaded(assert_eventually("an invitation", opened)).await;
    // Nodes join, link, and lose their link, as with a store from the start.
    let to = place.path().join("etc");
    join(server.server.bound.grpc, &invited(&server).await, &to).await.unwrap();
    let _edge = start_edge(&settings(&to));
    server.wait_for_node("edge7").await;
    run(&socket, "invitations revoke edge7").await.unwrap();
    wait_until("its link is closed", || server.link("edge7").is_none()).await;
}

#[tokio::test]
async fn a_revoked_node_loses_its_link_at_every_server() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let code = invited(&servers[0]).await;
    let to = place.path().join("etc");
    join(servers[0].server.bound.grpc, &code, &to).await.unwrap();
    let _edge = start_edge(&settings(&to));
    servers[0].wait_for_node("edge7").await;
    let node = "edge7".parse().unwrap();
    assert!(servers[1].server.enrolment.get().unwrap().revoke(&node, "test").await.unwrap());
    pause_time();
    wait_within(Duration::from_secs(60), "its link is closed", || servers[0].link("edge7").is_none()).await;
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn devices_of_a_user_join_at_any_server_and_a_revoked_one_is_proven_at_none_within_ten_seconds() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let codes =
        [invited_user(&servers[0], "alice", HOUR).await, invited_user(&servers[1], "alice", HOUR).await];
    let at = servers[1].server.bound.grpc;
    let laptop = join_as_user(&place, at, &codes[0], "laptop").await.unwrap();
    let desk = join_as_user(&place, at, &codes[1], "desk").await.unwrap();
    let dir = place.path().join("laptop/tunnel");
    for (path, mode) in [("", 0o700), ("client.toml", 0o600), ("ca.crt", 0o600)] {
        let found = std::fs::metadata(dir.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{path}");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2, "nothing else is left");
    assert_eq!(std::fs::read(dir.join("ca.crt")).unwrap(), std::fs::read(&place.files.ca).unwrap());
    assert_eq!(
        (laptop.servers[0].at.clone(), laptop.servers.len(), laptop.device.as_str()),
        (at.to_string().parse().unwrap(), 2, "laptop")
    );
    let UserCredentials::Token(user, token) = &laptop.proof else { panic!("{laptop:?}") };
    assert_eq!((user.as_str(), token.load()[0].reveal().len()), ("alice", 64));
    assert!(std::fs::read_to_string(place.path().join("enrolled")).unwrap().contains("alice/laptop"));

    let first = servers[0].server.enrolment.get().unwrap();
    first.refresh().await.unwrap();
    for server in &servers {
        let proven =
            [("alice/laptop", &laptop), ("alice/desk", &desk), ("alice/desk", &laptop), ("bob/desk", &desk)];
        let proven = proven.map(|(client, links)| is_proven(server, client, links));
        assert_eq!(proven, [true, true, false, false]);
    }
    pause_time();
    let gone = async |client, links| {
        let is_gone = || !is_proven(&servers[1], client, links);
        wait_within(Duration::from_secs(10), "the other server has read it", is_gone).await;
    };
    assert!(first.revoke(&"alice/laptop".parse().unwrap(), "test").await.unwrap());
    gone("alice/laptop", &laptop).await;
    assert!(is_proven(&servers[1], "alice/desk", &desk), "only one device was revoked");
    assert!(first.revoke(&"alice/".parse().unwrap(), "test").await.unwrap());
    gone("alice/desk", &desk).await;
}

#[tokio::test]
async fn an_invitation_of_a_user_is_refused_with_its_reason_and_leaves_no_files() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let [first, second] = [0, 1].map(|n| servers[n].server.bound.grpc);
    let used = invited_user(&servers[0], "alice", HOUR).await;
    join_as_user(&place, first, &used, "laptop").await.unwrap();
    let open = invited_user(&servers[0], "alice", HOUR).await;
    let expired = invited_user(&servers[0], "alice", Duration::ZERO).await;
    let pin = open.parse::<InvitationCode>().unwrap().pin();
    let guess = InvitationCode::random(pin, "alice/".parse().unwrap()).to_string();
    let node = invited(&servers[0]).await;
    for (code, expected) in [
        (used, "has been used already"),
        (expired, "has expired"),
        (guess, "there is no such invitation"),
        (open.replace(".alice/", ".bob/"), "is for another node or user"),
        (node.replace(".edge7", ".edge7/"), "is for another node or user"),
    ] {
        let refused = join_as_user(&place, second, &code, "other").await.unwrap_err();
        assert!(refused.code == 77 && refused.text.contains(expected), "{refused}");
        assert!(!place.path().join("other/tunnel").exists(), "{expected}");
    }
    // A second machine of that name: the invitation stays valid.
    let secret = open.parse::<InvitationCode>().unwrap().secret();
    let refused = join_at(&servers[1], &secret, "alice/laptop", &"b".repeat(64)).await.unwrap_err();
    assert!(refused.to_string().contains("has a device of this name; set another --device"), "{refused}");
    // The other kind of join.
    let refused = join(second, &open, &place.path().join("etc")).await.unwrap_err();
    assert!(refused.code == 64 && refused.text.contains("it is for user alice"), "{refused}");
    let refused = join_as_user(&place, second, &node, "other").await.unwrap_err();
    assert!(refused.code == 64 && refused.text.contains("the invitation is for node edge7"), "{refused}");
    let as_node =
        join(second, &open.replace(".alice/", ".alice"), &place.path().join("etc")).await.unwrap_err();
    assert!(as_node.code == 77 && as_node.text.contains("is for another node or user"), "{as_node}");
    assert!(!place.path().join("etc").exists());

    let theirs = place.path().join("other/tunnel");
    std::fs::create_dir_all(&theirs).unwrap();
    std::fs::write(theirs.join("client.toml"), "server = \"a:1\"\n").unwrap();
    let kept = join_as_user(&place, second, &open, "other").await.unwrap_err();
    assert!(kept.code == 73 && kept.text.contains("nothing is overwritten"), "{kept}");
    std::fs::remove_dir_all(&theirs).unwrap();
    join_as_user(&place, second, &open, "other").await.unwrap();
}

#[tokio::test]
async fn a_users_join_without_its_response_is_repeated_with_the_same_token() {
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let code = invited_user(&servers[0], "alice", HOUR).await;
    // The state after the server has admitted the device and died: the token is there, but no CA.
    let unfinished = place.path().join("laptop/tunnel/.unfinished");
    std::fs::create_dir_all(&unfinished).unwrap();
    let token = "a".repeat(64);
    std::fs::write(unfinished.join("client.toml"), format!("token = \"{token}\"\n")).unwrap();
    let secret = code.parse::<InvitationCode>().unwrap().secret();
    join_at(&servers[0], &secret, "alice/laptop", &token).await.unwrap();
    let links = join_as_user(&place, servers[1].server.bound.grpc, &code, "laptop").await.unwrap();
    assert!(is_proven(&servers[1], "alice/laptop", &links));
}

#[tokio::test]
async fn a_user_is_invited_listed_and_revoked_by_one_command_each() {
    let place = TestDir::new();
    let (server, path) = with_socket(&place);
    let run = async |line| run(&path, line).await;
    let output = run("invite --user alice --nodes edge-*,edge7 --ports 22,443 --expires 2h").await.unwrap();
    assert!(output.contains("on a machine of alice, within 2 h"), "{output}");
    assert!(output.contains(" edge-* edge7 ") && output.contains("tunnel grants revoke "), "{output}");
    let command = output.lines().find(|line| line.contains("echo ")).unwrap();
    let (code, join) = command.trim().strip_prefix("echo ").unwrap().split_once(" | ").unwrap();
    assert!(join.starts_with("tunnel join --user ") && join.ends_with(" --invitation -"), "{join}");
    let output = run("invite --user alice").await.unwrap();
    assert!(output.contains("The invitation grants nothing"), "{output}");
    let output = run("invite --user carol --nodes edge7 -o json").await.unwrap();
    let made: serde_json::Value = serde_json::from_str(&output).unwrap();
    let revoke = format!("grants revoke {}", made["grant"].as_str().unwrap());
    assert_eq!(run(&revoke).await.unwrap(), "grants revoked: 1");
    assert!(made["code"].is_string() && run("invitations revoke --user carol").await.is_ok(), "{made}");
    assert_eq!(run("grants").await.unwrap().lines().count(), 2, "the first one gave a grant");
    join_as_user(&place, server.server.bound.grpc, code, "laptop").await.unwrap();

    let output = run("invitations list").await.unwrap();
    let rows: Vec<_> = output.lines().skip_while(|line| !line.starts_with("USER")).collect();
    assert!(rows[1].starts_with("alice  -       ") && rows[1].contains(" left "), "{output}");
    assert!(rows[2].starts_with("alice  laptop  -  ") && rows[2].ends_with(" left"), "{output}");
    let output = run("invitations list -o json").await.unwrap();
    assert!(output.contains(r#"{"user":"alice","device":"laptop","joined":true,"ends":"#), "{output}");
    let no_node = run("invitations revoke alice").await.unwrap_err();
    assert!(no_node.text.contains("; alice is a user: set --user alice"), "{no_node}");
    let output = run("invitations revoke --user alice --device laptop").await.unwrap();
    assert!(output.contains("tunnel invite --user alice") && output.contains("client.toml"), "{output}");
    assert!(
        output.contains("open invitations for alice remain, if there are any (tunnel invitations list)"),
        "{output}"
    );
    assert!(run("invitations list").await.unwrap().contains("left"), "the open invitation stays");
    let output = run("invitations revoke --user alice").await.unwrap();
    assert!(output.contains("config that name alice remain, if there are any"), "{output}");
    let none = run("invitations revoke --user alice").await.unwrap_err();
    assert!(none.code == 77 && none.text.contains("alice has not joined by an invitation"), "{none}");
    assert_eq!(run("invitations list -o json").await.unwrap().trim(), "[]");
}

#[tokio::test]
async fn a_join_that_is_repeated_has_one_line_a_minute() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let store = place.path().join("enrolled");
    let server =
        TestServer::with(&place, &format!("[server.invitations]\nstore = \"file\"\nfile = {store:?}\n"));
    let enrolment = server.server.enrolment.get().unwrap();
    let hour = Duration::from_secs(3600);
    let code = enrolment.invite(&"node1".parse().unwrap(), None, hour, false, "test").await.unwrap().code;
    for _ in 0..30 {
        join_at(&server, &code.secret(), "node1", &"TOKEN".repeat(8)).await.unwrap();
    }
    let counts = ["node joined by invitation", "join request repeated"].map(|line| lines.count(line));
    assert_eq!(counts, [1, 1], "{}", lines.text());
}

#[tokio::test]
async fn a_store_that_cannot_be_written_is_reported_until_a_write_works() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let server = cloud(&place, 1).remove(0);
    let (at, log, code) = (server.server.bound.grpc, server.server.bound.log, invited(&server).await);
    let (lock, to) = (place.path().join("enrolled.lock"), place.path().join("etc"));
    std::fs::create_dir(&lock).unwrap();
    pause_time();
    let refused = join(at, &code, &to).await.unwrap_err();
    assert!(refused.text.contains("cannot check invitations now; see its log"), "{refused}");
    let text = lines.text();
    let line = text.lines().find(|line| line.contains("join rejected")).unwrap();
    assert!(line.contains("enrolled.lock: Is a directory") && !line.contains("see its log"), "{line}");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let ready = get(log, "/readyz").await;
    assert!(ready.status == 200 && ready.body.contains("enrolled.lock: Is a directory"), "{ready:?}");
    std::fs::remove_dir(&lock).unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let ready = get(log, "/readyz").await;
    assert!(!ready.body.contains("enrolled.lock"), "{ready:?}");
    join(at, &code, &to).await.unwrap();
}

#[tokio::test]
async fn a_machine_that_joins_at_a_wrong_port_learns_the_right_one() {
    let place = TestDir::new();
    let server = cloud(&place, 1).remove(0);
    let code = invited(&server).await;
    pause_time();
    let refused = join(targets::closed_port().await, &code, &place.path().join("etc")).await.unwrap_err();
    let hint = "check that the server runs, and that SERVER:PORT has the port of its server.links.listen (default 9000)";
    assert!(refused.text.contains(hint), "{refused}");
}
