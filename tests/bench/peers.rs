//! Other reverse tunnels, as scripts/peers.sh builds them: pairs of processes with TLS between them.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::ssh::wait_for;
use crate::superedge;
use crate::targets::Targets;
use crate::tunnel::TOKEN;
use crate::way::{Address, Way, Ways};

/// One program, in a directory that is called NAME-VERSION.
#[derive(Debug)]
pub(crate) struct Peer<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) place: &'a Place,
    pub(crate) targets: &'a Targets,
    /// The port that the targets' side dials.
    pub(crate) port: u16,
    /// Ports for clients, in the order of [`Targets::all`].
    clients: [u16; 4],
    /// The path of the server's certificate.
    pub(crate) cert: String,
    /// The path of its key.
    pub(crate) key: String,
    /// The path of the CA.
    pub(crate) ca: String,
}

/// The command lines of the clients' side and of the targets' side, and the routes through them.
pub(crate) type Parts = ([String; 2], Ways);

/// Starts the program of a directory and waits for an echo through it.
pub(crate) fn start(dir: &Path, place: &Place, targets: &Targets) -> Result<Proxy> {
    let path = |path: PathBuf| path.display().to_string();
    let of = &place.certificates;
    let (cert, key, ca) = (path(of.cert()), path(of.key()), path(of.ca()));
    let ([port], clients) = (free_ports()?, free_ports()?);
    let peer = Peer { dir, place, targets, port, clients, cert, key, ca };
    let named = dir.file_name().unwrap_or_default().to_string_lossy();
    let program = PROGRAMS.iter().find(|(name, _)| named.starts_with(name));
    let (name, parts) = program.with_context(|| format!("{named} is not known"))?;
    let ([server, client], ways) = parts(&peer)?;
    let log = place.file(&format!("{name}.log"));
    let run = |line: String| {
        let program = dir.join(line.split(' ').next().unwrap_or_default()).display().to_string();
        let args: Vec<&str> = std::iter::once(&*program).chain(line.split(' ').skip(1)).collect();
        Process::start(None, &args, &log)
    };
    let server = run(server)?;
    wait_for(port)?;
    let mut proxy = Proxy { name, ways, processes: vec![server, run(client)?], port: Some(port) };
    let reached = proxy.until_reachable(START);
    reached.with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
    Ok(proxy)
}

