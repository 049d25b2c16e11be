//! Logs addresses that a Node or pod claims although another object owns or claims them.

use std::fmt::Debug;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::warn;

use tunnel_base::addresses::AddressBook;

/// A rate limit for log lines about disputed addresses: a kubelet may change its claims as often as it likes.
#[derive(Debug, Default)]
pub(crate) struct DisputeLogLimiter(Mutex<RateLimitWindow>);

/// The current window of the rate limit in [`DisputeLogLimiter`].
#[derive(Debug, Default)]
struct RateLimitWindow {
    started: Option<Instant>,
    lines: u32,
}

impl DisputeLogLimiter {
    /// Logs which of these addresses are disputed, and by which objects.
    pub(crate) fn log_disputed(&self, book: &AddressBook, ips: impl IntoIterator<Item = IpAddr>) {
        for line in ips.into_iter().filter_map(|ip| book.dispute(ip)).filter_map(|why| self.line(why)) {
            warn!(dispute = line, "address claimed by several objects");
        }
    }

    /// Returns the text to log for a dispute, or `None` if the limit of this window is reached.
    fn line(&self, why: String) -> Option<String> {
        let mut window = self.0.lock();
        if window.started.is_none_or(|started| started.elapsed() >= WINDOW) {
            *window = RateLimitWindow { started: Some(Instant::now()), lines: 0 };
        }
        window.lines = window.lines.saturating_add(1);
        match window.lines {
            ..=MAX_LINES => Some(why),
            LAST_LINE => Some(MORE.to_owned()),
            _ => None,
        }
    }
}

/// Maximum number of disputes logged per window.
const MAX_LINES: u32 = 20;

const LAST_LINE: u32 = MAX_LINES + 1;

const MORE: &str = "more addresses are disputed; errors of clients that request one name the claimants";

const WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tunnel_base::addresses::cluster_state::{KubeNode, KubePod, KubeService};

    use super::*;

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Returns a book in which the config assigns 10.0.0.1 to node1, 10.0.0.2 is a Service's and 10.0.0.3 is node2's.
    /// Node evil claims all of them.
    fn book() -> AddressBook {
        let book = AddressBook::new(vec![(ip(1).into(), "node1".parse().unwrap())], true);
        let node =
            |ips: &[u8]| KubeNode { ips: ips.iter().copied().map(ip).collect(), ..KubeNode::default() };
        book.change(|facts| {
            facts.nodes.put("node1", node(&[1]));
            facts.nodes.put("node2", node(&[3]));
            facts.nodes.put("evil", node(&[2, 3, 4]));
            let pod = KubePod { node: "evil".parse().unwrap(), ips: [ip(1), ip(4)].into() };
            facts.pods.put("shop/pod", pod);
            let none = KubeService {
                ips: [ip(2)].into(),
                outside: Box::default(),
                ports: Box::default(),
                external: None,
            };
            facts.services.put("shop/web", none);
        });
        book
    }

    #[test]
    fn a_dispute_line_names_both_claimants_of_an_address() {
        let book = book();
        let lines: Vec<_> = (1..=5).filter_map(|last| book.dispute(ip(last))).collect();
        let expected = [
            "pod shop/pod at evil claims 10.0.0.1, which [server.addresses] assigns to node node1; the config wins",
            "node evil claims 10.0.0.2, the ClusterIP of Service shop/web; the Service keeps it",
            "10.0.0.3 is claimed by both node evil and node node2; none is reached by it",
        ];
        assert_eq!(lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn dispute_lines_are_rate_limited() {
        let disputes = DisputeLogLimiter::default();
        let logged = || (0..1000).filter_map(|_| disputes.line("a dispute".to_owned())).count();
        assert_eq!((logged(), logged()), (21, 0));
        tokio::time::advance(WINDOW).await;
        assert_eq!(logged(), 21);
    }
}
