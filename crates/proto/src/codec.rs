//! Encodes and decodes `StreamMsg`: gRPC framing and protobuf, without copying the data.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message as _;

use crate::codec::proto::{Control, StreamMsg};
use crate::frame::{
    Category, Conflict, ErrorCode, Found, Frame, FrameKind, ListNodes, ListedNode, Load, MAX_NODE_IPS,
    MAX_PAGE_NODES, MAX_VERSION_CHARS, NodePage, Opener, Remote, SessionError, SessionFrame,
};
use tunnel_base::logging::printable;
use tunnel_base::names::{Instance, NodeName, SessionId};

/// Messages generated from `proto/`.
#[expect(missing_docs, reason = "generated; proto/*.proto documents them")]
#[rustfmt::skip]
pub mod proto;

/// An encoded message: the header and all fields but `data`, then `data` as the caller passed it.
#[derive(Debug, Clone, Default)]
pub struct EncodedMessage {
    head: Bytes,
    data: Bytes,
}

impl From<Bytes> for EncodedMessage {
    fn from(data: Bytes) -> Self {
        Self { head: data, data: Bytes::new() }
    }
}

/// A decoder for the messages of a stream, which may arrive in pieces of any size.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Undecoded rest of the last piece.
    rest: Bytes,
    /// Length of the last piece in bytes.
    whole_piece: usize,
    /// Start of a message that arrives in several pieces.
    partial: BytesMut,
}

/// The bytes of the stream are not messages. The link must be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message is longer than allowed.
    #[error("message of {0} bytes exceeds the limit of {MAX_BYTES}")]
    TooLong(usize),
    /// The message is compressed, but this program never offers compression.
    #[error("message is compressed, but compression was not negotiated")]
    Compressed,
    /// The message is not protobuf.
    #[error("message is not a StreamMsg: {0}")]
    NotAMessage(String),
}

/// Encodes a message without copying its `data`.
pub fn encode(mut message: StreamMsg) -> EncodedMessage {
    let data = std::mem::take(&mut message.data);
    let fields = message.encoded_len();
    let tail = if data.is_empty() { 0 } else { 1 + prost::length_delimiter_len(data.len()) };
    let length = fields + tail + data.len();
    let mut head = BytesMut::with_capacity(PREFIX + fields + tail);
    head.put_u8(0);
    head.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // Encoding into a `BytesMut` cannot fail: it grows.
    let _ = message.encode(&mut head);
    if !data.is_empty() {
        head.put_u8(DATA_TAG);
        let _ = prost::encode_length_delimiter(data.len(), &mut head);
    }
    EncodedMessage { head: head.freeze(), data }
}

impl Decoder {
    /// Adds the next piece of the stream. Call it only after [`Self::next_message`] has returned `None`.
    pub fn push(&mut self, mut piece: Bytes) {
        self.whole_piece = piece.len();
        if self.partial.is_empty() {
            self.rest = piece;
            return;
        }
        while !piece.is_empty() && self.bytes_missing() > 0 {
            let take = self.bytes_missing().min(piece.len());
            self.partial.extend_from_slice(&piece.split_to(take));
        }
        self.rest = piece;
    }

    /// Returns the next complete message, if there is one.
    pub fn next_message(&mut self) -> Result<Option<StreamMsg>, DecodeError> {
        if self.rest.is_empty() && self.partial.is_empty() {
            return Ok(None);
        }
        let (body, pinned) = if self.partial.is_empty() {
            let whole = PREFIX + length(&self.rest)?.unwrap_or(usize::MAX - PREFIX);
            if self.rest.len() < whole {
                // Reserve the exact length up to what this program sends. For a longer message the buffer grows as data
                // arrives.
                self.partial.reserve(whole.min(MAX_RESERVED).max(self.rest.len()));
                self.partial.extend_from_slice(&self.rest);
                self.rest = Bytes::new();
                return Ok(None);
            }
            (self.rest.split_to(whole), self.whole_piece)
        } else {
            length(&self.partial)?;
            if self.bytes_missing() > 0 {
                return Ok(None);
            }
            // Do not split off the body: the next message would share its allocation.
            let body = std::mem::take(&mut self.partial);
            let room = body.capacity();
            (body.freeze(), room)
        };
        let mut message =
            StreamMsg::decode(body.slice(PREFIX..)).map_err(|e| DecodeError::NotAMessage(e.to_string()))?;
        if message.data.len() < WORTH_SHARING.max(pinned / 2) {
            message.data = Bytes::copy_from_slice(&message.data);
        }
        Ok(Some(message))
    }

