//! Both ends of the gRPC call that carries a link, on hyper's HTTP/2: accepting and dialling links.
//!
//! tonic's own transport hides HTTP/2's send buffer and joins messages, and its codec copies each message twice. So the
//! call is made and served here, with tonic's statuses and the generated messages. See docs/decisions.md#pull-not-push.

pub mod accept;
pub(crate) mod call_body;
pub mod dial;
pub mod enrol;
mod executor;
pub mod link_end;
pub mod read_ahead;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::HeaderValue;

use crate::grpc::call_body::OutboundStream;
use crate::link::Link;
use crate::link::stats::LinkEndpoints;
use crate::plain::{PlainRemote, SUPEREDGE};
use crate::table::SessionTable;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::Remote;
use tunnel_proto::names::{Instance, ServerDisplayName};
use tunnel_proto::state::LinkId;

/// What all links of this process share.
#[derive(Debug, Clone)]
pub struct LinkContext {
    /// The session table.
    pub table: Arc<SessionTable>,
    /// Name of this server, announced to each remote that is not refused; `None` at an edge or a user's program.
    pub server_name: Option<ServerDisplayName>,
    /// The metrics.
    pub metrics: Metrics,
    /// Spawns the connection tasks.
    pub drain: Drain,
    /// The kernel's congestion control algorithm for links. `None` means the system's default.
    pub congestion: Option<Arc<str>>,
    /// Time without traffic after which sessions end if the remote does not report ends, as SuperEdge v0.9.
    pub plain_idle_timeout: Duration,
}

impl LinkContext {
    /// Returns the context of a process without a name, with the defaults of links.
    pub fn new(table: Arc<SessionTable>, metrics: Metrics, drain: Drain) -> Self {
        let plain_idle_timeout = PLAIN_IDLE_TIMEOUT;
        Self { table, server_name: None, metrics, drain, congestion: None, plain_idle_timeout }
    }
}

/// Returns why a link to that process must be refused, if it must. A plain remote has no instance.
fn check(instance: Option<Instance>) -> Result<(), &'static str> {
    if instance.is_none() { SUPEREDGE } else { Ok(()) }
}

/// Creates the outbound side of a new link.
fn outbound(peer: Remote, instance: Option<Instance>, link_context: &LinkContext) -> OutboundStream {
    let id = LinkId(NEXT_LINK.fetch_add(1, Relaxed));
    let link = Link::new(id, peer, instance);
    let LinkContext { table, plain_idle_timeout, .. } = link_context;
    let plain = PlainRemote::of(&link, table, *plain_idle_timeout);
    OutboundStream { link, plain }
}

/// Returns the addresses of a connection.
fn ends(io: &impl Connection) -> LinkEndpoints {
    let tcp = io.tcp();
    LinkEndpoints {
        local: tcp.and_then(|tcp| tcp.local_addr().ok()),
        remote: tcp.and_then(|tcp| tcp.peer_addr().ok()),
        dialled: false,
        version: None,
        server_name: None,
        websocket: None,
    }
}

/// Default of [`LinkContext::plain_idle_timeout`].
pub const PLAIN_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The number of the next link; unique within the process.
static NEXT_LINK: AtomicU64 = AtomicU64::new(1);

const PATH: &str = "/proto.Stream/TunnelStreaming";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// Size of an HTTP/2 frame in bytes: one frame of ours, header and data, fits.
const FRAME: u32 = 64 * 1024;
/// Bytes that HTTP/2 buffers for sending. Bytes below the scheduler cannot be reordered, so this only keeps the socket
/// busy.
const SEND_BUFFER: usize = 64 * 1024;
/// HTTP/2's flow-control window in bytes.
///
/// It exceeds 25 MB, twice the bandwidth-delay product of 1 Gbit/s at 100 ms. So HTTP/2 never limits a link, and seldom
/// sends a window update, which costs a packet. It costs no memory:
/// [`ReadAheadBound`](read_ahead::ReadAheadBound) bounds what is read.
const WINDOW: u32 = 32 << 20;
/// Maximum size of a call's metadata in bytes.
const METADATA: u32 = 16 * 1024;

#[cfg(test)]
mod tests {
    use bytes::{Buf as _, Bytes};

    use crate::congestion::MAX_FRAME;
    use tunnel_proto::codec::encode;
    use tunnel_proto::codec::extended::to_message;
    use tunnel_proto::frame::{Frame, FrameKind, SessionCategory, SessionFrame};
    use tunnel_proto::names::SessionId;

    use super::*;

    #[test]
    fn a_build_without_superedge_refuses_links_to_its_programs_alone() {
        assert_eq!(check(Some(Instance::random())), Ok(()));
        assert_eq!(check(None), SUPEREDGE);
    }

    #[test]
    fn the_longest_data_of_the_longest_name_is_one_frame_of_http_2() {
        let data = SessionFrame::Data(Bytes::from(vec![7; MAX_FRAME]));
        let body = FrameKind::Session(SessionId::random(), SessionCategory::HttpProxy, data);
        let node = "n".repeat(253).parse().unwrap();
        let len = encode(to_message(Frame { node, body })).remaining();
        assert!(len <= FRAME as usize, "{len}");
    }
}
