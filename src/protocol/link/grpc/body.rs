//! What each end of the call sends, as an HTTP body.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::HeaderMap;
use http_body::Frame;
use tokio::sync::oneshot;
use tonic::Status;

use crate::protocol::link::Puller;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::wire::codec::Chunk;

/// What one end of the call sends.
#[derive(Debug, Default)]
pub(super) enum CallBody {
    /// Nothing: the call was refused.
    #[default]
    Refused,
    /// A heartbeat, until the pod has answered and the dialect is known.
    Greeting {
        /// The heartbeat, until it is sent.
        first: Option<Chunk>,
        /// What to go on with.
        agreed: oneshot::Receiver<Puller>,
    },
    /// The link's frames.
    Pull {
        /// The link's pull side.
        puller: Puller,
        /// Whether a status follows once the link is closed: a pod's does, an edge's does not.
        trailers: bool,
    },
    /// One whole answer.
    Whole(tonic::body::Body),
}

impl http_body::Body for CallBody {
    type Data = Chunk;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Chunk>, Infallible>>> {
        loop {
            match &mut *self {
                Self::Refused => return Poll::Ready(None),
                Self::Whole(answer) => {
                    let frame = ready!(Pin::new(answer).poll_frame(cx)).and_then(Result::ok);
                    return Poll::Ready(frame.map(|frame| Ok(frame.map_data(Chunk::from))));
                }
                Self::Greeting { first, agreed } => {
                    if let Some(first) = first.take() {
                        return Poll::Ready(Some(Ok(Frame::data(first))));
                    }
                    *self = match ready!(Pin::new(agreed).poll(cx)) {
                        Ok(puller) => Self::Pull { puller, trailers: false },
                        Err(_) => Self::Refused,
                    };
                }
                Self::Pull { puller, trailers } => {
                    if let Some(chunk) = ready!(puller.poll_message(cx)) {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    let last = trailers.then(|| status(&puller.sender));
                    *self = Self::Refused;
                    if let Some(last) = last {
                        return Poll::Ready(Some(Ok(Frame::trailers(last))));
                    }
                }
            }
        }
    }
}

/// How a pod ends a link: well, unless its name is another's.
fn status(link: &LinkSender) -> HeaderMap {
    let taken = link.dismissed().map(Status::already_exists);
    let mut trailers = HeaderMap::new();
    // Fails only for a message that cannot be a header, and every one can once it is encoded.
    let _ = taken.unwrap_or_else(|| Status::ok("")).add_header(&mut trailers);
    trailers
}
