//! What the tasks of a pod share.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::backend::Backend;
use crate::cloud::proven::Proven;
use crate::net::pool::Pool;
use crate::policy::Glob;
use crate::protocol::grpc::LinkContext;
use crate::registry::{Finder, Registry, Siblings};
use crate::route::Route;

/// What the tasks of a pod share.
#[derive(Debug, Clone)]
pub(super) struct PodContext {
    pub(super) proven: Arc<Proven>,
    pub(super) registry: Arc<Registry>,
    pub(super) finder: Arc<Finder>,
    /// None if this pod is alone.
    pub(super) siblings: Option<Arc<Siblings>>,
    pub(super) route: Route,
    pub(super) ground: LinkContext,
    pub(super) pool: Pool,
    /// Once the pod is stopping: no edge is let in.
    pub(super) stopping: CancellationToken,
    /// Dials for edges what they may have this pod dial.
    pub(super) backend: Backend,
    /// Which nodes edges may reach through this pod.
    pub(super) reachable: Arc<[Glob]>,
    /// Nodes and pods that are looked for at once for edges.
    pub(super) searches: Arc<Semaphore>,
    /// Nodes that have come anew, and for which older links are tried.
    pub(super) moves: Arc<Semaphore>,
}
