//! Forwarded heads and bodies of requests and responses. A request's body may have to wait for the target's 100.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::{Sleep, sleep};

use crate::listener::forward::headers::{KeptHopByHopHeaders, remove_tunnel_headers};
use crate::listener::forward::idle_timer::IdleTimer;
use tunnel_base::metrics::in_flight_requests::InFlightGuard;

/// A request's body that is forwarded to the target.
///
/// hyper sends 100 (Continue) to the client when the body is first polled. If the client waits for that, the body is
/// not polled until the target has sent a 100, or nothing for [`CONTINUE_TIME`].
pub(crate) struct RequestBody {
    /// The client's body. `None` means empty.
    body: Option<Incoming>,
    awaited: Option<ContinueWait>,
    clock: Arc<IdleTimer>,
}

/// State of waiting for the target's 100 before the body is polled.
struct ContinueWait {
    /// Decision that is waited for.
    continue_gate: Arc<ContinueGate>,
    /// Timeout that ends [`CONTINUE_TIME`] after hyper has first polled the body.
    silence: Option<Pin<Box<Sleep>>>,
}

/// The target's decision about the body of a request with `Expect: 100-continue`.
#[derive(Debug, Default)]
pub(crate) struct ContinueGate(Mutex<(ExpectContinueState, Option<Waker>)>);

/// What is known of the target's wish for the body of a request with `Expect: 100-continue`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ExpectContinueState {
    /// The target has not responded yet.
    #[default]
    Unknown,
    /// The body is sent: the target sent a 100 or a final success, or nothing for [`CONTINUE_TIME`].
    Yes,
    /// The target responded without reading the body, and the response is being forwarded.
    Held,
    /// The body is dropped: the response that did not want it has ended.
    No,
}

/// The error of a request body that is dropped: the client waited for 100 (Continue), and the target responded
/// without sending one.
#[derive(Debug, thiserror::Error)]
#[error("the target did not request the body")]
pub(crate) struct BodyNotRequested;

/// A response's body that is sent to the client: the target's, or one of this process.
pub(crate) struct ResponseBody {
    /// The target's, read from its session, or one of this process, such as an error text.
    body: Either<Incoming, Full<Bytes>>,
    clock: Arc<IdleTimer>,
    /// Gate of the request's body, closed when this body is dropped; `None` without one.
    continue_gate: Option<Arc<ContinueGate>>,
    /// The guard of the request, which ends with the response.
    _request: Option<InFlightGuard>,
}

impl RequestBody {
    /// Creates the body of a request. `continue_gate` decides when the body may be polled, if the client waits for a
    /// 100.
    pub(crate) fn new(
        body: Incoming,
        clock: Arc<IdleTimer>,
        continue_gate: Option<Arc<ContinueGate>>,
    ) -> Self {
        Self {
            body: Some(body),
            awaited: continue_gate.map(|continue_gate| ContinueWait { continue_gate, silence: None }),
            clock,
        }
    }

    /// Returns the timer of the client.
    pub(crate) fn clock(&self) -> &Arc<IdleTimer> {
        &self.clock
    }

    /// Creates the body of a request without one.
    pub(crate) fn empty(clock: Arc<IdleTimer>) -> Self {
        Self { body: None, awaited: None, clock }
    }

    fn poll_continue(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyNotRequested>> {
        let Some(ContinueWait { continue_gate, silence }) = &mut self.awaited else {
            return Poll::Ready(Ok(()));
        };
        let verdict = continue_gate.poll(cx);
        if verdict == ExpectContinueState::Unknown {
            let silence = silence.get_or_insert_with(|| Box::pin(sleep(CONTINUE_TIME)));
            ready!(silence.as_mut().poll(cx));
            continue_gate.decide(ExpectContinueState::Yes);
        }
        match verdict {
            ExpectContinueState::Held => return Poll::Pending,
            ExpectContinueState::No => return Poll::Ready(Err(BodyNotRequested)),
            ExpectContinueState::Unknown | ExpectContinueState::Yes => self.awaited = None,
        }
        Poll::Ready(Ok(()))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Err(refused) = ready!(self.poll_continue(cx)) {
            return Poll::Ready(Some(Err(refused.into())));
        }
        match &mut self.body {
            Some(body) => {
                let frame = Pin::new(body).poll_frame(cx);
                self.clock.on_body_polled(frame.is_pending());
                let passed = |mut frame: Frame<Bytes>| {
                    if let Some(trailers) = frame.trailers_mut() {
                        KeptHopByHopHeaders { upgrade: false, trailers: false }.leave(trailers);
                        remove_tunnel_headers(trailers);
                    }
                    frame
                };
                frame.map_ok(passed).map_err(Into::into)
            }
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.clock.on_body_end();
    }
}

impl ContinueGate {
    /// Records that the target has sent a 100.
    pub(crate) fn on_continue(&self) {
        self.decide(ExpectContinueState::Yes);
    }

    /// Records the target's response. Returns true if the body is not forwarded, because the target had not requested
    /// it before; the response is then the last one on its connection.
    pub(crate) fn answered(&self, success: bool) -> bool {
        self.decide(if success { ExpectContinueState::Yes } else { ExpectContinueState::Held });
        self.0.lock().0 == ExpectContinueState::Held
    }

    fn poll(&self, cx: &Context<'_>) -> ExpectContinueState {
        let mut inner = self.0.lock();
        inner.1 = Some(cx.waker().clone());
        inner.0
    }

    /// Sets the decision once. Later only `Held` can change, to `No`.
    fn decide(&self, verdict: ExpectContinueState) {
        let waker = {
            let mut inner = self.0.lock();
            let given_up = (inner.0, verdict) == (ExpectContinueState::Held, ExpectContinueState::No);
            if inner.0 != ExpectContinueState::Unknown && !given_up {
                return;
            }
            inner.0 = verdict;
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl ResponseBody {
    /// Creates the body of a response of this process. When it is dropped, the client's idle time starts, and a body
    /// that the target has not requested is discarded.
    pub(crate) fn new(body: Bytes, clock: Arc<IdleTimer>) -> Self {
        Self { body: Either::Right(body.into()), clock, continue_gate: None, _request: None }
    }

    /// Creates the body of a target's response. `continue_gate` is the gate of the request's body; `request` is in
    /// flight until the response is dropped.
    pub(crate) fn of_target(
        body: Incoming,
        clock: Arc<IdleTimer>,
        continue_gate: Option<Arc<ContinueGate>>,
        request: InFlightGuard,
    ) -> Self {
        Self { body: Either::Left(body), clock, continue_gate, _request: Some(request) }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.clock.on_response_part();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.clock.idle();
        if let Some(continue_gate) = &self.continue_gate {
            continue_gate.decide(ExpectContinueState::No);
        }
    }
}

/// Time to wait for the target's 100 before the body is sent anyway: many targets never send one.
const CONTINUE_TIME: Duration = Duration::from_secs(1);
