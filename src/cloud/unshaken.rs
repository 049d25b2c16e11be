//! Tells of callers whose TLS handshake fails: whose edge it is nobody knows, so its address and the cause have to do.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::warn;

use crate::drain::Drain;
use crate::net::tls::Fault;
use crate::policy::plain;

/// Failed handshakes of the last minute. The first ones of a minute are told at once, all others are summed up at its
/// end, so that no caller can fill the log. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Unshaken(Arc<Mutex<Minute>>);

#[derive(Debug, Default)]
struct Minute {
    /// By address and cause; of the rest only the number is kept.
    known: HashMap<(IpAddr, &'static str), Count>,
    others: u64,
}

#[derive(Debug)]
struct Count {
    why: String,
    untold: u64,
}

impl Unshaken {
    /// Tells of a failed handshake, now or at the end of the minute. Who only closes its connection, as balancers do
    /// that look whether the port is open, is not told of.
    pub(super) fn tell(&self, from: IpAddr, fault: &Fault) {
        if *fault == Fault::Closed {
            return;
        }
        let (from, mut minute) = (plain(from), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let room = minute.known.len() < MOST;
        match minute.known.get_mut(&(from, fault.name())) {
            Some(count) => count.untold += 1,
            None if !room => minute.others += 1,
            None => {
                let why = format!("{fault}{}", remedy(fault));
                let at_once = minute.known.len() < AT_ONCE;
                if at_once {
                    warn!(%from, cause = fault.name(), "a caller's TLS handshake failed: {why}");
                }
                minute.known.insert((from, fault.name()), Count { why, untold: u64::from(!at_once) });
            }
        }
    }

    /// Once a minute sums up what was not told, until draining begins. Cancel safe.
    pub(super) async fn sum_up(self, drain: Drain) {
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => return self.next(),
                () = tokio::time::sleep(MINUTE) => self.next(),
            }
        }
    }

    fn next(&self) {
        let Minute { known, others } =
            std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut untold: Vec<_> = known.into_iter().filter(|(_, count)| count.untold > 0).collect();
        let failed = untold.iter().map(|(_, count)| count.untold).sum::<u64>() + others;
        if failed == 0 {
            return;
        }
        untold.sort_by_key(|((from, cause), count)| (std::cmp::Reverse(count.untold), *from, *cause));
        let shown: Vec<_> = untold
            .iter()
            .take(SHOWN)
            .map(|((from, _), count)| format!("{from}, {} times: {}", count.untold, count.why))
            .collect();
        let addresses = untold.len();
        warn!(
            failed,
            addresses,
            "more TLS handshakes of callers failed within a minute: {}",
            shown.join(" | ")
        );
    }
}

/// What mends it, as far as the cause shows that.
fn remedy(fault: &Fault) -> &'static str {
    use tokio_rustls::rustls::AlertDescription as Alert;
    match fault {
        Fault::Disbelieves(Alert::UnknownCA) => {
            "; that edge's mode.edge.stream.client.cert does not hold the authority that has signed our \
             mode.cloud.stream.server.cert"
        }
        Fault::Disbelieves(Alert::CertificateExpired) => {
            "; our mode.cloud.stream.server.cert is out of its dates, or that machine's clock is wrong"
        }
        Fault::Disbelieves(_) => {
            "; most often our mode.cloud.stream.server.cert does not carry the name that the edge dials (its dns, or the \
             host of its server_name)"
        }
        Fault::NoTls => "; something else than an edge has come to this port",
        fault if fault.is_of_the_certificate() => {
            "; an edge may show one (its mode.edge.csr) only of an authority in agent_ca of our mode.cloud.csr, and another \
             pod has to show one that mode.cloud.stream.server.ca has signed"
        }
        _ => "",
    }
}

/// Pairs of address and cause that are known apart within a minute.
const MOST: usize = 256;
/// Of these, told at once.
const AT_ONCE: usize = 5;
/// Of these, told in the summary.
const SHOWN: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_rustls::rustls::AlertDescription;

    #[test]
    fn callers_without_end_are_known_by_a_bounded_number() {
        let unshaken = Unshaken::default();
        for n in 0..1000_u32 {
            for _ in 0..2 {
                unshaken.tell(n.to_be_bytes().into(), &Fault::NoTls);
            }
        }
        unshaken.tell([0, 0, 0, 1].into(), &Fault::Closed);
        let minute = unshaken.0.lock().unwrap();
        let untold: u64 = minute.known.values().map(|count| count.untold).sum();
        assert_eq!((minute.known.len(), untold + minute.others), (MOST, 2000 - AT_ONCE as u64));
    }

    #[test]
    fn the_remedy_names_the_key_at_the_side_that_can_change_it() {
        let told = |alert| remedy(&Fault::Disbelieves(alert));
        assert!(told(AlertDescription::UnknownCA).contains("mode.edge.stream.client.cert"));
        assert!(told(AlertDescription::BadCertificate).contains("the name that the edge dials"));
    }
}
