//! The program under test: a pod and an edge as they are started by people.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::targets::Targets;
use crate::way::{Way, Ways};

/// How to start it, again and again, with the same ports and files.
#[derive(Debug)]
pub(crate) struct Tunnel {
    binary: PathBuf,
    dir: PathBuf,
    spaces: [Option<String>; 2],
    ways: Ways,
    /// Where edges link.
    pub(crate) grpc: SocketAddr,
}

impl Tunnel {
    /// Writes the configs of both ends.
    pub(crate) fn configure(place: &Place, targets: &Targets, binary: &Path) -> Result<Self> {
        let [grpc, connect, cloud_log, edge_log, metrics] = free_ports()?;
        let at = place.cloud_address;
        fs::write(place.file("token"), format!("default:{TOKEN}\n{NODE}:{TOKEN}\n"))?;
        let cloud = format!(
            "[mode.cloud.stream.server]\nlisten = \"{at}:{grpc}\"\nlog_listen = \"127.0.0.1:{cloud_log}\"\n\
             metrics_listen = \"127.0.0.1:{metrics}\"\ncert = {:?}\nkey = {:?}\ntokenfile = {:?}\n\n\
             [mode.cloud.ssh]\nlisten = \"{at}:{connect}\"\n",
            place.certificates.cert(),
            place.certificates.key(),
            place.file("token"),
        );
        let edge = format!(
            "[mode.edge.stream.client]\nnode = \"{NODE}\"\ntoken = \"{TOKEN}\"\ncert = {:?}\n\
             dns = \"localhost\"\nservername = \"{at}:{grpc}\"\nlog_listen = \"127.0.0.1:{edge_log}\"\n",
            place.certificates.ca(),
        );
        fs::write(place.file("cloud.toml"), cloud)?;
        fs::write(place.file("edge.toml"), edge)?;
        let proxy = SocketAddr::from((at, connect));
        let way =
            |target: SocketAddr| Way { address: proxy, connect: Some(format!("{NODE}:{}", target.port())) };
        Ok(Self {
            binary: binary.to_owned(),
            dir: place.dir.clone(),
            grpc: SocketAddr::from((at, grpc)),
            spaces: [place.cloud_space.clone(), place.edge_space.clone()],
            ways: Ways {
                echo: way(targets.echo),
                source: way(targets.source),
                sink: way(targets.sink),
                file: way(targets.file),
            },
        })
    }

    /// Starts the pod alone.
    pub(crate) fn pod(&self) -> Result<Process> {
        self.start("cloud", 0)
    }

    /// Starts the edge alone.
    pub(crate) fn edge(&self) -> Result<Process> {
        self.start("edge", 1)
    }

    /// The pair, not yet known to be reachable.
    pub(crate) fn pair(&self) -> Result<Proxy> {
        Ok(Proxy { name: "tunnel", ways: self.ways.clone(), processes: vec![self.pod()?, self.edge()?] })
    }

    /// The pair, once an echo came back through it (on loopback; in a namespace the clients' parts wait).
    pub(crate) fn reachable(&self) -> Result<Proxy> {
        let mut proxy = self.pair()?;
        if self.spaces.iter().all(Option::is_none) {
            proxy.until_reachable(START).with_context(|| self.last_words())?;
        }
        Ok(proxy)
    }

    fn start(&self, mode: &str, space: usize) -> Result<Process> {
        let config = self.dir.join(format!("{mode}.toml"));
        let args = [
            self.binary.display().to_string(),
            format!("--m={mode}"),
            format!("--c={}", config.display()),
            "--alsologtostderr".to_owned(),
        ];
        let space = self.spaces.get(space).and_then(Option::as_deref);
        Process::start(space, &args, &self.dir.join(format!("{mode}.log")))
    }

    /// The ends of both logs, for whoever has to find out why it did not come up.
    fn last_words(&self) -> String {
        let mut words = String::from("the tunnel did not come up:");
        for mode in ["cloud", "edge"] {
            let log = fs::read_to_string(self.dir.join(format!("{mode}.log"))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines.get(lines.len().saturating_sub(5)..).unwrap_or_default();
            words += &format!("\n--- {mode}.log\n{}", last.join("\n"));
        }
        words
    }
}

/// Finds the program: the one named, else what was built last for release.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf> {
    let choices = match named {
        Some(path) => vec![path.to_owned()],
        None => vec!["target/release/tunnel".into(), "target/fast/tunnel".into()],
    };
    let found = choices.iter().find(|path| path.is_file());
    let found =
        found.with_context(|| format!("no program at {choices:?}; build it, or say --tunnel PATH"))?;
    Ok(fs::canonicalize(found)?)
}

/// The edge's name.
const NODE: &str = "node1";
/// Any token will do: it is as short-lived as the run.
pub(crate) const TOKEN: &str = "benchmark-0123456789";
/// A pair that has not come up by now will not.
const START: Duration = Duration::from_secs(10);
