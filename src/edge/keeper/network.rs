//! What the edge does when its machine's network changes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, info};

use super::Keeper;
use crate::net::changes::NetworkChanges;

impl Keeper {
    /// Notices when this machine's addresses or its default route change: links are probed, and without one the edge dials
    /// at once. Until draining begins.
    pub(in crate::edge) async fn follow_network(self: Arc<Self>) {
        let mut network = match NetworkChanges::watch() {
            Ok(network) => network,
            Err(why) => return debug!(%why, "changes of this machine's addresses and routes are not noticed"),
        };
        let links = self.ground.drain.clone();
        loop {
            tokio::select! {
                () = links.draining() => return,
                changed = network.next() => if changed.is_err() { return },
            }
            info!(
                "this machine's addresses or its default route have changed: asking whether the cloud still answers"
            );
            self.uplinks.probe();
            if !self.uplinks.is_linked() {
                self.freed.notify_one();
            }
            sleep(BETWEEN_CHANGES).await;
        }
    }
}

/// What changes within this time behind a change counts as one more, at its end.
const BETWEEN_CHANGES: Duration = Duration::from_secs(1);
