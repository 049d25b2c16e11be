//! What the link itself sends, beside its sessions: signals, last frames, and answers about sessions that are not ours.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use crate::names::{Instance, NodeName};
use crate::protocol::link::sender::{LinkSender, MOST_REPLIES};
use crate::protocol::wire::frame::{
    Code, Conflict, Found, Frame, FrameKind, Load, Refusal, SessionFrame, SessionKey,
};
use crate::protocol::wire::hello::Dialect;

impl LinkSender {
    /// Answers a frame about a session that is not ours; more than the bound are dropped, as the peer asks again.
    pub(crate) fn reply(&self, session: &SessionKey, frame: SessionFrame) {
        let mut waiting = self.lock();
        if waiting.replies.len() < MOST_REPLIES {
            waiting.replies.push_back(self.frame(session, frame));
            waiting.wake();
        }
    }

    /// Sends Lost for a session whose opener leaves this path, behind all that the session has sent here. Never
    /// refused: the far end would wait otherwise, and there is at most one for each session.
    pub(crate) fn lost(&self, session: &SessionKey, epoch: u64) {
        let mut waiting = self.lock();
        if !waiting.closed {
            waiting.replies.push_back(self.frame(session, SessionFrame::Lost { epoch }));
            waiting.wake();
        }
    }

    /// Asks a pod whether `node` is linked to it. False if too much waits to be sent.
    pub fn find(&self, node: &NodeName, question: u64) -> bool {
        self.signal(node, FrameKind::Find(question))
    }

    /// Sends a pod a Found about `node`. False if too much waits to be sent.
    pub fn found(&self, node: &NodeName, found: Found) -> bool {
        self.signal(node, FrameKind::Found(found))
    }

    /// A pod asks its edge to link to another pod, rather to the one at that address; an edge confirms that it has.
    /// False if too much waits to be sent, or the peer knows no Drain.
    pub fn drain(&self, to: Option<SocketAddr>) -> bool {
        let said = self.peer.node().is_some_and(|node| self.signal(node, FrameKind::Drain(to)));
        self.drained.fetch_or(said, Relaxed);
        said
    }

    /// Whether [`Self::drain`] was said on this link.
    pub fn is_drained(&self) -> bool {
        self.drained.load(Relaxed)
    }

    /// Tells another pod how many nodes are linked here. Says nothing to a peer of version 1, which does not know it.
    pub fn load(&self, load: Load) {
        if self.dialect.has(Dialect::LOADS) {
            self.signal(&NodeName::none(), FrameKind::Load(load));
        }
    }

    /// Sends an edge, or another pod, a Conflict: of two processes of that name, `keeps` keeps it. Sends nothing to a
    /// peer of version 1, which does not know the frame.
    pub fn conflict(&self, node: &NodeName, keeps: Option<Instance>, why: impl fmt::Display) {
        if self.dialect.has(Dialect::CONFLICTS) {
            let reason = Refusal::new(Code::Busy, why).reason;
            self.signal(node, FrameKind::Conflict(Conflict { instance: keeps, reason }));
        }
    }

    /// Closes the link of an edge whose name another process keeps, and sends it the cause.
    pub fn dismiss(&self, why: String) {
        // The first reason is as good.
        let _ = self.dismissed.set(why);
        self.close();
    }

    /// Why it was closed, if [`Self::dismiss`] did it.
    pub(crate) fn dismissed(&self) -> Option<&String> {
        self.dismissed.get()
    }

    /// Makes the puller look again, for what a dialect has to send by itself.
    pub(crate) fn rouse(&self) {
        self.lock().wake();
    }

    fn signal(&self, node: &NodeName, body: FrameKind) -> bool {
        let mut waiting = self.lock();
        let room = waiting.replies.len() < MOST_REPLIES && !waiting.closed && self.resumes;
        if room {
            waiting.replies.push_back(Frame { node: node.clone(), body });
            waiting.wake();
        }
        room
    }

    /// A frame about a session: on an edge's link only Open and Resume have another node than the link's.
    pub(crate) fn frame(&self, session: &SessionKey, frame: SessionFrame) -> Frame {
        let asks = matches!(frame, SessionFrame::Open { .. } | SessionFrame::Resume { .. });
        let node = self.peer.node().filter(|_| !asks).unwrap_or(&session.node).clone();
        Frame { node, body: FrameKind::Session(session.id, session.category, frame) }
    }
}

/// The reply to a session that we do not know.
pub(crate) fn unknown(epoch: u64) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: Refusal::new(Code::Unknown, UNKNOWN) }
}

/// Why a session cannot be taken up.
pub(crate) const UNKNOWN: &str = "this process does not know the session";
