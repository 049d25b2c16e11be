//! What this process gets from Kubernetes. `api` starts the watches and makes the requests, in builds with Kubernetes.

#[cfg(feature = "kubernetes")]
pub(crate) mod api;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use tunnel_base::addresses::cluster_state::{KnownEdgePods, KnownNodes, ServiceEndpoints};
use tunnel_base::policy::tokens::{PodProof, TokenError};
use tunnel_net::limiter::Source;

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

/// Judges the ServiceAccount tokens of edges' pods.
pub(crate) trait PodTokenReviewer: Debug + Send + Sync {
    /// Returns what a token from this source proves. [`TokenError::PodTokenUnchecked`] says that this is not known now.
    fn review<'a>(&'a self, token: &'a str, from: &'a Source) -> BoxFuture<'a, Result<PodProof, TokenError>>;

    /// Returns an error if a proof is no longer valid.
    fn recheck(&self, proof: &PodProof) -> Result<(), TokenError>;

    /// Returns a receiver of the known pods, whose changes may end a proof.
    fn pods(&self) -> watch::Receiver<KnownEdgePods>;
}
