//! What DNS says of a node: the pods it is linked to, as somebody published it.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::names::NodeName;
use crate::net::resolver::{LookupError, Resolver};

/// Asks DNS for nodes, and knows whether that was of use lately.
#[derive(Debug)]
pub struct Dns {
    resolver: Resolver,
    /// Appended to node names; may be empty.
    zone: String,
    /// When a question was last in vain.
    failed: Mutex<Option<Instant>>,
}

impl Dns {
    /// Asks `resolver` for names of `zone`, without dots at its ends; if empty, for bare node names.
    pub fn new(resolver: Resolver, zone: String) -> Self {
        Self { resolver, zone, failed: Mutex::default() }
    }

    /// The addresses of the pods that a node is said to be linked to; never none. Takes at most 1 s. Cancel safe.
    pub async fn lookup(&self, node: &NodeName) -> Result<Vec<IpAddr>, LookupError> {
        let bare = node.as_str().to_ascii_lowercase();
        let name = if self.zone.is_empty() { bare } else { format!("{bare}.{}.", self.zone) };
        let mut asking = Asking { dns: self, since: Instant::now(), answered: None };
        let found = timeout(CEILING, self.resolver.lookup(&name)).await;
        let found = found.unwrap_or(Err(LookupError::Timeout { name, patience: CEILING }));
        asking.answered = Some(matches!(found, Ok(_) | Err(LookupError::NotFound(_))));
        found
    }

    /// Whether DNS gave no answer lately, so that nobody should wait for it.
    pub fn has_failed_lately(&self) -> bool {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() < LATELY)
    }
}

/// One question. One that is dropped because others were quicker tells whether DNS is slow, too.
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
const CEILING: Duration = Duration::from_secs(1);
/// Siblings are asked as well when DNS has not answered within this.
pub(super) const SLOW: Duration = Duration::from_millis(50);
/// How long one failure is held against DNS: it is asked on, but siblings are asked at the same time.
const LATELY: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;
    use tokio::net::UdpSocket;

    fn silent(at: SocketAddr) -> Dns {
        Dns::new(Resolver::of_servers(&[at]).unwrap(), "nodes.test".into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_costs_a_second_and_is_remembered_for_a_while() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        assert!(!dns.has_failed_lately());
        let begun = Instant::now();
        assert!(dns.lookup(&"edge1".parse().unwrap()).await.is_err());
        assert!(begun.elapsed() <= CEILING + SLOW, "{:?}", begun.elapsed());
        assert!(dns.has_failed_lately());
        tokio::time::advance(LATELY).await;
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
}
