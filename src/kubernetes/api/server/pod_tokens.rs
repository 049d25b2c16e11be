//! Tokens of edges' pods.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::kubernetes::ServiceAccountConfig;
use crate::kubernetes::PodTokenReviewer;
use crate::kubernetes::api::server::access;
use tunnel_base::addresses::cluster_state::{KnownEdgePods, KnownNodes};
use tunnel_base::drain::Drain;
use tunnel_base::policy::tokens::{PodProof, TokenError};
use tunnel_kube::pod_tokens::last_known::LastKnown;
use tunnel_kube::pod_tokens::{PodTokenSettings, PodTokens};
use tunnel_net::limiter::Source;

/// Follows the pods of a ServiceAccount, and returns who judges their tokens. `known` is what an earlier process knew.
/// Problems with the cluster appear in `readiness`.
pub(crate) fn follow(
    config: &ServiceAccountConfig,
    known: LastKnown,
    nodes: watch::Receiver<KnownNodes>,
    readiness: &Readiness,
    drain: &Drain,
) -> Arc<dyn PodTokenReviewer> {
    let ServiceAccountConfig { name, audience, outage, cluster, file } = config.clone();
    let account = name.unwrap_or_default();
    let settings = PodTokenSettings { cluster: access(&cluster), account, audience, outage, file };
    let readiness = readiness.clone();
    let tokens = PodTokens::new(settings, known, move |state| readiness.set_degraded("pods of edges", state));
    drain.spawn(info_span!("edge_pods"), tokens.clone().follow(nodes, drain.clone()));
    tokens
}

impl PodTokenReviewer for PodTokens {
    fn review<'a>(&'a self, token: &'a str, from: &'a Source) -> BoxFuture<'a, Result<PodProof, TokenError>> {
        Box::pin(Self::review(self, token, from))
    }

    fn recheck(&self, proof: &PodProof) -> Result<(), TokenError> {
        Self::recheck(self, proof)
    }

    fn pods(&self) -> watch::Receiver<KnownEdgePods> {
        Self::pods(self)
    }
}
