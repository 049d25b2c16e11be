use proptest::prelude::*;
use tokio::net::TcpListener;

use tokio::io::AsyncReadExt as _;

use super::*;
use crate::tls::params::TlsParams;
use crate::tls::testing::TestCa;
use crate::tls::{ClientAuth, TlsServerConfig};

const SOON: Duration = Duration::from_secs(5);

fn proxy(url: &str) -> OutboundProxy {
    OutboundProxy::new(url, "").unwrap().unwrap()
}

/// Runs a proxy that responds once with `answer`. Returns the request, and the result of the connection.
async fn connect_via_proxy(credentials: &str, answer: &str) -> (String, Result<TcpStream, ProxyError>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let proxy = proxy(&format!("http://{credentials}{at}/"));
    let target = "tunnel.cloud.io:9000".parse().unwrap();
    let play = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        assert!(read_until(&mut socket, &mut head, b"\r\n\r\n", MAX_HEAD).await.unwrap());
        // In two parts, as a network may deliver it.
        let (first, second) = answer.split_at(answer.len() / 2);
        socket.write_all(first.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
        socket.write_all(second.as_bytes()).await.unwrap();
        String::from_utf8(head).unwrap()
    };
    let addresses = [at];
    tokio::join!(play, proxy.connect(&addresses, &target, SOON))
}

#[tokio::test]
async fn connect_with_credentials_reaches_the_target() {
    let answer = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 201 Created\r\nVia: x\r\n\r\nhello";
    let (head, way) = connect_via_proxy("me%40home:p%3A%zz@", answer).await;
    let expected = format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode("me@home:p:%zz"));
    assert!(
        head.starts_with("CONNECT tunnel.cloud.io:9000 HTTP/1.1\r\nHost: tunnel.cloud.io:9000\r\n"),
        "{head}"
    );
    assert!(head.contains(&expected), "{head}");
    let mut first = [0; 5];
    way.unwrap().read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"hello", "bytes after the header come from the target");
}

#[tokio::test]
async fn each_error_names_the_proxy() {
    for (answer, expected) in [
        ("HTTP/1.1 403 Forbidden\r\n\r\n", "403 Forbidden"),
        ("HTTP/1.0 407 Who?\r\n\r\n", "requires credentials"),
        ("SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1"),
        ("HTTP/1.1 200", "failed"),
        ("", "failed"),
    ] {
        let (head, way) = connect_via_proxy("", answer).await;
        let failed = way.unwrap_err().to_string();
        assert!(failed.contains("the proxy 127.0.0.1:") && failed.contains(expected), "{failed}");
        assert!(!head.contains("Authorization"), "{head}");
    }
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let target = "a.b:1".parse().unwrap();
    let failed = proxy("http://p:1").connect(&[closed], &target, SOON).await.unwrap_err().to_string();
    assert!(failed.contains("cannot connect to the proxy of HTTPS_PROXY"), "{failed}");
}

/// Runs a SOCKS5 proxy that answers a message with each of these. Returns the messages, and the result of the connection.
async fn connect_via_socks(
    credentials: &str,
    answers: &[&[u8]],
) -> (Vec<Vec<u8>>, Result<TcpStream, ProxyError>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let proxy = proxy(&format!("socks5://{credentials}{at}"));
    let target = "tunnel.cloud.io:9000".parse().unwrap();
    let play = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut messages = Vec::new();
        for answer in answers {
            let mut message = vec![0; 512];
            let length = socket.read(&mut message).await.unwrap();
            message.truncate(length);
            messages.push(message);
            socket.write_all(answer).await.unwrap();
        }
        messages
    };
    let addresses = [at];
    tokio::join!(play, proxy.connect(&addresses, &target, SOON))
}

#[tokio::test]
async fn a_socks5_proxy_gets_name_user_and_password() {
    const CONNECTED: &[u8] = &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let request = [&[5, 1, 0, 3, 15][..], b"tunnel.cloud.io", &9000_u16.to_be_bytes()].concat();
    let (messages, way) = connect_via_socks("", &[&[5, 0], CONNECTED]).await;
    assert!(messages == [&[5, 1, 0][..], &request] && way.is_ok(), "{messages:?} {way:?}");
    let login = [&[1, 7][..], b"me@home", &[3], b"p:w"].concat();
    let (messages, way) = connect_via_socks("me%40home:p%3Aw@", &[&[5, 2], &[1, 0], CONNECTED]).await;
    assert!(messages == [&[5, 1, 2][..], &login, &request] && way.is_ok(), "{messages:?} {way:?}");

    for answers in [
        &[&[5, 255][..]][..],
        &[&[5, 2], &[1, 1]],
        &[&[5, 2], &[1, 0], &[5, 2, 0, 1, 0, 0, 0, 0, 0, 0]],
        &[&[5]],
    ] {
        let failed = connect_via_socks("me:secret@", answers).await.1.unwrap_err().to_string();
        assert!(
            failed.contains("did not connect to tunnel.cloud.io:9000: ") && !failed.contains("secret"),
            "{failed}"
        );
    }
}

