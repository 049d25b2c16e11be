//! One side of a session that passes through.

use std::sync::Arc;

use crate::protocol::link::sender::LinkSender;
use crate::protocol::relay::queue::{Full, RelayQueue};
use crate::protocol::wire::frame::SessionFrame;

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
pub(super) struct RelayLeg {
    pub(super) link: Arc<LinkSender>,
    pub(super) lane: Arc<RelayQueue>,
}

impl RelayLeg {
    pub(super) fn push(&self, word: SessionFrame) -> Result<(), Full> {
        let intent = self.lane.push(word)?;
        self.link.enter_lane(&self.lane, &intent);
        Ok(())
    }

    pub(super) fn cut(&self, word: SessionFrame) {
        let intent = self.lane.cut(word);
        self.link.enter_lane(&self.lane, &intent);
    }

    pub(super) fn close(&self) {
        self.lane.close();
        self.link.leave_lane(&self.lane);
    }
}
