//! When a link's remote is pinged, and after how long it counts as unresponsive or dead: one table of times.
//!
//! Nothing here reads a clock. A late timer condemns nobody: what has arrived is read before a check, and who acts on
//! an unresponsive link first waits 20 ms for an answer that has arrived meanwhile.

use std::time::Duration;

use tokio::time::Instant;

use crate::congestion::MinFilter;

/// The role of a link at this end, which decides on its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LivenessRole {
    /// Dialled here: the link of an edge or a user's program to its server, or of a server to a peer.
    Dialled,
    /// Accepted here.
    Accepted,
    /// Accepted here for interactive sessions: both ends watch it. The edge cannot report its death here, because its
    /// next attempt may reach another server.
    AcceptedInteractive,
    /// To an edge of SuperEdge, which sends heartbeats.
    SuperEdgeEdge,
    /// To a server of SuperEdge, which answers heartbeats.
    SuperEdgeServer,
}

/// The times of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LivenessTimeouts {
    /// A link on which nothing was received for this long is checked, and its remote pinged if it answers pings.
    idle: Duration,
    /// A link on which nothing was received for this long is dead.
    dead: Duration,
    /// A link whose remote has taken nothing for this long is dead.
    stalled: Option<Duration>,
    /// Whether pings go out regularly while sessions are active, and one without an answer makes the link unresponsive.
    watched: bool,
    /// How its remote is pinged.
    pings: PingMode,
}

/// How a remote is pinged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PingMode {
    /// After silence, and while the link is watched.
    Numbered,
    /// Regularly, whatever is received.
    Heartbeat(Duration),
    /// Not at all: it sends heartbeats itself.
    Never,
}

impl LivenessRole {
    const fn times(self) -> LivenessTimeouts {
        let pings = PingMode::Numbered;
        let extended =
            LivenessTimeouts { idle: IDLE, dead: DEAD, stalled: Some(STALLED), watched: false, pings };
        // A plain remote may stop reading for as long as one of its targets does.
        let plain = LivenessTimeouts { stalled: None, pings: PingMode::Never, ..extended };
        match self {
            Self::Dialled => LivenessTimeouts { watched: true, ..extended },
            // Longer, so that an idle link has one ping at a time, and not two that cross.
            Self::Accepted => LivenessTimeouts { idle: IDLE_ACCEPTED, ..extended },
            Self::AcceptedInteractive => LivenessTimeouts { idle: IDLE_ACCEPTED, watched: true, ..extended },
            // Its heartbeat comes every 60 s; HTTP/2's own pings detect a dead one much sooner.
            Self::SuperEdgeEdge => LivenessTimeouts { dead: Duration::from_secs(150), ..plain },
            Self::SuperEdgeServer => LivenessTimeouts {
                dead: HEARTBEAT.saturating_add(DEAD),
                pings: PingMode::Heartbeat(HEARTBEAT),
                ..plain
            },
        }
    }
}

const IDLE: Duration = Duration::from_secs(6);
const IDLE_ACCEPTED: Duration = Duration::from_millis(7500);
/// A link on which nothing was received for this long is dead.
pub const DEAD: Duration = Duration::from_secs(15);
/// Longer than the largest frame takes on the slowest line.
pub(crate) const STALLED: Duration = Duration::from_secs(60);
/// Interval of SuperEdge's heartbeat, which a plain server answers.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Interval of HTTP/2's own pings to a server. A Go server treats pings more often than every 15 s as an attack.
pub(crate) const HTTP2_PING_AFTER: Duration = Duration::from_secs(20);
/// The same to an edge: shorter than a Go edge's 10 s, so that the edge sends none.
pub(crate) const HTTP2_PING_EDGE_AFTER: Duration = Duration::from_secs(9);
/// Timeout of these pings: long enough for a bad line, short enough to detect a dead one.
pub(crate) const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval of pings while sessions are active, and while they were active within [`WATCHED`].
const PING_ACTIVE: Duration = Duration::from_millis(500);
const PING_WATCHED: Duration = Duration::from_secs(1);
/// How long sessions count as active after a frame.
const ACTIVE: Duration = Duration::from_secs(2);
/// How long a link is watched after a frame of a session, and after a probe.
pub(crate) const WATCHED: Duration = Duration::from_secs(600);
pub(crate) const PROBED: Duration = Duration::from_secs(15);
/// A frame after a pause of at least this wakes the tasks that watch the link.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);
/// Enough for a process that was suspended to read an answer that arrived meanwhile. Its clock kept running, so its
/// link seems unresponsive for the same time.
pub(crate) const CONFIRM_AFTER: Duration = Duration::from_millis(20);
/// Minimum time between two checks, so that a stopped clock does not cause a busy loop; and on a watched link.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
const CHECK_INTERVAL_WATCHED: Duration = Duration::from_millis(10);
/// Timeout of the first answer, before the RTT is known: enough for a line of 1 s.
const FIRST_ANSWER: Duration = Duration::from_secs(5);

