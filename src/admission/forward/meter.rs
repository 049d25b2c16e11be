//! What hyper may hold for one end. A long head needs a permit, and is served without another after it. So do long
//! trailers. A body waits while the end does not take what it was sent.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use parking_lot::Mutex;

use crate::admission::denial::Denial;
use crate::admission::forward::PIECE_BYTES;
use crate::admission::heads::{HEAD_BYTES, HEAD_FIELDS};
use tunnel_net::limiter::{FairLimiter, Permit, Source};

/// The meter of one end: of the heads that arrive from it, one after another, and of the bodies that are sent to it.
///
/// hyper parses heads of any permitted length. So that slow ones cannot take all memory, the connection asks here
/// before it reads more of a head. hyper queues 16 pieces of a body however slowly they are written, so it gets them
/// here.
#[derive(Debug)]
pub(crate) struct Meter {
    limiter: FairLimiter,
    source: Source,
    head: Mutex<Head>,
    /// Bytes of bodies that hyper has got since it last had written everything.
    queued: AtomicUsize,
}

/// The head that is being received, or was received last.
#[derive(Debug, Default)]
struct Head {
    /// Bytes read since its start, or since the last part of the body behind it: of its trailers, at the end.
    bytes: usize,
    /// The permit of a long head.
    permit: Option<Permit>,
    /// Informational responses before it.
    informational: usize,
    /// Why nothing more of it is read.
    refusal: Option<Denial>,
}

impl Meter {
    /// Creates the meter of heads from `source`, which share the permits of `limiter`.
    pub(crate) fn new(limiter: FairLimiter, source: Source) -> Self {
        Self { limiter, source, head: Mutex::default(), queued: AtomicUsize::new(0) }
    }

    /// Starts another head, and releases the permit of the last one.
    pub(crate) fn begin(&self) {
        *self.head.lock() = Head::default();
    }

    /// Checks whether more may be read. A head that is long by now, or its trailers, gets its permit.
    ///
    /// # Errors
    ///
    /// Returns the text of [`Self::refusal`].
    pub(crate) fn admit(&self) -> io::Result<()> {
        let mut head = self.head.lock();
        if head.bytes >= HEAD_BYTES {
            self.require_permit(&mut head);
        }
        match &head.refusal {
            None => Ok(()),
            Some(why) => Err(io::Error::other(why.to_string())),
        }
    }

    /// Records bytes that were read.
    pub(crate) fn add(&self, count: usize) {
        self.head.lock().bytes += count;
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

    /// Ends the head, which has these fields, and a target of `target` bytes. Returns true if it is a long one.
    ///
    /// # Errors
    ///
    /// Returns [`Self::refusal`].
    pub(crate) fn complete(&self, target: usize, fields: &HeaderMap) -> Result<bool, Denial> {
        let mut head = self.head.lock();
        head.bytes = 0;
        // The bytes that were read together with the end of another message are not counted.
        let lines = fields.iter().map(|(name, value)| name.as_str().len() + ": \r\n".len() + value.len());
        if fields.len() > HEAD_FIELDS || lines.sum::<usize>() + target > HEAD_BYTES {
            self.require_permit(&mut head);
        }
        head.refusal.take().map_or(Ok(head.permit.is_some()), Err)
    }

    /// Takes the reason why nothing more of the head is read.
    pub(crate) fn refusal(&self) -> Option<Denial> {
        self.head.lock().refusal.take()
    }

    /// Returns true if the end has to take more before hyper gets another piece of a body for it.
    pub(crate) fn is_full(&self) -> bool {
        self.queued.load(Ordering::Relaxed) >= PIECE_BYTES
    }

    /// Returns the next frame of a body for this end, unless that is full. hyper polls again after a flush. `from` is
    /// the meter of the other end.
    pub(crate) fn poll_frame<B: Body<Data = Bytes> + Unpin>(
        &self,
        cx: &mut Context<'_>,
        body: &mut B,
        from: &Self,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.is_full() {
            return Poll::Pending;
        }
        let frame = ready!(Pin::new(body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            self.queued.fetch_add(frame.data_ref().map_or(0, Bytes::len), Ordering::Relaxed);
            from.head.lock().bytes = 0;
        }
        Poll::Ready(frame)
    }

    /// Records that hyper has written everything.
    pub(crate) fn on_flushed(&self) {
        self.queued.store(0, Ordering::Relaxed);
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
