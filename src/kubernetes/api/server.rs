//! What a server and the commands for it watch and request.

pub(crate) mod addresses;
pub(crate) mod cluster;
pub(crate) mod csr;
pub(crate) mod keep;
pub(crate) mod pod_tokens;
pub(crate) mod secret;

use crate::config::cluster::ClusterSettings;
use tunnel_kube::cluster::Cluster;

/// Converts the config of a cluster.
fn access(cluster: &ClusterSettings) -> Cluster {
    let ClusterSettings { kubeconfig, namespace } = cluster.clone();
    Cluster { kubeconfig, namespace }
}
