//! What the kernel knows of a link's line, for the pace.

use tokio::time::Instant;

use crate::net::gauge::Gauge;
use crate::protocol::link::sender::LinkSender;

impl LinkSender {
    /// Has the kernel asked how much may be under way. It never is for a plain link, which is not paced.
    pub(crate) fn gauged(&self, gauge: Option<Gauge>) {
        self.lock().gauge = gauge;
    }

    /// Asks the kernel, if someone waits for a turn and what is known is old. No lock is held meanwhile.
    pub(super) fn read_gauge(&self, now: Instant) {
        let wanted = self.lock().wants_reading(now);
        if let Some(gauge) = wanted {
            let reading = gauge.read();
            self.lock().read(reading, now);
        }
    }
}
