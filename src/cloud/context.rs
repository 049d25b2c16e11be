//! What the tasks of a pod share.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::backend::Backend;
use crate::cloud::policies::Policies;
use crate::cloud::proven::Proven;
use crate::dialer::DirectDialer;
use crate::enrol::Enrolment;
use crate::net::pool::Pool;
use crate::policy::ProxyPorts;
use crate::protocol::grpc::LinkContext;
use crate::registry::{AddressBook, Finder, Registry, Siblings};
use crate::route::Route;

/// What the tasks of a pod share. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct PodContext {
    pub(super) proven: Arc<Proven>,
    /// Who joins by invitation; `None`: nobody.
    pub(super) enrolment: Option<Arc<Enrolment>>,
    pub(super) registry: Arc<Registry>,
    pub(super) finder: Arc<Finder>,
    /// The other pods; `None` if this pod is alone.
    pub(super) siblings: Option<Arc<Siblings>>,
    pub(super) route: Route,
    pub(super) ground: LinkContext,
    pub(super) pool: Pool,
    /// Cancelled when the pod begins to stop: no call is accepted then.
    pub(super) stopping: CancellationToken,
    /// Dials targets of the cloud for edges.
    pub(super) backend: Backend,
    /// Whose an address is.
    pub(super) addresses: Arc<AddressBook>,
    /// Ports of nodes that are led here, and which of them are those of their loopback.
    pub(super) ports: watch::Receiver<ProxyPorts>,
    /// Dials for clients what is at no node.
    pub(super) direct: DirectDialer,
    /// Who may reach what through this pod.
    pub(super) policies: Policies,
    /// Permits for searches that run at once for all edges.
    pub(super) searches: Arc<Semaphore>,
    /// Permits for pinging older links of nodes that have linked anew.
    pub(super) moves: Arc<Semaphore>,
}
