//! Listeners follow the config while a server runs.

use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tunnel::command::Format;
use tunnel::command::config::{ConfigFileArgs, diff};
use tunnel::config::Environment;
use tunnel::config::config_watch::ConfigFile;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_base::drain::Drained;
use tunnel_net::reload::reload_now;

use crate::addresses::own_address;
use crate::support::clients::{ESTABLISHED, assert_echo, assert_reset, get, head, open, send_request};
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::{assert_eventually, servers, targets, wait_until};
use crate::words::LogLines;

/// A server that follows its config.
struct Followed<'p> {
    place: &'p TestDir,
    file: PathBuf,
    server: TestServer,
}

impl<'p> Followed<'p> {
    fn start(place: &'p TestDir, more: &str) -> Self {
        Self::start_in(place, more, Environment::default())
    }

    fn start_in(place: &'p TestDir, more: &str, environment: Environment) -> Self {
        let text = place.cloud(more);
        let file = place.file("cloud.toml", &text);
        let server = Server::start(ServerConfig::read(&text, &environment).unwrap().0, None).unwrap();
        server.watch_config(ConfigFile { path: file.clone(), text, environment, copy: None });
        Self { place, file, server: TestServer::from(server) }
    }

    /// Writes the config with `more`, and waits until a line with `outcome` is logged once more.
    async fn reload(&self, lines: &LogLines, more: &str, outcome: &str) {
        let before = lines.count(outcome);
        std::fs::write(&self.file, self.place.cloud(more)).unwrap();
        self.retry(lines, outcome, before).await;
    }

    async fn retry(&self, lines: &LogLines, outcome: &str, before: usize) {
        let is_logged = || {
            reload_now();
            lines.count(outcome) > before
        };
        wait_until(outcome, is_logged).await;
    }
}

/// The outcome of a reload that opened or closed a listener.
const RELOADED: &str = "listeners reloaded";
/// The outcome of a reload with a listener that cannot open.
const REJECTED: &str = "config change applied in part";

fn free_address() -> SocketAddr {
    servers::addresses(1)[0]
}

fn tcp(at: SocketAddr, target: SocketAddr, more: &str) -> String {
    format!("[server.tcp.\"{at}\"]\ntarget = \"node1/{target}\"\n{more}\n")
}

async fn connect(at: SocketAddr) -> TcpStream {
    TcpStream::connect(at).await.unwrap()
}

async fn is_closed(at: SocketAddr) -> bool {
    TcpStream::connect(at).await.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

#[tokio::test]
async fn a_reload_opens_a_listener_and_opens_it_again_without_ending_its_sessions() {
    let (place, echo, port) = (TestDir::new(), targets::echo().await, free_address());
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, "");
    let _edge = edge(&place, &followed.server, "node1").await;
    let mut stays = followed.server.open(&at("node1", echo)).await;
    assert!(is_closed(port).await);

    followed.reload(&lines, &tcp(port, echo, ""), RELOADED).await;
    let mut client = connect(port).await;
    assert_echo(&mut client, "through the new port").await;
    assert_eq!(lines.count(&format!("keys=\"server.tcp.\\\"{port}\\\"\"")), 1, "{}", lines.text());

    followed.reload(&lines, &tcp(port, echo, "send_proxy = true"), RELOADED).await;
    assert!(!is_closed(port).await);
    assert_eq!(lines.count("listener closed"), 1);
    assert_echo(&mut client, "its session goes on").await;
    assert_echo(&mut stays, "so does that of an unchanged listener").await;
    assert_eq!(lines.count("restart to apply"), 0);

    // The stop still waits for the session.
    let TestServer { server, .. } = followed.server;
    let echoed = async {
        assert_echo(&mut client, "while the server drains").await;
        drop((client, stays));
    };
    let (drained, ()) = tokio::join!(server.shutdown(std::future::pending()), echoed);
    assert_eq!(drained, Drained::Finished);
}

