//! HTTP/2 written by hand: a remote that follows as few of the rules as a test needs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::{BufMut, Bytes, BytesMut};
use http::HeaderMap;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;
use tunnel_proto::codec::encode_whole;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::names::{Instance, NodeName};

use super::programs::{NAME, TestDir, TestServer};
use super::{assert_eventually, remote, spawn};

type Io = TlsStream<TcpStream>;

/// A connection to a server's gRPC port. It answers SETTINGS and PING, and does nothing else on its own. It keeps the
/// first [`MAX_RECEIVED_FRAMES`] frames that the test has not taken, and never returns flow control credit.
pub(crate) struct RawHttp2 {
    /// Node that its calls name.
    pub(crate) node: NodeName,
    to: Arc<tokio::sync::Mutex<WriteHalf<Io>>>,
    windows: Arc<Windows>,
    received: mpsc::Receiver<Http2Frame>,
    calls: u32,
    /// Reads until this value is dropped.
    _reads: AbortOnDropHandle<()>,
}

/// One frame of HTTP/2.
#[derive(Debug, Clone)]
pub(crate) struct Http2Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Bytes,
}

/// The remote's flow control windows: of the connection (stream 0) and of each stream.
#[derive(Default)]
struct Windows {
    left: Mutex<HashMap<u32, i64>>,
    first: Mutex<i64>,
    more: Notify,
}

impl RawHttp2 {
    /// Opens a connection that announces a window of `window` bytes for each stream and for the connection.
    pub(crate) async fn connect(place: &TestDir, server: SocketAddr, node: &str, window: u32) -> Self {
        let (from, mut to) = tokio::io::split(remote::encrypted(place, server).await);
        to.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let windows = Arc::<Windows>::default();
        *windows.first.lock().unwrap() = INITIAL_WINDOW;
        windows.add(0, INITIAL_WINDOW);
        let (sender, received) = mpsc::channel(MAX_RECEIVED_FRAMES);
        let to = Arc::new(tokio::sync::Mutex::new(to));
        let reads = AbortOnDropHandle::new(spawn(read(from, to.clone(), windows.clone(), sender)));
        let raw = Self { _reads: reads, node: node.parse().unwrap(), to, windows, received, calls: 0 };
        let mut settings = BytesMut::new();
        settings.put_u16(INITIAL_WINDOW_SIZE);
        settings.put_u32(window);
        raw.frame(SETTINGS, 0, 0, &settings).await;
        let more = window.saturating_sub(u32::try_from(INITIAL_WINDOW).unwrap());
        if more > 0 {
            raw.frame(WINDOW_UPDATE, 0, 0, &more.to_be_bytes()).await;
        }
        raw
    }

    /// Links to a server as an edge. The edge speaks extended if it has an instance, otherwise plain. Its windows are
    /// never exhausted.
    pub(crate) async fn link(
        place: &TestDir,
        server: &TestServer,
        node: &str,
        instance: Option<Instance>,
    ) -> Self {
        let raw = Self::link_at(place, server.server.bound.grpc, node, instance).await;
        server.wait_for_node(node).await;
        raw
    }

    /// Like [`Self::link`], but does not wait until the server has listed the node.
    pub(crate) async fn link_at(
        place: &TestDir,
        server: SocketAddr,
        node: &str,
        instance: Option<Instance>,
    ) -> Self {
        let mut raw = Self::connect(place, server, node, MAX_WINDOW).await;
        raw.call(&remote::headers(node, instance)).await;
        while assert_eventually("an answer to the call", raw.next()).await.unwrap().kind != HEADERS {}
        raw
    }

    /// Calls like an edge. Returns the call's stream: 1, then 3, 5, ...
    pub(crate) async fn call(&mut self, headers: &HeaderMap) -> u32 {
        self.call_path("/proto.Stream/TunnelStreaming", headers).await
    }

    /// Like [`Self::call`], for any path.
    pub(crate) async fn call_path(&mut self, path: &str, headers: &HeaderMap) -> u32 {
        let stream = 2 * self.calls + 1;
        self.calls += 1;
        let first = *self.windows.first.lock().unwrap();
        self.windows.add(stream, first);
        let mut block = BytesMut::new();
        let pseudo = [(":method", "POST"), (":scheme", "https"), (":authority", NAME), (":path", path)];
        for (name, value) in pseudo.into_iter().chain([("content-type", "application/grpc")]) {
            literal(&mut block, name.as_bytes(), value.as_bytes());
        }
        for (name, value) in headers {
            literal(&mut block, name.as_str().as_bytes(), value.as_bytes());
        }
        self.frame(HEADERS, END_HEADERS, stream, &block).await;
        stream
    }

