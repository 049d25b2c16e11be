//! What a peer may send on a stream: messages and frames whatever the pieces, or a refusal; and the same once sent on.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tunnel_base::names::NodeName;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{DecodeError, Decoder, encode, from_message, to_message};
use tunnel_proto::frame::{FrameKind, Remote};

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, stream) = input;
    let (messages, end) = read(stream, stream.len());
    let (in_pieces, end_in_pieces) = read(stream, usize::from(piece));
    assert_eq!(in_pieces, messages, "the pieces of a stream change its messages");
    assert_eq!(end_in_pieces, end, "the pieces of a stream change its end");
    for message in messages {
        send_on(&message);
    }
});

/// Every message of a stream that arrives in pieces of a length, and why it cannot go on.
fn read(stream: &[u8], piece: usize) -> (Vec<StreamMsg>, Option<DecodeError>) {
    let mut reader = Decoder::default();
    let mut messages = Vec::new();
    for piece in stream.chunks(piece.max(1)) {
        reader.push(Bytes::copy_from_slice(piece));
        loop {
            match reader.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(bad) => return (messages, Some(bad)),
            }
        }
    }
    (messages, None)
}

fn send_on(message: &StreamMsg) {
    let wire = encode(message.clone()).to_bytes();
    assert_eq!(read(&wire, wire.len()), (vec![message.clone()], None), "a message changes on its way");
    let Ok(node) = message.node.parse::<NodeName>() else { return };
    for peer in [Remote::Edge(node), Remote::Peer] {
        let Ok(frame) = from_message(message.clone(), &peer) else { continue };
        let again = from_message(to_message(frame.clone()), &peer);
        // A pong without a number is a plain peer's, whose pongs look like its pings.
        let expected = if frame.body == FrameKind::Pong(None) { FrameKind::Ping(None) } else { frame.body };
        assert_eq!(again.map(|f| f.body), Ok(expected), "a frame changes on its way");
    }
}
