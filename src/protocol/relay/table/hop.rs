//! One side of a session that passes through.

use std::sync::Arc;

use crate::protocol::link::sender::Outbox;
use crate::protocol::relay::queue::{Full, Lane};
use crate::protocol::wire::frame::SessionFrame;

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
pub(super) struct Hop {
    pub(super) link: Arc<Outbox>,
    pub(super) lane: Arc<Lane>,
}

impl Hop {
    pub(super) fn push(&self, word: SessionFrame) -> Result<(), Full> {
        let wish = self.lane.push(word)?;
        self.link.enter_lane(&self.lane, &wish);
        Ok(())
    }

    pub(super) fn cut(&self, word: SessionFrame) {
        let wish = self.lane.cut(word);
        self.link.enter_lane(&self.lane, &wish);
    }

    pub(super) fn close(&self) {
        self.lane.close();
        self.link.leave_lane(&self.lane);
    }
}
