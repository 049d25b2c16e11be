//! Timeouts of an inactive client: between two requests, within a head, and after it has closed its write half.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::admission::client_handler::HEAD_TIME;
use crate::admission::forward::meter::Meter;
use crate::session_io::copy::close::READER_PAUSE;
use tunnel_net::limiter::{FairLimiter, Permit, Source};

/// The phase of a client's connection, with its deadline. Keeps the client's permit active or idle.
#[derive(Debug)]
pub(crate) struct IdleTimer {
    inner: Mutex<Inner>,
    permit: Option<Arc<Permit>>,
    /// The meters of what hyper holds for the client, and for its targets.
    pub(super) client: Meter,
    pub(super) target: Meter,
}

/// The locked state of an [`IdleTimer`].
#[derive(Debug)]
struct Inner {
    phase: RequestPhase,
    /// Whether hyper's server must be polled: a request's body has ended, or an interim response was added.
    requested: bool,
    /// Whether the client has disconnected or vanished.
    lost: bool,
    /// Interim responses of the target that are not written yet; at most [`MAX_INTERIM`] bytes.
    interim: Vec<u8>,
}

/// The phase of a client's connection, which decides its next deadline.
#[derive(Debug, Clone, Copy)]
enum RequestPhase {
    /// A head is being received since this time.
    Head(Instant),
    /// The request's body is being received. The target has waited for more of it since the time, if any.
    ReadingBody(Option<Instant>),
    /// The request is complete and its response is pending. Part of it must be sent before the deadline, if any.
    Responding(Option<Instant>),
    /// The response was completed at this time.
    Idle(Instant),
}

/// What a client has to do before its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientAction {
    /// Start another request.
    Request,
    /// Send the rest of a head.
    Head,
    /// Read its response, or send more of its request's body; otherwise it is considered disconnected.
    Transfer,
}

impl IdleTimer {
    /// Creates the timer of a new client, which must send a request. Its heads and those of its targets share the permits
    /// of `long_heads`.
    pub(crate) fn new(permit: Option<Arc<Permit>>, long_heads: &FairLimiter, source: Source) -> Self {
        let phase = RequestPhase::Head(Instant::now());
        let inner = Mutex::new(Inner { phase, requested: false, lost: false, interim: Vec::new() });
        let client = Meter::new(long_heads.clone(), source);
        let target = Meter::new(long_heads.clone(), source);
        Self { inner, permit, client, target }
    }

    /// Records that a head is complete and whether a body follows.
    pub(crate) fn on_head(&self, has_body: bool) {
        self.inner.lock().phase =
            if has_body { RequestPhase::ReadingBody(None) } else { RequestPhase::Responding(None) };
    }

    /// Records that the target takes more of the request's body, and whether it has to wait for the client.
    pub(crate) fn on_body_polled(&self, waits: bool) {
        if let RequestPhase::ReadingBody(since) = &mut self.inner.lock().phase {
            *since = waits.then(|| since.unwrap_or_else(Instant::now));
        }
    }

    /// Records that nothing more is read from the request's body.
    pub(crate) fn on_body_end(&self) {
        let mut inner = self.inner.lock();
        if let RequestPhase::ReadingBody(_) = inner.phase {
            inner.phase = RequestPhase::Responding(None);
            inner.requested = true;
        }
    }

    /// Returns true if a request has been read completely and its response is not complete.
    pub(crate) fn is_answering(&self) -> bool {
        matches!(self.inner.lock().phase, RequestPhase::Responding(_))
    }

    /// Adds an interim response for the client, and has hyper's server polled to write it. It is dropped if the client
    /// does not read the earlier ones.
    pub(crate) fn add_interim(&self, response: &[u8]) {
        let mut inner = self.inner.lock();
        if inner.interim.len() + response.len() <= MAX_INTERIM {
            inner.interim.extend_from_slice(response);
            inner.requested = true;
        }
    }

