//! Looking a node up in DNS: its records are the servers that it is linked to, as published by one of them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use tunnel_base::policy::zone::NodeZone;
use tunnel_net::resolver::{DnsLookupError, Lookup};
use tunnel_proto::names::NodeName;

/// A DNS client for nodes.
#[derive(Debug)]
pub struct NodeDnsLookup {
    resolver: Arc<dyn Lookup>,
    /// Defines which nodes are looked up, and under which name.
    zone: Arc<NodeZone>,
    /// Addresses in the records of nodes that do not belong to any server: records contain them for other clients of
    /// the same DNS.
    no_servers: watch::Receiver<BTreeSet<IpAddr>>,
}

impl NodeDnsLookup {
    /// Returns a client that asks `resolver` only for nodes that have names in `zone`, because the results are dialled.
    /// `no_servers` are not dialled.
    pub fn new(
        resolver: Arc<dyn Lookup>,
        zone: Arc<NodeZone>,
        no_servers: watch::Receiver<BTreeSet<IpAddr>>,
    ) -> Self {
        Self { resolver, zone, no_servers }
    }

    /// Returns the addresses of the servers that a node is linked to by its records; at least one. Takes at most 1 s.
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// DNS has no addresses for it or does not answer; the text gives the cause.
    pub async fn lookup(&self, node: &NodeName) -> Result<Vec<IpAddr>, String> {
        let name = self.zone.name(node).map_err(|why| format!("DNS was not queried ({why})"))?;
        let name = if self.zone.is_open() { name } else { format!("{name}.") };
        let found = timeout(LOOKUP_TIMEOUT, self.resolver.addresses(&name)).await;
        let found = found.unwrap_or(Err(DnsLookupError::Timeout { name, timeout: LOOKUP_TIMEOUT }));
        let mut found = found.map_err(|cause| match cause {
            DnsLookupError::NotFound(_) => "not in DNS".to_owned(),
            cause => cause.to_string(),
        })?;
        found.retain(|ip| !self.no_servers.borrow().contains(ip));
        if found.is_empty() { Err("its DNS records name no server".to_owned()) } else { Ok(found) }
    }
}

/// Timeout of a whole lookup; peers know the node's location as well, so nothing waits longer.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use futures_util::future::BoxFuture;
    use tokio::net::UdpSocket;

    use tunnel_net::resolver::Resolver;

    use super::*;
    use tokio::time::Instant;

    fn silent(at: SocketAddr) -> NodeDnsLookup {
        let zone = NodeZone::new("nodes.test".into(), Vec::new(), |_| false);
        let none = watch::Sender::default().subscribe();
        NodeDnsLookup::new(Arc::new(Resolver::of_servers(&[at]).unwrap()), Arc::new(zone), none)
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_dns_server_delays_a_search_by_a_second() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let dns = silent(socket.local_addr().unwrap());
        let started = Instant::now();
        assert!(dns.lookup(&"edge1".parse().unwrap()).await.is_err());
        assert!(started.elapsed() <= LOOKUP_TIMEOUT + Duration::from_millis(50), "{:?}", started.elapsed());
    }

    /// A resolver that answers every question with both addresses.
    #[derive(Debug)]
    struct Both;

    impl Lookup for Both {
        fn addresses<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, DnsLookupError>> {
            Box::pin(std::future::ready(Ok(vec![[10, 96, 0, 20].into(), [10, 1, 0, 1].into()])))
        }
    }

    #[tokio::test]
    async fn published_node_addresses_are_never_taken_for_servers() {
        let zone = Arc::new(NodeZone::new("nodes.test".into(), Vec::new(), |_| false));
        let service = watch::Sender::new(BTreeSet::new());
        let dns = NodeDnsLookup::new(Arc::new(Both), zone, service.subscribe());
        let node = "edge1".parse().unwrap();
        assert_eq!(dns.lookup(&node).await.unwrap().len(), 2);
        service.send_modify(|all| all.extend([IpAddr::from([10, 96, 0, 20])]));
        assert_eq!(dns.lookup(&node).await.unwrap(), [IpAddr::from([10, 1, 0, 1])]);
        service.send_modify(|all| all.extend([IpAddr::from([10, 1, 0, 1])]));
        assert_eq!(dns.lookup(&node).await.unwrap_err(), "its DNS records name no server");
    }

    #[tokio::test]
    async fn without_a_zone_dns_is_not_queried_for_dotted_names() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let zone = Arc::new(NodeZone::new(String::new(), Vec::new(), |_| false));
        let dns = NodeDnsLookup { zone, ..silent(socket.local_addr().unwrap()) };
        for node in ["www.example.org", "a.localhost", "kubernetes.default.svc"] {
            let why = dns.lookup(&node.parse().unwrap()).await.unwrap_err();
            assert!(why.starts_with("DNS was not queried"), "{node}: {why}");
        }
        assert!(socket.try_recv(&mut [0; 512]).is_err(), "no query was sent");
    }
}
