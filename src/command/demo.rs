//! A pod and an edge on loopback, with fresh certificates and something to reach: the first contact.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tracing::info_span;

use crate::cloud::Pod;
use crate::config::Environment;
use crate::config::cloud::Cloud;
use crate::config::edge::EdgeSettings as Settings;
use crate::drain::Drain;
use crate::edge::Edge;
use crate::names::NodeName;
use crate::net::listen::Listener;
use crate::pki::Authority;

/// Runs the demo until `stop` completes, or makes one request and ends if `check`. `say` prints a line on the terminal.
///
/// # Errors
///
/// What did not work, with the step at which it happened.
pub async fn run(check: bool, stop: impl Future<Output = ()>, say: &dyn Fn(&str)) -> anyhow::Result<()> {
    let begun = Instant::now();
    let files = DemoFiles::make().context("making certificates")?;
    let pages = Drain::new();
    let page = Listener::bind(anywhere())?;
    let page_at = page.at();
    pages.spawn(info_span!("page"), serve_page(page, pages.clone()));
    say(&format!("{:>7} certificates and a token made in {}", since(begun), files.path().display()));

    let pod = Pod::start(files.cloud()?, None).context("starting the pod")?;
    let ssh = pod.bound.connect().context("the pod has no CONNECT port")?;
    say(&format!("{:>7} pod:  edges link to {}, clients come to {ssh}", since(begun), pod.bound.grpc));
    let edge = Edge::start(files.edge(pod.bound.grpc)?, None).context("starting the edge")?;
    wait_for_node(&pod).await?;
    say(&format!("{:>7} edge: {NODE} is linked", since(begun)));

    let result =
        if check { request(ssh, page_at, say).await } else { explain(ssh, page_at, stop, say).await };
    edge.stop(std::future::pending()).await;
    pod.stop(std::future::pending()).await;
    pages.finish(Duration::ZERO, std::future::ready(())).await;
    result
}

/// The temporary directory with everything that both sides read.
struct DemoFiles(TempDir);

/// A directory that is removed when dropped.
struct TempDir(std::path::PathBuf);

impl DemoFiles {
    fn make() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tunnel-demo-{:016x}", rand::random::<u64>()));
        std::fs::create_dir(&dir)?;
        let this = Self(TempDir(dir));
        let authority = Authority::new("tunnel demo", VALID)?;
        let server = authority.server(&["localhost", "127.0.0.1"])?;
        server.write(&this.path().join("cloud.crt"), &this.path().join("cloud.key"))?;
        this.write("ca.crt", authority.cert())?;
        this.write("token", &format!("{NODE}:{:032x}\n", rand::random::<u128>()))?;
        Ok(this)
    }

    fn path(&self) -> &Path {
        &self.0.0
    }

    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        std::fs::write(self.path().join(name), text)
    }

    fn cloud(&self) -> anyhow::Result<Cloud> {
        let dir = self.path().display();
        let text = format!(
            r#"
            [mode.cloud.stream.server]
            listen = "127.0.0.1:0"
            log_listen = "127.0.0.1:0"
            cert = "{dir}/cloud.crt"
            key = "{dir}/cloud.key"
            tokenfile = "{dir}/token"
            [mode.cloud.ssh]
            listen = "127.0.0.1:0"
            [mode.cloud.session]
            drain = "1s"
            "#
        );
        Ok(Cloud::read(&text, &Environment::default())?.0)
    }

    fn edge(&self, grpc: SocketAddr) -> anyhow::Result<Settings> {
        let dir = self.path().display();
        let tokens = std::fs::read_to_string(self.path().join("token"))?;
        let token = tokens.trim().rsplit(':').next().unwrap_or_default();
        let text = format!(
            r#"
            [mode.edge.stream.client]
            node = "{NODE}"
            token = "{token}"
            cert = "{dir}/ca.crt"
            dns = "localhost"
            servername = "{grpc}"
            log_listen = "127.0.0.1:0"
            [mode.edge.session]
            drain = "1s"
            "#
        );
        Ok(Settings::read(&text, &Environment::default())?.0)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // What is left in the temporary directory does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn wait_for_node(pod: &Pod) -> anyhow::Result<()> {
    let node: NodeName = NODE.parse()?;
    let linked = pod.registry.wait(&node, None, Instant::now() + REQUEST_TIMEOUT).await;
    linked.map(|_| ()).context("the edge did not link within 10 s: see the lines above")
}

