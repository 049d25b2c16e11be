//! Invariants that hold at any time, and at the end of a run.

use std::collections::HashMap;

use tunnel_proto::frame::{ErrorCode, Frame, FrameKind, SessionFrame};
use tunnel_proto::names::{Instance, SessionId};

use super::ledger::Ledger;
use super::world::Simulation;

/// The hops of each attempt to open or resume: at most one link between servers, and never back.
#[derive(Default)]
pub(crate) struct Hops(HashMap<(SessionId, u64), (Vec<usize>, usize)>);

impl Hops {
    pub(crate) fn check_frame(
        &mut self,
        frame: &Frame,
        way: [usize; 2],
        servers: [bool; 2],
        ledger: &Ledger,
    ) {
        let FrameKind::Session(id, _, word) = &frame.body else { return };
        let [from, to] = way;
        match word {
            SessionFrame::Open { epoch, .. } | SessionFrame::Resume { epoch, .. } => {
                let (been, between) = self.0.entry((*id, *epoch)).or_insert_with(|| (vec![from], 0));
                if been.last() != Some(&from) {
                    ledger.error(format!("attempt comes from {from}, but its hops are {been:?}"));
                }
                // An edge may request its own name: the second server cannot know who asked the first.
                let own = been.len() == 3 && been[0] == to && !servers[1];
                if been.contains(&to) && !own {
                    ledger.error(format!("attempt returns to {to}, after the hops {been:?}"));
                }
                if servers == [true, true] {
                    *between += 1;
                    ledger.relayed();
                    if *between > 1 {
                        ledger.error(format!("attempt is relayed between servers twice: {been:?}, {to}"));
                    }
                }
                been.push(to);
            }
            SessionFrame::Opened { epoch, .. } => ledger.answers(*id, *epoch, from),
            // The server that tried this path may try another for the same attempt; an opener makes a new attempt.
            SessionFrame::Refused { epoch, refusal } | SessionFrame::Reset { epoch, refusal }
                if refusal.code == ErrorCode::NodeNotConnected =>
            {
                if let Some((been, between)) = self.0.get_mut(&(*id, *epoch))
                    && been.len() > 2
                    && been.ends_with(&[to, from])
                {
                    been.pop();
                    *between -= usize::from(servers == [true, true]);
                }
            }
            _ => {}
        }
        if let SessionFrame::Resume { instance: Some(instance), .. } = word
            && !servers[1]
            && *instance != Instance::from_bits(to as u128 + 1)
        {
            ledger.error(format!(
                "session {:?} is resumed at process {to}, not {instance:?}",
                ledger.number(*id)
            ));
        }
    }
}

impl Simulation {
    pub(crate) fn check_memory(&self) -> Result<(), String> {
        if !self.steps.is_multiple_of(16) {
            return Ok(());
        }
        for (at, process) in self.processes.iter().enumerate().filter(|(_, p)| p.alive) {
            let table = &process.table;
            let memory = self.plan.memory[usize::from(!process.is_server())];
            let ((promised, kept), queued) = (table.memory(), table.queued());
            // The overhead of pieces is not included in `memory`. Two neighbouring pieces are longer than the limit for
            // joining. Everything queued was reserved, also for sessions that have ended and are not fully read.
            let pieces = memory / (JOINED / 2) + 2 * self.plan.sessions;
            if promised > memory + pieces * PIECE || queued > promised {
                return Err(format!("process {at} reserved {promised} of {memory}, queues {queued}"));
            }
            let passing = table.relayed().1;
            if passing > memory.max(self.plan.windows[0].max as usize) {
                return Err(format!("process {at} queues {passing} relayed bytes"));
            }
            if kept > memory + memory / 4 + MAX_FAIR {
                return Err(format!("process {at} keeps {kept} unacknowledged bytes"));
            }
        }
        Ok(())
    }

    pub(crate) fn check_nothing_is_left(&mut self) -> Result<(), String> {
        let mut left = Vec::new();
        for (at, process) in self.processes.iter().enumerate().filter(|(_, p)| p.alive) {
            let table = &process.table;
            if !table.is_empty() || table.memory() != (0, 0) || table.relayed() != (0, 0) {
                let (memory, passing) = (table.memory(), table.relayed());
                left.push(format!(
                    "process {at}: {} sessions, memory {memory:?}, relayed {passing:?}",
                    table.len()
                ));
            }
        }
        for line in &self.lines {
            for (side, end) in line.ends.iter().enumerate().filter(|(_, end)| self.processes[end.at].alive) {
                let (sessions, waiting) = (end.link.sessions(), end.link.waiting());
                if sessions + waiting + end.turns.unanswered > 0 {
                    let unanswered = end.turns.unanswered;
                    left.push(format!(
                        "end {side} of link {}: {sessions} sessions, {waiting} waiting, {unanswered} pings unanswered",
                        line.number
                    ));
                }
            }
        }
        left.extend(self.tasks.names().into_iter().map(String::from));
        if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:#?}")) }
    }
}

/// Limit in bytes up to which small pieces are joined, and the overhead of a piece.
const JOINED: usize = 4 * 1024;
const PIECE: usize = 96;

/// Maximum number of bytes that a session keeps although the budget is spent, and one piece more.
pub(crate) const MAX_FAIR: usize = 128 * 1024 + 64 * 1024 + 1_000;
