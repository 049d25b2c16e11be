//! Forwarded heads and bodies of requests and responses. A request's body may have to wait for the target's 100.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::admission::forward::headers::prepare_trailers;
use crate::admission::forward::idle_timer::IdleTimer;
use tunnel_base::metrics::in_flight_requests::InFlightGuard;

/// The error of a body.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body that is forwarded to the target.
///
/// hyper sends 100 (Continue) to the client when the body is first polled. If the client waits for that, the body is
/// not polled until the target has sent a 100, or nothing for [`CONTINUE_TIME`].
pub(crate) struct RequestBody {
    body: Incoming,
    /// The wait for the target's 100, until it is over.
    awaited: Option<BoxFuture<'static, Result<(), BodyNotRequested>>>,
    clock: Arc<IdleTimer>,
}

/// The target's decision about the body of a request with `Expect: 100-continue`: the sender of its permission, until
/// the decision is made. Dropping the sender drops the body.
#[derive(Debug)]
pub(crate) struct ContinueGate(Mutex<Option<oneshot::Sender<()>>>);

/// The error of a request body that is dropped: the client waited for 100 (Continue), and the target responded
/// without sending one.
#[derive(Debug, thiserror::Error)]
#[error("the target did not request the body")]
pub(crate) struct BodyNotRequested;

/// A response's body that is sent to the client: the target's, or one of this process.
pub(crate) struct ResponseBody {
    /// The target's, read from its session, or one of this process, such as an error text.
    body: Either<Incoming, Full<Bytes>>,
    /// The error that ends it, while hyper writes what came before.
    cut: Option<BoxError>,
    clock: Arc<IdleTimer>,
    /// Permission to send the request's body that the target did not ask for. The body is dropped with this one.
    _unasked: Option<oneshot::Sender<()>>,
    /// The guard of the request, which ends with the response.
    _request: Option<InFlightGuard>,
}

impl RequestBody {
    /// Creates the body of a request. If the client `waits` for a 100, the gate decides when the body may be polled.
    pub(crate) fn new(body: Incoming, clock: Arc<IdleTimer>, waits: bool) -> (Self, Arc<ContinueGate>) {
        let (sender, permission) = oneshot::channel();
        let gate = Arc::new(ContinueGate(Mutex::new(waits.then_some(sender))));
        let awaited = waits.then(|| permitted(Arc::clone(&gate), permission).boxed());
        (Self { body, awaited, clock }, gate)
    }
}

/// Waits until a request's body may be sent.
async fn permitted(
    gate: Arc<ContinueGate>,
    mut permission: oneshot::Receiver<()>,
) -> Result<(), BodyNotRequested> {
    if let Ok(permitted) = timeout(CONTINUE_TIME, &mut permission).await {
        return permitted.map_err(|_| BodyNotRequested);
    }
    if gate.0.lock().take().is_some() {
        // Many targets never send a 100.
        return Ok(());
    }
    // The target has responded, and its response decides.
    permission.await.map_err(|_| BodyNotRequested)
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(awaited) = &mut self.awaited {
            let permitted = ready!(awaited.as_mut().poll(cx));
            self.awaited = None;
            if let Err(refused) = permitted {
                return Poll::Ready(Some(Err(refused.into())));
            }
        }
        let Self { body, clock, .. } = &mut *self;
        let mut frame = clock.target.poll_frame(cx, body, &clock.client);
        clock.on_body_polled(frame.is_pending() && !clock.target.is_full());
        if let Poll::Ready(Some(Ok(frame))) = &mut frame
            && let Some(trailers) = frame.trailers_mut()
        {
            prepare_trailers(trailers);
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.clock.on_body_end();
    }
}

impl ContinueGate {
    /// Permits the body, because the target has sent a 100.
    pub(crate) fn open(&self) {
        if let Some(sender) = self.0.lock().take() {
            // The request may have ended.
            let _ = sender.send(());
        }
    }

    /// Records the target's final response. Returns the permission if the target does not want the body; the response
    /// is then the last one on its connection.
    pub(crate) fn answered(&self, success: bool) -> Option<oneshot::Sender<()>> {
        if success {
            self.open();
        }
        self.0.lock().take()
    }
}

impl ResponseBody {
    /// Creates the body of a response of this process. When it is dropped, the client's idle time starts.
    pub(crate) fn new(body: Bytes, clock: Arc<IdleTimer>) -> Self {
        Self { body: Either::Right(body.into()), cut: None, clock, _unasked: None, _request: None }
    }

    /// Creates the body of a target's response. `unasked` is the permission to send the request's body, if the target
    /// does not want it; `request` is in flight until the response is dropped.
    pub(crate) fn of_target(
        body: Incoming,
        clock: Arc<IdleTimer>,
        unasked: Option<oneshot::Sender<()>>,
        request: InFlightGuard,
    ) -> Self {
        Self { body: Either::Left(body), cut: None, clock, _unasked: unasked, _request: Some(request) }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Self { body, cut, clock, .. } = &mut *self;
        if let Some(cut) = cut.take() {
            return Poll::Ready(Some(Err(cut)));
        }
        let frame = match ready!(clock.client.poll_frame(cx, body, &clock.target)) {
            Some(Err(error)) => {
                // At an error hyper drops what it has not written, even the head. So it comes after a flush.
                *cut = Some(error);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            frame => frame,
        };
        clock.on_response_part();
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
    }
}

/// Time to wait for the target's 100 before the body is sent anyway: many targets never send one.
const CONTINUE_TIME: Duration = Duration::from_secs(1);
