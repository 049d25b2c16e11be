//! A server in the middle of a link, if the simulation has no other: it relays frames, and may lose a session.

use std::collections::HashMap;

use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};
use tunnel_proto::names::SessionId;

/// The attempts that were relayed, each with the last Open or Resume.
#[derive(Default)]
pub(crate) struct RelayModel(HashMap<SessionId, (u64, Frame)>);

impl RelayModel {
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        self.0.keys().copied().collect()
    }

    /// Returns true if a frame is relayed. Updates the attempts.
    pub(crate) fn passes(&mut self, side: usize, frame: &Frame) -> bool {
        let FrameKind::Session(id, _, word) = &frame.body else { return true };
        let bound = self.0.get(id).map(|(epoch, _)| *epoch);
        match word {
            SessionFrame::Open { epoch, .. } | SessionFrame::Resume { epoch, .. } if side == 0 => {
                if bound.is_some_and(|bound| bound >= *epoch) {
                    return false;
                }
                self.0.insert(*id, (*epoch, frame.clone()));
                true
            }
            // A reply to an older attempt must not remove the newer attempt.
            SessionFrame::Refused { epoch, .. }
            | SessionFrame::Reset { epoch, .. }
            | SessionFrame::PathLost { epoch } => match bound {
                Some(bound) if bound <= *epoch => self.0.remove(id).is_some(),
                bound => bound.is_some(),
            },
            _ => bound.is_some(),
        }
    }

    /// Loses a session. Returns the frame that both ends get.
    pub(crate) fn lose(&mut self, id: SessionId) -> Option<Frame> {
        let (epoch, mut frame) = self.0.remove(&id)?;
        if let FrameKind::Session(_, _, word) = &mut frame.body {
            *word = SessionFrame::PathLost { epoch };
        }
        Some(frame)
    }
}
