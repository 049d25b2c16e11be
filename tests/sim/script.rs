//! Short scripts: one process, links to remotes that the script plays, and single frames in a fixed order.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Instance, NodeName, SessionId};
use tunnel_link::sender::LinkSender;
use tunnel_link::table::stream::Session;
use tunnel_link::table::{Event, SessionLimits, SessionTable};
use tunnel_proto::frame::{Category, ErrorCode, FrameKind, Remote, SessionError, SessionFrame, SessionKey};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::hello::Dialect;
use tunnel_proto::state::LinkId;

/// A process with some limits.
struct Script {
    table: Arc<SessionTable>,
    metrics: Metrics,
}

impl Script {
    fn new(sessions: usize) -> Self {
        let windows = WindowLimits { start: 64 << 10, max: 64 << 10 };
        let limits = SessionLimits { windows, memory: 64 << 20, sessions, grace: GRACE };
        let metrics = Metrics::server("", "");
        Self { table: SessionTable::new(Instance::from_bits(1), limits, metrics.clone()), metrics }
    }

    /// Opens a session to `node1` over that link, whose remote accepts it.
    fn opens(&self, link: &Arc<LinkSender>) -> Session {
        let target = "node1:22".parse().unwrap();
        let opening = self.table.open(node(), target, Category::Ssh, "ann".into(), "connect").unwrap();
        opening.ask(link, None);
        self.hears(link, opening.id(), SessionFrame::Opened { limit: 1 << 40, epoch: 1, instance: None });
        opening.into_session()
    }

    /// Handles a frame of a session that arrives over that link.
    fn hears(&self, link: &Arc<LinkSender>, id: SessionId, frame: SessionFrame) -> Option<Event> {
        let key = SessionKey { id, category: Category::Ssh, node: node() };
        self.table.on_frame(link, key, frame, Instant::now())
    }

    fn ends(&self, link: &LinkSender) {
        let why = SessionError::new(ErrorCode::Cancelled, "the link has closed");
        let _ = self.table.link_ended(link, &why, Instant::now());
    }
}

fn node() -> NodeName {
    "node1".parse().unwrap()
}

/// Returns a link to the edge of that node.
fn link(number: u64) -> Arc<LinkSender> {
    LinkSender::new(LinkId(number), Remote::Edge(node()), None, Dialect::NEWEST)
}

/// Takes everything that a link sends about sessions.
fn sent(link: &LinkSender) -> Vec<SessionFrame> {
    let mut cx = Context::from_waker(Waker::noop());
    let mut sent = Vec::new();
    while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
        if let FrameKind::Session(_, _, frame) = frame.body {
            sent.push(frame);
        }
    }
    sent
}

/// The resume timeout.
const GRACE: Duration = Duration::from_secs(60);

/// The link's task ends before it has handled the event.
#[tokio::test]
async fn a_session_without_a_path_is_searched_for_even_if_its_event_is_dropped() {
    let (script, link) = (Script::new(10), link(1));
    let session = script.opens(&link);
    drop(script.hears(&link, session.id(), SessionFrame::PathLost { epoch: 1 }));
    script.ends(&link);
    let parked = script.table.next_parked().now_or_never();
    assert_eq!(parked.map(|parked| parked.id()), Some(session.id()));
}

/// The task that has searched does not notice that the path is lost again, because it has just finished.
#[tokio::test]
async fn a_path_that_is_lost_while_its_search_ends_is_searched_for_again() {
    let (script, links) = (Script::new(10), [link(1), link(2)]);
    let session = script.opens(&links[0]);
    script.hears(&links[0], session.id(), SessionFrame::PathLost { epoch: 1 });
    let parked = script.table.next_parked().now_or_never().unwrap();
    parked.resume(&links[1]);
    let resumed = SessionFrame::Resumed { received: 0, limit: 1 << 40, epoch: 2 };
    script.hears(&links[1], session.id(), resumed);
    script.ends(&links[1]);
    parked.give_up(SessionError::new(ErrorCode::Cancelled, "it did not resume"));
    let parked = script.table.next_parked().now_or_never();
    assert_eq!(parked.map(|parked| parked.id()), Some(session.id()));
    drop(sent(&links[0]));
}