    /// Returns the number of bytes missing in `partial` until the message, or its length, is complete.
    fn bytes_missing(&self) -> usize {
        let message_len = match length(&self.partial) {
            Ok(Some(length)) => PREFIX + length,
            Ok(None) => PREFIX,
            Err(_) => 0,
        };
        message_len.saturating_sub(self.partial.len())
    }
}

impl EncodedMessage {
    /// Returns the whole message in one piece.
    pub fn to_bytes(mut self) -> Bytes {
        self.copy_to_bytes(self.remaining())
    }
}

impl Buf for EncodedMessage {
    fn remaining(&self) -> usize {
        self.head.len() + self.data.len()
    }

    fn chunk(&self) -> &[u8] {
        if self.head.is_empty() { &self.data } else { &self.head }
    }

    fn advance(&mut self, count: usize) {
        let of_head = count.min(self.head.len());
        self.head.advance(of_head);
        self.data.advance(count - of_head);
    }

    fn chunks_vectored<'a>(&'a self, into: &mut [std::io::IoSlice<'a>]) -> usize {
        let parts = [&self.head, &self.data].into_iter().filter(|part| !part.is_empty());
        let mut filled = 0;
        for (slice, part) in into.iter_mut().zip(parts) {
            *slice = std::io::IoSlice::new(part);
            filled += 1;
        }
        filled
    }
}

impl fmt::Display for StreamMsg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} of {} bytes", self.category, self.r#type, self.data.len())
    }
}

/// Returns the length of the message that starts at `bytes`, or `None` until its prefix has arrived.
fn length(bytes: &[u8]) -> Result<Option<usize>, DecodeError> {
    let Some((prefix, _)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let [compressed, a, b, c, d] = *prefix;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if compressed != 0 {
        return Err(DecodeError::Compressed);
    }
    if length > MAX_BYTES {
        return Err(DecodeError::TooLong(length));
    }
    Ok(Some(length))
}

/// Length of gRPC's message prefix: one byte for compression, four for the length.
const PREFIX: usize = 5;
/// Tag of field 5 (`data`), length-delimited.
const DATA_TAG: u8 = 5 << 3 | 2;
/// Maximum length of a message in bytes: gRPC's default limit.
pub const MAX_BYTES: usize = 4 * 1024 * 1024;
/// Data shorter than this, or than half of the piece that it came in, is copied: a slice keeps the whole piece alive. A
/// read buffer is seldom longer than [`MAX_RESERVED`], and this is a quarter of that.
const WORTH_SHARING: usize = 16 * 1024;
/// Maximum number of bytes reserved at once for a message in several pieces: the longest message that this program
/// sends.
const MAX_RESERVED: usize = 64 * 1024 + 1024;

// The extended dialect: neutral frames as messages, and back.

/// Reason why a message is not a frame. The message is counted and dropped; the link continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.reason())]
pub enum FrameError {
    /// This version does not know the message's type or category.
    UnknownType,
    /// The topic is not a session id.
    BadSession,
    /// A field cannot be parsed.
    BadField,
    /// The message names a node other than the link's.
    WrongNode,
}

impl FrameError {
    /// Returns a fixed label for metrics.
    pub fn reason(self) -> &'static str {
        match self {
            Self::UnknownType => "unknown_type",
            Self::BadSession => "bad_session_id",
            Self::BadField => "bad_field",
            Self::WrongNode => "wrong_node",
        }
    }
}

/// Encodes a frame as a message.
pub fn to_message(frame: Frame) -> StreamMsg {
    let node = frame.node.as_str().to_owned();
    match frame.body {
        FrameKind::Ping(number) => signal(node, HEARTBEAT, number),
        FrameKind::Pong(Some(number)) => signal(node, PONG, Some(number)),
        FrameKind::Pong(None) => signal(node, HEARTBEAT, None),
        FrameKind::Find(question) => peer_message(node, FIND, question, Control::default()),
        FrameKind::Found(found) => peer_message(node, FOUND, found.question, found_control(&found)),
        FrameKind::Drain(to) => {
            let addr = to.map(|to| to.to_string()).unwrap_or_default();
            StreamMsg { addr, ..signal(node, DRAIN, None) }
        }
        FrameKind::Load(Load { nodes, stopping }) => {
            let code = u32::from(if stopping { ErrorCode::Overloaded } else { ErrorCode::NoError } as u8);
            StreamMsg {
                data: pack(&Control { nodes, code, ..Control::default() }),
                ..signal(node, LOAD, None)
            }
        }
        FrameKind::ListNodes(ListNodes { question, after }) => {
            let addr = after.map(|after| after.as_str().to_owned()).unwrap_or_default();
            StreamMsg { addr, ..peer_message(node, LIST_NODES, question, Control::default()) }
        }
        FrameKind::NodePage(page) => {
            let message = peer_message(node, NODE_PAGE, page.question, Control::default());
            StreamMsg { data: packed_page(page), ..message }
        }
        FrameKind::Conflict(Conflict { instance, reason }) => {
            let fields = Control { instance: instance_bytes(instance), reason, ..Control::default() };
            StreamMsg { data: pack(&fields), ..signal(node, CONFLICT, None) }
        }
        FrameKind::Session(id, category, frame) => {
            let (kind, addr, data) = parts(frame);
            StreamMsg {
                node,
                category: category.name().into(),
                r#type: kind.into(),
                topic: id.topic(),
                data,
                addr,
            }
        }
    }
}

