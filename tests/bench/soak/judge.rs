//! Checks whether a session was correct: only the death of one of its two end processes may cut it, and no end may be
//! false.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::soak::plan::{Kind, Plan};
use crate::soak::pump::{End, Side};
use crate::soak::world::{Died, Ends, HANG, OUTLIVES, World};

/// A session after its client has ended.
#[derive(Debug)]
pub(crate) struct Judge {
    pub(crate) world: Arc<World>,
    pub(crate) plan: Plan,
    pub(crate) ends: Ends,
    pub(crate) client: Side,
}

impl Judge {
    /// Waits for the target's report, and judges the session.
    pub(crate) async fn read_output(self, target_report: oneshot::Receiver<Side>) {
        let started = Instant::now();
        let target = timeout(HANG + self.plan.doze, target_report).await.ok().and_then(Result::ok);
        let over = if target.is_some() { Instant::now() } else { started };
        let died = self.world.died(&self.ends);
        let faults = self.faults(target.as_ref(), died, over);
        let fell = died.iter().any(|died| *died != Died::No);
        if !fell && matches!(self.plan.kind, Kind::ClientAborts | Kind::Vanish) {
            self.world.lagged(self.plan.id, started.elapsed().saturating_sub(self.plan.doze));
        }
        let how = if self.is_whole(target.as_ref()) { "whole" } else { "cut" };
        self.world.note(&format!(
            "{} {how}: client {:?}, target {target:?}, died {died:?}",
            self.plan.id, self.client
        ));
        for fault in faults {
            let Plan { id, kind, .. } = self.plan;
            let Ends { near, far, .. } = self.ends;
            self.world.fault(format!(
                "session {id} ({kind:?}, ends {near} and {far}, died {died:?}): {fault}; client {:?}, target {target:?}",
                self.client
            ));
        }
        self.world.ended(self.plan.kind, how == "whole");
        self.world.forget(self.plan.id);
        self.world.running.fetch_sub(1, Relaxed);
    }

    /// Returns what was wrong with the session. `over` is when its last side ended.
    fn faults(&self, target: Option<&Side>, [near, far]: [Died; 2], over: Instant) -> Vec<String> {
        let mut faults = Vec::new();
        let fell = near != Died::No || far != Died::No;
        for (side_name, side) in [("client", Some(&self.client)), ("target", target)] {
            match side.map(|side| &side.end) {
                Some(End::Wrong(what)) => {
                    faults.push(format!("the {side_name} received wrong bytes: {what}"))
                }
                Some(End::Hung) => faults.push(format!("the {side_name} hung")),
                None if !fell => faults.push("the target has not ended".to_owned()),
                // The target was never reached, or its process was killed before it dialled.
                _ => {}
            }
        }
        if !faults.is_empty() {
            return faults;
        }
        // The kernel of a killed process ends its connections as if they were complete. No other process may.
        if near != Died::Killed && self.client.lies(self.client_expects()) {
            faults.push("the client's bytes ended early without an error".to_owned());
        }
        if far != Died::Killed && target.is_some_and(|side| side.lies(self.target_expects())) {
            faults.push("the target's bytes ended early without an error".to_owned());
        }
        if fell && let Some(time) = self.world.outlived(&self.ends, over).filter(|time| *time > OUTLIVES) {
            faults.push(format!("it outlived its process by {time:?}"));
        }
        if !fell && faults.is_empty() && !self.is_whole(target) {
            faults.push("it was cut although both its processes are alive".to_owned());
        }
        faults
    }

    fn is_whole(&self, target: Option<&Side>) -> bool {
        let Some(target) = target else { return false };
        let client_has_all = self.client_expects().is_none_or(|bytes| self.client.got == bytes);
        let target_has_all = self.target_expects().is_none_or(|bytes| target.got == bytes);
        let ended = match self.plan.kind {
            Kind::TargetAborts => true,
            // An aborted connection is not an end.
            Kind::ClientAborts => target.is_reset(),
            Kind::Vanish => true,
            _ => self.client.end == End::Finished && target.end == End::Finished,
        };
        client_has_all && target_has_all && ended
    }

    /// Returns the bytes that the client must receive; `None` if it does not wait for them.
    fn client_expects(&self) -> Option<u64> {
        (!matches!(self.plan.kind, Kind::ClientAborts | Kind::Vanish)).then_some(self.plan.down)
    }

    /// Returns the bytes that the target must receive; `None` if it does not wait for them, or the client did not send
    /// all.
    fn target_expects(&self) -> Option<u64> {
        (!matches!(self.plan.kind, Kind::TargetAborts | Kind::Vanish)).then_some(self.plan.up)
    }
}

impl Side {
    /// Returns true for an end without a reset before all bytes have arrived.
    fn lies(&self, expected: Option<u64>) -> bool {
        self.end == End::Finished && !self.is_reset() && expected.is_some_and(|bytes| self.got < bytes)
    }

    /// A failed write consumes the error of a reset, so that the reader sees a regular end.
    fn is_reset(&self) -> bool {
        matches!(self.end, End::Reset(_)) || self.unsent.is_some()
    }
}
