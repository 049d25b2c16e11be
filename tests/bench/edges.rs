//! Many edges in one process, each with its own link over real gRPC and TLS, its own session table and its own backoff.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rand::RngExt as _;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::client::Resumption;
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::{LinkContext, dial};
use tunnel_link::link_reader::LinkReader;
use tunnel_link::table::{FrameEvent, SessionLimits, SessionTable};
use tunnel_net::listen::tune_link;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::{self, TlsClientConfig, Trust};
use tunnel_proto::frame::{Frame, FrameKind};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Instance, NodeName};

use crate::process::Process;
use crate::role::print_message;
use crate::tunnel::TOKEN;

/// A number of edges, and the servers they link to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Edges {
    /// The servers; an edge dials any of them, as through a load balancer.
    pub(crate) servers: Vec<SocketAddr>,
    /// The trusted CA, in PEM.
    pub(crate) ca: PathBuf,
    /// Number of the first edge; nodes are named after their numbers.
    pub(crate) first: usize,
    /// Number of edges.
    pub(crate) count: usize,
}

/// The edges' state, printed for each line on the process's input.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    /// Edges that have a link.
    pub(crate) linked: usize,
    /// Number of links of each server.
    pub(crate) at: Vec<usize>,
    /// Number of times that an edge was asked to link to another server.
    pub(crate) drained: u64,
    /// Number of dials of all edges so far.
    pub(crate) dials: u64,
    /// Maximum number of consecutive dials of one edge since its last link that reset its backoff.
    pub(crate) most: usize,
    /// Number of dials before the end of the pause that the backoff requires.
    pub(crate) buffered: u64,
    /// Failed dials, by error.
    pub(crate) failed: BTreeMap<String, u64>,
    /// Closed links, by error.
    pub(crate) ended: BTreeMap<String, u64>,
}

/// Counters shared by the edges.
#[derive(Debug, Default)]
struct Counts {
    linked: AtomicUsize,
    at: Vec<AtomicUsize>,
    drained: AtomicU64,
    dials: AtomicU64,
    most: AtomicUsize,
    buffered: AtomicU64,
    failed: Mutex<BTreeMap<String, u64>>,
    ended: Mutex<BTreeMap<String, u64>>,
}

/// One edge.
struct Edge {
    servers: Arc<[SocketAddr]>,
    node: NodeName,
    address: Ipv4Addr,
    tls: Arc<ClientConfig>,
    pool: BufferPool,
    link_context: LinkContext,
    counts: Arc<Counts>,
}

impl Edges {
    /// Runs the edges in this process. Prints a [`State`] for each line of input, and ends with the input.
    pub(crate) fn run(&self) -> Result<()> {
        let at = self.servers.iter().map(|_| AtomicUsize::new(0)).collect();
        let counts = Arc::new(Counts { at, ..Counts::default() });
        let servers: Arc<[SocketAddr]> = self.servers.clone().into();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let tls =
            TlsClientConfig { trust: Trust::Ca(self.ca.clone()), identity: None, alpn: vec![b"h2".to_vec()] };
        let tls = tls.load()?;
        let (drain, pool) = (Drain::new(), BufferPool::new());
        for number in self.first..self.first + self.count {
            // A separate ticket store per edge: a shared one would give one edge's tickets to the next.
            let mut own = ClientConfig::clone(&tls.load());
            own.resumption = Resumption::in_memory_sessions(1);
            let metrics = Metrics::edge();
            let table = SessionTable::new(Instance::random(), LIMITS, metrics.clone());
            let edge = Edge {
                servers: servers.clone(),
                node: format!("edge{number}").parse().context("invalid node name")?,
                address: Ipv4Addr::from_bits(FIRST_ADDRESS + u32::try_from(number)?),
                tls: Arc::new(own),
                pool: pool.clone(),
                link_context: LinkContext::new(table, metrics, drain.clone()),
                counts: counts.clone(),
            };
            let begin = BETWEEN * u32::try_from(number - self.first)?;
            runtime.spawn(edge.keep(begin));
        }
        for line in std::io::stdin().lock().lines() {
            line?;
            print_message(&counts.state())?;
        }
        Ok(())
    }
}

impl Edge {
    /// Dials, serves the link, and dials again, like the real edge.
    async fn keep(self, begin: Duration) {
        sleep(begin).await;
        let mut backoff = Backoff::new();
        let (mut tries, mut ended) = (0, Instant::now());
        let mut old = None;
        let mut to = None;
        loop {
            let pause = backoff.pause(rand::random());
            sleep(pause).await;
            tries += 1;
            self.counts.dials.fetch_add(1, Relaxed);
            self.counts.most.fetch_max(tries, Relaxed);
            if ended.elapsed() < pause {
                self.counts.buffered.fetch_add(1, Relaxed);
            }
            match self.connect(to.take()).await {
                Ok((reader, at)) => {
                    let started = Instant::now();
                    if let Some(old) = old.take() {
                        tokio::spawn(leave(old));
                    }
                    if let Some((reader, requested)) = self.serve(reader, at).await {
                        old = Some(reader);
                        to = requested;
                    }
                    backoff.on_attempt_end(started.elapsed(), false);
                    if backoff == Backoff::new() {
                        tries = 0;
                    }
                }
                Err(why) => count(&self.counts.failed, &format!("{why:#}")),
            }
            ended = Instant::now();
        }
    }

