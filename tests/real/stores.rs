//! The load that the publishers of many servers put on etcd and CoreDNS: the figures of docs/explanation/scale.md.

use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::Span;
use tunnel::etcd::{EtcdAccess, EtcdClient};
use tunnel::publish::Publisher;
use tunnel::publish::etcd::EtcdRecords;
use tunnel::publish::record_filter::RecordFilter;
use tunnel::registry::LinkedNode;
use tunnel::registry::Registry;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::zone::NodeZone;
use tunnel_link::link::Link;
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::Remote;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

use crate::parts::{cached_program, env_var, free_port};
use crate::process::Running;
use crate::publish::Dns;
use crate::tunnel::TestDir;

/// One server, reduced to its publisher.
struct PublishingServer {
    registry: Arc<Registry>,
    metrics: Metrics,
}

impl PublishingServer {
    fn start(number: u8, etcd: SocketAddr, drain: &Drain) -> Self {
        let metrics = Metrics::server("", "");
        let registry = Registry::new(metrics.clone());
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let members = vec![(false, etcd.to_string().parse().unwrap())];
        let access = EtcdAccess { members, ca: None, identity: None, login: None };
        let members = EtcdClient::of(access, resolver.clone());
        let address = [10, 0, 0, number].into();
        let publisher = Publisher {
            registry: registry.clone(),
            store: Box::new(EtcdRecords::new(members, "/skydns".into(), address)),
            zone: Arc::new(NodeZone::new("nodes.test".into(), Vec::new(), |_| false)),
            vet: RecordFilter::new(resolver, |_| Box::pin(std::future::ready(false)), None),
            metrics: metrics.clone(),
            report: Box::new(|_| {}),
        };
        drain.spawn(Span::none(), publisher.run(drain.clone()));
        Self { registry, metrics }
    }

    fn link(&self, node: usize) {
        let name: NodeName = format!("node-{node:07}").parse().unwrap();
        let link = Link::new(LinkId(node as u64), Remote::Edge(name), Some(Instance::random()));
        self.registry.insert(LinkedNode { link, from: ([127, 0, 0, 1], 1).into() }, false);
    }

    fn lose(&self, node: usize) {
        let name: NodeName = format!("node-{node:07}").parse().unwrap();
        self.registry.remove(&self.registry.link_of(&name).unwrap().link);
    }
}

/// Starts an etcd that syncs to the disk as it does by default.
fn etcd(place: &TestDir, at: SocketAddr, peers: u16) -> Running {
    let (url, peers) = (format!("http://{at}"), format!("http://127.0.0.1:{peers}"));
    let mut command = Command::new(cached_program("etcd-3.6.16/etcd").expect("etcd"));
    command.arg("--data-dir").arg(place.path().join("etcd"));
    command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
    command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    command.args(["--initial-cluster", &format!("default={peers}")]);
    let mut process = Running::start("etcd", place.path(), &mut command);
    process.wait_for_log("ready to serve client requests");
    process
}

/// Waits until this number of records is published, according to the publishers, and returns how long that took.
async fn wait_for_records(servers: &[PublishingServer], records: usize) -> Duration {
    let started = Instant::now();
    while servers
        .iter()
        .map(|server| usize::try_from(server.metrics.dns_records.get()).unwrap())
        .sum::<usize>()
        != records
    {
        assert!(started.elapsed() < Duration::from_secs(600), "the records are not published");
        sleep(Duration::from_millis(20)).await;
    }
    started.elapsed()
}

/// Returns how many queries CoreDNS answers per second, with 64 in flight, for these names in turn.
async fn queries_per_second(dns: u16, names: usize) -> usize {
    let answered = Arc::new(AtomicUsize::new(0));
    let until = Instant::now() + Duration::from_secs(5);
    let asking = (0..64).map(|task| {
        let answered = answered.clone();
        async move {
            let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            socket.connect(("127.0.0.1", dns)).await.unwrap();
            let mut space = [0; 512];
            for n in (task..).step_by(64) {
                socket.send(&question(&format!("node-{:07}", n % names))).await.unwrap();
                let answer = timeout(Duration::from_secs(2), socket.recv(&mut space)).await;
                if Instant::now() >= until {
                    return;
                }
                // No error, and one answer.
                if answer.is_ok() && space[3] & 15 == 0 && space[7] == 1 {
                    answered.fetch_add(1, Relaxed);
                }
            }
        }
    });
    futures_util::future::join_all(asking).await;
    answered.load(Relaxed) / 5
}

