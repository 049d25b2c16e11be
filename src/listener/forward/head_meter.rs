//! The length of a head that is being received: a long one needs a permit, and is served without another after it.

use std::io;

use parking_lot::Mutex;

use crate::listener::admission::heads::{HEAD_BYTES, HEAD_FIELDS};
use crate::listener::denial::Denial;
use tunnel_net::limiter::{FairLimiter, Permit, Source};

/// The meter of the heads that arrive on one connection, one after another.
///
/// hyper parses heads of any permitted length. So that slow ones cannot take all memory, the connection asks here
/// before it reads more of a head.
#[derive(Debug)]
pub(crate) struct HeadMeter {
    limiter: FairLimiter,
    source: Source,
    head: Mutex<Head>,
}

/// The head that is being received, or was received last.
#[derive(Debug, Default)]
struct Head {
    /// Bytes read since its start; `None` once it is complete.
    bytes: Option<usize>,
    /// The permit of a long head.
    permit: Option<Permit>,
    /// Informational responses before it.
    informational: usize,
    /// Why nothing more of it is read.
    refusal: Option<Denial>,
}

impl HeadMeter {
    /// Creates the meter of heads from `source`, which share the permits of `limiter`.
    pub(crate) fn new(limiter: FairLimiter, source: Source) -> Self {
        Self { limiter, source, head: Mutex::default() }
    }

    /// Starts another head, and releases the permit of the last one.
    pub(crate) fn begin(&self) {
        *self.head.lock() = Head { bytes: Some(0), ..Head::default() };
    }

    /// Checks whether more may be read. A head that is long by now gets its permit.
    ///
    /// # Errors
    ///
    /// Returns the text of [`Self::refusal`].
    pub(crate) fn admit(&self) -> io::Result<()> {
        let mut head = self.head.lock();
        if head.bytes.is_some_and(|bytes| bytes >= HEAD_BYTES) {
            self.require_permit(&mut head);
        }
        match &head.refusal {
            None => Ok(()),
            Some(why) => Err(io::Error::other(why.to_string())),
        }
    }

    /// Records bytes that were read.
    pub(crate) fn add(&self, count: usize) {
        if let Some(bytes) = &mut self.head.lock().bytes {
            *bytes += count;
        }
    }

    /// Records an informational response before the head.
    pub(crate) fn on_informational(&self) {
        let mut head = self.head.lock();
        head.informational += 1;
        if head.informational > MAX_INFORMATIONAL {
            let why = format!("more than {MAX_INFORMATIONAL} informational responses");
            head.refusal = Some(Denial::UpstreamFailed(why));
        }
    }

    /// Ends the head, which has this number of fields. Returns true if it is a long one.
    ///
    /// # Errors
    ///
    /// Returns [`Self::refusal`].
    pub(crate) fn complete(&self, fields: usize) -> Result<bool, Denial> {
        let mut head = self.head.lock();
        head.bytes = None;
        if fields > HEAD_FIELDS {
            self.require_permit(&mut head);
        }
        head.refusal.take().map_or(Ok(head.permit.is_some()), Err)
    }

    /// Takes the reason why nothing more of the head is read.
    pub(crate) fn refusal(&self) -> Option<Denial> {
        self.head.lock().refusal.take()
    }

    fn require_permit(&self, head: &mut Head) {
        if head.permit.is_none() {
            match self.limiter.try_acquire(&self.source) {
                Ok(permit) => head.permit = Some(permit),
                Err(_) => head.refusal = Some(Denial::Busy(TOO_MANY_LONG_HEADS)),
            }
        }
    }
}

/// Maximum number of informational responses to one request. A target may send one now and then to report progress.
const MAX_INFORMATIONAL: usize = 100;

const TOO_MANY_LONG_HEADS: &str = "too many requests and responses with long heads at once";
