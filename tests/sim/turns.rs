//! Who spoke when on one end of a link: pings and answers before data, keystrokes before bulk.

use std::collections::HashMap;

use tunnel_base::names::SessionId;
use tunnel_proto::frame::{Frame, FrameKind, SessionFrame};

use super::ledger::Ledger;

#[derive(Default)]
pub(crate) struct SchedulerModel {
    ping: bool,
    pong: Option<u64>,
    /// Data frames so far: whose, and how long.
    said: Vec<(usize, usize)>,
    /// Where in `said` a keystroke began to wait.
    waits: HashMap<usize, usize>,
    /// Pings without an answer.
    pub(crate) unanswered: usize,
}

impl SchedulerModel {
    pub(crate) fn ping(&mut self) {
        self.ping = true;
    }

    pub(crate) fn heard(&mut self, body: &FrameKind) {
        match body {
            FrameKind::Ping(number) => self.pong = *number,
            FrameKind::Pong(_) => self.unanswered = 0,
            _ => {}
        }
    }

    /// A session that has nothing else to say has just written a keystroke.
    pub(crate) fn typed(&mut self, session: usize) {
        let Some(last) = self.said.iter().rposition(|(who, _)| *who == session) else { return };
        let mut others: HashMap<usize, usize> = HashMap::new();
        for (who, bytes) in &self.said[last + 1..] {
            *others.entry(*who).or_default() += bytes;
        }
        // Silent for so long that its account is behind the clock by all that it may be.
        if others.values().max().is_some_and(|most| *most >= 2 * 65_200) {
            self.waits.insert(session, self.said.len());
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
                    ledger.fault("a pong that answers no ping, or not the newest");
                }
            }
            FrameKind::Session(id, _, SessionFrame::Open { target, .. }) => ledger.knows(*id, target),
            FrameKind::Session(id, _, SessionFrame::Data(bytes)) => self.data(*id, bytes.len(), ledger),
            _ => {}
        }
    }

    fn data(&mut self, id: SessionId, bytes: usize, ledger: &Ledger) {
        if self.ping || self.pong.is_some() {
            ledger.fault("data was said before a ping or a pong that waited");
        }
        let Some(session) = ledger.number(id) else { return };
        if let Some(since) = self.waits.remove(&session) {
            ledger.timed();
            let before = self.said[since..].iter().filter(|(_, len)| *len > bytes).count();
            if before > 0 {
                ledger.fault(format!(
                    "a keystroke of session {session} waited for {before} frames: {:?}",
                    &self.said[since..]
                ));
            }
        }
        self.said.push((session, bytes));
    }
}
