//! A server of the fleet: the program's own registry, peers and finder, without sockets and sessions.

use std::future::{pending, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Poll, ready};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::Span;
use tunnel::paths::Path;
use tunnel::paths::PathProvider as _;
use tunnel::registry::Finder;
use tunnel::registry::LinkedNode;
use tunnel::registry::Registry;
use tunnel::registry::dns_search::NodeDnsLookup;
use tunnel::registry::peers::Peers;
use tunnel::registry::peers::addresses::PeerAddressSource;
use tunnel::registry::peers::node_counts::ANNOUNCE_INTERVAL;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::zone::NodeZone;
use tunnel_link::link::Link;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_proto::frame::{Found, Frame, FrameKind, Load, Remote};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

use super::figures::Figures;
use super::net::{Net, Wires};

#[derive(Debug)]
pub(crate) struct SimServer {
    pub(crate) at: SocketAddr,
    pub(crate) own: Instance,
    pub(crate) registry: Arc<Registry>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) finder: Arc<Finder>,
    table: Arc<SessionTable>,
    pub(crate) drain: Drain,
    pub(crate) figures: Arc<Figures>,
    stopping: AtomicBool,
    /// Whether nothing that it sends or is sent arrives.
    pub(crate) cut_off: AtomicBool,
}

impl SimServer {
    /// Starts a server at this address, and adds it to the list of servers.
    pub(crate) fn start(net: &Arc<Net>, at: SocketAddr) -> Arc<Self> {
        let (own, drain, figures) = (net.instance(), Drain::new(), Arc::new(Figures::default()));
        let metrics = Metrics::server("", "");
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits {
            windows,
            memory: 1000,
            sessions: 1,
            resume_timeout: Duration::from_secs(60),
            max_resume_timeout: Duration::ZERO,
        };
        let (table, registry) = (SessionTable::new(own, limits, metrics.clone()), Registry::new(metrics));
        let names = net.names(&figures);
        let service = Some((PODS.to_owned(), at.port()));
        let addresses = watch::Sender::default();
        let listed = addresses.subscribe();
        PeerAddressSource { service, ..PeerAddressSource::default() }.follow(
            names.clone(),
            addresses,
            &drain,
        );
        let wires = Arc::new(Wires::new(net, at, own));
        let peers = Peers::new(listed, registry.clone(), wires, own, drain.clone());
        let zone = Arc::new(NodeZone::new(ZONE.to_owned(), Vec::new(), |_| false));
        let dns = NodeDnsLookup::new(names, zone, watch::Sender::default().subscribe());
        let finder = Finder::without_peers(registry.clone(), own);
        finder.ask(&peers, dns, at.port());
        let [stopping, cut_off] = [false; 2].map(AtomicBool::new);
        let server = Self { at, own, registry, peers, finder, table, drain, figures, stopping, cut_off };
        let server = Arc::new(server);
        net.add(&server);
        server.drain.spawn(Span::none(), server.clone().announce_loads());
        server
    }

    /// Announces the load at intervals, like the program.
    async fn announce_loads(self: Arc<Self>) {
        while !self.drain.is_draining() {
            self.announce_load();
            sleep(ANNOUNCE_INTERVAL).await;
        }
    }

    fn announce_load(&self) {
        let nodes = self.registry.node_count() as u64;
        let stopping = self.stopping.load(Relaxed);
        self.peers.broadcast(&FrameKind::Load(Load { nodes, stopping, problems: String::new() }));
    }

    /// Starts to stop.
    pub(crate) fn stops(&self) {
        self.stopping.store(true, Relaxed);
        self.announce_load();
    }

    /// Connects a node's edge to this server.
    pub(crate) fn links(self: &Arc<Self>, net: &Net, node: &NodeName, process: Instance) {
        let (id, peer) = (LinkId(net.number()), Remote::Edge(node.clone()));
        let link = Link::new(id, peer, Some(process));
        let linked = LinkedNode { link: link.clone(), from: self.at };
        self.registry.insert(linked, false);
        net.publish(node, self.at.ip());
        self.finder.on_linked(node);
        self.make_way(self.own, node, None);
    }

    /// Closes a node's link to this server.
    pub(crate) fn loses(&self, net: &Net, node: &NodeName) {
        if let Some(linked) = self.registry.link_of(node) {
            linked.link.close();
            self.registry.remove(&linked.link);
            self.finder.on_unlinked(node);
            net.withdraw(node, self.at.ip());
        }
    }

    /// Handles a frame of another server, like the driver of a link.
    pub(crate) fn handle_frame(self: &Arc<Self>, from: &Arc<Link>, frame: Frame) {
        self.figures.count_received();
        match frame.body {
            FrameKind::Ping(number) => from.pong(number),
            FrameKind::Pong(Some(number)) => drop(from.handle_pong(number, Instant::now())),
            FrameKind::Find(question) => {
                if let Some(linked) = self.registry.link_of(&frame.node) {
                    linked.link.handle_received(Instant::now());
                }
                self.finder.handle_find(from, &frame.node, question);
            }
            FrameKind::Found(found) => {
                if let Some(at) = self.finder.handle_found(from, &frame.node, found.clone()) {
                    self.make_way(at, &frame.node, Some(found));
                }
            }
            FrameKind::Load(load) => self.peers.handle_load(from, load),
            FrameKind::Conflict(conflict) => self.finder.handle_conflict(&frame.node, conflict),
            _ => {}
        }
    }

    fn make_way(self: &Arc<Self>, at: Instance, node: &NodeName, found: Option<Found>) {
        let (server, node) = (self.clone(), node.clone());
        self.work(async move {
            let contest = async {
                let Some(found) = found else { return };
                tokio::select! {
                    biased;
                    () = server.finder.resolve_conflict(at, &node, found) => {}
                    () = server.edge_answers(&node) => {}
                }
            };
            tokio::join!(server.finder.leave_silent_links(at, &node, &server.table), contest);
        });
    }

    /// Replies to pings for the node's edge, if it is connected here. Never returns.
    async fn edge_answers(&self, node: &NodeName) {
        let Some(linked) = self.registry.link_of(node) else { return pending().await };
        poll_fn(|cx| {
            while let Some(frame) = ready!(linked.link.poll_pull(cx, Instant::now())) {
                if let FrameKind::Ping(Some(number)) = frame.body {
                    linked.link.handle_pong(number, Instant::now());
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs work that usually completes at once; spawns a task only if it does not.
    pub(crate) fn work(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut work = Box::pin(work);
        if (&mut work).now_or_never().is_none() {
            self.drain.spawn(Span::none(), work);
        }
    }

    /// Returns true if a search leads to `there`. A path to another server is invalidated, as sessions do it.
    pub(crate) async fn finds(&self, node: &NodeName, there: &Self) -> bool {
        let leads = |path: &Path| match &path.link.peer {
            Remote::Peer => path.link.instance == Some(there.own),
            _ => self.own == there.own,
        };
        match self.finder.find(node, None, None).await {
            Ok(path) if leads(&path) => true,
            Ok(path) => {
                self.finder.invalidate(node, &path);
                false
            }
            Err(_) => false,
        }
    }

    pub(crate) fn ip(&self) -> IpAddr {
        self.at.ip()
    }
}

/// DNS name of all servers, and the zone of nodes.
pub(crate) const PODS: &str = "pods.test";
pub(crate) const ZONE: &str = "nodes.test";
