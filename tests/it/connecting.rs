//! `tunnel connect` with a local port, through each kind of listener of a server.

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tunnel::command::connect::{self, ConnectArgs};
use tunnel::command::proxy::{self, ProxyArgs};
use tunnel::command::{CommandError, Format};
use tunnel::config::Environment;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

use crate::support::clients::{self, ESTABLISHED, assert_echo, assert_reset, reset, rest};
use crate::support::line::Line;
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::{Stopwatch, assert_eventually, pause_time, spawn, targets, users};

#[derive(Debug, Parser)]
struct CommandLine {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// A `tunnel connect` that listens on a port of this machine, and its output.
pub(crate) struct Local {
    at: SocketAddr,
    pub(crate) messages: mpsc::Receiver<String>,
    /// Each message is a signal.
    stop: mpsc::Sender<()>,
    ended: tokio::task::JoinHandle<Result<String, CommandError>>,
}

impl Local {
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| None).await
    }

    /// Like [`Self::start`], with these environment variables.
    pub(crate) async fn start_with(
        args: &[&str],
        variable: impl Fn(&str) -> Option<String> + Send + 'static,
    ) -> Self {
        let args = [&["connect", "--listen=0"], args].concat();
        let connect_args = CommandLine::try_parse_from(args).unwrap().connect;
        let (print, mut messages) = mpsc::channel(9);
        let (stop, mut stopped) = mpsc::channel(2);
        let ended = spawn(async move {
            let print = move |line: &str| print.try_send(line.to_owned()).unwrap();
            let signals = futures_util::stream::poll_fn(|cx| stopped.poll_recv(cx));
            connect::connect(&connect_args, variable, signals, print).await
        });
        let line = assert_eventually("the port", messages.recv()).await.unwrap();
        let at = line.split_whitespace().next().unwrap().parse().unwrap();
        Self { at, messages, stop, ended }
    }

    pub(crate) async fn client(&self) -> TcpStream {
        TcpStream::connect(self.at).await.unwrap()
    }

    /// Expects an echo, also of bytes before a half-close, and ends the command.
    pub(crate) async fn assert_half_close(self) {
        let mut client = self.client().await;
        assert_echo(&mut client, "hello").await;
        client.write_all(b"last").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, b"last");
        self.wait_for_end().await;
    }

    /// Opens a connection that is reset. Returns the message about it.
    pub(crate) async fn refusal(&mut self) -> String {
        assert_reset(&mut self.client().await).await;
        assert_eventually("the refusal", self.messages.recv()).await.unwrap()
    }

    /// Returns the next message, while the time of the test jumps.
    async fn message_within_an_hour(&mut self) -> String {
        tokio::time::timeout(Duration::from_secs(3600), self.messages.recv()).await.unwrap().unwrap()
    }

    pub(crate) async fn wait_for_end(self) {
        self.stop.send(()).await.unwrap();
        assert_eq!(assert_eventually("the end of the command", self.ended).await.unwrap(), Ok(String::new()));
    }
}

#[tokio::test]
async fn a_local_port_reaches_the_target_and_each_half_close_is_forwarded() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let local = Local::start(&[&format!("--server=http://{}", server.connect), &at("node1", echo)]).await;
    local.assert_half_close().await;
}

/// Writes `client.toml` of alice's laptop with that server. Returns the environment in which it is found.
pub(crate) fn home_of_alice(
    place: &TestDir,
    server: SocketAddr,
) -> impl Fn(&str) -> Option<String> + Clone + Send + 'static {
    std::fs::create_dir_all(place.path().join("tunnel")).unwrap();
    let (ca, token) = (&place.files.ca, users::USER_TOKEN);
    let client = format!(
        "servers = [\"{server}\"]\nca = {ca:?}\nuser = \"alice\"\ndevice = \"laptop\"\ntoken = \"{token}\"\n"
    );
    let file = place.file("tunnel/client.toml", &client);
    std::fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap();
    let home = place.path().display().to_string();
    move |name: &str| (name == "XDG_CONFIG_HOME").then(|| home.clone())
}

#[tokio::test]
async fn a_second_signal_ends_tunnel_connect_at_once() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = users::server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let local = Local::start_with(&[&at("node1", echo)], home_of_alice(&place, line.at)).await;
    let mut client = local.client().await;
    assert_echo(&mut client, "before").await;
    line.route_to(targets::closed_port().await);
    line.become_unresponsive();
    let started = Stopwatch::start();
    for _ in 0..2 {
        local.stop.send(()).await.unwrap();
    }
    local.ended.await.unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
}

