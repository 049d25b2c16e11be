//! Encodes and decodes StreamMsg: gRPC's framing and protobuf, without a copy of the data.

pub(in crate::protocol) mod inbound;

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message as _;

/// The messages of `proto/`, compiled.
#[expect(missing_docs, unreachable_pub, reason = "generated; proto/*.proto documents them")]
pub(in crate::protocol) mod proto {
    include!(concat!(env!("OUT_DIR"), "/proto.rs"));
}

pub use proto::StreamMsg;

/// One encoded message: all but the data, then the data as the caller passed it.
#[derive(Debug, Clone, Default)]
pub struct Chunk {
    head: Bytes,
    data: Bytes,
}

impl From<Bytes> for Chunk {
    fn from(data: Bytes) -> Self {
        Self { head: data, data: Bytes::new() }
    }
}

/// Decodes the messages of a stream, in whatever pieces its bytes come.
#[derive(Debug, Default)]
pub struct Reader {
    /// The rest of the last piece.
    rest: Bytes,
    /// Length of that piece in bytes.
    whole_piece: usize,
    /// The beginning of a message that came in several pieces.
    partial: BytesMut,
}

/// The stream's bytes are not messages. The link must end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadStream {
    /// The message is longer than allowed.
    #[error("a message of {0} bytes: the limit is {MOST_BYTES}")]
    TooLong(usize),
    /// The message is compressed, which this program never offers to accept.
    #[error("a compressed message, which was never agreed")]
    Compressed,
    /// The message is not protobuf.
    #[error("a message that is not a StreamMsg: {0}")]
    NotAMessage(String),
}

/// Encodes a message without copying its `data`.
pub fn encode(mut message: StreamMsg) -> Chunk {
    let data = std::mem::take(&mut message.data);
    let fields = message.encoded_len();
    let tail = if data.is_empty() { 0 } else { 1 + prost::length_delimiter_len(data.len()) };
    let length = fields + tail + data.len();
    let mut head = BytesMut::with_capacity(PREFIX + fields + tail);
    head.put_u8(0);
    head.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // Encoding into a BytesMut cannot fail, as it grows.
    let _ = message.encode(&mut head);
    if !data.is_empty() {
        head.put_u8(DATA_TAG);
        let _ = prost::encode_length_delimiter(data.len(), &mut head);
    }
    Chunk { head: head.freeze(), data }
}

impl Reader {
    /// Adds the next piece of the stream. Call it once [`Self::message`] has returned `None`.
    pub fn piece(&mut self, mut piece: Bytes) {
        self.whole_piece = piece.len();
        if self.partial.is_empty() {
            self.rest = piece;
            return;
        }
        while !piece.is_empty() && self.missing() > 0 {
            let take = self.missing().min(piece.len());
            self.partial.extend_from_slice(&piece.split_to(take));
        }
        self.rest = piece;
    }

    /// The next whole message, if there is one.
    pub fn message(&mut self) -> Result<Option<StreamMsg>, BadStream> {
        if self.rest.is_empty() && self.partial.is_empty() {
            return Ok(None);
        }
        let (body, pinned) = if self.partial.is_empty() {
            let whole = PREFIX + length(&self.rest)?.unwrap_or(usize::MAX - PREFIX);
            if self.rest.len() < whole {
                // Reserves the exact length up to what this program sends; a longer message grows as it comes.
                self.partial.reserve(whole.min(MOST_RESERVED).max(self.rest.len()));
                self.partial.extend_from_slice(&self.rest);
                self.rest = Bytes::new();
                return Ok(None);
            }
            (self.rest.split_to(whole), self.whole_piece)
        } else {
            length(&self.partial)?;
            if self.missing() > 0 {
                return Ok(None);
            }
            // Not split off, because the next message would share this one's allocation.
            let body = std::mem::take(&mut self.partial);
            let room = body.capacity();
            (body.freeze(), room)
        };
        let mut message =
            StreamMsg::decode(body.slice(PREFIX..)).map_err(|e| BadStream::NotAMessage(e.to_string()))?;
        if message.data.len() < WORTH_SHARING.max(pinned / 2) {
            message.data = Bytes::copy_from_slice(&message.data);
        }
        Ok(Some(message))
    }

    /// Bytes that are missing in `partial`, until the message is whole or its length is known.
    fn missing(&self) -> usize {
        let wanted = match length(&self.partial) {
            Ok(Some(length)) => PREFIX + length,
            Ok(None) => PREFIX,
            Err(_) => 0,
        };
        wanted.saturating_sub(self.partial.len())
    }
}

impl Chunk {
    /// The whole message in one piece.
    pub fn to_bytes(mut self) -> Bytes {
        self.copy_to_bytes(self.remaining())
    }
}

