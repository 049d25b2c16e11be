//! `tunnel demo`: a server and an edge on loopback, with new certificates and a page to reach.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{DirBuilder, OpenOptions};
use std::future::Future;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::info_span;

use crate::config::Environment;
use crate::config::edge::EdgeConfig as Settings;
use crate::edge::Edge;
use crate::server::Server;
use crate::server::config::ServerConfig;
use tunnel_base::drain::Drain;
use tunnel_base::names::NodeName;
use tunnel_net::listen::TcpAccept;
use tunnel_net::pki::{CertificateAuthority, IssuedCert, PkiError};
use tunnel_net::tls::{
    ClientAuth, Identity, TlsClientConfig, TlsParams, TlsServerConfig, Trust, server_name,
};

/// Runs the demo until `stop` completes. With `check`, requests the page once over CONNECT and each additional module,
/// and returns. `say` prints a line on the terminal.
///
/// # Errors
///
/// Returns an error with the step that failed.
pub async fn run(
    check: bool,
    with: &[Module],
    stop: impl Future<Output = ()>,
    say: &dyn Fn(&str),
) -> anyhow::Result<()> {
    // Each module once, however often it is given.
    let with: BTreeSet<Module> = with.iter().copied().collect();
    let started = Instant::now();
    let files = DemoFiles::make().context("cannot make certificates")?;
    let pages = Drain::new();
    let stage = serve_pages(files.path(), &pages)?;
    say(&format!("{:>7} certificates and a token made in {}", since(started), files.path().display()));

    let server = Server::start(files.cloud(&with, &stage)?, None).context("cannot start the server")?;
    let ssh = server.bound.connect().context("the server has no CONNECT port")?;
    say(&format!("{:>7} server: edges connect to {}, clients to {ssh}", since(started), server.bound.grpc));
    let edge = Edge::start(files.edge(&with, server.bound.grpc)?, None).context("cannot start the edge")?;
    wait_for_node(&server).await?;
    say(&format!("{:>7} edge: {NODE} is connected", since(started)));

    let ways = with.iter().map(|module| Ok((*module, module.at(&server, &edge)?)));
    let ways = ways.collect::<anyhow::Result<Vec<DemoListener>>>()?;
    let result = if check {
        request(ssh, &ways, &stage, say).await
    } else {
        explain(ssh, &ways, &stage, stop, say).await;
        Ok(())
    };
    edge.shutdown(std::future::pending()).await;
    server.shutdown(std::future::pending()).await;
    pages.finish(Duration::ZERO, std::future::ready(())).await;
    result
}

/// A module, and the address of its listener.
type DemoListener = (Module, SocketAddr);

/// Serves the page without and with TLS.
fn serve_pages<'a>(dir: &'a Path, drain: &Drain) -> anyhow::Result<DemoContext<'a>> {
    let identity = Identity { cert: dir.join(format!("{NODE}.crt")), key: dir.join(format!("{NODE}.key")) };
    let (clients, offer) = (ClientAuth::Anonymous, TlsParams::default());
    let tls = TlsServerConfig { identity, clients, offer, alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let (plain, encrypted) = (TcpAccept::bind(anywhere())?, TcpAccept::bind(anywhere())?);
    let stage = DemoContext { dir, page: plain.at(), tls_page: encrypted.at() };
    drain.spawn(info_span!("page"), serve(plain, None, drain.clone()));
    let acceptor = TlsAcceptor::from(tls.load());
    drain.spawn(info_span!("page"), serve(encrypted, Some(acceptor), drain.clone()));
    Ok(stage)
}

/// The temporary directory with all files of both sides.
struct DemoFiles(TempDir);

/// A directory that is removed on drop.
struct TempDir(std::path::PathBuf);

