//! The program under test: a server and an edge, started like in production.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::targets::Targets;
use crate::way::{Address, Way, Ways};

/// Parameters for starting it repeatedly, with the same ports and files.
#[derive(Debug)]
pub(crate) struct Tunnel {
    binary: PathBuf,
    dir: PathBuf,
    /// Prefix of the names of the server's files.
    name: &'static str,
    spaces: [Option<String>; 2],
    /// The control groups of server and edge.
    limiters: [Vec<PathBuf>; 2],
    ways: Ways,
    /// Address that edges link to.
    pub(crate) grpc: SocketAddr,
}

impl Tunnel {
    /// Writes the configs of both ends.
    pub(crate) fn configure(place: &Place, targets: &Targets, binary: &Path) -> Result<Self> {
        let [grpc] = free_ports()?;
        let grpc = SocketAddr::from((place.cloud_address, grpc));
        fs::write(place.file("token"), format!("default:{TOKEN}\n{NODE}:{TOKEN}\n"))?;
        let this = Self::server_of(place, targets, binary, "cloud", grpc, "")?;
        let [edge_log] = free_ports()?;
        let edge = format!(
            "[edge.uplink]\nnode = \"{NODE}\"\ntoken = \"{TOKEN}\"\nca = {:?}\n\
             tls_server_name = \"localhost\"\nservers = [\"{grpc}\"]\nadmin_listen = \"127.0.0.1:{edge_log}\"\n",
            place.certificates.ca(),
        );
        fs::write(place.file("edge.toml"), edge)?;
        Ok(this)
    }

    /// Configures a second server, which no edge links to. Both servers' configs list each other. Only for servers that
    /// do not run yet.
    pub(crate) fn peer(&self, place: &Place, targets: &Targets) -> Result<Self> {
        let [grpc] = free_ports()?;
        let grpc = SocketAddr::from((place.cloud_address, grpc));
        let of = |other: SocketAddr| {
            format!("\n[server.peers]\naddresses = [\"{other}\"]\ncertificate_name = \"localhost\"\n")
        };
        self.server_has(&of(grpc))?;
        Self::server_of(place, targets, &self.binary, "cloud2", grpc, &of(self.grpc))
    }

    /// Configures three servers that know each other.
    pub(crate) fn three(place: &Place, targets: &Targets, binary: &Path) -> Result<[Self; 3]> {
        fs::write(place.file("token"), format!("default:{TOKEN}\n"))?;
        let all = free_ports::<3>()?.map(|port| SocketAddr::from((place.cloud_address, port)));
        let more = format!(
            "\n[server.peers]\naddresses = {:?}\ncertificate_name = \"localhost\"\n",
            all.map(|at| at.to_string())
        );
        let server = |name, at| Self::server_of(place, targets, binary, name, at, &more);
        Ok([server("cloud", all[0])?, server("cloud2", all[1])?, server("cloud3", all[2])?])
    }

    /// Adds tables to the server's config. Only for a server that does not run yet.
    pub(crate) fn server_has(&self, tables: &str) -> Result<()> {
        let path = self.dir.join(format!("{}.toml", self.name));
        let config = fs::read_to_string(&path)? + tables;
        Ok(fs::write(path, config)?)
    }

    /// Makes the edge dial another address than its server's own. Only for an edge that does not run yet.
    pub(crate) fn edge_dials(&self, at: SocketAddr) -> Result<()> {
        let path = self.dir.join("edge.toml");
        let config = fs::read_to_string(&path)?.replace(&self.grpc.to_string(), &at.to_string());
        Ok(fs::write(path, config)?)
    }

    /// Makes server and edge run in the control groups of `doors`. Only before they run.
    pub(crate) fn within(mut self, limiters: [Vec<PathBuf>; 2]) -> Self {
        self.limiters = limiters;
        self
    }

    /// Returns the routes of clients to the targets through this server.
    pub(crate) fn ways(&self) -> Ways {
        self.ways.clone()
    }

