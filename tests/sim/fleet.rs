//! Tests a cloud of many servers, each with many edges: the program's own finder, announcements and server lists.
//!
//! Runs on a network of queues in paused time. Each server must announce each of its edges once to each other server,
//! and a node that has moved must be found within seconds.
//!
//! `FLEET=100x10000` sets the number of servers, and of edges per server; `FLEET_SEED=n` repeats a run. [`records`]
//! tests the same cloud as its publishers see it, [`pace`] one publisher, [`node_cost`] the memory per known node.

mod etcd;
mod figures;
mod net;
mod node_cost;
mod pace;
mod records;
mod server;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, sleep_until};
use tunnel::paths::PathProvider as _;
use tunnel_base::drain::Drain;
use tunnel_proto::names::{Instance, NodeName};

use super::chance::SeededRng;
use super::number;
use figures::{Counts, memory};
use net::Net;
use server::SimServer;

#[test]
fn a_server_announces_each_edge_once_to_each_peer_and_finds_moved_nodes_soon() {
    if let Some((servers, each)) = fleet_size() {
        run(servers, each);
        return;
    }
    for servers in [4, 12] {
        let rows = run(servers, 50);
        let announcements = 50 * servers * (servers - 1);
        // Loads and pings are few.
        let sent = usize::try_from(rows[0].sent).unwrap();
        assert!((announcements..announcements * 3 / 2).contains(&sent), "{sent} at the start");
        assert!(rows.iter().all(|row| row.found < Duration::from_secs(5)), "{rows:?}");
    }
}

/// Returns the number of servers, and of edges per server, if set by the developer.
fn fleet_size() -> Option<(usize, usize)> {
    let size = std::env::var("FLEET").ok()?;
    let (servers, each) = size.split_once('x').unwrap();
    Some((servers.parse().unwrap(), each.parse().unwrap()))
}

