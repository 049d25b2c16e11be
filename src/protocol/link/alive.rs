//! When a link's peer last sent anything, and when to ping it.

use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::link::Link;
use crate::protocol::link::sender::Life;

/// Time of the peer's last frame, and the ping or end that follows silence.
#[derive(Debug)]
pub(super) struct Alive {
    pub(super) last_received: Instant,
    pub(super) last_ping: Instant,
    pub(super) looked: Instant,
    /// Silence after which the link is given up.
    pub(super) silence_limit: Duration,
    /// Silence after which the peer is pinged.
    pub(super) ask_after: Duration,
    /// Whether this end watches an extended link, as the end that dialled does.
    pub(super) watches: bool,
    /// When to look at a link that is watched.
    pub(super) watched: Option<Instant>,
}

impl Link {
    /// Has this end watch the link as well, although the far end has dialled.
    pub fn watch(&mut self) {
        self.alive.watches = true;
    }
}

/// What a look at a link of the extended dialect has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// All is well, or an answer is on its way.
    Fine,
    /// Its far end is to be asked.
    Ask,
    /// Its far end has not answered for too long.
    Silent,
}

impl Alive {
    /// Looks at a link of the extended dialect. One that is watched is asked in turn, whatever comes from it, as only an
    /// answer shows that both directions work; and not again while an answer is awaited.
    pub(super) fn look(&mut self, life: Life, now: Instant) -> Look {
        let unasked = now - self.last_ping;
        let look = match (life.silent_at(), life.ask_every) {
            (Some(at), _) if at <= now => Look::Silent,
            // The round trip has to be known, so the first question comes at once.
            (_, Some(every))
                if life.unanswered.is_none() && (unasked >= every || life.patience.is_none()) =>
            {
                Look::Ask
            }
            _ if now - self.last_received >= self.ask_after && unasked >= self.ask_after => Look::Ask,
            _ => Look::Fine,
        };
        if look == Look::Ask {
            self.last_ping = now;
        }
        let next = life.ask_every.map(|every| now + every / 2);
        let soon = life.silent_at().filter(|at| *at > now);
        self.watched = next.map(|next| soon.map_or(next, |at| at.min(next)).max(now + SOON));
        look
    }

    /// When to look for signs of life next.
    pub(super) fn next(&self) -> Instant {
        if let Some(next) = self.watched {
            return next;
        }
        (self.last_received.max(self.last_ping) + self.ask_after).max(self.looked + CHECK_INTERVAL)
    }

    /// Notes that something was received: whether it is time for a look as well, which waits for silence else. So a link
    /// that is pinged in time is never woken for its looks.
    pub(super) fn receives(&mut self, now: Instant) -> bool {
        self.last_received = now;
        now - self.looked >= PING_AFTER * 2
    }
}