impl DemoFiles {
    fn make() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tunnel-demo-{:016x}", rand::random::<u64>()));
        DirBuilder::new().mode(0o700).create(&dir)?;
        let this = Self(TempDir(dir));
        let authority = CertificateAuthority::new("tunnel demo", VALID)?;
        let server = authority.server(&["localhost", "127.0.0.1"])?;
        this.write_issued("cloud", &server)?;
        this.write_issued(NODE, &authority.server(&[NODE])?)?;
        this.write_issued("client", &authority.client("demo")?)?;
        this.write("ca.crt", authority.cert())?;
        this.write("token", &format!("{NODE}:{:032x}\n", rand::random::<u128>()))?;
        Ok(this)
    }

    fn path(&self) -> &Path {
        &self.0.0
    }

    fn write_issued(&self, name: &str, issued: &IssuedCert) -> Result<(), PkiError> {
        let file = |end| self.path().join(format!("{name}.{end}"));
        issued.write(&file("crt"), &file("key"))
    }

    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.path().join(name))?;
        file.write_all(text.as_bytes())
    }

    fn cloud(&self, with: &BTreeSet<Module>, stage: &DemoContext<'_>) -> anyhow::Result<ServerConfig> {
        let dir = self.path().display();
        let tables: String = with.iter().map(|module| module.cloud_tables(stage)).collect();
        let text = format!(
            r#"
            [server.links]
            listen = "127.0.0.1:0"
            admin_listen = "127.0.0.1:0"
            cert = "{dir}/cloud.crt"
            key = "{dir}/cloud.key"
            token_file = "{dir}/token"
            [server.admin]
            listen = "unix:{dir}/server.sock"
            [server.connect]
            listen = "127.0.0.1:0"
            [server.session]
            drain_timeout = "1s"
            {tables}"#
        );
        Ok(ServerConfig::read(&text, &Environment::default())?.0)
    }

    fn edge(&self, with: &BTreeSet<Module>, grpc: SocketAddr) -> anyhow::Result<Settings> {
        let dir = self.path().display();
        let tokens = std::fs::read_to_string(self.path().join("token"))?;
        let token = tokens.trim().rsplit(':').next().unwrap_or_default();
        let tables: String = with.iter().map(|module| module.edge_tables()).collect();
        let text = format!(
            r#"
            [edge.uplink]
            node = "{NODE}"
            token = "{token}"
            ca = "{dir}/ca.crt"
            tls_server_name = "localhost"
            servers = ["{grpc}"]
            admin_listen = "127.0.0.1:0"
            [edge.admin]
            listen = "unix:{dir}/edge.sock"
            [edge.session]
            drain_timeout = "1s"
            {tables}"#
        );
        Ok(Settings::read(&text, &Environment::default())?.0)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // Remains in the temporary directory are harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn wait_for_node(server: &Server) -> anyhow::Result<()> {
    let node: NodeName = NODE.parse()?;
    let linked = server.registry.wait(&node, None, Instant::now() + TIMEOUT).await;
    linked.map(|_| ()).context("the edge did not connect within 10 s; see the lines above")
}

/// Requests the page once in each way, and prints the durations.
async fn request(
    ssh: SocketAddr,
    ways: &[DemoListener],
    stage: &DemoContext<'_>,
    say: &dyn Fn(&str),
) -> anyhow::Result<()> {
    say("        (from here on, times are measured from the start of each request)");
    let asked = Instant::now();
    let mut client = TcpStream::connect(ssh).await?;
    let target = format!("{NODE}:{}", stage.page.port());
    let answer = connect(&mut client, &target).await?;
    say(&format!("{:>7} CONNECT {target}: {answer}", since(asked)));
    let bytes = get(client, "/", NODE).await?;
    say(&format!("{:>7} GET /: {bytes} bytes, the page is complete", since(asked)));
    for (module, at) in ways {
        let asked = Instant::now();
        let bytes = module.ask(*at, stage).await.with_context(|| format!("{module} at {at}"))?;
        say(&format!("{:>7} {module} at {at}: {bytes} bytes, the page is complete", since(asked)));
    }
    Ok(())
}

/// Prints commands to try, and waits.
async fn explain(
    ssh: SocketAddr,
    ways: &[DemoListener],
    stage: &DemoContext<'_>,
    stop: impl Future<Output = ()>,
    say: &dyn Fn(&str),
) {
    say("\nA web page at the edge, through the tunnel:");
    say(&format!("  curl -p -x http://{ssh} http://{NODE}:{}/", stage.page.port()));
    for (module, at) in ways {
        let (what, line) = module.line(*at, stage);
        say(&format!("\n{what}:\n  {line}"));
    }
    let sshd = SocketAddr::from((Ipv4Addr::LOCALHOST, 22));
    if TcpStream::connect(sshd).await.is_ok() {
        say("\nThis machine's sshd, reached through the edge:");
    } else {
        say("\nNo sshd listens on port 22 of this machine. With one, this would log in to it:");
    }
    say(&format!("  ssh -o ProxyCommand=\"nc -X connect -x {ssh} {NODE} 22\" $USER@{NODE}"));
    say(&format!("  ssh -o ProxyCommand=\"corkscrew {} {} {NODE} 22\" $USER@{NODE}", ssh.ip(), ssh.port()));
    if ways.is_empty() {
        say("\nMore modules: tunnel demo --listeners tcp,http,https,egress,proxy");
    }
    say("\nPress Ctrl-C to stop.");
    stop.await;
}

fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn since(started: Instant) -> String {
    format!("{:.1?}", started.elapsed())
}

const NODE: &str = "node1";
/// Validity of the certificates. A demo should not run for longer than a day.
const VALID: Duration = Duration::from_secs(24 * 3600);

// The demo's modules besides CONNECT: for each its config, a command to try, and the same request made by the program.

/// An additional way to the demo's page, chosen by `--listeners`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Module {
    /// A TCP port of the server that stands for the page's port.
    Tcp,
    /// A port of the server that stands for the page's port at every node, selected by Host.
    Http,
    /// The same with TLS, terminated by the server and started again by the edge.
    Https,
    /// CONNECT with a client certificate, as kube-apiserver's egress selector uses it.
    Egress,
    /// The edge's proxy, for programs on the node.
    Proxy,
}

/// The demo's directory of files, and the addresses of its page.
pub(crate) struct DemoContext<'a> {
    /// Directory of certificates, keys and tokens.
    pub(crate) dir: &'a Path,
    /// Address of the page.
    pub(crate) page: SocketAddr,
    /// Address of the page with TLS.
    pub(crate) tls_page: SocketAddr,
}

/// Formats the name as in `--listeners`.
impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl Module {
    /// Returns the tables that the server's config needs for it.
    pub(crate) fn cloud_tables(self, stage: &DemoContext<'_>) -> String {
        let DemoContext { dir, page, tls_page } = stage;
        let dir = dir.display();
        match self {
            Self::Tcp => format!("[server.tcp]\n\"127.0.0.1:0\" = \"{NODE}/{page}\"\n"),
            Self::Http => {
                format!("[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{page}\" }}\n")
            }
            Self::Https => format!(
                "[server.https]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"{tls_page}\" }}\n\
                 cert = \"{dir}/{NODE}.crt\"\nkey = \"{dir}/{NODE}.key\"\nclient_ca = \"{dir}/ca.crt\"\n\
                 names = [\"demo\"]\n"
            ),
            Self::Egress => format!(
                "[server.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n\
                 client_ca = \"{dir}/ca.crt\"\nnames = [\"demo\"]\n"
            ),
            Self::Proxy => format!("[server.edge_access]\ntargets = [\"{page}\"]\n"),
        }
    }

    /// Returns the tables that the edge's config needs for it.
    pub(crate) fn edge_tables(self) -> &'static str {
        match self {
            Self::Proxy => "[edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n",
            Self::Tcp | Self::Http | Self::Https | Self::Egress => "",
        }
    }

    /// Returns the address of its listener.
    pub(crate) fn at(self, server: &Server, edge: &Edge) -> anyhow::Result<SocketAddr> {
        let of_server =
            |listener| server.bound.clients.iter().find(|(name, _)| *name == listener).map(|(_, at)| *at);
        let at = match self {
            Self::Tcp => of_server("tcp"),
            Self::Http => of_server("http"),
            Self::Https => of_server("https"),
            Self::Egress => of_server("egress"),
            Self::Proxy => edge.bound.proxy,
        };
        at.with_context(|| format!("no port for {self}"))
    }

    /// Returns the description of a command to try, and the command.
    pub(crate) fn line(self, at: SocketAddr, stage: &DemoContext<'_>) -> (&'static str, String) {
        let (port, page, dir) = (at.port(), stage.page.port(), stage.dir.display());
        match self {
            Self::Tcp => ("A TCP port of the server for the page's port", format!("curl http://{at}/")),
            Self::Http => (
                "A port of the server that stands for the page's port at every node; in DNS, nodes' names would resolve to the server",
                format!("curl --resolve {NODE}:{port}:{} http://{NODE}:{port}/", at.ip()),
            ),
            Self::Https => (
                "The same with TLS, for clients with a certificate",
                format!(
                    "curl --cacert {dir}/ca.crt --cert {dir}/client.crt --key {dir}/client.key \
                     --resolve {NODE}:{port}:{} https://{NODE}:{port}/",
                    at.ip()
                ),
            ),
            Self::Egress => (
                "CONNECT with a certificate, as kube-apiserver's egress selector uses it",
                format!(
                    "curl --proxy-cacert {dir}/ca.crt --proxy-cert {dir}/client.crt --proxy-key {dir}/client.key \
                     -p -x https://{at} http://{NODE}:{page}/"
                ),
            ),
            Self::Proxy => (
                "The reverse direction: a program on the node reaches a page in the cloud through its edge's proxy",
                format!("curl -x http://{at} http://{IN_CLOUD}:{page}/"),
            ),
        }
    }

    /// Makes the request of the command. Returns the number of bytes received.
    pub(crate) async fn ask(self, at: SocketAddr, stage: &DemoContext<'_>) -> anyhow::Result<usize> {
        let socket = TcpStream::connect(at).await?;
        let host = format!("{NODE}:{}", at.port());
        match self {
            Self::Tcp | Self::Http => get(socket, "/", &host).await,
            Self::Https => get(encrypted(socket, NODE, stage.dir).await?, "/", &host).await,
            Self::Egress => {
                let mut stream = encrypted(socket, &at.ip().to_string(), stage.dir).await?;
                let target = format!("{NODE}:{}", stage.page.port());
                connect(&mut stream, &target).await?;
                get(stream, "/", &target).await
            }
            Self::Proxy => {
                let host = format!("{IN_CLOUD}:{}", stage.page.port());
                get(socket, &format!("http://{host}/"), &host).await
            }
        }
    }
}

