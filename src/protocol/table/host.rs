//! What each session asks of the table that keeps it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use crate::names::{Instance, SessionId};
use crate::protocol::budget::Share;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::session::host::SessionHost;
use crate::protocol::table::SessionTable;
use crate::protocol::wire::frame::Code;

impl SessionHost for SessionTable {
    fn instance(&self) -> Instance {
        self.instance
    }

    fn room_unread(&self, link: &LinkSender) -> (Share, Share) {
        (self.unpromised.share(), link.room_unread(self.unpromised.limit() / 4))
    }

    fn departed(&self, id: SessionId) {
        self.add_departed(id);
    }

    fn forget(&self, id: SessionId, why: Option<Code>) {
        if self.shard(id).remove(&id).is_some() {
            if let Some(code) = why {
                self.metrics.resets.count(code.name());
            }
            self.count.fetch_sub(1, Relaxed);
            self.freed.store(true, Relaxed);
            self.add_ended(id, why);
        }
    }
}

impl SessionTable {
    /// This table, as its sessions know it.
    pub(super) fn host(self: &Arc<Self>) -> Weak<dyn SessionHost> {
        let table: Weak<Self> = Arc::downgrade(self);
        table
    }
}
