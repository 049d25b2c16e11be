//! `tunnel demo`: two servers, an edge and a client on loopback, each a process. The client's download outlives both
//! servers.

mod download;
mod ports;
mod screen;

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use bytes::Bytes;
use http::Method;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::command::admin_sockets::{ask, exchange};
use crate::command::machine_files::folder_on_machine;
use crate::command::shell_word;
use download::{Download, send_download};
use ports::{PAGE, send_page, serve, serve_line, serve_tls_page};
use screen::{DemoScreen, GREEN, NO_COLOUR, RED};
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::pki::CertificateAuthority;
use tunnel_net::tls::IdentityFiles;

/// Runs the demo until `stop` completes. With `check`, requests the page once over CONNECT and each listener of `with`,
/// and returns.
///
/// # Errors
///
/// Returns an error with the step that failed.
pub async fn run(check: bool, with: &[String], stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let drain = Drain::new();
    let mut demo = Demo::new(&drain)?;
    let shown = async {
        demo.start_all().await?;
        if check {
            return demo.request_page(with).await;
        }
        demo.interrupt_download().await?;
        demo.print_commands(with);
        std::future::pending().await
    };
    let shown = tokio::select! {
        shown = shown => shown,
        () = stop => Ok(()),
    };
    for process in demo.processes.values_mut() {
        // It may have ended already.
        let _ = process.kill().await;
    }
    drain.finish(Duration::ZERO, std::future::ready(())).await;
    shown.with_context(|| {
        format!("the demo failed; its last log lines are:\n{}the failure", demo.last_lines())
    })
}

/// The demo's files, addresses and processes.
struct Demo {
    /// A directory for this user only, which is removed on drop.
    dir: PathBuf,
    /// What templates call `{name}`, by name: addresses and paths.
    values: Vec<(String, String)>,
    /// Whether the line between the edge and the servers is cut: it loses its connections and accepts no others.
    is_cut: watch::Sender<bool>,
    /// The running processes, by their names. They end with this process, and are killed on drop.
    processes: BTreeMap<&'static str, Child>,
    screen: DemoScreen,
}

impl Drop for Demo {
    fn drop(&mut self) {
        // Remains in the temporary directory are harmless.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Demo {
    /// Makes the directory with certificates and configs, and serves the page.
    fn new(drain: &Drain) -> anyhow::Result<Self> {
        let screen = DemoScreen::new();
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
        let processes = BTreeMap::new();
        let mut demo = Self { dir, values: Vec::new(), is_cut: watch::Sender::new(false), processes, screen };
        write_certificates(&demo.dir).context("cannot make certificates")?;
        demo.set("dir", demo.dir.display().to_string());
        demo.set("dir_word", shell_word(&demo.dir.to_string_lossy()));
        // As it was called, so that the lines work where it is not in PATH.
        demo.set("tunnel", shell_word(std::env::args().next().as_deref().unwrap_or("tunnel")));
        // The processes need the ports of one another before they start. These stay open until all ports of this
        // process are, so that all differ.
        let mut open = Vec::new();
        for name in ADDRESSES.split_whitespace() {
            let listener = TcpListener::bind(EPHEMERAL)?;
            demo.set_address(name, listener.local_addr()?);
            open.push(listener);
        }
        demo.set_address("page", serve(drain, send_page)?);
        demo.set_address("tls_page", serve_tls_page(identity(&demo.dir, "server"), drain)?);
        demo.set_address("download", serve(drain, send_download)?);
        for number in ["1", "2"] {
            let end = serve_line(demo.fill(&format!("{{link{number}}}")), demo.is_cut.subscribe(), drain)?;
            demo.set_address(&format!("line{number}"), end);
        }
        demo.write_configs()?;
        screen.step(&format!("certificates, a token and configs made in {}", demo.dir.display()));
        Ok(demo)
    }

    /// Returns the last lines of the logs of all processes.
    fn last_lines(&self) -> String {
        let mut last = String::new();
        for name in NAMES {
            let text = std::fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default();
            let skipped = text.lines().count().saturating_sub(LOG_LINES);
            last.extend(text.lines().skip(skipped).map(|line| format!("{name}: {line}\n")));
        }
        last
    }

    fn set(&mut self, name: &str, value: String) {
        self.values.push((format!("{{{name}}}"), value));
    }

    /// Sets an address and its port.
    fn set_address(&mut self, name: &str, at: SocketAddr) {
        self.set(&format!("{name}_port"), at.port().to_string());
        self.set(name, at.to_string());
    }

    /// Returns a template with all values.
    fn fill(&self, template: &str) -> String {
        self.values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(name, value))
    }

