//! What can be seen of a link from outside: who is at its other end, and what has gone over it.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::link::sender::{FIRST_ROUND_TRIP_MICROS, LinkSender};

/// The connection under a link, and the program at its other end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ends {
    /// This end's address.
    pub local: Option<SocketAddr>,
    /// The other end's address, a proxy's where one was dialled through.
    pub remote: Option<SocketAddr>,
    /// Whether this end has dialled.
    pub dialled: bool,
    /// The program at the other end as it calls itself, at most 40 printable characters.
    pub version: Option<Box<str>>,
}

/// What has gone over a link so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub sent_messages: u64,
    /// Their data in bytes.
    pub sent_bytes: u64,
    /// Messages received.
    pub received_messages: u64,
    /// Their data in bytes.
    pub received_bytes: u64,
}

/// What a link counts while it works.
#[derive(Debug, Default)]
pub(super) struct Seen {
    ends: OnceLock<Ends>,
    sent_messages: AtomicU64,
    sent_bytes: AtomicU64,
    received_messages: AtomicU64,
    received_bytes: AtomicU64,
}

impl LinkSender {
    /// Notes who is at its ends; the first one who says so is believed.
    pub(crate) fn stands_between(&self, ends: Ends) {
        let _ = self.seen.ends.set(ends);
    }

    /// Who is at its ends, if that is known.
    pub fn ends(&self) -> Option<&Ends> {
        self.seen.ends.get()
    }

    /// Counts a message that is sent, with so many bytes of data.
    pub(crate) fn count_sent(&self, bytes: usize) {
        self.seen.sent_messages.fetch_add(1, Relaxed);
        self.seen.sent_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts a message that was received, with so many bytes of data.
    pub(crate) fn count_received(&self, bytes: usize) {
        self.seen.received_messages.fetch_add(1, Relaxed);
        self.seen.received_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// What has gone over it so far.
    pub fn traffic(&self) -> Traffic {
        let Seen { sent_messages, sent_bytes, received_messages, received_bytes, .. } = &self.seen;
        Traffic {
            sent_messages: sent_messages.load(Relaxed),
            sent_bytes: sent_bytes.load(Relaxed),
            received_messages: received_messages.load(Relaxed),
            received_bytes: received_bytes.load(Relaxed),
        }
    }

    /// The latest round trip, of a link that has measured one.
    pub fn measured_round_trip(&self) -> Option<Duration> {
        let micros = self.round_trip_micros.load(Relaxed);
        (micros != FIRST_ROUND_TRIP_MICROS).then(|| Duration::from_micros(micros))
    }

    /// When it was made.
    pub fn made(&self) -> Instant {
        self.made
    }

    /// How long ago the link was made.
    pub fn age(&self) -> Duration {
        self.made.elapsed()
    }

    /// How long ago the peer last sent anything.
    pub fn silence(&self) -> Duration {
        self.made.elapsed().saturating_sub(Duration::from_millis(self.last_received_millis.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::link::source::LinkId;
    use crate::protocol::wire::hello::Dialect;
    use crate::protocol::wire::peer::Peer;

    #[tokio::test]
    async fn a_link_tells_what_went_over_it_and_no_round_trip_before_the_first() {
        let link = LinkSender::new(LinkId(1), Peer::Pod, None, Dialect::NEWEST);
        assert_eq!((link.measured_round_trip(), link.ends()), (None, None));
        link.count_sent(5);
        link.count_sent(0);
        link.count_received(7);
        let seen = link.traffic();
        assert_eq!((seen.sent_messages, seen.sent_bytes), (2, 5));
        assert_eq!((seen.received_messages, seen.received_bytes), (1, 7));
        let ends = Ends { version: Some("0.1.0".into()), ..Ends::default() };
        link.stands_between(ends.clone());
        link.stands_between(Ends::default());
        assert_eq!(link.ends(), Some(&ends));
    }
}
