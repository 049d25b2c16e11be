//! What this process gets from Kubernetes. `api` starts the watches and makes the requests, in builds with Kubernetes.

#[cfg(feature = "kubernetes")]
pub(crate) mod api;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::watch;

use tunnel_base::addresses::cluster_state::{KnownNodes, PodTokenReviewer, ServiceEndpoints};

/// The pods of the servers, as a Service lists them.
#[derive(Debug, Clone)]
pub(crate) struct ServerPods {
    /// All pods.
    pub(crate) endpoints: watch::Receiver<ServiceEndpoints>,
    /// The gRPC addresses of the peers.
    pub(crate) peers: watch::Receiver<Vec<SocketAddr>>,
    /// The reason why the pods cannot be watched; `None` while they are.
    pub(crate) unwatched: watch::Receiver<Option<String>>,
}

/// The Nodes, and who judges the tokens of edges' pods, if the config has their ServiceAccount.
pub(crate) type EdgeWatches = (watch::Receiver<KnownNodes>, Option<Arc<dyn PodTokenReviewer>>);
