//! Machines that join by one key for many, at servers that share the invitations.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tunnel::command::CommandError;
use tunnel::command::join::{self, JoinArgs};
use tunnel::config::Environment;
use tunnel::enrolment::NewInvitation;
use tunnel_link::grpc::enrol::{EnrolCallError, EnrolOperation, JoinCredentials, call_enrol};
use tunnel_net::tls::{TlsClientConfig, Trust, server_name};

use crate::enrol::{cloud, configs, invited, line, run, settings, with_socket};
use crate::support::programs::{NAME, TestDir, TestServer, start_edge};
use crate::support::servers::KillableServer;
use crate::support::{pause_time, spawn, wait_until, wait_within};
use crate::words::LogLines;

/// Creates a key for nodes whose names begin with `shop-`.
async fn key(server: &TestServer, uses: u32, lasting: Duration) -> NewInvitation {
    key_for(server, "shop-*", uses, lasting).await
}

async fn key_for(server: &TestServer, pattern: &str, uses: u32, lasting: Duration) -> NewInvitation {
    let enrolment = server.server.enrolment.get().unwrap();
    enrolment.invite(&pattern.parse().unwrap(), Some(uses), lasting, false, "test").await.unwrap()
}

/// A machine that joins with a key.
#[derive(Clone)]
struct Machine {
    tls: TlsConnector,
    params: JoinCredentials,
}

impl Machine {
    fn new(tls: &TlsConnector, key: &NewInvitation, name: &str, token: &str) -> Self {
        let params = JoinCredentials { secret: key.code.secret(), name: name.into(), token: token.into() };
        Self { tls: tls.clone(), params }
    }

    /// Requests to join at one server.
    async fn join(&self, server: SocketAddr) -> Result<(), EnrolCallError> {
        let failed = |error: std::io::Error| EnrolCallError::Unanswered(error.to_string());
        let socket = TcpStream::connect(server).await.map_err(failed)?;
        let stream = self.tls.connect(server_name(NAME).unwrap(), socket).await.map_err(failed)?;
        call_enrol(Box::new(stream), NAME, EnrolOperation::Join(self.params.clone())).await.map(drop)
    }

    /// Requests to join at one server after the other, until one answers.
    async fn join_any(self, servers: Vec<SocketAddr>) -> Result<(), String> {
        for server in servers.iter().cycle().take(10) {
            match self.join(*server).await {
                Err(EnrolCallError::Unanswered(_)) => {}
                answered => return answered.map_err(|error| error.to_string()),
            }
        }
        Err("no server answers".into())
    }
}

/// Returns TLS that trusts the test's servers.
fn tls(place: &TestDir) -> TlsConnector {
    let trust = Trust::Ca(place.files.ca.clone());
    let config = TlsClientConfig { trust, identity: None, alpn: vec![b"h2".to_vec()] }.load().unwrap();
    TlsConnector::from(config.load())
}

fn token(number: usize) -> String {
    format!("{number:032x}")
}

/// Returns the number of nodes in the store.
fn joined(server: &TestServer) -> usize {
    server.server.enrolment.get().unwrap().known().joined().len()
}

const MACHINES: usize = 500;
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn five_hundred_machines_join_at_once_at_two_servers_of_which_one_is_killed() {
    let place = TestDir::new();
    let mut servers = Vec::new();
    for text in configs(&place, 2) {
        servers.push(KillableServer::start(text).await);
    }
    let [mut first, second] = <[_; 2]>::try_from(servers).ok().unwrap();
    let key = key(&first.server, u32::try_from(MACHINES).unwrap(), HOUR).await;
    let ats = [first.server.server.bound.grpc, second.server.server.bound.grpc];
    let tls = tls(&place);
    let machine = |number: usize| Machine::new(&tls, &key, &format!("shop-{number}"), &token(number));
    let joins: Vec<_> = (0..MACHINES)
        .map(|number| {
            let order = if number % 2 == 0 { ats } else { [ats[1], ats[0]] };
            spawn(machine(number).join_any(order.to_vec()))
        })
        .collect();
    wait_until("a part of them has joined", || joined(&first.server) > MACHINES / 10).await;
    first.kill();
    for join in joins {
        join.await.unwrap().unwrap();
    }
    let enrolment = second.server.server.enrolment.get().unwrap();
    enrolment.refresh().await.unwrap();
    let proves = |number| {
        let name = format!("shop-{number}").parse().unwrap();
        enrolment.known().proves(&name, &token(number)) == Some(true)
    };
    assert!((0..MACHINES).all(proves), "each has its own token");
    assert_eq!(joined(&second.server), MACHINES);

    machine(7).join(ats[1]).await.unwrap();
    let more = machine(MACHINES).join(ats[1]).await.unwrap_err();
    assert!(more.to_string().contains("admits 500 nodes, and as many have joined"), "{more}");
}

