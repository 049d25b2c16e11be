//! Names and addresses of kube-apiserver. Its signers' CA often issued its own certificate too, so a server
//! certificate with one of these names could impersonate it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};

use crate::cluster::Cluster;
use crate::csr::error::{CsrError, with_timeout};

/// The known names and addresses of kube-apiserver.
#[derive(Debug, Clone, Default)]
pub struct ApiserverNames(BTreeSet<String>);

impl ApiserverNames {
    /// Adds `hosts` to the names that kube-apiserver has in every cluster. Ignores loopback names: each server's
    /// certificate contains them, and to use them an attacker must already control the machine.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Self {
        let hosts = hosts.into_iter().map(|host| normalized(&host));
        Self(hosts.filter(|host| !is_loopback(host)).collect())
    }

    /// Returns the names from the cluster's config and from the Service `kubernetes` with its endpoints.
    ///
    /// # Errors
    ///
    /// Fails if kube-apiserver does not answer or does not authorize the request.
    pub(crate) async fn look_up(cluster: &Cluster, client: &Client) -> Result<Self, CsrError> {
        let services: Api<Service> = Api::namespaced(client.clone(), DEFAULT);
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), DEFAULT);
        let service = with_timeout(services.get_opt(KUBERNETES)).await?;
        let slice = with_timeout(slices.get_opt(KUBERNETES)).await?;
        let own = service.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let endpoints = slice.into_iter().flat_map(|slice| slice.endpoints).flat_map(|one| one.addresses);
        Ok(Self::new(cluster.apiserver_names().await?.into_iter().chain(own).chain(endpoints)))
    }

    /// Returns true if this name or address, or one that a wildcard covers, belongs to kube-apiserver.
    pub fn is_at(&self, name: &str) -> bool {
        let name = normalized(name);
        name.contains('*')
            || name == KUBERNETES
            || name.starts_with("kubernetes.default")
            || self.0.contains(&name)
    }
}

/// Normalizes a name or address for comparison. An IPv4-mapped IPv6 address becomes IPv4.
fn normalized(host: &str) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
    name.parse::<IpAddr>().map_or(name, |ip| ip.to_canonical().to_string())
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback())
}

/// The Service of kube-apiserver, and the name of its EndpointSlice.
const KUBERNETES: &str = "kubernetes";
const DEFAULT: &str = "default";
