//! A client's requests, one after another, each on its way to the target and back.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Context;

use http::header::{CONNECTION, UPGRADE};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use tracing::debug;

use super::Router;
use super::body::{AnswerBody, Content, Upload, Wanted};
use super::clock::Clock;
use super::head;
use super::upstream::{Unanswered, Upstream};
use crate::drain::Drain;
use crate::frontend::{Denial, Denied, Granted};
use crate::telemetry::{Metrics, Requests, UnderWay};

/// A client's requests, one at a time.
pub(super) struct Exchange<R: Router> {
    router: tokio::sync::Mutex<R>,
    upstream: Upstream<R::Way>,
    /// What is left of HTTP once another protocol was agreed on.
    switched: Mutex<Option<Granted>>,
    clock: Arc<Clock>,
    requests: Requests,
}

impl<R: Router> Exchange<R> {
    pub(super) fn new(router: R, clock: Arc<Clock>, metrics: &Metrics, drain: &Drain) -> Self {
        let upstream = Upstream::new(metrics, drain);
        let (router, requests) = (tokio::sync::Mutex::new(router), metrics.requests.clone());
        Self { router, upstream, switched: Mutex::new(None), clock, requests }
    }

    /// Drives the session, and calls the router once an answer is complete. To be called after each poll of hyper's
    /// server.
    pub(super) fn poll(&self, cx: &mut Context<'_>) {
        self.upstream.poll(cx);
        if self.clock.take_asked() {
            // hyper's server is polled again, to watch for the client's end.
            cx.waker().wake_by_ref();
        }
        if self.clock.take_answered()
            && let Ok(router) = self.router.try_lock()
        {
            router.answered();
        }
    }

    /// Ends the session, if there is one; one that is not HTTP any more is given back.
    pub(super) fn end(self) -> Option<Granted> {
        self.upstream.close();
        self.switched.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<AnswerBody>, Infallible> {
        let (head, body) = request.into_parts();
        // Else hyper would have to read it to its end before the next request.
        let has_body = !body.is_end_stream();
        self.clock.asks(has_body);
        let request = self.requests.begin(head.method.as_str(), head.uri.path());
        let answer = match self.forward(head, body, request).await {
            Ok(answer) => answer,
            Err(Denied { denial, trusted, trace }) => {
                let mut answer = denial.answer(trusted, &trace);
                if !has_body {
                    answer.headers_mut().remove(CONNECTION);
                }
                answer.map(|body| AnswerBody::new(Content::Own(body.into()), Arc::clone(&self.clock)))
            }
        };
        self.clock.passed();
        debug!(status = answer.status().as_u16(), "answered");
        Ok(answer)
    }

    async fn forward(
        &self,
        mut head: Parts,
        body: Incoming,
        under_way: UnderWay,
    ) -> Result<Response<AnswerBody>, Denied> {
        let mut router = self.router.lock().await;
        let way = match head::check(&mut head) {
            Ok(()) => router.judge(Ok(&head)).await?,
            Err(denial) => router.judge(Err(denial)).await?,
        };
        let (method, version) = (head.method.clone(), head.version);
        let upgrades = head::pass_request(&mut head, &body);
        let waits = version == Version::HTTP_11 && head::expects_continue(&head.headers);
        let wanted = (waits && !body.is_end_stream()).then(Arc::<Wanted>::default);
        let mut request =
            Request::from_parts(head, Upload::new(body, Arc::clone(&self.clock), wanted.clone()));
        if let Some(wanted) = wanted.clone() {
            hyper::ext::on_informational(&mut request, move |informational| {
                if informational.status() == StatusCode::CONTINUE {
                    wanted.go_on();
                }
            });
        }
        let (sender, answer) = self.send(&mut router, &way, request).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = self.switch(answer, upgrades, under_way).await;
            return switched.map_err(|denial| router.failed(denial));
        }
        let (mut head, body) = answer.into_parts();
        // After an answer in HTTP/1.0, hyper would not know how to send the next request's body.
        let reusable = head.version == Version::HTTP_11;
        let last = wanted.as_ref().is_some_and(|wanted| wanted.answered(head.status.is_success()));
        self.upstream.keep((reusable && !last).then_some(way), sender);
        if let Err(why) = head::pass_answer(&mut head, &body, &method) {
            self.upstream.close();
            return Err(router.failed(Denial::Unanswered(why.to_owned())));
        }
        if last {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let body = AnswerBody::of_target(body, Arc::clone(&self.clock), wanted, under_way);
        Ok(Response::from_parts(head, body))
    }

    /// Sends a request over the session that there is, or over a new one. The target may end one that was kept just as
    /// it is asked: then the request is sent again, unless that may do something twice.
    async fn send(
        &self,
        router: &mut R,
        way: &R::Way,
        mut request: Request<Upload>,
    ) -> Result<(SendRequest<Upload>, Response<Incoming>), Denied> {
        let mut kept = self.upstream.reuse(way).await;
        loop {
            let again = kept.as_ref().and_then(|_| self.repeatable(&request));
            let fresh = kept.is_none();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => {
                    let opened = router.open(way).await?;
                    let started = self.upstream.start(opened).await;
                    started.map_err(|error| router.failed(Denial::Unanswered(error.to_string())))?
                }
            };
            let denial = match self.upstream.send(&mut sender, request).await {
                Ok(answer) => return Ok((sender, answer)),
                Err(Unanswered::Unsent(unsent)) if !fresh => {
                    request = *unsent;
                    continue;
                }
                Err(Unanswered::Unsent(_)) => Denial::Unanswered("it has ended the connection".to_owned()),
                Err(Unanswered::Silence(why)) => match again {
                    Some(again) => {
                        request = again;
                        continue;
                    }
                    None => Denial::Unanswered(why),
                },
                Err(Unanswered::Body) => {
                    Denial::Request("its body ends early, or is not chunked as it should be")
                }
                Err(Unanswered::Target(why)) => Denial::Unanswered(why),
            };
            return Err(router.failed(denial));
        }
    }

    /// Takes the session from hyper: what passes from now on is not HTTP.
    async fn switch(
        &self,
        answer: Response<Incoming>,
        requested: bool,
        request: UnderWay,
    ) -> Result<Response<AnswerBody>, Denial> {
        let (mut head, body) = answer.into_parts();
        let opened = self.upstream.switch().await;
        let Some(mut opened) = opened else {
            return Err(Denial::Unanswered("the session is over".to_owned()));
        };
        if !requested {
            let why = "it changes to another protocol, which nobody asked for";
            opened.break_off("bad_answer", why);
            return Err(Denial::Unanswered(why.to_owned()));
        }
        head::pass_answer(&mut head, &body, &Method::GET)
            .map_err(|why| Denial::Unanswered(why.to_owned()))?;
        opened.alive.carries(request);
        *self.switched.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        let body = AnswerBody::new(Content::Own(Full::default()), Arc::clone(&self.clock));
        Ok(Response::from_parts(head, body))
    }

    /// A copy of a request that its target may get twice, RFC 9110 9.2.2. What is asked of another protocol its method
    /// does not tell: `kubectl exec` asks with GET.
    fn repeatable(&self, request: &Request<Upload>) -> Option<Request<Upload>> {
        let upgrades = request.headers().contains_key(UPGRADE);
        if upgrades || !request.method().is_idempotent() || !request.body().is_end_stream() {
            return None;
        }
        let mut copy = Request::new(Upload::empty(Arc::clone(&self.clock)));
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        Some(copy)
    }
}
