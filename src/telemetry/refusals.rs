//! Limits the log lines about refusals, so that no client can fill the log.

use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::warn;

/// Lets through `EACH` refusals a second for each cause and source, and sums up the rest. Cheap to clone.
///
/// Sources beyond `MOST` in a second share one count for each cause.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Mutex<Second>>);

/// Refusals in this second, by cause and source; a source of `None` stands for all others.
type Second = HashMap<(&'static str, Option<IpAddr>), u64>;

impl Refusals {
    /// Counts a refusal, and returns whether it may be logged. `cause` is a fixed word.
    pub fn may_log(&self, cause: &'static str, from: IpAddr) -> bool {
        let mut second = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = (cause, Some(source(from)));
        let known = second.len() < MOST || second.contains_key(&one);
        let count = second.entry(if known { one } else { (cause, None) }).or_default();
        *count += 1;
        *count <= EACH
    }

    /// Once a second logs how many lines were withheld and starts to count anew, until `end` completes. Cancel safe.
    pub async fn sum_up(self, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                biased;
                () = &mut end => return self.next(),
                () = tokio::time::sleep(SECOND) => self.next(),
            }
        }
    }

    fn next(&self) {
        let second = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for ((cause, source), count) in second {
            let Some(more) = count.checked_sub(EACH).filter(|more| *more > 0) else { continue };
            let source = source.map(tracing::field::display);
            warn!(cause, source, "refused within a second, and {more} more like it");
        }
    }
}

/// What counts as one source: an IPv4 address, or the /64 of an IPv6 address, by its first address.
fn source(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

/// Lines per second for each cause and source.
const EACH: u64 = 20;
/// Pairs of cause and source that are counted apart within a second.
const MOST: usize = 100;
const SECOND: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log::tests::lines_of;

    #[test]
    fn each_cause_and_source_has_twenty_lines_a_second_and_the_rest_is_summed_up() {
        let refusals = Refusals::default();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let told = |cause, from| (0..21_000).filter(|_| refusals.may_log(cause, ip(from))).count();
        let lines = lines_of(true, || {
            assert_eq!(
                (told("token", "192.0.2.1"), told("token", "192.0.2.2"), told("busy", "192.0.2.1")),
                (20, 20, 20)
            );
            refusals.next();
            assert!(refusals.may_log("token", ip("192.0.2.1")), "a second later it may be told again");
            refusals.next();
        });
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.lines().all(|line| line.contains("and 20980 more like it")), "{lines}");
        assert!(lines.contains(r#""cause":"busy","source":"192.0.2.1""#), "{lines}");
    }

    #[test]
    fn a_network_of_ipv6_is_one_source_and_so_is_ipv4_in_its_dress() {
        let refusals = Refusals::default();
        let told = |from: &str| refusals.may_log("token", from.parse().unwrap());
        for last in 0..20 {
            assert!(told(&format!("2001:db8::{last}")) && told("::ffff:192.0.2.1"));
        }
        assert!(!told("2001:db8::ffff") && !told("192.0.2.1") && told("2001:db8:0:1::1"));
    }

    #[test]
    fn sources_without_end_grow_neither_the_log_nor_the_process() {
        let refusals = Refusals::default();
        let told =
            (0..100_000_u32).filter(|n| refusals.may_log("token", IpAddr::from(n.to_be_bytes()))).count();
        assert_eq!(told, MOST + usize::try_from(EACH).unwrap());
        assert_eq!(refusals.0.lock().unwrap().len(), MOST + 1);
    }
}