/// Decodes a message that arrived over a link to `peer`.
pub fn from_message(message: StreamMsg, peer: &Remote) -> Result<Frame, FrameError> {
    let servers = *peer == Remote::Peer;
    let body = match (message.category.as_str(), message.r#type.as_str()) {
        (STREAM, HEARTBEAT) => FrameKind::Ping(number(&message.data)),
        (STREAM, PONG) => FrameKind::Pong(number(&message.data)),
        (STREAM, DRAIN) if !servers => FrameKind::Drain(message.addr.parse().ok()),
        (STREAM, CONFLICT) if !peer.is_leaf() => {
            let fields = control(&message)?;
            let reason = SessionError::new(ErrorCode::Overloaded, fields.reason).reason;
            FrameKind::Conflict(Conflict { instance: Instance::from_bytes(&fields.instance), reason })
        }
        (STREAM, FIND) if servers => FrameKind::Find(control(&message)?.epoch),
        (STREAM, FOUND) if servers => FrameKind::Found(found(&control(&message)?)),
        (STREAM, LOAD) if servers => {
            let fields = control(&message)?;
            let stopping = ErrorCode::from_wire(fields.code) != ErrorCode::NoError;
            FrameKind::Load(Load { nodes: fields.nodes, stopping })
        }
        (STREAM, LIST_NODES) if servers => {
            let question = control(&message)?.epoch;
            let after = Some(&message.addr).filter(|after| !after.is_empty());
            let after = after.map(|after| after.parse().map_err(|_| FrameError::BadField)).transpose()?;
            FrameKind::ListNodes(ListNodes { question, after })
        }
        (STREAM, NODE_PAGE) if servers => FrameKind::NodePage(page(&message)?),
        (STREAM, _) => return Err(FrameError::UnknownType),
        (category, kind) => {
            let names_acceptor = matches!(kind, OPEN | RESUME) && peer.is_leaf();
            let category = Category::from_name(category).ok_or(FrameError::UnknownType)?;
            let id: SessionId = message.topic.parse().map_err(|_| FrameError::BadSession)?;
            let node = named(&message, peer, names_acceptor)?;
            return Ok(Frame { node, body: FrameKind::Session(id, category, session_frame(message)?) });
        }
    };
    // Pings and pongs concern no node, so their node is not checked.
    let node = match (&body, peer.frame_node()) {
        (FrameKind::Ping(_) | FrameKind::Pong(_), Some(node)) => node.clone(),
        _ => named(&message, peer, false)?,
    };
    Ok(Frame { node, body })
}

/// Returns the node that a message names. On the link of an edge or a user's program it must be the link's, unless `any`
/// is set.
fn named(message: &StreamMsg, peer: &Remote, any: bool) -> Result<NodeName, FrameError> {
    match peer.frame_node() {
        Some(node) if message.node.eq_ignore_ascii_case(node.as_str()) => Ok(node.clone()),
        Some(_) if !any => Err(FrameError::WrongNode),
        _ => NodeName::placeholder(&message.node)
            .map_or_else(|| message.node.parse(), Ok)
            .map_err(|_| FrameError::BadField),
    }
}

