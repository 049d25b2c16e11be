//! Keeps the certificates of `[mode.cloud.csr]` issued.

use super::Pod;
#[cfg(feature = "kubernetes")]
use super::kubernetes::reached;
use crate::config::cloud::Cloud;
#[cfg(feature = "kubernetes")]
use crate::config::cloud::ServerNames;
#[cfg(feature = "kubernetes")]
use crate::csr::{Keeper, Names, Profile, Reach};

/// The certificates that a pod has signers issue; by default none.
#[derive(Debug, Default)]
#[must_use = "they are renewed by `Pod::keep`"]
pub struct Issued {
    #[cfg(feature = "kubernetes")]
    keepers: Vec<Keeper>,
}

#[cfg(feature = "kubernetes")]
impl Issued {
    /// Completes once there is a certificate of each kind that the settings ask for; until then a pod that shows them
    /// cannot start. It tries for ever, and says in the log why it has to. Cancel safe.
    pub async fn first(settings: &Cloud) -> Self {
        let mut keepers = keepers(settings);
        futures_util::future::join_all(keepers.iter_mut().map(Keeper::first)).await;
        Self { keepers }
    }
}

#[cfg(not(feature = "kubernetes"))]
impl Issued {
    /// Asks for nothing: a build without Kubernetes has no cluster in its settings.
    pub async fn first(_: &Cloud) -> Self {
        Self::default()
    }
}

impl Pod {
    /// Renews them until the pod stops; `/readyz` shows what is in the way.
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(unused_variables, clippy::needless_pass_by_value, reason = "there are none then")
    )]
    pub fn keep(&self, issued: Issued) {
        #[cfg(feature = "kubernetes")]
        for keeper in issued.keepers {
            let (links, readiness) = (self.stopping.links.clone(), self.readiness.clone());
            let condition = keeper.profile().condition();
            let report = move |state| readiness.note(condition, state);
            links.spawn(tracing::info_span!("csr"), keeper.keep(report, links.clone()));
        }
    }
}

#[cfg(feature = "kubernetes")]
fn keepers(settings: &Cloud) -> Vec<Keeper> {
    let Some(csr) = &settings.csr else { return Vec::new() };
    let server = csr
        .server
        .clone()
        .map(|ServerNames { services, names }| (Profile::Server, Names::Of(Reach { services, names })));
    let proxy_client = csr.proxy_client.then(|| (Profile::ProxyClient, Names::Fixed(Default::default())));
    let keeper = |(profile, names): (Profile, Names)| {
        Keeper::new(reached(&csr.cluster), profile, profile.file(&csr.dir), names, csr.lifetime)
    };
    server.into_iter().chain(proxy_client).map(keeper).collect()
}