#[tokio::test]
async fn a_change_that_waits_for_a_restart_is_reported_until_it_is_taken_back() {
    let place = TestDir::new();
    let (lines, _guard) = LogLines::start();
    let socket = place.path().join("admin.sock");
    let admin = format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display());
    let followed = Followed::start(&place, &admin);
    let change = format!("{admin}[server.session]\nmax_sessions = 7\n");
    followed.reload(&lines, &change, "restart to apply").await;
    let waits = |expected| {
        let at = followed.server.server.bound.log;
        let waiting = "restart: needed to apply changes of server.session\n";
        async move { while get(at, "/readyz").await.body.contains(waiting) != expected {} }
    };
    assert_eventually("the condition", waits(true)).await;
    let plan = async || {
        let file = ConfigFileArgs { file: Some(followed.file.clone()), kubeconfig: None };
        diff(&file.read().unwrap(), None, &Environment::default(), Format::Text).await.unwrap()
    };
    assert!(plan().await.ends_with("\nrestart: changes server.session\n"), "it still waits");
    std::fs::write(&followed.file, place.cloud(&admin)).unwrap();
    reload_now();
    assert_eventually("no condition", waits(false)).await;
    assert!(plan().await.starts_with("no change compared with the running server"));
}

/// What a table does that can be seen from outside.
enum Effect {
    /// A client reaches this target.
    Reaches(String),
    /// This file has a node's name.
    Publishes(PathBuf),
    /// `/readyz` has a condition of this name, because kube-apiserver does not answer.
    AsksKubernetes(&'static str),
}

impl Effect {
    async fn is_seen(&self, server: &TestServer) -> bool {
        match self {
            Self::Reaches(target) => {
                let mut client = connect(server.connect).await;
                let request = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
                client.write_all(request.as_bytes()).await.unwrap();
                head(&mut client).await == ESTABLISHED
            }
            Self::Publishes(file) => std::fs::read_to_string(file).is_ok_and(|text| text.contains("node1")),
            Self::AsksKubernetes(condition) => {
                get(server.server.bound.log, "/readyz").await.body.contains(&format!("{condition}: "))
            }
        }
    }
}

#[tokio::test]
async fn each_first_table_takes_effect_without_a_restart_and_each_removed_one_ends() {
    let place = TestDir::new();
    let near = targets::echo().await;
    let (lines, _guard) = LogLines::start();
    let own = targets::serve_at(&format!("{}:0", own_address()), targets::echo_one).await;
    let dir = place.path().display();
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", free_address())}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "edge-system"}}],
    });
    let environment = Environment {
        pod_ip: Some("127.0.0.1".to_owned()),
        kubeconfig: Some(place.file("kubeconfig", &kubeconfig.to_string())),
        ..Environment::default()
    };
    let admin = format!("[server.admin]\nlisten = \"unix:{dir}/admin.sock\"\n");
    let followed = Followed::start_in(&place, &admin, environment.clone());
    let other = TestServer::start(&place);
    let _edges = [edge(&place, &followed.server, "node1").await, edge(&place, &other, "node2").await];
    let plan = async |text: &str| {
        let file = ConfigFileArgs { file: Some(place.file("new.toml", text)), kubeconfig: None };
        diff(&file.read().unwrap(), None, &environment, Format::Text).await.unwrap()
    };
    let hosts = place.path().join("hosts");
    for (key, more, effect) in [
        ("peers", servers::peers(&[other.server.bound.grpc]), Effect::Reaches(at("node2", near))),
        (
            "addresses",
            format!("nodes = {{ \"{}\" = \"node1\" }}", own.ip()),
            Effect::Reaches(own.to_string()),
        ),
        ("dns", "zone = \"nodes.test\"".to_owned(), Effect::Reaches(at("node1.nodes.test", near))),
        (
            "dns",
            format!("zone = \"nodes.test\"\npublish = \"hosts\"\nhosts_file = \"{}\"", hosts.display()),
            Effect::Publishes(hosts),
        ),
        ("node_names", String::new(), Effect::AsksKubernetes("node_names")),
        ("node_ports", String::new(), Effect::AsksKubernetes("node_ports")),
        ("service_account", "name = \"edge\"".to_owned(), Effect::AsksKubernetes("pods of edges")),
        (
            "csr",
            format!("profiles = [\"proxy-client\"]\ndir = \"{dir}/pki\""),
            Effect::AsksKubernetes("proxy_client_certificate"),
        ),
    ] {
        let table = format!("[server.{key}]\n{}", more.trim_start_matches("[server.peers]\n"));
        assert!(!effect.is_seen(&followed.server).await, "{table}");
        for (more, step, is_in_effect) in [(table.as_str(), "opens", true), ("", "closes", false)] {
            let more = format!("{admin}{more}");
            let planned = plan(&place.cloud(&more)).await;
            assert!(planned.contains(&format!("reload: {step} server.{key}\n")), "{table}: {planned}");
            followed.reload(&lines, &more, "tables reloaded").await;
            let seen = async {
                while effect.is_seen(&followed.server).await != is_in_effect {
                    tokio::task::yield_now().await;
                }
            };
            assert_eventually(&format!("{step} {table}"), seen).await;
        }
        assert_eq!(get(followed.server.server.bound.log, "/readyz").await.body, "ok\n", "{table}");
    }
    assert_eq!(lines.count("restart to apply"), 0, "{}", lines.text());
}

