//! By what kube-apiserver is reached: its signers' authority is often the one by which it is believed, so that a server with
//! one of these could pose as it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};

use super::error::{CsrError, within};
use crate::registry::Cluster;

/// The names and addresses of kube-apiserver, as far as they are known.
#[derive(Debug, Clone, Default)]
pub struct Apiserver(BTreeSet<String>);

impl Apiserver {
    /// `hosts` are known beside the names that it has in every cluster. Those of loopback do not count: who listens there
    /// has the machine already, and each pod's certificate has them.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Self {
        let hosts = hosts.into_iter().map(|host| plain(&host));
        Self(hosts.filter(|host| !is_loopback(host)).collect())
    }

    /// What this cluster's files say, and the Service `kubernetes` with its endpoints, which all clusters have.
    ///
    /// # Errors
    ///
    /// kube-apiserver does not answer, or does not let us.
    pub(super) async fn look_up(cluster: &Cluster, client: &Client) -> Result<Self, CsrError> {
        let services: Api<Service> = Api::namespaced(client.clone(), DEFAULT);
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), DEFAULT);
        let service = within(services.get_opt(KUBERNETES)).await?;
        let slice = within(slices.get_opt(KUBERNETES)).await?;
        let own = service.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let endpoints = slice.into_iter().flat_map(|slice| slice.endpoints).flat_map(|one| one.addresses);
        Ok(Self::new(cluster.hosts().await?.into_iter().chain(own).chain(endpoints)))
    }

    /// Whether this name or address, or one that it covers, is kube-apiserver's.
    pub fn is_at(&self, name: &str) -> bool {
        let name = plain(name);
        name.contains('*')
            || name == KUBERNETES
            || name.starts_with("kubernetes.default")
            || self.0.contains(&name)
    }
}

/// In the one form in which two of them are compared: IPv4 that is dressed as IPv6 is IPv4.
fn plain(host: &str) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
    name.parse::<IpAddr>().map_or(name, |ip| ip.to_canonical().to_string())
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback())
}

/// Its Service, and the EndpointSlice of that.
const KUBERNETES: &str = "kubernetes";
const DEFAULT: &str = "default";
