//! Certificates that the cluster's signers issue for servers, and the approval of all.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::cluster::ClusterSettings;
use crate::config::kubernetes::{ProfileKind, ServerCsrConfig};
use crate::kubernetes::api::server::access;
use tunnel_base::drain::Drain;
use tunnel_kube::csr::approver::Approver;
use tunnel_kube::csr::profile::Profile;
use tunnel_kube::csr::renewer::{CertificateNameSource, CertificateRenewer};
use tunnel_kube::csr::server_name_sources::ServerNameSources;
use tunnel_net::reload::reload_now;

/// Waits until there is a certificate of each kind that the config requires; a server that presents them cannot start
/// earlier. Retries forever and logs the reasons. Cancel safe.
pub(crate) async fn wait_issued(csr: &ServerCsrConfig) {
    join_all(renewers(csr).iter_mut().map(CertificateRenewer::first)).await;
}

/// Renews a server's certificates until draining starts; `readiness` reports what prevents it.
pub(crate) fn keep_server(csr: &ServerCsrConfig, readiness: &Readiness, drain: &Drain) {
    for renewer in renewers(csr) {
        let readiness = readiness.clone();
        let condition = renewer.profile.condition();
        let report = move |state: Result<(), String>| {
            // A listener may have waited for the first certificate.
            if state.is_ok() {
                reload_now();
            }
            readiness.set_degraded(condition, state);
        };
        drain.spawn(info_span!("csr"), renewer.keep(report, drain.clone()));
    }
}

fn renewers(csr: &ServerCsrConfig) -> Vec<CertificateRenewer> {
    let renewer = |kind: &ProfileKind| {
        let (profile, names) = match kind {
            ProfileKind::Server => {
                let services = csr.services.iter().map(|service| service.0.clone()).collect();
                let names = ServerNameSources { services, names: csr.names.clone() };
                (Profile::Server, CertificateNameSource::Of(names))
            }
            ProfileKind::ProxyClient => {
                (Profile::ProxyClient, CertificateNameSource::Fixed(Default::default()))
            }
        };
        CertificateRenewer::new(access(&csr.cluster), profile, profile.file(&csr.dir), names, csr.lifetime)
    };
    csr.profiles.iter().map(renewer).collect()
}

/// Approves and denies certificate requests until draining starts. `account` is the service account of the servers, in
/// whose namespace the `services` are. `report` receives the state of the list of requests.
pub(crate) fn approve(
    cluster: &ClusterSettings,
    account: String,
    services: Vec<String>,
    names: BTreeSet<String>,
    report: impl Fn(Result<(), String>) + Send + Sync + 'static,
    drain: &Drain,
) {
    let approver = Approver::new(access(cluster), account, ServerNameSources { services, names });
    drain.spawn(info_span!("approver"), approver.run(report, drain.clone()));
}
