//! Tests a cloud of many servers as its publishers see it: the program's own publisher of each server, all with one
//! etcd that is unreachable for ten minutes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::Span;
use tunnel::publish::record_filter::RecordFilter;
use tunnel::publish::{Publisher, etcd};
use tunnel::registry::LinkedNode;
use tunnel::registry::Registry;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::zone::NodeZone;
use tunnel_link::link::Link;
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::Remote;
use tunnel_proto::names::NodeName;
use tunnel_proto::state::LinkId;

use super::HANDSHAKE;
use super::etcd::Etcd;
use super::figures::{Rate, memory};
use super::fleet_size;
use super::server::ZONE;

#[test]
fn records_are_correct_after_an_etcd_outage_and_servers_retry_rarely_during_it() {
    let (servers, each) = fleet_size().unwrap_or((4, 50));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(live(servers, each));
}

/// A server, as its publisher sees it.
struct PublishingServer {
    ip: IpAddr,
    registry: Arc<Registry>,
    attempts: Arc<Mutex<Rate>>,
    /// The last report about its records, and the number of changes: each change to an error or back is a line in the
    /// log.
    reports: Arc<Mutex<(bool, u64)>>,
}

impl PublishingServer {
    fn start(number: u32, etcd: &Arc<Etcd>, drain: &Drain) -> Self {
        let ip = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 1).to_bits() + number).into();
        let metrics = Metrics::server("", "");
        let (registry, attempts) = (Registry::new(metrics.clone()), Arc::default());
        let reports = Arc::new(Mutex::new((true, 0)));
        let cluster = etcd.cluster(Arc::clone(&attempts));
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let report_state = reports.clone();
        let publisher = Publisher {
            registry: registry.clone(),
            store: Box::new(etcd::EtcdRecords::new(cluster, "/skydns".to_owned(), ip)),
            zone: Arc::new(NodeZone::new(ZONE.to_owned(), Vec::new(), |_| false)),
            vet: RecordFilter::new(resolver, |_| Box::pin(std::future::ready(false)), None),
            metrics,
            report: Box::new(move |state| {
                let mut reports = report_state.lock().unwrap();
                if reports.0 != state.is_ok() {
                    *reports = (state.is_ok(), reports.1 + 1);
                }
            }),
        };
        drain.spawn(Span::none(), publisher.run(drain.clone()));
        Self { ip, registry, attempts, reports }
    }
}

struct Cloud {
    etcd: Arc<Etcd>,
    servers: Vec<PublishingServer>,
    /// Index of each node's server.
    nodes: Vec<(NodeName, usize)>,
    links: u64,
    since: Instant,
}

impl Cloud {
    fn connect(&mut self, node: usize, server: usize) {
        let (name, at) = &mut self.nodes[node];
        *at = server;
        self.links += 1;
        let link = Link::new(LinkId(self.links), Remote::Edge(name.clone()), None);
        let from = (self.servers[server].ip, 1).into();
        let linked = LinkedNode { link, from };
        self.servers[server].registry.insert(linked, false);
    }

    fn disconnect(&self, node: usize) {
        let (name, server) = &self.nodes[node];
        let registry = &self.servers[*server].registry;
        registry.remove(&registry.link_of(name).unwrap().link);
    }

    /// Moves these nodes to the next server each, as fast as servers accept them.
    async fn move_on(&mut self, nodes: impl Iterator<Item = usize>) {
        let (started, all) = (Instant::now(), u32::try_from(self.servers.len()).unwrap());
        for (n, node) in (0..).zip(nodes) {
            self.disconnect(node);
            self.connect(node, (self.nodes[node].1 + 1) % self.servers.len());
            sleep_until(started + HANDSHAKE * n / all).await;
        }
    }

    /// Waits until each node has its record and no other.
    async fn right(&self) {
        let started = Instant::now();
        while self.etcd.len() != self.nodes.len() || !self.is_right() {
            sleep(Duration::from_millis(100)).await;
            assert!(started.elapsed() < Duration::from_secs(7200), "{} records", self.etcd.len());
        }
    }

    fn is_right(&self) -> bool {
        let records = self.etcd.records();
        self.nodes.iter().all(|(name, server)| match records.get(name.as_str()).map(Vec::as_slice) {
            Some([only]) => only.contains(&format!("\"{}\"", self.servers[*server].ip)),
            _ => false,
        })
    }

    /// Reports the cost since the last call. Returns the maximum number of attempts and of reported changes per server.
    fn report(&mut self, what: &str) -> (Rate, u64) {
        let took = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        let etcd_counts = self.etcd.take();
        let attempts =
            self.servers.iter().map(|server| std::mem::take(&mut *server.attempts.lock().unwrap()));
        let attempts = attempts.fold(Rate::default(), Rate::with);
        let reports = self
            .servers
            .iter()
            .map(|server| std::mem::take(&mut server.reports.lock().unwrap().1))
            .max()
            .unwrap();
        println!(
            "| {what} | {:.1} s | {} / {} | {} | {} / {} | {} | {} MB |",
            took.as_secs_f64(),
            attempts.peak,
            attempts.all,
            reports,
            etcd_counts.writes.peak,
            etcd_counts.writes.all,
            etcd_counts.failed_moves,
            memory() >> 20,
        );
        (attempts, reports)
    }
}

async fn live(servers: usize, each: usize) {
    let (etcd, drain) = (Etcd::start(), Drain::new());
    let started = (0..u32::try_from(servers).unwrap())
        .map(|number| PublishingServer::start(number, &etcd, &drain))
        .collect();
    let names = (0..servers * each).map(|n| (format!("node-{n:07}").parse().unwrap(), n % servers));
    let nodes = names.collect();
    let mut cloud = Cloud { etcd, servers: started, nodes, links: 0, since: Instant::now() };
    println!("{servers} servers, {each} edges each");
    println!("| what | time | connections | lines | writes at etcd | failed | memory |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    // First one by one, which does not measure etcd's throughput; then all others together.
    let (few, all) = (servers * each.min(4), servers * each);
    for node in 0..few {
        cloud.connect(node, node % servers);
        if node % servers == servers - 1 {
            sleep(Duration::from_secs(1)).await;
        }
    }
    cloud.report("four of each, one by one");
    for node in few..all {
        cloud.connect(node, node % servers);
    }
    cloud.right().await;
    cloud.report("all start");
    cloud.etcd.goes(true);
    for minute in 0..10 {
        sleep(Duration::from_secs(60)).await;
        cloud.move_on((minute..servers * each).step_by(100)).await;
    }
    let (attempts, reports) = cloud.report("10 min without etcd");
    assert!(attempts.all <= 200 && attempts.peak <= 3 && reports <= 1, "{attempts:?}, {reports} reports");
    cloud.etcd.goes(false);
    cloud.right().await;
    cloud.report("it is back");
    sleep(Duration::from_secs(60)).await;
    cloud.report("60 s of rest");
    cloud.move_on((0..servers * each).step_by(5)).await;
    cloud.right().await;
    cloud.report("a fifth comes back");
    drain.finish(Duration::from_secs(5), std::future::pending()).await;
}
