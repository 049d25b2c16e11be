//! The nodes of all servers, listed for operators. Peers are asked only while somebody waits for the list.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout};

use crate::registry::peers::{PeerHandle, Peers};
use tunnel_link::link::Link;
use tunnel_proto::frame::{FrameKind, ListNodes, ListedNode, MAX_PAGE_NODES, NodePage};
use tunnel_proto::names::NodeName;

/// The nodes of one peer.
#[derive(Debug, Clone)]
pub struct PeerNodes {
    /// The peer.
    pub server: PeerHandle,
    /// Its nodes in the order of their names; the first ones if `end` is not [`NodeListEnd::Complete`].
    pub nodes: Vec<ListedNode>,
    /// Whether these are all of its nodes.
    pub end: NodeListEnd,
}

/// Why a list of nodes ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeListEnd {
    /// It has all nodes.
    Complete,
    /// The peer has more nodes than its share of the list.
    Truncated,
    /// The peer did not answer. A version without the request never does.
    Silent,
    /// There is no link to the peer.
    NotLinked(String),
}

impl Peers {
    /// Returns the nodes of every peer, at most [`MAX_LISTED`] in total with equal shares. Takes at most 21 s. Only one
    /// list at a time is made. All callers that wait for it share the next one, so none delays the others by many
    /// requests. Cancel safe.
    pub async fn list_nodes(&self) -> Arc<[PeerNodes]> {
        let called = Instant::now();
        let waiter = self.listing_waiters.clone();
        let mut last = self.listing.lock().await;
        drop(waiter);
        let known = last.take().filter(|last| last.began >= called);
        let list = match known {
            Some(known) => known,
            None => {
                let began = Instant::now();
                let peers = self.all();
                let share = MAX_LISTED / peers.len().max(1);
                let nodes = join_all(peers.into_iter().map(|server| self.list_nodes_of(server, share))).await;
                CachedPeerNodes { began, nodes: nodes.into() }
            }
        };
        let nodes = list.nodes.clone();
        *last = Some(list).filter(|_| Arc::strong_count(&self.listing_waiters) > 1);
        nodes
    }

    async fn list_nodes_of(&self, server: PeerHandle, share: usize) -> PeerNodes {
        let link = match server.link().await {
            Ok(link) => link,
            Err(why) => {
                let end = NodeListEnd::NotLinked(why.to_string());
                return PeerNodes { server, nodes: Vec::new(), end };
            }
        };
        let mut nodes = Vec::new();
        let end = timeout(LIST_TIMEOUT, self.list_pages(&link, share, &mut nodes)).await;
        PeerNodes { server, nodes, end: end.unwrap_or(NodeListEnd::Silent) }
    }

    async fn list_pages(&self, link: &Link, share: usize, nodes: &mut Vec<ListedNode>) -> NodeListEnd {
        let mut after: Option<NodeName> = None;
        loop {
            let request = |question| {
                let list = ListNodes { question, after: after.take() };
                link.signal(&NodeName::none(), FrameKind::ListNodes(list))
            };
            let Some(page) = self.pages.ask(link, PAGE_TIMEOUT, request).await else {
                return NodeListEnd::Silent;
            };
            after = page.nodes.last().map(|last| last.node.clone());
            let room = share.saturating_sub(nodes.len());
            // A peer that announces more after an empty page would keep us asking.
            let more = page.more && after.is_some();
            let is_full = page.nodes.len() > room || (more && page.nodes.len() == room);
            nodes.extend(page.nodes.into_iter().take(room));
            match (is_full, more) {
                (true, _) => return NodeListEnd::Truncated,
                (false, true) => {}
                (false, false) => return NodeListEnd::Complete,
            }
        }
    }

    /// Answers a peer's request for a page of the nodes that are linked here.
    pub fn handle_list_nodes(&self, from: &Link, request: &ListNodes) {
        let (nodes, more) = self.dial_context.registry.page(request.after.as_ref(), MAX_PAGE_NODES);
        // Without room the peer's request times out.
        let _ = from.node_page(NodePage { question: request.question, nodes, more });
    }

    /// Delivers a page. A page that was not requested over that link is dropped.
    pub fn handle_node_page(&self, from: &Link, page: NodePage) {
        self.pages.answer(page.question, from, page);
    }
}

/// The last list of all nodes.
#[derive(Debug)]
pub(crate) struct CachedPeerNodes {
    began: Instant,
    nodes: Arc<[PeerNodes]>,
}

/// Maximum number of nodes of all peers in a list.
pub const MAX_LISTED: usize = 100_000;
/// Maximum time for a page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for all pages of a peer. Commands wait 30 s for the first byte of the list.
pub(crate) const LIST_TIMEOUT: Duration = Duration::from_secs(20);
