//! The bytes of a call as they come, and how it ended.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;

/// The next bytes, or in words how the stream ended. Cancel safe.
pub async fn next_piece(mut incoming: Pin<&mut Incoming>) -> Result<Bytes, String> {
    match poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
        None => Err(END.into()),
        Some(Err(e)) => Err(cause(&e)),
        Some(Ok(frame)) => frame.into_data().map_err(|frame| {
            let status = frame.trailers_ref().and_then(tonic::Status::from_header_map);
            let failed = status.filter(|s| s.code() != tonic::Code::Ok);
            failed.map_or_else(|| END.into(), |s| s.message().to_owned())
        }),
    }
}

/// An error with all its causes, for people.
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        text = format!("{text}: {source}");
        at = source.source();
    }
    text
}

const END: &str = "end of stream";
