//! People's listeners over TLS: `[server.connect]`, `[server.http_proxy]`, and the admin listener with the page.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tunnel_net::tls::IdentityFiles;

use crate::addresses::own_address;
use crate::connecting::Local;
use crate::egress::{dial, send_connect};
use crate::support::clients::{ESTABLISHED, assert_echo, head};
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::{assert_eventually, targets};

/// Returns the lines of a table that turn on TLS.
fn tls(place: &TestDir) -> String {
    let dir = place.path().display();
    format!("cert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n")
}

/// Like [`tls`], for clients with a certificate of this name.
fn tls_for(place: &TestDir, name: &str) -> String {
    format!("{}client_ca = {:?}\nnames = [{name:?}]\n", tls(place), place.files.ca)
}

/// Returns the lines of a table that ask for the password `pw` of user `ops`.
fn passwords(place: &TestDir) -> String {
    let users = place.file("users", &format!("ops:{}\n", bcrypt::hash("pw", 4).unwrap()));
    format!("auth = \"basic\"\nusers = {users:?}\n")
}

/// Requests a page, and returns the response. The connection ends with it.
async fn request(mut socket: TlsStream<TcpStream>, head: &str) -> String {
    // A server that has refused the handshake may have closed already.
    let _ = socket.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await;
    let mut answer = Vec::new();
    let _ = assert_eventually("a response", socket.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn connect_over_tls_takes_passwords_and_its_plain_port_is_separate() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let more = format!("{}{}plain_listen = \"127.0.0.1:0\"\n", tls(&place), passwords(&place));
    let server = TestServer::with(&place, &more);
    let _edge = edge(&place, &server, "node1").await;
    let target = at("node1", echo);
    let ports = server.server.bound.clients.iter().filter(|(name, _)| *name == "connect");
    let [tls, plain] = ports.map(|(_, at)| *at).collect::<Vec<_>>().try_into().unwrap();

    let (ca, file) = (place.files.ca.display(), place.file("pw", "pw\n"));
    let login = ["--user=ops", &format!("--password-file={}", file.display())];
    for (scheme, at, ca) in [("https", tls, Some(format!("--ca={ca}"))), ("http", plain, None)] {
        let through = format!("--server={scheme}://{at}");
        let args: Vec<_> = [&*through, &*target].into_iter().chain(login).chain(ca.as_deref()).collect();
        let local = Local::start(&args).await;
        assert_echo(&mut local.client().await, "hello").await;
        local.wait_for_end().await;
    }
    let mut without = dial(&place, tls, None, &[]).await.unwrap();
    assert!(send_connect(&mut without, &target).await.unwrap().starts_with("HTTP/1.1 407 "));

    // Each wrong scheme is reported with the right one.
    let ca = format!("--ca={ca}");
    for (args, part) in [
        (&[&*format!("--server=http://{tls}"), &*target][..], "does not speak HTTP without TLS; check"),
        (&[&*format!("--server=https://{plain}"), &*target, &*ca], "does not speak HTTP over TLS; check"),
    ] {
        let mut local = Local::start(args).await;
        let _client = local.client().await;
        let message = assert_eventually("the error", local.messages.recv()).await.unwrap();
        assert!(message.contains(part), "{message}");
        local.wait_for_end().await;
    }
}

#[tokio::test]
async fn a_client_certificate_is_a_user_of_connect_and_of_the_http_proxy() {
    let place = TestDir::new();
    let page = targets::serve(|mut socket| async move {
        let _ = head(&mut socket).await;
        let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    });
    let page = page.await;
    let rules = "rules = [{ users = [\"ops\"] }]\n";
    let more = tls_for(&place, "*")
        + rules
        + &format!("[server.http_proxy]\nlisten = \"127.0.0.1:0\"\n{}", tls_for(&place, "o*"));
    let server = TestServer::with(&place, &more);
    let _edge = edge(&place, &server, "node1").await;
    let (connect, proxy) = (server.port("connect"), server.port("http_proxy"));
    let target = at("node1", page);
    let plain = format!("GET http://{target}/ HTTP/1.1\r\nHost: {target}");
    for (name, is_user) in [("ops", true), ("dev", false)] {
        let identity = place.client(name);
        let mut socket = dial(&place, connect, Some(&identity), &["http/1.1"]).await.unwrap();
        let head = send_connect(&mut socket, &target).await.unwrap();
        assert_eq!(head == ESTABLISHED, is_user, "{name}: {head}");
        let answer = request(dial(&place, proxy, Some(&identity), &[]).await.unwrap(), &plain).await;
        let status = if is_user { "HTTP/1.1 200 " } else { "HTTP/1.1 403 " };
        assert!(answer.starts_with(status), "{name}: {answer}");
    }
    for port in [connect, proxy] {
        let refused = async { request(dial(&place, port, None, &[]).await.unwrap(), &plain).await };
        assert_eq!(refused.await, "", "no certificate");
    }
}

#[tokio::test]
async fn the_page_is_served_over_tls_to_users_with_a_certificate() {
    let (place, own) = (TestDir::new(), own_address());
    let admin = |role: &str| format!("[{role}.admin]\n{}", tls_for(&place, "ops"));
    let listen = format!("admin_listen = \"{own}:0\"");
    let text = place.cloud(&admin("server")).replace("admin_listen = \"127.0.0.1:0\"", &listen);
    let server = TestServer::from_text(&text);
    let text = place.edge("node1", server.server.bound.grpc, &admin("edge"));
    let edge = start_edge(&text.replace("admin_listen = \"127.0.0.1:0\"", &listen));
    let status = async |at, identity: Option<&IdentityFiles>| {
        let socket = dial(&place, at, identity, &[]).await.unwrap();
        request(socket, "GET /status HTTP/1.1\r\nHost: tunnel.example.org").await
    };
    for at in [server.server.bound.log, edge.bound.log.unwrap()] {
        assert!(status(at, Some(&place.client("ops"))).await.starts_with("HTTP/1.1 200 "), "{at}");
        let other = status(at, Some(&place.client("dev"))).await;
        assert!(other.starts_with("HTTP/1.1 403 ") && other.contains("client_ca and names"), "{other}");
        assert_eq!(status(at, None).await, "");
    }
}
