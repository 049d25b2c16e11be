//! What this process gets from Kubernetes: one module for each optional part. What stands in for a part that is not
//! compiled is next to it. It is never called with a cluster, because the config has none then.

#[cfg(feature = "addresses")]
pub(crate) mod addresses;
#[cfg(feature = "cluster")]
pub(crate) mod cluster;
#[cfg(feature = "csr")]
pub mod csr;
#[cfg(feature = "keep")]
pub(crate) mod keep;
#[cfg(all(feature = "cluster", feature = "invitations"))]
pub(crate) mod secret;

use std::collections::BTreeMap;

use tokio::sync::watch;

/// All Nodes of the cluster, each with whether it has the edge label; `None` until they are known.
pub(crate) type ClusterNodes = watch::Receiver<Option<BTreeMap<String, bool>>>;

/// Queries no cluster.
#[cfg(not(feature = "cluster"))]
pub(crate) mod cluster {
    use std::collections::BTreeSet;
    use std::net::{IpAddr, SocketAddr};

    use futures_util::future::BoxFuture;
    use tokio::sync::watch;

    use crate::config::cluster::ClusterSettings;
    use crate::kubernetes::ClusterNodes;
    use crate::publish::RecordStore;
    use tunnel_base::drain::Drain;

    #[derive(Debug)]
    pub(crate) struct ServerPods;

    impl ServerPods {
        pub(crate) fn follow(_: Option<&ClusterSettings>, _: Option<IpAddr>, _: u16, _: &Drain) -> Self {
            Self
        }

        pub(crate) fn peers(&self) -> Option<watch::Receiver<Vec<SocketAddr>>> {
            None
        }

        pub(crate) fn unlisted(&self) -> Option<watch::Receiver<Option<String>>> {
            None
        }

        pub(crate) fn records(
            &self,
            _: &ClusterSettings,
            _: String,
            _: IpAddr,
            _: impl Fn(IpAddr) -> BoxFuture<'static, bool>,
        ) -> Option<Box<dyn RecordStore>> {
            None
        }
    }

    pub(crate) fn follow_nodes(
        _: &ClusterSettings,
        _: Option<(String, String)>,
        _: &Drain,
    ) -> Option<ClusterNodes> {
        None
    }

    pub(crate) async fn nodes(_: ClusterSettings, _: Option<&str>) -> Result<BTreeSet<String>, String> {
        Ok(BTreeSet::new())
    }
}

/// Stores no invitations.
#[cfg(all(not(feature = "cluster"), feature = "invitations"))]
pub(crate) mod secret {
    use crate::config::cluster::ClusterSettings;
    use crate::invitations::store::SharedState;

    pub(crate) fn shared(_: &ClusterSettings, _: String) -> Option<Box<dyn SharedState>> {
        None
    }
}

/// Watches no addresses.
#[cfg(not(feature = "addresses"))]
pub(crate) mod addresses {
    use std::sync::Arc;

    use crate::admin::readiness::Readiness;
    use crate::config::cluster::ClusterSettings;
    use tunnel_base::addresses::AddressBook;
    use tunnel_base::drain::Drain;

    pub(crate) fn follow(_: &ClusterSettings, _: &Arc<AddressBook>, _: &Readiness, _: &Drain) {}
}

/// Requests no certificates.
#[cfg(not(feature = "csr"))]
pub mod csr {
    use crate::admin::readiness::Readiness;
    use crate::config::server::kubernetes::{EdgeCsrConfig, ServerCsrConfig};
    use tunnel_base::drain::Drain;
    use tunnel_base::names::NodeName;

    /// No certificates.
    #[derive(Debug, Default)]
    pub struct IssuedCertificates;

    impl IssuedCertificates {
        /// Requests nothing.
        pub async fn wait_ready(_: Option<&ServerCsrConfig>) -> Self {
            Self
        }

        pub(crate) fn keep(self, _: &Readiness, _: &Drain) {}
    }

    pub(crate) fn keep_edge(
        _: EdgeCsrConfig,
        _: &NodeName,
        _: &Drain,
        _: impl Fn(&'static str, Result<(), String>),
    ) {
    }
}

/// Maintains no objects.
#[cfg(not(feature = "keep"))]
pub(crate) mod keep {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use tokio::sync::watch;

    use crate::admin::readiness::Readiness;
    use crate::config::server::kubernetes::{NodeNameSettings, NodePortsConfig};
    use tunnel_base::drain::Drain;
    use tunnel_base::policy::ports::ProxyPorts;

    pub(crate) fn ports(
        _: Option<&NodePortsConfig>,
        _: BTreeSet<u16>,
        _: &Readiness,
        _: &Drain,
    ) -> watch::Receiver<ProxyPorts> {
        watch::Sender::default().subscribe()
    }

    pub(crate) fn node_names(
        _: Option<&NodeNameSettings>,
        _: &str,
        _: &Readiness,
        _: &Drain,
    ) -> watch::Receiver<BTreeSet<IpAddr>> {
        watch::Sender::default().subscribe()
    }
}
