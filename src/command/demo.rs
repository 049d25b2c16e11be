//! `tunnel demo`: two servers and an edge on loopback, each a process, and a download over a user's link that outlives
//! both servers.

mod download;
mod page;
mod screen;

use std::fs::{DirBuilder, OpenOptions};
use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::command::admin_sockets::exchange;
use crate::command::init::folder_on_machine;
use crate::command::shell_word;
use crate::config::ProxyVariables;
use crate::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use download::{Download, SimulatedNetwork};
use page::PAGE;
use screen::{DemoScreen, RED, elapsed_text};
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_net::pki::CertificateAuthority;
use tunnel_net::tls::IdentityFiles;

/// Runs the demo until `stop` completes. With `check`, requests the page once over CONNECT and each listener of `with`,
/// and returns.
///
/// # Errors
///
/// Returns an error with the step that failed.
pub async fn run(check: bool, with: &[String], stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let dir = TempDir::new()?;
    let drain = Drain::new();
    let mut demo = Demo::new(&dir.0, &drain)?;
    let shown = async {
        demo.start_all().await?;
        if check {
            return demo.request_page(with).await;
        }
        demo.interrupt_download().await?;
        demo.print_commands(with).await;
        std::future::pending().await
    };
    let shown = tokio::select! {
        shown = shown => shown,
        () = stop => Ok(()),
    };
    for process in demo.processes.iter_mut().flatten() {
        // It may have ended already.
        let _ = process.kill().await;
    }
    drain.finish(Duration::ZERO, std::future::ready(())).await;
    shown.with_context(|| {
        format!("the demo failed; its last log lines are:\n{}the failure", last_lines(&dir.0))
    })
}

/// Returns the last lines of the logs of all processes.
fn last_lines(dir: &Path) -> String {
    let mut last = String::new();
    for name in NAMES {
        let text = std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default();
        let skipped = text.lines().count().saturating_sub(LOG_LINES);
        last.extend(text.lines().skip(skipped).map(|line| format!("{name}: {line}\n")));
    }
    last
}

/// A directory for this user only, which is removed on drop.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tunnel-demo-{:016x}", rand::random::<u64>()));
        // The configs need an absolute path, and the printed commands one that is valid everywhere.
        let dir = std::path::absolute(dir)?;
        let shown = folder_on_machine("TMPDIR", &dir).map_err(|refused| anyhow!(refused.text))?;
        if shown.len() > MAX_DIR_BYTES {
            bail!("TMPDIR: {shown} is too long for the path of a socket; set TMPDIR to a shorter path");
        }
        DirBuilder::new().mode(0o700).create(&dir).with_context(|| {
            format!("cannot create {shown}; set TMPDIR to a directory that this user may write to")
        })?;
        Ok(Self(dir))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // Remains in the temporary directory are harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The demo's files, addresses and processes.
struct Demo {
    dir: PathBuf,
    /// What templates call `{name}`, by name: addresses and paths.
    values: Vec<(String, String)>,
    line: SimulatedNetwork,
    /// The running processes, by their places in [`NAMES`]. They end with this process, and are killed on drop.
    processes: [Option<Child>; 3],
    screen: DemoScreen,
}

impl Demo {
    /// Makes certificates and configs, and serves the page.
    fn new(dir: &Path, drain: &Drain) -> anyhow::Result<Self> {
        let screen = DemoScreen::new();
        write_certificates(dir).context("cannot make certificates")?;
        let line = SimulatedNetwork::new();
        let processes = [const { None }; 3];
        let mut demo = Self { dir: dir.to_owned(), values: Vec::new(), line, processes, screen };
        demo.set("dir", dir.display().to_string());
        demo.set("dir_word", shell_word(&dir.to_string_lossy()));
        // As it was called, so that the lines work where it is not in PATH.
        let called = std::env::args().next();
        demo.set("tunnel", shell_word(&called.unwrap_or_else(|| "tunnel".to_owned())));
        demo.choose_ports()?;
        let (page, tls_page) = page::serve(&identity(dir, "server"), drain)?;
        demo.set_address("page", &page.to_string());
        demo.set_address("tls_page", &tls_page.to_string());
        for number in ["1", "2"] {
            let end = demo.line.forward_to(demo.fill(&format!("{{link{number}}}")), drain)?;
            demo.set_address(&format!("line{number}"), &end.to_string());
        }
        demo.write_configs()?;
        demo.screen.step(&format!("certificates, a token and configs made in {}", dir.display()));
        Ok(demo)
    }

