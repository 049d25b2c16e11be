//! Stops a pod without cutting what can go on elsewhere.

use std::future::Future;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Pod;
use crate::drain::{Drain, Drained};
use crate::protocol::{Code, Refusal};

/// The tasks in the order in which they are stopped: clients first, links when no session needs them, admin ports last.
#[derive(Debug)]
pub(super) struct Stopping {
    /// Cancelled when the pod begins to stop: no call is accepted then.
    pub(super) begun: CancellationToken,
    /// Whether there are other pods, which take over.
    pub(super) several: bool,
    /// Says that nothing is caught any more; `None`: nothing ever was.
    pub(super) caught: Option<oneshot::Receiver<()>>,
    pub(super) clients: Drain,
    pub(super) publisher: Drain,
    pub(super) links: Drain,
    pub(super) admin: Drain,
    pub(super) deadline: Duration,
}

impl Pod {
    /// Stops the pod. It becomes unready and asks its edges to link elsewhere. If there are other pods it still takes
    /// clients for a moment, until balancers notice. Then it closes its listeners, and waits for sessions until the
    /// deadline or until `at_once` completes.
    pub async fn stop(self, at_once: impl Future<Output = ()>) -> Drained {
        let Stopping { begun, several, caught, clients, publisher, links, admin, deadline } = self.stopping;
        let (at_once, until) = (at_once.shared(), Instant::now() + deadline);
        self.readiness.set("running", Err("stopping".into()));
        info!(
            sessions = self.table.len(),
            ?deadline,
            "stopping: no new sessions, waiting for those that run"
        );
        begun.cancel();
        // First, so that balancers stop sending clients here.
        publisher.begin();
        self.registry.drain_all();
        if let Some(emptied) = caught {
            // Whoever asks for a node from now on goes there itself, not to a listener that is about to close.
            let _ = timeout(CLOSE_TIMEOUT.min(deadline), emptied).await;
        }
        if several {
            tokio::select! {
                () = sleep(STILL_COMING.min(deadline / 4)) => {}
                () = at_once.clone() => {}
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = Refusal::new(Code::Busy, "the pod is stopping");
        let before_cut = async {
            self.table.reset_all(&why);
            sleep(FLUSH_TIMEOUT).await;
            self.table.last_frames_sent().await;
        };
        let drained = clients.finish_after(left, at_once.clone(), before_cut).await;
        if let Drained::Cut(left) = drained {
            warn!(left, "deadline over: sessions are cut");
        }
        let passing = async {
            // The last bytes of clients may still be under way; sessions of other pods with plain nodes end here.
            self.table.delivered().await;
            while self.table.passing().0 > 0 {
                sleep(POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            () = passing => {}
            () = sleep_until(until) => warn!("deadline over: other pods' sessions must find another path"),
            () = at_once => {}
        }
        self.table.reset_all(&why);
        publisher.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        links.begin();
        sleep(FLUSH_TIMEOUT).await;
        self.table.last_frames_sent().await;
        self.registry.close_all();
        self.finder.close_links();
        links.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        admin.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        drained
    }
}

/// How long balancers may still send clients to a pod that is not ready.
const STILL_COMING: Duration = Duration::from_secs(2);
/// Between two looks whether other pods' sessions have found another path.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for sessions to end after their reset, and for the last resets to leave before links are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for connections to end by themselves at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
