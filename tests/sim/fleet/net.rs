//! The network of the fleet: links between servers as queues of frames, and a DNS with the records of the servers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep};
use tracing::Span;
use tunnel::paths::node_not_found::PeerError;
use tunnel::registry::peers::peer_dialer::PeerDialer;
use tunnel_link::link::Link;
use tunnel_net::resolver::{DnsLookupError, Lookup};
use tunnel_proto::frame::Remote;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

use super::figures::Figures;
use super::server::{PODS, SimServer, ZONE};

/// The state shared by all servers.
#[derive(Debug, Default)]
pub(crate) struct Net {
    servers: Mutex<BTreeMap<SocketAddr, Arc<SimServer>>>,
    stopping: Mutex<BTreeSet<SocketAddr>>,
    records: Mutex<HashMap<NodeName, Vec<IpAddr>>>,
    /// Whether DNS does not answer.
    pub(crate) dns_is_away: AtomicBool,
    numbers: AtomicU64,
    seed: u64,
}

impl Net {
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self { seed, ..Self::default() })
    }

    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Relaxed)
    }

    /// Returns the id of a new process; the same in each run of the seed.
    pub(crate) fn instance(&self) -> Instance {
        let mixed = |n: u64| (self.seed ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
        let number = self.number();
        Instance::from_bits(u128::from(mixed(number)) << 64 | u128::from(mixed(!number)))
    }

    pub(crate) fn add(&self, server: &Arc<SimServer>) {
        self.lock().insert(server.at, server.clone());
    }

    /// Removes a server. Its links are closed at once, like those of a killed process.
    pub(crate) fn remove(&self, server: &SimServer) {
        self.lock().remove(&server.at);
        server.finder.peers().into_iter().flat_map(|peers| peers.links()).for_each(|link| link.close());
        server.drain.start();
    }

    /// Hides a server that is stopping: no edge connects to it, and it is not listed.
    pub(crate) fn hide(&self, server: &SimServer) {
        self.stopping.lock().unwrap().insert(server.at);
    }

    /// Returns the servers that accept edges.
    pub(crate) fn servers(&self) -> Vec<Arc<SimServer>> {
        let stopping = self.stopping.lock().unwrap();
        self.lock().values().filter(|server| !stopping.contains(&server.at)).cloned().collect()
    }

    pub(crate) fn publish(&self, node: &NodeName, at: IpAddr) {
        self.records.lock().unwrap().entry(node.clone()).or_default().push(at);
    }

    pub(crate) fn withdraw(&self, node: &NodeName, at: IpAddr) {
        if let Some(all) = self.records.lock().unwrap().get_mut(node) {
            all.retain(|listed| *listed != at);
        }
    }

    pub(crate) fn names(self: &Arc<Self>, figures: &Arc<Figures>) -> Arc<dyn Lookup> {
        Arc::new(Names { net: self.clone(), figures: figures.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Arc<SimServer>>> {
        self.servers.lock().unwrap()
    }
}

/// The DNS client of one server.
#[derive(Debug)]
struct Names {
    net: Arc<Net>,
    figures: Arc<Figures>,
}

impl Lookup for Names {
    fn addresses<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, DnsLookupError>> {
        async move {
            self.figures.looks_up();
            if self.net.dns_is_away.load(Relaxed) {
                sleep(Duration::from_secs(5)).await;
                let patience = Duration::from_secs(5);
                return Err(DnsLookupError::Timeout { name: name.to_owned(), timeout: patience });
            }
            sleep(LATENCY).await;
            if name == PODS {
                return Ok(self.net.servers().iter().map(|server| server.ip()).collect());
            }
            let node = name.trim_end_matches('.').strip_suffix(ZONE).unwrap().trim_end_matches('.');
            let records = self.net.records.lock().unwrap();
            let found = records.get(&node.parse::<NodeName>().unwrap()).cloned().unwrap_or_default();
            if found.is_empty() { Err(DnsLookupError::NotFound(name.to_owned())) } else { Ok(found) }
        }
        .boxed()
    }
}

/// The connections of one server to its peers.
#[derive(Debug)]
pub(crate) struct Wires {
    net: Arc<Net>,
    from: SocketAddr,
    own: Instance,
}

impl Wires {
    pub(crate) fn new(net: &Arc<Net>, from: SocketAddr, own: Instance) -> Self {
        Self { net: net.clone(), from, own }
    }
}

impl PeerDialer for Wires {
    fn dial(&self, at: SocketAddr, is_backup: bool) -> BoxFuture<'_, Result<Arc<Link>, PeerError>> {
        async move {
            // Time for a connection, TLS and the call.
            sleep(3 * LATENCY).await;
            if at == self.from {
                return Err(PeerError::SelfDial(at));
            }
            let servers = [self.from, at].map(|at| self.net.lock().get(&at).cloned());
            let [Some(near), Some(far)] = servers else {
                return Err(PeerError::NoLink { at, cause: "refused".to_owned() });
            };
            if near.cut_off.load(Relaxed) || far.cut_off.load(Relaxed) {
                sleep(Duration::from_secs(1)).await;
                return Err(PeerError::NoLink { at, cause: "no answer".to_owned() });
            }
            let end = |instance| Link::new(LinkId(self.net.number()), Remote::Peer, Some(instance));
            let (there, back) = (end(far.own), end(self.own));
            far.peers.add_incoming(&back, is_backup);
            near.drain.spawn(Span::none(), carry([near.clone(), far.clone()], [there.clone(), back.clone()]));
            far.drain.clone().spawn(Span::none(), carry([far, near], [back, there.clone()]));
            Ok(there)
        }
        .boxed()
    }
}

/// Transfers frames from one end of a link to the other, until one of them is closed.
async fn carry([near, far]: [Arc<SimServer>; 2], [end, other]: [Arc<Link>; 2]) {
    loop {
        let mut frames = Vec::new();
        near.figures.waits(end.waiting());
        let over = poll_fn(|cx| {
            loop {
                match end.poll_pull(cx, Instant::now()) {
                    Poll::Ready(Some(frame)) if frames.len() < AT_ONCE => frames.push(frame),
                    Poll::Ready(Some(frame)) => {
                        frames.push(frame);
                        return Poll::Ready(false);
                    }
                    Poll::Ready(None) => return Poll::Ready(true),
                    Poll::Pending if frames.is_empty() => return Poll::Pending,
                    Poll::Pending => return Poll::Ready(false),
                }
            }
        })
        .await;
        if over {
            other.close();
            near.peers.remove(&end);
            return;
        }
        frames.iter().for_each(|_| near.figures.count_sent());
        sleep(LATENCY).await;
        if !near.cut_off.load(Relaxed) && !far.cut_off.load(Relaxed) {
            frames.into_iter().for_each(|frame| far.handle_frame(&other, frame));
        }
    }
}

/// Latency between two servers in one direction.
const LATENCY: Duration = Duration::from_millis(1);
/// Frames per batch; with the latency, this limits the rate of a link.
const AT_ONCE: usize = 255;
