//! What a link sends in addition to its sessions' frames: signals, last frames, and replies about unknown sessions.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use crate::link::Link;
use crate::lock::Mutex;
use crate::schedule::frame_source::{
    FrameSource, QueueMembership, QueueRequest, QueuedSource, Turn, TurnOutput,
};
use tunnel_proto::frame::{
    Conflict, ErrorCode, Frame, FrameKind, NodePage, Opener, SessionCategory, SessionError, SessionFrame,
    SessionKey,
};
use tunnel_proto::names::{Instance, NodeName, SessionId, UserDevice};
use tunnel_proto::state::LinkId;

/// Number of entries that wait on a link from which it drops replies.
const MAX_WAITING: usize = 20_000;

/// A reply that waits for its turn.
#[derive(Debug)]
struct Reply {
    session: SessionKey,
    client: Arc<str>,
    frame: Mutex<Option<SessionFrame>>,
}

impl FrameSource for Reply {
    fn key(&self) -> &SessionKey {
        &self.session
    }

    fn client(&self) -> &Arc<str> {
        &self.client
    }

    fn is_stale(&self, _stay: u64) -> bool {
        false
    }

    fn next_frame(self: Arc<Self>, _link: LinkId, turn: &mut Turn, _now: Instant) -> TurnOutput {
        QueueMembership::default().on_control(turn, self.frame.lock().take())
    }
}

impl Link {
    /// Replies to a client's frame about a session without an end here, at the client's cost. Excess replies are dropped: of
    /// a client that does not read them, and of a peer that names too many clients.
    pub(crate) fn reply_to(&self, client: &Arc<str>, session: &SessionKey, frame: SessionFrame) {
        if self.drops_replies(client) {
            return;
        }
        let reply =
            Reply { session: session.clone(), client: client.clone(), frame: Mutex::new(Some(frame)) };
        let entry = QueuedSource { source: Arc::new(reply), stay: 0 };
        let request = QueueRequest { answer: true, ..QueueRequest::default() };
        let _stale = self.with_state(|state| state.queue.handle_request(entry, &request));
    }

    /// Returns true if too much waits on the link for another reply to this client.
    pub(crate) fn drops_replies(&self, client: &str) -> bool {
        self.is_answer_queue_full(client) || self.waiting() >= MAX_WAITING
    }

    /// Sends a frame about a session without an end here. Excess ones are dropped.
    pub fn reply(&self, session: &SessionKey, frame: SessionFrame) {
        let frame = self.frame(session, frame);
        self.with_state(|state| state.queue.push_reply(frame));
    }

    /// Tells a peer that a session has lost its rights: it must not resume there.
    pub fn send_ended(&self, id: SessionId, why: &str) {
        let key = SessionKey { id, category: SessionCategory::Ssh, node: NodeName::none() };
        let refusal = SessionError::new(ErrorCode::NotAllowed, why);
        self.reply(&key, SessionFrame::Reset { epoch: 0, refusal });
    }

    /// Tells an edge that this device may not resume a session that waits there.
    pub fn send_revoked(&self, session: &SessionKey, device: UserDevice, why: &str) {
        let refusal = SessionError::new(ErrorCode::NotAllowed, why);
        self.reply(session, SessionFrame::Revoked { opener: Some(Opener::User(device)), refusal });
    }

    /// Sends PathLost for a session after everything it has sent here, because its opener leaves this path.
    ///
    /// It is never refused, because the remote would wait for it; there is at most one for each session.
    pub(crate) fn send_path_lost(&self, session: &SessionKey, epoch: u64) {
        let frame = self.frame(session, SessionFrame::PathLost { epoch });
        self.with_state(|state| state.queue.push_last(frame));
    }

    /// Sends a frame about `node`, but no session. Returns false if too much waits to be sent, or if the remote takes no
    /// signals.
    pub fn signal(&self, node: &NodeName, body: FrameKind) -> bool {
        let frame = Frame { node: node.clone(), body };
        self.abilities.signals && self.with_state(|state| state.queue.push_reply(frame))
    }

    /// Sends a Drain frame: a server that stops requests that its edge links to another server, or an edge confirms that
    /// it has. Does nothing if too much waits to be sent, or if the remote takes no signals.
    pub fn drain(&self) {
        let sent = self.peer.frame_node().is_some_and(|node| self.signal(node, FrameKind::Drain(None)));
        self.drained.fetch_or(sent, Relaxed);
    }

    /// Sends a Drain frame with the address of a server that has fewer nodes. The edge stays if it reaches no other
    /// server.
    ///
    /// Returns false like [`Self::signal`].
    pub fn request_move(&self, to: SocketAddr) -> bool {
        let sent = self.peer.frame_node().is_some_and(|node| self.signal(node, FrameKind::Drain(Some(to))));
        if sent {
            self.note_move_request();
        }
        sent
    }

    /// Returns true if [`Self::drain`] was sent on this link.
    pub fn is_drained(&self) -> bool {
        self.drained.load(Relaxed)
    }

    /// Sends a peer a page of the nodes that are connected here. Returns false if an earlier page still waits to be
    /// sent, because a peer requests the next page only after it.
    pub fn node_page(&self, page: NodePage) -> bool {
        let is_page = |frame: &Frame| matches!(frame.body, FrameKind::NodePage(_));
        if self.lock().queue.waiting.replies.iter().any(is_page) {
            return false;
        }
        self.signal(&NodeName::none(), FrameKind::NodePage(page))
    }

    /// Sends an edge or a peer a Conflict frame: among the processes of that name, `keeps` keeps it.
    pub fn conflict(&self, node: &NodeName, keeps: Option<Instance>, why: impl fmt::Display) {
        let reason = SessionError::new(ErrorCode::Overloaded, why).reason;
        self.signal(node, FrameKind::Conflict(Conflict { instance: keeps, reason }));
    }

    /// Closes the link of an edge because another process keeps its name, and sends the edge the reason.
    pub fn close_name_taken(&self, why: String) {
        // The first reason is as good.
        let _ = self.dismissed.set(why);
        self.close();
    }
}