#[tokio::test]
async fn tunnel_connect_links_to_the_servers_of_the_client_file_and_half_closes_are_forwarded() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = users::server(&place, "").await;
    let _edges = [edge(&place, &server, "node1").await, edge(&place, &server, "other1").await];
    let variable = home_of_alice(&place, server.server.bound.grpc);
    let local = Local::start_with(&[&at("node1", echo)], variable.clone()).await;
    local.assert_half_close().await;
    let mut local = Local::start_with(&["node9:22"], variable.clone()).await;
    let message = local.refusal().await;
    assert!(
        message
            .contains("not connected\n  hint: check the node's name (`tunnel nodes` lists the names), that `tunnel edge` runs on that node"),
        "{message}"
    );
    let mut local = Local::start_with(&[&at("other1", echo)], variable).await;
    let message = local.refusal().await;
    assert!(message.starts_with("tunnel: no rule lets alice reach port"), "{message}");
    assert!(message.contains("`tunnel nodes` lists the names of your nodes"), "{message}");
}

#[tokio::test]
async fn tunnel_connect_reports_that_the_path_of_its_link_is_lost_and_works_again() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = users::server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let line = Line::to(server.server.bound.grpc).await;
    let target = at("node1", echo);
    let mut local = Local::start_with(&[&target], home_of_alice(&place, line.at)).await;
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    line.freeze(true);
    let message = assert_eventually("the loss", local.messages.recv()).await.unwrap();
    let waits = "it waits for up to 10 min for this machine's line";
    let expected = format!("tunnel: line lost, resuming the session to {target}; {waits}");
    assert_eq!(message, expected);
    line.freeze(false);
    let message = assert_eventually("the return", local.messages.recv()).await.unwrap();
    assert!(message.starts_with(&format!("tunnel: resumed the session to {target} after ")), "{message}");
    assert_echo(&mut client, "nothing lost").await;
}

#[tokio::test]
async fn the_end_of_a_users_session_names_whose_line_was_lost_and_the_limit() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = users::server(&place, "").await;
    let [to_laptop, to_edge] =
        [Line::to(server.server.bound.grpc).await, Line::to(server.server.bound.grpc).await];
    let _edge = start_edge(&place.edge("node1", to_edge.at, ""));
    server.wait_for_node("node1").await;
    let target = at("node1", echo);
    let mut local = Local::start_with(&[&target], home_of_alice(&place, to_laptop.at)).await;
    let lost = |whose| {
        format!("tunnel: line lost, resuming the session to {target}; it waits for up to 10 min for {whose}")
    };
    let cut = |line: &Line| {
        line.route_to("127.0.0.1:1".parse().unwrap());
        line.reset();
    };
    pause_time();
    // The line of the node.
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    cut(&to_edge);
    assert_eq!(local.message_within_an_hour().await, lost("the line of node1"));
    let ended = local.message_within_an_hour().await;
    let expected = "no server had a working link to node node1 within 10 min; this machine is linked";
    assert!(ended.starts_with(&format!("tunnel: session interrupted: {expected}")), "{ended}");
    to_edge.route_to(server.server.bound.grpc);
    server.wait_for_node("node1").await;
    // Another process of the node has none of its sessions.
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    cut(&to_edge);
    let _next = start_edge(&place.edge("node1", server.server.bound.grpc, ""));
    let ended = local.message_within_an_hour().await;
    let expected = "node node1 was restarted, which ended this session; it had no line for ";
    assert!(ended.starts_with(&format!("tunnel: session interrupted: {expected}")), "{ended}");
    assert!(ended.contains(" (this machine slept for 0 s), and is kept for 10 min"), "{ended}");
    // The line of the laptop.
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    cut(&to_laptop);
    assert_eq!(local.message_within_an_hour().await, lost("this machine's line"));
    let ended = local.message_within_an_hour().await;
    let expected = "this machine had no link to a server for 10 min: ";
    assert!(ended.starts_with(&format!("tunnel: session interrupted: {expected}")), "{ended}");
}

