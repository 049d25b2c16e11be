//! `tunnel connect` with a local port, through each kind of listener of a server.

use std::net::SocketAddr;

use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tunnel::command::CommandError;
use tunnel::command::connect::{self, ConnectArgs};
use tunnel_net::tls::{ClientAuth, Identity, TlsParams, TlsServerConfig};

use crate::support::clients::{self, ESTABLISHED, echoed, is_reset, reset, rest};
use crate::support::programs::{TestDir, TestServer, at, edge};
use crate::support::{assert_eventually, beside, targets};

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// A `tunnel connect` that listens on a port of this machine, and its output.
struct Local {
    at: SocketAddr,
    says: mpsc::Receiver<String>,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<Result<String, CommandError>>,
}

impl Local {
    async fn start(args: &[&str]) -> Self {
        let args = [&["connect", "--listen=0"], args].concat();
        let asked = Line::try_parse_from(args).unwrap().connect;
        let (say, mut says) = mpsc::channel(9);
        let (stop, stopped) = oneshot::channel();
        let ended = beside(async move {
            let say = move |line: &str| say.try_send(line.to_owned()).unwrap();
            connect::connect(&asked, |_| None, async { stopped.await.unwrap() }, say).await
        });
        let line = assert_eventually("the port", says.recv()).await.unwrap();
        let at = line.split_whitespace().next().unwrap().parse().unwrap();
        Self { at, says, stop, ended }
    }

    async fn client(&self) -> TcpStream {
        TcpStream::connect(self.at).await.unwrap()
    }

    async fn ends(self) {
        self.stop.send(()).unwrap();
        assert_eq!(assert_eventually("the end of the command", self.ended).await.unwrap(), Ok(String::new()));
    }
}

#[tokio::test]
async fn a_local_port_reaches_the_target_and_each_half_close_is_forwarded() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let local = Local::start(&[&format!("--server=http://{}", server.connect), &at("node1", echo)]).await;
    let mut client = local.client().await;
    echoed(&mut client, "hello").await;
    client.write_all(b"last").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"last");
    local.ends().await;
}

#[tokio::test]
async fn a_refusal_is_printed_in_the_servers_words() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    // With a name this long the status line is cut.
    let nobody = "n".repeat(120);
    let target = format!("{nobody}:22");
    let mut local = Local::start(&[&format!("--server=http://{}", server.connect), &target]).await;
    is_reset(&mut local.client().await).await;
    let said = assert_eventually("the refusal", local.says.recv()).await.unwrap();
    assert!(said.starts_with(&format!("tunnel: 502 node {nobody} is not connected")), "{said}");
    local.ends().await;
}

/// A server that was taken over, or another program at its address.
#[tokio::test]
async fn a_refusal_of_a_hostile_server_controls_no_terminal() {
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
        is_reset(&mut local.client().await).await;
        let said = assert_eventually("the refusal", local.says.recv()).await.unwrap();
        assert!(said.starts_with("tunnel: 403 "), "{said:?}");
        assert!(said.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{said:?}");
        local.ends().await;
    }
}

#[tokio::test]
async fn the_port_to_which_nodes_link_is_not_taken_for_a_server_that_is_broken() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let links = server.server.bound.grpc;
    let mut local = Local::start(&[&format!("--server=http://{links}"), "node1:22"]).await;
    is_reset(&mut local.client().await).await;
    let said = assert_eventually("the error", local.says.recv()).await.unwrap();
    assert!(said.contains("does not speak HTTP; use the port of server.connect.listen"), "{said}");
    local.ends().await;
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
    is_reset(&mut client).await;
    let said = assert_eventually("the reason", local.says.recv()).await.unwrap();
    let reason = format!("session interrupted: server {} reset the connection", server.connect);
    assert!(said.contains(&reason), "{said}");
    local.ends().await;
}

/// Like a load balancer, or a kernel after its process died: TCP ends in good order, but TLS does not.
#[tokio::test]
async fn tls_that_ends_without_its_closing_alert_is_a_broken_session() {
    let place = TestDir::new();
    let dir = place.path();
    let identity = Identity { cert: dir.join("cloud.crt"), key: dir.join("cloud.key") };
    let (offer, _) = TlsParams::parse("", "").unwrap();
    let server = TlsServerConfig { identity, clients: ClientAuth::Anonymous, offer, alpn: Vec::new() };
    let acceptor = server.load().unwrap().load().acceptor();
    let server = targets::serve(move |socket| {
        let acceptor = acceptor.clone();
        async move {
            let mut socket = acceptor.accept(socket).await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                asked.push(socket.read_u8().await.unwrap());
            }
            socket.write_all(format!("{ESTABLISHED}half of it").as_bytes()).await.unwrap();
            socket.flush().await.unwrap();
        }
    });
    let (through, ca) =
        (format!("--server=https://{}", server.await), format!("--ca={}", dir.join("ca.crt").display()));
    let mut local = Local::start(&[&through, &ca, "node1:22"]).await;
    is_reset(&mut local.client().await).await;
    let said = assert_eventually("the reason", local.says.recv()).await.unwrap();
    assert!(said.contains("closed the connection without ending TLS; see its access log"), "{said}");
    local.ends().await;
}

#[tokio::test]
async fn a_reset_of_the_local_client_resets_the_connection_to_the_target() {
    let place = TestDir::new();
    let (tell, mut told) = mpsc::channel(1);
    let reads = targets::serve(move |mut socket| {
        let tell = tell.clone();
        async move { tell.send(socket.read_to_end(&mut Vec::new()).await.is_err()).await.unwrap() }
    });
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    let local =
        Local::start(&[&format!("--server=http://{}", server.connect), &at("node1", reads.await)]).await;
    let mut client = local.client().await;
    client.write_all(b"half of it").await.unwrap();
    reset(client);
    assert!(
        assert_eventually("the end of the session at the target", told.recv()).await.unwrap(),
        "the target has seen no reset"
    );
    local.ends().await;
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
            None => echoed(&mut client, "hello").await,
            Some(code) => {
                let said = assert_eventually("the refusal", local.says.recv()).await.unwrap();
                assert!(said.starts_with(&format!("tunnel: {code}")), "{said}");
                assert!(said.contains("hint: check user ann (--user)") && !said.contains("curl"), "{said}");
            }
        }
        drop(client);
        local.ends().await;
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
    echoed(&mut client, "hello").await;
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
    local.ends().await;
    let mut local = Local::start(&[&through, &ca, &at("node1", echo)]).await;
    let mut client = local.client().await;
    let _ = client.read(&mut [0]).await;
    let said = assert_eventually("the refusal", local.says.recv()).await.unwrap();
    assert!(said.contains(&server.port("egress").to_string()), "{said}");
    local.ends().await;
}

#[tokio::test]
async fn a_unix_socket_of_the_server_can_be_used() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let path = place.path().join("egress.sock");
    let server =
        TestServer::with(&place, &format!("[server.egress]\nlisten = \"unix:{}\"\n", path.display()));
    let _edge = edge(&place, &server, "node1").await;
    let local = Local::start(&[&format!("--server=unix:{}", path.display()), &at("node1", echo)]).await;
    echoed(&mut local.client().await, "hello").await;
    local.ends().await;
}
