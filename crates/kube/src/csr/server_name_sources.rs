//! The lookup of names and addresses in the cluster; requester and approver use the same.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Service;
use kube::Api;

use crate::cluster::Cluster;
use crate::csr::apiserver_names::ApiserverNames;
use crate::csr::error::{CsrError, with_timeout};
use crate::csr::names::{LOOPBACK, add_service_names, canonical, is_node_port};
use crate::csr::reachable_names::reachable_names;

/// Where to look up the names and addresses by which clients reach the servers.
///
/// The renewer requests a certificate for them, and the approver denies a server's request for any other name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerNameSources {
    /// Services in the servers' namespace.
    pub services: Vec<String>,
    /// Additional names and addresses.
    pub names: BTreeSet<String>,
}

/// The names and addresses that a certificate needs, as looked up in the cluster.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ResolvedCertificateNames {
    /// All names and addresses, including loopback, in the form that certificates use.
    pub(crate) names: BTreeSet<String>,
    /// Name and namespace of the first Service that does not exist.
    pub(crate) missing: Option<(String, String)>,
}

impl ServerNameSources {
    /// Looks up the Services in the namespace of `cluster`. Sends no request if there are none.
    ///
    /// # Errors
    ///
    /// Fails if kube-apiserver does not answer or does not authorize the request.
    pub(crate) async fn look_up(&self, cluster: &Cluster) -> Result<ResolvedCertificateNames, CsrError> {
        let mut found = ResolvedCertificateNames::default();
        let mut all = self.names.clone();
        all.extend(LOOPBACK.map(str::to_owned));
        if !self.services.is_empty() {
            let (client, namespace) = cluster.connect().await?;
            let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
            let domain = cluster.domain().await;
            let mut nodes = None;
            for name in &self.services {
                let Some(service) = with_timeout(api.get_opt(name)).await? else {
                    found.missing.get_or_insert_with(|| (name.clone(), namespace.clone()));
                    continue;
                };
                // Nodes are listed only if a Service needs them, and once: there may be thousands.
                if is_node_port(&service) && nodes.is_none() {
                    let apiserver = ApiserverNames::look_up(cluster, &client).await?;
                    nodes = Some(reachable_names(client.clone(), &apiserver).await?);
                }
                add_service_names(&service, nodes.as_ref().unwrap_or(&BTreeSet::new()), &domain, &mut all);
            }
        }
        found.names = canonical(all);
        Ok(found)
    }
}