#[tokio::test]
async fn tunnel_proxy_tells_a_person_its_ports_and_what_happens_to_its_link() {
    let place = TestDir::new();
    let server = users::server(&place, "").await;
    let line = Line::to(server.server.bound.grpc).await;
    let env = Environment::read(home_of_alice(&place, line.at));
    let any = "127.0.0.1:0".parse().ok();
    let args = ProxyArgs { http: any, socks5: any, verbosity: 0, log_format: Format::Text };
    let (print, mut messages) = mpsc::channel(9);
    let print = move |line: &str| print.try_send(line.to_owned()).unwrap();
    let _proxy =
        spawn(async move { proxy::run(&args, &env, futures_util::stream::pending(), Some(print)).await });
    let mut next = async || assert_eventually("a line", messages.recv()).await.unwrap();
    let ready = next().await;
    assert!(
        ready.starts_with("ready: http://127.0.0.1:") && ready.contains(", socks5://127.0.0.1:"),
        "{ready}"
    );
    line.route_to("127.0.0.1:1".parse().unwrap());
    line.reset();
    pause_time();
    assert_eq!(next().await, "line lost, resuming all sessions; the line to the servers is dialled again");
    line.route_to(server.server.bound.grpc);
    let again = next().await;
    assert!(again.starts_with("resumed all sessions after "), "{again}");
}

#[tokio::test]
async fn tunnel_connect_prints_the_servers_refusal() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    // With a name this long the status line is cut.
    let missing_node = "n".repeat(120);
    let target = format!("{missing_node}:22");
    let mut local = Local::start(&[&format!("--server=http://{}", server.connect), &target]).await;
    let message = local.refusal().await;
    assert!(message.starts_with(&format!("tunnel: 502 node {missing_node} is not connected")), "{message}");
    local.wait_for_end().await;
}

/// A server that was taken over, or another program at its address.
#[tokio::test]
async fn tunnel_connect_prints_no_control_characters_of_a_refusal() {
    let wild = "\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m\u{202e}";
    for body in [wild.to_owned(), format!("{wild}\r\n{wild}\n")] {
        let answer = format!(
            "HTTP/1.1 403 \u{9b}31m\u{202e}\r\nX: \u{9b}31m\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let hostile = targets::serve(move |mut socket| {
            let answer = answer.clone();
            async move {
                let _ = clients::head(&mut socket).await;
                let _ = socket.write_all(answer.as_bytes()).await;
            }
        });
        let mut local = Local::start(&[&format!("--server=http://{}", hostile.await), "node1:22"]).await;
        assert_reset(&mut local.client().await).await;
        let message = assert_eventually("the refusal", local.messages.recv()).await.unwrap();
        assert!(message.starts_with("tunnel: 403 "), "{message:?}");
        assert!(message.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{message:?}");
        local.wait_for_end().await;
    }
}

#[tokio::test]
async fn connecting_to_the_port_for_links_prints_a_hint_to_the_connect_port() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let links = server.server.bound.grpc;
    let mut local = Local::start(&[&format!("--server=http://{links}"), "node1:22"]).await;
    assert_reset(&mut local.client().await).await;
    let message = assert_eventually("the error", local.messages.recv()).await.unwrap();
    assert!(message.contains("use the port of server.connect.listen"), "{message}");
    local.wait_for_end().await;
}

#[tokio::test]
async fn a_broken_session_resets_the_local_client_and_the_reason_is_printed() {
    let place = TestDir::new();
    let breaks = targets::serve(|mut socket| async move {
        socket.write_all(b"half of it").await.unwrap();
        socket.read_u8().await.unwrap();
        reset(socket);
    });
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let mut local =
        Local::start(&[&format!("--server=http://{}", server.connect), &at("node1", breaks.await)]).await;
    let mut client = local.client().await;
    client.read_exact(&mut [0; 10]).await.unwrap();
    client.write_all(b"x").await.unwrap();
    assert_reset(&mut client).await;
    let message = assert_eventually("the reason", local.messages.recv()).await.unwrap();
    let reason = format!("session interrupted: server {} reset the connection", server.connect);
    assert!(message.contains(&reason), "{message}");
    local.wait_for_end().await;
}

/// Like a load balancer, or a kernel after its process died: TCP ends in good order, but TLS does not.
#[tokio::test]
async fn a_session_whose_tls_ends_without_close_notify_is_reported_as_broken() {
    let place = TestDir::new();
    let dir = place.path();
    let identity = IdentityFiles { cert: dir.join("cloud.crt"), key: dir.join("cloud.key") };
    let params = TlsParams::default();
    let server = TlsServerConfig { identity, clients: ClientAuth::Anonymous, params, alpn: Vec::new() };
    let acceptor = server.load().unwrap().load().acceptor();
    let server = targets::serve(move |socket| {
        let acceptor = acceptor.clone();
        async move {
            let mut socket = acceptor.accept(socket).await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(socket.read_u8().await.unwrap());
            }
            socket.write_all(format!("{ESTABLISHED}half of it").as_bytes()).await.unwrap();
            socket.flush().await.unwrap();
        }
    });
    let (through, ca) =
        (format!("--server=https://{}", server.await), format!("--ca={}", dir.join("ca.crt").display()));
    let mut local = Local::start(&[&through, &ca, "node1:22"]).await;
    assert_reset(&mut local.client().await).await;
    let message = assert_eventually("the reason", local.messages.recv()).await.unwrap();
    assert!(message.contains("closed the connection without ending TLS; see its access log"), "{message}");
    local.wait_for_end().await;
}