/// Why a link is suspected to be dead. Its remote has to answer a ping in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suspicion {
    /// It has never answered one.
    New,
    /// Another process requests its remote's name.
    NameRequested,
    /// Its remote has made another link.
    Superseded,
    /// Its edge has linked to another server. It may have done so because it receives nothing from here.
    EdgeMoved {
        /// Time since the remote last sent anything.
        idle: Duration,
        /// The kernel's RTT, if it reports one.
        line: Option<Duration>,
    },
}

impl Suspicion {
    pub(crate) fn timeout(self) -> Duration {
        const SECOND: Duration = Duration::from_secs(1);
        match self {
            Self::New => FIRST_ANSWER,
            Self::NameRequested => 2 * SECOND,
            // A live link with recent sessions is hardly ever idle for this long, because its edge pings every second.
            Self::EdgeMoved { idle, line: Some(line) } if idle >= Duration::from_millis(1400) => {
                SECOND.min(Duration::from_millis(250) + 2 * line)
            }
            Self::Superseded | Self::EdgeMoved { .. } => SECOND,
        }
    }
}

/// What a check of a link considers, in addition to what the read loop knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LivenessSigns {
    /// For how much longer the link is watched.
    pub(crate) watched_for: Duration,
    /// Since when a ping is unanswered.
    pub(crate) unanswered: Option<Instant>,
    /// How long a ping may stay unanswered. `None` before the first answer, which may take [`FIRST_ANSWER`].
    pub(crate) timeout: Option<Duration>,
    /// Since when the remote has taken nothing although something waits for it.
    pub(crate) blocked: Option<Instant>,
}

impl LivenessSigns {
    /// Returns true if frames of sessions were sent or received within the last 2 s.
    pub(crate) fn is_active(&self) -> bool {
        // A link is watched for `WATCHED` after each frame, so this much of it has passed since the last one.
        self.watched_for + ACTIVE > WATCHED
    }

    /// Returns the interval of pings. `None` means that the remote is pinged only when nothing is received.
    fn ping_interval(&self) -> Option<Duration> {
        match self.watched_for {
            Duration::ZERO => None,
            _ if self.is_active() => Some(PING_ACTIVE),
            _ => Some(PING_WATCHED),
        }
    }

    /// Returns when the link counts as unresponsive if no answer arrives.
    pub(crate) fn unresponsive_at(&self) -> Option<Instant> {
        let unanswered = self.unanswered.filter(|_| !self.watched_for.is_zero())?;
        Some(unanswered + self.timeout.unwrap_or(FIRST_ANSWER))
    }
}

/// What a link's read loop knows of its remote's life.
#[derive(Debug)]
pub(crate) struct Liveness {
    times: LivenessTimeouts,
    last_received: Instant,
    last_ping: Instant,
    checked: Instant,
    /// When to check a watched link next.
    watched_check: Option<Instant>,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LivenessVerdict {
    /// The link is alive, or an answer is pending.
    Alive,
    /// The remote must be pinged.
    PingDue,
    /// The remote has not answered in time.
    Unresponsive,
    /// The remote takes nothing.
    Stalled,
    /// Nothing was received for that time.
    Dead(Duration),
}

impl Liveness {
    pub(crate) fn new(role: LivenessRole, now: Instant) -> Self {
        Self { times: role.times(), last_received: now, last_ping: now, checked: now, watched_check: None }
    }

    /// Returns true if this end watches the link.
    pub(crate) fn is_watched(&self) -> bool {
        self.times.watched
    }

