//! One side of a session that passes through.

use std::sync::Arc;

use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::source::RelaySource as _;
use crate::protocol::relay::queue::{QueueFull, RelayQueue};
use crate::protocol::wire::frame::SessionFrame;

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
pub(super) struct RelayLeg {
    pub(super) link: Arc<LinkSender>,
    pub(super) queue: Arc<RelayQueue>,
}

impl RelayLeg {
    pub(super) fn push(&self, frame: SessionFrame) -> Result<(), QueueFull> {
        let intent = self.queue.push(frame)?;
        self.link.enter(&self.queue, &intent);
        Ok(())
    }

    pub(super) fn cut(&self, frame: SessionFrame) {
        let intent = self.queue.cut(frame);
        self.link.enter(&self.queue, &intent);
    }

    pub(super) fn close(&self) {
        self.queue.close();
        self.link.leave_relay(&*self.queue);
    }
}
