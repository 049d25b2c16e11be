//! The addresses of peers: a fixed list, the addresses of a name that is resolved regularly, and those from
//! Kubernetes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info_span, warn};

use tunnel_base::drain::Drain;
use tunnel_net::resolver::Lookup;

/// The sources of peer addresses, which are all combined.
#[derive(Debug, Clone, Default)]
pub struct PeerAddressSource {
    /// Fixed addresses.
    pub list: Vec<SocketAddr>,
    /// A name that resolves to the addresses, and the port.
    pub service: Option<(String, u16)>,
    /// The ready pods of the cluster, kept up to date by Kubernetes.
    pub cluster: Option<watch::Receiver<Vec<SocketAddr>>>,
}

impl PeerAddressSource {
    /// Sends the combined addresses now, and whenever they change until draining begins. If DNS fails, the name keeps
    /// its addresses.
    pub fn follow(self, resolver: Arc<dyn Lookup>, sender: watch::Sender<Vec<SocketAddr>>, drain: &Drain) {
        sender.send_replace(self.all(&[]));
        if self.service.is_some() || self.cluster.is_some() {
            drain.spawn(info_span!("addresses"), look(self, resolver, sender, drain.clone()));
        }
    }

    /// Returns all addresses, each once, with `found` as the current addresses of the name.
    fn all(&self, found: &[IpAddr]) -> Vec<SocketAddr> {
        let mut all = self.list.clone();
        if let Some((_, port)) = self.service {
            all.extend(found.iter().map(|ip| SocketAddr::new(*ip, port)));
        }
        if let Some(cluster) = &self.cluster {
            all.extend(cluster.borrow().iter());
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}

async fn look(
    mut named: PeerAddressSource,
    resolver: Arc<dyn Lookup>,
    sender: watch::Sender<Vec<SocketAddr>>,
    drain: Drain,
) {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut found = Vec::new();
    let mut warned = None;
    loop {
        tokio::select! {
            () = drain.draining() => return,
            // Once its watcher has ended, the last list stays.
            Some(Ok(())) = OptionFuture::from(named.cluster.as_mut().map(watch::Receiver::changed)) => {}
            _ = ticks.tick() => if let Some((name, _)) = &named.service {
                match resolver.addresses(name).await {
                    Ok(addresses) => (found, warned) = (addresses, None),
                    Err(cause) => {
                        let cause = cause.to_string();
                        if warned.as_ref() != Some(&cause) {
                            warn!(
                                key = "server.peers.dns_name",
                                error = %cause,
                                "cannot resolve peers, keeping known addresses"
                            );
                            warned = Some(cause);
                        }
                    }
                }
            },
        }
        let all = named.all(&found);
        if *sender.borrow() != all {
            sender.send_replace(all);
        }
    }
}

/// Interval between two lookups. A new peer is found within this time, and until then links here itself to announce its
/// nodes.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tunnel_net::resolver::Resolver;

    use super::*;

    #[tokio::test]
    async fn peer_addresses_are_merged_from_list_dns_and_cluster() {
        let drain = Drain::new();
        let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
        let [sender, all] = [(); 2].map(|()| watch::Sender::default());
        let cluster = sender.subscribe();
        let named = PeerAddressSource {
            list: vec!["192.0.2.1:9000".parse().unwrap()],
            service: Some(("localhost".into(), 9001)),
            cluster: Some(cluster),
        };
        let mut receiver = all.subscribe();
        named.follow(Arc::new(resolver), all, &drain);
        let all = receiver.wait_for(|all| all.len() > 1).await.unwrap().clone();
        let expected = ["127.0.0.1:9001", "192.0.2.1:9000", "[::1]:9001"].map(|at| at.parse().unwrap());
        assert_eq!(all, expected);
        sender.send_replace(vec!["192.0.2.7:9000".parse().unwrap()]);
        let all = receiver.wait_for(|all| all.len() > 3).await.unwrap().clone();
        assert!(all.contains(&"192.0.2.7:9000".parse().unwrap()), "{all:?}");
    }
}