    /// Takes the interim responses to write.
    pub(crate) fn take_interim(&self) -> Vec<u8> {
        std::mem::take(&mut self.inner.lock().interim)
    }

    /// Returns true while a head is expected.
    pub(crate) fn is_in_head(&self) -> bool {
        matches!(self.inner.lock().phase, RequestPhase::Head(_))
    }

    /// Returns true if a request's body has ended, or an interim response was added, since the last call.
    pub(crate) fn take_requested(&self) -> bool {
        std::mem::take(&mut self.inner.lock().requested)
    }

    /// Records that a response is complete, so that this process now waits for the client.
    pub(crate) fn idle(&self) {
        self.client.begin();
        {
            let mut inner = self.inner.lock();
            inner.phase = RequestPhase::Idle(Instant::now());
            inner.requested = false;
        }
        self.permit.iter().for_each(|permit| permit.mark_idle());
    }

    /// Records that the client has disconnected or vanished.
    pub(crate) fn lost(&self) {
        self.inner.lock().lost = true;
    }

    /// Returns true if the client has disconnected or vanished.
    pub(crate) fn is_lost(&self) -> bool {
        self.inner.lock().lost
    }

    /// Returns the client's deadline, if an action is expected of it. With `leaving`, no further request is expected.
    pub(crate) fn deadline(&self, leaving: bool) -> Option<(Instant, ClientAction)> {
        match self.inner.lock().phase {
            RequestPhase::Head(since) => Some((since + HEAD_TIME, ClientAction::Head)),
            RequestPhase::ReadingBody(since) => Some((since? + BODY_TIME, ClientAction::Transfer)),
            RequestPhase::Responding(until) => Some((until?, ClientAction::Transfer)),
            // The last bytes of a response may not fit into the system's buffers.
            RequestPhase::Idle(since) if leaving => Some((since + READER_PAUSE, ClientAction::Transfer)),
            RequestPhase::Idle(since) => Some((since + IDLE_TIME, ClientAction::Request)),
        }
    }

    /// Records bytes that were received from the client.
    pub(crate) fn on_received(&self, count: usize) {
        self.client.add(count);
        {
            let mut inner = self.inner.lock();
            match inner.phase {
                RequestPhase::Idle(_) => inner.phase = RequestPhase::Head(Instant::now()),
                RequestPhase::Head(_) => {}
                RequestPhase::ReadingBody(_) | RequestPhase::Responding(_) => return,
            }
        }
        self.permit.iter().for_each(|permit| permit.mark_active());
    }

    /// Records that the client closed its write half. While a response is pending, a client that still `reads` gets
    /// [`FINISHED_TIME`], because a disconnected client looks the same.
    pub(crate) fn finished(&self, reads: bool) {
        if let RequestPhase::Responding(until @ None) = &mut self.inner.lock().phase {
            let timeout = if reads { FINISHED_TIME } else { Duration::ZERO };
            *until = Some(Instant::now() + timeout);
        }
    }

    /// Records that a part of the response was forwarded.
    pub(crate) fn on_response_part(&self) {
        match &mut self.inner.lock().phase {
            RequestPhase::Responding(Some(until)) => *until = Instant::now() + FINISHED_TIME,
            RequestPhase::ReadingBody(Some(since)) => *since = Instant::now(),
            _ => {}
        }
    }
}

/// Maximum size of interim responses that wait for a client.
const MAX_INTERIM: usize = 16 * 1024;

/// Idle timeout of a client's connection between requests, the same as that of Go's clients.
const IDLE_TIME: Duration = Duration::from_secs(90);

/// Timeout for progress of a response to a client that has closed its write half.
const FINISHED_TIME: Duration = Duration::from_secs(30);

/// Timeout for the next bytes of a request's body that the target waits for, while the response makes no progress.
/// Long for the same reason as [`READER_PAUSE`].
const BODY_TIME: Duration = Duration::from_secs(600);
