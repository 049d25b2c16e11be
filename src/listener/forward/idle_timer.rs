//! Timeouts of an inactive client: between two requests, within a head, and after it has closed its write half.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::listener::client_handler::HEAD_TIME;
use crate::session_io::copy::close::READER_PAUSE;

/// The phase of a client's connection, with its deadline.
#[derive(Debug)]
pub(crate) struct IdleTimer(Mutex<Inner>);

/// The locked state of an [`IdleTimer`].
#[derive(Debug)]
struct Inner {
    phase: RequestPhase,
    /// Whether hyper's server must be polled: a request's body has ended, or an interim response was added.
    requested: bool,
    /// Whether a head began, and whether a response was completed, since the last check.
    begun: bool,
    answered: bool,
    /// Whether the client has disconnected or vanished.
    lost: bool,
    /// Interim responses of the target that are not written yet; at most [`MAX_INTERIM`] bytes.
    interim: Vec<u8>,
}

/// The phase of a client's connection, which decides its next [`ClientDeadline`].
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

/// The time at which a client has been inactive for too long, with the expected action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientDeadline {
    /// The client must start another request.
    Request(Instant),
    /// The client must send the rest of a head.
    Head(Instant),
    /// The client must read its response; otherwise it is considered disconnected.
    Answer(Instant),
    /// The client must send more of its request's body.
    Body(Instant),
}

impl IdleTimer {
    /// Creates the timer of a new client, which must send a request.
    pub(crate) fn new() -> Self {
        let phase = RequestPhase::Head(Instant::now());
        let interim = Vec::new();
        Self(Mutex::new(Inner {
            phase,
            requested: false,
            begun: false,
            answered: false,
            lost: false,
            interim,
        }))
    }

    /// Records that a head is complete and whether a body follows.
    pub(crate) fn on_head(&self, has_body: bool) {
        self.0.lock().phase =
            if has_body { RequestPhase::ReadingBody(None) } else { RequestPhase::Responding(None) };
    }

    /// Records that the target takes more of the request's body, and whether it has to wait for the client.
    pub(crate) fn on_body_polled(&self, waits: bool) {
        if let RequestPhase::ReadingBody(since) = &mut self.0.lock().phase {
            *since = waits.then(|| since.unwrap_or_else(Instant::now));
        }
    }

    /// Records that nothing more is read from the request's body.
    pub(crate) fn on_body_end(&self) {
        let mut inner = self.0.lock();
        if let RequestPhase::ReadingBody(_) = inner.phase {
            inner.phase = RequestPhase::Responding(None);
            inner.requested = true;
        }
    }

    /// Returns true if a request has been read completely and its response is not complete.
    pub(crate) fn is_answering(&self) -> bool {
        matches!(self.0.lock().phase, RequestPhase::Responding(_))
    }

    /// Adds an interim response for the client, and has hyper's server polled to write it. It is dropped if the client
    /// does not read the earlier ones.
    pub(crate) fn add_interim(&self, response: &[u8]) {
        let mut inner = self.0.lock();
        if inner.interim.len() + response.len() <= MAX_INTERIM {
            inner.interim.extend_from_slice(response);
            inner.requested = true;
        }
    }

    /// Takes the interim responses to write.
    pub(crate) fn take_interim(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().interim)
    }

    /// Returns true while a head is expected.
    pub(crate) fn is_in_head(&self) -> bool {
        matches!(self.0.lock().phase, RequestPhase::Head(_))
    }

    /// Returns true if a request's body has ended, or an interim response was added, since the last call.
    pub(crate) fn take_requested(&self) -> bool {
        std::mem::take(&mut self.0.lock().requested)
    }

    /// Records that a response is complete.
    pub(crate) fn idle(&self) {
        let mut inner = self.0.lock();
        inner.phase = RequestPhase::Idle(Instant::now());
        (inner.requested, inner.begun, inner.answered) = (false, false, true);
    }

    /// Records that the client has disconnected or vanished.
    pub(crate) fn lost(&self) {
        self.0.lock().lost = true;
    }

    /// Returns true if the client has disconnected or vanished.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lock().lost
    }

    /// Returns true if a response was completed since the last call.
    pub(crate) fn take_answered(&self) -> bool {
        std::mem::take(&mut self.0.lock().answered)
    }

    /// Returns true if a head began since the last call.
    pub(crate) fn take_begun(&self) -> bool {
        std::mem::take(&mut self.0.lock().begun)
    }

    /// Returns the client's deadline, if an action is expected of it. With `leaving`, no further request is expected.
    pub(crate) fn deadline(&self, leaving: bool) -> Option<ClientDeadline> {
        match self.0.lock().phase {
            RequestPhase::Head(since) => Some(ClientDeadline::Head(since + HEAD_TIME)),
            RequestPhase::ReadingBody(since) => since.map(|since| ClientDeadline::Body(since + BODY_TIME)),
            RequestPhase::Responding(until) => until.map(ClientDeadline::Answer),
            // The last bytes of a response may not fit into the system's buffers.
            RequestPhase::Idle(since) if leaving => Some(ClientDeadline::Answer(since + READER_PAUSE)),
            RequestPhase::Idle(since) => Some(ClientDeadline::Request(since + IDLE_TIME)),
        }
    }

    /// Records that bytes were received from the client.
    pub(crate) fn on_received(&self) {
        let mut inner = self.0.lock();
        match inner.phase {
            RequestPhase::Idle(_) => (inner.phase, inner.begun) = (RequestPhase::Head(Instant::now()), true),
            RequestPhase::Head(_) => inner.begun = true,
            RequestPhase::ReadingBody(_) | RequestPhase::Responding(_) => {}
        }
    }

    /// Records that the client closed its write half. While a response is pending, a client that still `reads` gets
    /// [`FINISHED_TIME`], because a disconnected client looks the same.
    pub(crate) fn finished(&self, reads: bool) {
        if let RequestPhase::Responding(until @ None) = &mut self.0.lock().phase {
            let timeout = if reads { FINISHED_TIME } else { Duration::ZERO };
            *until = Some(Instant::now() + timeout);
        }
    }

    /// Records that a part of the response was forwarded.
    pub(crate) fn on_response_part(&self) {
        match &mut self.0.lock().phase {
            RequestPhase::Responding(Some(until)) => *until = Instant::now() + FINISHED_TIME,
            RequestPhase::ReadingBody(Some(since)) => *since = Instant::now(),
            _ => {}
        }
    }
}

impl ClientDeadline {
    /// Returns the time of the deadline.
    pub(crate) fn at(self) -> Instant {
        match self {
            Self::Request(at) | Self::Head(at) | Self::Answer(at) | Self::Body(at) => at,
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