impl Peer<'_> {
    /// All sessions share one connection: ssh, in a WebSocket, in TLS.
    fn chisel(&self) -> Result<Parts> {
        let Self { port, cert, key, ca, .. } = self;
        let server = format!(
            "chisel server --reverse --host 127.0.0.1 --port {port} --auth bench:{TOKEN} --tls-cert {cert} --tls-key {key}"
        );
        let mut client = format!("chisel client --auth bench:{TOKEN} --tls-ca {ca} https://127.0.0.1:{port}");
        for (_, from, to) in self.forwards() {
            client += &format!(" R:127.0.0.1:{from}:{to}");
        }
        Ok(([server, client], Ways::each(self.clients, Way::local)))
    }

    /// All sessions share one connection, as by default.
    fn frp(&self) -> Result<Parts> {
        let Self { port, cert, key, ca, .. } = self;
        let server = format!(
            "bindAddr = \"127.0.0.1\"\nbindPort = {port}\nauth.token = \"{TOKEN}\"\ntransport.tls.force = true\n\
             transport.tls.certFile = \"{cert}\"\ntransport.tls.keyFile = \"{key}\"\n"
        );
        let mut client = format!(
            "serverAddr = \"127.0.0.1\"\nserverPort = {port}\nauth.token = \"{TOKEN}\"\n\
             transport.tls.trustedCaFile = \"{ca}\"\ntransport.tls.serverName = \"localhost\"\n"
        );
        for (name, from, to) in self.forwards() {
            let to = to.port();
            client += &format!(
                "[[proxies]]\nname = \"{name}\"\ntype = \"tcp\"\nlocalPort = {to}\nremotePort = {from}\n"
            );
        }
        let [server, client] = [self.config("frps", &server)?, self.config("frpc", &client)?];
        let lines = [format!("frps -c {server}"), format!("frpc -c {client}")];
        Ok((lines, Ways::each(self.clients, Way::local)))
    }

    /// All sessions share one connection. Its CONNECT listener has mutual TLS or is a Unix socket.
    fn konnectivity(&self) -> Result<Parts> {
        let Self { port, cert, key, ca, .. } = self;
        let socket = self.place.file("konnectivity.sock");
        let own = &self.place.certificates;
        let [admin, health, agent_admin, agent_health] = free_ports()?;
        let server = format!(
            "server --mode=http-connect --uds-name={} --server-port=0 --agent-bind-address=127.0.0.1 \
             --agent-port={port} --cluster-cert={cert} --cluster-key={key} --cluster-ca-cert={ca} \
             --admin-port={admin} --health-bind-address=127.0.0.1 --health-port={health}",
            socket.display(),
        );
        let client = format!(
            "agent --proxy-server-host=127.0.0.1 --proxy-server-port={port} --ca-cert={ca} --agent-cert={} \
             --agent-key={} --admin-bind-address=127.0.0.1 --admin-server-port={agent_admin} \
             --health-server-host=127.0.0.1 --health-server-port={agent_health}",
            own.client_cert().display(),
            own.client_key().display(),
        );
        let way =
            |to: SocketAddr| Way { address: Address::Unix(socket.clone()), connect: Some(to.to_string()) };
        Ok(([server, client], Ways::each(self.targets.all(), way)))
    }

    /// Each session has its own connection.
    fn rathole(&self) -> Result<Parts> {
        let Self { port, cert, key, ca, .. } = self;
        let identity = self.place.file("rathole.pfx").display().to_string();
        let made = Command::new("openssl")
            .args([
                "pkcs12",
                "-export",
                "-passout",
                "pass:bench",
                "-in",
                cert,
                "-inkey",
                key,
                "-out",
                &identity,
            ])
            .status()
            .context("no openssl")?;
        ensure!(made.success(), "openssl cannot write {identity}");
        let mut server = format!(
            "[server]\nbind_addr = \"127.0.0.1:{port}\"\ndefault_token = \"{TOKEN}\"\n\
             [server.transport]\ntype = \"tls\"\n\
             [server.transport.tls]\npkcs12 = \"{identity}\"\npkcs12_password = \"bench\"\n"
        );
        let mut client = format!(
            "[client]\nremote_addr = \"127.0.0.1:{port}\"\ndefault_token = \"{TOKEN}\"\n\
             [client.transport]\ntype = \"tls\"\n\
             [client.transport.tls]\ntrusted_root = \"{ca}\"\nhostname = \"localhost\"\n"
        );
        for (name, from, to) in self.forwards() {
            server += &format!("[server.services.{name}]\nbind_addr = \"127.0.0.1:{from}\"\n");
            client += &format!("[client.services.{name}]\nlocal_addr = \"{to}\"\n");
        }
        let lines = [
            format!("rathole --server {}", self.config("rathole-server", &server)?),
            format!("rathole --client {}", self.config("rathole-client", &client)?),
        ];
        Ok((lines, Ways::each(self.clients, Way::local)))
    }

    /// Writes a config and returns its path.
    fn config(&self, name: &str, config: &str) -> Result<String> {
        let path = self.place.file(&format!("{name}.toml"));
        fs::write(&path, config)?;
        Ok(path.display().to_string())
    }

    /// Returns the name, the port for clients, and the address of each target.
    fn forwards(&self) -> impl Iterator<Item = (&'static str, u16, SocketAddr)> {
        let named = ["echo", "source", "sink", "file"].into_iter().zip(self.clients);
        named.zip(self.targets.all()).map(|((name, from), to)| (name, from, to))
    }
}

/// Writes the configs of a program.
type Configure = fn(&Peer<'_>) -> Result<Parts>;

/// The programs by name.
pub(crate) const PROGRAMS: [(&str, Configure); 5] = [
    ("chisel", |peer| peer.chisel()),
    ("frp", |peer| peer.frp()),
    ("konnectivity", |peer| peer.konnectivity()),
    ("rathole", |peer| peer.rathole()),
    ("superedge", superedge::parts),
];
/// Longer than any start on loopback.
const START: Duration = Duration::from_secs(10);
