//! What the kernel knows of a link's line, for the pace.

use std::sync::MutexGuard;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfoReader;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::sender::waiting::Waiting;

impl LinkSender {
    /// Has the kernel asked how much may be under way. It never is for a plain link, which is not paced.
    pub(crate) fn reads_tcp_info(&self, reader: Option<TcpInfoReader>) {
        self.lock().tcp_info = reader;
    }

    /// Locks what waits. First the kernel is asked, if someone waits for a turn and what is known is old; no lock is held
    /// meanwhile.
    pub(super) fn lock_informed(&self, now: Instant) -> MutexGuard<'_, Waiting> {
        let waiting = self.lock();
        let Some(reader) = waiting.wants_reading(now) else { return waiting };
        drop(waiting);
        let info = reader.read();
        let mut waiting = self.lock();
        waiting.read(info, now);
        waiting
    }
}