fn parts(frame: SessionFrame) -> (&'static str, String, Bytes) {
    let blank = Control::default();
    let (kind, control) = match frame {
        SessionFrame::Data(bytes) => return ("tcp-forward", String::new(), bytes),
        SessionFrame::Open { target, limit, epoch, client, opener } => {
            let opener = text(opener);
            return (OPEN, target.to_string(), pack(&Control { limit, epoch, client, opener, ..blank }));
        }
        SessionFrame::Opened { limit, epoch, instance } => {
            ("connected", Control { limit, epoch, instance: instance_bytes(instance), ..blank })
        }
        SessionFrame::Refused { epoch, refusal } => ("connect-failed", why(epoch, refusal)),
        SessionFrame::Fin { total } => ("fin", Control { total, ..blank }),
        SessionFrame::ResetAt { total, refusal } => ("reset-at", Control { total, ..why(0, refusal) }),
        SessionFrame::Reset { epoch, refusal } => ("reset", why(epoch, refusal)),
        SessionFrame::Credit { received, limit } => ("credit", Control { received, limit, ..blank }),
        SessionFrame::Resume { received, limit, epoch, instance, opener, target } => {
            let (instance, opener) = (instance_bytes(instance), text(opener));
            let control = Control { received, limit, epoch, instance, opener, ..blank };
            return (RESUME, target.to_string(), pack(&control));
        }
        SessionFrame::Resumed { received, limit, epoch } => {
            ("resumed", Control { received, limit, epoch, ..blank })
        }
        SessionFrame::PathLost { epoch } => ("path-lost", Control { epoch, ..blank }),
    };
    (kind, String::new(), pack(&control))
}

fn session_frame(message: StreamMsg) -> Result<SessionFrame, FrameError> {
    if message.r#type == "tcp-forward" {
        return Ok(SessionFrame::Data(message.data));
    }
    let c = control(&message)?;
    let refusal = || SessionError::new(ErrorCode::from_wire(c.code), &c.reason);
    Ok(match message.r#type.as_str() {
        OPEN => SessionFrame::Open {
            target: message.addr.parse().map_err(|_| FrameError::BadField)?,
            limit: c.limit,
            epoch: c.epoch,
            client: printable(&c.client),
            opener: c.opener.parse().ok(),
        },
        "connected" => SessionFrame::Opened {
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
        },
        "connect-failed" => SessionFrame::Refused { epoch: c.epoch, refusal: refusal() },
        "fin" => SessionFrame::Fin { total: c.total },
        "reset-at" => SessionFrame::ResetAt { total: c.total, refusal: refusal() },
        "reset" => SessionFrame::Reset { epoch: c.epoch, refusal: refusal() },
        "credit" => SessionFrame::Credit { received: c.received, limit: c.limit },
        RESUME => SessionFrame::Resume {
            received: c.received,
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
            opener: c.opener.parse().ok(),
            target: message.addr.parse().map_err(|_| FrameError::BadField)?,
        },
        "resumed" => SessionFrame::Resumed { received: c.received, limit: c.limit, epoch: c.epoch },
        "path-lost" => SessionFrame::PathLost { epoch: c.epoch },
        _ => return Err(FrameError::UnknownType),
    })
}

fn peer_message(node: String, kind: &str, question: u64, fields: Control) -> StreamMsg {
    let data = pack(&Control { epoch: question, ..fields });
    let topic = question.to_string();
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

fn found_control(found: &Found) -> Control {
    let code = if found.here { ErrorCode::NoError } else { ErrorCode::NodeNotConnected };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    // 0 means none.
    let age = found.age.map_or(0, |age| millis(age).max(1));
    let instance = instance_bytes(found.instance);
    let silence = millis(found.silence);
    let ips = found.ips.iter().take(MAX_NODE_IPS).map(|ip| match ip {
        IpAddr::V4(ip) => Bytes::copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => Bytes::copy_from_slice(&ip.octets()),
    });
    let (code, ips) = (u32::from(code as u8), ips.collect());
    Control { code, silence, instance, age, ips, ..Control::default() }
}

fn found(c: &Control) -> Found {
    let here = ErrorCode::from_wire(c.code) == ErrorCode::NoError;
    let silence = Duration::from_millis(c.silence);
    let age = (c.age > 0).then(|| Duration::from_millis(c.age));
    let instance = Instance::from_bytes(&c.instance);
    let ips = if here { c.ips.iter().take(MAX_NODE_IPS).filter_map(ip).collect() } else { Arc::default() };
    Found { question: c.epoch, here, silence, instance, age, ips }
}

fn packed_page(NodePage { question, nodes, more }: NodePage) -> Bytes {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let nodes = nodes.into_iter().take(MAX_PAGE_NODES).map(|listed| proto::ListedNode {
        name: listed.node.as_str().to_owned(),
        age: millis(listed.age),
        address: listed.address.map(|address| address.to_string()).unwrap_or_default(),
        round_trip: listed.round_trip.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        sessions: listed.sessions,
        version: listed.version.map(String::from).unwrap_or_default(),
        sent: listed.bytes.map(|[sent, _]| sent),
        received: listed.bytes.map(|[_, received]| received),
    });
    proto::NodePage { question, nodes: nodes.collect(), more }.encode_to_vec().into()
}

/// Reads a page. Nodes with invalid names, and those past the limit, are left out.
fn page(message: &StreamMsg) -> Result<NodePage, FrameError> {
    let fields = proto::NodePage::decode(message.data.clone()).map_err(|_| FrameError::BadField)?;
    let nodes = fields.nodes.iter().take(MAX_PAGE_NODES).filter_map(|listed| {
        let version: String = printable(&listed.version).chars().take(MAX_VERSION_CHARS).collect();
        Some(ListedNode {
            node: listed.name.parse().ok()?,
            age: Duration::from_millis(listed.age),
            address: listed.address.parse().ok(),
            round_trip: (listed.round_trip > 0).then(|| Duration::from_micros(listed.round_trip)),
            sessions: listed.sessions,
            version: (!version.is_empty()).then(|| version.into()),
            bytes: listed.sent.zip(listed.received).map(<[u64; 2]>::from),
        })
    });
    Ok(NodePage { question: fields.question, nodes: nodes.collect(), more: fields.more })
}

fn ip(bytes: &Bytes) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(&bytes[..]).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(&bytes[..]).map(IpAddr::from)).ok()
}

