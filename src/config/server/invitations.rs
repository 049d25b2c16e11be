//! `[server.invitations]`: where servers store invitations and joined nodes.

use crate::config::value::forms::FilePath;

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::config::cluster::{ClusterSettings, ObjectName};
use crate::config::required_cluster::required_cluster;
use crate::config::server::registry::{self, EtcdSettings};
use crate::config::table::ConfigTableReader;

/// `[server.invitations]`: the invitations of a cloud (tunnel invite, tunnel join), and the nodes and users' devices
/// that have joined. A node that has joined must use the token that it made then, or one from a line in the token file;
/// the default token does not apply to it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct InvitationConfig {
    /// Store for invitations, joined nodes and users' devices; all servers need the same one. "none": no invitations.
    /// "file": a file on a disk that all servers share. "etcd": a key of etcd. "secret": a Secret in the servers'
    /// namespace of Kubernetes, which their role must allow to get, create and update. Codes and tokens are stored as
    /// hashes only. With a store the file peer_ca of `[server.links]` is required: machines receive it when they join.
    pub store: InvitationStoreKind,
    /// For "file": its path. A lock file and a temporary file are created next to it, and its directory if it is
    /// missing. No default.
    ///
    /// Example: `"/var/lib/tunnel/enrolled"`
    pub file: Option<FilePath>,
    /// For "secret": name of the Secret, which is created if it does not exist.
    #[educe(Default = "tunnel-invitations".into())]
    pub secret: ObjectName,
    /// The table below it.
    #[serde(skip)]
    pub etcd: EtcdSettings,
    /// The cluster of the Secret; `None` for other stores.
    #[serde(skip)]
    pub cluster: Option<ClusterSettings>,
}

/// The kind of store of invitations and joined nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InvitationStoreKind {
    /// No store: the server takes no invitations.
    #[default]
    None,
    /// A file on a disk that the servers share.
    File,
    /// One key of etcd, below the prefix.
    Etcd,
    /// A Secret of Kubernetes.
    Secret,
}

/// Reads the table.
pub(crate) fn read(cloud: &mut ConfigTableReader<'_>) -> InvitationConfig {
    let mut table = cloud.table("invitations");
    let mut invitations: InvitationConfig = table.fields();
    let is_etcd = invitations.store == InvitationStoreKind::Etcd;
    invitations.etcd = registry::etcd(&mut table, is_etcd, ETCD_PREFIX);
    if invitations.store == InvitationStoreKind::File && !table.has("file") {
        table.error("file", None, "set a file on a disk that all servers share");
    }
    let is_secret = invitations.store == InvitationStoreKind::Secret;
    invitations.cluster = required_cluster(&table, "store", is_secret);
    table.close(&invitations);
    invitations
}

/// Apart from the records that CoreDNS reads.
const ETCD_PREFIX: &str = "/tunnel";
