//! What the kernel knows of a link's line, for the pace.

use std::sync::MutexGuard;
use std::time::Duration;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfoReader;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::sender::waiting::Waiting;

impl LinkSender {
    /// Has the kernel asked how much may be under way. It never is for a plain link, which is not paced. For a new link:
    /// its round trip is the kernel's until a ping is answered.
    pub(crate) fn reads_tcp_info(&self, reader: Option<TcpInfoReader>) {
        if let Some(info) = reader.as_ref().and_then(TcpInfoReader::read) {
            self.is_as_far(info.round_trip);
        }
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

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::names::NodeName;
    use crate::protocol::link::source::LinkId;
    use crate::protocol::wire::hello::Dialect;
    use crate::protocol::wire::peer::Peer;

    #[tokio::test]
    async fn a_new_links_round_trip_is_the_kernels() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap());
        let (_far, near) = tokio::join!(far, listener.accept());
        let (near, _) = near.unwrap();
        let reader = TcpInfoReader::of(&near).unwrap();
        let link = LinkSender::new(LinkId(1), Peer::Edge(NodeName::none()), None, Dialect::Plain);
        let assumed = link.round_trip();
        link.reads_tcp_info(Some(reader));
        assert!(link.round_trip() < assumed, "{:?}", link.round_trip());
    }
}
