//! The incoming bytes of a call, and its end.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;
use tonic::{Code, Status};

use crate::telemetry::printable;

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnded {
    /// The far end closed it, or the connection broke: the cause for people.
    Closed(String),
    /// The far end closed it because another process has this one's name.
    NameTaken(String),
}

/// The next bytes, or how the stream ended. Cancel safe.
pub(in crate::protocol) async fn next_piece(mut incoming: Pin<&mut Incoming>) -> Result<Bytes, StreamEnded> {
    match poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
        None => Err(StreamEnded::Closed(END.into())),
        Some(Err(e)) => Err(StreamEnded::Closed(cause(&e))),
        Some(Ok(frame)) => frame.into_data().map_err(|frame| {
            let status = frame.trailers_ref().and_then(Status::from_header_map);
            match status {
                Some(status) if status.code() == Code::AlreadyExists => {
                    StreamEnded::NameTaken(printable(status.message()))
                }
                Some(status) if status.code() != Code::Ok => StreamEnded::Closed(printable(status.message())),
                _ => StreamEnded::Closed(END.into()),
            }
        }),
    }
}

/// An error with all its causes, for people. It may hold text of a peer.
pub(in crate::protocol) fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        // The end of a process or of a line: the libraries' text is only about TLS.
        if source.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return BROKEN_OFF.into();
        }
        text = format!("{text}: {source}");
        at = source.source();
    }
    // h2 gives the socket's error as text only, not as a source.
    if text.contains(NO_CLOSE_NOTIFY) { BROKEN_OFF.into() } else { printable(&text) }
}

/// The text for the end of a process or of a line.
const BROKEN_OFF: &str = "the connection was broken off";
/// The beginning of rustls' text for it, which goes on with a URL.
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
