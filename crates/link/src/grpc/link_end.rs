//! Why a link ended.

use std::io;
use std::time::Duration;

use http::HeaderMap;
use tonic::{Code, Status};

use crate::liveness::STALLED;
use tunnel_proto::codec::DecodeError;
use tunnel_proto::printable::printable;

/// The reason why a link ended, returned by [`LinkReader::next`](crate::link_reader::LinkReader::next).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkEnd {
    /// The remote ended the stream, or the connection broke.
    #[error("the remote end closed the link: {0}")]
    Closed(String),
    /// The server ended the link because another process has our name.
    #[error("{0}")]
    NameTaken(String),
    /// Nothing was received for that time.
    #[error("nothing was received for {0:?}")]
    TimedOut(Duration),
    /// The remote sends but does not read.
    #[error("the remote end has read nothing for {STALLED:?}")]
    WriteStalled,
    /// Closed at this end: replaced by a newer link, or shutting down.
    #[error("closed by this end")]
    ClosedLocally,
    /// The link was unresponsive and a backup link answered first.
    #[error("a backup link answered first")]
    ReplacedByBackup,
    /// The remote violated the protocol.
    #[error("protocol violation: {0}")]
    ProtocolError(#[from] DecodeError),
}

impl LinkEnd {
    /// The ordinary end of the stream, without a status.
    pub(crate) fn of_stream() -> Self {
        Self::Closed(END.into())
    }

    /// Returns why the stream ended whose last frame has these trailers.
    pub(crate) fn of_trailers(trailers: Option<&HeaderMap>) -> Self {
        match trailers.and_then(Status::from_header_map) {
            Some(status) if status.code() == Code::AlreadyExists => {
                Self::NameTaken(printable(status.message()))
            }
            Some(status) if status.code() != Code::Ok => Self::Closed(printable(status.message())),
            _ => Self::of_stream(),
        }
    }

    /// Returns a fixed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Closed(_) => "closed_by_remote",
            Self::NameTaken(_) => "name_in_use",
            Self::TimedOut(_) => "timed_out",
            Self::WriteStalled => "write_stalled",
            Self::ClosedLocally => "closed_locally",
            Self::ReplacedByBackup => "replaced_by_backup",
            Self::ProtocolError(_) => "protocol_error",
        }
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
const END: &str = "end of stream";

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