    /// Writes the config of one server, followed by `more`.
    fn server_of(
        place: &Place,
        targets: &Targets,
        binary: &Path,
        name: &'static str,
        grpc: SocketAddr,
        more: &str,
    ) -> Result<Self> {
        let [connect, log, metrics] = free_ports()?;
        let proxy = SocketAddr::from((grpc.ip(), connect));
        let cloud = format!(
            "[server.links]\nlisten = \"{grpc}\"\nadmin_listen = \"127.0.0.1:{log}\"\n\
             metrics_listen = \"127.0.0.1:{metrics}\"\ncert = {:?}\nkey = {:?}\npeer_ca = {:?}\ntoken_file = {:?}\n\n\
             [server.connect]\nlisten = \"{proxy}\"\n{more}",
            place.certificates.cert(),
            place.certificates.key(),
            place.certificates.ca(),
            place.file("token"),
        );
        fs::write(place.file(&format!("{name}.toml")), cloud)?;
        let way = |target: SocketAddr| Way {
            address: Address::Tcp(proxy),
            connect: Some(format!("{NODE}:{}", target.port())),
        };
        Ok(Self {
            binary: binary.to_owned(),
            dir: place.dir.clone(),
            name,
            grpc,
            spaces: [place.cloud_space.clone(), place.edge_space.clone()],
            limiters: Default::default(),
            ways: Ways::each(targets.all(), way),
        })
    }

    /// Starts only the server.
    pub(crate) fn server(&self) -> Result<Process> {
        self.start(self.name, "cloud", 0)
    }

    /// Starts only the edge.
    pub(crate) fn edge(&self) -> Result<Process> {
        self.start("edge", "edge", 1)
    }

    /// Starts the pair, without waiting until it is reachable.
    pub(crate) fn pair(&self) -> Result<Proxy> {
        let processes = vec![self.server()?, self.edge()?];
        Ok(Proxy { name: "tunnel", ways: self.ways.clone(), processes, port: Some(self.grpc.port()) })
    }

    /// Starts the pair and waits for an echo through it (on loopback; in a namespace the clients wait).
    pub(crate) fn reachable(&self) -> Result<Proxy> {
        let mut proxy = self.pair()?;
        if self.spaces.iter().all(Option::is_none) {
            proxy.until_reachable(START).with_context(|| self.last_words())?;
        }
        Ok(proxy)
    }

    fn start(&self, name: &str, mode: &str, space: usize) -> Result<Process> {
        let config = self.dir.join(format!("{name}.toml"));
        let args = [
            self.binary.display().to_string(),
            format!("--m={mode}"),
            format!("--c={}", config.display()),
            "--alsologtostderr".to_owned(),
        ];
        let limiters = self.limiters.get(space).map_or(&[][..], Vec::as_slice);
        let space = self.spaces.get(space).and_then(Option::as_deref);
        Process::start_within(limiters, space, &args, &self.dir.join(format!("{name}.log")))
    }

    /// Returns the last lines of both logs, for debugging a failed start.
    fn last_words(&self) -> String {
        let mut words = String::from("the tunnel did not start:");
        for mode in ["cloud", "edge"] {
            let log = fs::read_to_string(self.dir.join(format!("{mode}.log"))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines.get(lines.len().saturating_sub(5)..).unwrap_or_default();
            words += &format!("\n--- {mode}.log\n{}", last.join("\n"));
        }
        words
    }
}

/// Returns the path of the program: the given one, otherwise the build of the profile release or fast.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf> {
    let choices = match named {
        Some(path) => vec![path.to_owned()],
        None => vec!["target/release/tunnel".into(), "target/fast/tunnel".into()],
    };
    let found = choices.iter().find(|path| path.is_file());
    let found =
        found.with_context(|| format!("no program at {choices:?}; build it, or set --tunnel PATH"))?;
    Ok(fs::canonicalize(found)?)
}

/// The edge's name.
pub(crate) const NODE: &str = "node1";
/// Any token is sufficient, as it lives only as long as the run.
pub(crate) const TOKEN: &str = "benchmark-0123456789";
/// Timeout for the start of a pair.
const START: Duration = Duration::from_secs(10);