impl Buf for Chunk {
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
        for (slot, part) in into.iter_mut().zip(parts) {
            *slot = std::io::IoSlice::new(part);
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

/// The length of the message that begins here, once its prefix has arrived.
fn length(bytes: &[u8]) -> Result<Option<usize>, BadStream> {
    let Some((prefix, _)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let [compressed, a, b, c, d] = *prefix;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if compressed != 0 {
        return Err(BadStream::Compressed);
    }
    if length > MOST_BYTES {
        return Err(BadStream::TooLong(length));
    }
    Ok(Some(length))
}

/// gRPC's prefix: one byte for compression, four for the length.
const PREFIX: usize = 5;
/// Field 5, length-delimited.
const DATA_TAG: u8 = 5 << 3 | 2;
/// Longest message in bytes: gRPC's default limit.
pub const MOST_BYTES: usize = 4 * 1024 * 1024;
/// Shorter data is copied, and so is what is less than half of the piece it came in, for a slice keeps all of that
/// alive: a read buffer is seldom longer than [`MOST_RESERVED`], of which this is a quarter.
const WORTH_SHARING: usize = 16 * 1024;
/// Bytes reserved at once for a message that comes in several pieces: the longest that this program sends.
const MOST_RESERVED: usize = 64 * 1024 + 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    fn a_reader_with_nothing_to_read_keeps_no_memory() {
        let mut reader = Reader::default();
        assert_eq!(reader.message(), Ok(None));
        reader.piece(encode(StreamMsg::default()).to_bytes());
        assert!(matches!(reader.message(), Ok(Some(_))));
        assert_eq!(reader.message(), Ok(None));
        assert_eq!(reader.partial.capacity(), 0);
    }

    proptest! {
        #[test]
        fn messages_survive_any_cutting_of_the_stream(messages in prop::collection::vec(message(), 0..6), cuts in prop::collection::vec(1usize..3000, 1..40)) {
            let mut stream = BytesMut::new();
            for m in &messages { stream.extend_from_slice(&encode(m.clone()).to_bytes()); }
            let (mut stream, mut reader, mut read) = (stream.freeze(), Reader::default(), Vec::new());
            for cut in cuts.iter().cycle() {
                if stream.is_empty() { break; }
                reader.piece(stream.split_to((*cut).min(stream.len())));
                while let Some(m) = reader.message().unwrap() { read.push(m); }
            }
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn ours_is_what_protobuf_says(message in message()) {
            let bytes = encode(message.clone()).to_bytes();
            prop_assert_eq!(StreamMsg::decode(&bytes[PREFIX..]).unwrap(), message);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = Reader::default();
            reader.piece(bytes.into());
            while let Ok(Some(_)) = reader.message() {}
        }
    }

    /// How many bytes stay in memory for a slice: a reader sees the room of what is its alone.
    fn room(data: Bytes) -> Option<usize> {
        data.try_into_mut().ok().map(|data| data.capacity())
    }

    #[test]
    fn what_is_kept_of_a_piece_is_most_of_it_or_a_copy() {
        let of = |len: usize| StreamMsg { data: vec![7; len].into(), ..StreamMsg::default() };
        let large = encode(of(60_000)).to_bytes();
        for len in [1, 2 * 1024, 15_000, 20_000, 29_000] {
            let kept = encode(of(len)).to_bytes();
            // Before another message in one piece, and in two.
            let packed: Vec<u8> = [&kept[..], &large[..]].concat();
            for cut in [packed.len(), kept.len() + 1, kept.len() - 1] {
                let (mut reader, mut read) = (Reader::default(), Vec::new());
                for piece in [&packed[..cut], &packed[cut..]] {
                    reader.piece(Bytes::copy_from_slice(piece));
                    read.extend(std::iter::from_fn(|| reader.message().unwrap()));
                }
                let data = read.swap_remove(0).data;
                drop((read, reader));
                let room = room(data).expect("nothing else keeps it");
                assert!(room <= 2 * len + 100, "{len} bytes keep {room}, cut at {cut}");
            }
        }
    }

    #[test]
    fn what_is_too_long_or_compressed_ends_the_stream() {
        for (bytes, bad) in [
            ([0, 0, 0x40, 0, 1], BadStream::TooLong(MOST_BYTES + 1)),
            ([1, 0, 0, 0, 1], BadStream::Compressed),
        ] {
            let mut reader = Reader::default();
            reader.piece(Bytes::copy_from_slice(&bytes));
            assert_eq!(reader.message(), Err(bad.clone()));
            let mut reader = Reader::default();
            for byte in bytes {
                reader.piece(Bytes::copy_from_slice(&[byte]));
                if byte == bytes[4] {
                    break;
                }
                let _ = reader.message();
            }
        }
    }
}
