//! Complete responses of the admin ports.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::admin::BODY_TIME;

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

/// Reads the JSON body of a request.
pub(crate) async fn read_json<T: DeserializeOwned>(
    request: Request<Incoming>,
) -> Result<T, Response<Full<Bytes>>> {
    let body = Limited::new(request.into_body(), JSON_BODY_BYTES).collect();
    let Ok(Ok(body)) = tokio::time::timeout(BODY_TIME, body).await else {
        return Err(plain_text(StatusCode::BAD_REQUEST, "the body is missing or too long\n"));
    };
    serde_json::from_slice(&body.to_bytes())
        .map_err(|why| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n")))
}

/// Maximum length of a JSON body in bytes.
const JSON_BODY_BYTES: usize = 4096;
