//! The certificate by which an edge proves itself, once `[mode.edge.csr]` has had it issued.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use tokio_rustls::rustls::ClientConfig;
use tracing::debug;
#[cfg(feature = "kubernetes")]
use tracing::info_span;

#[cfg(feature = "kubernetes")]
use super::Edge;
#[cfg(feature = "kubernetes")]
use crate::config::edge::{Csr, EdgeSettings};
#[cfg(feature = "kubernetes")]
use crate::csr::{Keeper, Names, Profile};
use crate::net::tls::{ClientSettings, Ends, Identity, Trust};
#[cfg(feature = "kubernetes")]
use crate::registry::Cluster;

/// Where it is, and by whom the cloud's own is believed.
#[derive(Debug, Clone)]
pub(super) struct OwnCertificate {
    /// Certificate and key.
    pub(super) file: PathBuf,
    /// The file of authorities.
    pub(super) ca: PathBuf,
}

impl OwnCertificate {
    /// TLS with the certificate, as it stands now; `None`: there is none yet, or it is over, and the token has to do.
    pub(super) async fn tls(&self) -> Option<Arc<ClientConfig>> {
        let Self { file, ca } = self.clone();
        let read = move || {
            let ends = std::fs::read(&file).ok().and_then(|text| Ends::of(&text));
            let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
            if ends.is_some_and(|ends| ends.first < now) {
                return Err("it is over".to_owned());
            }
            let identity = Some(Identity { cert: file.clone(), key: file });
            let settings = ClientSettings { trust: Trust::Ca(ca), identity, alpn: vec![b"h2".to_vec()] };
            settings.load().map_err(|cause| cause.to_string())
        };
        // Read for each link: links are dialled seldom, and a certificate that was renewed counts at once.
        match tokio::task::spawn_blocking(read).await {
            Ok(Ok(config)) => Some(config.load()),
            Ok(Err(cause)) => {
                debug!("no certificate is shown to the cloud: {cause}");
                None
            }
            Err(_) => None,
        }
    }
}

/// Has it issued and renewed until the edge stops, if the settings ask for that.
#[cfg(feature = "kubernetes")]
pub(super) fn keep(settings: &EdgeSettings, edge: &Edge) {
    let Some(Csr { cluster, file, lifetime, node_ip }) = settings.csr.clone() else { return };
    let node = settings.client.node.to_string();
    let names = Names::Fixed(node_ip.iter().map(ToString::to_string).chain([node]).collect());
    let cluster = Cluster { kubeconfig: cluster.kubeconfig, namespace: None };
    let keeper = Keeper::new(cluster, Profile::Agent, file, names, lifetime);
    let (readiness, condition) = (edge.readiness.clone(), Profile::Agent.condition());
    let report = move |state| readiness.note(condition, state);
    edge.links.spawn(info_span!("csr"), keeper.keep(report, edge.links.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::tests::Authority;

    #[tokio::test]
    async fn a_certificate_that_is_over_is_not_shown() {
        let ca = Authority::new("ca");
        for (years, is_shown) in [(2020..2021, false), (2020..4000, true)] {
            let Identity { cert, key } = ca.issue_for("agent", "node1", years);
            let file = cert.with_extension("pem");
            let both = [cert, key].map(|part| std::fs::read_to_string(part).unwrap()).concat();
            std::fs::write(&file, both).unwrap();
            assert_eq!(OwnCertificate { file, ca: ca.ca() }.tls().await.is_some(), is_shown);
        }
    }
}