    /// Checks the link.
    ///
    /// A watched link is pinged regularly whatever is received, because only an answer shows that both directions work.
    /// It is not pinged again while an answer is pending.
    pub(crate) fn handle_timeout(&mut self, signs: LivenessSigns, now: Instant) -> LivenessVerdict {
        self.checked = now;
        if now - self.last_received >= self.times.dead {
            return LivenessVerdict::Dead(self.times.dead);
        }
        if self.is_stalled(signs.blocked, now) {
            return LivenessVerdict::Stalled;
        }
        let signs = if self.times.watched { signs } else { LivenessSigns::default() };
        let verdict = if signs.unresponsive_at().is_some_and(|at| at <= now) {
            LivenessVerdict::Unresponsive
        } else if self.is_ping_due(signs, now) {
            self.last_ping = now;
            LivenessVerdict::PingDue
        } else {
            LivenessVerdict::Alive
        };
        let soon = signs.unresponsive_at().filter(|at| *at > now);
        let regular = signs.ping_interval().map(|interval| now + interval / 2);
        self.watched_check = regular
            .map(|regular| soon.map_or(regular, |at| at.min(regular)).max(now + CHECK_INTERVAL_WATCHED));
        verdict
    }

    fn is_ping_due(&self, signs: LivenessSigns, now: Instant) -> bool {
        let unpinged = now - self.last_ping;
        match self.times.pings {
            PingMode::Never => false,
            PingMode::Heartbeat(interval) => unpinged >= interval,
            PingMode::Numbered => {
                // The RTT has to be known, so the first ping is sent at once.
                let is_regular = signs.ping_interval().is_some_and(|interval| {
                    signs.unanswered.is_none() && (unpinged >= interval || signs.timeout.is_none())
                });
                is_regular || unpinged.min(now - self.last_received) >= self.times.idle
            }
        }
    }

    /// Returns true if a remote has stopped reading, which is blocked since that time. Otherwise the last frames queued
    /// for it, and their sessions, would be kept forever.
    pub(crate) fn is_stalled(&self, blocked: Option<Instant>, now: Instant) -> bool {
        let stalled = self.times.stalled;
        stalled.zip(blocked).is_some_and(|(stalled, since)| now - since >= stalled)
    }

    /// Returns when to check the link next.
    pub(crate) fn poll_timeout(&self) -> Instant {
        let idle = self.last_received.max(self.last_ping) + self.times.idle;
        let dead = self.last_received + self.times.dead;
        self.watched_check.unwrap_or(idle.min(dead).max(self.checked + CHECK_INTERVAL))
    }

    /// Records that something was received. Returns true if a check is due, which otherwise only runs on silence. So a
    /// link that is pinged in time is never woken just for a check.
    pub(crate) fn handle_received(&mut self, now: Instant) -> bool {
        self.last_received = now;
        now - self.checked >= IDLE * 2
    }
}

/// The smoothed RTT of pings and its variation.
#[derive(Debug, Default)]
pub(crate) struct RttEstimator {
    /// `None` before the first answer.
    smoothed: Option<Duration>,
    variation: Duration,
    least: MinFilter,
    /// The longest RTT of the last minutes, and when it was measured.
    longest: Option<(Duration, Instant)>,
}

impl RttEstimator {
    /// Records the RTT of an answered ping. Returns the minimum RTT of the last minutes.
    pub(crate) fn sample(&mut self, rtt: Duration, now: Instant) -> Duration {
        let least = self.least.sample(rtt, now);
        let renews = |(longest, at)| rtt >= longest || now.saturating_duration_since(at) >= LONGEST_KEPT;
        if self.longest.is_none_or(renews) {
            self.longest = Some((rtt, now));
        }
        let Some(smoothed) = self.smoothed else {
            self.smoothed = Some(rtt);
            return least;
        };
        self.variation = (self.variation * 3 + smoothed.abs_diff(rtt)) / 4;
        self.smoothed = Some((smoothed * 7 + rtt) / 8);
        least
    }

