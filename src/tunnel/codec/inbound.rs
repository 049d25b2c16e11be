//! The bytes of a call as they come, and how it ended.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;

use crate::telemetry::said;

/// The next bytes, or in words how the stream ended. Cancel safe.
pub async fn next_piece(mut incoming: Pin<&mut Incoming>) -> Result<Bytes, String> {
    match poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
        None => Err(END.into()),
        Some(Err(e)) => Err(cause(&e)),
        Some(Ok(frame)) => frame.into_data().map_err(|frame| {
            let status = frame.trailers_ref().and_then(tonic::Status::from_header_map);
            let failed = status.filter(|s| s.code() != tonic::Code::Ok);
            failed.map_or_else(|| END.into(), |s| said(s.message()))
        }),
    }
}

/// An error with all its causes, for people. It may hold a peer's words.
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        // As when a process dies: what the libraries say of it is about TLS, and helps nobody.
        if source.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return "the connection was broken off".into();
        }
        text = format!("{text}: {source}");
        at = source.source();
    }
    said(&text)
}

const END: &str = "end of stream";

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("reading failed")]
    struct Reading(#[source] io::Error);

    #[test]
    fn a_connection_that_broke_off_is_said_in_plain_words_and_all_else_with_its_causes() {
        let broken = io::Error::new(io::ErrorKind::UnexpectedEof, "no close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(broken)), "the connection was broken off");
        assert_eq!(cause(&Reading(io::Error::other("a disk"))), "reading failed: a disk");
    }
}
