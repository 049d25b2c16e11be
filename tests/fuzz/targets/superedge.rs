//! What a program of SuperEdge may send on a link, as an edge or as a server: it is answered in bounded space, and it
//! gets its sessions ended.

#![no_main]

use std::time::Duration;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tokio::time::Instant;
use tunnel_proto::codec::Decoder;
use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionError, SessionFrame};
use tunnel_proto::superedge::{Decoded, PlainEvent, SuperEdgeTranslator};

fuzz_target!(|input: (bool, &[u8])| {
    let (to_edge, stream) = input;
    let node: tunnel_proto::names::NodeName = "node1".parse().expect("a name");
    let mut now = Instant::now();
    let mut translator = SuperEdgeTranslator::new(node.clone(), to_edge, Duration::from_secs(60), now);
    let mut decoder = Decoder::default();
    decoder.push(Bytes::copy_from_slice(stream));
    let (mut messages, mut sessions, mut sent) = (0, Vec::new(), 0);
    while let Ok(Some(message)) = decoder.next_message() {
        messages += 1;
        // Its length decides what this end does, so that the fuzzer chooses.
        let step = message.data.len();
        if let PlainEvent::Session(Decoded { id, category, .. }) = translator.handle_message(message, now) {
            sessions.push((id, category));
        }
        if let Some((id, category)) = sessions.last().copied() {
            let body = FrameKind::Session(id, category, answer(step));
            translator.send_frame(Frame { node: node.clone(), body }, now);
        }
        now += Duration::from_secs(u64::try_from(step % 16).unwrap_or(0));
        for id in translator.due(now) {
            translator.handle_due(id, step.is_multiple_of(2), now);
        }
        sent += std::iter::from_fn(|| translator.next_message())
            .map(|sent| sent.topic.len() + sent.addr.len())
            .sum::<usize>();
    }
    assert!(sent <= 10_000 * (messages + 1), "{sent} bytes for {messages} messages");
    for (id, _) in sessions {
        translator.give_up_early(id);
    }
});

fn answer(step: usize) -> SessionFrame {
    let refusal = SessionError::new(ErrorCode::TargetRefused, "refused");
    match step % 5 {
        0 => SessionFrame::opened(1, 1),
        1 | 2 => SessionFrame::Data(Bytes::from_static(b"answer")),
        3 => SessionFrame::Fin { total: 1 },
        _ => SessionFrame::Reset { epoch: 1, refusal },
    }
}
