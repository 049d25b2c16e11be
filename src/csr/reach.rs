//! By what a pod's ports are reached, looked up in the cluster: alike by who asks for the certificate and by who approves it.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Service;
use kube::Api;

use super::error::{CsrError, within};
use super::{Apiserver, names, node};
use crate::registry::Cluster;

/// Whose names and addresses stand in a server's certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// Services of the pods' namespace.
    pub services: Vec<String>,
    /// Names and addresses beside what those have.
    pub names: BTreeSet<String>,
}

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// All names and addresses, loopback's too, each as a certificate has it.
    pub(super) names: BTreeSet<String>,
    /// The first of the Services that is not there, and the namespace in which it should be.
    pub(super) missing: Option<(String, String)>,
}

impl Reach {
    /// Looks the Services up, in the namespace of `cluster`; asks nothing where there are none.
    ///
    /// # Errors
    ///
    /// kube-apiserver does not answer, or does not let us.
    pub(super) async fn look_up(&self, cluster: &Cluster) -> Result<Found, CsrError> {
        let (mut found, mut all) = (Found::default(), self.names.clone());
        all.extend(names::LOOPBACK.map(str::to_owned));
        if !self.services.is_empty() {
            let (client, namespace) = cluster.connect().await?;
            let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
            let (domain, mut nodes) = (cluster.domain().await, None);
            for name in &self.services {
                let Some(service) = within(api.get_opt(name)).await? else {
                    found.missing.get_or_insert_with(|| (name.clone(), namespace.clone()));
                    continue;
                };
                if names::is_node_port(&service) && nodes.is_none() {
                    let apiserver = Apiserver::look_up(cluster, &client).await?;
                    nodes = Some(node::reached(client.clone(), &apiserver).await?);
                }
                names::of_service(&service, nodes.as_ref().unwrap_or(&BTreeSet::new()), &domain, &mut all);
            }
        }
        found.names = names::canonical(all);
        Ok(found)
    }
}