    fn write_configs(&self) -> io::Result<()> {
        let server = include_str!("demo/server.toml");
        let first = server.replace("%n", "1").replace("%m", "2");
        let second = server.replace("%n", "2").replace("%m", "1") + include_str!("demo/listeners.toml");
        let templates = [&first, &second, include_str!("demo/edge.toml"), include_str!("demo/client.toml")];
        for (name, template) in NAMES.iter().zip(templates) {
            files::create_private(&self.dir.join(format!("{name}.toml")), &self.fill(template))?;
        }
        // Commands look for client.toml in a folder of this name.
        symlink(".", self.dir.join("tunnel"))
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

    /// Starts this program with a command, as the process of that name.
    fn run(&self, name: &str, command: &[&str], stdout: Stdio) -> anyhow::Result<Child> {
        let log = self.dir.join(format!("{name}.log"));
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(log)?;
        // Its file may have been replaced meanwhile.
        let mut program = Command::new("/proc/self/exe");
        program.arg0("tunnel").arg("--end-with-parent").args(command).stdin(Stdio::null());
        // Neither a proxy nor other settings of this shell apply, and Ctrl-C reaches only the demo itself.
        program.env_clear().env("XDG_CONFIG_HOME", &self.dir).process_group(0).kill_on_drop(true);
        program.stdout(stdout).stderr(log).spawn().context("cannot run this program again")
    }

    /// Starts a server or an edge, and waits until its admin socket reports that it is ready. An edge is ready once it
    /// is linked.
    async fn start(&mut self, name: &'static str) -> anyhow::Result<()> {
        let role = if name == EDGE { "edge" } else { "server" };
        let config = self.fill(&format!("{{dir}}/{name}.toml"));
        let mut child = self.run(name, &[role, "-c", &config], Stdio::null())?;
        let socket = self.dir.join(format!("{name}.sock"));
        let ready = async {
            loop {
                if let Some(status) = child.try_wait()? {
                    bail!("{name} ended ({status})");
                }
                if matches!(ask(&socket, Method::GET, "/readyz", "").await, Ok((200, _))) {
                    break anyhow::Ok(());
                }
                sleep(POLL_INTERVAL).await;
            }
        };
        timeout(TIMEOUT, ready).await.with_context(|| format!("{name} did not start within 10 s"))??;
        self.processes.insert(name, child);
        Ok(())
    }

    /// Requests the page over CONNECT.
    async fn connect_to_page(&self) -> anyhow::Result<String> {
        let proxy = OutboundProxy::new(&self.fill("http://{connect2}"), "")?.context("no address")?;
        let target = self.fill("node1:{page_port}").parse()?;
        let socket = proxy.connect(&[self.fill("{connect2}").parse()?], &target, TIMEOUT).await?;
        let page = exchange(socket, Method::GET, "/", Bytes::new()).await;
        Ok(page.map_err(anyhow::Error::msg)?.1)
    }

    /// Requests the page once over CONNECT, and by the command of each listener. Prints the durations.
    async fn request_page(&self, with: &[String]) -> anyhow::Result<()> {
        self.screen.line("        (from here on, times are measured from the start of each request)");
        for (name, shown) in commands(with) {
            let started = Instant::now();
            let mut way = self.fill(&format!("{name} at {{{name}}}"));
            let page = if name == "connect2" {
                way = self.fill("CONNECT node1:{page_port} at {connect2}");
                self.connect_to_page().await?
            } else {
                let command = shown.lines().last().unwrap_or_default();
                let command = self.fill(&command.replacen("curl", "curl -q -sS --max-time 10", 1));
                // No setting of this shell applies.
                let output = Command::new("sh").arg("-c").arg(command + " 2>&1").env_clear().output().await?;
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            ensure!(page.ends_with(PAGE), "{way}: unexpected page: {page:?}");
            self.screen.timed(started, &format!("{way}: {} bytes, the page is complete", page.len()));
        }
        Ok(())
    }

    /// Downloads over a user's link, with all [`INTERRUPTIONS`]. Afterwards both servers run.
    async fn interrupt_download(&mut self) -> anyhow::Result<()> {
        self.screen.step("alice downloads from node1 over a link to server2");
        let target = self.fill("node1:{download_port}");
        let mut client = self.run(CLIENT, &["connect", &target], Stdio::piped())?;
        let mut download = Download::new(client.stdout.take().context("no stdout")?, self.screen);
        download.receive_tenths(2).await?;
        for (killed, tenths) in INTERRUPTIONS {
            if let Some((server, why)) = killed {
                let mut process = self.processes.remove(server).context("it does not run")?;
                let id = process.id().unwrap_or_default();
                process.kill().await?;
                self.screen.step(&format!("{RED}{server} (process {id}) is killed: {why}{NO_COLOUR}"));
            } else {
                self.is_cut.send_replace(true);
                self.screen.step(&format!("{RED}the line of node1 is cut for 2 s{NO_COLOUR}"));
                timeout(CUT_DURATION, download.receive_tenths(10)).await.unwrap_or(Ok(Duration::ZERO))?;
                self.is_cut.send_replace(false);
                self.screen.step("the line is back");
            }
            let pause = download.receive_tenths(tenths).await?;
            let text = format!("{GREEN}the download continues; its longest pause was {pause:.1?}{NO_COLOUR}");
            self.screen.step(&text);
            if let Some((server, _)) = killed {
                self.start(server).await?;
                self.screen.step(&format!("{server} runs again"));
            }
        }
        self.screen.step(&format!("{} MiB received, none lost, each byte as sent", LENGTH / MIB));
        // It closes its link.
        timeout(TIMEOUT, client.wait()).await??;
        Ok(())
    }

    /// Prints commands to try.
    fn print_commands(&self, with: &[String]) {
        for (_, shown) in commands(with) {
            self.screen.line(&self.fill(&format!("\n{shown}")));
        }
        self.screen.line(self.fill(include_str!("demo/commands.txt")).trim_end());
        if with.is_empty() {
            self.screen.line(&self.fill("More listeners: {tunnel} demo --listeners all"));
        }
        self.screen.line("\nPress Ctrl-C to stop.");
    }
}

/// Returns CONNECT and the listeners that `--listeners` chose, each once: the name of its address, and what its command
/// shows, with the command in the last line.
fn commands(with: &[String]) -> impl Iterator<Item = (&'static str, &'static str)> {
    let blocks = include_str!("demo/listeners.txt").trim_end().split("\n\n");
    let is_chosen =
        |name: &str| name == "connect2" || with.iter().any(|chosen| chosen == "all" || chosen == name);
    blocks.filter_map(|block| block.split_once(": ")).filter(move |(name, _)| is_chosen(name))
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

/// What interrupts the download: the end of a server, with what it held, or a cut line. Then the download continues to
/// that many tenths.
const INTERRUPTIONS: [(Option<(&str, &str)>, usize); 3] = [
    (Some((PREFERRED_SERVER, "it held the link of node1")), 4),
    (None, 8),
    (Some((CLIENT_SERVER, "it held the link of alice")), 10),
];
const MIB: usize = 1024 * 1024;
/// Length of the download in bytes.
const LENGTH: usize = 64 * MIB;
/// How long the line is cut.
const CUT_DURATION: Duration = Duration::from_secs(2);
/// The addresses of the processes.
const ADDRESSES: &str =
    "link1 link2 connect1 connect2 admin_server1 admin_server2 admin_edge tcp http https egress proxy";
/// Any free port of this machine.
const EPHEMERAL: &str = "127.0.0.1:0";
/// The processes: the server that the edge prefers, the server that clients use, the edge, and a client.
const NAMES: [&str; 4] = [PREFERRED_SERVER, CLIENT_SERVER, EDGE, CLIENT];
const PREFERRED_SERVER: &str = "server1";
const CLIENT_SERVER: &str = "server2";
const EDGE: &str = "edge";
const CLIENT: &str = "client";
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
