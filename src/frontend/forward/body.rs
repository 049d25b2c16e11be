//! Bodies on their way through: a request's, which may have to wait until it is wanted, and an answer's.

use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};

use super::clock::Clock;
use crate::telemetry::UnderWay;

/// A request's body on its way to the target.
///
/// hyper sends the client 100 (go on) once the body is first polled. If the client waits for that, the body is not
/// polled before the target has sent a 100, or nothing for [`CONTINUE_TIME`].
pub(super) struct Upload {
    /// `None`: it is empty.
    body: Option<Incoming>,
    awaited: Option<Awaited>,
    clock: Arc<Clock>,
}

/// The wait for the target's 100 before the body is polled.
struct Awaited {
    wanted: Arc<Wanted>,
    /// Ends [`CONTINUE_TIME`] after hyper has first asked for the body.
    silence: Option<Pin<Box<Sleep>>>,
}

/// Whether the target wants the body of a request whose client waits for a 100.
#[derive(Debug, Default)]
pub(super) struct Wanted(Mutex<(Verdict, Option<Waker>)>);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    #[default]
    Unknown,
    Yes,
    /// The target has answered without it, and the answer is on its way.
    Held,
    No,
}

/// The answer is complete, and the target did not want the body.
#[derive(Debug, thiserror::Error)]
#[error("the target did not want the body")]
pub(super) struct Unwanted;

/// An answer's body on its way to the client: a target's, or one of ours.
pub(super) struct AnswerBody {
    body: Content,
    clock: Arc<Clock>,
    wanted: Option<Arc<Wanted>>,
    /// Its request, if that ends with it.
    _request: Option<UnderWay>,
}

pub(super) enum Content {
    Target(Incoming),
    Own(Full<Bytes>),
}

impl Upload {
    /// `wanted` resolves when the body may be polled, if its client waits for a 100.
    pub(super) fn new(body: Incoming, clock: Arc<Clock>, wanted: Option<Arc<Wanted>>) -> Self {
        Self { body: Some(body), awaited: wanted.map(|wanted| Awaited { wanted, silence: None }), clock }
    }

    /// The body of a request that has none.
    pub(super) fn empty(clock: Arc<Clock>) -> Self {
        Self { body: None, awaited: None, clock }
    }

    fn poll_wanted(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Unwanted>> {
        let Some(Awaited { wanted, silence }) = &mut self.awaited else { return Poll::Ready(Ok(())) };
        let verdict = wanted.poll(cx);
        if verdict == Verdict::Unknown {
            let silence = silence.get_or_insert_with(|| Box::pin(sleep(CONTINUE_TIME)));
            ready!(silence.as_mut().poll(cx));
            wanted.become_so(Verdict::Yes);
        }
        match verdict {
            Verdict::Held => return Poll::Pending,
            Verdict::No => return Poll::Ready(Err(Unwanted)),
            Verdict::Unknown | Verdict::Yes => self.awaited = None,
        }
        Poll::Ready(Ok(()))
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Err(unwanted) = ready!(self.poll_wanted(cx)) {
            return Poll::Ready(Some(Err(unwanted.into())));
        }
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
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

impl Drop for Upload {
    fn drop(&mut self) {
        self.clock.has_asked();
    }
}

impl Wanted {
    /// The target has sent a 100: go on.
    pub(super) fn go_on(&self) {
        self.become_so(Verdict::Yes);
    }

    /// The target has answered. Returns whether the body ends here, as the target had not asked for it before; the
    /// answer is then the last on its connection.
    pub(super) fn answered(&self, success: bool) -> bool {
        self.become_so(if success { Verdict::Yes } else { Verdict::Held });
        self.lock().0 == Verdict::Held
    }

    fn poll(&self, cx: &Context<'_>) -> Verdict {
        let mut inner = self.lock();
        inner.1 = Some(cx.waker().clone());
        inner.0
    }

    /// What was decided once stays so; only what is held back is given up at last.
    fn become_so(&self, verdict: Verdict) {
        let waker = {
            let mut inner = self.lock();
            let given_up = (inner.0, verdict) == (Verdict::Held, Verdict::No);
            if inner.0 != Verdict::Unknown && !given_up {
                return;
            }
            inner.0 = verdict;
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Verdict, Option<Waker>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnswerBody {
    /// Once it is gone the client has time for its next request, and a body that nobody has wanted is given up.
    pub(super) fn new(body: Content, clock: Arc<Clock>) -> Self {
        Self { body, clock, wanted: None, _request: None }
    }

    /// With the answer of a target: `wanted` is the body that it may not have wanted, and `request` is under way until
    /// the answer is gone.
    pub(super) fn of_target(
        body: Incoming,
        clock: Arc<Clock>,
        wanted: Option<Arc<Wanted>>,
        request: UnderWay,
    ) -> Self {
        Self { body: Content::Target(body), clock, wanted, _request: Some(request) }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            Content::Target(body) => {
                let frame = ready!(Pin::new(body).poll_frame(cx));
                self.clock.passed();
                Poll::Ready(frame)
            }
            Content::Own(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            Content::Target(body) => body.is_end_stream(),
            Content::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Content::Target(body) => body.size_hint(),
            Content::Own(body) => body.size_hint(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.clock.idle();
        if let Some(wanted) = &self.wanted {
            wanted.become_so(Verdict::No);
        }
    }
}

/// How long a client waits for the target's 100 before its body is sent: many targets never send one.
const CONTINUE_TIME: Duration = Duration::from_secs(1);