    fn set(&mut self, name: &str, value: String) {
        self.values.push((format!("{{{name}}}"), value));
    }

    /// Sets an address and its port.
    fn set_address(&mut self, name: &str, at: &str) {
        self.set(&format!("{name}_port"), at.rsplit(':').next().unwrap_or_default().to_owned());
        self.set(name, at.to_owned());
    }

    /// Chooses free ports for all listeners: the processes need those of one another before they start.
    fn choose_ports(&mut self) -> io::Result<()> {
        let mut open = Vec::new();
        for name in ADDRESSES {
            let listener = TcpListener::bind(EPHEMERAL)?;
            self.set_address(name, &listener.local_addr()?.to_string());
            // Stays open meanwhile, so that all ports differ.
            open.push(listener);
        }
        Ok(())
    }

    /// Returns a template with all values.
    fn fill(&self, template: &str) -> String {
        self.values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(name, value))
    }

    fn write_configs(&self) -> io::Result<()> {
        let server = include_str!("demo/server.toml");
        let first = server.replace("%n", "1").replace("%m", "2");
        let second = server.replace("%n", "2").replace("%m", "1") + include_str!("demo/listeners.toml");
        for (name, template) in NAMES.iter().zip([&first, &second, include_str!("demo/edge.toml")]) {
            files::create_private(&self.dir.join(format!("{name}.toml")), &self.fill(template))?;
        }
        Ok(())
    }

    /// Starts the servers and the edge, and waits until a client reaches the node.
    async fn start_all(&mut self) -> anyhow::Result<()> {
        self.start(PREFERRED_SERVER).await?;
        self.screen.step(&self.fill("server1: edges connect to {link1}, clients to {connect1}"));
        self.start(CLIENT_SERVER).await?;
        self.screen.step(&self.fill("server2: edges connect to {link2}, clients to {connect2}"));
        self.start(EDGE).await?;
        // The clients' server may not have found its peer yet.
        let reached = async {
            while self.connect_to_page().await.is_err() {
                sleep(POLL_INTERVAL).await;
            }
        };
        timeout(TIMEOUT, reached).await.context("the node was not reached within 10 s")?;
        self.screen.step("edge: node1 is connected to server1");
        Ok(())
    }

    /// Starts a process, and waits until its admin listener reports that it is ready. An edge is ready once it is linked.
    async fn start(&mut self, number: usize) -> anyhow::Result<()> {
        let name = NAMES[number];
        let log = self.dir.join(format!("{name}.log"));
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(log)?;
        // Its file may have been replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("tunnel").arg(if number == EDGE { "edge" } else { "server" });
        command.arg("--end-with-parent").arg("-c").arg(self.dir.join(format!("{name}.toml")));
        // Neither a proxy nor other settings of this shell apply, and Ctrl-C reaches only the demo itself.
        command.env_clear().process_group(0).kill_on_drop(true);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();

        let admin = self.fill(&format!("{{admin_{name}}}"));
        let child = self.processes[number].insert(child.context("cannot run this program again")?);
        let started = Instant::now();
        while !is_ready(&admin).await {
            if let Some(status) = child.try_wait()? {
                bail!("{name} ended ({status})");
            }
            if started.elapsed() > TIMEOUT {
                bail!("{name} did not start within 10 s");
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    async fn restart(&mut self, server: usize) -> anyhow::Result<()> {
        self.start(server).await?;
        self.screen.step(&format!("{} runs again", NAMES[server]));
        Ok(())
    }

    async fn kill(&mut self, server: usize, why: &str) -> anyhow::Result<()> {
        let mut process = self.processes[server].take().context("it does not run")?;
        let id = process.id().unwrap_or_default();
        process.kill().await?;
        self.screen.coloured_step(RED, &format!("{} (process {id}) is killed: {why}", NAMES[server]));
        Ok(())
    }

    /// Requests the page over CONNECT. Returns it with its head.
    async fn connect_to_page(&self) -> anyhow::Result<String> {
        let mut client = TcpStream::connect(self.fill("{connect2}")).await?;
        let request = self.fill("CONNECT node1:{page_port} HTTP/1.1\r\nHost: node1:{page_port}\r\n\r\n");
        client.write_all(request.as_bytes()).await?;
        let head =
            timeout(TIMEOUT, page::read_head(&mut client)).await.context("no response within 10 s")??;
        if !head.contains(" 200 ") {
            bail!("CONNECT refused: {head}");
        }
        client.write_all(b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n").await?;
        let mut page = String::new();
        timeout(TIMEOUT, client.read_to_string(&mut page)).await.context("no page within 10 s")??;
        Ok(page)
    }

    /// Requests the page once over CONNECT, and by the command of each listener. Prints the durations.
    async fn request_page(&mut self, with: &[String]) -> anyhow::Result<()> {
        self.screen.line("        (from here on, times are measured from the start of each request)");
        let started = Instant::now();
        let page = self.connect_to_page().await?;
        self.print_page(&self.fill("CONNECT node1:{page_port} at {connect2}"), started, &page)?;
        for (name, _, command) in selected(with) {
            let command = self.fill(&command.replacen("curl", "curl -q -sS --max-time 10", 1));
            let started = Instant::now();
            // No setting of this shell applies.
            let output = Command::new("sh").arg("-c").arg(&command).env_clear().output().await?;
            let page = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            self.print_page(&self.fill(&format!("{name} at {{{name}}}")), started, &page)?;
        }
        Ok(())
    }

    fn print_page(&mut self, way: &str, started: Instant, page: &str) -> anyhow::Result<()> {
        if !page.ends_with(PAGE) {
            bail!("{way}: unexpected page: {page:?}");
        }
        let time = elapsed_text(started);
        self.screen.line(&format!("{time:>7} {way}: {} bytes, the page is complete", page.len()));
        Ok(())
    }

    /// Downloads over a user's link. Kills the server that has the link of the node, cuts its line, and kills the
    /// server that has the user's link. Afterwards both servers run.
    async fn interrupt_download(&mut self) -> anyhow::Result<()> {
        let links = self.link().await?;
        self.screen.step("alice downloads from node1 over a link to server2");
        let target = self.fill("node1:{page_port}").parse()?;
        let mut download = Download::start(&links, &target).await?;
        download.receive_tenths(2, &mut self.screen).await?;

        self.kill(PREFERRED_SERVER, "it held the link of node1").await?;
        download.resume_to_tenths(4, &mut self.screen).await?;
        self.restart(PREFERRED_SERVER).await?;

        download.cut(&self.line, &mut self.screen).await?;
        download.resume_to_tenths(8, &mut self.screen).await?;

        self.kill(CLIENT_SERVER, "it held the link of alice").await?;
        download.resume_to_tenths(10, &mut self.screen).await?;
        download.verify(&mut self.screen)?;
        links.close().await;
        self.restart(CLIENT_SERVER).await
    }

    /// Links to the servers as a user.
    async fn link(&self) -> anyhow::Result<UserUplinks> {
        let config = UserLinkConfig {
            servers: vec![self.fill("{link2}").parse()?, self.fill("{link1}").parse()?],
            tls_server_name: Some("localhost".parse()?),
            device: "laptop".parse()?,
            proof: UserCredentials::Certificate(identity(&self.dir, "client")),
            ca: Some(self.dir.join("ca.crt")),
            proxy: ProxyVariables::default(),
        };
        UserUplinks::connect(config).await.map_err(anyhow::Error::msg)
    }

    /// Prints commands to try.
    async fn print_commands(&mut self, with: &[String]) {
        for (_, title, command) in [CONNECT].iter().chain(selected(with)) {
            self.screen.line(&self.fill(&format!("\n{title}:\n  {command}")));
        }
        let sshd = match TcpStream::connect("127.0.0.1:22").await {
            Ok(_) => "This machine's sshd, reached through the edge",
            Err(_) => "No sshd listens on port 22 of this machine. With one, this would log in to it",
        };
        let commands = include_str!("demo/commands.txt").replace("{sshd}", sshd);
        self.screen.line(self.fill(&commands).trim_end());
        if with.is_empty() {
            self.screen.line(&self.fill("More listeners: {tunnel} demo --listeners all"));
        }
        self.screen.line("\nPress Ctrl-C to stop.");
    }
}

/// Returns the listeners that `--listeners` chose, each once.
fn selected(with: &[String]) -> impl Iterator<Item = &'static DemoCommand> {
    EXTRA.iter().filter(|(name, ..)| with.iter().any(|chosen| chosen == "all" || chosen == name))
}

fn write_certificates(dir: &Path) -> anyhow::Result<()> {
    let authority = CertificateAuthority::new("tunnel demo", CERT_VALIDITY)?;
    // The page at the node presents the certificate of the servers.
    let server = authority.server(&["localhost", "127.0.0.1", "node1"])?;
    for (name, issued) in [("server", server), ("client", authority.client("alice")?)] {
        let IdentityFiles { cert, key } = identity(dir, name);
        issued.write(&cert, &key)?;
    }
    files::create_private(&dir.join("ca.crt"), authority.cert())?;
    let token = format!("{:032x}", rand::random::<u128>());
    files::create_private(&dir.join("tokens"), &format!("node1:{token}\n"))?;
    files::create_private(&dir.join("token"), &format!("{token}\n"))?;
    Ok(())
}

/// Returns the files of a certificate.
fn identity(dir: &Path, name: &str) -> IdentityFiles {
    IdentityFiles { cert: dir.join(format!("{name}.crt")), key: dir.join(format!("{name}.key")) }
}

async fn is_ready(admin: &str) -> bool {
    let Ok(stream) = TcpStream::connect(admin).await else { return false };
    matches!(exchange(stream, Method::GET, "/readyz", Bytes::new()).await, Ok((200, _)))
}

/// A listener by the name of its address, what its command shows, and the command.
type DemoCommand = (&'static str, &'static str, &'static str);

const CONNECT: DemoCommand = (
    "connect2",
    "A web page at the edge, through the tunnel",
    "curl -p -x http://{connect2} http://node1:{page_port}/",
);

/// The listeners that `--listeners` adds.
const EXTRA: [DemoCommand; 5] = [
    ("tcp", "A TCP port of the server for the page's port", "curl http://{tcp}/"),
    (
        "http",
        "A port of the server that stands for the page's port at every node; in DNS, nodes' names would resolve to the server",
        "curl --resolve node1:{http_port}:127.0.0.1 http://node1:{http_port}/",
    ),
    (
        "https",
        "The same with TLS, for clients with a certificate",
        "curl --cacert {dir_word}/ca.crt --cert {dir_word}/client.crt --key {dir_word}/client.key \
         --resolve node1:{https_port}:127.0.0.1 https://node1:{https_port}/",
    ),
    (
        "egress",
        "CONNECT with a certificate, as kube-apiserver's egress selector uses it",
        "curl --proxy-cacert {dir_word}/ca.crt --proxy-cert {dir_word}/client.crt --proxy-key {dir_word}/client.key \
         -p -x https://{egress} http://node1:{page_port}/",
    ),
    (
        "proxy",
        // The name has a dot, so it is not a node's; it resolves to this machine.
        "The reverse direction: a program on the node reaches a page in the cloud through its edge's proxy",
        "curl -x http://{proxy} http://web.localhost:{page_port}/",
    ),
];

/// The addresses of the processes.
const ADDRESSES: [&str; 12] = [
    "link1",
    "link2",
    "connect1",
    "connect2",
    "admin_server1",
    "admin_server2",
    "admin_edge",
    "tcp",
    "http",
    "https",
    "egress",
    "proxy",
];
/// Any free port of this machine.
const EPHEMERAL: &str = "127.0.0.1:0";
/// The processes: the server that the edge prefers, the server that clients use, and the edge.
const NAMES: [&str; 3] = ["server1", "server2", "edge"];
const PREFERRED_SERVER: usize = 0;
const CLIENT_SERVER: usize = 1;
const EDGE: usize = 2;
/// Maximum length of the directory, so that the path of each socket in it has less than 108 bytes.
const MAX_DIR_BYTES: usize = 90;
/// Validity of the certificates: long enough that the live page does not warn of their end.
const CERT_VALIDITY: Duration = Duration::from_secs(40 * 24 * 3600);
/// Timeout for each step of the demo.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a process that starts is tried.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Number of lines of each log that an error contains.
const LOG_LINES: usize = 10;
