//! The processes under test, and the lines between them.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cutter::Cutter;
use crate::place::{Certificates, free_ports};
use crate::process::Process;
use crate::role::Role;
use crate::soak::client::Ways;
use crate::soak::opener::Opener;
use crate::soak::weigh::ProcessSample;
use crate::soak::world::{MEMBERS, PODS};
use crate::tunnel::{TOKEN, find};

/// Three servers, six edges, and twelve lines.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Servers, then edges.
    pub(crate) members: Vec<Member>,
    /// Lines from each edge to the replacement for the Service of the servers.
    pub(crate) edge_lines: Vec<Cutter>,
    /// Lines from each server to each other.
    pub(crate) server_lines: Vec<Cutter>,
    /// The routes for opening sessions.
    pub(crate) ways: Ways,
}

/// A process, or the place of a stopped one.
#[derive(Debug)]
pub(crate) struct Member {
    /// Prefix of the names of its config and log.
    pub(crate) name: String,
    /// The process, while it runs.
    pub(crate) process: Option<Process>,
    /// Number of starts.
    pub(crate) starts: u32,
    /// The last sample of the process.
    pub(crate) last: Option<ProcessSample>,
    /// Sessions resumed by earlier processes in this place.
    resumed: f64,
    args: Vec<String>,
    log: PathBuf,
    admin: SocketAddr,
}

impl Cluster {
    /// Writes all configs and starts all processes. Some may not be ready yet.
    pub(crate) fn start(dir: &Path, binary: Option<&Path>, target: SocketAddr) -> Result<Self> {
        let binary = find(binary)?.display().to_string();
        let certificates = Certificates::make(dir)?;
        fs::write(dir.join("token"), format!("default:{TOKEN}\n"))?;
        let grpc = free_ports::<PODS>()?.map(loopback);
        let connect = free_ports::<PODS>()?.map(loopback);
        let opening = free_ports::<OPENERS>()?.map(loopback);
        let admin = free_ports::<MEMBERS>()?.map(loopback);
        let (mut members, mut edge_lines, mut server_lines) = (Vec::new(), Vec::new(), Vec::new());
        let mut ways = Ways { doors: connect.into_iter().enumerate().collect(), nodes: Vec::new(), target };
        for (number, admin) in admin.into_iter().enumerate() {
            let name = if number < PODS { format!("pod{}", number + 1) } else { node(number) };
            let config = dir.join(format!("{name}.toml"));
            let mode = if number < PODS { "cloud" } else { "edge" };
            let mut args = vec![binary.clone(), format!("--m={mode}"), format!("--c={}", config.display())];
            let text = if let (Some(grpc_at), Some(connect)) = (grpc.get(number), connect.get(number)) {
                let others = grpc.iter().filter(|other| *other != grpc_at);
                let lines = others.map(|other| Cutter::to(*other)).collect::<Result<Vec<_>>>()?;
                let peers: Vec<String> = lines.iter().map(|line| line.at.to_string()).collect();
                server_lines.extend(lines);
                server(&certificates, dir, [*grpc_at, *connect, admin], &peers)
            } else {
                let line = Cutter::among(grpc.to_vec(), DELAY)?;
                let text = edge(&certificates, &name, line.at, admin);
                edge_lines.push(line);
                ways.nodes.push(name.clone());
                if let Some(listen) = opening.get(MEMBERS - 1 - number) {
                    ways.doors.push((number, *listen));
                    let role = Role::Opener(Opener { config: config.clone(), listen: *listen });
                    let own = std::env::current_exe()?.display().to_string();
                    args = vec![own, "role".to_owned(), serde_json::to_string(&role)?];
                }
                text
            };
            fs::write(&config, text)?;
            let log = dir.join(format!("{name}.log"));
            members.push(Member {
                name,
                process: None,
                starts: 0,
                last: None,
                resumed: 0.0,
                args,
                log,
                admin,
            });
        }
        for member in &mut members {
            member.start()?;
        }
        Ok(Self { members, edge_lines, server_lines, ways })
    }

    /// Returns a member.
    pub(crate) fn member(&mut self, number: usize) -> Result<&mut Member> {
        self.members.get_mut(number).context("no such member")
    }

    /// Returns how many times sessions were resumed, as counted by both their ends.
    pub(crate) fn resumed(&mut self) -> f64 {
        self.members.iter_mut().for_each(Member::look);
        self.members.iter().map(Member::resumed).sum()
    }

