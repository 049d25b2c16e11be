//! A client's requests: each is forwarded to the target, and its response back, before the next.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, UPGRADE};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tracing::debug;

use crate::listener::admission::{AuthorizedRequest, DeniedRequest, ListenerContext};
use crate::listener::denial::Denial;
use crate::listener::forward::headers;
use crate::listener::forward::idle_timer::IdleTimer;
use crate::listener::forward::message::{ContinueGate, RequestBody, ResponseBody};
use crate::listener::forward::upstream::{InformationalLimit, UpstreamError, UpstreamSession};
use crate::listener::requests::{RequestRoute, RequestRouter};
use crate::session_io::OpenSession;
use tunnel_base::metrics::in_flight_requests::{InFlightGuard, InFlightRequests};
use tunnel_net::limiter::Source;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// The forwarding of a client's requests, one at a time.
pub(crate) struct RequestForwarder<'a> {
    pub(super) router: tokio::sync::Mutex<RequestRouter<'a>>,
    upstream: UpstreamSession,
    /// The session after a switch to another protocol.
    switched: Mutex<Option<OpenSession>>,
    clock: Arc<IdleTimer>,
    requests: InFlightRequests,
    /// The end of the next request's URL, if hyper cannot represent all of it.
    pub(super) url_end: Mutex<Option<Bytes>>,
}

impl<'a> RequestForwarder<'a> {
    pub(crate) fn new(
        router: RequestRouter<'a>,
        clock: Arc<IdleTimer>,
        context: &ListenerContext,
        source: Source,
    ) -> Self {
        let upstream = UpstreamSession::new(context, source);
        let router = tokio::sync::Mutex::new(router);
        let requests = context.metrics.requests.clone();
        let switched = Mutex::new(None);
        let url_end = Mutex::new(None);
        Self { router, upstream, switched, clock, requests, url_end }
    }