fn control(message: &StreamMsg) -> Result<Control, FrameError> {
    Control::decode(message.data.clone()).map_err(|_| FrameError::BadField)
}

fn signal(node: String, kind: &str, number: Option<u64>) -> StreamMsg {
    let data = number.map(|n| Bytes::copy_from_slice(&n.to_be_bytes())).unwrap_or_default();
    let topic = format!("{node}heartbeat");
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

fn number(data: &Bytes) -> Option<u64> {
    (data.len() == 8).then(|| data.clone().get_u64())
}

fn why(epoch: u64, refusal: SessionError) -> Control {
    Control { epoch, code: u32::from(refusal.code as u8), reason: refusal.reason, ..Control::default() }
}

fn instance_bytes(instance: Option<Instance>) -> Bytes {
    instance.map(|i| Bytes::copy_from_slice(&i.to_bytes())).unwrap_or_default()
}

fn text(opener: Option<Opener>) -> String {
    opener.map(|o| o.to_string()).unwrap_or_default()
}

fn pack(control: &Control) -> Bytes {
    control.encode_to_vec().into()
}

/// Returns SuperEdge's ping, which is the same message in both directions.
pub fn heartbeat(node: &NodeName) -> StreamMsg {
    signal(node.as_str().to_owned(), HEARTBEAT, None)
}

/// Category of frames about the link itself.
pub const STREAM: &str = "stream";
/// Type of a ping in both dialects.
pub const HEARTBEAT: &str = "heartbeat";
const PONG: &str = "pong";
const FIND: &str = "find";
const FOUND: &str = "found";
const DRAIN: &str = "drain";
const CONFLICT: &str = "conflict";
const LOAD: &str = "load";
const LIST_NODES: &str = "list-nodes";
const NODE_PAGE: &str = "node-page";
const OPEN: &str = "connecting";
const RESUME: &str = "resume";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message() -> impl Strategy<Value = StreamMsg> {
        (".{0,20}", ".{0,20}", ".{0,20}", prop::collection::vec(any::<u8>(), 0..5000)).prop_map(
            |(node, kind, topic, data)| StreamMsg {
                node,
                category: "ssh".into(),
                r#type: kind,
                topic,
                data: data.into(),
                addr: String::new(),
            },
        )
    }

    #[test]
    fn an_idle_decoder_holds_no_memory() {
        let mut reader = Decoder::default();
        assert_eq!(reader.next_message(), Ok(None));
        reader.push(encode(StreamMsg::default()).to_bytes());
        assert!(matches!(reader.next_message(), Ok(Some(_))));
        assert_eq!(reader.next_message(), Ok(None));
        assert_eq!(reader.partial.capacity(), 0);
    }

    proptest! {
        #[test]
        fn messages_are_decoded_however_the_stream_is_split(messages in prop::collection::vec(message(), 0..6), cuts in prop::collection::vec(1usize..3000, 1..40)) {
            let mut stream = BytesMut::new();
            for m in &messages { stream.extend_from_slice(&encode(m.clone()).to_bytes()); }
            let (mut stream, mut reader, mut read) = (stream.freeze(), Decoder::default(), Vec::new());
            for cut in cuts.iter().cycle() {
                if stream.is_empty() { break; }
                reader.push(stream.split_to((*cut).min(stream.len())));
                while let Some(m) = reader.next_message().unwrap() { read.push(m); }
            }
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn our_encoding_is_decoded_by_prost(message in message()) {
            let bytes = encode(message.clone()).to_bytes();
            prop_assert_eq!(StreamMsg::decode(&bytes[PREFIX..]).unwrap(), message);
        }

        #[test]
        fn decoding_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = Decoder::default();
            reader.push(bytes.into());
            while let Ok(Some(_)) = reader.next_message() {}
        }
    }

    /// Returns the number of bytes that a slice keeps in memory: the capacity of a buffer that it alone owns.
    fn room(data: Bytes) -> Option<usize> {
        data.try_into_mut().ok().map(|data| data.capacity())
    }

    #[test]
    fn decoded_data_never_pins_a_much_larger_buffer() {
        let of = |len: usize| StreamMsg { data: vec![7; len].into(), ..StreamMsg::default() };
        let large = encode(of(60_000)).to_bytes();
        for len in [1, 2 * 1024, 15_000, 20_000, 29_000] {
            let kept = encode(of(len)).to_bytes();
            // The data precedes another message, in one piece and in two pieces.
            let packed: Vec<u8> = [&kept[..], &large[..]].concat();
            for cut in [packed.len(), kept.len() + 1, kept.len() - 1] {
                let (mut reader, mut read) = (Decoder::default(), Vec::new());
                for piece in [&packed[..cut], &packed[cut..]] {
                    reader.push(Bytes::copy_from_slice(piece));
                    read.extend(std::iter::from_fn(|| reader.next_message().unwrap()));
                }
                let data = read.swap_remove(0).data;
                drop((read, reader));
                let room = room(data).expect("no other owner");
                assert!(room <= 2 * len + 100, "{len} bytes pin {room} bytes, split at {cut}");
            }
        }
    }

    #[test]
    fn a_message_too_long_or_compressed_is_an_error() {
        for (bytes, bad) in [
            ([0, 0, 0x40, 0, 1], DecodeError::TooLong(MAX_BYTES + 1)),
            ([1, 0, 0, 0, 1], DecodeError::Compressed),
        ] {
            let mut reader = Decoder::default();
            reader.push(Bytes::copy_from_slice(&bytes));
            assert_eq!(reader.next_message(), Err(bad.clone()));
            let mut reader = Decoder::default();
            for byte in bytes {
                reader.push(Bytes::copy_from_slice(&[byte]));
                if byte == bytes[4] {
                    break;
                }
                let _ = reader.next_message();
            }
        }
    }
}

