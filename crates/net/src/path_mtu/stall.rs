//! A handshake that does not continue, and what the kernel knows of the reason.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::warn;

use crate::path_mtu::{
    KNOWN, KnownBlackHole, MAX_KNOWN, MtuBlackHole, MtuBlackHoleCertainty, REMEDY, is_suspected,
};
use crate::tcp_info::TcpInfoReader;

/// A stalled handshake.
#[derive(Debug)]
pub(super) struct StalledHandshake {
    pub(super) at: SocketAddr,
    /// Whether the kernel has proof: later bytes arrived, and the full segment before them did not.
    pub(super) is_certain: bool,
    /// Whether small segments helped at the dial before, or an earlier attempt had proof.
    pub(super) was_suspected: bool,
    /// Path MTU in bytes, if the kernel reports it.
    path_mtu: Option<u64>,
    /// Time from the connection to the stall.
    lasted: Duration,
    since: Instant,
}

impl StalledHandshake {
    /// Waits until the handshake over a new connection seems to stall.
    pub(super) async fn detect(at: SocketAddr, reader: Option<TcpInfoReader>) -> Self {
        let start = Instant::now();
        // The bytes received in order, and since when there is a gap after them.
        let mut gap = (0, start);
        loop {
            sleep(POLL_INTERVAL).await;
            let lasted = start.elapsed();
            let losses = reader.as_ref().and_then(TcpInfoReader::losses);
            let rtt = losses.map_or(Duration::ZERO, |losses| losses.rtt);
            let is_certain = losses.is_some_and(|losses| {
                if !losses.has_gap || losses.received != gap.0 {
                    gap = (losses.received, Instant::now());
                }
                let is_remotes = losses.remote_has_gap && losses.timeouts >= MIN_TIMEOUTS;
                is_remotes || gap.1.elapsed() >= GAP_TIMEOUT.max(rtt * 2)
            });
            if is_certain || lasted >= HANDSHAKE_TIMEOUT.max(rtt * RTTS_PER_HANDSHAKE) {
                let was_suspected = is_suspected(at.ip());
                let path_mtu = losses.map(|losses| losses.path_mtu);
                return Self { at, is_certain, was_suspected, path_mtu, lasted, since: Instant::now() };
            }
        }
    }

    /// Records the maximum segment for the address.
    pub(super) fn note(&self, segment: u32, certainty: MtuBlackHoleCertainty) -> MtuBlackHole {
        let loss = MtuBlackHole { to: self.at.ip(), lost: self.path_mtu, segment };
        let mut known = KNOWN.lock();
        if known.len() >= MAX_KNOWN {
            known.retain(|_, known| known.since.elapsed() < known.certainty.lasts());
        }
        if known.len() < MAX_KNOWN {
            known.insert(loss.to, KnownBlackHole { loss, since: Instant::now(), certainty });
        }
        loss
    }

    /// Records whether small segments helped: `limit` is their size in the attempt that succeeded, if one did.
    pub(super) fn settle(self, limit: Option<u32>) {
        // A busy server may also let a handshake wait, but then the next one waits just as long.
        let helped = self.is_certain || self.lasted >= self.since.elapsed() * MIN_SPEEDUP;
        match limit.filter(|_| helped) {
            Some(segment) if self.is_certain || self.was_suspected => {
                let loss = self.note(segment, MtuBlackHoleCertainty::Proven);
                warn!(error = %loss, hint = REMEDY, "path loses large packets, using small ones");
            }
            Some(segment) => drop(self.note(segment, MtuBlackHoleCertainty::Suspected)),
            None => drop(KNOWN.lock().remove(&self.at.ip())),
        }
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Retransmission timeouts of a segment that is lost because of its size, and not by chance.
const MIN_TIMEOUTS: u8 = 2;
/// Time in which a remote retransmits a lost segment several times.
const GAP_TIMEOUT: Duration = Duration::from_secs(1);
/// Duration of a slow handshake, and in RTTs. It leaves time for another one within an unresponsive link's 5 s.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(2500);
const RTTS_PER_HANDSHAKE: u32 = 8;
/// Without proof by the kernel, small segments helped if their handshake was faster than the stalled one by this
/// factor.
const MIN_SPEEDUP: u32 = 5;
