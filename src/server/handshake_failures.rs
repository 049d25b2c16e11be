//! Logs failed TLS handshakes by address and reason; before the handshake no edge is known.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;

use crate::server::link_rates::LinkRateLimiter;
use tunnel_base::drain::Drain;
use tunnel_base::policy::canonical_ip;
use tunnel_net::tls::error::TlsHandshakeError;

/// Failed handshakes of the last minute. The first ones of a minute are logged at once and the others summarised at its
/// end, so that no caller can flood the log. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct HandshakeFailures(Arc<Mutex<FailureWindow>>);

/// The failed TLS handshakes of the current minute, kept by [`HandshakeFailures`].
#[derive(Debug, Default)]
struct FailureWindow {
    /// By address and reason; the others are only counted.
    known: HashMap<(IpAddr, &'static str), HandshakeFailureCount>,
    /// Number of failures of other addresses, once `known` is full.
    others: u64,
}

/// The failures of one address for one reason in the current minute.
#[derive(Debug)]
struct HandshakeFailureCount {
    /// Text of the first error.
    why: String,
    /// Number of failures not logged yet.
    unlogged: u64,
}

impl HandshakeFailures {
    /// Records a failed handshake, to be logged now or at the end of the minute. Closed connections are ignored,
    /// because balancers close theirs after checking that the port is open.
    pub(crate) fn record(&self, from: IpAddr, error: &TlsHandshakeError) {
        if *error == TlsHandshakeError::Closed {
            return;
        }
        let from = canonical_ip(from);
        let mut minute = self.0.lock();
        let room = minute.known.len() < MAX_TRACKED;
        match minute.known.get_mut(&(from, error.name())) {
            Some(count) => count.unlogged += 1,
            None if !room => minute.others += 1,
            None => {
                let why = format!("{error}{}", hint(error));
                let at_once = minute.known.len() < MAX_LOGGED_AT_ONCE;
                if at_once {
                    warn!(remote_addr = %from, reason = error.name(), error = %why, "TLS handshake failed");
                }
                minute.known.insert(
                    (from, error.name()),
                    HandshakeFailureCount { why, unlogged: u64::from(!at_once) },
                );
            }
        }
    }

    /// Ends the minute: logs a summary of the other failures.
    fn end_minute(&self) {
        let FailureWindow { known, others } = std::mem::take(&mut *self.0.lock());
        let mut unlogged_failures: Vec<_> =
            known.into_iter().filter(|(_, count)| count.unlogged > 0).collect();
        let failed = unlogged_failures.iter().map(|(_, count)| count.unlogged).sum::<u64>() + others;
        if failed == 0 {
            return;
        }
        unlogged_failures
            .sort_by_key(|((from, reason), count)| (std::cmp::Reverse(count.unlogged), *from, *reason));
        let shown: Vec<_> = unlogged_failures
            .iter()
            .take(MAX_SUMMARISED)
            .map(|((from, _), count)| format!("{from}, {} times: {}", count.unlogged, count.why))
            .collect();
        let addresses = unlogged_failures.len();
        warn!(failed, addresses, details = %shown.join(" | "), "more TLS handshakes failed within a minute");
    }
}

/// Logs what was left out, once a minute, until draining begins. Cancel safe.
pub(crate) async fn run_summaries(failures: HandshakeFailures, rates: LinkRateLimiter, drain: Drain) {
    let mut is_over = false;
    while !is_over {
        tokio::select! {
            biased;
            () = drain.draining() => is_over = true,
            () = tokio::time::sleep(MINUTE) => {}
        }
        failures.end_minute();
        rates.end_minute();
    }
}

/// Returns a hint if the reason allows one.
fn hint(error: &TlsHandshakeError) -> &'static str {
    use tokio_rustls::rustls::AlertDescription as Alert;
    match error {
        TlsHandshakeError::AlertReceived(Alert::UnknownCA) => {
            "; add the CA that issued our server.links.cert to that edge's edge.uplink.ca"
        }
        TlsHandshakeError::AlertReceived(Alert::CertificateExpired) => {
            "; renew our server.links.cert, or correct that machine's clock"
        }
        TlsHandshakeError::AlertReceived(_) => {
            "; check that our server.links.cert has the name that the edge dials (its dns, or the \
             host of the address in its servers)"
        }
        TlsHandshakeError::NotTls => "; only edges, servers and programs of users can use this port",
        error if error.is_of_the_certificate() => {
            "; an edge (its edge.csr) needs a certificate from a CA in edge_ca of our server.csr, and \
             a server one from server.links.peer_ca"
        }
        _ => "",
    }
}

/// Maximum number of (address, reason) pairs tracked per minute.
const MAX_TRACKED: usize = 256;
/// Maximum number of these that are logged at once.
const MAX_LOGGED_AT_ONCE: usize = 5;
/// Maximum number of these in the summary.
const MAX_SUMMARISED: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::AlertDescription;

    use super::*;

    #[test]
    fn handshake_failures_of_endless_addresses_are_bounded() {
        let handshake_failures = HandshakeFailures::default();
        for n in 0..1000_u32 {
            for _ in 0..2 {
                handshake_failures.record(n.to_be_bytes().into(), &TlsHandshakeError::NotTls);
            }
        }
        handshake_failures.record([0, 0, 0, 1].into(), &TlsHandshakeError::Closed);
        let minute = handshake_failures.0.lock();
        let unlogged_total: u64 = minute.known.values().map(|count| count.unlogged).sum();
        assert_eq!(
            (minute.known.len(), unlogged_total + minute.others),
            (MAX_TRACKED, 2000 - MAX_LOGGED_AT_ONCE as u64)
        );
    }

    #[test]
    fn the_hint_for_a_tls_alert_names_the_key_of_the_side_that_can_change_it() {
        let hint_for = |alert| hint(&TlsHandshakeError::AlertReceived(alert));
        assert!(hint_for(AlertDescription::UnknownCA).contains("edge.uplink.ca"));
        assert!(hint_for(AlertDescription::BadCertificate).contains("the name that the edge dials"));
    }
}
