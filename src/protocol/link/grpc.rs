//! Both ends of the one gRPC call, on hyper's HTTP/2: accept links, dial links.
//!
//! tonic's own transport hides HTTP/2's send buffer and joins messages, and its codec copies each of them twice; so the
//! call is made and served here, with tonic's statuses and the generated messages. See docs/decisions.md#pull-not-push.

mod accept;
mod alarm;
mod body;
mod crew;
mod dial;
mod enrol;
mod read_ahead;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::HeaderValue;

pub use crate::protocol::link::grpc::accept::{Arrival, Call, Certificate, Dismissal, Unaccepted, serve};
pub use crate::protocol::link::grpc::dial::{DialError, dial, dial_pod};
pub use crate::protocol::link::grpc::enrol::{Joining, Petition, PetitionError, Wish, petition};
pub(in crate::protocol) use crate::protocol::link::grpc::read_ahead::ReadAhead;

use crate::drain::Drain;
use crate::names::{Instance, NodeName};
use crate::net::socket::Connection;
use crate::protocol::link::grpc::alarm::Alarm;
use crate::protocol::link::sender::{Ends, LinkSender};
use crate::protocol::link::source::LinkId;
use crate::protocol::link::{Encoding, Puller};
use crate::protocol::table::SessionTable;
use crate::protocol::wire::hello::Dialect;
use crate::protocol::wire::peer::Peer;
use crate::protocol::wire::plain::Plain;
use crate::telemetry::Metrics;

/// What every link of this process shares.
#[derive(Debug, Clone)]
pub struct LinkContext {
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// The numbers.
    pub metrics: Metrics,
    /// Where connection tasks are spawned.
    pub drain: Drain,
    /// The kernel's congestion control for links; `None`: the system's default.
    pub congestion: Option<Arc<str>>,
}

/// The pull side of a new link. Its own pings take the place of HTTP/2's, by `alarm`, if its peer answers them.
fn puller(
    peer: Peer,
    instance: Option<Instance>,
    dialect: Dialect,
    table: &Arc<SessionTable>,
    alarm: &Alarm,
) -> Puller {
    let id = LinkId(NEXT_LINK.fetch_add(1, Relaxed));
    let voice = match dialect {
        Dialect::Plain => {
            let node = peer.node().cloned().unwrap_or_else(NodeName::none);
            Encoding::Plain(Arc::new(Mutex::new(Plain::new(node))))
        }
        Dialect::Extended(_) => {
            alarm.turn_off();
            Encoding::Extended
        }
    };
    let sender = LinkSender::new(id, peer, instance, dialect);
    Puller { sender, table: table.clone(), dialect: voice }
}

/// The addresses of a connection.
fn ends(io: &impl Connection) -> Ends {
    let tcp = io.tcp();
    Ends {
        local: tcp.and_then(|tcp| tcp.local_addr().ok()),
        remote: tcp.and_then(|tcp| tcp.peer_addr().ok()),
        dialled: false,
        version: None,
    }
}

/// Links are numbered through the life of the process.
static NEXT_LINK: AtomicU64 = AtomicU64::new(1);

const PATH: &str = "/proto.Stream/TunnelStreaming";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// A frame of ours, data and header, fits one of HTTP/2's.
const FRAME: u32 = 64 * 1024;
/// What waits below the pull is latency that no turn can mend; this much keeps the socket busy.
const SEND_BUFFER: usize = 64 * 1024;
/// Twice the bandwidth-delay product of 1 Gbit/s at 100 ms is 25 MB: then HTTP/2's own windows never hold a link, and it
/// seldom has to widen them, which is a packet each time. It costs no memory: [`ReadAhead`] bounds what is read.
const WINDOW: u32 = 32 << 20;
/// Metadata of a call, in bytes.
const METADATA: u32 = 16 * 1024;
/// Long enough for a bad line, short enough to notice a dead one.
const PING_TIMEOUT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use bytes::{Buf as _, Bytes};

    use super::*;
    use crate::names::SessionId;
    use crate::protocol::link::pace::LARGEST_FRAME;
    use crate::protocol::wire::codec::encode;
    use crate::protocol::wire::extension::to_message;
    use crate::protocol::wire::frame::{Category, Frame, FrameKind, SessionFrame};

    #[test]
    fn the_longest_data_of_the_longest_name_is_one_frame_of_http_2() {
        let data = SessionFrame::Data(Bytes::from(vec![7; LARGEST_FRAME]));
        let body = FrameKind::Session(SessionId::random(), Category::HttpProxy, data);
        let node = "n".repeat(253).parse().unwrap();
        let len = encode(to_message(Frame { node, body })).remaining();
        assert!(len <= FRAME as usize, "{len}");
    }
}