#[tokio::test]
async fn a_key_is_used_up_exactly_and_admits_one_of_two_machines_of_a_name() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let servers = cloud(&place, 2);
    let key = key(&servers[0], 8, HOUR).await;
    let (tls, ats) = (tls(&place), [0, 1].map(|n| servers[n].server.bound.grpc));
    // Two machines of each name, at different servers: for more names than the key admits.
    let joins: Vec<_> = (0..20)
        .map(|number| {
            let machine = Machine::new(&tls, &key, &format!("Shop-{}", number / 2), &token(number));
            spawn(machine.join_any(vec![ats[number % 2]]))
        })
        .collect();
    let mut outcomes = Vec::new();
    for join in joins {
        outcomes.push(join.await.unwrap());
    }
    let taken = |outcome: &&Result<(), String>| {
        outcome.as_ref().is_err_and(|why| why.contains("another machine is node shop-"))
    };
    let used_up = |outcome: &&Result<(), String>| {
        outcome.as_ref().is_err_and(|why| why.contains("admits 8 nodes, and as many have joined"))
    };
    let counts = [
        outcomes.iter().filter(|outcome| outcome.is_ok()).count(),
        outcomes.iter().filter(taken).count(),
        outcomes.iter().filter(used_up).count(),
    ];
    assert_eq!((counts[0], counts.iter().sum::<usize>()), (8, 20), "{outcomes:?}");
    assert!(outcomes.chunks(2).all(|two| !two.iter().all(Result::is_ok)), "{outcomes:?}");

    let id = key.key.unwrap();
    let text = lines.text();
    let audited = |message: &str| {
        let is = |line: &&str| line.contains("tunnel::audit") && line.contains(message) && line.contains(&id);
        text.lines().filter(is).count()
    };
    assert_eq!((audited("node joined by invitation"), audited("join rejected")), (8, 12), "{text}");
    assert!(!text.contains(&key.code.secret()) && !text.contains(&token(1)), "no secret is logged");
}

#[tokio::test]
async fn other_names_expired_keys_and_nodes_of_the_token_file_are_refused() {
    let place = TestDir::new();
    let config = configs(&place, 1).remove(0);
    place.file("token", "shop-9:0123456789\nweb-1:0123456789\n");
    let server = TestServer::from_text(&config);
    let [open, expired] = [key(&server, 9, HOUR).await, key(&server, 9, Duration::ZERO).await];
    let (tls, at) = (tls(&place), server.server.bound.grpc);
    for (key, name, expected) in [
        (&open, "web-1", "is for another node or user"),
        (&open, "shop-/laptop", "is for another node or user"),
        (&open, "shop-*", "not the name of a node"),
        (&open, "Shop-9", "another machine is node Shop-9"),
        (&expired, "shop-1", "has expired"),
        // Only a key that admits the name tells that the name has a line.
        (&expired, "shop-9", "has expired"),
    ] {
        let refused = Machine::new(&tls, key, name, &token(1)).join(at).await.unwrap_err();
        assert!(matches!(&refused, EnrolCallError::Refused(why) if why.contains(expected)), "{refused}");
    }
    assert_eq!(joined(&server), 0);
}

/// Runs `tunnel join` with a key and that `--node` and `NODE_NAME`. Installs into that folder.
async fn join(
    to: &Path,
    server: SocketAddr,
    code: &str,
    flag: Option<&str>,
    node_name: Option<&str>,
) -> Result<String, CommandError> {
    let mut join_args = line(server, code, to);
    join_args.node = flag.map(|node| node.parse().unwrap());
    let variable = |name: &str| node_name.filter(|_| name == "NODE_NAME").map(str::to_owned);
    join::run(&join_args, &Environment::read(variable), std::io::empty()).await
}

#[tokio::test]
async fn a_machine_is_named_by_its_flag_its_node_or_its_host_and_a_wrong_name_sends_nothing() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let at = servers[0].server.bound.grpc;
    let code = key(&servers[0], 9, HOUR).await.code.to_string();
    let to = |name: &str| place.path().join(name);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let of_host = format!("the host's name: {host} does not match the invitation, which is for shop-*");
    for (flag, node_name, expected) in [
        (None, None, of_host.as_str()),
        (None, Some(""), of_host.as_str()),
        (None, Some("web-1"), "NODE_NAME: web-1 does not match"),
        (None, Some("a b"), "NODE_NAME: \"a b\" is not a name"),
        (Some("web-1"), Some("shop-1"), "--node: web-1 does not match"),
    ] {
        let refused = join(&to("none"), at, &code, flag, node_name).await.unwrap_err();
        assert!(refused.code == 64 && refused.text.contains(expected), "{refused}");
    }
    assert!(!to("none").exists());
    assert_eq!(servers[0].server.metrics.links_rejected.counted("invitation"), 0);
    for (flag, node_name, node) in
        [(None, Some("shop-1"), "shop-1"), (Some("shop-2"), Some("shop-1"), "shop-2")]
    {
        join(&to(node), at, &code, flag, node_name).await.unwrap();
        let _edge = start_edge(&settings(&to(node)));
        servers[0].wait_for_node(node).await;
    }
    let any = key_for(&servers[0], "*", 1, HOUR).await.code.to_string();
    let output = join(&to("any"), at, &any, None, None).await.unwrap();
    assert!(output.starts_with(&format!("{host} has joined")), "{output}");
    let own = invited(&servers[0]).await;
    let refused = join(&to("own"), at, &own, Some("edge8"), None).await.unwrap_err();
    assert!(
        refused.text.contains("--node: edge8 does not match the invitation, which is for edge7"),
        "{refused}"
    );
}

