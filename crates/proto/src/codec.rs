//! Encodes and decodes `StreamMsg`: gRPC framing and protobuf, without copying the data.

use bytes::buf::Chain;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::Message as _;

use crate::codec::proto::StreamMsg;

pub mod extended;
/// Messages generated from `proto/`.
#[expect(missing_docs, reason = "generated; proto/*.proto documents them")]
#[rustfmt::skip]
pub mod proto;

/// An encoded message: the header and all fields but `data`, then `data` as the caller passed it.
pub type EncodedMessage = Chain<Bytes, Bytes>;

/// A decoder for the messages of a stream, which may arrive in pieces of any size.
#[derive(Debug)]
pub struct Decoder {
    /// Maximum length of a message in bytes.
    most: usize,
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
    /// The message is longer than allowed: its length in bytes, and the limit.
    #[error("message of {0} bytes exceeds the limit of {1}")]
    TooLong(usize, usize),
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
    head.freeze().chain(data)
}

impl Default for Decoder {
    /// Returns a decoder for messages of any remote.
    fn default() -> Self {
        Self::new(MAX_BYTES)
    }
}

impl Decoder {
    /// Returns a decoder for messages of at most `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { most, rest: Bytes::new(), whole_piece: 0, partial: BytesMut::new() }
    }

    /// Returns the number of bytes stored of a message whose end has not arrived.
    pub fn unfinished(&self) -> usize {
        self.partial.len()
    }

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
            let whole = PREFIX + length(&self.rest, self.most)?.unwrap_or(usize::MAX - PREFIX);
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
            length(&self.partial, self.most)?;
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
        let message_len = match length(&self.partial, self.most) {
            Ok(Some(length)) => PREFIX + length,
            Ok(None) => PREFIX,
            Err(_) => 0,
        };
        message_len.saturating_sub(self.partial.len())
    }
}

/// Returns the length of the message that starts at `bytes`, or `None` until its prefix has arrived.
fn length(bytes: &[u8], most: usize) -> Result<Option<usize>, DecodeError> {
    let Some((prefix, _)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let [compressed, a, b, c, d] = *prefix;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if compressed != 0 {
        return Err(DecodeError::Compressed);
    }
    if length > most {
        return Err(DecodeError::TooLong(length, most));
    }
    Ok(Some(length))
}

/// Length of gRPC's message prefix: one byte for compression, four for the length.
const PREFIX: usize = 5;
/// Tag of field 5 (`data`), length-delimited.
const DATA_TAG: u8 = 5 << 3 | 2;
/// Maximum length in bytes of a message of a plain remote: gRPC's default limit.
pub const MAX_BYTES: usize = 4 * 1024 * 1024;
/// The same of other remotes. Their longest messages are Data, of 64 KiB, and a page of 500 nodes, of about 90 KiB.
pub const MAX_EXTENDED_BYTES: usize = 128 * 1024;
/// Data shorter than this, or than half of the piece that it came in, is copied: a slice keeps the whole piece alive. A
/// read buffer is seldom longer than [`MAX_RESERVED`], and this is a quarter of that.
const WORTH_SHARING: usize = 16 * 1024;
/// Maximum number of bytes reserved at once for a message in several pieces: the longest message that this program
/// sends.
const MAX_RESERVED: usize = 64 * 1024 + 1024;

/// Like [`encode`], but copies the message into one piece.
pub fn encode_whole(message: StreamMsg) -> Bytes {
    let mut encoded = encode(message);
    encoded.copy_to_bytes(encoded.remaining())
}

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
        reader.push(encode_whole(StreamMsg::default()));
        assert!(matches!(reader.next_message(), Ok(Some(_))));
        assert_eq!(reader.next_message(), Ok(None));
        assert_eq!(reader.partial.capacity(), 0);
    }

    proptest! {
        #[test]
        fn messages_are_decoded_however_the_stream_is_split(messages in prop::collection::vec(message(), 0..6), cuts in prop::collection::vec(1usize..3000, 1..40)) {
            let mut stream = BytesMut::new();
            for m in &messages { stream.extend_from_slice(&encode_whole(m.clone())); }
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
            let bytes = encode_whole(message.clone());
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
        let large = encode_whole(of(60_000));
        for len in [1, 2 * 1024, 15_000, 20_000, 29_000] {
            let kept = encode_whole(of(len));
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
            ([0, 0, 0x40, 0, 1], DecodeError::TooLong(MAX_BYTES + 1, MAX_BYTES)),
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
