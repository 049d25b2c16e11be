//! The bytes of a call as they come, and how it ended.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;
use tonic::{Code, Status};

use crate::telemetry::said;

/// How a stream ended, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// By the far end, or with the connection.
    Closed(String),
    /// By the far end, with the status that says that another process has our name.
    NameTaken(String),
}

/// The next bytes, or how the stream ended. Cancel safe.
pub(in crate::protocol) async fn next_piece(mut incoming: Pin<&mut Incoming>) -> Result<Bytes, Ended> {
    match poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
        None => Err(Ended::Closed(END.into())),
        Some(Err(e)) => Err(Ended::Closed(cause(&e))),
        Some(Ok(frame)) => frame.into_data().map_err(|frame| {
            let status = frame.trailers_ref().and_then(Status::from_header_map);
            match status {
                Some(status) if status.code() == Code::AlreadyExists => {
                    Ended::NameTaken(said(status.message()))
                }
                Some(status) if status.code() != Code::Ok => Ended::Closed(said(status.message())),
                _ => Ended::Closed(END.into()),
            }
        }),
    }
}

/// An error with all its causes, for people. It may hold a peer's words.
pub(in crate::protocol) fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        // As when a process dies: what the libraries say of it is about TLS, and helps nobody.
        if source.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return BROKEN_OFF.into();
        }
        text = format!("{text}: {source}");
        at = source.source();
    }
    // HTTP/2 does not show the socket's error as a source of its own, only its text.
    if text.contains(NO_CLOSE_NOTIFY) { BROKEN_OFF.into() } else { said(&text) }
}

/// As when a process dies or a line is cut.
const BROKEN_OFF: &str = "the connection was broken off";
/// What rustls says of that, followed by the address of a page for programmers.
const NO_CLOSE_NOTIFY: &str = "without sending TLS close_notify";
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
        let hidden = io::Error::other("closed without sending TLS close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(hidden)), "the connection was broken off");
        assert_eq!(cause(&Reading(io::Error::other("a disk"))), "reading failed: a disk");
    }
}
