//! `tunnel demo`: two servers and an edge on loopback, each a process, and a download over a user's link that outlives
//! both servers.

mod download;
pub mod listeners;
mod page;

use std::fs::{DirBuilder, OpenOptions};
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use http::Method;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};
use tracing::info_span;

use crate::command::admin_sockets::exchange;
use crate::command::init::folder_on_machine;
use crate::command::{Role, shell_word};
use crate::config::ProxyVariables;
use crate::uplink::client::{ClientLinkConfig, ClientUplinks, UserCredentials};
use download::{DemoScreen, Download, RED, SimulatedNetwork};
use listeners::{DemoContext, DemoListenerSet, ExtraDemoListener, connect, get};
use page::serve;
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::pki::{CertificateAuthority, IssuedCert, PkiError};
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

/// Runs the demo until `stop` completes. With `check`, requests the page once over CONNECT and each additional module,
/// and returns.
///
/// # Errors
///
/// Returns an error with the step that failed.
pub async fn run(check: bool, with: &DemoListenerSet, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let mut screen = DemoScreen::new();
    let drain = Drain::new();
    let mut stop = pin!(stop);
    let dir = TempDir::new()?;
    let shown = tokio::select! {
        () = &mut stop => Ok(None),
        shown = show(check, with, &dir.0, &drain, &mut screen) => shown.map(Some),
    };
    let result = match shown {
        Ok(Some(mut demo)) => {
            if !check {
                demo.print_commands(&mut screen).await;
                stop.await;
            }
            demo.stop().await;
            Ok(())
        }
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    drain.finish(Duration::ZERO, std::future::ready(())).await;
    result
}

/// Starts everything, and then makes the requests of `--check`, or the download.
async fn show<'a>(
    check: bool,
    with: &'a DemoListenerSet,
    dir: &'a Path,
    drain: &Drain,
    screen: &mut DemoScreen,
) -> anyhow::Result<Demo<'a>> {
    let context = serve_pages(dir, drain)?;
    screen.step(&format!("certificates, a token and configs made in {}", dir.display()));
    let line = SimulatedNetwork::new();
    let addresses = DemoAddresses::choose(with, &line, drain)?;
    let mut demo = Demo::start(with, context, addresses, line, screen).await?;
    let shown = if check { demo.request(screen).await } else { demo.interrupt(screen).await };
    match shown {
        Ok(()) => Ok(demo),
        Err(error) => Err(demo.with_logs(error)),
    }
}

/// Serves the page without and with TLS, with new certificates.
fn serve_pages<'a>(dir: &'a Path, drain: &Drain) -> anyhow::Result<DemoContext<'a>> {
    write_certificates(dir).context("cannot make certificates")?;
    let identity =
        IdentityFiles { cert: dir.join(format!("{NODE}.crt")), key: dir.join(format!("{NODE}.key")) };
    let clients = ClientAuth::Anonymous;
    let offer = TlsParams::default();
    let tls = TlsServerConfig { identity, clients, offer, alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let plain = TcpListenSocket::bind_public(ephemeral_address())?;
    let encrypted = TcpListenSocket::bind_public(ephemeral_address())?;
    let context = DemoContext { dir, page: plain.at(), tls_page: encrypted.at() };
    drain.spawn(info_span!("page"), serve(plain, None, drain.clone()));
    let acceptor = tls.load().acceptor();
    drain.spawn(info_span!("page"), serve(encrypted, Some(acceptor), drain.clone()));
    Ok(context)
}

fn write_certificates(dir: &Path) -> anyhow::Result<()> {
    let issue = |name: &str, issued: &IssuedCert| -> Result<(), PkiError> {
        let file = |end| dir.join(format!("{name}.{end}"));
        issued.write(&file("crt"), &file("key"))
    };
    let authority = CertificateAuthority::new("tunnel demo", CERT_VALIDITY)?;
    issue("server", &authority.server(&["localhost", "127.0.0.1"])?)?;
    issue(NODE, &authority.server(&[NODE])?)?;
    issue("client", &authority.client(USER)?)?;
    files::create_private(&dir.join("ca.crt"), authority.cert())?;
    let token = format!("{:032x}", rand::random::<u128>());
    files::create_private(&dir.join("tokens"), &format!("{NODE}:{token}\n"))?;
    files::create_private(&dir.join("token"), &format!("{token}\n"))?;
    Ok(())
}

