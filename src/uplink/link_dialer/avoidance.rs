//! How long an edge avoids a server of its list that asks it to link elsewhere. Pure: times are arguments.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::names::Instance;

/// Whether one entry of `servers` is avoided.
///
/// An entry may be a load balancer, which leads elsewhere when it is dialled again. So an entry is avoided only if the
/// next link led back to the process that had asked, and it asks again.
#[derive(Debug, Default)]
pub(crate) struct Avoidance {
    /// The process that last asked the edge to link elsewhere.
    requester: Option<Instance>,
    /// Whether the next link after that led to the same process.
    resolves_to_requester: bool,
    until: Option<Instant>,
    /// Number of times that the entry was avoided in a row.
    times: u32,
}

impl Avoidance {
    /// Records that the process `by` has asked the edge to link elsewhere.
    pub(crate) fn on_move_requested(&mut self, by: Option<Instance>, now: Instant) {
        if self.resolves_to_requester && self.requester == by {
            let pause = INITIAL_AVOIDANCE.saturating_mul(1 << self.times.min(16)).min(MAX_AVOIDANCE);
            self.times += 1;
            self.until = Some(now + pause);
        } else {
            *self = Self { requester: by, ..Self::default() };
        }
    }

    /// Records that the entry has led to the process `to`.
    pub(crate) fn on_linked(&mut self, to: Option<Instance>) {
        self.resolves_to_requester = to.is_some() && to == self.requester;
    }

    /// Returns true if other entries are dialled first.
    pub(crate) fn is_avoided(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// How long a server is avoided, doubled each time: the pause of a server whose requests have no effect.
const INITIAL_AVOIDANCE: Duration = Duration::from_secs(600);
const MAX_AVOIDANCE: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use super::*;

    fn process(bits: u128) -> Option<Instance> {
        Some(Instance::from_bits(bits))
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_resolves_to_the_sending_process_is_avoided_with_backoff() {
        let (mut entry, mut now) = (Avoidance::default(), Instant::now());
        let [a, b] = [1, 2].map(process);
        entry.on_linked(a);
        entry.on_move_requested(a, now);
        assert!(!entry.is_avoided(now), "it may be a load balancer");
        for pause in [600, 1200, 2400] {
            entry.on_linked(a);
            entry.on_move_requested(a, now);
            now += Duration::from_secs(pause - 1);
            assert!(entry.is_avoided(now));
            now += Duration::from_secs(1);
            assert!(!entry.is_avoided(now));
        }
        // A process that was restarted may have room.
        entry.on_linked(b);
        entry.on_move_requested(b, now);
        assert!(!entry.is_avoided(now));
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_alternates_between_processes_is_not_avoided() {
        let (mut entry, now) = (Avoidance::default(), Instant::now());
        let [a, b] = [1, 2].map(process);
        for (asks, next) in [(a, b), (b, a), (a, b)] {
            entry.on_move_requested(asks, now);
            entry.on_linked(next);
            assert!(!entry.is_avoided(now));
        }
        for unknown in [None, None] {
            entry.on_move_requested(unknown, now);
            entry.on_linked(unknown);
            assert!(!entry.is_avoided(now));
        }
    }
}