#[cfg(test)]
mod extension_tests {
    use proptest::prelude::*;

    use super::*;

    fn client() -> Remote {
        Remote::Client("alice/laptop".parse().unwrap())
    }

    fn any_session_frame() -> impl Strategy<Value = SessionFrame> {
        let refusal = || {
            (0u32..11, "[ -~]{0,100}")
                .prop_map(|(code, text)| SessionError::new(ErrorCode::from_wire(code), text))
        };
        let instance = || prop::option::of(any::<u128>().prop_map(Instance::from_bits));
        let opener = || {
            prop::option::of(prop_oneof![
                "[a-z]{1,20}".prop_map(|name| Opener::Node(name.parse().unwrap())),
                "[a-z]{1,9}/[a-z]{1,9}".prop_map(|name| Opener::Client(name.parse().unwrap())),
                any::<u128>().prop_map(|bits| Opener::Server(Instance::from_bits(bits))),
            ])
        };
        prop_oneof![
            (any::<u64>(), any::<u64>(), "[ -~]{0,100}", opener()).prop_map(
                |(limit, epoch, client, opener)| {
                    SessionFrame::Open {
                        target: "[fd00::1]:22".parse().unwrap(),
                        limit,
                        epoch,
                        client,
                        opener,
                    }
                }
            ),
            (any::<u64>(), any::<u64>(), instance())
                .prop_map(|(limit, epoch, instance)| SessionFrame::Opened { limit, epoch, instance }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Refused { epoch, refusal }),
            prop::collection::vec(any::<u8>(), 0..100).prop_map(|b| SessionFrame::Data(b.into())),
            any::<u64>().prop_map(|total| SessionFrame::Fin { total }),
            (any::<u64>(), refusal()).prop_map(|(total, refusal)| SessionFrame::ResetAt { total, refusal }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Reset { epoch, refusal }),
            (any::<u64>(), any::<u64>())
                .prop_map(|(received, limit)| SessionFrame::Credit { received, limit }),
            (any::<u64>(), any::<u64>(), any::<u64>(), instance(), opener()).prop_map(
                |(received, limit, epoch, instance, opener)| SessionFrame::Resume {
                    received,
                    limit,
                    epoch,
                    instance,
                    opener,
                    target: "[fd00::1]:22".parse().unwrap(),
                }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(received, limit, epoch)| SessionFrame::Resumed { received, limit, epoch }),
            any::<u64>().prop_map(|epoch| SessionFrame::PathLost { epoch }),
        ]
    }