/// A directory for this user only, which is removed on drop.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tunnel-demo-{:016x}", rand::random::<u64>()));
        // The configs need an absolute path, and the printed commands one that is valid everywhere.
        let dir = std::path::absolute(&dir).unwrap_or(dir);
        folder_on_machine("TMPDIR", &dir).map_err(|refused| anyhow!(refused.text))?;
        if dir.as_os_str().len() > MAX_DIR_BYTES {
            bail!(
                "TMPDIR: {} is too long for the path of a socket; set TMPDIR to a shorter path",
                dir.display()
            );
        }
        DirBuilder::new().mode(0o700).create(&dir).with_context(|| {
            format!("cannot create {}; set TMPDIR to a directory that this user may write to", dir.display())
        })?;
        Ok(Self(dir))
    }
}

/// Maximum length of the directory, so that the path of each socket in it has less than 108 bytes.
const MAX_DIR_BYTES: usize = 90;

impl Drop for TempDir {
    fn drop(&mut self) {
        // Remains in the temporary directory are harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Addresses of the listeners. The processes need those of one another before they start.
struct DemoAddresses {
    links: [SocketAddr; 2],
    connects: [SocketAddr; 2],
    admins: [SocketAddr; 2],
    edge_admin: SocketAddr,
    /// Where the edge dials: the line to each server.
    lines: [SocketAddr; 2],
    modules: Vec<(ExtraDemoListener, SocketAddr)>,
}

impl DemoAddresses {
    fn choose(with: &DemoListenerSet, line: &SimulatedNetwork, drain: &Drain) -> anyhow::Result<Self> {
        // All are open at the same time, so that they differ.
        let listeners: Vec<_> = (0..7 + with.0.len())
            .map(|_| std::net::TcpListener::bind(ephemeral_address()))
            .collect::<Result<_, _>>()?;
        let mut free = listeners.iter().map(std::net::TcpListener::local_addr);
        let mut next = || free.next().unwrap_or_else(|| Ok(ephemeral_address()));
        let links = [next()?, next()?];
        Ok(Self {
            links,
            connects: [next()?, next()?],
            admins: [next()?, next()?],
            edge_admin: next()?,
            lines: [line.forward_to(links[0], drain)?, line.forward_to(links[1], drain)?],
            modules: with.0.iter().map(|module| Ok((*module, next()?))).collect::<std::io::Result<_>>()?,
        })
    }
}

/// The running processes.
struct Demo<'a> {
    context: DemoContext<'a>,
    at: DemoAddresses,
    line: SimulatedNetwork,
    servers: [Process; 2],
    edge: Process,
}

impl<'a> Demo<'a> {
    async fn start(
        with: &DemoListenerSet,
        context: DemoContext<'a>,
        at: DemoAddresses,
        line: SimulatedNetwork,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<Self> {
        let dir = context.dir;
        for (number, name) in SERVERS.iter().enumerate() {
            let tables: String = if number == CLIENT_SERVER {
                at.modules.iter().map(|(module, at)| module.server_tables(*at, &context)).collect()
            } else {
                with.0
                    .iter()
                    .filter(|module| **module == ExtraDemoListener::Proxy)
                    .map(|module| module.server_tables(ephemeral_address(), &context))
                    .collect()
            };
            let config = server_config(dir, &at, number, &tables);
            files::create_private(&dir.join(format!("{name}.toml")), &config)?;
        }
        let tables: String = at.modules.iter().map(|(module, at)| module.edge_tables(*at)).collect();
        files::create_private(&dir.join("edge.toml"), &edge_config(dir, &at, &tables))?;

        let mut servers =
            [Process::start(SERVERS[0], Role::Server, dir)?, Process::start(SERVERS[1], Role::Server, dir)?];
        for (number, server) in servers.iter_mut().enumerate() {
            server.is_ready(at.admins[number]).await?;
            screen.step(&format!(
                "{}: edges connect to {}, clients to {}",
                server.name, at.links[number], at.connects[number]
            ));
        }
        let mut edge = Process::start("edge", Role::Edge, dir)?;
        edge.is_ready(at.edge_admin).await?;
        let demo = Self { context, at, line, servers, edge };
        demo.reaches_node().await?;
        screen.step(&format!("edge: {NODE} is connected to {}", SERVERS[PREFERRED_SERVER]));
        Ok(demo)
    }

    /// Waits until a client reaches the page.
    async fn reaches_node(&self) -> anyhow::Result<()> {
        let target = self.target();
        let reached = async {
            loop {
                let mut client = TcpStream::connect(self.at.connects[CLIENT_SERVER]).await?;
                match connect(&mut client, &target).await {
                    Ok(_) => return anyhow::Ok(()),
                    Err(_) => sleep(POLL_INTERVAL).await,
                }
            }
        };
        timeout(TIMEOUT, reached).await.context("the node was not reached within 10 s")?
    }

    fn target(&self) -> String {
        format!("{NODE}:{}", self.context.page.port())
    }

    /// Requests the page once in each way, and prints the durations.
    async fn request(&mut self, screen: &mut DemoScreen) -> anyhow::Result<()> {
        screen.line("        (from here on, times are measured from the start of each request)");
        let requested_at = Instant::now();
        let target = self.target();
        let mut client = TcpStream::connect(self.at.connects[CLIENT_SERVER]).await?;
        let answer = connect(&mut client, &target).await?;
        screen.line(&format!("{:>7} CONNECT {target}: {answer}", elapsed_text(requested_at)));
        let bytes = get(client, "/", NODE).await?;
        screen.line(&format!("{:>7} GET /: {bytes} bytes, the page is complete", elapsed_text(requested_at)));
        for (module, at) in &self.at.modules {
            let requested_at = Instant::now();
            let bytes = module.ask(*at, &self.context).await.with_context(|| format!("{module} at {at}"))?;
            screen.line(&format!(
                "{:>7} {module} at {at}: {bytes} bytes, the page is complete",
                elapsed_text(requested_at)
            ));
        }
        Ok(())
    }

    /// Downloads over a user's link. Kills the server that has the link of the node, cuts its line, and kills the
    /// server that has the user's link. Afterwards both servers run.
    async fn interrupt(&mut self, screen: &mut DemoScreen) -> anyhow::Result<()> {
        let links = self.link().await?;
        screen.step(&format!("{USER} downloads from {NODE} over a link to {}", SERVERS[CLIENT_SERVER]));
        let mut download = Download::start(&links, &self.target().parse()?).await?;
        download.receive_tenths(2, screen).await?;
        self.kill(PREFERRED_SERVER, &format!("it held the link of {NODE}"), screen).await?;
        download.report_pause(Duration::ZERO);
        download.receive_tenths(4, screen).await?;
        self.restart(PREFERRED_SERVER, screen).await?;
        download.cut(&self.line, screen).await?;
        download.receive_tenths(8, screen).await?;
        self.kill(CLIENT_SERVER, &format!("it held the link of {USER}"), screen).await?;
        download.report_pause(Duration::ZERO);
        download.finish(screen).await?;
        links.close().await;
        self.restart(CLIENT_SERVER, screen).await
    }

    /// Links to the servers as a user.
    async fn link(&self) -> anyhow::Result<ClientUplinks> {
        let file = |name: &str| self.context.dir.join(name);
        let servers = [CLIENT_SERVER, PREFERRED_SERVER];
        let config = ClientLinkConfig {
            servers: servers.map(|server| self.at.links[server].into()).to_vec(),
            tls_server_name: Some("localhost".parse()?),
            device: "laptop".parse()?,
            proof: UserCredentials::Certificate(IdentityFiles {
                cert: file("client.crt"),
                key: file("client.key"),
            }),
            ca: Some(file("ca.crt")),
            proxy: ProxyVariables::default(),
        };
        ClientUplinks::connect(config).await.map_err(anyhow::Error::msg)
    }

    async fn kill(&mut self, server: usize, why: &str, screen: &mut DemoScreen) -> anyhow::Result<()> {
        let killed = &mut self.servers[server];
        killed.child.kill().await?;
        screen.coloured_step(RED, &format!("{} (process {}) is killed: {why}", killed.name, killed.id));
        Ok(())
    }

    async fn restart(&mut self, server: usize, screen: &mut DemoScreen) -> anyhow::Result<()> {
        self.servers[server] = Process::start(SERVERS[server], Role::Server, self.context.dir)?;
        self.servers[server].is_ready(self.at.admins[server]).await?;
        screen.step(&format!("{} runs again", SERVERS[server]));
        Ok(())
    }

    /// Prints commands to try.
    async fn print_commands(&self, screen: &mut DemoScreen) {
        let connect = self.at.connects[CLIENT_SERVER];
        let dir = shell_word(&self.context.dir.to_string_lossy());
        // As it was called, so that the lines work where it is not in PATH.
        let tunnel = shell_word(&std::env::args().next().unwrap_or_else(|| "tunnel".to_owned()));
        screen.line("\nA web page at the edge, through the tunnel:");
        screen.line(&format!("  curl -p -x http://{connect} http://{}/", self.target()));
        for (module, at) in &self.at.modules {
            let (what, line) = module.line(*at, &self.context);
            screen.line(&format!("\n{what}:\n  {line}"));
        }
        let sshd = SocketAddr::from((Ipv4Addr::LOCALHOST, 22));
        if TcpStream::connect(sshd).await.is_ok() {
            screen.line("\nThis machine's sshd, reached through the edge:");
        } else {
            screen.line("\nNo sshd listens on port 22 of this machine. With one, this would log in to it:");
        }
        screen.line(&format!("  {tunnel} ssh --server={connect} $USER@{NODE}"));
        screen.line(&format!("  ssh -o ProxyCommand=\"nc -X connect -x {connect} {NODE} 22\" $USER@{NODE}"));
        screen.line(&format!(
            "  ssh -o ProxyCommand=\"corkscrew {} {} {NODE} 22\" $USER@{NODE}",
            connect.ip(),
            connect.port()
        ));
        screen.line("\nNodes and sessions, in a browser and here:");
        screen.line(&format!("  http://{}/", self.at.admins[CLIENT_SERVER]));
        screen.line(&format!("  {tunnel} status --socket={dir}/{}.sock", SERVERS[CLIENT_SERVER]));
        screen.line(&format!("\nConfigs and logs are in {dir} until the demo ends."));
        if self.at.modules.is_empty() {
            screen.line(&format!("More listeners: {tunnel} demo --listeners all"));
        }
        screen.line("\nPress Ctrl-C to stop.");
    }

    /// Adds the last lines of the processes' logs to an error.
    fn with_logs(&self, error: anyhow::Error) -> anyhow::Error {
        let logs: String = self.servers.iter().chain([&self.edge]).map(Process::last_lines).collect();
        error.context(format!("the demo failed; the last log lines are:\n{logs}\nthe failure"))
    }

    async fn stop(&mut self) {
        let [one, two] = &mut self.servers;
        // The edge first, so that it need not look for a server.
        self.edge.stop().await;
        one.stop().await;
        two.stop().await;
    }
}

/// A server or an edge of the demo. It ends with this process, and is killed on drop.
struct Process {
    name: &'static str,
    id: u32,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `tunnel server` or `tunnel edge` with the config of that name.
    fn start(name: &'static str, role: Role, dir: &Path) -> anyhow::Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let to = OpenOptions::new().append(true).create(true).mode(0o600).open(&log)?;
        let named = std::env::current_exe().context("cannot find this program's file")?;
        // Its file may have been replaced meanwhile. The name is better for `ps`.
        let program = if named.exists() { named } else { "/proc/self/exe".into() };
        let mut command = Command::new(&program);
        command.arg(role.name()).arg("--end-with-parent").arg("-c").arg(dir.join(format!("{name}.toml")));
        // Neither a proxy nor other settings of this shell apply, and Ctrl-C reaches only the demo itself.
        command.env_clear().process_group(0).kill_on_drop(true);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(to).spawn();
        let child = child.with_context(|| format!("cannot run {}", program.display()))?;
        Ok(Self { name, id: child.id().unwrap_or_default(), child, log })
    }

