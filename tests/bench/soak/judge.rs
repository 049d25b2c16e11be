//! Was a session as it should be? Only the death of one of its two end processes may cut it, and nothing may lie.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::soak::plan::{Kind, Plan};
use crate::soak::pump::{End, Side};
use crate::soak::world::{Died, Ends, HANG, OUTLIVES, World};

/// One session whose client has ended.
#[derive(Debug)]
pub(crate) struct Judge {
    pub(crate) world: Arc<World>,
    pub(crate) plan: Plan,
    pub(crate) ends: Ends,
    pub(crate) client: Side,
}

impl Judge {
    /// Hears the target, too, and judges.
    pub(crate) async fn hear(self, told: oneshot::Receiver<Side>) {
        let started = Instant::now();
        let target = timeout(HANG + self.plan.doze, told).await.ok().and_then(Result::ok);
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

    /// What was wrong with it; `over` is when its last side has ended.
    fn faults(&self, target: Option<&Side>, [near, far]: [Died; 2], over: Instant) -> Vec<String> {
        let mut faults = Vec::new();
        let fell = near != Died::No || far != Died::No;
        for (who, side) in [("client", Some(&self.client)), ("target", target)] {
            match side.map(|side| &side.end) {
                Some(End::Wrong(what)) => faults.push(format!("the {who} got wrong bytes: {what}")),
                Some(End::Hung) => faults.push(format!("the {who} hung")),
                None if !fell => faults.push("the target has not ended".to_owned()),
                // A target that was never reached, or whose process was killed before it dialled.
                _ => {}
            }
        }
        if !faults.is_empty() {
            return faults;
        }
        // The kernel of a process that was killed ends its connections as if all were well: no other may.
        if near != Died::Killed && self.client.lies(self.client_expects()) {
            faults.push("the client's bytes ended too early, as if they were all".to_owned());
        }
        if far != Died::Killed && target.is_some_and(|side| side.lies(self.target_expects())) {
            faults.push("the target's bytes ended too early, as if they were all".to_owned());
        }
        if fell && let Some(time) = self.world.outlived(&self.ends, over).filter(|time| *time > OUTLIVES) {
            faults.push(format!("it outlived its process by {time:?}"));
        }
        if !fell && faults.is_empty() && !self.is_whole(target) {
            faults.push("it was cut though both its processes live".to_owned());
        }
        faults
    }

    fn is_whole(&self, target: Option<&Side>) -> bool {
        let Some(target) = target else { return false };
        let client_has_all = self.client_expects().is_none_or(|bytes| self.client.got == bytes);
        let target_has_all = self.target_expects().is_none_or(|bytes| target.got == bytes);
        let ended = match self.plan.kind {
            Kind::TargetAborts => true,
            // Breaking off is no end.
            Kind::ClientAborts => target.is_reset(),
            Kind::Vanish => true,
            _ => self.client.end == End::Finished && target.end == End::Finished,
        };
        client_has_all && target_has_all && ended
    }

    /// Bytes that the client must get; none if it does not stay for them.
    fn client_expects(&self) -> Option<u64> {
        (!matches!(self.plan.kind, Kind::ClientAborts | Kind::Vanish)).then_some(self.plan.down)
    }

    /// Bytes that the target must get; none if it does not stay for them, or the client did not send them all.
    fn target_expects(&self) -> Option<u64> {
        (!matches!(self.plan.kind, Kind::TargetAborts | Kind::Vanish)).then_some(self.plan.up)
    }
}

impl Side {
    /// An end that is no reset, before all has come.
    fn lies(&self, expected: Option<u64>) -> bool {
        self.end == End::Finished && !self.is_reset() && expected.is_some_and(|bytes| self.got < bytes)
    }

    /// A write that failed takes the news of a reset from the reader, who then sees an end.
    fn is_reset(&self) -> bool {
        matches!(self.end, End::Reset(_)) || self.unsent.is_some()
    }
}
