//! Complete responses of the admin ports.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

/// A response in one piece.
pub(crate) type AdminResponse = Response<Full<Bytes>>;

/// A response that is not ready yet.
pub(crate) type AdminResponseFuture<'a> = BoxFuture<'a, AdminResponse>;

/// The response to a request, or the one that refuses it.
pub(crate) type AdminAnswer = Result<AdminResponse, AdminResponse>;

pub(crate) fn method_not_allowed(methods: &'static str, why: &'static str) -> AdminResponse {
    let mut answer = plain_text(StatusCode::METHOD_NOT_ALLOWED, why);
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

pub(crate) fn not_found() -> AdminResponse {
    plain_text(StatusCode::NOT_FOUND, "not found\n")
}

pub(crate) fn plain_text(status: StatusCode, body: impl Into<Bytes>) -> AdminResponse {
    text(status, body, "text/plain; charset=utf-8")
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>, kind: &'static str) -> AdminResponse {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

pub(crate) fn json(value: &impl Serialize) -> AdminResponse {
    match serde_json::to_vec(value) {
        Ok(body) => text(StatusCode::OK, body, "application/json"),
        Err(error) => plain_text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

/// Reads the body of a request. Returns `None` if it is longer than `most` bytes, or arrives too slowly.
pub(crate) async fn read_body(request: Request<Incoming>, most: usize) -> Option<Bytes> {
    let body = Limited::new(request.into_body(), most).collect();
    Some(timeout(BODY_TIME, body).await.ok()?.ok()?.to_bytes())
}

/// Reads the JSON body of a request.
pub(crate) async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, AdminResponse> {
    let Some(body) = read_body(request, JSON_BODY_BYTES).await else {
        return Err(plain_text(StatusCode::BAD_REQUEST, "the body is missing or too long\n"));
    };
    serde_json::from_slice(&body).map_err(|why| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n")))
}

/// Maximum length of a JSON body in bytes.
const JSON_BODY_BYTES: usize = 4096;
/// Timeout for a body of a few bytes.
const BODY_TIME: Duration = Duration::from_secs(5);
