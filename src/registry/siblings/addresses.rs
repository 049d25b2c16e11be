//! Where the other pods are: a fixed list, the addresses of a name, looked up again and again, and those that a cluster
//! lists.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info_span, warn};

use crate::drain::Drain;
use crate::net::resolver::Lookup;

/// How pods are named; all ways together.
#[derive(Debug, Clone, Default)]
pub struct PodAddresses {
    /// Once and for all.
    pub list: Vec<SocketAddr>,
    /// By a name whose addresses they are, and their port.
    pub service: Option<(String, u16)>,
    /// The ready pods of the cluster, which Kubernetes keeps up to date.
    pub cluster: Option<watch::Receiver<Vec<SocketAddr>>>,
}

impl PodAddresses {
    /// All of them, followed until draining begins. A name that DNS does not answer for keeps its addresses.
    pub fn follow(self, resolver: Arc<dyn Lookup>, drain: &Drain) -> watch::Receiver<Vec<SocketAddr>> {
        let (sender, receiver) = watch::channel(self.all(&[]));
        if self.service.is_some() || self.cluster.is_some() {
            drain.spawn(info_span!("addresses"), look(self, resolver, sender, drain.clone()));
        }
        receiver
    }

    /// All of them, each once, with the addresses that the name has now.
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

    /// Waits for a change in the cluster. Cancel safe.
    async fn changed(&mut self) {
        if let Some(cluster) = &mut self.cluster {
            if cluster.changed().await.is_ok() {
                return;
            }
            // The watcher is gone: its last list stays.
            let last = cluster.borrow().clone();
            self.list.extend(last);
            self.cluster = None;
        }
        std::future::pending().await
    }
}

async fn look(
    mut named: PodAddresses,
    resolver: Arc<dyn Lookup>,
    sender: watch::Sender<Vec<SocketAddr>>,
    drain: Drain,
) {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut found, mut warned) = (Vec::new(), None);
    loop {
        tokio::select! {
            () = drain.draining() => return,
            () = named.changed() => {}
            _ = ticks.tick() => if let Some((name, _)) = &named.service {
                match resolver.addresses(name).await {
                    Ok(addresses) => (found, warned) = (addresses, None),
                    Err(cause) => {
                        let cause = cause.to_string();
                        if warned.as_ref() != Some(&cause) {
                            warn!(%cause, "mode.cloud.registry.siblings_service: what was known stays in use");
                            warned = Some(cause);
                        }
                    }
                }
            },
        }
        let all = named.all(&found);
        sender.send_if_modified(|known| {
            let changed = *known != all;
            *known = all;
            changed
        });
    }
}

/// Between two look-ups: a new pod is found within this time, and announces its nodes by itself until then.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resolver::Resolver;

    #[tokio::test]
    async fn a_list_a_name_and_a_cluster_are_followed_together() {
        let drain = Drain::new();
        let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
        let (sender, cluster) = watch::channel(Vec::new());
        let named = PodAddresses {
            list: vec!["192.0.2.1:9000".parse().unwrap()],
            service: Some(("localhost".into(), 9001)),
            cluster: Some(cluster),
        };
        let mut receiver = named.follow(Arc::new(resolver), &drain);
        let all = receiver.wait_for(|all| all.len() > 1).await.unwrap().clone();
        let expected = ["127.0.0.1:9001", "192.0.2.1:9000", "[::1]:9001"].map(|at| at.parse().unwrap());
        assert_eq!(all, expected);
        sender.send_replace(vec!["192.0.2.7:9000".parse().unwrap()]);
        let all = receiver.wait_for(|all| all.len() > 3).await.unwrap().clone();
        assert!(all.contains(&"192.0.2.7:9000".parse().unwrap()), "{all:?}");
    }
}
