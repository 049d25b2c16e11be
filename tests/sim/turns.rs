//! Checks the order of frames at one end of a link: pings and replies before data, keystrokes before bulk data.

use std::collections::HashMap;

use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};
use tunnel_proto::names::SessionId;

use super::ledger::Ledger;

#[derive(Default)]
pub(crate) struct SchedulerModel {
    ping: bool,
    pong: Option<u64>,
    /// Data frames so far: session and length.
    data_frames: Vec<(usize, usize)>,
    /// Index in `data_frames` at which a keystroke started to wait.
    waits: HashMap<usize, usize>,
    /// Number of pings without a reply.
    pub(crate) unanswered: usize,
}

impl SchedulerModel {
    pub(crate) fn ping(&mut self) {
        self.ping = true;
    }

    pub(crate) fn received(&mut self, body: &FrameKind) {
        match body {
            FrameKind::Ping(number) => self.pong = *number,
            FrameKind::Pong(_) => self.unanswered = 0,
            _ => {}
        }
    }

    /// Records a keystroke just written by a session that has nothing else to send.
    pub(crate) fn typed(&mut self, session: usize) {
        let Some(last) = self.data_frames.iter().rposition(|(sender, _)| *sender == session) else { return };
        let mut others: HashMap<usize, usize> = HashMap::new();
        for (sender, bytes) in &self.data_frames[last + 1..] {
            *others.entry(*sender).or_default() += bytes;
        }
        // The session was idle for so long that its account is as far behind the clock as possible.
        if others.values().max().is_some_and(|most| *most >= 2 * 65_200) {
            self.waits.insert(session, self.data_frames.len());
        }
    }

    pub(crate) fn pulled(&mut self, frame: &Frame, ledger: &Ledger) {
        match &frame.body {
            FrameKind::Ping(_) => {
                self.ping = false;
                self.unanswered += 1;
            }
            FrameKind::Pong(number) => {
                let answers = self.pong.take() == *number;
                if !answers {
                    ledger.error("pong does not answer the newest ping");
                }
            }
            FrameKind::Session(id, _, SessionFrame::Open { target, .. }) => {
                ledger.record_session(*id, target)
            }
            FrameKind::Session(id, _, SessionFrame::Data(bytes)) => self.data(*id, bytes.len(), ledger),
            _ => {}
        }
    }

    fn data(&mut self, id: SessionId, bytes: usize, ledger: &Ledger) {
        if self.ping || self.pong.is_some() {
            ledger.error("data sent before a pending ping or pong");
        }
        let Some(session) = ledger.number(id) else { return };
        if let Some(since) = self.waits.remove(&session) {
            ledger.timed();
            let before = self.data_frames[since..].iter().filter(|(_, len)| *len > bytes).count();
            if before > 0 {
                ledger.error(format!(
                    "a keystroke of session {session} waited for {before} frames: {:?}",
                    &self.data_frames[since..]
                ));
            }
        }
        self.data_frames.push((session, bytes));
    }
}