#[tokio::test]
async fn sessions_of_a_closed_listener_lose_the_rights_that_its_table_takes_away() {
    let (place, echo, port) = (TestDir::new(), targets::echo().await, free_address());
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, &tcp(port, echo, "rules = [{ nodes = [\"node1\"] }]"));
    let _edge = edge(&place, &followed.server, "node1").await;
    let mut client = connect(port).await;
    assert_echo(&mut client, "allowed").await;
    // Closed and opened again, with other rules.
    followed.reload(&lines, &tcp(port, echo, "send_proxy = true\nrules = [{ ports = [1] }]"), RELOADED).await;
    assert_reset(&mut client).await;
    assert_reset(&mut connect(port).await).await;
    assert_eq!(followed.server.server.metrics.sessions.closed("tcp", "forbidden"), 1);
}

#[tokio::test]
async fn a_listener_with_another_target_or_address_opens_again_at_the_same_port() {
    let (place, echo, source) = (TestDir::new(), targets::echo().await, targets::source(7).await);
    let port = free_address();
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, &tcp(port, echo, ""));
    let _edge = edge(&place, &followed.server, "node1").await;
    let mut client = connect(port).await;
    assert_echo(&mut client, "before").await;

    followed.reload(&lines, &tcp(port, source, ""), RELOADED).await;
    let mut bytes = Vec::new();
    assert_eventually("the bytes", connect(port).await.read_to_end(&mut bytes)).await.unwrap();
    assert_eq!(bytes, targets::pattern(7));
    // The old address has to close before this one can open.
    let everywhere = SocketAddr::from(([0, 0, 0, 0], port.port()));
    assert_echo(&mut client, "its target stays").await;
    followed.reload(&lines, &tcp(everywhere, echo, ""), RELOADED).await;
    assert_echo(&mut connect(([127, 0, 0, 9], port.port()).into()).await, "at another address").await;
    assert_reset(&mut client).await;
}

#[tokio::test]
async fn an_address_in_use_keeps_its_listener_where_it_was_until_a_reload_finds_it_free() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let [old, taken, other] = [(); 3].map(|()| free_address());
    let proxy =
        |at: SocketAddr| format!("[server.http_proxy]\nlisten = \"{at}\"\nallow_from = [\"127.0.0.0/8\"]\n");
    let holder = std::net::TcpListener::bind(taken).unwrap();
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, &proxy(old));
    let _edge = edge(&place, &followed.server, "node1").await;
    let mut client = open(old, &at("node1", echo)).await;

    let more = proxy(taken) + &tcp(other, echo, "allow_from = [\"127.0.0.0/8\"]");
    let fenced = format!("allow_from = [\"10.0.0.0/8\"]\n{more}");
    followed.reload(&lines, &fenced, REJECTED).await;
    let line = lines.text().lines().find(|line| line.contains(REJECTED)).unwrap().to_owned();
    for part in [
        "key=server.http_proxy.listen".to_owned(),
        format!("cannot listen on {taken}"),
        "stop the program".into(),
    ] {
        assert!(line.contains(&part), "{part}: {line}");
    }
    assert_echo(&mut connect(other).await, "the other listener is open").await;
    let denied = followed.server.request_connect(&at("node1", echo)).await;
    assert_eq!(denied.phrase, "your address 127.0.0.1 is not allowed here", "the rules apply");
    // Other tests request reloads as well, and each closes it for a moment.
    wait_until("the port that had to close is open again", || std::net::TcpStream::connect(old).is_ok())
        .await;
    assert_echo(&mut client, "and its session goes on").await;
    let log = followed.server.server.bound.log;
    let page = get(log, "/readyz").await;
    assert!(page.status == 200 && page.body.contains("listeners: server.http_proxy.listen"), "{page:?}");

    drop(holder);
    followed.retry(&lines, "keys=\"server.http_proxy\"", 0).await;
    assert_echo(&mut open(taken, &at("node1", echo)).await, "open now").await;
    assert!(is_closed(old).await);
    assert_echo(&mut client, "and its session goes on").await;
    assert_eq!(get(log, "/readyz").await.body, "ok\n");
}