#[tokio::test]
async fn a_reset_of_the_local_client_resets_the_connection_to_the_target() {
    let place = TestDir::new();
    let (sender, mut receiver) = mpsc::channel(1);
    let reads = targets::serve(move |mut socket| {
        let sender = sender.clone();
        async move {
            socket.write_all(b"!").await.unwrap();
            sender.send(socket.read_to_end(&mut Vec::new()).await.is_err()).await.unwrap();
        }
    });
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let local =
        Local::start(&[&format!("--server=http://{}", server.connect), &at("node1", reads.await)]).await;
    let mut client = local.client().await;
    client.write_all(b"half of it").await.unwrap();
    // A connection that ends before its owner is known is served by nobody.
    client.read_u8().await.unwrap();
    reset(client);
    assert!(
        assert_eventually("the end of the session at the target", receiver.recv()).await.unwrap(),
        "the target has seen no reset"
    );
    local.wait_for_end().await;
}

#[tokio::test]
async fn a_user_authenticates_with_the_password_from_a_file() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    // bcrypt of "pass word", at the lowest cost.
    let hash = bcrypt::hash("pass word", 4).unwrap();
    let users = place.file("users", &format!("ann:{hash}\n"));
    let server = TestServer::with(&place, &format!("auth = \"basic\"\nusers = \"{}\"\n", users.display()));
    let _edge = edge(&place, &server, "node1").await;
    let through = format!("--server={}", server.connect);
    for (password, code) in [("pass word\n", None), ("wrong", Some("407"))] {
        let file = format!("--password-file={}", place.file("password", password).display());
        let mut local = Local::start(&[&through, "--user=ann", &file, &at("node1", echo)]).await;
        let mut client = local.client().await;
        match code {
            None => assert_echo(&mut client, "hello").await,
            Some(code) => {
                let message = assert_eventually("the refusal", local.messages.recv()).await.unwrap();
                assert!(message.starts_with(&format!("tunnel: {code}")), "{message}");
                assert!(
                    message.contains("hint: check user ann (--user)") && !message.contains("curl"),
                    "{message}"
                );
            }
        }
        drop(client);
        local.wait_for_end().await;
    }
}

#[tokio::test]
async fn the_egress_port_accepts_tls_with_a_client_certificate() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let dir = place.path().display();
    let table = format!(
        "[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\nclient_ca = \"{dir}/ca.crt\"\nnames = [\"ops\"]\n"
    );
    let server = TestServer::with(&place, &table);
    let _edge = edge(&place, &server, "node1").await;
    let identity = place.client("ops");
    let through = format!("--server=https://{}", server.port("egress"));
    let (ca, cert) = (format!("--ca={dir}/ca.crt"), format!("--cert={}", identity.cert.display()));
    let key = format!("--key={}", identity.key.display());
    let local = Local::start(&[&through, &ca, &cert, &key, &at("node1", echo)]).await;
    let mut client = local.client().await;
    assert_echo(&mut client, "hello").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    local.wait_for_end().await;
    let mut local = Local::start(&[&through, &ca, &at("node1", echo)]).await;
    let mut client = local.client().await;
    let _ = client.read(&mut [0]).await;
    let message = assert_eventually("the refusal", local.messages.recv()).await.unwrap();
    assert!(message.contains(&server.port("egress").to_string()), "{message}");
    local.wait_for_end().await;
}

#[tokio::test]
async fn tunnel_connect_works_over_a_unix_socket_of_the_server() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let path = place.path().join("egress.sock");
    let server =
        TestServer::with(&place, &format!("[server.egress]\nlisten = \"unix:{}\"\n", path.display()));
    let _edge = edge(&place, &server, "node1").await;
    let local = Local::start(&[&format!("--server=unix:{}", path.display()), &at("node1", echo)]).await;
    assert_echo(&mut local.client().await, "hello").await;
    local.wait_for_end().await;
}