#[expect(clippy::disallowed_types, reason = "measures the real duration of the simulation")]
fn run(servers: usize, each: usize) -> Vec<Row> {
    let started = std::time::Instant::now();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let seed = number("FLEET_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    let rows = runtime.block_on(live(servers, each, seed));
    println!("in {:?}", started.elapsed());
    rows
}

/// A cloud, and the location of its edges.
struct Fleet {
    net: Arc<Net>,
    rng: SeededRng,
    nodes: Vec<Edge>,
    /// Number of servers started so far.
    started: u32,
    clients: Drain,
    since: Instant,
}

struct Edge {
    name: NodeName,
    process: Instance,
    server: Option<Arc<SimServer>>,
}

/// The cost of an event.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Time until every node was found from every server.
    found: Duration,
    /// Frames sent by all servers.
    sent: u64,
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let (net, rng) = (Net::new(seed), SeededRng::new(seed));
        Self { net, rng, nodes: Vec::new(), started: 0, clients: Drain::new(), since: Instant::now() }
    }

    fn start_server(&mut self) -> Arc<SimServer> {
        self.started += 1;
        let ip = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 0).to_bits() + self.started);
        SimServer::start(&self.net, SocketAddr::new(ip.into(), 9000))
    }

    /// Starts everything.
    async fn start(&mut self, servers: usize, each: usize) {
        for _ in 0..servers {
            self.start_server();
        }
        for n in 0..servers * each {
            let (name, process) = (format!("node-{n:07}").parse().unwrap(), self.net.instance());
            self.nodes.push(Edge { name, process, server: None });
        }
        sleep(Duration::from_secs(5)).await;
        self.come((0..servers * each).collect()).await;
    }

    /// Connects these edges again, each to any server, as fast as servers accept them.
    async fn come(&mut self, mut edges: Vec<usize>) {
        let started = Instant::now();
        let servers = self.net.servers();
        let mut free = vec![started; servers.len()];
        let mut when: Vec<_> = edges
            .drain(..)
            .map(|edge| {
                let (server, chance) = (self.rng.below(servers.len()), self.rng.below(100));
                let at = free[server].max(started + FIRST_DIAL * chance as u32 / 100);
                free[server] = at + HANDSHAKE;
                (at, edge, server)
            })
            .collect();
        when.sort_unstable_by_key(|(at, ..)| *at);
        for (at, edge, server) in when {
            sleep_until(at).await;
            self.links(edge, &servers[server]);
        }
    }

    fn links(&mut self, edge: usize, server: &Arc<SimServer>) {
        let edge = &mut self.nodes[edge];
        if let Some(before) = edge.server.replace(server.clone()) {
            server.links(&self.net, &edge.name, edge.process);
            if before.own != server.own {
                before.loses(&self.net, &edge.name);
            }
            return;
        }
        server.links(&self.net, &edge.name, edge.process);
    }

    /// Returns the edges of a server.
    fn of(&self, server: &SimServer) -> Vec<usize> {
        let here = |edge: &Edge| edge.server.as_ref().is_some_and(|at| at.own == server.own);
        (0..self.nodes.len()).filter(|n| here(&self.nodes[*n])).collect()
    }

    /// Kills a server. Its edges connect to others.
    async fn dies(&mut self, server: &Arc<SimServer>) {
        let its = self.of(server);
        self.net.remove(server);
        for edge in &its {
            self.nodes[*edge].server = None;
            self.net.withdraw(&self.nodes[*edge].name, server.ip());
        }
        self.come(its).await;
    }

    /// Cuts a server off: nothing that it sends arrives, but its links stay open. Its edges notice and connect to
    /// others, long before servers close their links and DNS drops its records.
    async fn is_cut_off(&mut self, server: &Arc<SimServer>) {
        let its = self.of(server);
        server.cut_off.store(true, Relaxed);
        self.net.hide(server);
        sleep(EDGES_NOTICE).await;
        its.iter().for_each(|edge| self.nodes[*edge].server = None);
        self.come(its).await;
    }

    /// Removes a server that was cut off.
    fn is_given_up(&self, server: &Arc<SimServer>, its: &[usize]) {
        its.iter().for_each(|edge| self.net.withdraw(&self.nodes[*edge].name, server.ip()));
        self.net.remove(server);
    }

    /// Drains each server and starts another one in its place.
    async fn restarts(&mut self) {
        for server in self.net.servers() {
            self.start_server();
            sleep(Duration::from_secs(10)).await;
            let its = self.of(&server);
            server.stops();
            self.net.hide(&server);
            self.come(its).await;
            sleep(Duration::from_secs(2)).await;
            self.net.remove(&server);
        }
    }

    /// Disconnects some of the edges, and connects them again together.
    async fn returns(&mut self, edges: &[usize]) {
        for edge in edges {
            let edge = &mut self.nodes[*edge];
            if let Some(server) = edge.server.take() {
                server.loses(&self.net, &edge.name);
            }
        }
        sleep(Duration::from_secs(30)).await;
        self.restart_counts();
        self.come(edges.to_vec()).await;
    }

    /// Simulates clients at every server that request nodes, some of which do not exist, until the end of the run.
    fn start_clients(&self) {
        let (net, clients) = (self.net.clone(), self.clients.clone());
        let nodes: Vec<NodeName> = self.nodes.iter().map(|edge| edge.name.clone()).collect();
        let pause = REQUEST_INTERVAL / u32::try_from(nodes.len()).unwrap();
        let seed = self.rng.below(1 << 30) as u64;
        self.clients.spawn(tracing::Span::none(), async move {
            let mut chance = seed;
            let mut below = |n: usize| {
                chance =
                    chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (chance >> 33) as usize % n
            };
            let mut next = Instant::now();
            loop {
                next += pause;
                sleep_until(next).await;
                if clients.is_draining() {
                    return;
                }
                let servers = net.servers();
                let server = servers[below(servers.len())].clone();
                let mut node = nodes[below(nodes.len())].clone();
                if below(100) < OFFLINE {
                    node = format!("off-{node}").parse().unwrap();
                }
                server.clone().work(async move {
                    let _ = server.finder.find(&node, None, None).await;
                });
            }
        });
    }

    /// Searches for some of these nodes from every server, and for more of them from one server each, until all are
    /// found at the right place. Returns the duration.
    async fn found(&self, moved: &[usize]) -> Duration {
        let (started, servers) = (Instant::now(), self.net.servers());
        let some = |most: usize| moved.iter().step_by(moved.len().div_ceil(most.max(1)).max(1));
        let everywhere = some((moved.len() / 50).clamp(10, MAX_EVERYWHERE))
            .flat_map(|edge| servers.iter().map(move |server| (server, *edge)));
        let once = some((moved.len() / 5).min(MAX_ONCE))
            .zip(servers.iter().cycle())
            .map(|(edge, server)| (server, *edge));
        let searches = everywhere.chain(once).map(|(server, edge)| async move {
            let edge = &self.nodes[edge];
            while !server.finds(&edge.name, edge.server.as_ref().unwrap()).await {
                sleep(Duration::from_millis(100)).await;
            }
        });
        let all = tokio::time::timeout(Duration::from_secs(60), join_all(searches)).await;
        assert!(all.is_ok(), "not all nodes are found from all servers");
        started.elapsed()
    }

    /// Reports the cost since the last call of this or [`Self::restart_counts`], then searches for some of the moved
    /// edges.
    async fn report(&mut self, what: &str, moved: &[usize]) -> Row {
        let took = self.since.elapsed();
        let (mut worst, mut sent) = (Counts::default(), 0);
        for server in self.net.servers() {
            let counts = server.figures.take();
            sent += counts.sent.all;
            worst = worst.with(counts);
        }
        let found = self.found(moved).await;
        self.restart_counts();
        let Counts { sent: sent_rate, received, lookups, waiting } = worst;
        println!(
            "| {what} | {:.0} s | {} / {} | {} / {} | {} / {} | {waiting} | {:.1} s | {sent} | {} MB |",
            took.as_secs_f64(),
            sent_rate.peak,
            sent_rate.all,
            received.peak,
            received.all,
            lookups.peak,
            lookups.all,
            found.as_secs_f64(),
            memory() >> 20,
        );
        Row { found, sent }
    }

    /// Discards the counts so far.
    fn restart_counts(&mut self) {
        self.net.servers().iter().for_each(|server| {
            server.figures.take();
        });
        self.since = Instant::now();
    }

    /// Waits for 40 s.
    async fn rests(&mut self) {
        sleep(Duration::from_secs(40)).await;
        self.restart_counts();
    }
}