    /// Drives the session, and notifies the router once a response is complete. Must be called after each poll of
    /// hyper's server. Completes once the client may no longer be served.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.upstream.poll(cx);
        if self.clock.take_requested() {
            // Have hyper's server polled again, so that it detects the end of the client's stream.
            cx.waker().wake_by_ref();
        }
        if self.clock.take_answered()
            && let Ok(router) = self.router.try_lock()
        {
            router.answered();
        }
        if self.clock.take_begun()
            && let Ok(router) = self.router.try_lock()
        {
            router.begun();
        }
        self.upstream.poll_revoked(cx)
    }

    /// Ends the session, if there is one. A session that switched to another protocol is returned instead.
    pub(crate) fn end(self) -> Option<OpenSession> {
        self.upstream.close();
        self.switched.into_inner()
    }

    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<ResponseBody>, Infallible> {
        let (head, body) = request.into_parts();
        // A denied request with a body keeps `Connection: close`; otherwise hyper would have to read the whole body.
        let has_body = !body.is_end_stream();
        self.clock.on_head(has_body);
        let request = self.requests.start(head.method.as_str(), head.uri.path());
        let answer = match self.forward(head, body, request).await {
            Ok(answer) => answer,
            Err(denied) => {
                let mut answer = denied.answer();
                if !has_body {
                    answer.headers_mut().remove(CONNECTION);
                }
                answer.map(|body| ResponseBody::new(body, Arc::clone(&self.clock)))
            }
        };
        self.clock.on_response_part();
        debug!(status = answer.status().as_u16(), "response sent");
        Ok(answer)
    }

    async fn forward(
        &self,
        mut head: Parts,
        body: Incoming,
        under_way: InFlightGuard,
    ) -> Result<Response<ResponseBody>, DeniedRequest> {
        let mut router = self.router.lock().await;
        let checked = headers::check(&mut head);
        let authorized = router.route(checked.map(|()| &head)).await?;
        let route = RequestRoute::of(&authorized);
        let method = head.method.clone();
        let version = head.version;
        let upgrades = headers::prepare_request(&mut head, &body);
        let waits = version == Version::HTTP_11 && headers::expects_continue(&head.headers);
        let continue_gate = (waits && !body.is_end_stream()).then(Arc::<ContinueGate>::default);
        let mut request =
            Request::from_parts(head, RequestBody::new(body, Arc::clone(&self.clock), continue_gate.clone()));
        let informational = Arc::new(InformationalLimit::default());
        let counted = Arc::clone(&informational);
        let gate = continue_gate.clone();
        let clock = (version == Version::HTTP_11).then(|| Arc::clone(&self.clock));
        hyper::ext::on_informational(&mut request, move |answer| {
            counted.count();
            match answer.status() {
                StatusCode::CONTINUE => gate.iter().for_each(|continue_gate| continue_gate.on_continue()),
                status => {
                    clock
                        .iter()
                        .for_each(|clock| clock.add_interim(&headers::add_interim(status, answer.headers())));
                }
            }
        });
        let (sender, answer) = self.send(&router, &route, authorized, request, &informational).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = self.switch(answer, upgrades, under_way).await;
            return switched.map_err(|denial| router.failed(denial));
        }
        let (mut head, body) = answer.into_parts();
        // After a response in HTTP/1.0, hyper would not know how to send the next request's body.
        let reusable = head.version == Version::HTTP_11;
        let last = continue_gate
            .as_ref()
            .is_some_and(|continue_gate| continue_gate.answered(head.status.is_success()));
        self.upstream.keep((reusable && !last).then_some(route), sender);
        if let Err(why) = headers::prepare_response(&mut head, &body, &method) {
            self.upstream.close();
            return Err(router.failed(Denial::UpstreamFailed(why.to_owned())));
        }
        if last {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let body = ResponseBody::of_target(body, Arc::clone(&self.clock), continue_gate, under_way);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request over the current session or a new one.
    ///
    /// The target may close a reused session at the same time. Then the request is sent again if it is idempotent or
    /// was not sent.
    async fn send(
        &self,
        router: &RequestRouter<'a>,
        route: &RequestRoute,
        authorized: AuthorizedRequest,
        mut request: Request<RequestBody>,
        informational: &Arc<InformationalLimit>,
    ) -> Result<(SendRequest<RequestBody>, Response<Incoming>), DeniedRequest> {
        let url_end = self.url_end.lock().take();
        let mut kept = self.upstream.reuse(route).await;
        if url_end.is_some() {
            kept = None;
            self.upstream.close();
        }
        if let Some(mut sender) = kept {
            let again = self.retry_copy(&request);
            request = match (self.upstream.send(&mut sender, request, informational).await, again) {
                (Ok(answer), _) => return Ok((sender, answer)),
                (Err(UpstreamError::Unsent(unsent)), _) => *unsent,
                (Err(UpstreamError::Silence(_)), Some(again)) => again,
                (Err(error), _) => return Err(router.failed(error.into())),
            };
        }
        let opened = router.open(authorized).await?;
        let started = self.upstream.start(opened, url_end).await;
        let mut sender = started.map_err(|error| router.failed(Denial::UpstreamFailed(error.to_string())))?;
        match self.upstream.send(&mut sender, request, informational).await {
            Ok(answer) => Ok((sender, answer)),
            Err(error) => Err(router.failed(error.into())),
        }
    }

    /// Takes the session from hyper, because the following bytes are not HTTP.
    async fn switch(
        &self,
        answer: Response<Incoming>,
        requested: bool,
        request: InFlightGuard,
    ) -> Result<Response<ResponseBody>, Denial> {
        let (mut head, body) = answer.into_parts();
        let opened = self.upstream.switch().await;
        let Some(mut opened) = opened else {
            return Err(Denial::UpstreamFailed("the session has ended".to_owned()));
        };
        if !requested {
            let why = "it switched to another protocol without a request";
            opened.break_off("upstream_invalid", SessionError::new(ErrorCode::Cancelled, why));
            return Err(Denial::UpstreamFailed(why.to_owned()));
        }
        headers::prepare_response(&mut head, &body, &Method::GET)
            .map_err(|why| Denial::UpstreamFailed(why.to_owned()))?;
        opened.alive.hold_request(request);
        *self.switched.lock() = Some(opened);
        let body = ResponseBody::new(Bytes::new(), Arc::clone(&self.clock));
        Ok(Response::from_parts(head, body))
    }

    /// Returns a copy of a request that the target may receive twice, or `None` (RFC 9110, section 9.2.2).
    ///
    /// An upgrade request is never repeated, because its method does not show its effect: `kubectl exec` uses GET.
    fn retry_copy(&self, request: &Request<RequestBody>) -> Option<Request<RequestBody>> {
        let upgrades = request.headers().contains_key(UPGRADE);
        if upgrades || !request.method().is_idempotent() || !request.body().is_end_stream() {
            return None;
        }
        let mut copy = Request::new(RequestBody::empty(Arc::clone(&self.clock)));
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        Some(copy)
    }
}