    /// Returns how long a ping may stay unanswered before the link counts as unresponsive: 1 s and four RTTs, or 5/4 of
    /// the longest RTT of the last minutes if that is more.
    ///
    /// A lost packet is retransmitted after slightly more than two of these RTTs, and again a second later. A radio may
    /// pause for longer from time to time, and the mean forgets that within seconds. Each such pause must be a quarter
    /// longer than the last one to be a false alarm, so there are about ten before the maximum is reached. Returns
    /// `None` before the first answer.
    pub(crate) fn ping_timeout(&self) -> Option<Duration> {
        let usual = MIN_PING_TIMEOUT + (self.smoothed? + self.variation) * RTTS_PER_TIMEOUT;
        let (longest, _) = self.longest?;
        Some(usual.max((longest * 5 / 4).min(MAX_PATIENCE)))
    }
}

const MIN_PING_TIMEOUT: Duration = Duration::from_secs(1);
const RTTS_PER_TIMEOUT: u32 = 4;
/// How long the longest RTT counts.
const LONGEST_KEPT: Duration = Duration::from_secs(600);
/// Maximum timeout because of one long RTT: less than [`DEAD`], so that a backup link is still of use.
const MAX_PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod rtt_tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_long_pause_of_the_line_is_remembered_for_ten_minutes() {
        let mut rtts = RttEstimator::default();
        let mut now = Instant::now();
        for (millis, times) in [(100, 20), (3000, 1), (100, 600)] {
            for _ in 0..times {
                now += Duration::from_millis(500);
                rtts.sample(Duration::from_millis(millis), now);
            }
        }
        assert_eq!(rtts.ping_timeout(), Some(Duration::from_millis(3750)));
        rtts.sample(Duration::from_millis(100), now + LONGEST_KEPT);
        assert!(rtts.ping_timeout().is_some_and(|timeout| timeout <= Duration::from_millis(1420)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_least_round_trip_is_that_of_the_last_minutes_once_enough_were_measured() {
        let mut rtts = RttEstimator::default();
        let mut now = Instant::now();
        let mut measured = |millis: u64, minutes: u32| {
            let mut least = Duration::ZERO;
            for _ in 0..minutes * 10 {
                now += Duration::from_secs(6);
                least = rtts.sample(Duration::from_millis(millis), now);
            }
            least.as_millis()
        };
        assert_eq!(measured(2, 4), 2);
        assert_eq!(measured(60, 5), 2, "a queue may take that long");
        assert_eq!(measured(60, 7), 60);
        assert_eq!(measured(2, 1), 2, "a shorter path is known at once");
    }

    #[test]
    fn a_steady_line_is_given_a_second_and_four_round_trips_and_one_that_varies_more() {
        let mut rtts = RttEstimator::default();
        assert_eq!(rtts.ping_timeout(), None);
        for _ in 0..20 {
            rtts.sample(Duration::from_millis(100), Instant::now());
        }
        assert_eq!(rtts.ping_timeout(), Some(Duration::from_millis(1400)));
        rtts.sample(Duration::from_millis(500), Instant::now());
        let patience = rtts.ping_timeout().unwrap();
        assert_eq!(patience, Duration::from_millis(1000 + 4 * (150 + 100)));
    }
}

#[cfg(test)]
mod liveness_tests {
    use std::collections::VecDeque;

    use super::*;

    /// A line on which TCP retransmits lost packets and keeps the order.
    struct Line {
        rtt: Duration,
        /// One in this number of packets is lost; 0 for none.
        loses: u64,
        dice: u64,
        /// Nothing arrives after this time.
        dies: Option<Instant>,
        /// Arrival of the last packet in each direction.
        last: [Instant; 2],
    }

    impl Line {
        fn is_lost(&mut self) -> bool {
            self.dice ^= self.dice << 13;
            self.dice ^= self.dice >> 7;
            self.dice ^= self.dice << 17;
            self.loses > 0 && self.dice.is_multiple_of(self.loses)
        }

        /// Returns when a packet sent at that time arrives. TCP retransmits it after a timeout, again after another,
        /// and then each time after twice as long.
        fn arrives(&mut self, way: usize, at: Instant) -> Instant {
            let timeout = self.rtt + Duration::from_millis(400);
            let mut sent = at;
            let mut wait = timeout;
            let mut first = true;
            while self.is_lost() {
                sent += wait;
                if !std::mem::take(&mut first) {
                    wait *= 2;
                }
            }
            self.last[way] = self.last[way].max(sent + self.rtt / 2);
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

    /// Watches a link over that line. Returns how often it seemed unresponsive within `time`, and how long after the
    /// line's death it did.
    fn watched(line: &mut Line, watched_for: Duration, time: Duration) -> (usize, Option<Duration>) {
        let started = line.last[0];
        let mut now = started;
        let mut liveness = Liveness::new(LivenessRole::Dialled, now);
        let mut rtts = RttEstimator::default();
        let mut pings = VecDeque::<(Instant, Instant)>::new();
        let mut silent = 0;
        let mut was = false;
        while now < started + time {
            while let Some((sent, _)) = pings.front().copied().filter(|(_, at)| *at <= now && line.lives(*at))
            {
                rtts.sample(pings.pop_front().map_or(Duration::ZERO, |(_, at)| at - sent), now);
                liveness.last_received = now;
            }
            let unanswered = pings.front().map(|(sent, _)| *sent);
            let signs =
                LivenessSigns { watched_for, unanswered, timeout: rtts.ping_timeout(), blocked: None };
            let verdict = liveness.handle_timeout(signs, now);
            match verdict {
                LivenessVerdict::PingDue => {
                    let answered = line.answers(now);
                    pings.push_back((now, answered));
                }
                LivenessVerdict::Unresponsive if !line.lives(now) => {
                    return (silent, line.dies.map(|dies| now - dies));
                }
                LivenessVerdict::Unresponsive => silent += usize::from(!was),
                LivenessVerdict::Alive | LivenessVerdict::Stalled | LivenessVerdict::Dead(_) => {}
            }
            was = verdict == LivenessVerdict::Unresponsive;
            now = liveness.poll_timeout();
        }
        (silent, None)
    }

    fn line(rtt: u64, loses: u64, seed: u64) -> Line {
        let now = Instant::now();
        Line { rtt: Duration::from_millis(rtt), loses, dice: seed * 7919 + 1, dies: None, last: [now; 2] }
    }

    #[tokio::test]
    async fn a_long_line_that_loses_packets_does_not_seem_silent() {
        for watched_for in [WATCHED, WATCHED - ACTIVE] {
            let ten_minutes = Duration::from_secs(600);
            let times: usize = (1..=30)
                .map(|seed| {
                    let (silent, _) = watched(&mut line(600, 50, seed), watched_for, ten_minutes);
                    silent
                })
                .sum();
            assert!(times <= 1, "{times} times in five hours");
        }
    }

    #[test]
    fn a_link_is_dead_after_the_silence_of_its_role() {
        for (role, dead) in [
            (LivenessRole::Dialled, DEAD),
            (LivenessRole::Accepted, DEAD),
            (LivenessRole::AcceptedInteractive, DEAD),
            (LivenessRole::SuperEdgeEdge, Duration::from_secs(150)),
            (LivenessRole::SuperEdgeServer, HEARTBEAT + DEAD),
        ] {
            let mut liveness = Liveness::new(role, Instant::now());
            let started = Instant::now();
            let mut now = started;
            while !matches!(liveness.handle_timeout(LivenessSigns::default(), now), LivenessVerdict::Dead(_))
            {
                now = liveness.poll_timeout();
            }
            assert!(
                (now - started).abs_diff(dead) < Duration::from_millis(100),
                "{role:?}: {:?}",
                now - started
            );
        }
    }

    #[tokio::test]
    async fn a_line_that_dies_seems_silent_after_a_second_and_four_round_trips_behind_a_ping() {
        for (rtt, every) in [(1, 500), (1, 1000), (100, 500), (100, 1000), (600, 500)] {
            let mut line = line(rtt, 0, 1);
            let every = Duration::from_millis(every);
            line.dies = Some(line.last[0] + Duration::from_secs(20));
            let watched_for = if every == PING_ACTIVE { WATCHED } else { WATCHED - ACTIVE };
            let (silent, after) = watched(&mut line, watched_for, Duration::from_secs(60));
            let after = after.unwrap();
            let rtt = line.rtt;
            // A ping in flight at that time counts as well.
            let soonest = Duration::from_secs(1) + 3 * rtt;
            assert!(silent == 0 && after >= soonest, "{rtt:?}: {after:?}");
            assert!(after <= soonest + every.max(rtt) + rtt + every / 2, "{rtt:?}, {every:?}: {after:?}");
        }
    }
}
