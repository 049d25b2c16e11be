//! The incoming bytes of a call, and its end.

use std::io;

use http::HeaderMap;
use tonic::{Code, Status};

use tunnel_base::logging::printable::printable;

/// The reason why the gRPC stream of a link ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrpcStreamEnd {
    /// The remote end closed it, or the connection broke; with a readable cause.
    Closed(String),
    /// The remote answered ALREADY_EXISTS: another live process has this one's name, or the caller dialled itself. An
    /// edge then waits until the name is free.
    NameTaken(String),
}

/// Returns how the stream ended whose last frame has these trailers.
pub(super) fn end_of(trailers: Option<&HeaderMap>) -> GrpcStreamEnd {
    match trailers.and_then(Status::from_header_map) {
        Some(status) if status.code() == Code::AlreadyExists => {
            GrpcStreamEnd::NameTaken(printable(status.message()))
        }
        Some(status) if status.code() != Code::Ok => GrpcStreamEnd::Closed(printable(status.message())),
        _ => GrpcStreamEnd::Closed(END.into()),
    }
}

/// Formats an error with all its causes for people. The text may contain the remote's text.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        // The remote process or the line died; the libraries' text is only about TLS.
        if source.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return CONNECTION_ABORTED.into();
        }
        text = format!("{text}: {source}");
        at = source.source();
    }
    // h2 reports the socket's error as text only, not as a source, and an ordinary end of the stream as an error.
    if text.contains(NO_CLOSE_NOTIFY) {
        CONNECTION_ABORTED.into()
    } else if text.contains(CANCELLED) {
        END.into()
    } else {
        printable(&text)
    }
}

/// Text for a remote process or a line that died.
const CONNECTION_ABORTED: &str = "connection aborted";
/// The beginning of rustls' text for it, which continues with a URL.
const NO_CLOSE_NOTIFY: &str = "without sending TLS close_notify";
/// h2's text for the ordinary end of a stream that its remote end has dropped (RFC 9113, CANCEL).
const CANCELLED: &str = "stream no longer needed";
pub(super) const END: &str = "end of stream";

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("reading failed")]
    struct Reading(#[source] io::Error);

    #[test]
    fn a_broken_connection_is_reported_in_plain_words_and_all_else_with_its_causes() {
        let broken = io::Error::new(io::ErrorKind::UnexpectedEof, "no close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(broken)), "connection aborted");
        let hidden = io::Error::other("closed without sending TLS close_notify: https://example.org/why");
        assert_eq!(cause(&Reading(hidden)), "connection aborted");
        assert_eq!(cause(&Reading(io::Error::other("a disk"))), "reading failed: a disk");
    }
}
