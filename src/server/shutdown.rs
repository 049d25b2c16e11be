//! Shuts a server down without aborting sessions that can resume elsewhere.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::admin::readiness::DRAINING_CONDITION;
use crate::paths::PathProvider as _;
use crate::server::{Drains, Server, ServerContext};
use tunnel_base::drain::Drained;
use tunnel_link::table::SessionTable;
use tunnel_proto::frame::{ErrorCode, SessionError};

impl Server {
    /// Shuts the server down. It becomes unready and asks its edges to link elsewhere. With peers, it still accepts
    /// clients for a moment, until balancers notice. Then it closes its listeners, and waits for sessions until the
    /// deadline or until `at_once` completes.
    pub async fn shutdown(self, at_once: impl Future<Output = ()>) -> Drained {
        let ServerContext { registry, user_links, finder, readiness, stopping, drains, .. } = &*self.context;
        let Drains { redirecting, clients, publisher, links, admin } = drains;
        let at_once = at_once.shared();
        let deadline = self.settings.session.drain_timeout;
        let until = Instant::now() + deadline;
        readiness.set(DRAINING_CONDITION, Err("stopping".into()));
        info!(sessions = self.table.len(), timeout = ?deadline, "draining");
        stopping.cancel();
        // Started first, so that balancers stop sending clients here.
        publisher.start();
        // Edges and users' programs then link to another server.
        let callers = || registry.links().into_iter().chain(user_links.links());
        for link in callers() {
            link.drain();
        }
        // From then on, traffic to nodes goes there directly, not to a listener that is about to close.
        redirecting.close();
        let _ = timeout(CLOSE_TIMEOUT.min(deadline), redirecting.wait()).await;
        if !finder.is_alone() {
            let _ = timeout(LISTEN_GRACE.min(deadline / 4), at_once.clone()).await;
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = SessionError::new(ErrorCode::Overloaded, "the server is stopping");
        let drained = clients.finish_after(left, at_once.clone(), self.table.end_all(&why)).await;
        if let Drained::Aborted(left) = drained {
            warn!(sessions_remaining = left, "drain timeout, aborting sessions");
        }
        let has_peers = finder.peers().is_some_and(|peers| !peers.links().is_empty());
        tokio::select! {
            () = wait_relayed(&self.table, has_peers) => {}
            () = sleep_until(until) => warn!("drain timeout, relayed sessions must find another path"),
            () = at_once.clone() => {}
        }
        links.start();
        self.table.end_all(&why).await;
        let soon = at_once.then(|()| sleep(AT_ONCE)).shared();
        publisher.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        let to_peers = finder.peers().into_iter().flat_map(|peers| peers.links());
        for link in callers().chain(to_peers) {
            link.close();
        }
        links.finish(CLOSE_TIMEOUT, soon.clone()).await;
        admin.finish(CLOSE_TIMEOUT, soon).await;
        drained
    }
}

/// Waits until the last bytes of clients are delivered, and relayed sessions have another path. Without a peer they
/// find none as long as this server only stops.
async fn wait_relayed(table: &SessionTable, has_peers: bool) {
    table.wait_delivered().await;
    while has_peers && table.relayed().0 > 0 {
        sleep(POLL_INTERVAL).await;
    }
}

/// Time for links to send their last frames after a second signal.
const AT_ONCE: Duration = Duration::from_secs(1);
/// How long balancers may still send clients to a server that is not ready.
const LISTEN_GRACE: Duration = Duration::from_secs(2);
/// Interval between checks whether relayed sessions have found another path.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for connections to end on their own at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