    /// Waits until its admin listener reports that it is ready; an edge is ready once it is linked.
    async fn is_ready(&mut self, admin: SocketAddr) -> anyhow::Result<()> {
        let started = Instant::now();
        while !is_ready(admin).await {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}); its log:\n{}", self.name, self.last_lines());
            }
            if started.elapsed() > TIMEOUT {
                bail!("{} did not start within 10 s; its log:\n{}", self.name, self.last_lines());
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn last_lines(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let skipped = text.lines().count().saturating_sub(LOG_LINES);
        text.lines().skip(skipped).map(|line| format!("{}: {line}\n", self.name)).collect()
    }

    /// Ends it, and waits for that.
    async fn stop(&mut self) {
        if let Some(pid) = self.child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if timeout(TIMEOUT, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

async fn is_ready(admin: SocketAddr) -> bool {
    let Ok(stream) = TcpStream::connect(admin).await else { return false };
    matches!(exchange(stream, Method::GET, "/readyz", Bytes::new()).await, Ok((200, _)))
}

fn server_config(dir: &Path, at: &DemoAddresses, number: usize, tables: &str) -> String {
    let name = SERVERS[number];
    let dir = dir.display();
    let link = at.links[number];
    let connect = at.connects[number];
    let admin = at.admins[number];
    let peer = at.links[1 - number];
    format!(
        r#"[server.links]
name = "{name}"
listen = "{link}"
admin_listen = "{admin}"
cert = "{dir}/server.crt"
key = "{dir}/server.key"
peer_ca = "{dir}/ca.crt"
token_file = "{dir}/tokens"

[server.admin]
listen = "unix:{dir}/{name}.sock"

[server.peers]
addresses = ["{peer}"]
rebalance = false

[server.connect]
listen = "{connect}"

[server.clients]
client_ca = "{dir}/ca.crt"
names = ["{USER}"]
rules = [{{ users = ["{USER}"], nodes = ["{NODE}"] }}]

[server.session]
drain_timeout = "1s"

{tables}"#
    )
}

fn edge_config(dir: &Path, at: &DemoAddresses, tables: &str) -> String {
    let dir = dir.display();
    let [one, two] = at.lines;
    let admin = at.edge_admin;
    format!(
        r#"[edge.uplink]
node = "{NODE}"
token_file = "{dir}/token"
ca = "{dir}/ca.crt"
tls_server_name = "localhost"
servers = ["{one}", "{two}"]
admin_listen = "{admin}"

[edge.admin]
listen = "unix:{dir}/edge.sock"

[edge.session]
drain_timeout = "1s"

{tables}"#
    )
}

pub(crate) fn ephemeral_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub(crate) fn elapsed_text(started: Instant) -> String {
    format!("{:.1?}", started.elapsed())
}

pub(crate) const NODE: &str = "node1";
/// The user with a link, and with the client certificate.
pub(crate) const USER: &str = "alice";
const SERVERS: [&str; 2] = ["server1", "server2"];
/// The server that the edge prefers.
const PREFERRED_SERVER: usize = 0;
/// The server that clients use.
const CLIENT_SERVER: usize = 1;
/// Validity of the certificates: long enough that the live page does not warn of their end.
const CERT_VALIDITY: Duration = Duration::from_secs(40 * 24 * 3600);
/// Timeout for each step of the demo.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a process that starts is tried.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Number of log lines in an error.
const LOG_LINES: usize = 10;
