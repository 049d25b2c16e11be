//! What each end of the call sends, as an HTTP body.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use tokio::sync::oneshot;

use super::super::codec::Chunk;
use super::super::link::Puller;

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
    /// Whatever the link has to say.
    Pull {
        /// The link's pull side.
        puller: Puller,
        /// Whether a status follows once the link is closed: a pod's does, an edge's does not.
        trailers: bool,
    },
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
                    let trailers = *trailers;
                    *self = Self::Refused;
                    if trailers {
                        let status = HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))]);
                        return Poll::Ready(Some(Ok(Frame::trailers(status))));
                    }
                }
            }
        }
    }
}

const GRPC_STATUS: http::HeaderName = http::HeaderName::from_static("grpc-status");