#[tokio::test]
async fn a_proxy_of_https_gets_the_password_only_after_it_has_proved_its_name() {
    let ca = TestCa::new("ca");
    let other = TestCa::new("other");
    let tls = TlsServerConfig {
        identity: ca.issue("proxy", "127.0.0.1"),
        clients: ClientAuth::Anonymous,
        params: TlsParams::default(),
        alpn: Vec::new(),
    };
    let tls = tls.load().unwrap().load().acceptor();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let proxy = proxy(&format!("https://me:secret@{at}"));
    let target: Target = "tunnel.cloud.io:9000".parse().unwrap();
    // Returns what the proxy was asked, and the connection.
    let connect = async |trusted: &TestCa| {
        let play = async {
            let (socket, _) = listener.accept().await.unwrap();
            let mut socket = tls.accept(socket).await.ok()?;
            let mut head = vec![0; 1024];
            let length = socket.read(&mut head).await.unwrap();
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello").await.unwrap();
            Some(String::from_utf8_lossy(&head[..length]).into_owned())
        };
        let connecting = async {
            let socket = proxy.connect(&[at], &target, SOON).await.unwrap();
            let trust = Trust::Public(vec![trusted.ca()]);
            OutboundProxy::encrypted(Some(&proxy), socket, &target, trust, SOON).await
        };
        tokio::join!(play, connecting)
    };
    let (head, way) = connect(&ca).await;
    let expected = format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode("me:secret"));
    let head = head.unwrap();
    assert!(head.starts_with("CONNECT tunnel.cloud.io:9000 ") && head.contains(&expected), "{head}");
    let mut first = [0; 5];
    way.unwrap().read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"hello");
    let (head, way) = connect(&other).await;
    let why = way.unwrap_err().to_string();
    assert!(head.is_none() && why.starts_with("no TLS with the proxy 127.0.0.1:"), "{head:?} {why}");
}

#[tokio::test]
async fn an_endless_response_header_is_an_error() {
    let (_, way) =
        connect_via_proxy("", &format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(2 * MAX_HEAD))).await;
    assert!(way.unwrap_err().to_string().starts_with("the connection to the proxy "));
}

#[test]
fn proxy_urls_are_read_in_their_usual_forms() {
    for (url, at) in [
        ("http://proxy:3128", "proxy:3128"),
        ("HTTP://proxy:3128/", "proxy:3128"),
        ("proxy:3128", "proxy:3128"),
        ("http://proxy", "proxy:80"),
        ("socks5://proxy", "proxy:1080"),
        ("SOCKS5h://u:p@proxy:1", "proxy:1"),
        ("http://u:p@w@[::1]:8080/x", "[::1]:8080"),
        ("https://proxy", "proxy:443"),
    ] {
        assert_eq!(proxy(url).at().to_string(), at);
    }
    assert!(OutboundProxy::new(" ", "*").unwrap().is_none());
    let error = OutboundProxy::new("ftp://p:1", "").unwrap_err().to_string();
    assert!(error.starts_with("HTTPS_PROXY: ftp:// proxies are not supported"), "{error}");
    assert_eq!(proxy("me:pa://ss@p:1").at().to_string(), "p:1");
    let exempting = OutboundProxy::new("http://p:1", "a.b").unwrap().unwrap();
    assert!(
        !exempting.applies_to(&"a.b:1".parse().unwrap()) && exempting.applies_to(&"b.c:1".parse().unwrap())
    );
}

#[test]
fn credentials_are_never_shown() {
    let shown = format!(
        "{:?} {:?}",
        proxy("http://me:secret@p:1"),
        OutboundProxy::new("http://me:secret@p p:1", "").unwrap_err()
    );
    assert!(!shown.contains("secret") && !shown.contains("me"), "{shown}");
}

proptest! {
    #[test]
    fn no_setting_makes_the_parser_panic(url in ".{0,60}", list in ".{0,60}") {
        if let Ok(Some(proxy)) = OutboundProxy::new(&url, &list) {
            proxy.applies_to(&"a.b:1".parse().unwrap());
        }
    }
}
