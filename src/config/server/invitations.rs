//! `[server.invitations]`: where servers store invitations and joined nodes.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::cluster::{self, ClusterSettings};
use crate::config::server::registry::{self, EtcdSettings};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use crate::parts;

/// The store of invitations and joined nodes, shared by all servers of a cloud.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invitations {
    /// A file on a shared disk.
    File(PathBuf),
    /// One key of etcd, equal to the prefix.
    Etcd(EtcdSettings),
    /// The Secret of this name.
    Secret(ClusterSettings, String),
}

/// A value of `store` in `[server.invitations]`: the kind of store to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InvitationStore {
    /// No store: the server takes no invitations.
    None,
    /// A file on a disk that the servers share.
    File,
    Etcd,
    /// A Secret of Kubernetes.
    Secret,
}

/// Reads the table. Returns `None` if invitations are disabled.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<Invitations> {
    let mut table = cloud.table("invitations", report);
    let kind = table.read("store", kind, report).unwrap_or(InvitationStore::None);
    let file = table.read("file", value::file_path, report);
    let etcd = registry::etcd(&mut table, kind == InvitationStore::Etcd, ETCD_PREFIX, report);
    let secret = table.read("secret", cluster::name, report).flatten();
    let kind = match parts::INVITATIONS {
        Err(why) if kind != InvitationStore::None => {
            table.error("store", None, why, report);
            InvitationStore::None
        }
        _ => kind,
    };
    let store = match kind {
        InvitationStore::None => None,
        InvitationStore::File => {
            if !table.has("file") {
                table.error("file", None, "set a file on a disk that all servers share", report);
            }
            file.map(Invitations::File)
        }
        InvitationStore::Etcd => Some(Invitations::Etcd(etcd)),
        InvitationStore::Secret => match cluster::reached(parts::CLUSTER, env) {
            Ok(cluster) => Some(Invitations::Secret(cluster, secret.unwrap_or_else(|| SECRET.to_owned()))),
            Err(why) => {
                table.error("store", Some("requires Kubernetes".to_owned()), why, report);
                None
            }
        },
    };
    table.finish(report);
    store
}

fn kind(value: &DeValue<'_>) -> Result<InvitationStore, ValueError> {
    match value::text(value)?.as_str() {
        "none" => Ok(InvitationStore::None),
        "file" => Ok(InvitationStore::File),
        "etcd" => Ok(InvitationStore::Etcd),
        "secret" => Ok(InvitationStore::Secret),
        _ => Err(value::wrong(value, "expected \"none\", \"file\", \"etcd\" or \"secret\"")),
    }
}

/// Apart from the records that CoreDNS reads.
const ETCD_PREFIX: &str = "/tunnel";

/// Default name of the Secret.
const SECRET: &str = "tunnel-invitations";