/// Connects with TLS to a server of that name, and presents the client's certificate.
async fn encrypted(socket: TcpStream, name: &str, dir: &Path) -> anyhow::Result<TlsStream<TcpStream>> {
    let identity = Identity { cert: dir.join("client.crt"), key: dir.join("client.key") };
    let trust = Trust::Ca(dir.join("ca.crt"));
    let tls = TlsClientConfig { trust, identity: Some(identity), alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let shaken = TlsConnector::from(tls.load()).connect(server_name(name)?, socket);
    shaken.await.context("TLS handshake failed")
}

/// A name with a dot, so not a node's; it resolves to this machine.
const IN_CLOUD: &str = "web.localhost";

// The page at the demo's edge: server and client.

/// Serves the page on each connection, whatever the request, until draining starts; over TLS if `tls` is set.
pub(crate) async fn serve(listener: TcpAccept, tls: Option<TlsAcceptor>, drain: Drain) {
    loop {
        let (socket, _) = tokio::select! {
            () = drain.draining() => return,
            accepted = listener.accept() => accepted,
        };
        let tls = tls.clone();
        drain.spawn(info_span!("page"), async move {
            match tls {
                None => answer(socket).await,
                Some(tls) => {
                    if let Ok(socket) = tls.accept(socket).await {
                        answer(socket).await;
                    }
                }
            }
        });
    }
}

async fn answer<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) {
    let mut request = [0; 4096];
    let length = PAGE.len();
    let head = format!("HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n");
    if socket.read(&mut request).await.is_ok() && socket.write_all((head + PAGE).as_bytes()).await.is_ok() {
        // The client has everything it needs; how it closes does not matter.
        let _ = socket.shutdown().await;
        let _ = timeout(TIMEOUT, socket.read(&mut request)).await;
    }
}

/// Requests the page over a connection, and reads it completely. Returns the number of bytes received.
pub(crate) async fn get<S>(mut stream: S, url: &str, host: &str) -> anyhow::Result<usize>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ask = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    timeout(TIMEOUT, stream.read_to_string(&mut answer)).await.context("no page within 10 s")??;
    if !answer.ends_with(PAGE) {
        bail!("unexpected page: {answer:?}");
    }
    Ok(answer.len())
}

/// Sends CONNECT for a target. Returns the first line of the response.
pub(crate) async fn connect<S>(stream: &mut S, target: &str) -> anyhow::Result<String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes()).await?;
    let head = timeout(TIMEOUT, read_head(stream)).await.context("no response to CONNECT within 10 s")??;
    let line = head.lines().next().unwrap_or("nothing");
    if !head.contains(" 200 ") {
        bail!("CONNECT refused: {line}");
    }
    Ok(line.to_owned())
}

async fn read_head<S: AsyncRead + Unpin>(stream: &mut S) -> anyhow::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await.context("the server closed the connection")?;
        head.push(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

const PAGE: &str =
    "<!doctype html><title>node1</title><h1>Hello from node1</h1><p>This came through the tunnel.\n";
/// Timeout for each step of the demo.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);