/// Runs all events, with `servers` servers and `each` edges per server.
async fn live(servers: usize, each: usize, seed: u64) -> Vec<Row> {
    let mut fleet = Fleet::new(seed);
    println!("{servers} servers, {each} edges each, FLEET_SEED={seed}");
    println!(
        "| what | time | sent per second / total | received | lookups | queue | found after | all sent | memory |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let all: Vec<_> = (0..servers * each).collect();
    fleet.start(servers, each).await;
    let mut rows = vec![fleet.report("all start", &all).await];
    fleet.start_clients();
    fleet.rests().await;
    sleep(Duration::from_secs(100)).await;
    rows.push(fleet.report("100 s of clients", &[]).await);
    fleet.net.dns_is_away.store(true, Relaxed);
    sleep(Duration::from_secs(600)).await;
    rows.push(fleet.report("10 min without DNS", &all).await);
    fleet.net.dns_is_away.store(false, Relaxed);
    fleet.rests().await;
    let victim = fleet.net.servers()[servers / 2].clone();
    let its = fleet.of(&victim);
    fleet.dies(&victim).await;
    rows.push(fleet.report("a server dies", &its).await);
    fleet.start_server();
    fleet.rests().await;
    let victim = fleet.net.servers()[servers / 3].clone();
    let its = fleet.of(&victim);
    fleet.is_cut_off(&victim).await;
    rows.push(fleet.report("a server is cut off", &its).await);
    fleet.is_given_up(&victim, &its);
    fleet.start_server();
    fleet.rests().await;
    let fifth: Vec<_> = all.iter().copied().step_by(5).collect();
    fleet.returns(&fifth).await;
    rows.push(fleet.report("a fifth comes back", &fifth).await);
    fleet.rests().await;
    fleet.restarts().await;
    rows.push(fleet.report("rolling restart", &all).await);
    fleet.clients.start();
    fleet.net.servers().iter().for_each(|server| fleet.net.remove(server));
    rows
}

/// Maximum delay of an edge's first dial.
const FIRST_DIAL: Duration = Duration::from_millis(50);
/// Time after which edges notice that their server is unresponsive.
const EDGES_NOTICE: Duration = Duration::from_secs(5);
/// Cost of one handshake for a server: two cores perform 1,500 per second.
const HANDSHAKE: Duration = Duration::from_micros(667);
/// Interval between two requests for the same node.
const REQUEST_INTERVAL: Duration = Duration::from_secs(500);
/// Percentage of requests for nodes that do not exist.
const OFFLINE: usize = 2;
/// One in fifty moved nodes is searched for from every server: at least ten, at most this many.
const MAX_EVERYWHERE: usize = 100;
/// One in five moved nodes is searched for from one server: at most this many.
const MAX_ONCE: usize = 10_000;
