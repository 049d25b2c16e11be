//! The log line for each frame that a link sends or receives (`-v 8`). It holds the frame's kind and numbers, never
//! client data.

use tracing::{Level, enabled, trace};

use tunnel_base::logging::FRAMES;
use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};
use tunnel_proto::names::SessionId;
use tunnel_proto::state::LinkId;

/// Logs a frame; `what` tells whether it was sent or received.
pub(crate) fn log_frame(what: &str, link: LinkId, frame: &Frame) {
    if !enabled!(target: FRAMES, Level::TRACE) {
        return;
    }
    let node = &frame.node;
    match &frame.body {
        FrameKind::Session(id, _, frame) => log_session_frame(what, link, *id, frame),
        FrameKind::Ping(number) => trace!(target: FRAMES, %link, kind = "Ping", number, "{what}"),
        FrameKind::Pong(number) => trace!(target: FRAMES, %link, kind = "Pong", number, "{what}"),
        FrameKind::Find(number) => trace!(target: FRAMES, %link, kind = "Find", number, %node, "{what}"),
        FrameKind::Found(found) => {
            let number = found.question;
            let here = found.here;
            trace!(target: FRAMES, %link, kind = "Found", number, %node, here, "{what}");
        }
        FrameKind::Drain(_) => trace!(target: FRAMES, %link, kind = "Drain", %node, "{what}"),
        FrameKind::Conflict(_) => trace!(target: FRAMES, %link, kind = "Conflict", %node, "{what}"),
        FrameKind::ListNodes(request) => {
            trace!(target: FRAMES, %link, kind = "ListNodes", number = request.question, "{what}");
        }
        FrameKind::NodePage(page) => {
            trace!(target: FRAMES, %link, kind = "NodePage", number = page.question, nodes = page.nodes.len(), "{what}");
        }
        FrameKind::Cluster(_) => trace!(target: FRAMES, %link, kind = "Cluster", "{what}"),
        FrameKind::Load(load) => {
            trace!(target: FRAMES, %link, kind = "Load", nodes = load.nodes, stopping = load.stopping, "{what}");
        }
    }
}

/// Logs a frame that belongs to a session.
pub(crate) fn log_session_frame(what: &str, link: LinkId, session: SessionId, frame: &SessionFrame) {
    if !enabled!(target: FRAMES, Level::TRACE) {
        return;
    }
    let kind = frame.name();
    let bytes = if let SessionFrame::Data(bytes) = frame { Some(bytes.len()) } else { None };
    let (received, limit) = match frame {
        SessionFrame::Open { limit, .. } | SessionFrame::Opened { limit, .. } => (None, Some(*limit)),
        SessionFrame::Credit { received, limit }
        | SessionFrame::Resume { received, limit, .. }
        | SessionFrame::Resumed { received, limit, .. } => (Some(*received), Some(*limit)),
        _ => (None, None),
    };
    let total = match frame {
        SessionFrame::Fin { total } | SessionFrame::ResetAt { total, .. } => Some(*total),
        _ => None,
    };
    let epoch = frame.epoch();
    let code = frame.refusal().map(|refusal| refusal.code.name());
    trace!(target: FRAMES, %link, %session, kind, bytes, epoch, received, limit, total, code, "{what}");
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use tracing_subscriber::layer::SubscriberExt as _;

    use tunnel_base::logging::LogLevelHandle;
    use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};

    use super::*;

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

    /// Returns the log at that verbosity after these frames were sent.
    fn sent(verbosity: i32, bodies: &[FrameKind]) -> String {
        let lines = Lines::default();
        let (to, (filter, _level)) = (lines.clone(), LogLevelHandle::new(verbosity));
        let form = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || to.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(filter).with(form), || {
            for body in bodies {
                log_frame(
                    "frame sent",
                    LinkId(7),
                    &Frame { node: "node1".parse().unwrap(), body: body.clone() },
                );
            }
        });
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    fn session(frame: SessionFrame) -> FrameKind {
        FrameKind::Session(SessionId::random(), SessionCategory::Ssh, frame)
    }

    #[test]
    fn a_frame_has_its_name_of_the_protocol() {
        let refusal = || SessionError::new(ErrorCode::TargetRefused, "x");
        let frames = [
            SessionFrame::Open {
                target: "node1:22".parse().unwrap(),
                limit: 1,
                epoch: 1,
                client: String::new(),
                opener: None,
                resume_timeout: None,
                boot: None,
            },
            SessionFrame::opened(1, 1),
            SessionFrame::Refused { epoch: 1, refusal: refusal() },
            SessionFrame::Data(Bytes::from_static(b"x")),
            SessionFrame::Fin { total: 1 },
            SessionFrame::ResetAt { total: 1, refusal: refusal() },
            SessionFrame::Reset { epoch: 1, refusal: refusal() },
            SessionFrame::Credit { received: 1, limit: 1 },
            SessionFrame::Resume {
                received: 1,
                limit: 1,
                epoch: 1,
                instance: None,
                opener: None,
                target: "node1:22".parse().unwrap(),
                place: None,
            },
            SessionFrame::Resumed { received: 1, limit: 1, epoch: 1 },
            SessionFrame::PathLost { epoch: 1 },
        ];
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let protocol = std::fs::read_to_string(root.join("docs/protocol.md")).unwrap();
        for frame in frames {
            let name = format!("{frame:?}");
            let name = name.split([' ', '(']).next().unwrap();
            assert!(protocol.contains(&format!("| {name} |")), "{name} is not in the protocol");
            let line = sent(8, &[session(frame.clone())]);
            assert!(line.contains(&format!(" kind=\"{name}\" ")), "{name}: {line}");
        }
    }

    #[test]
    fn each_frame_leaves_a_line_with_its_numbers_and_nothing_of_what_it_carries() {
        let refusal = SessionError::new(ErrorCode::TargetRefused, "SECRET");
        let bodies = [
            session(SessionFrame::Data(Bytes::from_static(b"SECRET"))),
            session(SessionFrame::Credit { received: 10, limit: 20 }),
            session(SessionFrame::Fin { total: 7 }),
            session(SessionFrame::Refused { epoch: 3, refusal }),
            FrameKind::Ping(Some(5)),
            FrameKind::Pong(None),
        ];
        let log = sent(8, &bodies);
        let expected = [
            "kind=\"Data\" bytes=6",
            "kind=\"Credit\" received=10 limit=20",
            "kind=\"Fin\" total=7",
            "kind=\"Refused\" epoch=3 code=\"target_refused\"",
            "kind=\"Ping\" number=5",
            "kind=\"Pong\"",
        ];
        assert_eq!(log.lines().count(), expected.len(), "{log}");
        for (line, expected) in log.lines().zip(expected) {
            assert!(line.contains("tunnel::frames: frame sent link=7") && line.ends_with(expected), "{line}");
        }
        assert!(!log.contains("SECRET"), "{log}");
        assert_eq!(sent(7, &bodies), "", "frames are not logged below -v 8");
    }
}