/// As the pods of a DaemonSet, which join at each start.
#[tokio::test]
async fn a_machine_that_has_joined_needs_neither_key_nor_server_to_start_again() {
    let place = TestDir::new();
    let servers = cloud(&place, 1);
    let to = place.path().join("shop-1");
    let code = key(&servers[0], 1, HOUR).await.code.to_string();
    let mut join_args = line(servers[0].server.bound.grpc, &code, &to);
    join_args.node = Some("shop-1".parse().unwrap());
    join_args.unless_joined = true;
    let run = async |args: &JoinArgs| join::run(args, &Environment::default(), std::io::empty()).await;
    assert!(run(&join_args).await.unwrap().starts_with("shop-1 has joined"));
    let token = std::fs::read_to_string(to.join("token/token")).unwrap();

    drop(servers);
    join_args.invitation = "/in/a/secret/that/was/deleted".parse().unwrap();
    let output = run(&join_args).await.unwrap();
    assert!(output.ends_with("has the files of a node already\n"), "{output}");
    assert_eq!(std::fs::read_to_string(to.join("token/token")).unwrap(), token);
    std::fs::remove_dir_all(to.join("token")).unwrap();
    let refused = run(&join_args).await.unwrap_err();
    assert!(refused.text.contains("/in/a/secret/that/was/deleted"), "{refused}");
}

#[tokio::test]
async fn a_key_is_made_listed_and_revoked_by_one_command_each() {
    let place = TestDir::new();
    let (server, path) = with_socket(&place);
    let at = server.server.bound.grpc;
    let run = async |line: &str| run(&path, line).await;
    let output = run("invite --nodes shop-* --uses 500 --expires 30d").await.unwrap();
    assert!(
        output.contains("on each machine, within 30 d, as root") && output.contains("500 machines"),
        "{output}"
    );
    let output = run("invite --nodes shop-* --uses 2 --expires 30d -o json").await.unwrap();
    let made: serde_json::Value = serde_json::from_str(&output).unwrap();
    let (code, id) = (made["code"].as_str().unwrap(), made["key"].as_str().unwrap());
    for node in ["shop-1", "shop-2"] {
        join(&place.path().join(node), at, code, Some(node), None).await.unwrap();
    }
    let _edges = ["shop-1", "shop-2"].map(|node| start_edge(&settings(&place.path().join(node))));
    for (line, expected) in [
        ("invite --nodes shop-1 --uses 2", "--nodes: expected one pattern with '*'"),
        ("invite --nodes a-*,b-* --uses 2", "--nodes: expected one pattern with '*'"),
        ("invite --nodes shop-*", "--nodes: set --uses for a join key, or --user for a grant"),
        ("invite --node shop-1 --expires 8d", "--expires: at most 7d, unless it is for a join key"),
    ] {
        let refused = run(line).await.unwrap_err();
        assert!(refused.code == 64 && refused.text.contains(expected), "{refused}");
    }

    let output = run("invitations list").await.unwrap();
    let rows: Vec<Vec<_>> = output.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(rows.iter().any(|row| row.starts_with(&["shop-1", "yes", "-", id])), "{output}");
    assert!(rows.contains(&vec![id, "shop-*", "2", "0", "-"]), "{output}");
    let is_open =
        |row: &Vec<&str>| row.len() > 4 && row[1..4] == ["shop-*", "500", "500"] && row[5] == "left";
    let open = rows.iter().find(|row| is_open(row)).unwrap_or_else(|| panic!("{output}"))[0];
    let output = run("invitations list -o json").await.unwrap();
    assert!(output.contains(&format!(r#"{{"node":"shop-1","key":"{id}","joined":true"#)), "{output}");
    let listed = format!(r#"{{"key":"{id}","pattern":"shop-*","uses":2,"used":2,"joined":false}}"#);
    assert!(output.contains(&listed), "{output}");

    let output = run(&format!("invitations revoke --key {open}")).await.unwrap();
    assert!(output.contains("its nodes remain"), "{output}");
    let again = run(&format!("invitations revoke --key {open}")).await.unwrap_err();
    assert!(again.code == 77 && again.text.contains("no open join key has the ID"), "{again}");
    for node in ["shop-1", "shop-2"] {
        server.wait_for_node(node).await;
    }
    let output = run(&format!("invitations revoke --key {id} --with-nodes")).await.unwrap();
    assert!(output.contains("the links of its nodes close within 2 s"), "{output}");
    pause_time();
    let gone = || ["shop-1", "shop-2"].iter().all(|node| server.link(node).is_none());
    wait_within(Duration::from_secs(10), "the links of its nodes are closed", gone).await;
    assert_eq!(run("invitations list -o json").await.unwrap().trim(), "[]");
}