/// One request to the page through the tunnel, with times.
async fn request(ssh: SocketAddr, page: SocketAddr, say: &dyn Fn(&str)) -> anyhow::Result<()> {
    let asked = Instant::now();
    let mut client = TcpStream::connect(ssh).await?;
    client.write_all(format!("CONNECT {NODE}:{} HTTP/1.1\r\n\r\n", page.port()).as_bytes()).await?;
    let head = timeout(REQUEST_TIMEOUT, read_head(&mut client))
        .await
        .context("no answer to CONNECT within 10 s")??;
    if !head.contains(" 200 ") {
        bail!("CONNECT was answered: {}", head.lines().next().unwrap_or("nothing"));
    }
    say(&format!(
        "{:>7} CONNECT {NODE}:{} answered: {}",
        since(asked),
        page.port(),
        head.lines().next().unwrap_or("")
    ));
    client.write_all(format!("GET / HTTP/1.0\r\nHost: {NODE}\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    timeout(REQUEST_TIMEOUT, client.read_to_string(&mut answer)).await.context("no page within 10 s")??;
    if !answer.ends_with(PAGE) {
        bail!("the page came back wrong: {answer:?}");
    }
    say(&format!("{:>7} GET / answered with {} bytes, the page is whole", since(asked), answer.len()));
    Ok(())
}

/// Prints what to try, and waits.
async fn explain(
    ssh: SocketAddr,
    page: SocketAddr,
    stop: impl Future<Output = ()>,
    say: &dyn Fn(&str),
) -> anyhow::Result<()> {
    say("\nA web page at the edge, through the tunnel:");
    say(&format!("  curl -p -x http://{ssh} http://{NODE}:{}/", page.port()));
    let sshd = SocketAddr::from((Ipv4Addr::LOCALHOST, 22));
    if TcpStream::connect(sshd).await.is_ok() {
        say("\nThis machine's sshd, as if it were the edge's:");
    } else {
        say("\nNo sshd listens on port 22 of this machine; with one, this would log in to it:");
    }
    say(&format!("  ssh -o ProxyCommand=\"nc -X connect -x {ssh} {NODE} 22\" $USER@{NODE}"));
    say(&format!("  ssh -o ProxyCommand=\"corkscrew {} {} {NODE} 22\" $USER@{NODE}", ssh.ip(), ssh.port()));
    say("\nCtrl-C ends it.");
    stop.await;
    Ok(())
}

async fn read_head(client: &mut TcpStream) -> anyhow::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = client.read_u8().await.context("the pod hung up")?;
        head.push(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// A page for each connection, whatever it asks.
async fn serve_page(listener: Listener, drain: Drain) {
    loop {
        let (mut socket, _) = tokio::select! {
            () = drain.draining() => return,
            accepted = listener.accept() => accepted,
        };
        drain.spawn(info_span!("page"), async move {
            let mut request = [0; 4096];
            let length = PAGE.len();
            let head =
                format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
            if socket.read(&mut request).await.is_ok()
                && socket.write_all((head + PAGE).as_bytes()).await.is_ok()
            {
                // The client has all it needs; how it closes does not matter.
                let _ = socket.shutdown().await;
                let _ = timeout(REQUEST_TIMEOUT, socket.read(&mut request)).await;
            }
        });
    }
}

fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn since(begun: Instant) -> String {
    format!("{:.1?}", begun.elapsed())
}

const NODE: &str = "node1";
const PAGE: &str =
    "<!doctype html><title>node1</title><h1>Hello from node1</h1><p>This came through the tunnel.\n";
/// For each step of the demo.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// A demo that runs longer than a day has become something else.
const VALID: Duration = Duration::from_secs(24 * 3600);
