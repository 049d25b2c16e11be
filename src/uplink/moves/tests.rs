//! Simulates thousands of edges and a few servers that decide as the program does. A step is a second.

use std::cell::RefCell;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::{Instant, advance};
use tunnel_base::metrics::Metrics;
use tunnel_link::link::Link;
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::LinkPurpose;
use tunnel_proto::names::NodeName;
use tunnel_proto::state::LinkId;

use super::*;
use crate::registry::balance::pause;
use crate::registry::peers::node_counts::{ANNOUNCE_INTERVAL, PeerLoad};
use crate::registry::{LinkedNode, Registry};
use crate::uplink::link_dialer::DialRequest;
use crate::uplink::reconnect::FAIL_BACK_INTERVAL;

/// What the edges' list of servers contains.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ServerList {
    /// The address of each server, in the same order at all edges.
    Addresses,
    /// One name with the addresses of all servers.
    Name,
    /// The address of a load balancer.
    Balancer,
}

struct Server {
    at: SocketAddr,
    own: Instance,
    registry: Arc<Registry>,
    accepts: bool,
    /// The number of nodes as its peers know it.
    reported: u64,
    asks_at: Instant,
}

struct Edge {
    node: NodeName,
    process: Instance,
    place: ListPlace,
    /// Index of the server that it is linked to.
    at: usize,
    link: Arc<Link>,
    /// When it dials preferred servers again.
    fails_back_at: Instant,
}

struct Cloud {
    list: ServerList,
    servers: Vec<Server>,
    edges: Vec<Edge>,
    rng: RefCell<StdRng>,
    second: u64,
    asked: usize,
}

impl Server {
    fn new(index: usize, own: u64) -> Self {
        let registry = Registry::new(Metrics::server("", ""));
        let at = ([10, 0, 0, 1], 9000 + u16::try_from(index).unwrap()).into();
        let own = Instance::from_bits(own.into());
        Self { at, own, registry, accepts: true, reported: 0, asks_at: Instant::now() }
    }
}

impl Cloud {
    /// Starts the first `up` of three servers, and edges that dial for the first time.
    fn new(list: ServerList, up: usize) -> Self {
        let seed = SEED.unwrap_or_else(rand::random);
        println!("{list:?}, seed {seed}");
        let rng = RefCell::new(StdRng::seed_from_u64(seed));
        let server = |index| Server { accepts: index < up, ..Server::new(index, index as u64) };
        let servers = (0..3).map(server).collect();
        let mut cloud = Self { list, servers, edges: Vec::new(), rng, second: 0, asked: 0 };
        for number in 0..EDGES {
            let node: NodeName = format!("node{number}").parse().unwrap();
            let process = Instance::from_bits(cloud.rng.borrow_mut().random());
            let link = Link::new(LinkId(0), Remote::Edge(node.clone()), Some(process));
            let place = ListPlace::default();
            cloud.edges.push(Edge { node, process, place, at: 0, link, fails_back_at: Instant::now() });
            let (place, at) = cloud.dial(0, DialRequest::new(LinkPurpose::Primary)).unwrap();
            cloud.link(number, place, at);
        }
        cloud
    }

    /// Returns the number of entries of the edges' list.
    fn entries(&self) -> usize {
        if self.list == ServerList::Addresses { self.servers.len() } else { 1 }
    }

    /// Dials as an edge's `LinkDialer` does. Returns the entry and the server.
    fn dial(&self, first: usize, hint: DialRequest) -> Option<(usize, usize)> {
        dial_order(first, self.entries()).find_map(|entry| {
            let mut servers: Vec<_> = match self.list {
                ServerList::Addresses => vec![entry],
                ServerList::Name | ServerList::Balancer => (0..self.servers.len()).collect(),
            };
            servers.shuffle(&mut *self.rng.borrow_mut());
            if self.list != ServerList::Balancer {
                servers.sort_by_key(|server| hint.rank(self.servers[*server].at));
            }
            servers.into_iter().find(|server| self.servers[*server].accepts).map(|server| (entry, server))
        })
    }

    /// Replaces the link of an edge.
    fn link(&mut self, edge: usize, entry: usize, at: usize) {
        let number = self.edges.len() as u64 * self.second + edge as u64;
        let chance = self.rng.borrow_mut().random_range(0.5..1.5);
        let edge = &mut self.edges[edge];
        self.servers[edge.at].registry.remove(&edge.link);
        edge.link = Link::new(LinkId(number), Remote::Edge(edge.node.clone()), Some(edge.process));
        let linked = LinkedNode { link: edge.link.clone(), from: self.servers[at].at };
        self.servers[at].registry.insert(linked, false);
        (edge.place, edge.at) = (edge.place.linked(entry), at);
        edge.fails_back_at = Instant::now() + FAIL_BACK_INTERVAL.mul_f64(chance);
    }

