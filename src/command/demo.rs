//! A pod and an edge on loopback, with fresh certificates and something to reach: the first contact.

mod modules;
mod page;

use std::collections::BTreeSet;
use std::fs::{DirBuilder, OpenOptions};
use std::future::Future;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tracing::info_span;

use crate::cloud::Pod;
use crate::config::Environment;
use crate::config::cloud::Cloud;
use crate::config::edge::EdgeSettings as Settings;
use crate::drain::Drain;
use crate::edge::Edge;
use crate::names::NodeName;
use crate::net::listen::Listener;
use crate::net::tls::{ClientCertificates, Identity, ServerSettings, TlsParams};
use crate::pki::{Authority, Issued, PkiError};

pub use modules::Module;
use modules::Stage;

/// Runs the demo until `stop` completes, or asks for the page once and ends if `check`; in each of these ways beside
/// CONNECT. `say` prints a line on the terminal.
///
/// # Errors
///
/// What did not work, with the step at which it happened.
pub async fn run(
    check: bool,
    with: &[Module],
    stop: impl Future<Output = ()>,
    say: &dyn Fn(&str),
) -> anyhow::Result<()> {
    // Each once, whatever is asked for.
    let with: BTreeSet<Module> = with.iter().copied().collect();
    let begun = Instant::now();
    let files = DemoFiles::make().context("making certificates")?;
    let pages = Drain::new();
    let stage = serve_pages(files.path(), &pages)?;
    say(&format!("{:>7} certificates and a token made in {}", since(begun), files.path().display()));

    let pod = Pod::start(files.cloud(&with, &stage)?, None).context("starting the pod")?;
    let ssh = pod.bound.connect().context("the pod has no CONNECT port")?;
    say(&format!("{:>7} pod:  edges link to {}, clients come to {ssh}", since(begun), pod.bound.grpc));
    let edge = Edge::start(files.edge(&with, pod.bound.grpc)?, None).context("starting the edge")?;
    wait_for_node(&pod).await?;
    say(&format!("{:>7} edge: {NODE} is linked", since(begun)));

    let ways = with.iter().map(|module| Ok((*module, module.at(&pod, &edge)?)));
    let ways = ways.collect::<anyhow::Result<Vec<Way>>>()?;
    let result = if check {
        request(ssh, &ways, &stage, say).await
    } else {
        explain(ssh, &ways, &stage, stop, say).await;
        Ok(())
    };
    edge.stop(std::future::pending()).await;
    pod.stop(std::future::pending()).await;
    pages.finish(Duration::ZERO, std::future::ready(())).await;
    result
}

/// A module, and where its clients come in.
type Way = (Module, SocketAddr);

/// Serves the page without and with TLS.
fn serve_pages<'a>(dir: &'a Path, drain: &Drain) -> anyhow::Result<Stage<'a>> {
    let identity = Identity { cert: dir.join(format!("{NODE}.crt")), key: dir.join(format!("{NODE}.key")) };
    let (clients, offer) = (ClientCertificates::Anonymous, TlsParams::default());
    let tls = ServerSettings { identity, clients, offer, alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let (plain, encrypted) = (Listener::bind(anywhere())?, Listener::bind(anywhere())?);
    let stage = Stage { dir, page: plain.at(), tls_page: encrypted.at() };
    drain.spawn(info_span!("page"), page::serve(plain, None, drain.clone()));
    let acceptor = TlsAcceptor::from(tls.load());
    drain.spawn(info_span!("page"), page::serve(encrypted, Some(acceptor), drain.clone()));
    Ok(stage)
}

/// The temporary directory with everything that both sides read.
struct DemoFiles(TempDir);

/// A directory that is removed when dropped.
struct TempDir(std::path::PathBuf);

impl DemoFiles {
    fn make() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tunnel-demo-{:016x}", rand::random::<u64>()));
        DirBuilder::new().mode(0o700).create(&dir)?;
        let this = Self(TempDir(dir));
        let authority = Authority::new("tunnel demo", VALID)?;
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

