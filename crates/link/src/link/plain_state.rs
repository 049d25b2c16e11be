//! What a link to a plain remote shares with its sessions: the account of unread bytes, and the remote's generation.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::lock::Mutex;
use tunnel_proto::budget::{Budget, PairedReservation};

/// See the top of this module.
#[derive(Debug)]
pub struct PlainLinkState {
    /// Counts the bytes of all links that wait for readers. Nothing was promised for them.
    pub unread: Arc<Budget>,
    /// Counts those of this link. Its limit, a quarter of the other, applies once half of that is in use.
    of_link: Arc<Budget>,
    /// Notified when a reader has taken bytes. Only one task may wait.
    pub taken: Notify,
    generation: Mutex<&'static str>,
}

impl PlainLinkState {
    /// Creates the state of a link whose unread bytes count in `unread`.
    pub fn new(unread: Arc<Budget>, generation: &'static str) -> Self {
        let of_link = Budget::new(unread.limit() / 4);
        Self { unread, of_link, taken: Notify::new(), generation: Mutex::new(generation) }
    }

    /// Returns an empty reservation for unread bytes, of a session or of a message whose end has not arrived.
    pub fn reservation(&self) -> PairedReservation {
        PairedReservation { all: self.unread.reservation(), of_link: self.of_link.reservation() }
    }

    /// Returns true if this link has more unread than its share while half of the total is in use.
    pub fn exceeds_fair_share(&self) -> bool {
        self.of_link.is_exhausted() && self.unread.used() >= self.unread.limit() / 2
    }

    /// Returns the name of the remote's generation.
    pub fn generation(&self) -> &'static str {
        *self.generation.lock()
    }

    /// Records the name of the remote's generation.
    pub fn set_generation(&self, generation: &'static str) {
        *self.generation.lock() = generation;
    }
}