    /// Has a server ask its edges, which decide at once.
    fn ask(&mut self, server: usize) {
        let Server { registry, asks_at, accepts: true, own, at, .. } = &self.servers[server] else { return };
        if Instant::now() < *asks_at {
            return;
        }
        let peers = self.servers.iter().filter(|peer| peer.accepts && peer.own != *own);
        let peers: Vec<_> = peers.map(|peer| PeerLoad { at: peer.at, nodes: peer.reported }).collect();
        let Some((to, links)) = registry.links_to_move(&peers) else { return };
        let (here, own, hint) = (
            registry.node_count(),
            *own,
            DialRequest { purpose: LinkPurpose::Backup, to: Some(to), exclude: Some(*at) },
        );
        for link in &links {
            assert!(link.request_move(to));
            let node = link.peer.node().unwrap();
            let edge: usize = node.as_str().trim_start_matches("node").parse().unwrap();
            let place = self.edges[edge].place;
            let of_target = || self.servers.iter().position(|server| server.at == to);
            let first = if self.list == ServerList::Addresses { of_target() } else { None };
            let dial = || ready(self.dial(first.unwrap_or(place.server + 1), hint).ok_or("no server"));
            let dials = if self.list == ServerList::Balancer { 1 } else { MAX_DIALS };
            let moved = dial_elsewhere(Some(own), dials, dial, |(_, at)| Some(self.servers[*at].own));
            if let Some((entry, at)) = moved.now_or_never().unwrap() {
                self.edges[edge].place = ListPlace { server: entry, is_requested: true };
                self.link(edge, entry, at);
            }
        }
        self.asked += links.len();
        self.servers[server].asks_at = Instant::now() + pause(links.len(), here);
    }

    async fn step(&mut self) {
        if self.second.is_multiple_of(ANNOUNCE_INTERVAL.as_secs()) {
            for server in &mut self.servers {
                server.reported = server.registry.node_count() as u64;
            }
        }
        for server in 0..self.servers.len() {
            self.ask(server);
        }
        for edge in 0..self.edges.len() {
            let Edge { place, fails_back_at, .. } = &self.edges[edge];
            if !place.preferred().is_empty() && *fails_back_at <= Instant::now() {
                let better = place.preferred().find(|server| self.servers[*server].accepts);
                match better {
                    Some(better) => self.link(edge, better, better),
                    None => self.edges[edge].fails_back_at += FAIL_BACK_INTERVAL,
                }
            }
        }
        self.second += 1;
        advance(Duration::from_secs(1)).await;
    }

    async fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.step().await;
        }
    }

    /// Stops a server, whose edges link elsewhere, and starts it again.
    async fn restart(&mut self, server: usize) {
        let Server { at, .. } = self.servers[server];
        self.servers[server].accepts = false;
        for edge in 0..self.edges.len() {
            if self.edges[edge].at == server {
                let hint = DialRequest { exclude: Some(at), ..DialRequest::new(LinkPurpose::Primary) };
                let (entry, at) = self.dial(self.edges[edge].place.server, hint).unwrap();
                self.link(edge, entry, at);
            }
        }
        self.run(10).await;
        self.servers[server] = Server::new(server, 1000 + self.second);
        self.run(20).await;
    }

    fn nodes(&self) -> Vec<usize> {
        self.servers.iter().map(|server| server.registry.node_count()).collect()
    }

    /// Runs for ten minutes. No server may then have over 1.3 times its share, and edges are no longer asked.
    async fn expect_balance(&mut self) {
        let most = self.edges.len() * 13 / 10 / self.servers.len();
        let before = self.nodes();
        let started = self.second;
        let mut even = None;
        while self.second < started + 540 {
            self.step().await;
            let is_even = self.nodes().iter().all(|nodes| *nodes <= most);
            even = is_even.then(|| even.unwrap_or(self.second - started));
        }
        let asked = self.asked;
        self.run(60).await;
        println!("{before:?} became {:?}, even after {even:?} s, {asked} were asked", self.nodes());
        assert!(self.nodes().iter().all(|nodes| *nodes <= most), "{:?}", self.nodes());
        assert!(self.asked == asked && asked <= self.edges.len() * 3, "{asked}, then {}", self.asked);
    }
}

#[tokio::test(start_paused = true)]
async fn a_third_server_that_starts_late_gets_its_share() {
    for list in [ServerList::Addresses, ServerList::Name, ServerList::Balancer] {
        let mut cloud = Cloud::new(list, 2);
        cloud.run(120).await;
        cloud.servers[2].accepts = true;
        cloud.expect_balance().await;
    }
}

#[tokio::test(start_paused = true)]
async fn servers_are_even_again_after_a_rolling_restart() {
    for list in [ServerList::Addresses, ServerList::Name, ServerList::Balancer] {
        let mut cloud = Cloud::new(list, 3);
        cloud.run(120).await;
        for server in 0..3 {
            cloud.restart(server).await;
        }
        cloud.expect_balance().await;
    }
}

const EDGES: usize = 5000;
/// Set to the seed that a failed test has printed in order to repeat it.
const SEED: Option<u64> = None;

#[test]
fn a_requested_link_stays_until_the_edge_has_to_link_elsewhere() {
    let requested = ListPlace { server: 2, is_requested: true };
    assert!(requested.preferred().is_empty() && requested.linked(2).preferred().is_empty());
    assert_eq!(requested.linked(1).preferred(), 0..1);
    assert_eq!(dial_order(2, 3).collect::<Vec<_>>(), [2, 0, 1]);
}
