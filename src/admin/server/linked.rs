//! Requests that a user's program sends over its link, to the server of that link: who may send which, and their
//! bounds.
//!
//! The API is that of the admin socket. Users named in `admins` of `[server.clients]` may send the requests below. Each
//! user may list the nodes that she may reach, ask who she is, and remove her device.

use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Collected, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};

use crate::admin::requester::{AdminRequest, AdminRequester, LinkedUser};
use crate::admin::responses::{AdminResponse, not_found, plain_text};
use crate::admin::{AdminContext, HEAD_BYTES, HEAD_TIME};
use tunnel_base::limited;
use tunnel_base::logging::AUDIT;
use tunnel_base::metrics::Door;
use tunnel_base::silence::unless_silent;
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::printable::printable;

impl AdminContext {
    /// Answers one request over the link of a user's program. Returns once the answer is sent, the session has ended,
    /// or nothing was read, found or sent for [`REQUEST_TIME`].
    pub(crate) async fn serve_linked(&self, session: Session, user: LinkedUser) {
        let user = Arc::new(user);
        let answer = |request| {
            let answered = self.answer_linked(request, user.clone());
            Box::pin(async { Ok::<_, Infallible>(answered.await) })
        };
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(HEAD_BYTES);
        http.keep_alive(false).half_close(true);
        let io = TokioIo::new(ChunkStreamIo::new(session));
        let mut connection = http.serve_connection(io, service_fn(answer));
        let served = unless_silent(REQUEST_TIME, poll_fn(|cx| connection.poll_without_shutdown(cx))).await;
        let why = match served {
            Some(Ok(())) => SessionError::new(ErrorCode::NoError, "the request is answered"),
            Some(Err(error)) => SessionError::new(ErrorCode::ProtocolError, error),
            None => SessionError::new(ErrorCode::Cancelled, "the request makes no progress"),
        };
        // What is written is still delivered, in the background.
        connection.into_parts().io.into_inner().into_parts().0.break_off(why);
    }

    /// Returns the response to a request, and logs both.
    async fn answer_linked(&self, request: Request<Incoming>, user: Arc<LinkedUser>) -> AdminResponse {
        let method = request.method().clone();
        let path = request.uri().path().to_owned();
        let answer = match path.as_str() {
            _ if user.is_over_rate => plain_text(StatusCode::TOO_MANY_REQUESTS, OVER_RATE),
            path if !OFFERED.contains(&(&method, path)) => not_found(),
            path if !FOR_ALL.contains(&path) && !user.is_admin() => {
                plain_text(StatusCode::FORBIDDEN, user.refusal())
            }
            _ => {
                let requester = &AdminRequester::Linked(user.clone());
                self.answer_at_once(AdminRequest { http: request, requester }).await
            }
        };
        let answer = bounded(answer, MAX_ANSWER).await;
        let status = answer.status().as_u16();
        let why = refusal_text(&answer);
        let LinkedUser { device, from, .. } = &*user;
        // Each change of rights has a line. Lists and refusals have a few, and the others are summed up.
        let may_log = match answer.status() {
            done if done.is_success() && method == Method::POST => true,
            done if done.is_success() => self.metrics.refusals.may_log_about("admin_request", &device.user),
            StatusCode::TOO_MANY_REQUESTS => self.metrics.refuse(USERS, "overloaded", from.ip()),
            StatusCode::FORBIDDEN => self.metrics.refuse(USERS, "forbidden", from.ip()),
            _ => self.metrics.refuse(USERS, "bad_request", from.ip()),
        };
        limited!(
            may_log => info, target: AUDIT, actor = %device, user = %device.user, device = %device.device, remote_addr = %from, %method,
            path = printable(&path), status, reason = why, "admin request over a link"
        );
        answer.map(Full::new)
    }
}

/// Returns a response whose body is complete, and has at most `most` bytes.
async fn bounded(answer: AdminResponse, most: usize) -> Response<Bytes> {
    let (head, body) = answer.into_parts();
    let Ok(body) = body.collect().await.map(Collected::to_bytes);
    if body.len() <= most {
        return Response::from_parts(head, body);
    }
    let why = format!(
        "the answer has {} bytes, over a link at most {most}; ask at the server's admin socket\n",
        body.len()
    );
    let mut refused = Response::new(why.into());
    *refused.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    refused
}

/// Returns the reason in a response that grants nothing.
fn refusal_text(answer: &Response<Bytes>) -> Option<String> {
    (!answer.status().is_success()).then(|| printable(String::from_utf8_lossy(answer.body()).trim_end()))
}

/// The requests of admins.
const OFFERED: [(&Method, &str); 11] = [
    (&Method::GET, "/whoami"),
    (&Method::POST, "/leave"),
    (&Method::GET, "/nodes"),
    (&Method::GET, "/status"),
    (&Method::GET, "/invitations"),
    (&Method::POST, "/invitations"),
    (&Method::POST, "/revocations"),
    (&Method::GET, "/grants"),
    (&Method::POST, "/grants"),
    (&Method::POST, "/grants/revoke"),
    (&Method::POST, "/sessions/end"),
];
/// The paths of other users.
const FOR_ALL: [&str; 3] = ["/nodes", "/whoami", "/leave"];
/// Where refused requests are counted: like refused sessions of users' links.
const USERS: Door = Door::Listener("clients");
const OVER_RATE: &str = "user has sent too many requests within a second; try again\n";
/// Maximum time without progress of a request or its answer, which a slow line may carry for minutes.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// Maximum size of an answer in bytes: the nodes of a large cloud.
const MAX_ANSWER: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_that_is_too_large_becomes_an_error_that_says_so() {
        let answer = |most| bounded(plain_text(StatusCode::OK, "12345"), most);
        assert_eq!(answer(5).await.body(), "12345");
        let refused = answer(4).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(
            refusal_text(&refused).unwrap(),
            "the answer has 5 bytes, over a link at most 4; ask at the server's admin socket"
        );
    }
}
