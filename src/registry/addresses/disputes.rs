//! Logs the addresses that a Node or a pod claims although another party has or claims them.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::{AddressBook, NotLocated};

/// Limits the lines: a kubelet may change what it claims as often as it likes.
#[derive(Debug, Default)]
pub(super) struct Disputes(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    begun: Option<Instant>,
    lines: u32,
}

impl Disputes {
    /// Logs which of these addresses are disputed, and by whom.
    pub(super) fn tell(&self, book: &AddressBook, ips: impl IntoIterator<Item = IpAddr>) {
        for line in ips.into_iter().filter_map(|ip| book.dispute(ip)).filter_map(|why| self.line(why)) {
            warn!("{line}");
        }
    }

    /// What the log is told of a dispute; `None` if nothing more in this window.
    fn line(&self, why: String) -> Option<String> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.begun.is_none_or(|begun| begun.elapsed() >= WINDOW) {
            *window = Window { begun: Some(Instant::now()), lines: 0 };
        }
        window.lines = window.lines.saturating_add(1);
        match window.lines {
            ..=MOST_LINES => Some(why),
            LAST_LINE => Some(MORE.to_owned()),
            _ => None,
        }
    }
}

impl AddressBook {
    /// Who disputes an address, and what comes of it; `None` if nobody does.
    fn dispute(&self, ip: IpAddr) -> Option<String> {
        let (fixed, facts) = (self.fixed_node(ip), self.facts());
        let service = facts.service_at(ip).ok().flatten();
        let claim = facts.by_kubelets(ip).find(|claim| fixed.is_none() || claim.node() != fixed);
        match (fixed, service, claim) {
            (Some(node), _, Some(claim)) => Some(format!(
                "{claim} claims {ip}, which [mode.cloud.addresses] puts at node {node}: the table wins"
            )),
            (None, Some(service), Some(claim)) => {
                Some(format!("{claim} claims {ip}, the ClusterIP of Service {service}: the Service keeps it"))
            }
            (Some(_), ..) => None,
            (None, ..) => match facts.node_at(ip) {
                Err(why @ NotLocated::Ambiguous { .. }) => Some(format!("{why}: neither is reached by it")),
                _ => None,
            },
        }
    }
}

/// Disputes that are logged one by one within one window.
const MOST_LINES: u32 = 20;

const LAST_LINE: u32 = MOST_LINES + 1;

const MORE: &str = "more addresses are disputed; a client that asks for one is told by whom";

const WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::addresses::{NodeFacts, PodFacts, ServiceFacts};

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// 10.0.0.1 is node1's by the table; 10.0.0.2 is a Service's; 10.0.0.3 is node2's; node evil claims all of them.
    fn book() -> AddressBook {
        let book = AddressBook::new(vec![(ip(1).into(), "node1".parse().unwrap())], true);
        let node = |ips: &[u8]| NodeFacts {
            ips: ips.iter().copied().map(ip).collect(),
            outside: Box::default(),
            pods: Box::default(),
        };
        book.change(|facts| {
            facts.nodes.put("node1", node(&[1]));
            facts.nodes.put("node2", node(&[3]));
            facts.nodes.put("evil", node(&[2, 3, 4]));
            let pod = PodFacts { node: "evil".parse().unwrap(), ips: [ip(1), ip(4)].into() };
            facts.pods.put("shop/pod", pod);
            let none = ServiceFacts {
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
    fn a_line_names_both_who_claim_an_address() {
        let book = book();
        let lines: Vec<_> = (1..=5).filter_map(|last| book.dispute(ip(last))).collect();
        let expected = [
            "pod shop/pod at evil claims 10.0.0.1, which [mode.cloud.addresses] puts at node node1: the table wins",
            "node evil claims 10.0.0.2, the ClusterIP of Service shop/web: the Service keeps it",
            "10.0.0.3 is claimed by both node evil and node node2: neither is reached by it",
        ];
        assert_eq!(lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_kubelet_that_claims_without_end_does_not_fill_the_log() {
        let disputes = Disputes::default();
        let told = || (0..1000).filter_map(|_| disputes.line("a dispute".to_owned())).count();
        assert_eq!((told(), told()), (21, 0));
        tokio::time::advance(WINDOW).await;
        assert_eq!(told(), 21);
    }
}
