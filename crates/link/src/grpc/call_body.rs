//! What each end of the call sends, as an HTTP body.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use http::HeaderMap;
use http_body::Frame;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::Status;

use crate::link::Link;
use crate::plain::PlainRemote;
use tunnel_proto::codec::extended::to_message;
use tunnel_proto::codec::{EncodedMessage, encode};

/// The body that one end of the call sends.
#[derive(Debug, Default)]
pub(crate) enum CallBody {
    /// Nothing: the call was rejected.
    #[default]
    Refused,
    /// A heartbeat, until the server has answered and is known to be plain or not.
    Greeting {
        /// The heartbeat, until it is sent.
        first: Option<EncodedMessage>,
        /// Receives the stream to continue with.
        agreed: oneshot::Receiver<OutboundStream>,
    },
    /// The link's frames.
    Stream {
        /// The link's outbound side.
        outbound: OutboundStream,
        /// Whether a status follows once the link is closed: a server sends one, an edge does not.
        trailers: bool,
    },
    /// A complete response.
    Full(tonic::body::Body),
}

impl http_body::Body for CallBody {
    type Data = EncodedMessage;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<EncodedMessage>, Infallible>>> {
        loop {
            match &mut *self {
                Self::Refused => return Poll::Ready(None),
                Self::Full(answer) => {
                    let frame = ready!(Pin::new(answer).poll_frame(cx)).and_then(Result::ok);
                    return Poll::Ready(
                        frame.map(|frame| Ok(frame.map_data(|data| data.chain(Bytes::new())))),
                    );
                }
                Self::Greeting { first, agreed } => {
                    if let Some(first) = first.take() {
                        return Poll::Ready(Some(Ok(Frame::data(first))));
                    }
                    *self = match ready!(Pin::new(agreed).poll(cx)) {
                        Ok(outbound) => Self::Stream { outbound, trailers: false },
                        Err(_) => Self::Refused,
                    };
                }
                Self::Stream { outbound, trailers } => {
                    if let Some(chunk) = ready!(outbound.poll_message(cx)) {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    let last = trailers.then(|| status(&outbound.link));
                    *self = Self::Refused;
                    if let Some(last) = last {
                        return Poll::Ready(Some(Ok(Frame::trailers(last))));
                    }
                }
            }
        }
    }

    /// Returns true if the body is empty: a rejection's status is then the response's only HEADERS frame. grpc-go
    /// does not read the status of a response that continues after that frame.
    fn is_end_stream(&self) -> bool {
        match self {
            Self::Refused => true,
            Self::Full(answer) => answer.is_end_stream(),
            Self::Greeting { .. } | Self::Stream { .. } => false,
        }
    }
}

/// Returns the status with which a server ends a link: OK, unless another process has the edge's name.
fn status(link: &Link) -> HeaderMap {
    let taken = link.dismissed.get().map(Status::already_exists);
    let mut trailers = HeaderMap::new();
    // Fails only if the message cannot be a header. An encoded message always can.
    let _ = taken.unwrap_or_else(|| Status::ok("")).add_header(&mut trailers);
    trailers
}

/// The outbound side of a link: supplies what the stream sends next.
#[derive(Debug, Clone)]
pub(crate) struct OutboundStream {
    pub(crate) link: Arc<Link>,
    /// Represents the remote if that is plain.
    pub(crate) plain: Option<Arc<PlainRemote>>,
}

impl OutboundStream {
    /// Polls for the next message to send. Returns `None` once the link is closed.
    pub(crate) fn poll_message(&self, cx: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        if let Some(plain) = &self.plain {
            return plain.poll_message(cx);
        }
        let frame = ready!(self.link.poll_pull(cx, Instant::now()));
        Poll::Ready(frame.map(|frame| {
            let message = to_message(frame);
            self.link.count_sent(message.data.len());
            encode(message)
        }))
    }
}
