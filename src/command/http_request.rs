//! One HTTP/1 request of a command, over a stream of its own.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// The body of a response, or why it is not complete.
pub(crate) type ReadBody = Result<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// Sends a request, and reads the response with at most `max_bytes` of its body. Then the stream is closed, unless the
/// response accepts CONNECT: [`hyper::upgrade::on`] returns that stream.
///
/// # Cancel safety
///
/// Not cancel safe: the request may have been executed.
///
/// # Errors
///
/// Returns an error if there is no response.
pub(crate) async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
    max_bytes: usize,
) -> hyper::Result<Response<ReadBody>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Owns the sender, so that the connection ends with the response.
    let answer = async move {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, max_bytes).collect().await;
        Ok(Response::from_parts(head, body.map(|body| body.to_bytes())))
    };
    // The connection is driven at the same time. If it ends first, the sender returns the error.
    let (answer, _) = tokio::join!(answer, connection.with_upgrades());
    answer
}
