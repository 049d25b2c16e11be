//! What the kernel knows of a link's line, for the pace.

use std::sync::MutexGuard;
use std::time::Duration;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfoReader;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::sender::waiting::Waiting;

impl LinkSender {
    /// Has the kernel asked how much may be under way. It never is for a plain link, which is not paced.
    pub(crate) fn reads_tcp_info(&self, reader: Option<TcpInfoReader>) {
        self.lock().tcp_info = reader;
    }

    /// The round trip to the next machine that ends the connection, as the kernel knows it; none if it does not tell.
    pub fn line_round_trip(&self) -> Option<Duration> {
        let reader = self.lock().tcp_info.clone();
        reader?.read().map(|info| info.round_trip)
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
