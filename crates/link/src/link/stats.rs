//! What is visible of a link from outside: its endpoints and its traffic.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::link::Link;
use tunnel_net::path_mtu::{self, MtuBlackHole};
use tunnel_proto::names::ServerDisplayName;

/// The connection under a link, and the program at its remote end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkEndpoints {
    /// Address of this end.
    pub local: Option<SocketAddr>,
    /// Address of the remote end, or of the proxy if one was dialled through.
    pub remote: Option<SocketAddr>,
    /// Whether this end has dialled.
    pub dialled: bool,
    /// The remote program's own description, at most 40 printable characters.
    pub version: Option<Box<str>>,
    /// Name that the remote announces, if it is a server.
    pub server_name: Option<ServerDisplayName>,
    /// Why the link is inside of a WebSocket; `None` if it is not.
    pub websocket: Option<Box<str>>,
}

/// A snapshot of the messages and bytes that a link has moved since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub sent_messages: u64,
    /// Bytes of data sent.
    pub sent_bytes: u64,
    /// Messages received.
    pub received_messages: u64,
    /// Bytes of data received.
    pub received_bytes: u64,
}

/// Endpoints and counters of a running link.
#[derive(Debug, Default)]
pub(crate) struct LinkStats {
    ends: OnceLock<LinkEndpoints>,
    sent_messages: AtomicU64,
    sent_bytes: AtomicU64,
    received_messages: AtomicU64,
    received_bytes: AtomicU64,
}

impl Link {
    /// Records the link's endpoints; only the first call has an effect.
    pub(crate) fn set_endpoints(&self, ends: LinkEndpoints) {
        let _ = self.stats.ends.set(ends);
    }

    /// Returns the link's endpoints if they are known.
    pub fn ends(&self) -> Option<&LinkEndpoints> {
        self.stats.ends.get()
    }

    /// Returns what is lost on the way to the remote, if the link uses small segments for that reason.
    pub fn packet_loss(&self) -> Option<MtuBlackHole> {
        let ends = self.ends().filter(|ends| ends.dialled)?;
        path_mtu::packet_loss(ends.remote?.ip())
    }

    /// Returns why the link is inside of a WebSocket; `None` if it is not.
    pub fn websocket(&self) -> Option<&str> {
        self.ends()?.websocket.as_deref()
    }

    /// Returns the name of the generation of a plain remote for the status, or *extended*.
    pub fn generation(&self) -> &'static str {
        self.plain.get().map_or("extended", |plain| plain.generation())
    }

    /// Counts a sent message with `bytes` of data.
    pub(crate) fn count_sent(&self, bytes: usize) {
        self.stats.sent_messages.fetch_add(1, Relaxed);
        self.stats.sent_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts a received message with `bytes` of data.
    pub(crate) fn count_received(&self, bytes: usize) {
        self.stats.received_messages.fetch_add(1, Relaxed);
        self.stats.received_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns the traffic so far.
    pub fn traffic(&self) -> Traffic {
        let LinkStats { sent_messages, sent_bytes, received_messages, received_bytes, .. } = &self.stats;
        Traffic {
            sent_messages: sent_messages.load(Relaxed),
            sent_bytes: sent_bytes.load(Relaxed),
            received_messages: received_messages.load(Relaxed),
            received_bytes: received_bytes.load(Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::frame::Remote;
    use tunnel_proto::names::Instance;
    use tunnel_proto::state::LinkId;

    use super::*;

    #[tokio::test]
    async fn a_link_counts_its_messages_and_has_no_rtt_before_the_first_answer() {
        let link = Link::new(LinkId(1), Remote::Peer, Some(Instance::random()));
        assert_eq!((link.measured_round_trip(), link.ends()), (None, None));
        link.count_sent(5);
        link.count_sent(0);
        link.count_received(7);
        let seen = link.traffic();
        assert_eq!((seen.sent_messages, seen.sent_bytes), (2, 5));
        assert_eq!((seen.received_messages, seen.received_bytes), (1, 7));
        let ends = LinkEndpoints { version: Some("0.1.0".into()), ..LinkEndpoints::default() };
        link.set_endpoints(ends.clone());
        link.set_endpoints(LinkEndpoints::default());
        assert_eq!(link.ends(), Some(&ends));
    }
}
