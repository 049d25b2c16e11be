//! The plan of a session: chosen by the client, sent to the target in the first line.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

/// One session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The id in every log.
    pub(crate) id: u64,
    /// Seed of both patterns.
    pub(crate) seed: u64,
    /// What both sides do.
    pub(crate) kind: Kind,
    /// Bytes from the client. A client that aborts may send fewer.
    pub(crate) up: u64,
    /// Bytes from the target.
    pub(crate) down: u64,
    /// Bytes per second, in either direction.
    pub(crate) rate: u64,
    /// Pause before a response, or between two keystrokes.
    pub(crate) pause: Duration,
    /// Time for which readers stop in the middle.
    pub(crate) doze: Duration,
}

/// What both sides do, and which side ends first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The target sends and ends; then the client ends.
    Download,
    /// The client sends and ends; then the target responds.
    Upload,
    /// Both send at the same time, and each ends on its own.
    Both,
    /// Small pieces, each sent back.
    Echo,
    /// A short request that ends, a pause, a long response.
    HalfClose,
    /// The target responds and closes without reading what the client sends.
    TargetAborts,
    /// The client sends and closes without reading what the target sends.
    ClientAborts,
    /// The client aborts in the middle.
    Vanish,
}

impl Plan {
    /// Returns a random session. Sessions opened by an edge end in an orderly way.
    pub(crate) fn random(id: u64, rng: &mut StdRng, by_edge: bool) -> Self {
        let kinds = if by_edge { KINDS.get(..5).unwrap_or_default() } else { &KINDS };
        let kind = kinds.get(rng.random_range(0..kinds.len())).copied().unwrap_or(Kind::Download);
        // 64 KiB/s to 4 MiB/s, with as many slow sessions as fast ones.
        let rate = 1 << rng.random_range(16..=22);
        let much = (rate * rng.random_range(2..=25)).min(MOST);
        let little = rng.random_range(0..2048);
        // Bytes that fit into the initial window of a connection arrive even if their sender closes at once.
        let abrupt = rng.random_range(1..=32 * 1024);
        let (up, down) = match kind {
            Kind::Download => (0, much),
            Kind::Upload => (much, 8),
            Kind::Both | Kind::Vanish => (much, much / 2 + little),
            Kind::Echo => (rng.random_range(200..4000), 0),
            Kind::HalfClose => (little, much),
            Kind::TargetAborts => (rng.random_range(64 * 1024..1 << 20), abrupt),
            Kind::ClientAborts => (abrupt, rng.random_range(1..1 << 20)),
        };
        let pause = Duration::from_millis(match kind {
            Kind::Echo if rng.random_bool(0.1) => rng.random_range(5_000..15_000),
            Kind::Echo => rng.random_range(10..300),
            Kind::HalfClose => rng.random_range(0..8_000),
            _ => 0,
        });
        let doze = if rng.random_bool(0.15) { rng.random_range(500..8_000) } else { 0 };
        let down = if kind == Kind::Echo { up } else { down };
        Self { id, seed: rng.random(), kind, up, down, rate, pause, doze: Duration::from_millis(doze) }
    }

    /// Returns a plan of a few bytes in each direction.
    pub(crate) fn short(id: u64) -> Self {
        let (up, down, rate) = (100, 100, 1 << 20);
        Self { id, seed: id, kind: Kind::Echo, up, down, rate, pause: Duration::ZERO, doze: Duration::ZERO }
    }
}

/// All kinds; the orderly ones first.
const KINDS: [Kind; 8] = [
    Kind::Download,
    Kind::Upload,
    Kind::Both,
    Kind::Echo,
    Kind::HalfClose,
    Kind::TargetAborts,
    Kind::ClientAborts,
    Kind::Vanish,
];
/// Maximum bytes of one direction.
const MOST: u64 = 48 << 20;
