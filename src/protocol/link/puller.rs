//! The pull side of a link: what its gRPC stream sends next, encoded in its dialect.

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use tokio::time::Instant;

use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::trace;
use crate::protocol::lock;
use crate::protocol::table::SessionTable;
use crate::protocol::wire::codec::{Chunk, StreamMsg, encode};
use crate::protocol::wire::extension::to_message;
use crate::protocol::wire::frame::{Frame, SessionKey};
use crate::protocol::wire::plain::Plain;

/// How frames become messages on one link.
#[derive(Debug, Clone)]
pub(crate) enum Encoding {
    /// With the extended dialect's messages.
    Extended,
    /// With SuperEdge's messages, through the end that stands for the peer.
    Plain(Arc<Mutex<Plain>>),
}

/// The pull side: what the gRPC stream sends next.
#[derive(Debug, Clone)]
pub(crate) struct Puller {
    pub(crate) sender: Arc<LinkSender>,
    pub(crate) table: Arc<SessionTable>,
    pub(crate) dialect: Encoding,
}

impl Puller {
    /// The next message to send; none once the link is closed.
    pub(crate) fn poll_message(&self, cx: &mut Context<'_>) -> Poll<Option<Chunk>> {
        let Encoding::Plain(plain) = &self.dialect else {
            return self
                .poll_frame(cx, Instant::now())
                .map(|frame| frame.map(|frame| self.counted(to_message(frame))));
        };
        loop {
            let now = Instant::now();
            let pulled = match self.poll_frame(cx, now) {
                Poll::Ready(Some(frame)) => {
                    self.encode(plain, frame, now);
                    Poll::Ready(())
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            };
            // Looked at last: from here on, every message that is added wakes us.
            if let Some(message) = lock(plain).next_message() {
                return Poll::Ready(Some(self.counted(message)));
            }
            std::task::ready!(pulled);
        }
    }

    fn poll_frame(&self, cx: &mut Context<'_>, now: Instant) -> Poll<Option<Frame>> {
        let pulled = self.sender.poll_pull(cx, now);
        if let Poll::Ready(Some(frame)) = &pulled {
            trace::log("frame sent", self.sender.id, frame);
        }
        pulled
    }

    fn counted(&self, message: StreamMsg) -> Chunk {
        self.sender.count_sent(message.data.len());
        encode(message)
    }

    fn encode(&self, plain: &Mutex<Plain>, frame: Frame, now: Instant) {
        let decoded = lock(plain).send_frame(frame, now);
        let Some((decoded, node)) = decoded.zip(self.sender.peer.node()) else { return };
        for word in decoded.frames {
            // What comes back to a session from its own frames never concerns the wiring.
            let key = SessionKey { id: decoded.id, category: decoded.category, node: node.clone() };
            let _ = self.table.on_frame(&self.sender, key, word, now);
        }
    }
}