    proptest! {
        #[test]
        fn every_session_frame_round_trips_through_the_wire(session_frame in any_session_frame(), bits: u128) {
            let node: NodeName = "edge-1".parse().unwrap();
            let frame = Frame { node: node.clone(), body: FrameKind::Session(SessionId::from_bits(bits), Category::Ssh, session_frame) };
            for peer in [Remote::Edge(node.clone()), Remote::Server(node), Remote::Peer] {
                prop_assert_eq!(from_message(to_message(frame.clone()), &peer), Ok(frame.clone()));
            }
            let of_user = Frame { node: NodeName::none(), ..frame };
            prop_assert_eq!(from_message(to_message(of_user.clone()), &client()), Ok(of_user));
        }

        #[test]
        fn parsing_a_message_never_panics(kind in "[a-z-]{0,15}", topic in ".{0,40}", addr in ".{0,40}", data in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = StreamMsg { node: "n".into(), category: "ssh".into(), r#type: kind, topic, data: data.into(), addr };
            for peer in [Remote::Edge("n".parse().unwrap()), client(), Remote::Peer] {
                let _ = from_message(message.clone(), &peer);
            }
        }
    }

    #[test]
    fn an_edge_sends_only_for_its_own_node_but_opens_to_any_node() {
        let frame = |session_frame| Frame {
            node: "a".parse().unwrap(),
            body: FrameKind::Session(SessionId::random(), Category::Ssh, session_frame),
        };
        let open = SessionFrame::Open {
            target: "a:1".parse().unwrap(),
            limit: 1,
            epoch: 1,
            client: "c".into(),
            opener: None,
        };
        let (edge, cloud) = (Remote::Edge("b".parse().unwrap()), Remote::Server("b".parse().unwrap()));
        let finish = frame(SessionFrame::Fin { total: 1 });
        assert_eq!(from_message(to_message(finish.clone()), &edge), Err(FrameError::WrongNode));
        assert_eq!(from_message(to_message(finish), &cloud), Err(FrameError::WrongNode));
        let open = frame(open);
        assert_eq!(from_message(to_message(open.clone()), &cloud), Err(FrameError::WrongNode));
        assert_eq!(from_message(to_message(open.clone()), &edge), Ok(open));
    }

    #[test]
    fn a_users_program_speaks_for_no_node_but_opens_to_any_node() {
        let client = client();
        let frame = |node: &NodeName, body| Frame { node: node.clone(), body };
        let session = |frame| FrameKind::Session(SessionId::random(), Category::Ssh, frame);
        let (none, node) = (NodeName::none(), "edge-1".parse().unwrap());
        let (target, client_text) = ("a:1".parse().unwrap(), String::new());
        let open = SessionFrame::Open { target, limit: 1, epoch: 1, client: client_text, opener: None };
        for sound in [
            frame(&none, FrameKind::Ping(Some(7))),
            frame(&none, FrameKind::Drain(None)),
            frame(&none, session(SessionFrame::Fin { total: 1 })),
            frame(&node, session(open)),
        ] {
            assert_eq!(from_message(to_message(sound.clone()), &client), Ok(sound));
        }
        let fin = frame(&node, session(SessionFrame::Fin { total: 1 }));
        assert_eq!(from_message(to_message(fin), &client), Err(FrameError::WrongNode));
        let conflict = FrameKind::Conflict(Conflict { instance: None, reason: String::new() });
        let found = FrameKind::Found(Found { here: true, ..Found::not_here(0) });
        let load = FrameKind::Load(Load { nodes: 0, stopping: true });
        for body in [FrameKind::Find(5), found, load, conflict] {
            let refused = from_message(to_message(frame(&node, body)), &client);
            assert_eq!(refused, Err(FrameError::UnknownType));
        }
    }

    #[test]
    fn signals_round_trip_and_only_servers_may_query_nodes() {
        let node: NodeName = "edge-1".parse().unwrap();
        let instance = Some(Instance::from_bits(9));
        let (silence, age) = (Duration::from_millis(1500), Some(Duration::from_millis(1)));
        let ips = [IpAddr::from([10, 0, 0, 7]), "fd00::7".parse().unwrap()].into();
        let found = Found { here: true, silence, instance, age, ips, ..Found::not_here(3) };
        let away = Found { silence, ..Found::not_here(0) };
        let (edge, server) = ([Remote::Edge(node.clone()), Remote::Server(node.clone())], [Remote::Peer]);
        let conflict = FrameKind::Conflict(Conflict { instance, reason: "two machines".into() });
        let load = |nodes| Load { nodes, stopping: false };
        let first = ListNodes { question: 7, after: None };
        let next = ListNodes { after: Some(node.clone()), ..first.clone() };
        let listed = |address: Option<&str>| ListedNode {
            node: node.clone(),
            age: Duration::from_secs(3),
            address: address.map(|address| address.parse().unwrap()),
            round_trip: address.map(|_| Duration::from_micros(1500)),
            sessions: address.map(|_| 0),
            version: address.map(Into::into),
            bytes: address.map(|_| [0, u64::MAX]),
        };
        let nodes = vec![listed(None), listed(Some("10.0.0.7:1")), listed(Some("[fd00::7]:2"))];
        let page = NodePage { question: 7, nodes, more: true };
        for (body, theirs, others) in [
            (FrameKind::Ping(Some(7)), [&edge[..], &server].concat(), vec![]),
            (FrameKind::Pong(Some(7)), [&edge[..], &server].concat(), vec![]),
            (FrameKind::Drain(None), edge.to_vec(), server.to_vec()),
            (FrameKind::Drain(Some(([10, 0, 0, 7], 9000).into())), edge.to_vec(), server.to_vec()),
            (FrameKind::Load(load(0)), server.to_vec(), edge.to_vec()),
            (FrameKind::Load(Load { stopping: true, ..load(300) }), server.to_vec(), edge.to_vec()),
            (FrameKind::Find(5), server.to_vec(), edge.to_vec()),
            (FrameKind::ListNodes(first), server.to_vec(), edge.to_vec()),
            (FrameKind::ListNodes(next), server.to_vec(), edge.to_vec()),
            (FrameKind::NodePage(page), server.to_vec(), edge.to_vec()),
            (FrameKind::Found(found), server.to_vec(), edge.to_vec()),
            (FrameKind::Found(away), server.to_vec(), edge.to_vec()),
            (conflict, vec![edge[1].clone(), Remote::Peer], edge[..1].to_vec()),
        ] {
            let frame = Frame { node: node.clone(), body };
            for peer in &theirs {
                assert_eq!(from_message(to_message(frame.clone()), peer), Ok(frame.clone()));
            }
            for peer in &others {
                assert_eq!(from_message(to_message(frame.clone()), peer), Err(FrameError::UnknownType));
            }
        }
    }

    #[test]
    fn a_page_of_nodes_is_bounded_and_leaves_out_invalid_names() {
        let listed = |name: &str| proto::ListedNode { name: name.to_owned(), ..Default::default() };
        let read = |nodes: Vec<_>| {
            let data = proto::NodePage { question: 1, nodes, more: false }.encode_to_vec().into();
            page(&StreamMsg { data, ..StreamMsg::default() })
        };
        let names = |nodes| {
            read(nodes).unwrap().nodes.into_iter().map(|one| one.node.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(vec![listed("a"), listed(""), listed("\u{1b}[2J"), listed("b")]), ["a", "b"]);
        assert_eq!(names(vec![listed("a"); MAX_PAGE_NODES + 1]).len(), MAX_PAGE_NODES);
        let junk = StreamMsg { data: Bytes::from_static(b"\xff"), ..StreamMsg::default() };
        assert_eq!(page(&junk), Err(FrameError::BadField));
    }

    #[test]
    fn addresses_in_a_found_signal_are_bounded_and_invalid_ones_skipped() {
        let many: Vec<_> = (0..20).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        let read = |ips: Vec<Bytes>, code: u32| found(&Control { ips, code, ..Control::default() }).ips;
        let bytes =
            |ips: &[IpAddr]| found_control(&Found { here: true, ips: ips.into(), ..Found::not_here(1) }).ips;
        assert_eq!(bytes(&many).len(), MAX_NODE_IPS);
        let all = many.iter().map(|ip| bytes(&[*ip]).remove(0)).collect::<Vec<_>>();
        assert_eq!(read(all.clone(), 0)[..], many[..MAX_NODE_IPS]);
        let wild = [&[Bytes::from_static(b"seven"), Bytes::new()], &all[..1]].concat();
        assert_eq!(read(wild, 0)[..], many[..1]);
        assert!(
            read(all, u32::from(ErrorCode::NodeNotConnected as u8)).is_empty(),
            "the node is not connected there"
        );
    }
}
