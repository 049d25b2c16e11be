//! A client's requests: each is forwarded to the target, and its response back, before the next.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONNECTION;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use tracing::debug;

use crate::admission::denial::Denial;
use crate::admission::forward::headers;
use crate::admission::forward::idle_timer::IdleTimer;
use crate::admission::forward::message::{RequestBody, ResponseBody};
use crate::admission::forward::upstream::UpstreamSession;
use crate::admission::requests::{RequestRoute, RequestRouter};
use crate::admission::{AuthorizedRequest, DeniedRequest};
use crate::session_io::OpenSession;
use tunnel_base::metrics::in_flight_requests::InFlightGuard;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// The forwarding of a client's requests, one at a time.
pub(crate) struct RequestForwarder<'a> {
    pub(super) router: tokio::sync::Mutex<RequestRouter<'a>>,
    pub(super) upstream: UpstreamSession,
    /// The session after a switch to another protocol.
    pub(super) switched: Mutex<Option<OpenSession>>,
    pub(super) clock: Arc<IdleTimer>,
}

impl<'a> RequestForwarder<'a> {
    /// Drives the session. Must be called after each poll of hyper's server. Completes once the client may no longer be
    /// served.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let revoked = self.upstream.poll(cx);
        if self.clock.take_requested() {
            // Have hyper's server polled again, so that it detects the end of the client's stream.
            cx.waker().wake_by_ref();
        }
        revoked
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
        let (mut head, body) = request.into_parts();
        // A denied request with a body keeps `Connection: close`; otherwise hyper would have to read the whole body.
        let has_body = !body.is_end_stream();
        self.clock.on_head(has_body);
        let in_flight = self.upstream.context.metrics.requests.start(head.method.as_str(), head.uri.path());
        // hyper's buffer remains as large as a long head, so that is the last one on its connection.
        let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
        let long = self.clock.client.complete(target, &head.headers);
        let is_last = !matches!(long, Ok(false));
        let checked = long.and_then(|_| headers::check(&mut head));
        let mut answer = match self.forward(checked, head, body, in_flight).await {
            Ok(answer) => answer,
            Err(mut denied) => {
                // What this process refused to read of the body comes first.
                denied.denial = self.clock.client.refusal().unwrap_or(denied.denial);
                let mut answer = denied.answer();
                if !has_body {
                    answer.headers_mut().remove(CONNECTION);
                }
                answer.map(|body| ResponseBody::new(body, Arc::clone(&self.clock)))
            }
        };
        if is_last && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.clock.on_response_part();
        debug!(status = answer.status().as_u16(), "response sent");
        Ok(answer)
    }

    async fn forward(
        &self,
        checked: Result<(), Denial>,
        mut head: Parts,
        body: Incoming,
        in_flight: InFlightGuard,
    ) -> Result<Response<ResponseBody>, DeniedRequest> {
        let mut router = self.router.lock().await;
        let authorized = router.route(checked.map(|()| &head)).await?;
        let node = authorized.node().clone();
        let target = authorized.target().clone();
        let route = RequestRoute { user: authorized.access.user.clone(), node, target };
        // Convert the request. A client in HTTP/1.0 understands no informational responses.
        let method = head.method.clone();
        let is_new = head.version == Version::HTTP_11;
        let upgrades = headers::prepare_request(&mut head, &body);
        let waits = is_new && headers::expects_continue(&head.headers) && !body.is_end_stream();
        let (body, gate) = RequestBody::new(body, Arc::clone(&self.clock), waits);
        let mut request = Request::from_parts(head, body);
        let clock = Arc::clone(&self.clock);
        let permission = Arc::clone(&gate);
        hyper::ext::on_informational(&mut request, move |answer| {
            clock.target.on_informational();
            match answer.status() {
                StatusCode::CONTINUE => permission.open(),
                status if is_new => clock.add_interim(&headers::add_interim(status, answer.headers())),
                _ => {}
            }
        });
        let answer = self.send(&router, &route, authorized, request).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = self.switch(answer, upgrades, in_flight).await;
            return switched.map_err(|denial| router.failed(denial));
        }
        // Convert the response. The session is kept if hyper and the target agree where the next request starts: they
        // do not after a response in HTTP/1.0, or without the body that the target has not requested.
        let (mut head, body) = answer.into_parts();
        let is_old = head.version != Version::HTTP_11;
        let unasked = gate.answered(head.status.is_success());
        let prepared = self.clock.target.complete(0, &head.headers).and_then(|is_long| {
            if !is_long && !is_old && unasked.is_none() {
                self.upstream.keep(route);
            }
            headers::prepare_response(&mut head, &body, &method)
        });
        if let Err(denial) = prepared {
            self.upstream.close();
            return Err(router.failed(denial));
        }
        if unasked.is_some() {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let body = ResponseBody::of_target(body, Arc::clone(&self.clock), unasked, in_flight);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request over the session that is kept for its route, or over a new one.
    ///
    /// The target may close a kept session at the same time. Then a request of which nothing was sent goes to a new
    /// one. One that the target may have received is not repeated, because it may have had its effect.
    async fn send(
        &self,
        router: &RequestRouter<'a>,
        route: &RequestRoute,
        authorized: AuthorizedRequest,
        mut request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, DeniedRequest> {
        if let Some(sender) = self.upstream.reuse(route).await {
            request = match self.upstream.send(sender, request).await {
                Ok(answer) => return Ok(answer),
                Err((_, Some(unsent))) => unsent,
                Err((denial, None)) => return Err(router.failed(denial)),
            };
        }
        let opened = router.open(authorized).await?;
        let started = self.upstream.start(opened).await;
        let sender = started.map_err(|error| router.failed(Denial::UpstreamFailed(error.to_string())))?;
        let sent = self.upstream.send(sender, request).await;
        sent.map_err(|(denial, _)| router.failed(denial))
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
        headers::prepare_response(&mut head, &body, &Method::GET)?;
        opened.alive.hold_request(request);
        *self.switched.lock() = Some(opened);
        let body = ResponseBody::new(Bytes::new(), Arc::clone(&self.clock));
        Ok(Response::from_parts(head, body))
    }
}