    /// Returns a link to that server, otherwise to any, and the index of its server.
    async fn connect(&self, to: Option<SocketAddr>) -> Result<(LinkReader, usize)> {
        let requested = self.servers.iter().position(|server| Some(*server) == to);
        let at = requested.unwrap_or_else(|| rand::rng().random_range(0..self.servers.len()));
        let server = self.servers.get(at).context("no server is listed")?;
        let socket = timeout(TIMEOUT, self.dial(*server)).await.context("timeout while connecting")?;
        let socket = socket.context("connecting")?;
        tune_link(&socket, None)?;
        let tls = TlsConnector::from(self.tls.clone());
        let name = tls::server_name("localhost").map_err(anyhow::Error::msg)?;
        let accepted = timeout(TIMEOUT, tls.connect(name, Buffered::new(socket, self.pool.clone()))).await;
        let io = accepted.context("timeout in the TLS handshake")?.context("TLS")?;
        let headers = EdgeHello::edge_request(&self.node, TOKEN, self.link_context.table.instance());
        Ok((dial::dial(Box::new(io), "localhost", &self.node, headers, &self.link_context).await?, at))
    }

    /// Dials from a separate loopback address, like edges that do not share a NAT.
    async fn dial(&self, server: SocketAddr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        if server.ip().is_loopback() {
            socket.bind(SocketAddr::from((self.address, 0)))?;
        }
        socket.connect(server).await
    }

    /// Serves the link until it ends. Returns the link if its server wants to replace it, and by which server.
    async fn serve(&self, mut reader: LinkReader, at: usize) -> Option<(LinkReader, Option<SocketAddr>)> {
        self.counts.linked.fetch_add(1, Relaxed);
        self.counts.at[at].fetch_add(1, Relaxed);
        reader.begin();
        let left = loop {
            match reader.next().await {
                Ok(FrameEvent::Signal(Frame { body: FrameKind::Drain(to), .. })) => break Ok(to),
                // These edges receive no other requests.
                Ok(_event) => {}
                Err(why) => break Err(why),
            }
        };
        self.counts.linked.fetch_sub(1, Relaxed);
        self.counts.at[at].fetch_sub(1, Relaxed);
        match left {
            Ok(to) => {
                self.counts.drained.fetch_add(1, Relaxed);
                Some((reader, to))
            }
            Err(why) => {
                reader.end(&why);
                count(&self.counts.ended, &why.to_string());
                None
            }
        }
    }
}

/// Retires the old link, as the real edge does once it has another one. No session runs there.
async fn leave(mut old: LinkReader) {
    old.link.drain();
    let draining = timeout(LEAVE, async { while old.next().await.is_ok() {} });
    let _ = draining.await;
    old.link.close();
}

impl State {
    /// Returns the state of the edges of several processes together.
    pub(crate) fn of_all(processes: &mut [Process]) -> Result<Self> {
        let mut all = Self::default();
        for process in processes {
            let one: Self = process.request_output()?;
            all.linked += one.linked;
            all.at.resize(all.at.len().max(one.at.len()), 0);
            all.at.iter_mut().zip(one.at).for_each(|(sum, part)| *sum += part);
            all.drained += one.drained;
            all.dials += one.dials;
            all.most = all.most.max(one.most);
            all.buffered += one.buffered;
            for (sum, part) in [(&mut all.failed, one.failed), (&mut all.ended, one.ended)] {
                part.into_iter().for_each(|(why, times)| *sum.entry(why).or_default() += times);
            }
        }
        Ok(all)
    }
}

impl Counts {
    fn state(&self) -> State {
        let copy =
            |of: &Mutex<BTreeMap<String, u64>>| of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        State {
            linked: self.linked.load(Relaxed),
            at: self.at.iter().map(|at| at.load(Relaxed)).collect(),
            drained: self.drained.load(Relaxed),
            dials: self.dials.load(Relaxed),
            // Restarts this count.
            most: self.most.swap(0, Relaxed),
            buffered: self.buffered.load(Relaxed),
            failed: copy(&self.failed),
            ended: copy(&self.ended),
        }
    }
}

fn count(causes: &Mutex<BTreeMap<String, u64>>, why: &str) {
    *causes.lock().unwrap_or_else(PoisonError::into_inner).entry(why.to_owned()).or_default() += 1;
}

/// Time between the first dials of two edges: nodes join one by one, not all at the same moment.
const BETWEEN: Duration = Duration::from_millis(1);
/// Loopback address of the first edge: 127.1.0.0.
const FIRST_ADDRESS: u32 = 0x7f01_0000;
/// Timeout for the last frames on a replaced link.
const LEAVE: Duration = Duration::from_millis(250);
/// Timeout of each step of connecting, as in the real edge.
const TIMEOUT: Duration = Duration::from_secs(10);
/// No sessions are opened, so these limits do not matter.
const LIMITS: SessionLimits = SessionLimits {
    windows: WindowLimits { start: 32 * 1024, max: 1 << 20 },
    memory: 6 << 20,
    sessions: 100,
    resume_timeout: Duration::from_secs(60),
    max_resume_timeout: Duration::ZERO,
};
