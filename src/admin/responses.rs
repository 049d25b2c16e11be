//! Complete responses of the admin ports.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;

/// The response to a request, or the one that refuses it.
pub(crate) type AdminAnswer = Result<Response<Full<Bytes>>, Response<Full<Bytes>>>;

pub(crate) fn method_not_allowed(methods: &'static str, why: &'static str) -> Response<Full<Bytes>> {
    let mut answer = plain_text(StatusCode::METHOD_NOT_ALLOWED, why);
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

pub(crate) fn not_found() -> Response<Full<Bytes>> {
    plain_text(StatusCode::NOT_FOUND, "not found\n")
}

pub(crate) fn plain_text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    text(status, body, "text/plain; charset=utf-8")
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>, kind: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

pub(crate) fn json(value: &impl Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(body) => text(StatusCode::OK, body, "application/json"),
        Err(error) => plain_text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}