    /// Sends any frame, whatever its content and length.
    pub(crate) async fn frame(&self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> bool {
        write(&self.to, kind, flags, stream, payload).await.is_ok()
    }

    /// Sends one DATA frame on the first call, once the remote's windows allow it. Returns true if it was sent.
    pub(crate) async fn data(&self, bytes: &[u8]) -> bool {
        self.windows.take(1, i64::try_from(bytes.len()).unwrap()).await;
        self.frame(DATA, 0, 1, bytes).await
    }

    /// Sends these messages in a single DATA frame.
    pub(crate) async fn send_messages(&self, messages: impl IntoIterator<Item = StreamMsg>) -> bool {
        let all: Vec<u8> = messages.into_iter().flat_map(encode_whole).collect();
        self.data(&all).await
    }

    /// Waits for the next frame. Returns `None` once the connection has ended.
    pub(crate) async fn next(&mut self) -> Option<Http2Frame> {
        self.received.recv().await
    }
}

/// Opens `count` connections that send nothing.
pub(crate) async fn silent(at: SocketAddr, count: usize) -> Vec<TcpStream> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        all.push(TcpStream::connect(at).await.unwrap());
    }
    all
}

impl Windows {
    fn add(&self, stream: u32, bytes: i64) {
        *self.left.lock().unwrap().entry(stream).or_default() += bytes;
        self.more.notify_waiters();
    }

    async fn take(&self, stream: u32, bytes: i64) {
        let take = async {
            loop {
                let more = self.more.notified();
                {
                    let mut left = self.left.lock().unwrap();
                    if [0, stream].iter().all(|s| left.get(s).is_some_and(|left| *left >= bytes)) {
                        for stream in [0, stream] {
                            *left.entry(stream).or_default() -= bytes;
                        }
                        return;
                    }
                }
                more.await;
            }
        };
        assert_eventually("credit in the remote's windows", take).await;
    }

    /// Applies the initial window size that the remote has announced.
    fn settings(&self, payload: &[u8]) {
        for setting in payload.as_chunks::<6>().0 {
            let [a, b, c, d, e, f] = *setting;
            if u16::from_be_bytes([a, b]) == INITIAL_WINDOW_SIZE {
                let now = i64::from(u32::from_be_bytes([c, d, e, f]));
                let before = std::mem::replace(&mut *self.first.lock().unwrap(), now);
                let streams: Vec<u32> =
                    self.left.lock().unwrap().keys().copied().filter(|s| *s > 0).collect();
                for stream in streams {
                    self.add(stream, now - before);
                }
            }
        }
    }
}

async fn read(
    mut from: ReadHalf<Io>,
    to: Arc<tokio::sync::Mutex<WriteHalf<Io>>>,
    windows: Arc<Windows>,
    sender: mpsc::Sender<Http2Frame>,
) {
    while let Ok(piece) = piece(&mut from).await {
        match (piece.kind, piece.flags & ACK) {
            (SETTINGS, 0) => {
                windows.settings(&piece.payload);
                let _ = write(&to, SETTINGS, ACK, 0, &[]).await;
            }
            (PING, 0) => {
                let _ = write(&to, PING, ACK, 0, &piece.payload).await;
                let _ = sender.try_send(piece);
            }
            (WINDOW_UPDATE, _) => {
                if let Some(more) = piece.payload.first_chunk() {
                    windows.add(piece.stream, i64::from(u32::from_be_bytes(*more)));
                }
            }
            _ => {
                let _ = sender.try_send(piece);
            }
        }
    }
}

async fn piece(from: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Http2Frame> {
    let mut head = [0; 9];
    from.read_exact(&mut head).await?;
    let [a, b, c, kind, flags, s, t, u, v] = head;
    let mut payload = vec![0; usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap()];
    from.read_exact(&mut payload).await?;
    Ok(Http2Frame { kind, flags, stream: u32::from_be_bytes([s, t, u, v]), payload: payload.into() })
}

async fn write(
    to: &tokio::sync::Mutex<WriteHalf<Io>>,
    kind: u8,
    flags: u8,
    stream: u32,
    payload: &[u8],
) -> std::io::Result<()> {
    let mut frame = BytesMut::with_capacity(9 + payload.len());
    frame.put_uint(u64::try_from(payload.len()).unwrap(), 3);
    frame.put_u8(kind);
    frame.put_u8(flags);
    frame.put_u32(stream);
    frame.put_slice(payload);
    let mut to = to.lock().await;
    to.write_all(&frame).await?;
    to.flush().await
}

/// Encodes a header in HPACK as a literal without indexing, without Huffman coding.
fn literal(block: &mut BytesMut, name: &[u8], value: &[u8]) {
    block.put_u8(0);
    for text in [name, value] {
        match text.len().checked_sub(127) {
            None => block.put_u8(u8::try_from(text.len()).unwrap()),
            Some(mut more) => {
                block.put_u8(127);
                while more >= 128 {
                    block.put_u8(u8::try_from(more % 128).unwrap() | 128);
                    more /= 128;
                }
                block.put_u8(u8::try_from(more).unwrap());
            }
        }
        block.put_slice(text);
    }
}

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const WINDOW_UPDATE: u8 = 8;
/// Maximum number of frames kept for the test; later ones are read and dropped.
const MAX_RECEIVED_FRAMES: usize = 10_000;
const ACK: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// The initial size of all windows (RFC 9113).
const INITIAL_WINDOW: i64 = 65_535;
/// The largest possible window.
pub(crate) const MAX_WINDOW: u32 = (1 << 31) - 1;
