//! Looks a node up in DNS: its records are the pods it is linked to, as one of them published it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::names::NodeName;
use crate::net::resolver::{Lookup, LookupError};
use crate::policy::Zone;

/// Asks DNS for nodes, and knows whether that was of use lately.
#[derive(Debug)]
pub struct Dns {
    resolver: Arc<dyn Lookup>,
    /// Which nodes it may be asked for, and by which name.
    zone: Arc<Zone>,
    /// Addresses that no pod has, although names of nodes lead there.
    no_pods: Option<watch::Receiver<BTreeSet<IpAddr>>>,
    /// When a question was last in vain.
    failed: Mutex<Option<Instant>>,
}

impl Dns {
    /// Asks `resolver` for nodes by their names in `zone`, and for no other: what answers is linked to.
    pub fn new(resolver: Arc<dyn Lookup>, zone: Arc<Zone>) -> Self {
        Self { resolver, zone, no_pods: None, failed: Mutex::default() }
    }

    /// Takes none of these for a pod's: names of nodes lead there for other clients of the same DNS.
    pub fn without(self, no_pods: watch::Receiver<BTreeSet<IpAddr>>) -> Self {
        Self { no_pods: Some(no_pods), ..self }
    }

    /// The addresses of the pods that a node is linked to by its records; at least one. Takes at most 1 s. Cancel safe.
    ///
    /// # Errors
    ///
    /// DNS has no addresses for it, or does not answer: a sentence that gives the cause.
    pub async fn lookup(&self, node: &NodeName) -> Result<Vec<IpAddr>, String> {
        let name = self.zone.name(node).map_err(|why| format!("DNS was not asked ({why})"))?;
        let name = if self.zone.is_open() { name } else { format!("{name}.") };
        let mut asking = Asking { dns: self, since: Instant::now(), answered: None };
        let found = timeout(LOOKUP_TIMEOUT, self.resolver.addresses(&name)).await;
        let found = found.unwrap_or(Err(LookupError::Timeout { name, patience: LOOKUP_TIMEOUT }));
        asking.answered = Some(matches!(found, Ok(_) | Err(LookupError::NotFound(_))));
        let mut found = found.map_err(|cause| match cause {
            LookupError::NotFound(_) => "not in DNS".to_owned(),
            cause => cause.to_string(),
        })?;
        if let Some(no_pods) = &self.no_pods {
            let no_pods = no_pods.borrow();
            found.retain(|ip| !no_pods.contains(ip));
        }
        if found.is_empty() { Err("in DNS at no pod".to_owned()) } else { Ok(found) }
    }

    /// Whether DNS gave no answer lately, so that nobody should wait for it.
    pub fn has_failed_lately(&self) -> bool {
        self.failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|at| at.elapsed() < FAILURE_TTL)
    }
}

/// One query. A query that is dropped because another was quicker still counts in whether DNS is slow.
struct Asking<'a> {
    dns: &'a Dns,
    since: Instant,
    answered: Option<bool>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let failed = match self.answered {
            Some(answered) => !answered,
            None if self.since.elapsed() >= SLOW => true,
            None => return,
        };
        *self.dns.failed.lock().unwrap_or_else(PoisonError::into_inner) = failed.then(Instant::now);
    }
}

/// Ceiling of a whole lookup: siblings know as well, so nobody waits longer.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Siblings are asked as well when DNS has not answered within this.
pub(super) const SLOW: Duration = Duration::from_millis(50);
/// How long one failure is held against DNS: it is asked on, but siblings are asked at the same time.
const FAILURE_TTL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resolver::Resolver;
    use futures_util::future::BoxFuture;
    use std::net::SocketAddr;
    use tokio::net::UdpSocket;

    fn silent(at: SocketAddr) -> Dns {
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        Dns::new(Arc::new(Resolver::of_servers(&[at]).unwrap()), Arc::new(zone))
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_costs_a_second_and_is_remembered_for_a_while() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        assert!(!dns.has_failed_lately());
        let begun = Instant::now();
        assert!(dns.lookup(&"edge1".parse().unwrap()).await.is_err());
        assert!(begun.elapsed() <= LOOKUP_TIMEOUT + SLOW, "{:?}", begun.elapsed());
        assert!(dns.has_failed_lately());
        tokio::time::advance(FAILURE_TTL).await;
        assert!(!dns.has_failed_lately());
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_others_answered_first_tells_that_dns_is_slow() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        let node = "edge1".parse().unwrap();
        assert!(timeout(SLOW / 2, dns.lookup(&node)).await.is_err());
        assert!(!dns.has_failed_lately(), "it had no time to answer");
        assert!(timeout(SLOW * 2, dns.lookup(&node)).await.is_err());
        assert!(dns.has_failed_lately());
    }

    /// Answers every question with both addresses.
    #[derive(Debug)]
    struct Both;

    impl Lookup for Both {
        fn addresses<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, LookupError>> {
            Box::pin(std::future::ready(Ok(vec![[10, 96, 0, 20].into(), [10, 1, 0, 1].into()])))
        }
    }

    #[tokio::test]
    async fn what_names_of_nodes_lead_to_for_others_is_never_taken_for_a_pod() {
        let zone = Arc::new(Zone::new("nodes.test".into(), Vec::new(), |_| false));
        let service = watch::Sender::new(BTreeSet::new());
        let dns = Dns::new(Arc::new(Both), zone).without(service.subscribe());
        let node = "edge1".parse().unwrap();
        assert_eq!(dns.lookup(&node).await.unwrap().len(), 2);
        service.send_modify(|all| all.extend([IpAddr::from([10, 96, 0, 20])]));
        assert_eq!(dns.lookup(&node).await.unwrap(), [IpAddr::from([10, 1, 0, 1])]);
        service.send_modify(|all| all.extend([IpAddr::from([10, 1, 0, 1])]));
        assert_eq!(dns.lookup(&node).await.unwrap_err(), "in DNS at no pod");
    }

    #[tokio::test]
    async fn without_a_zone_dns_is_not_asked_for_what_may_be_somebody_elses() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = Resolver::of_servers(&[socket.local_addr().unwrap()]).unwrap();
        let dns = Dns::new(Arc::new(resolver), Arc::new(Zone::new(String::new(), Vec::new(), |_| false)));
        for node in ["www.example.org", "localhost", "kubernetes.default.svc"] {
            let why = dns.lookup(&node.parse().unwrap()).await.unwrap_err();
            assert!(why.starts_with("DNS was not asked"), "{node}: {why}");
        }
        assert!(socket.try_recv(&mut [0; 512]).is_err(), "nothing was asked");
    }
}
