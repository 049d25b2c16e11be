//! Certificates that change on the disk while sessions stand: who comes is shown the new one, and nobody is cut.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tunnel::net::reload::look_now;
use tunnel::net::tls::{
    ClientCertificates, ClientSettings, Identity, ServerSettings, TlsParams, Trust, server_name,
};

use crate::support::clients::ESTABLISHED;
use crate::support::programs::{NAME, TestDir, TestPod, at, edge_with};
use crate::support::{PATIENCE, soon, targets};

/// Writes a certificate of a server, or of a client, and gives its files.
fn certify(place: &TestDir, name: &str) -> Identity {
    let files = Identity {
        cert: place.path().join(format!("{name}.crt")),
        key: place.path().join(format!("{name}.key")),
    };
    let authority = &place.authority.0;
    let issued = if name == "client" { authority.client(name) } else { authority.server(&[NAME]) };
    issued.unwrap().write(&files.cert, &files.key).unwrap();
    files
}

/// The lines of a table that name these files.
fn lines(files: &Identity) -> String {
    format!("cert = {:?}\nkey = {:?}\n", files.cert, files.key)
}

type Client = TlsStream<tokio::net::TcpStream>;

async fn dial(pod: &TestPod, front: &str) -> Client {
    let config = ClientSettings { trust: Trust::Anyone, identity: None, alpn: Vec::new() }.load().unwrap();
    let socket = pod.client(front).await;
    let connector = TlsConnector::from(config.load());
    soon("a handshake", connector.connect(server_name(NAME).unwrap(), socket)).await.unwrap()
}

/// The certificate that a server has shown.
fn shown(client: &Client) -> Vec<u8> {
    client.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Sends a text, and hears this.
async fn told<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut S, text: &str, back: &str) {
    socket.write_all(text.as_bytes()).await.unwrap();
    socket.flush().await.unwrap();
    let mut heard = vec![0; back.len()];
    soon("an answer", socket.read_exact(&mut heard)).await.unwrap();
    assert_eq!(String::from_utf8(heard).unwrap(), back);
}

/// A web server behind TLS, and the certificates that its clients have shown, one for each connection.
async fn web(place: &TestDir) -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>) {
    let clients = ClientCertificates::Required(place.files.ca.clone());
    let identity = certify(place, "web");
    let server = ServerSettings { identity, clients, offer: TlsParams::default(), alpn: Vec::new() };
    let acceptor = TlsAcceptor::from(server.load().unwrap().load());
    let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let sees = seen.clone();
    let at = targets::serve(move |socket| {
        let (acceptor, sees) = (acceptor.clone(), sees.clone());
        async move {
            let Ok(mut socket) = acceptor.accept(socket).await else { return };
            sees.lock().unwrap().push(socket.get_ref().1.peer_certificates().unwrap()[0].to_vec());
            let mut head = Vec::new();
            while let Ok(byte) = socket.read_u8().await {
                head.push(byte);
                if head.ends_with(b"\r\n\r\n") {
                    let _ = socket.write_all(OK.as_bytes()).await;
                    let _ = socket.flush().await;
                }
            }
        }
    })
    .await;
    (at, seen)
}

#[tokio::test]
async fn who_comes_is_shown_the_new_certificate_and_whoever_is_there_stays() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let [egress, https, client] = ["egress", "https", "client"].map(|name| certify(&place, name));
    let (web, seen) = web(&place).await;
    let more = format!(
        "[mode.cloud.egress]\nlisten = \"127.0.0.1:0\"\n{}[mode.cloud.https]\nlisten_ip = \"127.0.0.1\"\n\
         addr = {{ \"0\" = \"{web}\" }}\n{}",
        lines(&egress),
        lines(&https)
    );
    let pod = TestPod::with(&place, &more);
    let _edge = edge_with(&place, &pod, "node-a", &format!("[mode.edge.https]\n{}", lines(&client))).await;
    let (mut tunnel, mut site) = (dial(&pod, "egress").await, dial(&pod, "https").await);
    told(&mut tunnel, &format!("CONNECT {} HTTP/1.1\r\n\r\n", at("node-a", echo)), ESTABLISHED).await;
    told(&mut tunnel, "before", "before").await;
    told(&mut site, GET, OK).await;

    for name in ["egress", "https", "client"] {
        certify(&place, name);
    }
    look_now();
    let begun = Instant::now();
    for (front, old) in [("egress", shown(&tunnel)), ("https", shown(&site))] {
        while shown(&dial(&pod, front).await) == old {
            assert!(begun.elapsed() < PATIENCE, "{front} shows what it has always shown");
            sleep(PAUSE).await;
        }
    }
    // Each client has a session of its own, for which the edge shows its certificate anew.
    let same = || seen.lock().unwrap().windows(2).all(|pair| pair[0] == pair[1]);
    while same() {
        assert!(begun.elapsed() < PATIENCE, "the edge shows what it has always shown");
        told(&mut dial(&pod, "https").await, GET, OK).await;
        sleep(PAUSE).await;
    }
    let connections = seen.lock().unwrap().len();
    told(&mut tunnel, "after", "after").await;
    told(&mut site, GET, OK).await;
    assert_eq!(seen.lock().unwrap().len(), connections, "the first one's session is still there");
}

const GET: &str = "GET / HTTP/1.1\r\nHost: node-a\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Between two handshakes.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);