    /// Samples every process until none exceeds its value in `before`, or until `patience` is over. Returns what is
    /// still in excess.
    pub(crate) fn settles(&mut self, before: &[ProcessSample], patience: Duration) -> Vec<String> {
        let until = Instant::now() + patience;
        loop {
            self.members.iter_mut().for_each(Member::look);
            let excess: Vec<String> = self
                .members
                .iter()
                .zip(before)
                .flat_map(|(member, before)| {
                    let excess = member
                        .last
                        .as_ref()
                        .map_or_else(|| vec!["cannot be sampled".to_owned()], |now| now.excess(before));
                    excess.into_iter().map(|what| format!("{}: {what}", member.name)).collect::<Vec<_>>()
                })
                .collect();
            if excess.is_empty() || Instant::now() > until {
                return excess;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Returns a sample of each process.
    pub(crate) fn weigh(&self) -> Result<Vec<ProcessSample>> {
        self.members.iter().map(Member::weigh).collect()
    }

    /// Returns how many interactive links edges have opened, according to their logs.
    pub(crate) fn interactive_links(&self) -> usize {
        let logs = self.members.iter().map(|member| fs::read_to_string(&member.log).unwrap_or_default());
        logs.map(|log| log.matches(INTERACTIVE).count()).sum()
    }

    /// Returns log lines that must never occur.
    pub(crate) fn screams(&self) -> Vec<String> {
        let mut screams = Vec::new();
        for member in &self.members {
            let log = fs::read_to_string(&member.log).unwrap_or_default();
            let lines = log.lines().filter(|line| line.contains("panicked"));
            screams.extend(lines.map(|line| format!("{}: {line}", member.name)));
        }
        screams
    }
}

impl Member {
    /// Starts the process, for the first time or again.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.process = Some(Process::start(None, &self.args, &self.log)?);
        self.starts += 1;
        Ok(())
    }

    /// Notes that the process has ended.
    pub(crate) fn note_end(&mut self) {
        self.process = None;
        self.resumed = self.resumed();
        self.last = None;
    }

    /// Returns the sessions resumed by all processes in this place, as of the last sample.
    pub(crate) fn resumed(&self) -> f64 {
        self.resumed + self.last.as_ref().map_or(0.0, |last| last.count("tunnel_sessions_resumed_total"))
    }

    /// Samples the process, if that is possible now.
    pub(crate) fn look(&mut self) {
        if let Ok(now) = self.weigh() {
            self.last = Some(now);
        }
    }

    fn weigh(&self) -> Result<ProcessSample> {
        ProcessSample::of(self.process.as_ref().context("not running")?, self.admin)
            .with_context(|| self.name.clone())
    }
}

/// Returns the name of an edge. Edges follow the servers in the list of members; nodes count from 1.
fn node(number: usize) -> String {
    format!("node{}", number + 1 - PODS)
}

fn server(
    certificates: &Certificates,
    dir: &Path,
    [grpc, connect, admin]: [SocketAddr; 3],
    peers: &[String],
) -> String {
    format!(
        "[server.links]\nlisten = \"{grpc}\"\nadmin_listen = \"{admin}\"\ncert = {:?}\nkey = {:?}\npeer_ca = {:?}\n\
         token_file = {:?}\n[server.connect]\nlisten = \"{connect}\"\n[server.session]\ndrain_timeout = \"{DRAIN}s\"\n\
         [server.peers]\ncertificate_name = \"localhost\"\naddresses = {peers:?}\n[server.edge_access]\nnodes = [\"node*\"]\n",
        certificates.cert(),
        certificates.key(),
        certificates.ca(),
        dir.join("token"),
    )
}

fn edge(certificates: &Certificates, name: &str, cloud: SocketAddr, admin: SocketAddr) -> String {
    format!(
        "[edge.uplink]\nnode = \"{name}\"\ntoken = \"{TOKEN}\"\nca = {:?}\ntls_server_name = \"localhost\"\n\
         servers = [\"{cloud}\"]\nadmin_listen = \"{admin}\"\n[edge.session]\ndrain_timeout = \"{DRAIN}s\"\n",
        certificates.ca(),
    )
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// What an edge logs of a new interactive link.
const INTERACTIVE: &str = "interactive link opened";
/// Delay between an edge and a server. With this delay edges open interactive links.
const DELAY: Duration = Duration::from_millis(5);
/// Drain time of the processes, in seconds.
pub(crate) const DRAIN: u64 = 4;
/// Number of edges, the last ones, that open sessions themselves.
const OPENERS: usize = 2;
