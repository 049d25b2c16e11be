//! `tunnel connect` with a local port, through each kind of door that a pod has.

use std::net::SocketAddr;

use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tunnel::command::{self, Connect, Failure};

use crate::support::clients::{echoed, rest};
use crate::support::programs::{TestDir, TestPod, at, edge};
use crate::support::{beside, soon, targets};

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    connect: Connect,
}

/// One that listens at a port of this machine, and what it says.
struct Local {
    at: SocketAddr,
    says: mpsc::Receiver<String>,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<Result<String, Failure>>,
}

impl Local {
    async fn start(args: &[&str]) -> Self {
        let args = [&["connect", "--listen=0"], args].concat();
        let asked = Line::try_parse_from(args).unwrap().connect;
        let (say, mut says) = mpsc::channel(9);
        let (stop, stopped) = oneshot::channel();
        let ended = beside(async move {
            let say = move |line: &str| say.try_send(line.to_owned()).unwrap();
            command::connect(&asked, async { stopped.await.unwrap() }, say).await
        });
        let line = soon("the port", says.recv()).await.unwrap();
        let at = line.split_whitespace().next().unwrap().parse().unwrap();
        Self { at, says, stop, ended }
    }

    async fn client(&self) -> TcpStream {
        TcpStream::connect(self.at).await.unwrap()
    }

    async fn ends(self) {
        self.stop.send(()).unwrap();
        assert_eq!(soon("its end", self.ended).await.unwrap(), Ok(String::new()));
    }
}

#[tokio::test]
async fn a_local_port_leads_to_the_target_and_each_end_is_passed_on() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let pod = TestPod::start(&place);
    let _edge = edge(&place, &pod, "node1").await;
    let local = Local::start(&[&format!("--through=http://{}", pod.connect), &at("node1", echo)]).await;
    let mut client = local.client().await;
    echoed(&mut client, "hello").await;
    client.write_all(b"last").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, b"last");
    local.ends().await;
}

#[tokio::test]
async fn a_refusal_is_told_in_the_pods_words() {
    let place = TestDir::new();
    let pod = TestPod::start(&place);
    let mut local = Local::start(&[&format!("--through=http://{}", pod.connect), "nobody:22"]).await;
    assert_eq!(rest(&mut local.client().await).await, b"");
    let said = soon("the refusal", local.says.recv()).await.unwrap();
    assert!(said.starts_with("tunnel: 502 node nobody is not connected"), "{said}");
    local.ends().await;
}

#[tokio::test]
async fn a_user_proves_itself_with_the_password_of_a_file() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    // bcrypt of "pass word", at the least cost.
    let hash = bcrypt::hash("pass word", 4).unwrap();
    let users = place.file("users", &format!("ann:{hash}\n"));
    let pod = TestPod::with(&place, &format!("auth = \"basic\"\nusers = \"{}\"\n", users.display()));
    let _edge = edge(&place, &pod, "node1").await;
    let through = format!("--through=http://ann@{}", pod.connect);
    for (password, code) in [("pass word\n", None), ("wrong", Some("407"))] {
        let file = format!("--password-file={}", place.file("password", password).display());
        let mut local = Local::start(&[&through, &file, &at("node1", echo)]).await;
        let mut client = local.client().await;
        match code {
            None => echoed(&mut client, "hello").await,
            Some(code) => {
                let said = soon("the refusal", local.says.recv()).await.unwrap();
                assert!(said.starts_with(&format!("tunnel: {code}")), "{said}");
            }
        }
        drop(client);
        local.ends().await;
    }
}

#[tokio::test]
async fn tls_and_a_certificate_open_the_egress_port() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let dir = place.path().display();
    let table = format!(
        "[mode.cloud.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\nclient_ca = \"{dir}/ca.crt\"\nnames = [\"ops\"]\n"
    );
    let pod = TestPod::with(&place, &table);
    let _edge = edge(&place, &pod, "node1").await;
    let identity = place.client("ops");
    let through = format!("--through=https://{}", pod.port("egress"));
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
    let said = soon("the refusal", local.says.recv()).await.unwrap();
    assert!(said.contains(&pod.port("egress").to_string()), "{said}");
    local.ends().await;
}

#[tokio::test]
async fn a_unix_socket_of_the_pod_is_a_way_too() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let path = place.path().join("egress.sock");
    let pod = TestPod::with(&place, &format!("[mode.cloud.egress]\nlisten = \"unix:{}\"\n", path.display()));
    let _edge = edge(&place, &pod, "node1").await;
    let local = Local::start(&[&format!("--through=unix:{}", path.display()), &at("node1", echo)]).await;
    echoed(&mut local.client().await, "hello").await;
    local.ends().await;
}
