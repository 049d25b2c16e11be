//! The log's line for each frame that a link sends or receives (`-v 8`): its kind and its numbers, and nothing of what it
//! carries for clients.

use tracing::{Level, enabled, trace};

use crate::names::SessionId;
use crate::protocol::link::source::LinkId;
use crate::protocol::wire::frame::{Frame, FrameKind, SessionFrame};
use crate::telemetry::FRAMES;

/// Whether such lines are logged.
pub(super) fn is_wanted() -> bool {
    enabled!(target: FRAMES, Level::TRACE)
}

/// Logs a frame; `what` says whether it was sent or received.
pub(super) fn log(what: &str, link: LinkId, frame: &Frame) {
    if !is_wanted() {
        return;
    }
    let node = &frame.node;
    match &frame.body {
        FrameKind::Session(id, _, word) => log_word(what, link, *id, word),
        FrameKind::Ping(number) => trace!(target: FRAMES, %link, kind = "Ping", number, "{what}"),
        FrameKind::Pong(number) => trace!(target: FRAMES, %link, kind = "Pong", number, "{what}"),
        FrameKind::Find(number) => trace!(target: FRAMES, %link, kind = "Find", number, %node, "{what}"),
        FrameKind::Found(found) => {
            let (number, here) = (found.question, found.here);
            trace!(target: FRAMES, %link, kind = "Found", number, %node, here, "{what}");
        }
        FrameKind::Drain(_) => trace!(target: FRAMES, %link, kind = "Drain", %node, "{what}"),
        FrameKind::Conflict(_) => trace!(target: FRAMES, %link, kind = "Conflict", %node, "{what}"),
        FrameKind::Load(load) => {
            trace!(target: FRAMES, %link, kind = "Load", nodes = load.nodes, stopping = load.stopping, "{what}");
        }
    }
}

/// Logs a frame about a session.
pub(super) fn log_word(what: &str, link: LinkId, session: SessionId, word: &SessionFrame) {
    let (kind, bytes) = match word {
        SessionFrame::Open { .. } => ("Open", None),
        SessionFrame::Opened { .. } => ("Opened", None),
        SessionFrame::Refused { .. } => ("Refused", None),
        SessionFrame::Data(bytes) => ("Data", Some(bytes.len())),
        SessionFrame::Finish { .. } => ("Finish", None),
        SessionFrame::Broken { .. } => ("Broken", None),
        SessionFrame::Reset { .. } => ("Reset", None),
        SessionFrame::Credit { .. } => ("Credit", None),
        SessionFrame::Resume { .. } => ("Resume", None),
        SessionFrame::Resumed { .. } => ("Resumed", None),
        SessionFrame::Lost { .. } => ("Lost", None),
    };
    let (received, limit) = match word {
        SessionFrame::Open { limit, .. } | SessionFrame::Opened { limit, .. } => (None, Some(*limit)),
        SessionFrame::Credit { received, limit }
        | SessionFrame::Resume { received, limit, .. }
        | SessionFrame::Resumed { received, limit, .. } => (Some(*received), Some(*limit)),
        _ => (None, None),
    };
    let (total, code) = match word {
        SessionFrame::Finish { total } => (Some(*total), None),
        SessionFrame::Broken { total, refusal } => (Some(*total), Some(refusal.code.name())),
        SessionFrame::Refused { refusal, .. } | SessionFrame::Reset { refusal, .. } => {
            (None, Some(refusal.code.name()))
        }
        _ => (None, None),
    };
    let epoch = word.epoch();
    trace!(target: FRAMES, %link, %session, kind, bytes, epoch, received, limit, total, code, "{what}");
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::protocol::wire::frame::{Category, Code, Refusal};
    use crate::telemetry::LogLevel;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What stands in a log of that verbosity once these were sent.
    fn sent(verbosity: i32, bodies: &[FrameKind]) -> String {
        let lines = Lines::default();
        let (to, (filter, _level)) = (lines.clone(), LogLevel::new(verbosity));
        let form = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || to.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(filter).with(form), || {
            for body in bodies {
                log("frame sent", LinkId(7), &Frame { node: "node1".parse().unwrap(), body: body.clone() });
            }
        });
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    fn word(frame: SessionFrame) -> FrameKind {
        FrameKind::Session(SessionId::random(), Category::Ssh, frame)
    }

    #[test]
    fn each_frame_leaves_a_line_with_its_numbers_and_nothing_of_what_it_carries() {
        let refusal = Refusal::new(Code::TargetRefused, "SECRET");
        let bodies = [
            word(SessionFrame::Data(Bytes::from_static(b"SECRET"))),
            word(SessionFrame::Credit { received: 10, limit: 20 }),
            word(SessionFrame::Finish { total: 7 }),
            word(SessionFrame::Refused { epoch: 3, refusal }),
            FrameKind::Ping(Some(5)),
            FrameKind::Pong(None),
        ];
        let log = sent(8, &bodies);
        let wanted = [
            "kind=\"Data\" bytes=6",
            "kind=\"Credit\" received=10 limit=20",
            "kind=\"Finish\" total=7",
            "kind=\"Refused\" epoch=3 code=\"target_refused\"",
            "kind=\"Ping\" number=5",
            "kind=\"Pong\"",
        ];
        assert_eq!(log.lines().count(), wanted.len(), "{log}");
        for (line, wanted) in log.lines().zip(wanted) {
            assert!(line.contains("frames: frame sent link=7") && line.ends_with(wanted), "{line}");
        }
        assert!(!log.contains("SECRET"), "{log}");
        assert_eq!(sent(7, &bodies), "", "not for who wants less");
    }
}