/// Returns a DNS query for the address of a node.
fn question(node: &str) -> Vec<u8> {
    let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in [node, "nodes", "test", ""] {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.bytes());
    }
    bytes.extend([0, 1, 0, 1]);
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "not a test: prints the figures of docs/explanation/scale.md"]
async fn measure_limits_of_etcd_and_coredns() {
    let number = |name: &str, default| env_var(name).map_or(default, |value| value.parse().unwrap());
    let (count, each, away) = (number("PODS", 10), number("EDGES", 1000), number("AWAY", 60));
    let place = TestDir::new();
    let (at, peers): (SocketAddr, _) = (([127, 0, 0, 1], free_port()).into(), free_port());
    let mut process = etcd(&place, at, peers);
    let coredns = cached_program("coredns-1.15.0/coredns").expect("CoreDNS");
    let corefile = |cache: &str| {
        format!(
            "nodes.test:{{$PORT}} {{\n bind 127.0.0.1\n {cache}\n etcd {{\n path /skydns\n endpoint http://{at}\n }}\n}}\n"
        )
    };
    let print_row = |row: String| writeln!(std::io::stderr(), "{row}").unwrap();
    let drain = Drain::new();
    let (by_way, way) = way_to(at).await;
    let servers: Vec<_> =
        (0..count).map(|server| PublishingServer::start(server as u8, by_way, &drain)).collect();
    let all = count * each;
    let per_second = |records: usize, took: Duration| records as f64 / took.as_secs_f64();
    (0..all).for_each(|node| servers[node % count].link(node));
    let took = wait_for_records(&servers, all).await;
    print_row(format!(
        "{count} servers publish {all} nodes in {took:.1?}: {:.0} a second",
        per_second(all, took)
    ));
    let dns = Dns::start(&place, &coredns, &corefile(""));
    print_row(format!(
        "CoreDNS answers {} queries a second without a cache",
        queries_per_second(dns.port, all).await
    ));
    drop(dns);
    let dns = Dns::start(&place, &coredns, &corefile("cache 5"));
    print_row(format!("{} of 1,000 names with a cache of 5 s", queries_per_second(dns.port, 1000).await));
    let fifth = (0..all).step_by(5);
    fifth.clone().for_each(|node| servers[node % count].lose(node));
    let removal_time = wait_for_records(&servers, all - fifth.len()).await;
    fifth.clone().for_each(|node| servers[(node + 1) % count].link(node));
    let back = wait_for_records(&servers, all).await;
    print_row(format!("a fifth is removed in {removal_time:.1?} and published elsewhere in {back:.1?}"));
    way.send_replace(false);
    sleep(Duration::from_secs(away as u64)).await;
    assert_eq!(resolving(dns.port, all).await, 0, "the leases have ended");
    way.send_replace(true);
    let started = Instant::now();
    while resolving(dns.port, all).await < SAMPLE {
        assert!(started.elapsed() < Duration::from_secs(600), "the records are not published again");
    }
    let back = started.elapsed();
    print_row(format!("servers did not reach etcd for {away} s; all names resolve {back:.1?} afterwards"));
    let size = std::fs::metadata(place.path().join("etcd/member/snap/db")).unwrap().len();
    print_row(format!("etcd's file has {size} bytes, {} for each node", size / all as u64));
    process.kill();
}

/// Returns how many of a sample of names have addresses.
async fn resolving(dns: u16, names: usize) -> usize {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(("127.0.0.1", dns)).await.unwrap();
    let (mut space, mut found) = ([0; 512], 0);
    for n in 0..SAMPLE {
        socket.send(&question(&format!("node-{:07}", n * (names - 1) / (SAMPLE - 1)))).await.unwrap();
        let answer = timeout(Duration::from_secs(2), socket.recv(&mut space)).await;
        found += usize::from(answer.is_ok() && space[3] & 15 == 0 && space[7] == 1);
    }
    found
}

/// Starts a proxy to an etcd that can be interrupted.
async fn way_to(etcd: SocketAddr) -> (SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (at, (open, is_open)) = (listener.local_addr().unwrap(), watch::channel(true));
    spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut is_open = is_open.clone();
            spawn(async move {
                let carry = async {
                    let mut far = TcpStream::connect(etcd).await.unwrap();
                    let _ = copy_bidirectional(&mut near, &mut far).await;
                };
                tokio::select! {
                    () = carry => {}
                    _ = is_open.wait_for(|open| !open) => {}
                }
            });
        }
    });
    (at, open)
}

/// Runs a task until the test ends.
#[expect(clippy::disallowed_methods, reason = "no code waits for it")]
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(task);
}

/// Number of names that are queried to check whether all resolve.
const SAMPLE: usize = 200;
