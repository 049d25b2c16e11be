//! What a remote may send on a stream: messages and frames, or an error, however the stream is split. Encoding them
//! again yields the same.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{DecodeError, Decoder, encode_whole};
use tunnel_proto::frame::{FrameKind, Remote};
use tunnel_proto::names::NodeName;

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, stream) = input;
    let (messages, end) = read(stream, stream.len());
    let (in_pieces, end_in_pieces) = read(stream, usize::from(piece));
    assert_eq!(in_pieces, messages, "splitting a stream changes its messages");
    assert_eq!(end_in_pieces, end, "splitting a stream changes its end");
    for message in messages {
        send_on(&message);
    }
});

/// Returns every message of a stream that arrives in pieces of a length, and the error that ends it.
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
    let wire = encode_whole(message.clone());
    assert_eq!(
        read(&wire, wire.len()),
        (vec![message.clone()], None),
        "encoding and decoding changes a message"
    );
    let Ok(node) = message.node.parse::<NodeName>() else { return };
    let Ok(client) = "alice/laptop".parse() else { return };
    for peer in [Remote::Edge(node), Remote::User(client), Remote::Peer] {
        let Ok(frame) = from_message(message.clone(), &peer) else { continue };
        let again = from_message(to_message(frame.clone()), &peer);
        // A pong without a number comes from a plain remote, whose pongs equal its pings.
        let expected = if frame.body == FrameKind::Pong(None) { FrameKind::Ping(None) } else { frame.body };
        assert_eq!(again.map(|f| f.body), Ok(expected), "encoding and decoding changes a frame");
    }
}
