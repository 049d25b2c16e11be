//! Where the other pods are: a fixed list, and the addresses of a name, looked up again and again.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info_span, warn};

use crate::drain::Drain;
use crate::net::resolver::Resolver;

/// The addresses of `list`, and those of the `service` (a name and a port), followed until draining begins. A name
/// that DNS does not answer for keeps its addresses.
pub fn follow(
    list: Vec<SocketAddr>,
    service: Option<(String, u16)>,
    resolver: Resolver,
    drain: &Drain,
) -> watch::Receiver<Vec<SocketAddr>> {
    let (tell, told) = watch::channel(list.clone());
    if let Some((name, port)) = service {
        let span = info_span!("siblings", %name);
        drain.spawn(span, look(list, name, port, resolver, tell, drain.clone()));
    }
    told
}

async fn look(
    list: Vec<SocketAddr>,
    name: String,
    port: u16,
    resolver: Resolver,
    tell: watch::Sender<Vec<SocketAddr>>,
    drain: Drain,
) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said = None;
    loop {
        tokio::select! {
            () = drain.draining() => return,
            _ = ticks.tick() => {}
        }
        match resolver.lookup(&name).await {
            Ok(found) => {
                said = None;
                let mut all = list.clone();
                all.extend(found.into_iter().map(|ip| SocketAddr::new(ip, port)));
                all.sort_unstable();
                all.dedup();
                tell.send_if_modified(|known| {
                    let changed = *known != all;
                    *known = all;
                    changed
                });
            }
            Err(cause) => {
                let cause = cause.to_string();
                if said.as_ref() != Some(&cause) {
                    warn!(%cause, "mode.cloud.registry.siblings_service: the addresses that were known stay in use");
                    said = Some(cause);
                }
            }
        }
    }
}

/// Between two look-ups: a pod that comes is asked within so long, and until then tells of itself.
const LOOK: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_list_and_a_name_are_followed_together() {
        let drain = Drain::new();
        let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
        let list: Vec<SocketAddr> = vec!["192.0.2.1:9000".parse().unwrap()];
        let mut told = follow(list.clone(), Some(("localhost".into(), 9001)), resolver, &drain);
        let all = told.wait_for(|all| all.len() > 1).await.unwrap().clone();
        let expected = ["127.0.0.1:9001", "192.0.2.1:9000", "[::1]:9001"].map(|at| at.parse().unwrap());
        assert_eq!(all, expected);
    }
}
