//! One end of the gRPC call, which sends and expects single messages.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body as _, Frame as Http2Frame};
use hyper::body::Incoming;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{Decoder, encode_whole};
use tunnel_proto::frame::{Frame, FrameKind, Remote, SessionCategory, SessionError, SessionFrame};
use tunnel_proto::hello::{EdgeHello, local_headers};
use tunnel_proto::names::{Instance, NodeName, SessionId};

use super::assert_eventually;

/// A link with the test at one end. Dropping it ends the stream.
pub(crate) struct Call {
    /// Node of the link.
    pub(crate) node: NodeName,
    /// Metadata of the remote end.
    pub(crate) headers: HeaderMap,
    /// Whether the test speaks as SuperEdge v0.9, which ignores the question for its generation.
    pub(crate) is_older: bool,
    sender: mpsc::Sender<Bytes>,
    incoming_body: Incoming,
    reader: Decoder,
    trailers: Option<HeaderMap>,
    answer: Option<(oneshot::Sender<Response<ReceivedFrame>>, mpsc::Receiver<Bytes>)>,
}

/// The body with the test's messages.
pub(crate) struct ReceivedFrame(mpsc::Receiver<Bytes>);

impl Call {
    /// Creates a call that the test has made.
    pub(crate) fn outgoing(
        node: NodeName,
        headers: HeaderMap,
        sender: mpsc::Sender<Bytes>,
        incoming_body: Incoming,
    ) -> Self {
        Self {
            node,
            headers,
            is_older: false,
            sender,
            incoming_body,
            reader: Decoder::default(),
            trailers: None,
            answer: None,
        }
    }

    /// Creates a call that the test has received and not yet answered.
    pub(crate) fn incoming(
        headers: HeaderMap,
        incoming_body: Incoming,
        answer: oneshot::Sender<Response<ReceivedFrame>>,
    ) -> Self {
        // A server names no node when it calls.
        let node = EdgeHello::from_request(&headers).map_or_else(|_| NodeName::none(), |hello| hello.node);
        let (sender, frames) = frame_channel();
        Self { answer: Some((answer, frames.0)), ..Self::outgoing(node, headers, sender, incoming_body) }
    }

    /// Sends the response headers, of a process that speaks extended if there is an instance, otherwise of a plain one.
    pub(crate) fn answer(&mut self, instance: Option<Instance>) {
        self.answer_as(instance.map(local_headers).unwrap_or_default());
    }

    /// Sends these response headers.
    pub(crate) fn answer_as(&mut self, headers: HeaderMap) {
        let (answer, frames) = self.answer.take().unwrap();
        let mut response = Response::new(ReceivedFrame(frames));
        *response.headers_mut() = headers;
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        answer.send(response).ok().expect("a caller that waits");
    }

    /// Sends a message.
    pub(crate) async fn send(&self, message: StreamMsg) {
        self.send_bytes(encode_whole(message)).await;
    }

    /// Sends raw bytes. Returns true if the link took them.
    pub(crate) async fn send_bytes(&self, bytes: Bytes) -> bool {
        self.sender.send(bytes).await.is_ok()
    }

    /// Sends a session frame of this program.
    pub(crate) async fn send_session(&self, id: SessionId, frame: SessionFrame) {
        self.send(self.message(id, frame)).await;
    }

    /// Returns the message of a session frame of this program.
    pub(crate) fn message(&self, id: SessionId, frame: SessionFrame) -> StreamMsg {
        message(&self.node, id, frame)
    }

    /// Sends one of SuperEdge's session messages.
    pub(crate) async fn send_plain(&self, kind: &str, topic: &str, data: impl Into<Bytes>) {
        self.send(self.plain(kind, topic, data.into())).await;
    }

    /// Returns one of SuperEdge's session messages.
    pub(crate) fn plain(&self, kind: &str, topic: &str, data: Bytes) -> StreamMsg {
        plain(&self.node, kind, topic, data)
    }

    /// Waits for the next message of any kind, other than the question for the generation of SuperEdge. Returns `None`
    /// once the stream has ended.
    pub(crate) async fn next(&mut self) -> Option<StreamMsg> {
        loop {
            if let Some(message) = self.reader.next_message().unwrap() {
                if message.r#type != "connecting" || !message.addr.is_empty() {
                    return Some(message);
                }
                if !self.is_older {
                    self.send(StreamMsg { r#type: "connect-failed".into(), ..message }).await;
                }
                continue;
            }
            let incoming_body = &mut self.incoming_body;
            let piece = std::future::poll_fn(|cx| Pin::new(&mut *incoming_body).poll_frame(cx)).await;
            match piece.and_then(Result::ok)?.into_data() {
                Ok(data) => self.reader.push(data),
                Err(last) => {
                    self.trailers = last.into_trailers().ok();
                    return None;
                }
            }
        }
    }

    /// Waits for the next message that is not about the link itself. Answers pings.
    ///
    /// # Panics
    ///
    /// Panics if the stream ends or no message arrives.
    pub(crate) async fn next_session_message(&mut self) -> StreamMsg {
        let next = async {
            loop {
                let message = self.next().await.expect("the stream continues");
                if message.category != "stream" {
                    return message;
                }
                self.keep_alive(message).await;
            }
        };
        assert_eventually("a message about a session", next).await
    }

    /// Like [`Self::next_session_message`], but waits for the next session frame other than credit.
    pub(crate) async fn next_session_frame(&mut self) -> (SessionId, SessionFrame) {
        loop {
            let message = self.next_session_message().await;
            match from_message(message, &Remote::Server(self.node.clone())).unwrap().body {
                FrameKind::Session(_, _, SessionFrame::Credit { .. }) => {}
                FrameKind::Session(id, _, frame) => return (id, frame),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Waits for the answer to an Open or a Resume of that session, which must refuse it, and returns why.
    pub(crate) async fn refusal(&mut self, id: SessionId) -> SessionError {
        match self.next_session_frame().await {
            (of, SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. }) if of == id => {
                refusal
            }
            other => panic!("{other:?}"),
        }
    }

    /// Answers pings and drops all other messages until the stream ends.
    pub(crate) async fn wait_for_end(&mut self) {
        let end = async {
            while let Some(message) = self.next().await {
                self.keep_alive(message).await;
            }
        };
        assert_eventually("the end of the link", end).await;
    }

    /// Like [`Self::wait_for_end`], but returns the status with which a server ends the stream, if any.
    pub(crate) async fn status(&mut self) -> Option<Status> {
        self.wait_for_end().await;
        self.trailers.take().and_then(|trailers| Status::from_header_map(&trailers))
    }

    async fn keep_alive(&self, message: StreamMsg) {
        // Only extended ends number their pings; a plain end expects no answer from the test.
        if message.category == "stream" && message.r#type == "heartbeat" && message.data.len() == 8 {
            self.send(StreamMsg { r#type: "pong".into(), ..message }).await;
        }
    }
}

/// Returns the message of a session frame of this program.
pub(crate) fn message(node: &NodeName, id: SessionId, frame: SessionFrame) -> StreamMsg {
    to_message(Frame { node: node.clone(), body: FrameKind::Session(id, SessionCategory::Ssh, frame) })
}

/// Returns one of SuperEdge's session messages.
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

/// Returns a sender, and the body that transports its bytes to the remote end.
pub(crate) fn frame_channel() -> (mpsc::Sender<Bytes>, ReceivedFrame) {
    let (sender, frames) = mpsc::channel(16);
    (sender, ReceivedFrame(frames))
}

impl http_body::Body for ReceivedFrame {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Http2Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Http2Frame::data(bytes))))
    }
}