/// A peer that has sent nothing for this long is pinged.
pub(super) const PING_AFTER: Duration = Duration::from_secs(6);
/// The same at the end that was dialled: later, so that an idle link has one ping at a time and not two that cross.
pub(super) const PING_CALLER_AFTER: Duration = Duration::from_millis(7500);
/// A link on which nothing at all came in for this long is given up.
pub(super) const SILENT: Duration = Duration::from_secs(15);
/// The least time between two looks, so that clocks that stand still do not make us spin.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The same on a link that is watched.
const SOON: Duration = Duration::from_millis(10);
/// SuperEdge's heartbeat, which a plain pod answers.
pub(super) const HEARTBEAT_EVERY: Duration = Duration::from_secs(60);
/// A plain edge sends a heartbeat each 60 s; HTTP/2's own pings notice a dead one much sooner.
pub(super) const SILENT_PLAIN_EDGE: Duration = Duration::from_secs(150);

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::protocol::link::trips::Trips;

    /// A line on which TCP sends again what is lost, and keeps the order.
    struct Line {
        trip: Duration,
        /// One packet in so many is lost; 0 for none.
        loses: u64,
        dice: u64,
        /// Nothing arrives any more from then on.
        dies: Option<Instant>,
        /// When the last packet arrived, there and back.
        last: [Instant; 2],
    }

    impl Line {
        fn is_lost(&mut self) -> bool {
            self.dice ^= self.dice << 13;
            self.dice ^= self.dice >> 7;
            self.dice ^= self.dice << 17;
            self.loses > 0 && self.dice.is_multiple_of(self.loses)
        }

        /// When a packet that is sent then arrives: TCP sends it again after a time-out, once more after another, and
        /// then each time after twice as long.
        fn arrives(&mut self, way: usize, at: Instant) -> Instant {
            let timeout = self.trip + Duration::from_millis(400);
            let (mut sent, mut wait) = (at, timeout);
            let mut first = true;
            while self.is_lost() {
                sent += wait;
                if !std::mem::take(&mut first) {
                    wait *= 2;
                }
            }
            self.last[way] = self.last[way].max(sent + self.trip / 2);
            self.last[way]
        }

        fn lives(&self, at: Instant) -> bool {
            self.dies.is_none_or(|dies| at < dies)
        }

        fn answers(&mut self, ping: Instant) -> Instant {
            let there = self.arrives(0, ping);
            self.arrives(1, there)
        }
    }

    /// A link that is watched over that line: how often in so long it seems silent, and how long after the line's death it does.
    fn watched(line: &mut Line, ask_every: Duration, time: Duration) -> (usize, Option<Duration>) {
        let begun = line.last[0];
        let mut now = begun;
        let mut alive = Alive {
            last_received: now,
            last_ping: now,
            looked: now,
            silence_limit: SILENT,
            ask_after: PING_AFTER,
            watches: true,
            watched: None,
        };
        let (mut trips, mut pings) = (Trips::default(), VecDeque::<(Instant, Instant)>::new());
        let (mut silent, mut was) = (0, false);
        while now < begun + time {
            while let Some((sent, _)) = pings.front().copied().filter(|(_, at)| *at <= now && line.lives(*at))
            {
                trips.sample(pings.pop_front().map_or(Duration::ZERO, |(_, at)| at - sent));
                alive.last_received = now;
            }
            let unanswered = pings.front().map(|(sent, _)| *sent);
            let life = Life { ask_every: Some(ask_every), unanswered, patience: trips.patience() };
            alive.looked = now;
            let look = alive.look(life, now);
            match look {
                Look::Ask => {
                    let answered = line.answers(now);
                    pings.push_back((now, answered));
                }
                Look::Silent if !line.lives(now) => return (silent, line.dies.map(|dies| now - dies)),
                Look::Silent => silent += usize::from(!was),
                Look::Fine => {}
            }
            was = look == Look::Silent;
            now = alive.next();
        }
        (silent, None)
    }

    fn line(trip: u64, loses: u64, seed: u64) -> Line {
        let now = Instant::now();
        Line { trip: Duration::from_millis(trip), loses, dice: seed * 7919 + 1, dies: None, last: [now; 2] }
    }

    #[tokio::test]
    async fn a_long_line_that_loses_packets_does_not_seem_silent() {
        for every in [500, 1000].map(Duration::from_millis) {
            let ten_minutes = Duration::from_secs(600);
            let times: usize = (1..=30)
                .map(|seed| {
                    let (silent, _) = watched(&mut line(600, 50, seed), every, ten_minutes);
                    silent
                })
                .sum();
            assert!(times <= 1, "{times} times in five hours");
        }
    }

    #[tokio::test]
    async fn a_line_that_dies_seems_silent_after_a_second_and_four_round_trips_behind_a_ping() {
        for (trip, every) in [(1, 500), (1, 1000), (100, 500), (100, 1000), (600, 500)] {
            let (mut line, every) = (line(trip, 0, 1), Duration::from_millis(every));
            line.dies = Some(line.last[0] + Duration::from_secs(20));
            let (silent, after) = watched(&mut line, every, Duration::from_secs(60));
            let (after, trip) = (after.unwrap(), line.trip);
            // A ping that was under way then counts as well.
            let soonest = Duration::from_secs(1) + 3 * trip;
            assert!(silent == 0 && after >= soonest, "{trip:?}: {after:?}");
            assert!(after <= soonest + every.max(trip) + trip + every / 2, "{trip:?}, {every:?}: {after:?}");
        }
    }
}