    fn write_issued(&self, name: &str, issued: &Issued) -> Result<(), PkiError> {
        let file = |end| self.path().join(format!("{name}.{end}"));
        issued.write(&file("crt"), &file("key"))
    }

    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.path().join(name))?;
        file.write_all(text.as_bytes())
    }

    fn cloud(&self, with: &BTreeSet<Module>, stage: &Stage<'_>) -> anyhow::Result<Cloud> {
        let dir = self.path().display();
        let tables: String = with.iter().map(|module| module.cloud_tables(stage)).collect();
        let text = format!(
            r#"
            [mode.cloud.stream.server]
            listen = "127.0.0.1:0"
            log_listen = "127.0.0.1:0"
            cert = "{dir}/cloud.crt"
            key = "{dir}/cloud.key"
            tokenfile = "{dir}/token"
            [mode.cloud.admin]
            listen = "unix:{dir}/cloud.sock"
            [mode.cloud.ssh]
            listen = "127.0.0.1:0"
            [mode.cloud.session]
            drain = "1s"
            {tables}"#
        );
        Ok(Cloud::read(&text, &Environment::default())?.0)
    }

    fn edge(&self, with: &BTreeSet<Module>, grpc: SocketAddr) -> anyhow::Result<Settings> {
        let dir = self.path().display();
        let tokens = std::fs::read_to_string(self.path().join("token"))?;
        let token = tokens.trim().rsplit(':').next().unwrap_or_default();
        let tables: String = with.iter().map(|module| module.edge_tables()).collect();
        let text = format!(
            r#"
            [mode.edge.stream.client]
            node = "{NODE}"
            token = "{token}"
            cert = "{dir}/ca.crt"
            dns = "localhost"
            servername = "{grpc}"
            log_listen = "127.0.0.1:0"
            [mode.edge.admin]
            listen = "unix:{dir}/edge.sock"
            [mode.edge.session]
            drain = "1s"
            {tables}"#
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
    let linked = pod.registry.wait(&node, None, Instant::now() + page::PATIENCE).await;
    linked.map(|_| ()).context("the edge did not link within 10 s: see the lines above")
}

/// Asks for the page once in each way, with times.
async fn request(ssh: SocketAddr, ways: &[Way], stage: &Stage<'_>, say: &dyn Fn(&str)) -> anyhow::Result<()> {
    say("        (from here on, each line's time begins with its own request)");
    let asked = Instant::now();
    let mut client = TcpStream::connect(ssh).await?;
    let target = format!("{NODE}:{}", stage.page.port());
    let answer = page::connect(&mut client, &target).await?;
    say(&format!("{:>7} CONNECT {target} answered: {answer}", since(asked)));
    let bytes = page::get(client, "/", NODE).await?;
    say(&format!("{:>7} GET / answered with {bytes} bytes, the page is whole", since(asked)));
    for (module, at) in ways {
        let asked = Instant::now();
        let bytes = module.ask(*at, stage).await.with_context(|| format!("{module} at {at}"))?;
        say(&format!("{:>7} {module} at {at}: {bytes} bytes, the page is whole", since(asked)));
    }
    Ok(())
}

/// Prints what to try, and waits.
async fn explain(
    ssh: SocketAddr,
    ways: &[Way],
    stage: &Stage<'_>,
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
        say("\nThis machine's sshd, as if it were the edge's:");
    } else {
        say("\nNo sshd listens on port 22 of this machine; with one, this would log in to it:");
    }
    say(&format!("  ssh -o ProxyCommand=\"nc -X connect -x {ssh} {NODE} 22\" $USER@{NODE}"));
    say(&format!("  ssh -o ProxyCommand=\"corkscrew {} {} {NODE} 22\" $USER@{NODE}", ssh.ip(), ssh.port()));
    if ways.is_empty() {
        say("\nThe other modules: tunnel demo --with tcp,http,https,egress,proxy");
    }
    say("\nCtrl-C ends it.");
    stop.await;
}

fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn since(begun: Instant) -> String {
    format!("{:.1?}", begun.elapsed())
}

const NODE: &str = "node1";
/// A demo that runs longer than a day has become something else.
const VALID: Duration = Duration::from_secs(24 * 3600);