#[tokio::test]
async fn a_port_that_the_server_itself_uses_is_an_error_with_both_keys() {
    let (place, echo, port) = (TestDir::new(), targets::echo().await, free_address());
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, &tcp(port, echo, ""));
    let proxy = format!("[server.http_proxy]\nlisten = \"0.0.0.0:{}\"\n", port.port());
    followed.reload(&lines, &(tcp(port, echo, "") + &proxy), REJECTED).await;
    let error = format!("0.0.0.0:{}: server.tcp.\"{port}\" uses the same port", port.port());
    assert!(lines.count(&format!("key=server.http_proxy.listen error={error}")) > 0, "{}", lines.text());
    // Back to the old config, of which nothing has changed.
    std::fs::write(&followed.file, place.cloud(&tcp(port, echo, ""))).unwrap();
    let log = followed.server.server.bound.log;
    let cleared = async {
        while get(log, "/readyz").await.body != "ok\n" {
            reload_now();
        }
    };
    assert_eventually("the error is gone", cleared).await;
    assert_eq!((lines.count(RELOADED), lines.count("listener closed")), (0, 0));
}

#[tokio::test]
async fn listeners_of_each_kind_open_and_close_with_the_config() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, "");
    let _edge = edge(&place, &followed.server, "node1").await;
    let (dir, port) = (place.path().display().to_string(), free_address());
    let tls = format!("cert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"");
    let node_port = format!(
        "ports = {{ \"{}\" = \"127.0.0.1:{}\" }}\nlisten_ip = \"{}\"",
        port.port(),
        echo.port(),
        port.ip()
    );
    for table in [
        format!("[server.http_proxy]\nlisten = \"{port}\""),
        format!("[server.http_proxy]\nlisten = \"{port}\"\n{tls}"),
        format!("[server.egress]\nlisten = \"{port}\"\n{tls}"),
        format!("[server.http]\n{node_port}"),
        format!("[server.https]\n{node_port}\n{tls}"),
        format!("[server.egress]\nlisten = \"unix:{dir}/egress.sock\""),
    ] {
        let is_open = async || {
            if table.contains("unix:") {
                place.path().join("egress.sock").exists()
            } else {
                !is_closed(port).await
            }
        };
        followed.reload(&lines, &table, RELOADED).await;
        assert!(is_open().await, "{table}");
        followed.reload(&lines, "", RELOADED).await;
        assert!(!is_open().await, "{table}");
    }
    // The CONNECT listener is one of them.
    let moved = place.cloud("").replace(
        "[server.connect]\nlisten = \"127.0.0.1:0\"",
        &format!("[server.connect]\nlisten = \"{port}\""),
    );
    std::fs::write(&followed.file, moved).unwrap();
    followed.retry(&lines, RELOADED, lines.count(RELOADED)).await;
    assert_echo(&mut open(port, &at("node1", echo)).await, "at the new address").await;
    assert!(is_closed(followed.server.connect).await);
}

/// A closed listener is not a stopping server.
#[tokio::test]
async fn a_request_whose_head_is_read_while_its_listener_opens_again_is_served() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let proxy = "[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n";
    let (lines, _guard) = LogLines::start();
    let followed = Followed::start(&place, proxy);
    let _edge = edge(&place, &followed.server, "node1").await;
    let request = format!("CONNECT {} HTTP/1.1\r\nHost: x\r\n\r\n", at("node1", echo));
    let (begin, end) = request.split_at(30);
    let mut clients = Vec::new();
    for port in [followed.server.connect, followed.server.port("http_proxy")] {
        // One has sent a part of its head, the other one nothing yet.
        for sent in [begin, ""] {
            let mut client = connect(port).await;
            client.write_all(sent.as_bytes()).await.unwrap();
            clients.push((client, if sent.is_empty() { &request } else { end }));
        }
    }
    // Connections that wait in the kernel are not accepted yet.
    for port in [followed.server.connect, followed.server.port("http_proxy")] {
        assert_eq!(send_request(port, "CONNECT x HTTP/1.1\r\n\r\n").await.status, 400);
    }
    followed.reload(&lines, &format!("proxy_protocol = [\"10.0.0.5\"]\n{proxy}"), RELOADED).await;
    assert_eq!(lines.count("listener closed"), 2, "{}", lines.text());
    for (client, rest) in &mut clients {
        client.write_all(rest.as_bytes()).await.unwrap();
        assert_eq!(head(client).await, ESTABLISHED);
        assert_echo(client, "served").await;
    }
}
