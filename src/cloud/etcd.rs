//! How a pod reaches an etcd.

use crate::config::cloud::EtcdSettings;
use crate::net::tls::Identity;
use crate::registry::EtcdAccess;

/// How to reach an etcd.
pub(super) fn etcd_access(etcd: EtcdSettings) -> EtcdAccess {
    EtcdAccess {
        members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
        ca: etcd.ca,
        identity: etcd.identity.map(|(cert, key)| Identity { cert, key }),
        login: etcd.login,
    }
}
