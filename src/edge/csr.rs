//! The certificate by which an edge proves itself, once `[mode.edge.csr]` has had it issued.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use tokio_rustls::rustls::ClientConfig;
use tracing::debug;
#[cfg(feature = "kubernetes")]
use tracing::info_span;

use crate::config::edge::Csr;
#[cfg(feature = "kubernetes")]
use crate::csr::{Keeper, Names, Profile};
use crate::drain::Drain;
use crate::names::NodeName;
use crate::net::reload::fingerprint;
use crate::net::tls::{ClientSettings, Ends, Identity, Trust};
#[cfg(feature = "kubernetes")]
use crate::registry::Cluster;

/// Where it is, and by whom the cloud's own is believed. Cheap to clone; clones share what was read.
#[derive(Debug, Clone)]
pub(super) struct OwnCertificate {
    /// Certificate and key.
    pub(super) file: PathBuf,
    /// The file of authorities.
    pub(super) ca: PathBuf,
    /// What was read last.
    kept: Arc<Mutex<Option<Kept>>>,
}

#[derive(Debug)]
struct Kept {
    /// The fingerprint of the files.
    text: u64,
    tls: Arc<ClientConfig>,
}

impl OwnCertificate {
    pub(super) fn new(file: PathBuf, ca: PathBuf) -> Self {
        Self { file, ca, kept: Arc::default() }
    }

    /// TLS with the certificate, as it stands now; `None`: there is none yet, or it is over, and the token has to do. As long as
    /// the files' text stays it is the same, with the tickets of the links before.
    pub(super) async fn tls(&self) -> Option<Arc<ClientConfig>> {
        let Self { file, ca, kept } = self.clone();
        let read = move || {
            let texts = [&file, &ca].map(|path| std::fs::read(path).unwrap_or_default());
            let ends = Ends::of(&texts[0]);
            let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
            if ends.is_some_and(|ends| ends.first < now) {
                return Err("it is over".to_owned());
            }
            let (text, mut kept) = (fingerprint(&texts), kept.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(kept) = kept.as_ref().filter(|kept| kept.text == text) {
                return Ok(kept.tls.clone());
            }
            let identity = Some(Identity { cert: file.clone(), key: file });
            let settings = ClientSettings { trust: Trust::Ca(ca), identity, alpn: vec![b"h2".to_vec()] };
            let tls = settings.load().map_err(|cause| cause.to_string())?.load();
            *kept = Some(Kept { text, tls: tls.clone() });
            Ok(tls)
        };
        // Read for each link: links are dialled seldom, and a certificate that was renewed counts at once.
        match tokio::task::spawn_blocking(read).await {
            Ok(Ok(config)) => Some(config),
            Ok(Err(cause)) => {
                debug!("no certificate is shown to the cloud: {cause}");
                None
            }
            Err(_) => None,
        }
    }
}

/// Has it issued and renewed until draining begins. `report` gets the condition of readiness and its state.
#[cfg(feature = "kubernetes")]
pub(super) fn keep(
    csr: Csr,
    node: &NodeName,
    drain: &Drain,
    report: impl Fn(&'static str, Result<(), String>) + Send + Sync + 'static,
) {
    let Csr { cluster, file, lifetime, node_ip } = csr;
    let names = Names::Fixed(node_ip.iter().map(ToString::to_string).chain([node.to_string()]).collect());
    let cluster = Cluster { kubeconfig: cluster.kubeconfig, namespace: None };
    let keeper = Keeper::new(cluster, Profile::Agent, file, names, lifetime);
    let report = move |state| report(Profile::Agent.condition(), state);
    drain.spawn(info_span!("csr"), keeper.keep(report, drain.clone()));
}

/// Does nothing: a build without Kubernetes has no cluster in its settings.
#[cfg(not(feature = "kubernetes"))]
pub(super) fn keep(_: Csr, _: &NodeName, _: &Drain, _: impl Fn(&'static str, Result<(), String>)) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::tests::Authority;
    use std::ops::Range;

    /// Issues one for those years, into one file with its key.
    fn issue(ca: &Authority, years: Range<i32>) -> PathBuf {
        let Identity { cert, key } = ca.issue_for("agent", "node1", years);
        let file = cert.with_extension("pem");
        let both = [cert, key].map(|part| std::fs::read_to_string(part).unwrap()).concat();
        std::fs::write(&file, both).unwrap();
        file
    }

    #[tokio::test]
    async fn a_certificate_that_is_over_is_not_shown() {
        let ca = Authority::new("ca");
        for (years, is_shown) in [(2020..2021, false), (2020..4000, true)] {
            let own = OwnCertificate::new(issue(&ca, years), ca.ca());
            assert_eq!(own.tls().await.is_some(), is_shown);
        }
    }

    #[tokio::test]
    async fn tickets_are_kept_from_link_to_link_until_the_certificate_is_renewed() {
        let ca = Authority::new("ca");
        let own = OwnCertificate::new(issue(&ca, 2020..4000), ca.ca());
        let (first, second) = (own.tls().await.unwrap(), own.clone().tls().await.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        issue(&ca, 2020..4000);
        let renewed = own.tls().await.unwrap();
        assert!(!Arc::ptr_eq(&first, &renewed) && Arc::ptr_eq(&renewed, &own.tls().await.unwrap()));
        issue(&ca, 2020..2021);
        assert!(own.tls().await.is_none());
    }
}
