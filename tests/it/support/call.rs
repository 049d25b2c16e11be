//! One end of the gRPC call that says and expects single messages.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body as _, Frame as Piece};
use hyper::body::Incoming;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use tunnel_base::names::{Instance, NodeName, SessionId};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{Decoder, encode, from_message, to_message};
use tunnel_proto::frame::{Category, Frame, FrameKind, Remote, SessionFrame};
use tunnel_proto::hello::Hello;

use super::assert_eventually;

/// A link whose one end is the test. Dropping it ends the stream.
pub(crate) struct Call {
    /// Whose link.
    pub(crate) node: NodeName,
    /// The other end's metadata.
    pub(crate) headers: HeaderMap,
    say: mpsc::Sender<Bytes>,
    hear: Incoming,
    reader: Decoder,
    trailers: Option<HeaderMap>,
    answer: Option<(oneshot::Sender<Response<ReceivedFrame>>, mpsc::Receiver<Bytes>)>,
}

/// What the test says, as a body.
pub(crate) struct ReceivedFrame(mpsc::Receiver<Bytes>);

impl Call {
    /// A call that the test made.
    pub(crate) fn made(node: NodeName, headers: HeaderMap, say: mpsc::Sender<Bytes>, hear: Incoming) -> Self {
        Self { node, headers, say, hear, reader: Decoder::default(), trailers: None, answer: None }
    }

    /// A call that the test has got, and has not answered yet.
    pub(crate) fn got(
        headers: HeaderMap,
        hear: Incoming,
        answer: oneshot::Sender<Response<ReceivedFrame>>,
    ) -> Self {
        // A pod speaks of no node when it calls.
        let node = Hello::from_request(&headers).map_or_else(|_| NodeName::none(), |hello| hello.node);
        let (say, said) = said();
        let answer = Some((answer, said.0));
        Self { node, headers, say, hear, reader: Decoder::default(), trailers: None, answer }
    }

    /// Sends the response headers: of a process that speaks extended, or of a plain one.
    pub(crate) fn answer(&mut self, instance: Option<Instance>) {
        self.answer_as(instance.map(Hello::response).unwrap_or_default());
    }

    /// Sends these response headers.
    pub(crate) fn answer_as(&mut self, headers: HeaderMap) {
        let (answer, said) = self.answer.take().unwrap();
        let mut response = Response::new(ReceivedFrame(said));
        *response.headers_mut() = headers;
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        answer.send(response).ok().expect("a caller that waits");
    }

    /// Says a message.
    pub(crate) async fn send(&self, message: StreamMsg) {
        self.send_bytes(encode(message).to_bytes()).await;
    }

    /// Sends bytes as they are. Whether the link took them.
    pub(crate) async fn send_bytes(&self, bytes: Bytes) -> bool {
        self.say.send(bytes).await.is_ok()
    }

    /// Says something about a session, in the extended dialect.
    pub(crate) async fn say(&self, id: SessionId, word: SessionFrame) {
        self.send(self.message(id, word)).await;
    }

    /// The message that says something about a session in the extended dialect.
    pub(crate) fn message(&self, id: SessionId, word: SessionFrame) -> StreamMsg {
        message(&self.node, id, word)
    }

    /// Says one of SuperEdge's words about a session.
    pub(crate) async fn plainly(&self, kind: &str, topic: &str, data: impl Into<Bytes>) {
        self.send(self.plain(kind, topic, data.into())).await;
    }

    /// One of SuperEdge's messages about a session.
    pub(crate) fn plain(&self, kind: &str, topic: &str, data: Bytes) -> StreamMsg {
        plain(&self.node, kind, topic, data)
    }

    /// The next message, whatever it is; none once the stream has ended.
    pub(crate) async fn next(&mut self) -> Option<StreamMsg> {
        loop {
            if let Some(message) = self.reader.next_message().unwrap() {
                return Some(message);
            }
            let hear = &mut self.hear;
            let piece = std::future::poll_fn(|cx| Pin::new(&mut *hear).poll_frame(cx)).await;
            match piece.and_then(Result::ok)?.into_data() {
                Ok(data) => self.reader.push(data),
                Err(last) => {
                    self.trailers = last.into_trailers().ok();
                    return None;
                }
            }
        }
    }

    /// The next message that is not about the link itself; pings are answered.
    ///
    /// # Panics
    ///
    /// If the stream ends, or nothing comes.
    pub(crate) async fn hears(&mut self) -> StreamMsg {
        let next = async {
            loop {
                let message = self.next().await.expect("the stream goes on");
                if message.category != "stream" {
                    return message;
                }
                self.keep_alive(message).await;
            }
        };
        assert_eventually("a message about a session", next).await
    }

    /// As [`Self::hears`], for the next word about a session that is not mere credit.
    pub(crate) async fn word(&mut self) -> (SessionId, SessionFrame) {
        loop {
            let message = self.hears().await;
            match from_message(message, &Remote::Server(self.node.clone())).unwrap().body {
                FrameKind::Session(_, _, SessionFrame::Credit { .. }) => {}
                FrameKind::Session(id, _, word) => return (id, word),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Answers pings and drops all else until the stream ends.
    pub(crate) async fn ends(&mut self) {
        let end = async {
            while let Some(message) = self.next().await {
                self.keep_alive(message).await;
            }
        };
        assert_eventually("the end of the link", end).await;
    }

    /// Answers pings and drops all else until the stream ends. Returns the status that a pod ends it with, if it does.
    pub(crate) async fn status(&mut self) -> Option<Status> {
        self.ends().await;
        self.trailers.take().and_then(|trailers| Status::from_header_map(&trailers))
    }

    async fn keep_alive(&self, message: StreamMsg) {
        // Of two ends that speak extended each numbers its pings; a plain end wants no answer from the test.
        if message.category == "stream" && message.r#type == "heartbeat" && message.data.len() == 8 {
            self.send(StreamMsg { r#type: "pong".into(), ..message }).await;
        }
    }
}

/// The message that says something about a session in the extended dialect.
pub(crate) fn message(node: &NodeName, id: SessionId, word: SessionFrame) -> StreamMsg {
    to_message(Frame { node: node.clone(), body: FrameKind::Session(id, Category::Ssh, word) })
}

/// One of SuperEdge's messages about a session.
pub(crate) fn plain(node: &NodeName, kind: &str, topic: &str, data: Bytes) -> StreamMsg {
    StreamMsg {
        node: node.to_string(),
        category: "ssh".into(),
        r#type: kind.into(),
        topic: topic.into(),
        data,
        addr: String::new(),
    }
}

/// A way to say things, and the body that takes them to the other end.
pub(crate) fn said() -> (mpsc::Sender<Bytes>, ReceivedFrame) {
    let (say, said) = mpsc::channel(16);
    (say, ReceivedFrame(said))
}

impl http_body::Body for ReceivedFrame {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Piece::data(bytes))))
    }
}
